"""guidellm's own command as a load tool."""

import json
import subprocess
import sys

import pytest

from jdllm.runtime import model_folder

pytest.importorskip("guidellm")
pytestmark = pytest.mark.clients


@pytest.fixture
def load(server, tmp_path, offline):
    """load(path, *flags) -> its report on the requests that have ended."""

    def run(path: str, *flags: str) -> dict:
        command = [sys.executable, "-m", "guidellm", "run", "--disable-console"]
        command += ["--backend", f"kind=openai_http,target={server.url},request_format={path}", *flags]
        command += ["--tokenizer", f"kind=hf_auto,model={model_folder(None)}"]
        command += ["--output", f"kind=json,path={tmp_path / 'report.json'}"]
        env = {**offline, "HF_HOME": str(tmp_path / "hf")}
        process = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=170)
        assert process.returncode == 0, process.stdout + process.stderr
        (benchmark,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
        return benchmark["requests"]

    return run


def test_orders_at_a_constant_rate_are_all_answered(load, orders, tmp_path):
    data = tmp_path / "orders.jsonl"
    rows = [{"prompt": order.message} for order in orders * 3]  # it ends where its data end
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    requests = load(
        "/v1/chat/completions",
        *("--profile", "kind=constant,rate=4", "--constraint", "kind=max_requests,count=12"),
        *("--data", f"kind=json_file,path={data}"),
    )
    assert not requests["errored"] and not requests["incomplete"]
    assert len(requests["successful"]) == 12
    answers = {order.answer for order in orders}
    for request in requests["successful"]:
        assert request["output"] in answers
        assert request["prompt_tokens"] > 0 and request["output_tokens"] > 0


def test_random_prompts_get_exactly_the_tokens_asked_for(load):
    requests = load(
        "/v1/completions",
        *("--profile", "kind=concurrent,streams=3", "--constraint", "kind=max_requests,count=12"),
        *("--data", "kind=synthetic_text,prompt_tokens=40,output_tokens=24"),
    )
    assert not requests["errored"] and len(requests["successful"]) == 12
    assert {request["output_tokens"] for request in requests["successful"]} == {24}
