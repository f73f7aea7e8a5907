"""What a call of each compiled step costs: measured once when the engine starts, followed while it runs."""

from collections.abc import Iterable, Mapping

from jdllm.denoise.window import Bucket

FOLLOW = 0.1
"""Weight of a new measurement against what is known of the bucket."""


class CostTable:
    """Seconds of one call by bucket, from dispatch to the report's arrival."""

    def __init__(self) -> None:
        self._seconds: dict[Bucket, float] = {}

    def observe(self, bucket: Bucket, seconds: float) -> None:
        """One call took so long."""
        known = self._seconds.get(bucket)
        self._seconds[bucket] = seconds if known is None else known + FOLLOW * (seconds - known)

    def start(self, bucket: Bucket, seconds: Iterable[float]) -> None:
        """The first measurements of a bucket; the quickest counts, since whatever disturbs a call makes it slower."""
        self._seconds[bucket] = min(seconds)

    def of(self, bucket: Bucket) -> float:
        """Seconds of a call; of a bucket that was never measured, what its positions cost in the one nearest in size,
        or 0 where nothing was measured at all."""
        if bucket in self._seconds or not self._seconds:
            return self._seconds.get(bucket, 0.0)
        nearest = min(self._seconds, key=lambda other: abs(other.packed - bucket.packed))
        return self._seconds[nearest] * bucket.packed / nearest.packed

    def table(self) -> Mapping[Bucket, float]:
        """All that is known."""
        return dict(self._seconds)
