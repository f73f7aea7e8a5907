"""Loading converted checkpoints: layouts, dtypes, meshes, damage."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import PartitionSpec

from jdllm import sharding
from jdllm.checkpoint import CheckpointError, load
from jdllm.convert import __main__ as command
from jdllm.models import llada

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "data" / "golden"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """llada-tiny-gqa, converted."""
    out = tmp_path_factory.mktemp("checkpoints") / "gqa"
    assert command.main([str(GOLDEN / "llada-tiny-gqa"), str(out)]) == 0
    return out


@pytest.fixture
def copy(made, tmp_path):
    return Path(shutil.copytree(made, tmp_path / "copy"))


def _edit(folder, **changes):
    record = json.loads((folder / "jdllm.json").read_text())
    record |= changes
    (folder / "jdllm.json").write_text(json.dumps(record))


def test_load(made):
    seen = []
    checkpoint = load(made, progress=lambda done, total: seen.append((done, total)))
    want = llada.abstract_params(checkpoint.config, jnp.float32)
    assert {name: (leaf.shape, leaf.dtype) for name, leaf in checkpoint.params.items()} == {
        name: (leaf.shape, leaf.dtype) for name, leaf in want.items()
    }
    assert list(checkpoint.params) == list(llada.weight_shapes(checkpoint.config))
    assert checkpoint.path == made and checkpoint.meta["source"] == "llada-tiny-gqa"
    total = checkpoint.meta["weights"]["bytes"]
    assert len(seen) == 6 and seen[-1] == (total, total)


def test_plain_orbax_restores_it(made):
    """The weights are an ordinary Orbax tree, whoever reads it."""
    with ocp.StandardCheckpointer() as orbax:
        plain = orbax.restore(made / "weights")
    ours = load(made).params
    assert plain.keys() == ours.keys()
    for name, value in plain.items():
        np.testing.assert_array_equal(np.asarray(value), np.asarray(ours[name]))


@pytest.mark.parametrize("dtype", ["bfloat16", jnp.bfloat16, jnp.float16])
def test_cast_while_loading(made, dtype):
    exact, cast = load(made).params, load(made, dtype).params
    for name, value in cast.items():
        assert value.dtype == jnp.dtype(dtype)
        np.testing.assert_array_equal(
            np.asarray(value, np.float32), np.asarray(exact[name].astype(dtype), np.float32), err_msg=name
        )


def test_no_checkpoint_at_all(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        load(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match=r"has no jdllm\.json"):
        load(tmp_path)
    with pytest.raises(CheckpointError, match=r"python -m jdllm\.convert llada-tiny DST"):
        load(GOLDEN / "llada-tiny")


def test_records_that_cannot_be_used(copy):
    for changes, words in (
        ({"format": 2, "jdllm_version": "9.0"}, "written by jdllm 9.0.*update jdllm"),
        ({"format": None}, "no format number"),
        ({"format": 1, "family": "gpt"}, "family 'gpt'"),
        ({"family": "llada", "dtype": "int3"}, "dtype 'int3'"),
        ({"dtype": "float32", "model": {"family": "llada"}}, "model configuration"),
    ):
        _edit(copy, **changes)
        with pytest.raises(CheckpointError, match=words):
            load(copy)
    (copy / "jdllm.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        load(copy)
    (copy / "jdllm.json").unlink()
    with pytest.raises(CheckpointError, match="unfinished conversion"):
        load(copy)


def test_damaged_weights(copy):
    whole = (copy / "weights" / "layers.1.down" / "0.0").read_bytes()
    (copy / "weights" / "layers.1.down" / "0.0").write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match=r"layers\.1\.down/0\.0 is cut short"):
        load(copy)
    (copy / "weights" / "layers.1.down" / "0.0").unlink()
    with pytest.raises(CheckpointError, match=r"layers\.1\.down/0\.0 is missing"):
        load(copy)
    (copy / "weights" / "_METADATA").unlink()
    with pytest.raises(CheckpointError, match="not a complete Orbax checkpoint"):
        load(copy)
    shutil.rmtree(copy / "weights")
    with pytest.raises(CheckpointError, match="not complete"):
        load(copy)


def test_h5_foreign_layouts_name_the_first_differing_path(made, copy):
    params = {name: np.asarray(value) for name, value in load(made).params.items()}
    without = {name: value for name, value in params.items() if name != "layers.0.q"}
    for tree, words in (
        ({"params": {"params": params}}, "no weight embed; it has params/params/embed instead"),
        ({name: {"value": value} for name, value in params.items()}, "no weight embed; it has embed/value instead"),
        (without, r"no weight layers\.0\.q"),
        ({**params, "extra": params["norm"]}, "has extra"),
        ({**params, "norm": params["norm"][:3]}, r"norm has shape \[3\], expected \[64\]"),
    ):
        with ocp.StandardCheckpointer() as orbax:
            orbax.save(copy / "weights", tree, force=True)
        with pytest.raises(CheckpointError, match=words):
            load(copy)


def test_sharding_never_cuts_a_head(made):
    cfg = load(made).config  # 4 heads, 2 key heads, d_ff 176, vocabulary 384
    assert sharding.spec("layers.0.q", cfg, 4) == PartitionSpec(None, "model")
    assert sharding.spec("layers.0.k", cfg, 4) == PartitionSpec()
    assert sharding.spec("layers.0.k", cfg, 2) == PartitionSpec(None, "model")
    assert sharding.spec("layers.0.k_bias", cfg, 2) == PartitionSpec("model")
    assert sharding.spec("layers.0.attn_out", cfg, 4) == PartitionSpec("model", None)
    assert sharding.spec("layers.0.attn_out_bias", cfg, 4) == PartitionSpec()
    assert sharding.spec("layers.0.q", cfg, 3) == PartitionSpec()
    assert sharding.spec("layers.0.down", cfg, 8) == PartitionSpec("model", None)
    assert sharding.spec("norm", cfg, 2) == PartitionSpec()
    assert sharding.spec("embed", cfg, 3) == PartitionSpec("model")
    with pytest.raises(ValueError, match="1 devices cannot form 2 data rows"):
        sharding.make_mesh(2, jax.devices()[:1])


DEVICES = """
import sys
import jax, numpy as np, orbax.checkpoint as ocp
from jdllm import checkpoint, sharding
from jdllm.models import llada

