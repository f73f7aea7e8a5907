"""lm-evaluation-harness, by its own command, on held-out orders in a local file."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jdllm.runtime import model_folder

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.clients

GENERATE = """
task: orders
dataset_path: json
dataset_kwargs:
  data_files: {{test: "{data}"}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{{text}}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["<|eot_id|>", "\\n\\n"], max_gen_toks: 64, do_sample: false}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
CHOOSE = """
task: orders
dataset_path: json
dataset_kwargs:
  data_files: {{test: "{data}"}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{{text}}}}}"
doc_to_choice: ["{{{{answer}}}}", "name: Nobody"]
doc_to_target: 0
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


@pytest.fixture
def evaluate(tmp_path, orders, written, offline):
    """evaluate(task, text, *flags) -> the process; the task reads its question from the column ``text``."""
    rows = [dict(message=order.message, prompt=written(order.message), answer=order.answer) for order in orders]
    data = tmp_path / "orders.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(task: str, text: str, *flags: str) -> subprocess.CompletedProcess:
        (tmp_path / "orders.yaml").write_text(task.format(data=data, text=text))
        command = [sys.executable, "-m", "lm_eval", "run", "--tasks", "orders", "--include_path", str(tmp_path)]
        command += ["--output_path", str(tmp_path / "out.json"), "--log_samples", *flags]
        env = {**offline, "HF_HOME": str(tmp_path / "hf")}
        return subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=170)

    return run


def exact_match(process: subprocess.CompletedProcess, folder: Path) -> float:
    """The score, and that all four orders took part."""
    assert process.returncode == 0, process.stderr
    (file,) = folder.glob("out_*.json")
    found = json.loads(file.read_text())
    assert found["n-samples"]["orders"]["effective"] == 4
    return found["results"]["orders"]["exact_match,none"]


def test_chat_completions(server, evaluate, tmp_path):
    address = f"base_url={server.url}/v1/chat/completions,model=orders-d2f,num_concurrent=2"
    process = evaluate(
        GENERATE, "message", "--model", "local-chat-completions", "--model_args", address, "--apply_chat_template"
    )
    assert exact_match(process, tmp_path) == 1.0


@pytest.mark.parametrize(
    "tokenizer, flags",
    [
        pytest.param("tokenizer_backend=None", [], id="text"),
        pytest.param(
            f"tokenizer_backend=huggingface,tokenizer={model_folder(None)}", ["--batch_size", "2"], id="local"
        ),
        pytest.param("tokenizer_backend=remote", [], id="remote"),
        pytest.param("num_concurrent=2", [], id="auto"),
    ],
)
def test_completions(server, evaluate, tmp_path, request, tokenizer, flags):
    """As text, or as ids by a tokenizer: a local one, or ours through /tokenizer_info and /tokenize, which it finds by
    itself where it is told nothing."""
    address = f"base_url={server.url}/v1/completions,model=orders-d2f,max_length=256,{tokenizer}"
    process = evaluate(GENERATE, "prompt", "--model", "local-completions", "--model_args", address, *flags)
    assert exact_match(process, tmp_path) == 1.0
    ours = request.node.callspec.id in ("remote", "auto")
    assert ("Using remote tokenizer from" in process.stdout + process.stderr) is ours


def test_a_task_with_six_stop_strings(server, evaluate, tmp_path):
    """humaneval and gsm8k-cot-llama have as many."""
    task = GENERATE.replace('"\\n\\n"', '"\\n\\n", "Q:", "</s>", "<|im_end|>"')
    assert task != GENERATE
    address = f"base_url={server.url}/v1/completions,model=orders-d2f,max_length=256,max_retries=1"
    process = evaluate(task, "prompt", "--model", "local-completions", "--model_args", address)
    assert exact_match(process, tmp_path) == 1.0


def test_a_likelihood_is_refused_with_the_reason(server, evaluate):
    address = f"base_url={server.url}/v1/completions,model=orders-d2f,max_length=256,max_retries=1"
    process = evaluate(CHOOSE, "prompt", "--model", "local-completions", "--model_args", address)
    assert process.returncode != 0
    assert "a masked model gives a prompt no probabilities" in process.stdout + process.stderr
