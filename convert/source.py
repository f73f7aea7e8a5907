"""Reading the folder of a Hugging Face checkpoint: configuration, tensor files, tokenizer."""

import dataclasses
from pathlib import Path
from typing import Any

from jdllm.config import ConfigError, ModelConfig, model_config
from jdllm.convert import names
from jdllm.convert.errors import ConvertError, listed, read_json
from jdllm.convert.tensors import Tensor, read_header
from jdllm.tokenizer import tokenizer_code

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

COMPANIONS = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
]
"""Files that go along with the weights, where the source has them."""


@dataclasses.dataclass(frozen=True)
class Source:
    """A checkpoint whose names and shapes have been checked. ``notes`` are things a user should be told."""

    folder: Path
    config: ModelConfig
    weights: list[names.Weight]
    tensors: dict[str, Tensor]
    notes: list[str]

    @property
    def companions(self) -> list[Path]:
        names = [*COMPANIONS, *tokenizer_code(self.folder)]
        return [self.folder / name for name in names if (self.folder / name).is_file()]


def open_source(folder: Path) -> Source:
    """Read and check everything but the weights themselves.

    Raises:
        ConvertError, ConfigError: something is missing, unknown or does not fit; the message names it.
    """
    if not folder.is_dir():
        raise ConvertError(f"SRC {folder} is not a folder" if folder.exists() else f"SRC {folder} does not exist")
    if not (folder / "config.json").exists() and (folder / "adapter_config.json").exists():
        raise ConvertError(f"SRC {folder} is an adapter; give its base model as SRC and the adapter as --lora")
    notes: list[str] = []
    hf = read_json(folder / "config.json")
    hf = _with_mask_id(hf, folder, notes)
    try:
        config = model_config(hf)
    except ConfigError:
        raise
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ConvertError(f"{folder / 'config.json'} has a value of the wrong kind: {error}") from error
    tensors = _tensors(folder, notes)
    wanted = names.weights(config)
    names.check(wanted, {name: tensor.shape for name, tensor in tensors.items()}, str(folder))
    return Source(folder, config, wanted, tensors, notes)


def _tensors(folder: Path, notes: list[str]) -> dict[str, Tensor]:
    if (folder / INDEX).exists():
        if (folder / SINGLE).exists() and SINGLE not in set(_weight_map(folder).values()):
            notes.append(f"{SINGLE} is ignored: {INDEX} does not name it")
        return _indexed(folder)
    if (folder / SINGLE).exists():
        return read_header(folder / SINGLE)
    if shards := sorted(path.name for path in folder.glob("model-*-of-*.safetensors")):
        raise ConvertError(f"{folder} has shards ({listed(shards, 3)}) but no {INDEX}")
    if pickles := sorted(path.name for path in [*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")]):
        raise ConvertError(
            f"{folder} has only pickled weights ({listed(pickles, 3)}); jdllm reads safetensors alone, as a pickle can "
            "run code: save the model with safe_serialization=True first"
        )
    raise ConvertError(f"{folder} has neither {SINGLE} nor {INDEX}")


def _weight_map(folder: Path) -> dict[str, str]:
    mapping = read_json(folder / INDEX).get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        raise ConvertError(f"{folder / INDEX} has no weight_map")
    for name, file in mapping.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ConvertError(f"{folder / INDEX}: {name} must name a file of the same folder, not {file!r}")
    return mapping


def _indexed(folder: Path) -> dict[str, Tensor]:
    mapping = _weight_map(folder)
    if absent := {file for file in mapping.values() if not (folder / file).is_file()}:
        raise ConvertError(f"{INDEX} names files that {folder} does not have: {listed(absent)}")
    tensors: dict[str, Tensor] = {}
    for file in sorted(set(mapping.values())):
        header, named = read_header(folder / file), {name for name, where in mapping.items() if where == file}
        if gone := named - header.keys():
            raise ConvertError(f"{folder / file} lacks tensors that {INDEX} places there: {listed(gone)}")
        if extra := header.keys() - named:
            raise ConvertError(f"{folder / file} has tensors that {INDEX} does not place there: {listed(extra)}")
        tensors |= header
    return tensors


def _with_mask_id(hf: dict[str, Any], folder: Path, notes: list[str]) -> dict[str, Any]:
    """config.json with ``mask_token_id`` settled. LLaDA's tokenizers name no mask token, so the id of config.json
    rules; a tokenizer that does name one must agree, and serves where config.json is silent."""
    token, from_tokenizer = tokenizer_mask(folder)
    configured = hf.get("mask_token_id")
    if configured is None and from_tokenizer is None:
        raise ConvertError(
            f"{folder / 'config.json'} has no mask_token_id and the tokenizer names no mask token: "
            'add "mask_token_id" to config.json (126336 for LLaDA-8B, 151666 for Dream-7B)'
        )
    if configured is None:
        notes.append(f"mask_token_id {from_tokenizer} is the tokenizer's {token}; config.json has none")
        return {**hf, "mask_token_id": from_tokenizer}
    if from_tokenizer is not None and from_tokenizer != configured:
        raise ConvertError(
            f"{folder / 'config.json'}: mask_token_id {configured} conflicts with the tokenizer's mask token {token} "
            f"({from_tokenizer}); correct one of them"
        )
    return hf


def tokenizer_mask(folder: Path) -> tuple[str | None, int | None]:
    """The mask token that the tokenizer's files name and its id; None for what they do not say."""

    def optional(name: str) -> dict[str, Any]:
        return read_json(folder / name) if (folder / name).is_file() else {}

    config, special = optional("tokenizer_config.json"), optional("special_tokens_map.json")
    token = config.get("mask_token") or special.get("mask_token")
    token = token.get("content") if isinstance(token, dict) else token
    if not isinstance(token, str):
        return None, None
    for key, entry in (config.get("added_tokens_decoder") or {}).items():
        if entry.get("content") == token:
            return token, int(key)
    whole = optional("tokenizer.json")
    for entry in whole.get("added_tokens") or []:
        if entry.get("content") == token:
            return token, entry["id"]
    vocabulary = (whole.get("model") or {}).get("vocab")
    for ids in (optional("added_tokens.json"), vocabulary, optional("vocab.json")):
        if isinstance(ids, dict) and token in ids:
            return token, ids[token]
    return token, None
