"""Training, adapters and export on a model of two thin layers."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import jdllm.checkpoint
from jdllm.convert.__main__ import main as convert
from jdllm.models import llada
from jdllm.train import batches, export, lora, recipe, tokenizer, trainer
from jdllm.train.objective import masked_cross_entropy
from jdllm.train.trainer import Schedule, fit

CFG = dataclasses.replace(recipe.model(tokenizer.build()), d_model=32, n_layers=2, n_heads=2, n_kv_heads=2, d_ff=48)
SCHEDULE = Schedule(steps=12, peak=3e-3, warmup=2)


@pytest.fixture(scope="module")
def batch():
    """Eight rows of one batch, the same in every round: tiny, and soon learnt."""
    first = next(batches.rounds(tokenizer.build(), batches.base_row, 0, 0, 1))[0]
    return {name: array[:8] for name, array in first.items()}


@pytest.fixture(scope="module")
def random_adapter():
    keys = iter(jax.random.split(jax.random.key(1), 100))
    return {name: 0.2 * jax.random.normal(next(keys), w.shape) for name, w in lora.init(CFG, 0).items()}


def rounds(batch):
    def stream(first):
        while True:
            yield [batch] * 3

    return stream


def loss(params, batch):
    return masked_cross_entropy(params, CFG, **batch)


def test_the_loss_falls(batch, tmp_path):
    start = llada.init(CFG, 0)
    end = fit(loss, start, rounds(batch), SCHEDULE, tmp_path)
    assert loss(end, batch) < 0.8 * loss(start, batch)


def test_a_stopped_run_continues_as_if_never_stopped(batch, tmp_path, monkeypatch):
    def stop(params, progress):
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer, "SAVE_SECONDS", -1)
    whole = fit(loss, llada.init(CFG, 0), rounds(batch), SCHEDULE, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        fit(loss, llada.init(CFG, 0), rounds(batch), SCHEDULE, tmp_path / "parts", stop, every=5)
    _, progress = trainer.load(tmp_path / "parts", whole)
    assert (progress.step, progress.round) == (3, 1)
    resumed = fit(loss, llada.init(CFG, 0), rounds(batch), SCHEDULE, tmp_path / "parts")
    assert all((resumed[name] == whole[name]).all() for name in whole)


TRAIN = """
import sys, jax, numpy as np
devices, file, out = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.config.update("jax_num_cpu_devices", devices)
from pathlib import Path
sys.path.insert(0, sys.argv[4])
import test_training as t
batch = dict(np.load(file))
end = t.fit(t.loss, t.llada.init(t.CFG, 0), t.rounds(batch), t.SCHEDULE, Path(out))
assert len(jax.devices()) == devices
"""


def test_two_devices_train_as_one(batch, tmp_path):
    """Seven rows, so that one has to be filled in, with no weight."""
    np.savez(tmp_path / "batch.npz", **{name: array[:7] for name, array in batch.items()})
    for devices in ("1", "2"):
        arguments = [devices, str(tmp_path / "batch.npz"), str(tmp_path / devices), str(Path(__file__).parent)]
        subprocess.run(
            [sys.executable, "-c", TRAIN, *arguments], check=True, env={**os.environ, "JAX_PLATFORMS": "cpu"}
        )
    one, two = (trainer.load(tmp_path / devices, llada.init(CFG, 0))[0] for devices in ("1", "2"))
    for name, weight in one.items():
        np.testing.assert_allclose(two[name], weight, atol=2e-4)


def test_an_adapter_starts_without_effect_and_merges_as_low_rank_sums(random_adapter):
    params = llada.init(CFG, 0)
    fresh = lora.merge(params, lora.init(CFG, 0))
    assert all((fresh[name] == params[name]).all() for name in params)
    merged = lora.merge(params, random_adapter)
    x = jax.random.normal(jax.random.key(2), (3, 32))
    a, b = random_adapter["layers.1.gate.a"], random_adapter["layers.1.gate.b"]
    unmerged = x @ params["layers.1.gate"] + lora.ALPHA / lora.RANK * ((x @ a) @ b)
    np.testing.assert_allclose(x @ merged["layers.1.gate"], unmerged, rtol=1e-4, atol=1e-4)
    changed = {name for name in params if not np.array_equal(merged[name], params[name])}
    assert changed == {name for name in params if name.split(".")[-1] in lora.MATRICES and name.startswith("layers")}


def test_exported_files_convert_to_the_same_logits(tmp_path, random_adapter):
    params = llada.init(CFG, 0)
    hf, peft = tmp_path / "hf", tmp_path / "lora"
    export.write_checkpoint(hf, CFG, params)
    export.write_adapter(peft, random_adapter, "hf")
    tokens = np.arange(20, dtype=np.int32)[None]
    for name, arguments, wanted in (
        ("base", [], params),
        ("d2f", ["--lora", str(peft)], lora.merge(params, random_adapter)),
    ):
        assert convert([str(hf), str(tmp_path / name), *arguments]) == 0
        loaded = jdllm.checkpoint.load(tmp_path / name)
        assert loaded.config == CFG
        expected = llada.logits(wanted, CFG, tokens)
        np.testing.assert_allclose(llada.logits(loaded.params, loaded.config, tokens), expected, atol=1e-4)
