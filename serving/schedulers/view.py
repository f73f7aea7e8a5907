"""What a policy sees, and what it may ask for."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Protocol


@dataclasses.dataclass(frozen=True)
class Waiting:
    """A request in the queue.

    Attributes:
        key: names it, in this view and in what the policy answers.
        arrived: when, in seconds.
        slots: how many it takes.
    """

    key: int
    arrived: float
    slots: int = 1


@dataclasses.dataclass(frozen=True)
class View:
    """The state of a server at one moment.

    Attributes:
        waiting: the queue, in the order in which it is to be served (priority, then arrival).
        free: slots that nobody has.
        slots: all slots.
        rate: requests a second that have arrived lately; 0 where none has.
        service: seconds that a request has taken in its slot lately; 0 where none has ended.
    """

    waiting: Sequence[Waiting]
    free: int
    slots: int
    rate: float = 0.0
    service: float = 0.0

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
    """

    admit: Sequence[int] = ()
    wake: float = math.inf


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
    """

    holds: bool

    def decide(self, view: View, now: float) -> Actions:
        """Who leaves the queue now. Asked whenever something has arrived or ended, and at ``wake``."""

    def hold(self, passes: Sequence[Pass]) -> Sequence[int]:
        """Rows that take no part in the next step. Asked once before every step, when it is known what each would do;
        at least one takes part."""


def first_that_fit(waiting: Sequence[Waiting], free: int, slots: int) -> list[int]:
    """Requests from the queue's head for which there are slots; nobody passes one that does not fit. (One that needs
    more slots than there are goes in when all are free, where the engine refuses it by name.)"""
    keys = []
    for request in waiting:
        needed = min(request.slots, slots)
        if needed > free:
            break
        free -= needed
        keys.append(request.key)
    return keys
