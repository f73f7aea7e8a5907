"""What must hold at the end of a soak: the server's books against what its clients were told.

The server counts the tokens of every call whose answers it finished (serving/api.py, ``done``). Those of calls that
were read to the end are known exactly. A client that leaves cannot know whether the server had finished by then, so its
call counts or not. How many such answers count is the difference between those that the server finished and those that
clients read; the token counters must lie between what was told and that plus all that so many answers could have had.
When all have gone, some more clients come who all read to the end: their tokens must be counted exactly (``Calm``).
"""

import dataclasses
from collections.abc import Mapping, Sequence

from benchmarks.soak_clients import Answer, Outcome
from benchmarks.soak_watch import Seen, percentile

HEALTH_SECONDS = 0.1
GROWTH_BYTES = 24 << 20
"""Memory that a server may have more at the end: caches of the allocators of C and of Python, which level off."""


@dataclasses.dataclass(frozen=True)
class Check:
    """One of the things that must hold, with what was found and what was allowed."""

    name: str
    found: str
    allowed: str
    passed: bool


@dataclasses.dataclass
class Calm:
    """Clients that read everything, and the server's metrics before and after them."""

    outcomes: list[Outcome]
    before: Mapping[str, float]
    after: Mapping[str, float]


def balance(metrics: Mapping[str, float]) -> float:
    """Admitted requests that no other count has: 0 if the books are right."""
    ends = sum(metrics[f"jdllm_requests_{name}_total"] for name in ("finished", "cancelled", "failed"))
    return metrics["jdllm_requests_admitted_total"] - ends - left(metrics)


def left(metrics: Mapping[str, float]) -> float:
    """Requests that run or wait."""
    return metrics["jdllm_requests_running"] + metrics["jdllm_requests_waiting"]


def judge(
    outcomes: Sequence[Outcome],
    metrics: Mapping[str, float],
    seen: Seen,
    alone: Sequence[Answer | None],
    calm: Calm,
) -> list[Check]:
    """All checks.

    Args:
        outcomes: of every client there was; the server has seen no other.
        metrics: of the server when all had left.
        alone: answers of the sentinels on the idle server.
        calm: the end, when every client reads all; its outcomes are among the others.
    """
    problems = [f"{o.client}: {o.problem}" for o in outcomes if o.problem]
    return [
        _zero("admitted = finished + cancelled + failed + running + waiting", balance(metrics)),
        _zero("requests running or waiting", left(metrics)),
        *_counters(outcomes, metrics),
        _exact(calm),
        _sentinels(outcomes, alone),
        Check("answers that must not be", _list(problems), "0", not problems),
        *_health(seen),
        _memory(seen),
        _zero("programs compiled after the start", metrics["jdllm_recompiles_after_ready_total"]),
        _zero("restarts of the engine", metrics["jdllm_engine_resets_total"]),
    ]


def _zero(name: str, value: float) -> Check:
    return Check(name, f"{value:g}", "0", value == 0)


def _counters(outcomes: Sequence[Outcome], metrics: Mapping[str, float]) -> list[Check]:
    read = [o for o in outcomes if o.answer and o.request]
    unread = [o.request for o in outcomes if not o.answer and o.request and o.end != "refused"]
    answers = sum(o.request.jobs for o in read if o.request)
    finished = metrics["jdllm_requests_finished_total"]
    unseen = int(finished) - answers
    checks = [_within("answers finished", finished, answers, answers + sum(r.jobs for r in unread))]
    for name, told, most in (
        ("prompt tokens", [o.answer.prompt_tokens for o in read if o.answer], [r.prompt_tokens for r in unread]),
        (
            "generated tokens",
            [o.answer.completion_tokens for o in read if o.answer],
            [r.most_tokens // r.jobs for r in unread for _ in range(r.jobs)],
        ),
    ):
        counted = metrics[f"jdllm_{'prompt' if name.startswith('prompt') else 'generation'}_tokens_total"]
        slack = sum(sorted(most, reverse=True)[: max(unseen, 0)])
        checks.append(_within(f"{name} counted, and told", counted, sum(told), sum(told) + slack))
    return checks


def _exact(calm: Calm) -> Check:
    answers = [o.answer for o in calm.outcomes if o.answer]
    told = [sum(a.prompt_tokens for a in answers), sum(a.completion_tokens for a in answers)]
    names = [f"jdllm_{name}_tokens_total" for name in ("prompt", "generation")]
    counted = [calm.after[name] - calm.before[name] for name in names]
    found, allowed = (" and ".join(f"{value:.0f}" for value in pair) for pair in (counted, told))
    return Check("prompt and generated tokens when all clients read to the end", found, allowed, counted == told)


def _within(name: str, value: float, low: float, high: float) -> Check:
    allowed = f"{low:.0f}" if low == high else f"{low:.0f} to {high:.0f}"
    return Check(name, f"{value:.0f}", allowed, low <= value <= high)


def _sentinels(outcomes: Sequence[Outcome], alone: Sequence[Answer | None]) -> Check:
    answers = [(o.sentinel, o.answer) for o in outcomes if o.sentinel is not None and o.answer]
    differ = sum(answer != alone[number] for number, answer in answers)
    seen = {number for number, _ in answers}
    passed = not differ and seen == set(range(len(alone))) and None not in alone
    text = f"{differ} of {len(answers)} ({len(seen)} of {len(alone)} kinds)"
    return Check("fixed requests whose tokens differ from those alone", text, "0", passed)


def _health(seen: Seen) -> list[Check]:
    most, p99 = max(seen.health), percentile(seen.health, 0.99)
    text = f"{1e3 * most:.0f} ms (p99 {1e3 * p99:.0f} ms)"
    return [
        Check("slowest answer of /health", text, f"{1e3 * HEALTH_SECONDS:.0f} ms", most <= HEALTH_SECONDS),
        _zero("times /health was not well", seen.health_failed),
    ]


def _memory(seen: Seen) -> Check:
    early, late = seen.memory_growth()
    found = f"{early / 1e6:.1f} MB, then {late / 1e6:.1f} MB"
    return Check("memory, second and last fifth", found, f"+{GROWTH_BYTES / 1e6:.0f} MB", late - early <= GROWTH_BYTES)


def _list(texts: Sequence[str]) -> str:
    """How many, and the first of them."""
    return f"{len(texts)}, the first: {texts[0][:100]}" if texts else "0"
