"""The server benchmark: what is compared and shown, never how fast it was."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import server
from benchmarks.server_process import ServerProcess, cpu_seconds, resident_bytes


def result(seconds: float, steps: int = 10, text: str = "a") -> dict:
    cpu = {"cpu_seconds": 1.0, "client_cpu_seconds": 0.5}
    return {"seconds": seconds, "steps": steps, "tokens": 40, "texts": [text], **cpu}


def test_runs_take_turns_and_the_first_round_is_not_counted(monkeypatch):
    monkeypatch.setattr(server, "SETTLE_SECONDS", 0)
    order = []

    def run(name: str):
        def once() -> dict:
            order.append(name)
            return result(len(order))

        return once

    told = server.take_turns({"a": run("a"), "b": run("b")}, rounds=2)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert [[r["seconds"] for r in results] for results in told.values()] == [[4, 5], [3, 6]]


def test_other_answers_end_the_run(monkeypatch):
    monkeypatch.setattr(server, "SETTLE_SECONDS", 0)
    with pytest.raises(SystemExit, match="b: other answers"):
        server.take_turns({"a": lambda: result(1), "b": lambda: result(1, text="b")}, rounds=1)


def test_ratios_are_of_all_rounds():
    told = {
        server.ENGINE: [result(1), result(2), result(3)],
        server.PLAIN: [result(2), result(2), result(4)],
        server.STREAMED: [result(4), result(2), result(6)],
    }
    rows = server.rows_of(told, 20, "tiny")
    assert [row["ratio"] for row in rows] == [1, 0.75, 0.5]
    assert rows[0]["error"] == 0
    assert (rows[0]["requests_per_second"], rows[0]["tokens_per_second"], rows[0]["ms_per_step"]) == (10, 20, 200)
    head = {"machine": {"cpu": "c", "cpus": 2}, "commit": "d", "command": "e"}
    shown = " ".join(server.table({**head, "rows": json.loads(json.dumps(rows))}).split())
    assert "| tiny | server, plain | 7.5 " in shown and "| 75.0 % | 9.6 % |" in shown
    assert "3 rounds; goal for plain answers 95 %: not reached (tiny, 20 requests a run)" in shown


def test_the_error_is_that_of_rounds_drawn_anew():
    """By the jackknife as by its definition: how much the ratio varies among runs of the benchmark."""
    random = np.random.default_rng(0)
    runs = [(random.normal(5, 0.5, 30), random.normal(5.2, 0.6, 30)) for _ in range(400)]
    ratios, errors = zip(*(server.speed(list(first), list(other)) for first, other in runs), strict=True)
    assert np.mean(errors) == pytest.approx(np.std(ratios), rel=0.1)
    assert server.speed([4.0], [5.0]) == (0.8, None)


def test_a_server_that_does_not_start_tells_why():
    with pytest.raises(SystemExit, match="none such is not a folder"):
        ServerProcess("--model", "none such", log=print)


def test_a_process_is_read_from_outside():
    assert cpu_seconds(os.getpid()) > 0 and resident_bytes(os.getpid()) > 1 << 20


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted in /proc")
def test_alone_xla_computes_on_one_processor():
    count = """
import glob, jax
jax.jit(lambda x: x @ x)(jax.numpy.ones((8, 8))).block_until_ready()
names = [open(path).read().strip() for path in glob.glob("/proc/self/task/*/comm")]
print(names.count("tf_XLAEigen"))
"""
    environment = {**os.environ, **server.ALONE, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", count], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"
