"""One forward pass for each request and step: no batching, the baseline of the paper 2608.23807."""

from collections.abc import Sequence

from jdllm.serving.schedulers.slot import Slot
from jdllm.serving.schedulers.view import Pass


class PerRequest(Slot):
    """Requests take slots as they come, but a step runs one row, each in turn."""

    holds = True

    def __init__(self) -> None:
        self._last = -1

    def hold(self, passes: Sequence[Pass]) -> Sequence[int]:
        """All but the next slot's, behind the last that had its turn."""
        if not passes:
            return ()
        keys = [one.key for one in passes]
        self._last = min((key for key in keys if key > self._last), default=min(keys))
        return [key for key in keys if key != self._last]
