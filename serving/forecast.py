"""How long a request would wait: what requests have needed so far, times what a call costs now."""

FOLLOW = 0.1
"""Weight of a request that has ended against those before it."""


class Forecast:
    """Follows the forward passes of requests.

    Args:
        passes: of a request, until one has ended.
    """

    def __init__(self, passes: float):
        self.passes = passes
        self._seen = False

    def ended(self, passes: int) -> None:
        """A request has ended after so many."""
        self.passes += (FOLLOW if self._seen else 1.0) * (passes - self.passes)
        self._seen = True

    def wait(self, ahead: int, slots: int, seconds: float) -> float:
        """Seconds until a slot is free for a request behind others.

        Args:
            ahead: slots that those in the queue before it will take.
            slots: how many there are, all of them taken.
            seconds: of one pass.
        """
        return (ahead + 1) / max(slots, 1) * self.passes * seconds
