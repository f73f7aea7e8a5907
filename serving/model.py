"""What is served: weights, tokenizer, limits and defaults of one checkpoint."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jdllm import tokenizer as tokenizers
from jdllm.config import DecodeConfig, ModelConfig
from jdllm.runtime import (
    UsageError,
    checkpoint_warnings,
    decode_defaults,
    default_dtype,
    defaults_beside_adapters,
)
from jdllm.serving.plan import Plans
from jdllm.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jdllm.config import EngineConfig
    from jdllm.denoise.state import Request
    from jdllm.engine import Engine

Progress = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """One loaded checkpoint.

    Attributes:
        new_engine: makes a compiled engine.
        config: shape and special ids.
        max_length: canvas positions, prompt and answer together.
        defaults: decode settings that the checkpoint recommends.
        fingerprint: OpenAI's ``system_fingerprint``.
        compiles: programs that this process has compiled so far.
        adapters: names of the LoRA adapters beside the weights; the first is 1 in DecodeConfig.
        alone: the defaults of the model without an adapter, where they differ.
        on_processors: it computes on those that the rest of the server needs, too.
    """

    new_engine: "Callable[[Progress], Engine]"
    tokenizer: Tokenizer
    config: ModelConfig
    max_rows: int
    max_length: int
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fingerprint: str = "jdllm"
    compiles: Callable[[], int] = lambda: 0
    adapters: Sequence[str] = ()
    alone: Mapping[str, Any] | None = None
    on_processors: bool = False

    @functools.cached_property
    def plans(self) -> Plans:
        """What the settings of its requests come to."""
        return Plans(self)

    def adapter_number(self, name: str) -> int:
        """DecodeConfig's ``adapter`` for requests to the model of this name."""
        return self.adapters.index(name) + 1 if name in self.adapters else 0

    def pack(self, ids: Sequence[int], decode: DecodeConfig) -> "Request":
        """What the engine writes for a request that has been checked, made while it works (Engine.insert)."""
        from jdllm.denoise.request import request

        return request(ids, decode, self.config, self.max_length)

    def reseed(self, packed: "Request", seed: int) -> "Request":
        """The same request with another seed."""
        from jdllm.denoise.request import with_seed

        return with_seed(packed, seed)

    def defaults_of(self, name: str) -> Mapping[str, Any]:
        """Decode settings where a request to ``name`` gives none."""
        return self.defaults if name in self.adapters else self.alone or self.defaults


def open_model(
    folder: Path,
    progress: Progress,
    *,
    max_rows: int,
    max_length: int | None = None,
    steps_per_dispatch: int = 1,
    dtype: str | None = None,
    chat_template: str | None = None,
    trust_remote_code: bool = False,
    adapters: Mapping[str, Path] | None = None,
) -> ServedModel:
    """Load a converted checkpoint. Imports JAX; belongs to the engine's thread."""
    import jax

    from jdllm import __version__, checkpoint
    from jdllm.config import MAX_LENGTH, EngineConfig
    from jdllm.convert.adapter import read_adapters
    from jdllm.engine import Engine

    dtype = default_dtype(dtype)
    progress(f"loading {folder} as {dtype}")
    try:
        loaded = checkpoint.load(folder, dtype=dtype)
    except checkpoint.CheckpointError as error:
        raise UsageError(f"--model: {error}") from None
    words = tokenizers.load(folder, loaded.config, chat_template, trust_remote_code)
    if words is None:
        text = f"--model: {folder} has no tokenizer (tokenizer.json, or vocab.json and merges.txt); a server needs one"
        if code := tokenizers.tokenizer_code(folder):
            text = f"--model: the tokenizer of {folder} is code, {', '.join(code)}; --trust-remote-code runs it"
        raise UsageError(text)
    for warning in [*checkpoint_warnings(loaded.meta), *words.warnings]:
        progress(f"warning: {warning}")
    most = min(loaded.config.max_sequence_length, MAX_LENGTH)
    length = min(max_length or 1024, most)
    if max_length and max_length > length:
        raise UsageError(f"--max-length: {max_length} is above {most}, the most that model and engine take")
    config = EngineConfig(max_rows, length, steps_per_dispatch)
    defaults = decode_defaults(loaded.meta)
    beside = read_adapters(adapters or {}, loaded.config)

    def new_engine(progress: Progress) -> Engine:
        progress(_preflight(loaded.params, config, loaded.config, words))
        engine = Engine(loaded.params, loaded.config, config, beside, words.unused_ids)
        engine.compile(lambda done, total, text: progress(f"compiled {done} of {total}: {text}"))
        engine.measure()
        return engine

    return ServedModel(
        new_engine=new_engine,
        tokenizer=words,
        config=loaded.config,
        max_rows=max_rows,
        max_length=length,
        adapters=tuple(adapters or ()),
        defaults=defaults,
        alone=defaults_beside_adapters(loaded.meta, defaults) if adapters else None,
        fingerprint=f"jdllm-{__version__}-{dtype}",
        compiles=_count_compiles(),
        on_processors=jax.default_backend() == "cpu",
    )


def _memory_limit(device: Any) -> int | None:
    """Bytes that XLA may take of the device's memory; None on a CPU, whose memory is nobody's share."""
    return None if device.platform == "cpu" else (device.memory_stats() or {}).get("bytes_limit")


def _preflight(params: Mapping[str, Any], config: "EngineConfig", model: ModelConfig, words: Tokenizer) -> str:
    """One line on each of device, weights, memory and tokenizer."""
    import jax
    import jax.numpy as jnp

    from jdllm.denoise.state import abstract_state

    size = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
    device, dtype = jax.devices()[0], params["embed"].dtype
    state = abstract_state(model, config.max_rows, config.max_length, jnp.dtype(dtype))
    limit = _memory_limit(device)
    if limit is not None and size(params) + size(state) > limit:
        row = size(state) / config.max_rows
        fit = max(0, int((limit - size(params)) // row))
        raise UsageError(
            f"--max-rows: {config.max_rows} rows of {config.max_length} positions take {size(state) / 1e9:.1f} GB "
            f"beside {size(params) / 1e9:.1f} GB of weights, and XLA may take {limit / 1e9:.1f} GB: at most {fit} fit"
        )
    room = f" of {limit / 1e9:.1f} GB that XLA may take" if limit else ""
    template = "with" if words.chat_template else "without"
    return "\n".join(
        [
            f"device     {device.device_kind} ({device.platform})",
            f"weights    {len(params)} arrays, {dtype}, {size(params) / 1e9:.3f} GB",
            f"memory     {size(state) / 1e9:.3f} GB for {config.max_rows} rows of {config.max_length} positions{room}",
            f"tokenizer  {model.vocab_size} ids, {len(words.unused_ids)} without a token; {template} a chat template; "
            f"an answer ends at {' or '.join(map(str, words.stop_ids))}",
        ]
    )


def _count_compiles() -> Callable[[], int]:
    """JAX's own count, which also sees programs that nobody meant to compile."""
    import jax.monitoring

    count = 0

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        nonlocal count
        count += event.endswith("backend_compile_duration")

    jax.monitoring.register_event_duration_secs_listener(listen)
    return lambda: count
