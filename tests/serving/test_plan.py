"""Plans: what settings come to is worked out once, and for nobody else's settings."""

import numpy as np
import pytest

from jdllm.config import RequestError
from jdllm.denoise.request import request as pack
from jdllm.serving import plan
from jdllm.serving.model import ServedModel
from jdllm.serving.schemas import _DECODE_FIELDS, ChatRequest

OTHER = {
    "decoder": "llada",
    "block_size": 8,
    "block_length": 16,
    "block_add_threshold": 0.3,
    "decoded_token_threshold": 0.5,
    "skip_threshold": 0.7,
    "confidence": "margin",
    "steps": 8,
    "cache": "dual",
    "threshold": 0.6,
    "factor": 1.5,
    "remasking": "random",
    "cfg_scale": 1.0,
    "logits_eos_inf": True,
    "confidence_eos_eot_inf": True,
    "alg": "entropy",
    "alg_temp": 0.5,
    "eps": 0.01,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "early_stop": False,
    "infill": True,
    "min_tokens": 2,
    "ignore_eos": True,
}


@pytest.fixture
def model(kit, byte_tokenizer):
    return ServedModel(lambda progress: None, byte_tokenizer, kit.MODEL, 4, 64, adapters=("one",), alone={"top_k": 3})


def decoded(model, request, name="one", max_tokens=16, alternatives=0):
    ours = {"max_tokens": max_tokens, "adapter": model.adapter_number(name), "alternatives": alternatives}
    return request.decode(model.config.family, model.defaults_of(name), model.tokenizer, ours)


def test_every_setting_has_a_value_here():
    assert set(OTHER) == {*_DECODE_FIELDS, "block_length", "min_tokens", "ignore_eos"}


@pytest.mark.parametrize("name", OTHER)
@pytest.mark.parametrize("decoder", ["d2f", "llada", "fast-dllm"])
def test_requests_that_differ_in_a_setting_have_plans_of_their_own(model, name, decoder):
    """Whichever of them comes first, each gets what it asks for, refusals too."""
    plain, other = ChatRequest(decoder=decoder), ChatRequest(**{"decoder": decoder, name: OTHER[name]})
    for request in (plain, other, plain, other):
        try:
            wanted = decoded(model, request)
        except RequestError as refused:
            with pytest.raises(RequestError, match=refused.field):
                model.plans.of(request, "one", 16, 0)
        else:
            assert model.plans.of(request, "one", 16, 0).decode == wanted


def test_and_those_that_differ_in_model_length_or_alternatives(model):
    request = ChatRequest(decoder="llada")
    kinds = [("one", 16, 0), ("base", 16, 0), ("one", 8, 0), ("one", 16, 2)]
    for kind in kinds * 2:
        assert model.plans.of(request, *kind).decode == decoded(model, request, *kind)
    assert model.plans.of(ChatRequest(decoder="d2f"), "base", 16, 0).decode.top_k == 3


def test_it_packs_what_the_engine_would(model, kit):
    known = model.plans.of(ChatRequest(temperature=0.5), "one", 16, 0)
    for prompt, seed in (([1, 2, 3], 7), ([4], 8)):
        packed, wanted = known.pack(prompt, seed), pack(prompt, known.decode.with_seed(seed), kit.MODEL, 64)
        for name in ("progress", "settings", "schedule", "tokens"):
            np.testing.assert_array_equal(getattr(packed, name), getattr(wanted, name))


def test_what_the_engine_cannot_serve_is_refused_every_time(model):
    for _ in range(2):
        with pytest.raises(RequestError, match="steps"):
            model.plans.of(ChatRequest(decoder="llada", steps=3, block_size=8), "one", 16, 0).pack([1], 0)


def test_they_are_made_once_and_not_kept_for_ever(model, monkeypatch):
    made, decode = [], ChatRequest.decode
    monkeypatch.setattr(ChatRequest, "decode", lambda *args: made.append(1) or decode(*args))
    for i in range(3 * plan.MOST_PLANS):
        for _ in range(2):
            model.plans.of(ChatRequest(top_k=i), "one", 16, 0)
    assert len(made) == 3 * plan.MOST_PLANS and len(model.plans._known) <= plan.MOST_PLANS


def test_a_refusal_takes_no_plan_from_others(model):
    for i in range(plan.MOST_PLANS):
        model.plans.of(ChatRequest(top_k=i), "one", 16, 0)
    with pytest.raises(RequestError):
        model.plans.of(ChatRequest(top_p=2.0), "one", 16, 0)
    assert len(model.plans._known) == plan.MOST_PLANS
