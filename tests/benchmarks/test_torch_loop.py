"""The PyTorch loop is the algorithm that it claims to be: it equals every golden D2F trace of a LLaDA."""

import functools

import numpy as np
import pytest

from benchmarks import golden
from benchmarks.torch_loop import TorchModel, TorchRequest, generate, take_turns
from jdllm.config import DecodeConfig

TRACES = golden.traces()


@functools.cache
def network(model: str, adapter: str | None) -> TorchModel:
    return TorchModel(*golden.load(model, adapter))


def test_all_traces_are_found():
    assert len(TRACES) == 25


@pytest.mark.parametrize("trace", TRACES, ids=lambda t: t.name)
def test_equals_golden_trace(trace: golden.Trace):
    request = TorchRequest(network(trace.model, trace.adapter), trace.prompt_ids, trace.decode)
    for snapshot in trace.snapshots:
        assert request.step()
        np.testing.assert_array_equal(request.canvas.numpy(), snapshot[snapshot >= 0])
    assert not request.step()
    assert request.ids == list(trace.expected_ids)
    assert len(request.passes) == trace.nfe


def test_requests_that_take_turns_do_not_touch_each_other():
    traces = [t for t in TRACES if t.adapter == "llada-tiny-d2f-lora"][:4]
    model = network("llada-tiny", "llada-tiny-d2f-lora")
    requests = [TorchRequest(model, t.prompt_ids, t.decode) for t in traces]
    assert take_turns(requests) == max(t.nfe for t in traces)
    assert [r.ids for r in requests] == [list(t.expected_ids) for t in traces]


def test_what_the_loop_does_not_know_is_refused():
    model = network("llada-tiny", None)
    for decode in (DecodeConfig(early_stop=True), DecodeConfig(early_stop=False, temperature=1.0)):
        with pytest.raises(ValueError, match="greedy"):
            generate(model, [1, 2], decode)
