"""Live comparison of schedulers: workload, calibration, tables; a small run against a real server."""

import dataclasses
import json
import math
import random

import pytest

from benchmarks import costs, live_run, policies, policies_report, workload
from benchmarks.calibrate import ENOUGH, at_its_pace, like, makespan, rate_of
from benchmarks.engine_model import Machine, Step, Work, simulate
from benchmarks.server_process import metrics
from jdllm.checkpoint import load
from jdllm.config import EngineConfig
from jdllm.denoise.window import Bucket
from jdllm.engine import Engine
from jdllm.runtime import SHIPPED
from jdllm.serving.model import open_model
from jdllm.serving.schedulers import Slot

HEAD = {"machine": {"cpu": "c", "cpus": 2}, "commit": "d", "command": "e", "kind": "dual"}


SERVED = {
    "requests_per_second": 1.0,
    **{name: 0.1 for name in ("ttft", "p50", "p90", "p99")},
    "within_slo": 0.9,
    "goodput": 0.9,
    "tokens_per_nfe": 2.0,
    "wasted": 0.2,
    "widest": 512,
    "widest_seconds": 0.007,
}


@pytest.fixture(scope="module")
def opened():
    """The shipped model, and an engine of one program for it."""
    model = open_model(SHIPPED / "orders-d2f", lambda text: None, max_rows=4, max_length=workload.LENGTH)
    checkpoint = load(SHIPPED / "orders-d2f")
    engine = Engine(checkpoint.params, checkpoint.config, EngineConfig(4, workload.LENGTH))
    engine.buckets = [Bucket(4, 4 * workload.LENGTH)]
    engine.compile()
    return model, engine


