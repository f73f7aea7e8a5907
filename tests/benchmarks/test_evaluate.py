"""The evaluation: clean-up rules on texts as models write them, limits on their programs, and one run of the shipped
model."""

import gzip
import json
import time

import pytest

from benchmarks import evaluate, evaluate_problems
from benchmarks.evaluate_cleanup import code_of, flexible_number, strict_number
from benchmarks.evaluate_problems import Problem, prompt_ids, read_problems
from benchmarks.presets import LLADA_8B
from benchmarks.sandbox import run_program
from jdllm.config import DecodeConfig
from jdllm.runtime import UsageError


@pytest.mark.parametrize(
    "text, strict, flexible",
    [
        ("She makes 9 * 2 = $18.\n#### 18", "18", "18"),
        ("so 80,000 + 50,000\n#### 130,000", "130000", "130000"),
        ("The answer is $1,234.", None, "1234"),
        ("#### -5\nQuestion: What about 7?", "-5", "7"),  # strict takes the first, flexible the last
        ("####18", None, "18"),  # lm-evaluation-harness wants the space
        ("It is 18.0", None, "18.0"),  # and compares texts
        ("none at all", None, None),
        ("7", None, "7"),
        ("#### 12.\n", "12", "12"),
    ],
)
def test_numbers(text, strict, flexible):
    assert (strict_number(text), flexible_number(text)) == (strict, flexible)


PROMPT = 'import math\n\n\ndef root(x):\n    """ Square root.\n    """\n'
BODY = "    return math.sqrt(x)\n"
TEST = "def check(candidate):\n    assert candidate(9) == 3\n"


@pytest.mark.parametrize(
    "answer",
    [
        BODY,
        BODY + "\n\ndef other():\n    return (\n",  # a raw answer goes on, and is cut
        f"Sure:\n```python\ndef root(x):\n{BODY}```\nThis uses `math`.",
        f"```\n{PROMPT}{BODY}",  # the fence was never closed
        f"def root(x):\n{BODY}",
        f"Here is the body:\n```python\n{BODY}```",
    ],
)
def test_programs_out_of_answers(answer):
    program = code_of(answer, PROMPT, "root")
    assert program.count("return") == 1 and "Sure" not in program
    space: dict = {}
    exec(f"{program}\n{TEST}\ncheck(root)", space)


def test_a_program_that_ends_passes():
    outcome = run_program("assert 1 + 1 == 2")
    assert outcome.passed and outcome.reason == "" and outcome.network_cut in (True, False)


@pytest.mark.parametrize(
    "program, reason",
    [
        ("assert 1 == 2, 'not so'", "AssertionError: not so"),
        ("def f(:", "SyntaxError"),
        ("x = bytearray(1 << 30)", "MemoryError"),
        ("import sys; sys.exit(0)", "ended early"),
        ("import os; os._exit(0)", "ended early"),
        ("open('big', 'wb').write(bytes(1 << 22))", "File too large"),
    ],
)
def test_what_fails_counts_as_wrong(program, reason):
    outcome = run_program(program, memory_bytes=1 << 29)
    assert not outcome.passed and reason in outcome.reason


@pytest.mark.parametrize("program", ["while True: pass", "import time; time.sleep(60)"])
def test_an_endless_program_is_stopped(program):
    begin = time.monotonic()
    outcome = run_program(program, seconds=1)
    assert not outcome.passed and time.monotonic() - begin < 8


def humaneval() -> Problem:
    fields = {"task_id": "T/0", "prompt": PROMPT, "test": TEST, "entry_point": "root", "canonical_solution": BODY}
    return Problem("humaneval", "T/0", fields)


def test_programs_run_only_when_asked_for(monkeypatch):
    problem = humaneval()
    assert problem.judge(BODY, True, run_code=True)["pass@1"] is True
    assert problem.judge("    return x\n", True, run_code=True)["pass@1"] is False
    monkeypatch.setattr(evaluate_problems, "run_program", None)
    assert problem.judge(BODY, True, run_code=False).keys() == {"extracted"}


class Words:
    """Shows what would be encoded."""

    def encode(self, text):
        return text

    def encode_chat(self, chat):
        return [(m["role"], m["content"]) for m in chat]