made, saved, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
assert len(jax.devices()) == count
alone = checkpoint.load(made)

def check(params):
    for name, value in params.items():
        np.testing.assert_array_equal(np.asarray(value), np.asarray(alone.params[name]))

if count == 8:
    mesh = sharding.make_mesh(data=2)
    spread = checkpoint.load(made, mesh=mesh)
    check(spread.params)
    assert spread.params["layers.0.gate"].sharding.shard_shape((64, 176)) == (64, 44)
    tokens = np.arange(24, dtype=np.int32)[None]
    with jax.default_matmul_precision("highest"):
        forward = jax.jit(llada.logits, static_argnums=1)
        near = [np.asarray(forward(c.params, c.config, tokens)) for c in (alone, spread)]
    np.testing.assert_allclose(*near, atol=3e-4)
    with jax.set_mesh(mesh):  # H4
        inside = checkpoint.load(made, mesh=mesh)
        check(inside.params)
        assert inside.params["head"].sharding == spread.params["head"].sharding
        check(checkpoint.load(made).params)
    with ocp.StandardCheckpointer() as orbax:  # H1: saved from all eight
        orbax.save(saved + "/weights", spread.params, force=True)
else:
    for folder in (made, saved):
        check(checkpoint.load(folder).params)
        check(checkpoint.load(folder, mesh=sharding.make_mesh()).params)
print("ok")
"""


def test_h1_h4_saved_on_eight_devices_restored_on_three_and_one(made, copy):
    for count in (8, 3):
        flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={count}", "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(
            [sys.executable, "-c", DEVICES, str(made), str(copy), str(count)],
            cwd=ROOT, env={**os.environ, **flags}, capture_output=True, text=True,
        )  # fmt: skip
        assert done.stdout.strip().endswith("ok"), done.stderr
    saved = load(copy).params
    for name, value in load(made).params.items():
        np.testing.assert_array_equal(np.asarray(saved[name]), np.asarray(value))
