"""The step benchmark on a small model: what is compared, counted and judged, never how long it took."""

import dataclasses

import pytest

from benchmarks import cases, step
from benchmarks.torch_loop import TorchModel, generate

SMALL = dataclasses.replace(
    cases.COMPUTE_BOUND,
    vocab_size=64,
    d_model=16,
    n_layers=1,
    n_heads=2,
    n_kv_heads=2,
    d_ff=32,
    mask_id=63,
    eos_id=62,
    pad_id=62,
)


@pytest.fixture(scope="module")
def small() -> cases.Case:
    case = cases.compute_bound(SMALL, requests=2)
    decode = dataclasses.replace(cases.COMPUTE_BOUND_DECODE, max_tokens=8, block_size=4)
    return dataclasses.replace(case, requests=tuple((prompt[:8], decode) for prompt, _ in case.requests))


def test_rows_of_both_engines(small):
    rows = step.measure(small, batch=2, peak=1e9, seconds=0, most=1)
    assert [r["engine"] for r in rows] == ["jdllm", "pytorch"]
    for row in rows:
        assert (row["config"], row["batch"], row["repetitions"], row["tokens"]) == ("compute-bound", 2, 1, 16)
        assert row["steps"] == 5 and row["ms_per_step"] > 0 and row["device_share"] > 0
        assert row["positions_computed"] >= row["positions_needed"]
    assert rows[0]["positions_needed"] == rows[1]["positions_needed"] == rows[1]["positions_computed"]


def test_number_of_steps_does_not_depend_on_the_weights():
    for seed in (0, 1):
        case = cases.compute_bound(SMALL, requests=1, seed=seed)
        request = generate(TorchModel(case.params, case.model), *case.requests[0])
        assert len(request.passes) == 19 and len(request.ids) == 64


def test_unequal_tokens_end_the_run(small):
    eager = step.PyTorch(small, small.requests)
    eager.prepare()
    eager.run()
    work = step.count_work(small, eager.requests)
    step.check_equal(eager, work, "here")
    with pytest.raises(SystemExit, match="here: row 1 differs"):
        step.check_equal(eager, dataclasses.replace(work, ids=[work.ids[0], [0] * 8]), "here")
    with pytest.raises(SystemExit, match="forward passes differ"):
        step.check_equal(eager, dataclasses.replace(work, nfe=[1, 1]), "here")


def test_the_tiny_case_is_sixteen_unlike_golden_requests():
    case = cases.tiny()
    assert len(case.requests) == 16
    assert {decode.block_size for _, decode in case.requests} == {4, 8, 16, 32}


def test_goals_of_a_full_batch():
    ours = {"engine": "jdllm", "config": "tiny", "batch": 16, "ms_per_step": 1.0}
    ours |= {"positions_needed": 90, "positions_computed": 100}
    theirs = {"engine": "pytorch", "config": "tiny", "batch": 16, "ms_per_step": 9.0}
    found = {goal["goal"]: (goal["value"], goal["reached"]) for goal in step.judge([ours, theirs])}
    assert found == {"times as fast as PyTorch": (9.0, True), "needed / computed positions": (0.9, True)}


def test_goals_are_judged_from_rows():
    ours = {"engine": "jdllm", "config": "tiny", "batch": 1, "ms_per_step": 2.0}
    theirs = {"engine": "pytorch", "config": "tiny", "batch": 1, "ms_per_step": 8.0}
    (judged,) = step.judge([ours, theirs])
    assert (judged["value"], judged["reached"]) == (4.0, False)
    assert step.judge([ours]) == []


def test_the_runs_take_turns():
    order: list[int] = []

    class Fake:
        def __init__(self, number: int):
            self.number = number

        def prepare(self) -> None: ...

        def run(self) -> None:
            order.append(self.number)

    times = step.time_runs([Fake(0), Fake(1), Fake(2)], seconds=0, most=30)
    assert [len(t) for t in times] == [2, 2, 2]
    assert order == [0, 1, 2, 1, 2, 0]
