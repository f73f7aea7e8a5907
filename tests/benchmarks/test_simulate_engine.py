"""Requests by the step law on the simulated engine, and the commands."""

import json

import pytest

from benchmarks import simulate
from benchmarks.simulate_engine import DECODE, Setting, capacity, run, work
from benchmarks.step_law import law


@pytest.mark.parametrize("blocks", [1, 2, 3, 16])
def test_a_request_follows_the_law(blocks):
    one = work(100, 32 * blocks)
    steps = one.traces[None]
    assert len(steps) == law(blocks, DECODE) == 29 * (blocks - 1) + 32
    assert steps[0].width == 132 and steps[0].refresh and not any(step.refresh for step in steps[1:])
    # A block is alone for 29 passes, three passes beside its successor, and the last one is alone again.
    widths = [step.width for step in steps[1:]]
    assert set(widths) <= {32, 64} and widths.count(64) == 3 * (blocks - 1)
    assert [step.done for step in steps] == sorted(step.done for step in steps) and steps[-1].done == 32 * blocks


def test_rows_that_join_at_once_wait_less_than_batches_that_fill():
    setting = Setting(count=200)
    rows = run(setting, ["slot", "fixed-fill,size=8,timeout=none"], [0.3], lambda text: None)["rows"]
    assert rows[0]["p50"] < rows[1]["p50"] / 2 and rows[0]["served"] == rows[1]["served"] == 200


def test_capacity_is_the_rate_at_which_the_slo_breaks():
    setting = Setting(count=100, slo=14.0)
    [row] = capacity(setting, ["slot"], 0.9, lambda text: None)["rows"]
    held = [rate for rate, ok in row["probes"] if ok]
    failed = [rate for rate, ok in row["probes"] if not ok]
    assert row["rate"] == max(held) and min(failed) <= 1.06 * row["rate"]


def test_the_commands(tmp_path, capsys):
    path = tmp_path / "r.json"
    simulate.main(["engine", "--policy", "slot", "--load", "0.5", "--requests", "40", "--json", str(path)])
    rows = json.loads(path.read_text())["engine"]["rows"]
    assert [row["policy"] for row in rows] == ["slot"] and "TTFT" in capsys.readouterr().out
    trace = tmp_path / "trace.csv"
    lines = [f"2023-11-16 18:17:{second:02}.0000000,{100 + second},{20 * second + 1}" for second in range(20)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]) + "\n")
    flags = ["--arrivals", f"trace:{trace}", "--lengths", str(trace), "--requests", "20", "--policy", "block"]
    simulate.main(["engine", *flags, "--load", "0.5"])
    assert "block" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--policy", "fifo"], "fifo"),
        (["--arrivals", "sometimes"], "sometimes"),
        (["--slots", "0"], "--slots"),
        (["--requests", "1"], "--requests"),
        (["--lengths", "/nowhere.csv"], "nowhere"),
    ],
)
def test_wrong_flags_are_named(flags, named, capsys):
    with pytest.raises(SystemExit) as end:
        simulate.main(["engine", *flags])
    assert end.value.code == 2 and named in capsys.readouterr().err
