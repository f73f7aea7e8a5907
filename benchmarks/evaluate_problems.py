"""What benchmarks.evaluate asks, and whether an answer is right: the shipped model's held-out orders, and problems in
the published forms of GSM8K (``question``, ``answer``) and HumanEval (``prompt``, ``test``, ``entry_point``).

Prompt forms
    chat   the checkpoint's template; examples are earlier turns
    raw    plain text; examples stand in front, parted by blank lines
"""

import dataclasses
import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.evaluate_cleanup import code_of, flexible_number, strict_number
from benchmarks.sandbox import run_program
from jdllm.runtime import UsageError
from jdllm.tokenizer import Tokenizer
from jdllm.train.tasks import held_out

FORMS: dict[str, tuple[str, ...]] = {
    "orders": ("message", "answer"),
    "gsm8k": ("question", "answer"),
    "humaneval": ("prompt", "test", "entry_point"),
}
"""Form -> the fields that a line must have."""

PROMPT_FORMS = ("chat", "raw")

_ASK = {
    "orders": "{message}",
    "gsm8k": "Question: {question}\nAnswer:",
    "humaneval": (
        "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{prompt}\n```"
    ),
}
"""The user's message (lm-evaluation-harness: gsm8k, humaneval_instruct); raw prompts of HumanEval are the bare code."""

STOP_TEXTS = {"orders": (), "gsm8k": ("Question:",), "humaneval": ()}
"""Form -> where a raw answer ends, since nothing else tells a model that the next question is not its own."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """``fields``: the line of the file; ``id``: its task_id, or its number from 0."""

    form: str
    id: str
    fields: Mapping[str, Any]

    def ask(self, prompt_form: str) -> str:
        """What the model is asked, without examples."""
        if self.form == "humaneval" and prompt_form == "raw":
            return self.fields["prompt"]
        return _ASK[self.form].format(**self.fields)

    def judge(self, text: str, ended: bool, run_code: bool) -> dict[str, Any]:
        """Measure -> whether the answer is right by it, and beside them (``extracted``, ``reason``) what was looked at.

        Args:
            ended: the model ended the answer itself.
            run_code: programs may be run; otherwise nothing is said of them.
        """
        if self.form == "orders":
            return {"exact": ended and text == self.fields["answer"]}
        if self.form == "gsm8k":
            expected = strict_number(self.fields["answer"])
            strict, flexible = strict_number(text), flexible_number(text)
            return {"strict": strict == expected, "flexible": flexible == expected, "extracted": [strict, flexible]}
        program = code_of(text, self.fields["prompt"], self.fields["entry_point"])
        if not run_code:
            return {"extracted": program}
        outcome = run_program(f"{program}\n{self.fields['test']}\ncheck({self.fields['entry_point']})\n")
        told = {"extracted": program, "reason": outcome.reason, "network_cut": outcome.network_cut}
        return {"pass@1": outcome.passed, **told}


MEASURES = ("exact", "strict", "flexible", "pass@1")


def prompt_ids(problem: Problem, examples: Sequence[Problem], prompt_form: str, words: Tokenizer) -> list[int]:
    """Ready for the answer."""
    asked = problem.ask(prompt_form)
    shown = [(e.ask(prompt_form), _reference(e)) for e in examples]
    if prompt_form == "chat":
        turns = [(role, text) for pair in shown for role, text in zip(("user", "assistant"), pair, strict=True)]
        return words.encode_chat([{"role": role, "content": text} for role, text in (*turns, ("user", asked))])
    space = " " if problem.form == "gsm8k" else ""
    return words.encode("".join(f"{question}{space}{answer}\n\n" for question, answer in shown) + asked)


def _reference(example: Problem) -> str:
    answer = example.fields.get("answer", example.fields.get("canonical_solution"))
    if not isinstance(answer, str):
        raise UsageError(f"--few-shot: problem {example.id} has no answer to show")
    return answer


def shipped_problems(count: int) -> list[Problem]:
    """Held-out orders, as many of every number of lines as divide evenly."""
    tasks = held_out("test", count)
    return [Problem("orders", str(i), {"message": t.message, "answer": t.answer}) for i, t in enumerate(tasks)]


def read_problems(path: Path, form: str) -> list[Problem]:
    """All problems of a JSON Lines file; ``.gz`` is read as well.

    Raises:
        UsageError: the file cannot be read, or a line is not of this form.
    """
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8") as file:
            lines = [(number, line) for number, line in enumerate(file, 1) if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--problems: cannot read {path}: {error}") from None
    problems: list[Problem] = []
    for number, line in lines:
        try:
            fields = json.loads(line)
            bad = [name for name in FORMS[form] if not isinstance(fields[name], str) or not fields[name]]
        except (ValueError, TypeError, KeyError) as error:
            bad = [str(error)]
        if bad or (form == "gsm8k" and strict_number(fields["answer"]) is None):
            wanted = ", ".join(FORMS[form]) + (" with ####" if form == "gsm8k" else "")
            raise UsageError(
                f"--problems: line {number} is not of form {form} ({wanted}): {', '.join(bad) or 'no ####'}"
            )
        problems.append(Problem(form, str(fields.get("task_id", len(problems))), fields))
    if not problems:
        raise UsageError(f"--problems: {path} has no problem in it")
    return problems
