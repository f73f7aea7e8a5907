"""The start of ``python -m jdllm.serve``: what it says of a checkpoint, and how it ends when it cannot listen."""

import argparse
import asyncio
import logging
import socket
import threading
from pathlib import Path

import pytest
import uvicorn

from jdllm import serve as command
from jdllm.serving import model as models

GOLDEN = Path(__file__).parent.parent / "data" / "golden"


def test_a_checkpoint_without_its_adapter_is_named(tmp_path):  # B14
    from jdllm.convert.__main__ import main as convert

    assert convert([str(GOLDEN / "llada-tiny"), str(tmp_path / "plain")]) == 0
    lines = []
    models.open_model(tmp_path / "plain", lines.append, max_rows=1, max_length=16)
    assert [line for line in lines if line.startswith("warning: ") and "D2F adapter" in line]


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
