"""The overhead benchmark on a small model: equal tokens and what is counted, never how long anything took."""

import dataclasses
import json
import time

import numpy as np
import pytest
import torch
from torch._dynamo.exc import TorchDynamoException

from benchmarks import cases, overhead, overhead_bonsai, overhead_plot
from benchmarks.contenders import BatchedPyTorch, PyTorch, check_equal, count_work
from benchmarks.device_share import trace_torch
from benchmarks.torch_batch import BatchRow, TorchBatch
from benchmarks.torch_loop import TorchModel
from jdllm.config import DecodeConfig
from jdllm.runtime import UsageError

SMALL = dataclasses.replace(
    cases.COMPUTE_BOUND,
    vocab_size=64,
    d_model=16,
    n_layers=1,
    n_heads=2,
    n_kv_heads=1,
    d_ff=32,
    mask_id=63,
    eos_id=62,
    pad_id=62,
)


@pytest.fixture(scope="module")
def small() -> cases.Case:
    case = cases.compute_bound(SMALL, requests=3)
    decode = dataclasses.replace(cases.COMPUTE_BOUND_DECODE, max_tokens=8, block_size=4)
    requests = tuple((prompt[: 8 - i], decode) for i, (prompt, _) in enumerate(case.requests))
    return dataclasses.replace(case, requests=requests)


@pytest.fixture
def uncompiled(monkeypatch):
    """torch.compile as on a machine without a C++ compiler."""

    def fail(*_):
        raise TorchDynamoException("No working C++ compiler found")

    monkeypatch.setattr("benchmarks.torch_batch._compiled", lambda forward: fail)


def test_rows_of_all_engines(small, uncompiled):
    """One measurement of batch 2, whose tokens ``measure`` itself holds equal."""
    rows = {row["engine"]: row for row in overhead.measure(small, 2, "cpu", seconds=0, most=1)}
    eager, batched = rows["pytorch"], rows["pytorch, batched"]
    assert list(rows)[-1] == "pytorch, batched, torch.compile"
    assert "No working C++ compiler" in rows["pytorch, batched, torch.compile"]["unavailable"]
    # Every request runs at least 7 matrix products and 3 attentions' worth of operators by itself.
    assert eager["dispatched_per_step"] > 2 * 30 > 30 < batched["dispatched_per_step"]
    assert eager["dispatched_per_step"] > batched["dispatched_per_step"]
    assert eager["positions_computed"] == eager["positions_needed"] < batched["positions_computed"]
    assert rows["jdllm"]["dispatched_per_step"] == 1
    steps = rows["jdllm"]["steps"]  # several a dispatch need a last call for what is left over
    assert rows["jdllm, 4 steps a dispatch"]["dispatched_per_step"] == -(-steps // 4) / steps
    weights = sum(weight.nbytes for weight in small.params.values())
    for row in rows.values():
        if "unavailable" not in row:
            assert row["tokens"] == 16 and row["repetitions"] == 1 and row["device_busy"] > 0
            assert row["peak_bytes"] > weights
    head = {"machine": {"cpu": "c", "cpus": 2, "device": "d"}, "versions": {"jax": 1, "torch": 2}, "command": "e"}
    results = {**head, "model": "m", "requests": 2, "threads": 1, "commit": "f", "rows": [*rows.values()]}
    shown = overhead.table(json.loads(json.dumps(results)))
    assert shown.count("No working C++ compiler") == 1 and "(not here)" in shown


def test_the_batch_is_the_algorithm_of_the_official_loop():
    """Sixteen unlike golden requests in lockstep: tokens and passes of each."""
    case = cases.tiny()
    plain = [r for r in case.requests if (r[1].top_p, r[1].top_k, r[1].confidence) == (1.0, 0, "probability")]
    assert len(plain) > 8
    network = TorchModel(case.params, case.model)
    alone = PyTorch(case, plain, network=network)
    alone.prepare()
    alone.run()
    work = count_work(case, alone.requests)
    together = BatchedPyTorch(network, plain, "eager")
    for _ in range(2):  # the second time on a used cache
        together.prepare()
        together.run()
        check_equal(together, work, "in lockstep")
    assert [r.passes for r in alone.requests] == [r.passes for r in together.batch.rows]


@pytest.mark.slow
def test_the_compiled_batch_gives_the_same_tokens(small):
    eager = PyTorch(small, small.requests)
    eager.prepare()
    eager.run()
    compiled = BatchedPyTorch(eager.network, small.requests, "compiled")
    assert overhead._warm_up(compiled) is None
    check_equal(compiled, count_work(small, eager.requests), "compiled")
    batched = BatchedPyTorch(eager.network, small.requests, "eager")
    assert 0 < compiled.trace().dispatched < batched.trace().dispatched


def test_what_the_batch_does_not_know_is_refused():
    for changes in ({"early_stop": True}, {"temperature": 1.0}, {"top_k": 3}, {"confidence": "margin"}):
        decode = DecodeConfig(**{"early_stop": False, **changes})
        with pytest.raises(ValueError, match="batched PyTorch loop"):
            BatchRow([1, 2], decode, SMALL)


def test_the_spare_position_is_seen_by_no_one(small):
    batch = TorchBatch(TorchModel(small.params, small.model), small.requests)
    assert not batch.visible[:, :-1, -1].any() and batch.visible[:, -1, -1].all()
    # A block sees itself and what lies before it.
    seen = batch.visible[0].numpy()
    prompt = len(small.requests[0][0])
    assert seen[prompt, : prompt + 4].all() and not seen[prompt, prompt + 4 :].any()


def test_operators_called_by_operators_are_not_counted():
    x = torch.ones(4, 4)
    traced = trace_torch(lambda: torch.nn.functional.linear(x, x).softmax(-1))
    assert traced.dispatched == 2
    traced = trace_torch(lambda: [torch.empty(1000) for _ in range(3)])
    assert traced.peak_bytes >= 3 * 4000 and traced.dispatched == 3


def test_the_plot_leaves_out_what_is_not_known(tmp_path):
    pytest.importorskip("matplotlib")
    known = {"engine": "a", "ms_per_step": 1.0, "device_busy": None, "dispatched_per_step": 3.0}
    rows = [{**known, "batch": 1}, {**known, "batch": 2}, {"engine": "b", "batch": 1, "unavailable": "no compiler"}]
    overhead_plot.draw(rows, tmp_path / "new" / "plot.png")
    assert (tmp_path / "new" / "plot.png").stat().st_size > 1000


def test_a_plot_without_matplotlib_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"jdllm\[bench\]"):
        overhead_plot.require()


