"""What requests have been like lately, and from that how long the next would wait."""

FOLLOW = 0.1
"""Weight of the newest against those before it."""


class Forecast:
    """Moving averages over requests.

    Args:
        passes: forward passes of a request, until one has ended.

    Attributes:
        passes: forward passes of a request.
        batch: seconds from when an idle server takes requests until it is idle again; 0 until it was.
    """

    def __init__(self, passes: float):
        self.passes, self.batch = passes, 0.0
        self._gap, self._last = 0.0, 0.0
        self._ended = self._arrived = self._batches = 0

    @property
    def rate(self) -> float:
        """Requests a second that arrive; 0 until two have."""
        return 1 / self._gap if self._gap > 0 else 0.0

    def arrived(self, now: float, count: int = 1) -> None:
        """So many requests have come, together."""
        if self._arrived:
            self._gap = _followed(self._gap, (now - self._last) / count, first=self._arrived == 1)
        self._last = now
        self._arrived += 1

    def ended(self, passes: int) -> None:
        """A request has ended after so many passes."""
        self.passes = _followed(self.passes, passes, first=not self._ended)
        self._ended += 1

    def idle(self, seconds: float) -> None:
        """The last request has ended, so long after the first took its slot."""
        self.batch = _followed(self.batch, seconds, first=not self._batches)
        self._batches += 1

    def wait(self, ahead: int, slots: int, seconds: float) -> float:
        """Seconds until a slot is free for a request behind others.

        Args:
            ahead: slots that those in the queue before it will take.
            slots: how many there are, all of them taken.
            seconds: of one pass.
        """
        return (ahead + 1) / max(slots, 1) * self.passes * seconds


def _followed(average: float, value: float, first: bool) -> float:
    return value if first else average + FOLLOW * (value - average)
