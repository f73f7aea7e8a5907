"""The settings of every decoder: who reads what, and the schedules, against the official numbers."""

import dataclasses

import numpy as np
import pytest
from scripted import SCRIPT_MODEL

from jdllm import decoders
from jdllm.config import DecodeConfig, RequestError
from jdllm.decoders import COMMON, TABLE, alg_of, at_least, check, decode_config, dream_counts, linspace, shares

LLADA = SCRIPT_MODEL
DREAM = dataclasses.replace(SCRIPT_MODEL, family="dream", shifted_logits=True)
MODELS = {"llada": LLADA, "dream": DREAM}
EXAMPLES = {
    "block_size": 8,
    "block_add_threshold": 0.5,
    "decoded_token_threshold": 0.5,
    "skip_threshold": 0.5,
    "confidence": "margin",
    "steps": 8,
    "cache": "dual",
    "threshold": 0.5,
    "factor": 1.0,
    "remasking": "random",
    "cfg_scale": 1.0,
    "logits_eos_inf": True,
    "confidence_eos_eot_inf": True,
    "alg": "topk_margin",
    "alg_temp": 0.5,
    "eps": 0.01,
    "top_p": 0.5,
    "top_k": 5,
}


def test_every_setting_has_an_example():
    """A setting added to DecodeConfig is read by somebody, and tested here."""
    assert {f.name for f in dataclasses.fields(DecodeConfig)} == COMMON | EXAMPLES.keys()
    assert set().union(*(d.settings for d in TABLE.values())) == EXAMPLES.keys()


@pytest.mark.parametrize(("decoder", "family"), TABLE)
@pytest.mark.parametrize("setting", EXAMPLES)
def test_a_setting_that_a_decoder_does_not_use_is_refused_by_name(decoder, family, setting):
    given = {"decoder": decoder, "max_tokens": 16, setting: EXAMPLES[setting]}
    if setting in TABLE[decoder, family].settings:
        assert getattr(decode_config(given, family), setting) == EXAMPLES[setting]
        return
    with pytest.raises(RequestError, match=f"decoder {decoder} does not use it") as error:
        decode_config(given, family)
    assert error.value.field == setting
    with pytest.raises(RequestError) as error:  # the same for whoever makes a DecodeConfig by hand
        check(DecodeConfig(**given), MODELS[family], [1], 64)
    assert error.value.field == setting


@pytest.mark.parametrize(("decoder", "family"), TABLE)
def test_what_asks_for_nothing_is_taken(decoder, family):
    """OpenAI clients send top_p 1 whatever they want."""
    given = {"decoder": decoder, "top_p": 1, "top_k": 0, "cfg_scale": 0, "alg_temp": 0.0}
    check(decode_config(given, family), MODELS[family], [1], 256)


@pytest.mark.parametrize(
    ("given", "family", "field"),
    [
        ({"decoder": "beam"}, "llada", "decoder"),
        ({"decoder": 3}, "llada", "decoder"),
        ({"decoder": "dream"}, "llada", "decoder"),
        ({"decoder": "llada"}, "dream", "decoder"),
        ({"decoder": "llada", "max_tokens": 64, "steps": 3}, "llada", "steps"),
        ({"decoder": "llada", "max_tokens": 64, "steps": 128}, "llada", "steps"),
        ({"decoder": "fast-dllm", "cache": "half"}, "llada", "cache"),
        ({"decoder": "fast-dllm", "cache": "none"}, "dream", "cache"),
        ({"decoder": "fast-dllm", "alg": "origin"}, "dream", "alg"),
        ({"decoder": "fast-dllm", "alg": "entropy", "threshold": 0.5}, "dream", "threshold"),
        ({"decoder": "fast-dllm", "alg": "entropy", "steps": 4}, "dream", "steps"),
        ({"decoder": "fast-dllm", "remasking": "random", "threshold": 0.5}, "llada", "remasking"),
        ({"decoder": "fast-dllm", "remasking": "random"}, "llada", "steps"),
        ({"decoder": "llada", "confidence_eos_eot_inf": True}, "llada", "confidence_eos_eot_inf"),
        ({"decoder": "llada", "cfg_scale": -1.0}, "llada", "cfg_scale"),
        ({"decoder": "dream", "eps": 0.0}, "dream", "eps"),
        ({"steps": 4}, "llada", "steps"),
        ({"decoder": "dream", "alg": "origin", "alg_temp": 1.0}, "dream", "alg_temp"),
        ({"decoder": "dream", "alg": "confidence_threshold", "alg_temp": 1.0}, "dream", "alg_temp"),
        ({"decoder": "dream", "alg": "confidence_threshold", "eps": 0.1}, "dream", "eps"),
        ({"decoder": "dream", "steps": 1000, "max_tokens": 8}, "dream", "steps"),
    ],
)
def test_bad_settings_are_named(given, family, field):
    with pytest.raises(RequestError) as error:
        check(decode_config(given, family), MODELS[family], [1], 100)
    assert error.value.field == field