def test_a_recorded_request_does_what_it_does_alone(opened):
    model, engine = opened
    asked = workload.requests(model, 6, "dual")
    works = workload.record(engine, model, asked)
    for request, work in zip(asked, works, strict=True):
        [steps] = work.traces.values()
        assert steps[0].refresh and steps[0].width == work.length
        # A token a pass: passes are tokens, and each block of eight begins with a refresh.
        assert [s.done for s in steps] == sorted(s.done for s in steps)
        refreshes = sum(step.refresh for step in steps)
        assert refreshes == -(-len(steps) // 8) and all(s.width == 8 for s in steps if not s.refresh)
        alone = workload.record(engine, model, [request])[0]
        assert alone == work


def test_lower_thresholds_are_recorded_beside_the_asked_one(opened):
    model, engine = opened
    works = workload.record(engine, model, workload.requests(model, 4, "threshold"), (0.5, 0.1))
    for work in works:
        assert list(work.traces) == [0.9999, 0.5, 0.1] and work.wanted == 0.9999 and not work.refreshes
        lengths = [len(steps) for steps in work.traces.values()]
        assert lengths == sorted(lengths, reverse=True)


def test_the_most_that_a_policy_serves():
    works = [Work(16, 8, 8, {None: [Step(8, False, i) for i in range(1, 5)]})] * 8
    machine = Machine(4, lambda rows, positions: 0.01)
    assert makespan(machine, works, Slot()) == pytest.approx(0.08) and rate_of(machine, works, Slot()) == pytest.approx(
        100
    )


def page(**sizes: tuple[float, float, float]) -> str:
    """/metrics, of each size calls, seconds and cost; two answers in 0.3 s, four gaps in 0.02 s."""
    lines = ["jdllm_request_seconds_count 2.0", "jdllm_request_seconds_sum 0.3"]
    lines += ["jdllm_between_steps_seconds_count 4.0", "jdllm_between_steps_seconds_sum 0.02"]
    for name, (calls, seconds, cost) in sizes.items():
        size = name.removeprefix("b")
        lines += [
            f'jdllm_step_seconds_bucket{{bucket="{size}",le="1.0"}} {calls}',
            f'jdllm_step_seconds_count{{bucket="{size}"}} {calls}',
            f'jdllm_step_seconds_sum{{bucket="{size}"}} {seconds}',
            f'jdllm_step_cost_seconds{{bucket="{size}"}} {cost}',
        ]
    return "\n".join(lines)


def test_a_machine_like_a_run():
    """Steps cost their average in that run, or what the table says where there were few; so do gaps, and what clients
    waited beyond what the server knows of."""
    before = page(b1x8=(10, 1.0, 9.0), b4x32=(1, 0.5, 7.0))
    after = page(b1x8=(10 + ENOUGH, 1.0 + 0.2 * ENOUGH, 8.0), b4x32=(ENOUGH, 4.0, 0.6), b4x64=(0, 0.0, 0.9))
    answers = [live_run.Answer(1.0, 1.2, "a"), live_run.Answer(2.0, 2.4, "b")]
    run = live_run.Run(answers, metrics(page()), live_run._sizes(before, after))
    machine = like(run)
    costs = [machine.seconds(*size) for size in ((1, 8), (2, 8), (4, 32), (1, 9), (1, 64), (4, 999))]
    assert costs == pytest.approx([0.2, 0.6, 0.6, 0.6, 0.9, 0.9])
    assert machine.gap == pytest.approx(0.005) and machine.outside == pytest.approx(0.15)


def test_a_machine_is_as_slow_as_the_server_was_at_that_time():
    size = lambda calls, seconds: live_run.Size(4, 32, calls, seconds, 9.0)
    windows = [
        live_run.Window(2.0, [size(10, 1.0)], 10, 0.05),  # as on average
        live_run.Window(4.0, [size(10, 2.0)], 10, 1.15),  # between the steps, too
        live_run.Window(6.0, [size(0, 0.0)], 0, 0.0),  # nothing to do
    ]
    counted = metrics(page(b4x32=(0, 0.0, 9.0)))
    run = live_run.Run([live_run.Answer(0.0, 0.15, "a")], counted, [size(40, 4.0)], windows)
    machine = at_its_pace(run)
    assert [machine.pace(at) for at in (0.0, 2.0, 2.1, 4.0, 5.0, 7.0)] == pytest.approx([1.0, 1.0, 3.0, 3.0, 1.0, 1.0])
    # Twenty steps of 0.1 s and gaps of 5 ms pass in the first window; the next is three times as slow.
    steps = [Step(8, False, i) for i in range(1, 26)]
    work = Work(32, 25, 8, {None: steps})
    [served] = simulate([0.0], [work], Slot(), dataclasses.replace(machine, outside=0.0))
    assert served.ended == pytest.approx(0.105 * (20 + 3 * 5))


def test_percentiles_as_numpy_has_them():
    assert live_run.percentile([1.0, 2.0, 3.0, 4.0], 50) == 2.5 and live_run.percentile([1.0, 2.0], 100) == 2.0


@pytest.mark.parametrize(
    ("part", "row", "shown"),
    [
        ("agree", {"policy": "slot", "load": 0.3, "rate": 2.0, "real": [0.1, 0.2], "simulated": [0.11, 0.19]}, "+10 %"),
        ("agree", {"policy": "a", "load": 0.3, "rate": 2.0, "real": [1, 2], "simulated": [1.1, 1]}, "15 %: 1 of 2"),
        ("compare", {"policy": "slot", "load": 0.3, **SERVED}, "512 (7)"),
        ("burst", {"thresholds": "fixed 0.9", "exact": 0.5, **SERVED}, "50.0 %"),
        ("block", {"policy": "block", "seconds": 2.0, "tokens_per_second": 50.0, "steps": 4.0}, "1.00x"),
        ("capacity", {"on": "live", "rate": 12.0, "probes": [[1, True]]}, "12.0"),
    ],
)
def test_tables_and_pictures(part, row, shown, tmp_path):
    results = {**HEAD, "part": part, "rows": [row], "slo": 1.0, "share": 0.99}
    assert shown in policies_report.table(json.loads(json.dumps(results)))
    policies_report.plot(results, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_flags(capsys):
    with pytest.raises(SystemExit):
        policies.main(["compare", "--n", "20"])
    assert "--n: 20 must be a multiple of 16" in capsys.readouterr().err


@pytest.mark.parametrize("part", policies.PARTS)
def test_every_part_is_a_command(part, capsys):
    with pytest.raises(SystemExit) as done:
        policies.main([part, "--help"])
    assert done.value.code == 0 and f"benchmarks.policies {part}" in capsys.readouterr().out
    assert part in dict(policies.lines_of(policies.__doc__))


def test_predictions_of_costs_are_made_before_the_call(opened):
    model, engine = opened
    asked = workload.requests(model, 12, "d2f")
    calls = costs._run(engine, asked, random.Random(0))
    assert len(calls) > 10 and all(size == (4, 1024) and seconds > 0 for size, _, seconds in calls)
    # Each prediction is the table's value after the call before: it follows what was measured.
    known = calls[1][1]
    for _, predicted, seconds in calls[1:]:
        assert predicted == pytest.approx(known, rel=1e-6)
        known += 0.1 * (seconds - known)


@pytest.mark.slow
def test_a_live_run_against_a_real_server(monkeypatch):
    monkeypatch.setattr(live_run, "LOOK", 0.2)
    asked, works = policies.prepare(32, "dual")
    with live_run.server("block", print) as process:
        run = live_run.play(process.address, asked, policies.at(20.0, 32))
    assert sum(answer.text == one.task.answer for answer, one in zip(run.answers, asked, strict=True)) > 28
    summary = live_run.summary(run, slo=60.0)
    assert summary["within_slo"] == 1.0 and 0.5 < summary["tokens_per_nfe"] <= 1.0 and run.sizes
    assert len(run.windows) > 3 and run.windows[-1].until == math.inf
    assert sum(size.calls for window in run.windows for size in window.sizes) == sum(size.calls for size in run.sizes)
    assert simulate(policies.at(20.0, 32), works, Slot(), like(run))


@pytest.mark.slow
def test_deficit_keeps_steps_narrow_on_a_real_server():
    """Whoever decodes waits for a step of the budget and of what earlier steps left of it; where all refreshes go at
    once, it waits for as many as there are."""
    asked, _ = policies.prepare(64, "dual")
    widest = {}
    for text in ("slot", "deficit,budget=256"):
        with live_run.server(text, print) as process:
            widest[text] = live_run.play(process.address, asked, [0.0] * 64).widest.packed
    assert widest["deficit,budget=256"] < widest["slot"] / 2
