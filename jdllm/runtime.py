"""What has to be set before JAX is imported: memory, compile cache, XLA flags; where the shipped model lies; and what
the commands make of a checkpoint's jdllm.json.

This module imports nothing of JAX.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jdllm.config import DecodeConfig, RequestError

SHIPPED = Path(__file__).resolve().parent / "shipped"
"""Folder of the models that come with the package."""

DTYPES = ("float32", "bfloat16")

NOT_FINITE = (
    "the model gave non-finite numbers, so the answer cannot go on (bad weights, or a dtype too narrow for them)"
)
"""What a user is told of a row that has failed."""


class UsageError(Exception):
    """Something the user gave on the command line cannot work; the text is one clear line."""


def default_cache() -> Path:
    """Where compiled programs are kept between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jdllm" / "compiled"


def configure(memory_fraction: float | None = None, cache: Path | str | None = None) -> dict[str, str]:
    """Set the environment that JAX reads when it is imported; returns what is in force, to be shown.

    What is asked for here wins over the environment, and the environment over our defaults.

    Args:
        memory_fraction: share of an accelerator's memory that JAX takes at the start; None leaves it alone.
        cache: folder of the persistent compile cache; None means JAX_COMPILATION_CACHE_DIR, else ``default_cache()``;
            the empty string switches it off.

    Raises:
        RuntimeError: JAX is already imported, so that the settings would be ignored silently.
        UsageError: a value is out of range, or the folder cannot be made.
    """
    if "jax" in sys.modules:
        raise RuntimeError("runtime.configure must run before JAX is imported")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # XLA's chatter about machine features drowns our own lines
    if memory_fraction is not None:
        if not 0.0 < memory_fraction <= 1.0:
            raise UsageError(f"--memory-fraction: {memory_fraction} must be above 0 and at most 1")
        os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(memory_fraction)
    if cache == "":
        os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
    else:
        folder = Path(cache or os.environ.get("JAX_COMPILATION_CACHE_DIR") or default_cache()).expanduser().resolve()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--compile-cache: cannot make the folder {folder}: {error.strerror}") from None
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)
        # Small programs count too: a restart with dozens of them is what the cache is for.
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
    shown = ("JAX_COMPILATION_CACHE_DIR", "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_FLAGS", "JAX_PLATFORMS")
    return {name: os.environ[name] for name in shown if name in os.environ}


def model_folder(path: str | None) -> Path:
    """The checkpoint folder of ``--model``, or the shipped one. Looks at names only, so that mistakes show at once.

    Raises:
        UsageError: there is no such folder, or it is not a converted checkpoint.
    """
    if path is None:
        shipped = sorted(SHIPPED.glob("*-d2f"))
        if not shipped:
            raise UsageError("--model: this copy of jdllm has no shipped model; give the folder of a converted one")
        return shipped[0]
    folder = Path(path).expanduser().resolve()
    if not folder.is_dir():
        raise UsageError(f"--model: {folder} is not a folder")
    if not (folder / "jdllm.json").is_file():
        if (folder / "config.json").is_file():
            raise UsageError(
                f"--model: {folder} is not converted yet; run: python -m jdllm.convert {folder} {folder.name}-jdllm"
            )
        raise UsageError(f"--model: {folder} holds no converted checkpoint (no jdllm.json)")
    return folder


def decode_defaults(meta: Mapping[str, Any]) -> dict[str, Any]:
    """The decode settings that a checkpoint recommends: ``defaults`` in its jdllm.json, DecodeConfig's field names.

    Raises:
        UsageError: there is something in them that DecodeConfig refuses.
    """
    defaults = meta.get("defaults") or {}
    try:
        DecodeConfig(**defaults)
    except (TypeError, RequestError) as error:
        raise UsageError(f"--model: the checkpoint's jdllm.json has bad defaults: {error}") from None
    return dict(defaults)


def defaults_beside_adapters(meta: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults of the model alone where adapters are kept beside it. D2F is then the adapters': without a merged
    one the model keeps to a decoder that it was made for."""
    alone = {} if meta.get("decoder") == "d2f" else {"decoder": "fast-dllm"}
    return {**alone, **defaults}


def adapter_folders(given: Sequence[str]) -> dict[str, Path]:
    """``--adapter NAME=DIR``, in order.

    Raises:
        UsageError: one is not of this form, names a folder that is not there, or a name twice.
    """
    found: dict[str, Path] = {}
    for text in given:
        name, _, folder = text.partition("=")
        path = Path(folder).expanduser()
        if not name or not folder:
            raise UsageError(f"--adapter: {text!r} must be NAME=DIR")
        if name in found:
            raise UsageError(f"--adapter: {name} is given twice")
        if not path.is_dir():
            raise UsageError(f"--adapter: {folder} is not a folder")
        found[name] = path
    return found


def default_max_tokens(defaults: Mapping[str, Any]) -> int:
    """Answer length when a request gives none: the checkpoint's, else DecodeConfig's. Whoever uses it caps it by the
    room behind the prompt."""
    return int(defaults.get("max_tokens", DecodeConfig.max_tokens))


def checkpoint_warnings(meta: Mapping[str, Any]) -> list[str]:
    """What a user should know about a checkpoint, from its jdllm.json; one line each."""
    if (decoder := meta.get("decoder")) != "d2f":
        return [
            f"the checkpoint was converted without a D2F adapter (decoder {decoder!r}); D2F decoding, the default, is "
            "not what it was trained for, and answers may be poor: name another decoder (docs/decoders.md)"
        ]
    return []


def default_dtype(dtype: str | None) -> str:
    """The compute dtype: the one asked for, else float32 on a CPU and bfloat16 elsewhere. Imports JAX."""
    import jax

    return dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
