"""From the text of an answer to what is compared or run.

GSM8K follows lm-evaluation-harness (tasks/gsm8k): strict looks for the number behind ``####``, flexible takes the last
number of the text; commas, dollar signs and a final period are dropped, then texts must be equal (18 is not 18.0).

HumanEval: of a text with a fence, what the first fence holds; then, if it defines the function asked for, that is the
program, behind the prompt's lines above the function (imports, helpers); else it continues the prompt, up to the first
line that stops a completion (STOPS, those of the published evaluation).
"""

import re

STRICT, FLEXIBLE = re.compile(r"#### (-?[0-9.,]+)"), re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")

STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
"""What begins a line behind a finished function body (Chen et al. 2021)."""

RULES = {
    "orders": "text equal to the order sheet, ended by the model",
    "gsm8k": "strict: number behind the first '#### '; flexible: last number; without ',', '$', final '.'; equal texts",
    "humaneval": f"first fenced block if any; whole function, or body cut at {', '.join(map(repr, STOPS))}; tests pass",
}
"""Form -> the rule in one line, for the output."""

_FENCE = re.compile(r"```[^\n`]*\n(.*?)(?:\n?```|\Z)", re.DOTALL)


def strict_number(text: str) -> str | None:
    """The number behind the first ``#### ``."""
    found = STRICT.search(text)
    return _plain(found[1]) if found else None


def flexible_number(text: str) -> str | None:
    """The last number of a text."""
    found = FLEXIBLE.findall(text)
    return _plain(found[-1]) if found else None


def _plain(number: str) -> str:
    return re.sub(r"[,$]", "", number).removesuffix(".")


def code_of(answer: str, prompt: str, entry_point: str) -> str:
    """The program to test, from an answer to a HumanEval prompt."""
    fence = _FENCE.search(answer)
    code = fence[1] if fence else answer
    head = f"def {entry_point}("
    if re.search(rf"^{re.escape(head)}", code, re.MULTILINE):
        above = prompt[: prompt.index(head)] if head in prompt else ""
        return f"{above}\n{code}\n"
    cut = min((place for stop in STOPS if (place := code.find(stop)) >= 0), default=len(code))
    return f"{prompt}{code[:cut]}\n"
