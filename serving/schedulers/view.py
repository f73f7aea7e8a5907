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


class Policy(Protocol):
    """Anything that decides."""

    def decide(self, view: View, now: float) -> Actions:
        """What to do in this state at this time. Asked whenever something has arrived or ended, and at ``wake``."""


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