def test_defaults_that_a_decoder_does_not_read_are_left_out():
    assert decode_config({"decoder": "dream"}, "dream", {"block_size": 16, "max_tokens": 9}).max_tokens == 9


def test_case_19_quotas(golden):
    """LLaDA's transfer schedule, in the official numbers."""
    for case in golden.manifest["transfer_schedule"]:
        assert shares(case["masks"], case["steps"]) == case["tokens_per_step"]


def test_dream_schedules(golden):
    for case in golden.manifest["dream_schedule"]:
        assert dream_counts(case["masks"], case["steps"], case["eps"]) == case["tokens_per_step"]


def test_linspace_equals_torch():
    torch = pytest.importorskip("torch")
    for count in (2, 3, 8, 17, 129, 257, 513):
        np.testing.assert_array_equal(linspace(1, 1e-3, count), torch.linspace(1, 1e-3, count).numpy())


def test_equality_reaches_a_threshold():
    for threshold in (0.0, 0.1, 0.5, 0.9, 1.0):
        confidence = np.float32(threshold)
        assert confidence > np.float32(at_least(threshold))
        assert not np.nextafter(confidence, np.float32(-1)) > np.float32(at_least(threshold)) or threshold == 0


def test_steps_count_where_they_are_scheduled_alone():
    """With a threshold they only have to divide, and zero shares are no passes."""
    for given, family in (
        ({"decoder": "fast-dllm", "steps": 2048, "max_tokens": 64}, "llada"),
        ({"decoder": "fast-dllm", "steps": 2048, "max_tokens": 64, "threshold": 0.5}, "llada"),
        ({"decoder": "fast-dllm", "steps": 2, "max_tokens": 64, "threshold": 0.9}, "dream"),
        ({"decoder": "dream", "alg": "confidence_threshold", "steps": 2048, "max_tokens": 64}, "dream"),
    ):
        check(decode_config(given, family), MODELS[family], [1], 100)


def test_a_request_wins_over_the_defaults_that_contradict_it():
    """A checkpoint's default rule must not make a request fail for what it never gave."""
    defaults = {"decoder": "fast-dllm", "threshold": 0.9, "steps": 8, "cache": "dual"}
    decode = decode_config({"alg": "entropy", "max_tokens": 64}, "dream", defaults)
    check(decode, DREAM, [1], 100)
    assert (decode.threshold, decode.steps, decode.cache) == (None, None, "dual")
    decode = decode_config({"max_tokens": 50, "block_size": 10}, "llada", defaults)
    assert (decode.threshold, decode.steps) == (0.9, None)


def test_dream_takes_a_quota_when_steps_are_given():
    assert alg_of(decode_config({"decoder": "fast-dllm", "steps": 8}, "dream")) == "entropy"
    assert alg_of(decode_config({"decoder": "fast-dllm"}, "dream")) == "confidence_threshold"
    assert alg_of(decode_config({"decoder": "dream"}, "dream")) == "entropy"


def test_a_million_steps_are_refused_or_cut_before_they_are_scheduled(monkeypatch):
    """Requests are checked on the thread that serves everyone."""
    made = []
    for name in ("shares", "dream_counts"):
        make = getattr(decoders, name)

        def counted(masks, passes, *rest, make=make, **more):
            made.append(passes)
            return make(masks, passes, *rest, **more)

        monkeypatch.setattr(decoders, name, counted)
    steps = 1 << 20
    for given, family in (
        ({"decoder": "llada", "max_tokens": 64, "steps": steps}, "llada"),
        ({"decoder": "dream", "max_tokens": 64, "steps": steps}, "dream"),
        ({"decoder": "dream", "alg": "origin", "max_tokens": 64, "steps": steps}, "dream"),
        ({"decoder": "fast-dllm", "alg": "entropy", "max_tokens": 64, "steps": steps}, "dream"),
    ):
        with pytest.raises(RequestError, match=f"{steps} passes to schedule"):
            check(decode_config(given, family), MODELS[family], [1], 100)
    given = {"decoder": "fast-dllm", "max_tokens": 64, "steps": steps}
    decode = decode_config(given, "llada")
    check(decode, MODELS["llada"], [1], 100)
    assert decoders.schedule_length([1], decode, MODELS["llada"]) == 64
    assert made and max(made) <= 100


def test_a_default_number_of_steps_is_for_the_default_length():
    defaults = {"decoder": "llada", "max_tokens": 64, "steps": 32}
    for given in ({}, {"max_tokens": 64}):
        assert decode_config(given, "llada", defaults).steps == 32
    for given in ({"max_tokens": 32}, {"block_size": 16}, {"steps": None, "max_tokens": 8}):
        assert decode_config(given, "llada", defaults).steps is None
