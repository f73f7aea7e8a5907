"""One forward pass for each request and step: no batching, the baseline of the paper 2608.23807."""

from collections.abc import Sequence

from jdllm.serving.schedulers.slot import Slot
from jdllm.serving.schedulers.view import Pass


class PerRequest(Slot):
    """Requests take slots as they come, but a step runs one row: the one that has had the fewest passes, so that all
    advance alike; among equals the oldest."""

    holds = True

    def hold(self, passes: Sequence[Pass]) -> Sequence[int]:
        """All but one."""
        chosen = min(passes, key=lambda one: (one.passes, one.arrived, one.key), default=None)
        return [one.key for one in passes if one is not chosen]
