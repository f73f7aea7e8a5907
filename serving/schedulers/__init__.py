"""Scheduling policies: small pure objects that decide over plain data what happens next.

``decide(view, now)`` says who leaves the queue, ``hold(passes)`` who sits out the next step. A policy reads no clock,
does no I/O, and never sees JAX: the same object drives the engine's thread, the simulator (``benchmarks.simulate``) and
the tests. What it knows beyond its own settings and credit is in what it is given.
"""

import inspect
from collections.abc import Callable

from jdllm.serving.schedulers.block import Block
from jdllm.serving.schedulers.deadline import Deadline
from jdllm.serving.schedulers.deficit import Deficit
from jdllm.serving.schedulers.exclusive import Exclusive
from jdllm.serving.schedulers.fixed_fill import FixedFill
from jdllm.serving.schedulers.per_request import PerRequest
from jdllm.serving.schedulers.slot import Slot
from jdllm.serving.schedulers.view import Actions, Pass, Policy, Running, View, Waiting

__all__ = [
    "POLICIES",
    "Actions",
    "Block",
    "Deadline",
    "Deficit",
    "Exclusive",
    "FixedFill",
    "Pass",
    "PerRequest",
    "Policy",
    "Running",
    "Slot",
    "View",
    "Waiting",
    "parse",
]

POLICIES: dict[str, Callable[..., Policy]] = {
    "slot": Slot,
    "per-request": PerRequest,
    "fixed-fill": FixedFill,
    "block": Block,
    "deficit": Deficit,
    "deadline": Deadline,
    "exclusive": Exclusive,
}
"""By the names that --scheduler takes."""


def parse(text: str) -> Policy:
    """A policy from ``NAME`` or ``NAME,setting=value,...``, for example ``fixed-fill,size=8,timeout=2.5,sealed=true``.

    Raises:
        ValueError: naming what is unknown or out of range.
    """
    name, *given = text.split(",")
    if name not in POLICIES:
        raise ValueError(f"{name!r} is not one of {', '.join(POLICIES)}")
    known = inspect.signature(POLICIES[name]).parameters
    settings = {}
    for pair in given:
        setting, equals, value = pair.partition("=")
        if not equals or setting not in known:
            raise ValueError(f"{pair!r} is no setting of {name}; known: {', '.join(known) or 'none'}, as name=value")
        settings[setting] = _value(value)
    missing = [
        n for n, p in known.items() if p.default is p.empty and n not in settings and p.kind is not p.VAR_POSITIONAL
    ]
    if missing:
        raise ValueError(f"{name} needs {', '.join(missing)}, as in {name},{missing[0]}=8")
    return POLICIES[name](**settings)


def _value(text: str) -> object:
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text
