import json
from pathlib import Path

import jax.numpy as jnp
import pytest

from jdllm.config import model_config
from jdllm.convert import names
from jdllm.convert.errors import ConvertError
from jdllm.models import llada

LAYOUTS = Path(__file__).parents[1] / "data" / "golden" / "real_layouts"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"n_kv_heads": 2},
        {"n_kv_heads": 1, "multi_query_attention": True},
        {"weight_tying": True},
        {"include_bias": True},
        {"include_qkv_bias": True},
        {"bias_for_layer_norm": True, "weight_tying": True, "include_bias": True},
        {"vocab_size": 157, "n_layers": 1},
    ],
)
def test_the_table_names_exactly_the_weights_of_the_model(base, changes):
    _check_table(base(**changes))


@pytest.mark.parametrize("changes", [{}, {"num_key_value_heads": None}, {"tie_word_embeddings": True}])
def test_so_does_the_table_of_dream(dream, changes):
    _check_table(dream(**changes))


def _check_table(made):
    ours = {weight.name: weight.stored_shape for weight in made.weights}
    theirs = llada.abstract_params(model_config(made.hf), jnp.float32)
    assert list(ours) == list(llada.weight_shapes(model_config(made.hf)))
    assert ours == {name: leaf.shape for name, leaf in theirs.items()}


@pytest.mark.parametrize(("name", "groups"), [("llada-8b", 32 + 3), ("dream-7b", 28 + 3)])
def test_real_layouts(name, groups):
    layout = json.loads((LAYOUTS / f"{name}.json").read_text())
    wanted = names.weights(model_config(layout["config"]))
    names.check(wanted, {name: tuple(shape) for name, shape in layout["tensors"].items()}, name)
    assert len({weight.group for weight in wanted}) == groups  # the layers, embedding, norm, head


def test_missing_unexpected_and_misshapen_tensors_are_listed(base):
    made = base()
    shapes = {name: array.shape for name, array in made.tensors.items()}
    del shapes["model.transformer.blocks.1.up_proj.weight"]
    shapes["model.transformer.blocks.2.up_proj.weight"] = (64, 32)
    shapes["model.transformer.ln_f.weight"] = (31,)
    with pytest.raises(ConvertError) as error:
        names.check(made.weights, shapes, "base")
    assert "missing tensors: model.transformer.blocks.1.up_proj.weight;" in str(error.value)
    assert "unexpected tensors: model.transformer.blocks.2.up_proj.weight;" in str(error.value)
    assert "model.transformer.ln_f.weight is [31], config.json asks for [32]" in str(error.value)


def test_g13_ff_out_is_the_head_above_and_the_down_projection_in_a_block(base):
    by_tensor = {weight.tensor: weight.name for weight in base().weights}
    assert by_tensor["model.transformer.ff_out.weight"] == "head"
    assert by_tensor["model.transformer.blocks.1.ff_out.weight"] == "layers.1.down"
    assert by_tensor["model.transformer.blocks.0.ff_proj.weight"] == "layers.0.gate"
