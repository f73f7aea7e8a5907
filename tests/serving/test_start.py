"""The start of ``python -m jdllm.serve``: what it says of a checkpoint, and how it ends when it cannot listen."""

import argparse
import asyncio
import json
import logging
import os
import re
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import uvicorn

from jdllm import serve as command
from jdllm.runtime import SHIPPED, UsageError
from jdllm.serving import model as models

GOLDEN = Path(__file__).parent.parent / "data" / "golden"


def test_a_checkpoint_without_its_adapter_is_named(tmp_path):  # B14
    from jdllm.convert.__main__ import main as convert

    assert convert([str(GOLDEN / "llada-tiny"), str(tmp_path / "plain")]) == 0
    lines = []
    models.open_model(tmp_path / "plain", lines.append, max_rows=1, max_length=16)
    assert [line for line in lines if line.startswith("warning: ") and "D2F adapter" in line]


def test_a_checkpoint_without_a_chat_template_is_named(tmp_path):  # E10
    from jdllm.convert.__main__ import main as convert

    folder, lines = tmp_path / "plain", []
    assert convert([str(GOLDEN / "llada-tiny"), str(folder)]) == 0
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    models.open_model(folder, lines.append, max_rows=1, max_length=16)
    assert [line for line in lines if line.startswith("warning: ") and "--chat-template" in line]


def test_what_runs_beyond_the_grace_is_cut_with_an_error(monkeypatch, tmp_path, kit, byte_tokenizer):
    """SIGTERM: nothing new, a last word to those that are left, and 0."""
    engine = kit.ScriptEngine(kit.says("x", end=False), 8000, 0.01)
    served = models.ServedModel(lambda _: engine, byte_tokenizer, kit.MODEL, 1, 8000)
    monkeypatch.setattr(models, "open_model", lambda *_, **__: served)
    args = command._parser().parse_args(["--grace", "0.2"])
    body, replies = {"prompt": "a", "max_tokens": 7000}, []

    def clients(url: str) -> None:
        kit.until(lambda: httpx.get(f"{url}/ready").status_code == 200)
        with ThreadPoolExecutor(2) as pool:
            streamed = pool.submit(httpx.post, f"{url}/v1/completions", json={**body, "stream": True}, timeout=20)
            kit.until(lambda: engine.rows)
            plain = pool.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=20)
            kit.until(lambda: "jdllm_requests_waiting 1.0" in httpx.get(f"{url}/metrics").text)
            os.kill(os.getpid(), signal.SIGTERM)  # it is handled: the server has answered
            kit.until(lambda: "draining" in httpx.get(f"{url}/ready").text)
            replies.extend([httpx.post(f"{url}/v1/completions", json=body), plain.result(), streamed.result()])

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=clients, args=(command._url(listener),))
        thread.start()
        assert asyncio.run(command._serve(args, tmp_path, None, listener)) == 0
        thread.join()
    new, plain, streamed = replies
    assert (new.status_code, new.json()["error"]["code"]) == (503, "not_ready") and new.headers["retry-after"]
    assert (plain.status_code, plain.json()["error"]["code"]) == (503, "shutting_down")
    assert (
        streamed.status_code == 200
        and json.loads(streamed.text.split("data: ")[-1])["error"]["code"] == "shutting_down"
    )


@pytest.mark.parametrize("problem", [OSError(98, "Address already in use"), SystemExit(3), ValueError("odd"), None])
def test_a_server_that_cannot_start_exits_with_a_line(monkeypatch, tmp_path, caplog, problem):
    """uvicorn raises, exits by itself, or returns without having been asked to."""
    end = threading.Event()
    monkeypatch.setattr(models, "open_model", lambda *_, **__: end.wait(20))

    async def startup(self, sockets=None):
        self.should_exit = True
        if problem is not None:
            raise problem

    monkeypatch.setattr(uvicorn.Server, "startup", startup)
    args: argparse.Namespace = command._parser().parse_args([])
    caplog.set_level(logging.INFO)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert asyncio.run(command._serve(args, tmp_path, None, listener)) == 1
    end.set()
    [line] = [r.getMessage() for r in caplog.records if r.levelno == logging.CRITICAL]
    assert "could not start" in line and str(problem or "no reason") in line


def test_more_rows_than_the_device_holds_are_refused_with_the_number_that_fits(monkeypatch):
    """Keys and values of every slot are counted before anything is compiled."""
    lines: list[str] = []
    model = models.open_model(SHIPPED / "orders-d2f", lines.append, max_rows=64, max_length=512)
    monkeypatch.setattr(models, "_memory_limit", lambda device: 100_000_000)
    with pytest.raises(
        UsageError, match=r"--max-rows: 64 rows of 512 positions take .* GB: at most (\d+) fit"
    ) as refused:
        model.new_engine(lines.append)
    most = int(re.search(r"at most (\d+) fit", str(refused.value))[1])
    assert 0 < most < 64
    compiled = []
    monkeypatch.setattr("jdllm.engine.Engine.compile", lambda *_: compiled.append(1))
    monkeypatch.setattr("jdllm.engine.Engine.measure", lambda *_: None)
    models.open_model(SHIPPED / "orders-d2f", lines.append, max_rows=most, max_length=512).new_engine(lines.append)
    assert compiled == [1]
    with pytest.raises(UsageError):
        models.open_model(SHIPPED / "orders-d2f", lines.append, max_rows=most + 1, max_length=512).new_engine(print)


def test_an_empty_key_is_not_no_key(capsys):
    """What --api-key "$KEY" gives where KEY is not set must not let everyone in."""
    assert command.main(["--api-key", ""]) == 2
    assert "--api-key: is empty" in capsys.readouterr().err


def test_warming_needs_no_port_but_a_place(monkeypatch, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        args = command._parser().parse_args(["--warm-only", "--port", str(taken.getsockname()[1])])
        assert command._preflight(args)[2] is None
    assert command.main(["--warm-only", "--compile-cache", ""]) == 2
    assert "--warm-only: has nowhere" in capsys.readouterr().err
