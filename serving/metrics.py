"""What the server counts, for Prometheus. A request here is one row: ``n: 3`` is three.

At any moment ``admitted = finished + cancelled + failed + running + waiting``, and the token counters are the sums of
the usage numbers that clients were told.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import GaugeMetricFamily, Metric

if TYPE_CHECKING:  # the engine imports JAX
    from jdllm.engine import Engine
    from jdllm.serving.model import ServedModel

disable_created_metrics()  # a second series for every number, which nobody reads

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_STEP_SECONDS = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1)


VLLM = {
    "jdllm_requests_running": "vllm:num_requests_running",
    "jdllm_requests_waiting": "vllm:num_requests_waiting",
    "jdllm_slots_used_ratio": "vllm:kv_cache_usage_perc",
    "jdllm_requests_finished": "vllm:request_success",
    "jdllm_prompt_tokens": "vllm:prompt_tokens",
    "jdllm_generation_tokens": "vllm:generation_tokens",
    "jdllm_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "jdllm_request_seconds": "vllm:e2e_request_latency_seconds",
    "jdllm_queue_seconds": "vllm:request_queue_time_seconds",
}
"""Our names -> vLLM's, where the meaning is the same: existing dashboards and load tools find them. (A slot holds its
share of the K/V cache, so the share of slots in use is that of the cache.)"""

_LABELS = {"finish_reason": "finished_reason"}


class _Aliases:
    """The metrics of a registry once more, under vLLM's names and with its ``model_name``."""

    def __init__(self, registry: CollectorRegistry, model: str):
        self._registry, self._model = registry, model

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            if alias := VLLM.get(metric.name):
                copy = Metric(alias, metric.documentation, metric.type)
                for sample in metric.samples:
                    labels = {_LABELS.get(name, name): value for name, value in sample.labels.items()}
                    name = alias + sample.name.removeprefix(metric.name)
                    copy.add_sample(name, {"model_name": self._model, **labels}, sample.value)
                yield copy


class _Table:
    """A gauge whose labels are known only when it is read."""

    def __init__(self, name: str, text: str, label: str, values: Callable[[], Mapping[str, float]]):
        self._name, self._text, self._label, self._values = name, text, label, values

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(self._name, self._text, labels=[self._label])
        for value, number in self._values().items():
            family.add_metric([value], number)
        yield family


class Metrics:
    """One registry a server, so that several can live in one process."""

    content_type = CONTENT_TYPE_PLAIN_0_0_4

    def __init__(self, model: str = "jdllm") -> None:
        r = self.registry = CollectorRegistry()
        self._aliases = CollectorRegistry()
        self._aliases.register(_Aliases(r, model))  # type: ignore[arg-type]

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"jdllm_{name}", text, labels, registry=r)

        def seconds(name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            return Histogram(f"jdllm_{name}", text, buckets=buckets, registry=r)

        self.admitted = counter("requests_admitted", "Requests taken into the queue.")
        self.finished = counter("requests_finished", "Requests answered in full.", "finish_reason")
        self.cancelled = counter("requests_cancelled", "Requests whose client left, or that a shutdown cut.")
        self.failed = counter("requests_failed", "Requests that an error inside the engine ended.")
        self.shed = counter("requests_shed", "Of those: that the scheduler did not want to serve.")
        self.slo = counter("requests_with_slo", "Requests with an SLO that were answered in full.", "kept")
        self.rejected = counter("requests_rejected", "Requests not taken into the queue.", "reason")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of answered calls.")
        self.generation_tokens = counter("generation_tokens", "Generated tokens of answered calls.")
        self.steps = counter("steps", "Calls of the compiled step.")
        self.forward_passes = counter("forward_passes", "Forward passes (NFE) of requests that have ended.")
        self.committed = counter("committed_tokens", "Tokens of requests that have ended, as far as they came.")
        self.resets = counter("engine_resets", "Times the engine started again after a fault.")
        self.step_seconds = Histogram(
            "jdllm_step_seconds",
            "Wall time of one engine step, by its compiled size.",
            ["bucket"],
            buckets=_STEP_SECONDS,
            registry=r,
        )
        self.between_steps_seconds = seconds(
            "between_steps_seconds", "Time from a step's report to the next step's start.", _STEP_SECONDS
        )
        self.queue_seconds = seconds("queue_seconds", "Time from arrival to a slot.")
        self.first_text_seconds = seconds("time_to_first_token_seconds", "Time from arrival to the first settled text.")
        self.request_seconds = seconds("request_seconds", "Time from arrival to the end of the answer.")

    def gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        """A number that is read when it is asked for."""
        Gauge(f"jdllm_{name}", text, registry=self.registry).set_function(value)

    def table(self, name: str, text: str, label: str, values: Callable[[], Mapping[str, float]]) -> None:
        """Numbers by a label, read when they are asked for."""
        self.registry.register(_Table(f"jdllm_{name}", text, label, values))  # type: ignore[arg-type]

    def watch(self, engine: "Engine", model: "ServedModel", used: Callable[[], int]) -> None:
        """Add what an engine counts, which is ready now; ``used``: slots that are taken."""
        compiled, counters, gauge = model.compiles(), engine.counters, self.gauge
        gauge("slots", "Requests that can be decoded at once.", lambda: model.max_rows)
        gauge("slots_used_ratio", "Share of the slots that are taken.", lambda: used() / model.max_rows)
        gauge("positions_computed", "Window positions that steps ran on, padding included.", lambda: counters.computed)
        gauge("positions_needed", "Window positions that rows needed.", lambda: counters.needed)
        gauge("positions_wasted_ratio", "Share of the computed positions that were padding.", counters.wasted)
        gauge("positions_refreshed", "Needed positions in passes over whole canvases.", lambda: counters.refreshed)
        gauge("positions_refreshed_ratio", "Their share of the needed positions.", counters.refresh_share)
        gauge(
            "recompiles_after_ready_total",
            "Programs compiled after the start.",
            lambda: model.compiles() - compiled,
        )
        self.table(
            "step_cost_seconds",
            "What a step of each compiled size (rows x positions) costs, as schedulers reckon.",
            "bucket",
            lambda: {f"{b.rows}x{b.packed}": cost / b.steps for b, cost in engine.costs.table().items()},
        )

    def render(self) -> bytes:
        """The page for a scraper."""
        return generate_latest(self.registry) + generate_latest(self._aliases)