def test_examples_are_turns_or_text():
    shown = Problem("gsm8k", "0", {"question": "1 + 1?", "answer": "#### 2"})
    asked = Problem("gsm8k", "1", {"question": "2 + 2?", "answer": "#### 4"})
    assert prompt_ids(asked, [shown], "raw", Words()) == "Question: 1 + 1?\nAnswer: #### 2\n\nQuestion: 2 + 2?\nAnswer:"
    turns = prompt_ids(asked, [shown], "chat", Words())
    assert turns[1] == ("assistant", "#### 2") and [role for role, _ in turns] == ["user", "assistant", "user"]
    assert prompt_ids(humaneval(), [], "raw", Words()) == PROMPT
    assert PROMPT in prompt_ids(humaneval(), [], "chat", Words())[0][1]


def test_problems_of_a_file(tmp_path):
    lines = "".join(json.dumps({"question": f"{i}?", "answer": f"so\n#### {i}"}) + "\n" for i in range(3))
    (tmp_path / "p.jsonl").write_text(lines)
    with gzip.open(tmp_path / "p.jsonl.gz", "wt") as file:
        file.write(lines)
    assert read_problems(tmp_path / "p.jsonl", "gsm8k") == read_problems(tmp_path / "p.jsonl.gz", "gsm8k")
    for text, match in (("", "no problem"), ("[]\n", "line 1"), ('{"question": "a", "answer": "7"}\n', "no ####")):
        (tmp_path / "bad.jsonl").write_text(text)
        with pytest.raises(UsageError, match=match):
            read_problems(tmp_path / "bad.jsonl", "gsm8k")
    with pytest.raises(UsageError, match="cannot read"):
        read_problems(tmp_path / "none", "gsm8k")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--form", "gsm8k"], "needs --problems"),
        (["--set", "speed=3"], "NAME=VALUE"),
        (["--n", "0"], "at least 1"),
        (["--set", "threshold=0.5", "--n", "1"], "threshold"),
    ],
)
def test_what_cannot_be_asked_is_one_line(arguments, message):
    with pytest.raises(SystemExit, match=message):
        evaluate.main(arguments)


def test_the_shipped_model(tmp_path, capsys):
    file = tmp_path / "results.json"
    evaluate.main(["--n", "4", "--max-rows", "4", "--set", "skip_threshold=0.95", "--json", str(file)])
    results = json.loads(file.read_text())
    (row,) = results["rows"]
    assert row["count"] == 4 and row["exact"] == 1 and row["truncated"] == 0 and row["tokens"] > row["nfe"] > 0
    assert row["settings"]["skip_threshold"] == 0.95 and row["settings"]["block_size"] == 8
    assert len(row["answers"]) == 4 and row["answers"][0]["text"].startswith("name:")
    shown = capsys.readouterr()
    fast = {**row, "settings": {**row["settings"], "decoder": "fast-dllm"}, "threshold": 0.9}
    assert "threshold 0.9, cache prefix" in evaluate.table({**results, "rows": [fast]})  # what was left open, too
    for text in ("skip_threshold 0.95", "Prompt form chat, 0 examples", "order sheet", "100.0 %"):
        assert text in shown.out
    assert "d2f: 4 of 4, right: exact" in shown.err


def test_code_of_a_model_without_leave_is_not_judged(tmp_path, monkeypatch, capsys):
    def run_decoder(folder, decoder, problems, examples, prompt_form, given, rows, run_code):
        result = {"text": BODY, "ids": [1, 2], "nfe": 1, "finish_reason": "stop"}
        return DecodeConfig(**given), LLADA_8B, [evaluate._answer(p, result, prompt_form, run_code) for p in problems]

    monkeypatch.setattr(evaluate, "run_decoder", run_decoder)
    (tmp_path / "p.jsonl").write_text(json.dumps(humaneval().fields) + "\n")
    file = tmp_path / "r.json"
    arguments = ["--form", "humaneval", "--problems", str(tmp_path / "p.jsonl"), "--json", str(file)]
    evaluate.main(arguments)
    (row,) = json.loads(file.read_text())["rows"]
    assert "pass@1" not in row and "pass@1" not in row["answers"][0]["judged"]
    assert "Not judged" in capsys.readouterr().out
    evaluate.main([*arguments, "--run-code"])
    (row,) = json.loads(file.read_text())["rows"]
    assert row["pass@1"] == 1 and row["network_cut"] in (True, False)
    assert "100.0 %" in capsys.readouterr().out
