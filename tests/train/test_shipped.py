"""The files in jdllm/shipped: what they are, and that they answer held-out messages."""

import json

import pytest
from transformers import AutoTokenizer

import jdllm.checkpoint
from jdllm.config import DecodeConfig
from jdllm.train import evaluate, tasks, tokenizer
from jdllm.train.__main__ import NAME, SHIPPED

FLOOR = 0.9
"""Share of right answers, some way below what the README reports, for a dozen answers."""

BASE, D2F = SHIPPED / f"{NAME}-base", SHIPPED / f"{NAME}-d2f"


@pytest.fixture(scope="module")
def held_out():
    return tasks.held_out("test", 12)


def test_the_package_holds_at_most_16_megabytes_of_model():
    assert sum(path.stat().st_size for path in SHIPPED.rglob("*") if path.is_file()) <= 16e6


@pytest.mark.parametrize("folder", [BASE, D2F])
def test_shipped_tokenizers_are_the_generated_one(folder):
    assert json.loads((folder / "tokenizer.json").read_text()) == json.loads(tokenizer.build().to_str())
    assert AutoTokenizer.from_pretrained(folder).chat_template == tokenizer.CHAT_TEMPLATE


def test_the_base_model_answers_under_its_own_decoders(held_out):
    model = jdllm.checkpoint.load(BASE)
    engine = evaluate.start_engine(model.params, model.config, rows=4)
    for settings in ({"decoder": "fast-dllm"}, {"decoder": "llada", "steps": 64}):
        decoded = evaluate.decode(engine, DecodeConfig(**evaluate.DEFAULTS, **settings), held_out)
        (result,) = evaluate.score(held_out, "base", decoded, by_length=False)
        assert result.exact >= FLOOR


def test_the_d2f_model_answers_at_its_defaults(held_out):
    model = jdllm.checkpoint.load(D2F)
    assert model.meta["decoder"] == "d2f"
    assert model.meta["defaults"] == evaluate.DEFAULTS
    engine = evaluate.start_engine(model.params, model.config, rows=4)
    decoded = evaluate.decode(engine, DecodeConfig(**model.meta["defaults"]), held_out)
    (result,) = evaluate.score(held_out, "d2f", decoded, by_length=False)
    assert result.exact >= FLOOR
    assert result.tokens_per_step > 2
