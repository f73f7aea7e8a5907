"""What the log says of requests, and what it keeps to itself."""

import json
import logging
import sys
import time

import pytest

from jdllm.serving import logs

SECRET = "a secret word"


@pytest.fixture
def lines(caplog):
    """The fields of the log lines of requests so far."""
    caplog.set_level(logging.DEBUG, logger="jdllm.serving")
    return lambda: [r.fields for r in caplog.records if r.getMessage() == "request"]


def test_a_request_has_one_line_with_its_id_and_numbers(serve, kit, lines):
    server = serve(kit.says("seven", per_step=2))
    server.http.headers["X-Request-ID"] = "mine-7"
    usage = server.chat("Hi", decoder="d2f").json()["usage"]
    kit.until(lambda: len([one for one in lines() if one["path"] == "/v1/chat/completions"]) == 1)
    line = next(one for one in lines() if one["path"] == "/v1/chat/completions")
    assert line["request_id"] == "mine-7" and line["status"] == 200 and line["method"] == "POST"
    assert (line["model"], line["decoder"], line["finish"], line["choices"]) == ("tiny", "d2f", "stop", 1)
    assert (line["prompt_tokens"], line["completion_tokens"]) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert line["nfe"] == 3 and 0 <= line["queue_seconds"] <= line["first_text_seconds"] <= line["seconds"]


def test_a_stream_that_was_left_says_so(serve, kit, lines):
    server = serve(kit.says("x" * 100), step_seconds=0.02)
    body = {"model": "tiny", "prompt": "a", "max_tokens": 100, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body, headers={"X-Request-ID": "left"}) as response:
        next(response.iter_lines())
    kit.until(lambda: [one["finish"] for one in lines() if one["request_id"] == "left"] == ["cancelled"])


def test_a_plain_call_that_is_cut_says_how_far_it_came(serve, kit, lines):
    server = serve(kit.says("x" * 100, per_step=1), step_seconds=0.02)
    assert server.complete("a", max_tokens=100, deadline_ms=500).status_code == 504
    kit.until(lambda: [one for one in lines() if one["status"] == 504])
    line = next(one for one in lines() if one["status"] == 504)
    assert 0 < line["completion_tokens"] <= line["nfe"] < 100


def test_refusals_have_a_line_too(serve, kit, lines):
    server = serve(kit.says("ok"), api_keys=("k",))
    server.http.get("/health")
    server.http.get("/v1/models")
    kit.until(lambda: len(lines()) >= 2)
    assert {(one["path"], one["status"]) for one in lines()} == {("/health", 200), ("/v1/models", 401)}


@pytest.mark.parametrize("asked", [False, True])
def test_content_stands_in_the_log_only_where_it_was_asked_for(serve, kit, caplog, asked):
    caplog.set_level(logging.DEBUG)
    server = serve(kit.echoes(), log_content=asked)
    server.chat(SECRET)
    server.complete(SECRET, temperature=9)
    server.complete(SECRET, **{SECRET: 1})
    server.http.post("/v1/completions", content=f'{{"prompt": "{SECRET}"')
    server.complete([SECRET, 3])
    kit.until(lambda: sum(r.getMessage() == "request" for r in caplog.records) >= 5)
    ours = [r for r in caplog.records if r.name.startswith("jdllm")]
    told = "\n".join(json.dumps([r.getMessage(), getattr(r, "fields", {})]) for r in ours)
    told = told.replace(f"unknown fields: '{SECRET}'", "")  # names of fields are not content
    assert (SECRET in told) is asked and ("WORD" in told) is asked


def test_lines_are_text_or_json():
    record = logging.LogRecord("jdllm.serving", logging.INFO, __file__, 1, "request %d", (3,), None)
    record.fields = logs.fields(status=200, seconds=0.25, path="/a b", missing=None)["fields"]
    clock, text = logs._Text().format(record).split(" ", 1)
    assert clock == time.strftime("%H:%M:%S", time.localtime(record.created))
    assert text == 'request 3 status=200 seconds=0.250 path="/a b"'
    line = json.loads(logs._Json().format(record))
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "info",
        "logger": "jdllm.serving",
        "message": "request 3",
        "status": 200,
        "seconds": 0.25,
        "path": "/a b",
    }
    record.fields = {"path": "line\nbreak"}
    assert "\n" not in logs._Text().format(record)


def test_both_forms_tell_where_an_exception_came_from():
    try:
        raise ValueError("told")
    except ValueError:
        record = logging.LogRecord("jdllm.serving", logging.ERROR, __file__, 1, "it failed", (), sys.exc_info())
    first, *trace = logs._Text().format(record).splitlines()
    assert first.endswith(" it failed") and trace[-1] == "ValueError: told"
    assert json.loads(logs._Json().format(record))["exception"].splitlines() == trace
