"""The parts of the characterization in order: what each measures, and how it is told and drawn."""

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

from benchmarks.characterize import (
    batches,
    breakdown,
    budgets,
    decoders,
    levels,
    plots,
    requests,
    scheduling,
)
from benchmarks.characterize.runs import Progress
from benchmarks.characterize.subject import Subject

Measure = Callable[[Callable[[], Subject], argparse.Namespace, Progress], dict[str, Any]]
"""Given what opens the model, the command line and the progress line."""


@dataclasses.dataclass(frozen=True)
class Part:
    """One part.

    Attributes:
        name: on the command line, and of its files.
        figures: what of the paper it reproduces.
        flags: those that its result hangs on; with other values it is measured again.
        text: Markdown from the data.
        draw: the data onto ``panels`` axes.
    """

    name: str
    figures: str
    flags: tuple[str, ...]
    measure: Measure
    text: Callable[[dict[str, Any]], str]
    draw: Callable[[Any, dict[str, Any]], None]
    panels: int


MODEL_FLAGS = ("model", "base", "dtype", "problems", "form", "n", "max_tokens", "block_size")

PARTS = (
    Part(
        "levels",
        "Fig. 2: step-count levels on random weights",
        ("blocks",),
        lambda subject, options, progress: levels.measure(progress, options.blocks),
        levels.text,
        plots.levels,
        1,
    ),
    Part(
        "requests",
        "Figs. 3 and 5: steps against latency, early signals",
        MODEL_FLAGS,
        lambda subject, options, progress: requests.measure(subject(), progress),
        requests.text,
        plots.requests,
        3,
    ),
    Part(
        "decoders",
        "Figs. 4 and 10: variance and accuracy by decoder",
        MODEL_FLAGS,
        lambda subject, options, progress: decoders.measure(subject(), progress),
        decoders.text,
        plots.decoders,
        2,
    ),
    Part(
        "budgets",
        "Fig. 6 and Table I: generation budgets",
        (*MODEL_FLAGS, "budgets"),
        lambda subject, options, progress: budgets.measure(subject(), progress, options.budgets),
        budgets.text,
        plots.budgets,
        2,
    ),
    Part(
        "batches",
        "Figs. 7, 8 and 10: synchronized batches, per-request dispatch, equal answers",
        (*MODEL_FLAGS, "batch"),
        lambda subject, options, progress: batches.measure(subject(), progress, options.batch),
        batches.text,
        plots.batches,
        2,
    ),
    Part(
        "breakdown",
        "Fig. 9: wall-clock breakdown",
        MODEL_FLAGS,
        lambda subject, options, progress: breakdown.measure(subject(), progress),
        breakdown.text,
        plots.breakdown,
        1,
    ),
    Part(
        "scheduling",
        "Fig. 11, Tables II and III: fixed-fill batches, simulated",
        (),
        lambda subject, options, progress: scheduling.measure(progress),
        scheduling.text,
        plots.scheduling,
        1,
    ),
)
