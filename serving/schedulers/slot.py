"""Slot batching: a request takes a slot as soon as one is free, and joins at the next step."""

from collections.abc import Sequence

from jdllm.serving.schedulers.view import Actions, Pass, View, first_that_fit


class Slot:
    """The default. Rows join and leave at every step; nobody waits while a slot is free, and every row steps."""

    holds = False
    steers = False

    def decide(self, view: View, now: float) -> Actions:
        """Admit from the queue's head as many as fit."""
        return Actions(admit=first_that_fit(view.waiting, view))

    def hold(self, passes: Sequence[Pass]) -> Sequence[int]:
        """Nobody."""
        return ()
