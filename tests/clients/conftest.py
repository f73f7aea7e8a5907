"""Clients as their authors ship them, against live servers: ours as a process with the shipped model and, where a test
has to hold an answer back, the scripted one of tests/serving."""

import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from server_process import Process

from jdllm.runtime import model_folder
from jdllm.train.tasks import Task, held_out


def _load(path: Path):
    """There are no packages to import it from."""
    spec = importlib.util.spec_from_file_location("scripted_server", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


scripted = _load(Path(__file__).parent.parent / "serving" / "conftest.py")
serve, kit, byte_tokenizer = scripted.serve, scripted.kit, scripted.byte_tokenizer


@pytest.fixture(scope="session")
def server() -> Iterator[Process]:
    """The shipped model. Behind it all: no client met a bug, and none made it compile anew."""
    process = Process(model_folder(None), "--max-rows", "2", "--max-length", "256")
    process.wait_for("ready after", 300)
    yield process
    metrics = httpx.get(f"{process.url}/metrics").text
    process.process.kill()
    assert "Traceback" not in process.log, process.log
    assert "jdllm_recompiles_after_ready_total 0.0" in metrics


@pytest.fixture(scope="session")
def orders() -> list[Task]:
    """Held-out messages of one to four order lines, with their answers."""
    return held_out("test", 4)


@pytest.fixture(scope="session")
def written() -> Callable[[str], str]:
    """A customer's message in the shipped model's chat format, as a prompt for /v1/completions."""
    import transformers

    words = transformers.PreTrainedTokenizerFast.from_pretrained(str(model_folder(None)), local_files_only=True)

    def write(message: str) -> str:
        chat = [{"role": "user", "content": message}]
        return words.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)

    return write


@pytest.fixture(scope="session")
def offline() -> dict[str, str]:
    """The environment of a client that may fetch nothing."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