def test_a_folder_that_is_no_checkout_is_refused(tmp_path):
    with pytest.raises(UsageError, match="--bonsai"):
        overhead_bonsai._import(tmp_path)


def test_the_shipped_model_gives_the_requests():
    from jdllm.runtime import SHIPPED

    case, params = overhead.open_case(SHIPPED / "orders-d2f", 3)
    assert len(case.requests) == 3 and params.keys() == case.params.keys()
    for prompt, decode in case.requests:
        assert len(prompt) > 10 and decode.max_tokens == 128 and decode.block_size == 8 and not decode.early_stop
    np.testing.assert_array_equal(case.params["norm"], np.asarray(params["norm"]))
    with pytest.raises(UsageError, match="--max-tokens"):
        overhead.open_case(SHIPPED / "orders-d2f", 1, max_tokens=3)


def test_the_gpu_script_rehearsed(monkeypatch, tmp_path, capsys):
    """Everything but the programs themselves, which are the engine's: one small one, and what fails is a row."""
    from benchmarks import gpu

    monkeypatch.setattr(gpu, "SMALL", dataclasses.replace(gpu.SMALL, n_layers=1))
    monkeypatch.setattr(gpu, "variants", lambda batches, on_gpu: [gpu.Variant(1, 4, True)])
    monkeypatch.setattr(gpu, "MEASURED", 4)
    gpu.main(["--rehearse", "--json", str(tmp_path / "gpu.json")])
    rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert {row["what"] for row in rows if "failed" not in row} == {
        "step, 4 a dispatch",
        "forward, unrolled, XLA attention",
        "forward, scanned, XLA attention",
        "pytorch, one request per dispatch",
    }
    assert "failed: forward, unrolled, cuDNN attention" in capsys.readouterr().out
    late = gpu.measure(rehearse=True, minutes=-1)
    assert {row["failed"] for row in late} == {"no time left"}


def test_the_gpu_script_times_nothing_while_programs_compile(monkeypatch):
    from benchmarks import gpu

    going, overlaps = [0], []

    def slow(*_):
        going[0] += 1
        time.sleep(0.2)
        going[0] -= 1

    variants = [gpu.Variant(1, 1, True), gpu.Variant(1, 4, True)]
    monkeypatch.setattr(gpu, "variants", lambda *_: variants)
    monkeypatch.setattr(gpu, "compile_step", slow)
    monkeypatch.setattr(gpu, "measure_step", lambda *_: overlaps.append(going[0]) or {})
    monkeypatch.setattr(gpu, "measure_forward", lambda *_: {})
    rows = gpu._jax_rows(gpu.SMALL, 128, (1,), np.float32, gpu.Clock(1.0))
    assert overlaps == [0, 0] and not any("failed" in row for row in rows)
    rows = gpu._jax_rows(gpu.SMALL, 128, (1,), np.float32, gpu.Clock(0.001))
    assert "not compiled in time" in rows[0]["failed"] or rows[0]["failed"] == "no time left"
