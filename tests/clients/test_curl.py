"""curl, as the README and the server's own log show it."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")
README = Path(__file__).parents[2] / "README.md"


def sh(command: str) -> str:
    """What a command in a shell prints."""
    return subprocess.run(command, shell=True, check=True, capture_output=True, text=True, timeout=60).stdout


def post(url: str, body: dict, *flags: str) -> str:
    """What curl prints for a JSON body."""
    command = ["curl", *flags, "-sS", url, "-H", "Content-Type: application/json", "-d", "@-"]
    return subprocess.run(
        command, input=json.dumps(body), check=True, capture_output=True, text=True, timeout=60
    ).stdout


def test_the_command_of_the_readme_gives_the_answer_of_the_readme(server):
    found = re.search(r"^    (curl .*?}')\n\nanswers\n\n(.*?)\n\n", README.read_text(), re.DOTALL | re.MULTILINE)
    command, answer = found[1], re.sub("^    ", "", found[2], flags=re.MULTILINE)
    reply = json.loads(sh(command.replace("http://127.0.0.1:8000", server.url)))
    assert reply["choices"][0]["message"]["content"] == answer
    assert reply["choices"][0]["finish_reason"] == "stop"


def test_the_command_that_the_server_prints_is_answered(server):
    command = re.search(r"^  (curl .*)$", server.log, re.MULTILINE)[1]
    assert json.loads(sh(command))["choices"][0]["message"]["role"] == "assistant"


def test_completions_take_text_in_the_chat_format(server, orders, written):
    body = {"prompt": [written(order.message) for order in orders], "max_tokens": 64}
    reply = json.loads(post(f"{server.url}/v1/completions", body))
    assert [choice["text"] for choice in reply["choices"]] == [order.answer for order in orders]


def test_a_stream_is_lines_of_data_up_to_done(server, orders):
    in_parts = 0
    for _ in range(5):
        body = {"messages": [{"role": "user", "content": orders[3].message}], "stream": True}
        lines = [line for line in post(f"{server.url}/v1/chat/completions", body, "-N").split("\n") if line]
        assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
        deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in lines[:-1]]
        assert "".join(delta.get("content", "") for delta in deltas) == orders[3].answer
        in_parts += len(deltas) > 2
    assert in_parts  # on a busy machine an answer may be complete before its first part is sent, but not every time


def test_an_error_has_its_status_and_says_what_is_wrong(server):
    said = post(f"{server.url}/v1/chat/completions", {"messages": []}, "-w", "\n%{http_code}")
    body, status = said.rsplit("\n", 1)
    assert status == "400" and json.loads(body)["error"]["param"] == "messages"
