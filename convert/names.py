"""Which tensor of a PyTorch checkpoint is which weight of jdllm: one table per family, checked both ways."""

import dataclasses
from collections.abc import Mapping

from jdllm.config import ModelConfig
from jdllm.convert.errors import ConvertError, listed


@dataclasses.dataclass(frozen=True)
class Rule:
    """One row of a table; ``{i}`` stands for the layer.

    Attributes:
        module: full path of the PyTorch module. Never matched by suffix: LLaDA calls both the output head and the
            down projection of every layer ``ff_out``.
        weight: name in jdllm.
        shape: PyTorch's shape, [out, in] for a linear layer: D, F, V as everywhere, ``QH`` and ``KH`` all query or
            key heads together.
        bias: the ModelConfig flag under which the module also has a bias of its output size.
        linear: a matrix that jdllm stores transposed, [in, out].
    """

    module: str
    weight: str
    shape: str
    bias: str | None = None
    linear: bool = True


_BLOCK = "model.transformer.blocks.{i}."
LLADA = (
    Rule("model.transformer.wte", "embed", "V D", None, linear=False),
    Rule(_BLOCK + "attn_norm", "layers.{i}.attn_norm", "D", "norm_bias", linear=False),
    Rule(_BLOCK + "q_proj", "layers.{i}.q", "QH D", "qkv_bias"),
    Rule(_BLOCK + "k_proj", "layers.{i}.k", "KH D", "qkv_bias"),
    Rule(_BLOCK + "v_proj", "layers.{i}.v", "KH D", "qkv_bias"),
    Rule(_BLOCK + "attn_out", "layers.{i}.attn_out", "D QH", "linear_bias"),
    Rule(_BLOCK + "ff_norm", "layers.{i}.ff_norm", "D", "norm_bias", linear=False),
    Rule(_BLOCK + "ff_proj", "layers.{i}.gate", "F D", "linear_bias"),
    Rule(_BLOCK + "up_proj", "layers.{i}.up", "F D", "linear_bias"),
    Rule(_BLOCK + "ff_out", "layers.{i}.down", "D F", "linear_bias"),
    Rule("model.transformer.ln_f", "norm", "D", "norm_bias", linear=False),
    Rule("model.transformer.ff_out", "head", "V D", "linear_bias"),
)
"""``ff_proj`` goes through SiLU (gate); ``up_proj`` is multiplied onto it."""

_LAYER = "model.layers.{i}."
DREAM = (
    Rule("model.embed_tokens", "embed", "V D", None, linear=False),
    Rule(_LAYER + "input_layernorm", "layers.{i}.attn_norm", "D", "norm_bias", linear=False),
    Rule(_LAYER + "self_attn.q_proj", "layers.{i}.q", "QH D", "qkv_bias"),
    Rule(_LAYER + "self_attn.k_proj", "layers.{i}.k", "KH D", "qkv_bias"),
    Rule(_LAYER + "self_attn.v_proj", "layers.{i}.v", "KH D", "qkv_bias"),
    Rule(_LAYER + "self_attn.o_proj", "layers.{i}.attn_out", "D QH", "linear_bias"),
    Rule(_LAYER + "post_attention_layernorm", "layers.{i}.ff_norm", "D", "norm_bias", linear=False),
    Rule(_LAYER + "mlp.gate_proj", "layers.{i}.gate", "F D", "linear_bias"),
    Rule(_LAYER + "mlp.up_proj", "layers.{i}.up", "F D", "linear_bias"),
    Rule(_LAYER + "mlp.down_proj", "layers.{i}.down", "D F", "linear_bias"),
    Rule("model.norm", "norm", "D", "norm_bias", linear=False),
    Rule("lm_head", "head", "V D", "linear_bias"),
)

TABLES = {"dream": DREAM, "llada": LLADA}


@dataclasses.dataclass(frozen=True)
class Weight:
    """One weight of one model.

    Attributes:
        name: in jdllm; a bias is its owner's name with ``_bias`` behind it.
        module, tensor: PyTorch module and the name of the tensor in the files.
        shape: as in the files.
        transposed: jdllm stores the transpose.
        linear: the module is a linear layer (what PEFT's ``all-linear`` means).
    """

    name: str
    module: str
    tensor: str
    shape: tuple[int, ...]
    transposed: bool
    linear: bool

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return self.shape[::-1] if self.transposed else self.shape

    @property
    def group(self) -> str:
        """The tensor group: ``layers.3``, ``embed``, ``norm`` or ``head``."""
        owner = self.name.removesuffix("_bias")
        return owner.rpartition(".")[0] or owner


def weights(cfg: ModelConfig) -> list[Weight]:
    """Every weight of the model, in the order of the forward pass.

    The same names and shapes as jdllm.models.llada.abstract_params, without importing jax; a test holds them equal.
    """
    table = TABLES[cfg.family]
    layered = [rule for rule in table if "{i}" in rule.module]
    first, last = table.index(layered[0]), table.index(layered[-1]) + 1
    found = [w for rule in table[:first] for w in _of_rule(rule, cfg)]
    for i in range(cfg.n_layers):
        found += [w for rule in layered for w in _of_rule(rule, cfg, i)]
    found += [w for rule in table[last:] for w in _of_rule(rule, cfg)]
    return found


def _of_rule(rule: Rule, cfg: ModelConfig, i: int = 0) -> list[Weight]:
    if rule.weight == "head" and cfg.weight_tying:
        return []
    letters = {
        "V": cfg.vocab_size,
        "D": cfg.d_model,
        "F": cfg.d_ff,
        "QH": cfg.n_heads * cfg.head_dim,
        "KH": cfg.n_kv_heads * cfg.head_dim,
    }
    shape = tuple(letters[letter] for letter in rule.shape.split())
    module, name = rule.module.format(i=i), rule.weight.format(i=i)
    found = [Weight(name, module, f"{module}.weight", shape, rule.linear, rule.linear)]
    if rule.bias and getattr(cfg, rule.bias):
        found.append(Weight(f"{name}_bias", module, f"{module}.bias", shape[:1], False, rule.linear))
    return found


def check(wanted: list[Weight], shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Compare the weights that the configuration asks for with the tensors that the files have.

    Raises:
        ConvertError: tensors are missing, unexpected, or of another shape; each is listed.
    """
    by_tensor = {weight.tensor: weight for weight in wanted}
    problems = []
    if missing := by_tensor.keys() - shapes.keys():
        problems.append(f"missing tensors: {listed(missing)}")
    if unexpected := shapes.keys() - by_tensor.keys():
        problems.append(f"unexpected tensors: {listed(unexpected)}")
    wrong = [
        f"{name} is {list(shapes[name])}, config.json asks for {list(weight.shape)}"
        for name, weight in by_tensor.items()
        if name in shapes and tuple(shapes[name]) != weight.shape
    ]
    if wrong:
        problems.append(f"wrong shapes: {listed(wrong)}")
    if problems:
        raise ConvertError(f"{where} does not fit its config.json: {'; '.join(problems)}")
