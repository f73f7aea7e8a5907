"""A scripted denoiser: the compiled step with its output head replaced by a table, so that the schedule can be tested
exactly, and the plain-Python oracle reading the same table."""

import functools
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

import jdllm.denoise.step as step_module
from jdllm.config import DecodeConfig, EngineConfig, ModelConfig
from jdllm.denoise.window import Bucket
from jdllm.engine import Engine
from jdllm.models import llada


class Script:
    """Tables [B, passes, S] of token, probability and fallback confidence: what the model says at each row's n-th pass
    about each position."""

    def __init__(self, token: np.ndarray, probability: np.ndarray, confidence: np.ndarray | None = None):
        self.token = np.asarray(token, np.int32)
        self.probability = np.asarray(probability, np.float32)
        self.confidence = self.probability if confidence is None else np.asarray(confidence, np.float32)

    def forward(self, row: int):
        last = self.token.shape[1] - 1

        def at(x: Sequence[int], nfe: int) -> dict[int, tuple[int, float, float]]:
            n = min(nfe, last)
            tables = (self.token[row, n], self.probability[row, n], self.confidence[row, n])
            return {i: tuple(t[i].item() for t in tables) for i in range(len(x))}

        return at


def scripted_head(params, state, rows, packing, hidden, model):
    """The step's own choice of positions, with the table instead of the logits."""
    table = params["script"]
    _, here = real_head(params, state, rows, packing, hidden, model)
    at = (packing.row, jnp.minimum(rows.nfe[packing.row], table["token"].shape[1] - 1), packing.position)
    token, probability, confidence = (table[name][at] for name in ("token", "probability", "confidence"))
    return (token, probability, confidence, jnp.log(probability)), here


real_head = step_module.decide


class ScriptedEngine(Engine):
    """An engine of one bucket whose model reads a Script."""

    def play(self, script: Script) -> None:
        table = {name: jnp.asarray(getattr(script, name)) for name in ("token", "probability", "confidence")}
        self.params = {**self.params, "script": table}
        self.reset()


SCRIPT_MODEL = ModelConfig(
    family="llada",
    vocab_size=64,
    d_model=8,
    n_layers=1,
    n_heads=1,
    n_kv_heads=1,
    d_ff=8,
    max_sequence_length=4096,
    rope_theta=10_000.0,
    rms_norm_eps=1e-5,
    mask_id=63,
    eos_id=62,
    pad_id=62,
)


@functools.cache
def scripted_engine(rows: int, length: int, passes: int, steps: int = 1, packed: int | None = None) -> ScriptedEngine:
    """An engine whose model will read Scripts of [rows, passes, length]; each shape is compiled once a session."""
    engine = ScriptedEngine(llada.init(SCRIPT_MODEL, 0), SCRIPT_MODEL, EngineConfig(max_rows=rows, max_length=length))
    engine.buckets = [Bucket(rows, packed or rows * length, steps)]
    blank = np.zeros((rows, passes, length))
    engine.play(Script(blank, blank))
    step_module.decide = scripted_head
    try:
        engine.compile()
    finally:
        step_module.decide = real_head
    return engine


PROGRESS = ("live", "length", "start", "end", "settled", "nfe", "stopped")


def run(engine: Engine, requests: Sequence[tuple[list[int], DecodeConfig]]) -> list[dict]:
    """Run one request a slot to the end; for each the list of (row numbers before each pass, canvas), ended by the
    final state."""
    for slot, (prompt, decode) in enumerate(requests):
        engine.insert(slot, slot, prompt, decode)
    history: list[list[dict]] = [[] for _ in requests]
    for _ in range(20_000):
        state = engine.state.rows
        rows = {name: np.asarray(getattr(state, name)) for name in PROGRESS}
        tokens = np.asarray(engine.state.tokens)
        for slot in range(len(requests)):
            if not history[slot] or history[slot][-1]["live"]:
                now = {name: rows[name][slot].item() for name in PROGRESS}
                now["x"] = tokens[slot, : now.pop("length")].tolist()
                history[slot].append(now)
        if not rows["live"].any():
            return history
        engine.step()
    raise AssertionError("rows did not end")
