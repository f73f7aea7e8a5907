"""What a policy sees, and what it may ask for."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

Seconds = Callable[[int, int], float]
"""(rows, positions) -> seconds of a denoising step of so many rows whose windows have so many positions together, from
the measured cost table; 0 while nothing is measured."""


@dataclasses.dataclass(frozen=True)
class Waiting:
    """A request in the queue.

    Attributes:
        key: names it, in every view until it leaves the queue, and in what the policy answers.
        arrived: when, in seconds.
        slots: how many it takes.
        length: positions of its canvas, prompt and answer together: what its keys and values take.
        tokens: that it may generate.
        slo: seconds from its arrival in which it wants to have ended; infinity for no matter when.
        priority: lower ones go first; the queue is in that order already.
        wanted: the probability at which it asked for positions to be committed; None where its decoder has none.
    """

    key: int
    arrived: float
    slots: int = 1
    length: int = 1
    tokens: int = 1
    slo: float = math.inf
    priority: int = 0
    wanted: float | None = None


@dataclasses.dataclass(frozen=True)
class Running:
    """A request in a slot, as of the last report.

    Attributes:
        key: its slot.
        request: what it was in the queue.
        done: tokens of its text that are settled.
        passes: that it has had.
        width: positions of its next window.
        block: positions of a pass that is no refresh.
        blocks_left: the present one among them.
        refreshes: every block begins with a pass over the whole canvas.
        threshold: the probability at which its positions are committed at present.
    """

    key: int
    request: Waiting
    done: int = 0
    passes: int = 0
    width: int = 1
    block: int = 1
    blocks_left: int = 1
    refreshes: bool = False
    threshold: float | None = None


@dataclasses.dataclass(frozen=True)
class View:
    """The state of a server at one moment.

    Attributes:
        waiting: the queue, in the order in which it is to be served (priority, then arrival).
        free: slots that nobody has.
        slots: all slots.
        rate: requests a second that have arrived lately; 0 where none has.
        batch: seconds that it has taken lately from an idle server's first request until it was idle again; 0 before.
        room: positions of keys and values that may still be taken.
        running: the requests in slots. Given to policies that ``steer``; empty for the others.
        ended: those that have been answered since the last view, as they ended. (Who left is in neither.) Likewise.
        seconds: what steps cost.
    """

    waiting: Sequence[Waiting]
    free: int
    slots: int
    rate: float = 0.0
    batch: float = 0.0
    room: float = math.inf
    running: Sequence[Running] = ()
    ended: Sequence[Running] = ()
    seconds: Seconds = lambda rows, positions: 0.0

    @property
    def idle(self) -> bool:
        """Nothing runs."""
        return self.free == self.slots


@dataclasses.dataclass(frozen=True)
class Actions:
    """What to do now.

    Attributes:
        admit: requests that leave the queue for a slot, in this order.
        wake: when to ask again even if nothing happens; infinity for not at all.
        thresholds: by slot, those that change.
        shed: requests that leave the queue unserved, with an error that says so.
    """

    admit: Sequence[int] = ()
    wake: float = math.inf
    thresholds: Mapping[int, float] = dataclasses.field(default_factory=dict)
    shed: Sequence[int] = ()


@dataclasses.dataclass(frozen=True)
class Pass:
    """What a row would do in the next step.

    Attributes:
        key: names it in this step: its slot.
        width: positions of its window.
        refresh: the window is its whole canvas: its first pass, or one that makes its cache anew.
        arrived: when its request came, in seconds.
        passes: that it has had.
        blocks_left: of its request, the present one among them.
    """

    key: int
    width: int
    refresh: bool = False
    arrived: float = 0.0
    passes: int = 0
    blocks_left: int = 1


class Policy(Protocol):
    """Anything that decides.

    Attributes:
        holds: ``hold`` may answer with somebody; otherwise it is not asked, which costs time in every step.
        steers: ``decide`` is asked before every step, and told what runs; otherwise only where somebody waits and a
            slot is free.
    """

    holds: bool
    steers: bool

    def decide(self, view: View, now: float) -> Actions:
        """Who leaves the queue now. Asked whenever something has arrived or ended, and at ``wake``."""

    def hold(self, passes: Sequence[Pass]) -> Sequence[int]:
        """Rows that take no part in the next step. Asked once before every step, when it is known what each would do.
        Where all are held there is no step, and ``decide`` is asked first; held again after that, nobody ever moves."""


def first_that_fit(waiting: Sequence[Waiting], view: View) -> list[int]:
    """Requests from the head for which there are slots and memory; nobody passes one that does not fit. (One that is
    too large for the whole server goes in when nothing runs, where the engine refuses it by name.)

    Args:
        waiting: of the view's queue, in the order in which they are to be served.
    """
    keys: list[int] = []
    free, room = view.free, view.room
    for request in waiting:
        needed = min(request.slots, view.slots)
        alone = view.idle and not keys
        if needed > free or (request.length > room and not alone):
            break
        free -= needed
        room -= request.length
        keys.append(request.key)
    return keys
