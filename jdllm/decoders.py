"""The published decoders: which models each is for, which settings it reads, and what it makes of a row's numbers.

The one place where a decoder has a name. On the device there are only the numbers (jdllm.denoise.state.Rows) and the
rules that read them: a new decoder is an entry here, and a new column if no rule says what it needs.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jdllm.config import (
    MAX_STOP_IDS,
    RANKINGS,
    DecodeConfig,
    ModelConfig,
    RequestError,
    need,
)

COMMON = frozenset(
    "decoder max_tokens min_tokens temperature seed early_stop infill stop_ids eot_id adapter alternatives".split()
)
"""Settings that every decoder reads."""

_OWN = tuple(field.name for field in dataclasses.fields(DecodeConfig) if field.name not in COMMON)
"""Settings that belong to some decoders alone."""

OFF: dict[str, Any] = {"top_p": 1.0, "top_k": 0, "cfg_scale": 0.0, "alg_temp": 0.0}
"""Values of settings that ask for nothing: any decoder takes them."""


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A decoder on one family of models.

    Attributes:
        settings: the names of DecodeConfig's fields that it reads, beside COMMON.
        numbers: (decode, model, masks of each block) -> the fields of Rows in which it differs from PLAIN, and the
            schedule: how many positions each forward pass commits by rank, or [] where each commits one.
    """

    settings: frozenset[str]
    numbers: Callable[[DecodeConfig, ModelConfig, Sequence[int]], tuple[dict[str, Any], Sequence[int]]]


PLAIN: dict[str, Any] = {
    "pipelined": False,
    "need_add": 0,
    "need_decoded": 0,
    "keep_before": False,
    "keep_behind": False,
    "block_passes": 0,
    "first_alone": False,
    "sure_above": np.inf,
    "factor": 0.0,
    "chance": False,
    "confidence": 0,
    "confidence_temperature": 0.0,
    "untempered": False,
    "guidance": 0.0,
    "banned_id": -1,
    "demoted_ids": (-1, -1),
}
"""Whole canvas in every pass, one block after the other, each until it has no mask."""


def _d2f(decode: DecodeConfig, model: ModelConfig, masks: Sequence[int]) -> tuple[dict[str, Any], Sequence[int]]:
    numbers = {
        "pipelined": True,
        "need_add": need(decode.block_add_threshold, decode.block_size),
        "need_decoded": need(decode.decoded_token_threshold, decode.block_size),
        "sure_above": decode.skip_threshold,
        "confidence": RANKINGS.index(decode.confidence),
    }
    return numbers, []


def _llada(decode: DecodeConfig, model: ModelConfig, masks: Sequence[int]) -> tuple[dict[str, Any], Sequence[int]]:
    """LLaDA's generate.py: a quota per pass, always as many passes a block."""
    numbers: dict[str, Any] = {
        "confidence": RANKINGS.index("random" if decode.remasking == "random" else "probability"),
        "untempered": True,
        "guidance": decode.cfg_scale,
        "banned_id": model.eos_id if decode.logits_eos_inf else -1,
    }
    if decode.confidence_eos_eot_inf:
        # With a temperature the official assignment reaches the end-of-turn column alone (semantics, section 4).
        eot = -1 if decode.eot_id is None else decode.eot_id
        numbers["demoted_ids"] = (-1 if decode.temperature else model.eos_id, eot)
    if decode.steps is None:
        return numbers, []
    passes = decode.steps // len(masks)
    return {**numbers, "block_passes": passes}, [k for n in masks for k in shares(n, passes)]


def _fast_dllm(decode: DecodeConfig, model: ModelConfig, masks: Sequence[int]) -> tuple[dict[str, Any], Sequence[int]]:
    """Fast-dLLM (semantics, section 5: the later version): quota, threshold or factor, with one of its caches."""
    numbers, schedule = _cached(decode), []
    if model.family == "dream":
        alg = alg_of(decode)
        numbers |= {**_ranking(decode, alg), "first_alone": True}
        if alg == "confidence_threshold":
            numbers["sure_above"] = at_least(0.9 if decode.threshold is None else decode.threshold)
        else:
            passes = None if decode.steps is None else decode.steps // len(masks)
            schedule = [k for n in masks for k in _refreshed_counts(n, passes or max(2, n), decode.eps)]
        return numbers, schedule
    numbers |= {
        "confidence": RANKINGS.index("random" if decode.remasking == "random" else "probability"),
        "untempered": True,
    }
    if decode.factor is not None:
        numbers["factor"] = decode.factor
    elif decode.threshold is not None or decode.steps is None:
        numbers["sure_above"] = at_least(0.9 if decode.threshold is None else decode.threshold)
    else:
        passes = decode.steps // len(masks)
        schedule = [k for n in masks for k in shares(n, min(passes, n))]  # a pass that has nothing to commit is none
    return numbers, schedule


def _refreshed_counts(masks: int, passes: int, eps: float) -> list[int]:
    """What the passes of one block commit: the refresh its first position, the others by time from its second point on,
    as long as there are masks. At least one pass follows the refresh."""
    counts = [1, *dream_counts(masks - 1, passes, eps, first=1)]
    while len(counts) > 2 and counts[-1] == 0:
        counts.pop()
    return counts


def _dream(decode: DecodeConfig, model: ModelConfig, masks: Sequence[int]) -> tuple[dict[str, Any], Sequence[int]]:
    """Dream's diffusion_generate: the whole answer is one block, its time runs from 1 to eps."""
    alg, passes = alg_of(decode), decode.steps or sum(masks)
    numbers = {**_ranking(decode, alg), "block_passes": passes, "block_size": max(1, decode.max_tokens)}
    if alg == "confidence_threshold":
        threshold = at_least(0.9 if decode.threshold is None else decode.threshold)
        return {**numbers, "block_passes": 0, "sure_above": threshold}, []
    if alg != "origin":
        return numbers, dream_counts(sum(masks), passes, decode.eps)
    time = linspace(1, decode.eps, passes + 1)
    chances = [*(1 - time[1:-1] / time[:-2]).tolist(), 1.0]
    return {**numbers, "chance": True}, [round(p * (1 << 31)) - 1 for p in chances]


def _cached(decode: DecodeConfig) -> dict[str, Any]:
    cache = decode.cache or "prefix"
    return {"keep_before": cache != "none", "keep_behind": cache == "dual"}


def _ranking(decode: DecodeConfig, alg: str) -> dict[str, Any]:
    kind = {"entropy": "neg_entropy", "topk_margin": "margin", "origin": "random"}.get(alg, "probability")
    return {"confidence": RANKINGS.index(kind), "confidence_temperature": decode.alg_temp}


def threshold(decode: DecodeConfig, model: ModelConfig) -> float | None:
    """The probability at which a request commits positions; None where its decoder has no such rule."""
    # Of few steps: their number decides whether there is such a rule, and how long a table is made beside it.
    few = decode if decode.steps is None else dataclasses.replace(decode, steps=1)
    numbers, _ = _find(decode.decoder, model.family).numbers(few, model, [1])
    if numbers.get("sure_above", np.inf) == np.inf:
        return None
    return decode.skip_threshold if decode.decoder == "d2f" else 0.9 if decode.threshold is None else decode.threshold


def sure_above(decode: DecodeConfig, threshold: float) -> float:
    """Rows' ``sure_above`` of the same request with another threshold."""
    return threshold if decode.decoder == "d2f" else at_least(threshold)


def refreshes(decode: DecodeConfig) -> bool:
    """Whether every block begins with a pass over the whole canvas, and its other passes are narrower."""
    return decode.decoder == "fast-dllm" and decode.cache != "none"


_BLOCKS = frozenset(("block_size",))
_FILTERS = frozenset(("top_p", "top_k"))
_D2F = Decoder(
    _BLOCKS | _FILTERS | {"block_add_threshold", "decoded_token_threshold", "skip_threshold", "confidence"}, _d2f
)
_DREAM_ALG = _FILTERS | {"steps", "alg", "alg_temp", "eps", "threshold"}
_LLADA = _BLOCKS | {"steps", "remasking", "cfg_scale", "logits_eos_inf", "confidence_eos_eot_inf"}

TABLE: dict[tuple[str, str], Decoder] = {
    ("d2f", "llada"): _D2F,
    ("d2f", "dream"): _D2F,
    ("llada", "llada"): Decoder(_LLADA, _llada),
    ("fast-dllm", "llada"): Decoder(_BLOCKS | {"steps", "cache", "threshold", "factor", "remasking"}, _fast_dllm),
    ("fast-dllm", "dream"): Decoder(_BLOCKS | _DREAM_ALG | {"cache"}, _fast_dllm),
    ("dream", "dream"): Decoder(_DREAM_ALG, _dream),
}
"""(decoder, model family) -> the decoder, where an official implementation exists."""


def decode_config(given: Mapping[str, Any], family: str, defaults: Mapping[str, Any] | None = None) -> DecodeConfig:
    """The decode settings of a request for a model of ``family``.

    Args:
        given: the request's own settings, by DecodeConfig's names.
        defaults: a checkpoint's; those that the request's decoder does not read are left out.

    Raises:
        RequestError: naming the setting that is unknown, out of range, or not read by the decoder.
    """
    settings = {**_compatible(defaults or {}, given), **given}
    name = settings.get("decoder", DecodeConfig.decoder)
    decoder = _find(name, family)
    for setting, value in given.items():
        if setting not in COMMON | decoder.settings and not _is_off(setting, value):
            raise RequestError(setting, f"decoder {name} does not use it{_on(name, family)}")
    known = COMMON | decoder.settings
    return DecodeConfig(**{setting: value for setting, value in settings.items() if setting in known})


_RULES = ("steps", "threshold", "factor", "alg", "remasking")
"""Settings that choose how many positions a pass commits: of a request that gives any of them, no default counts."""


def _compatible(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The defaults that do not contradict what a request gives."""
    dropped: Sequence[str] = _RULES if given.keys() & {*_RULES} else ()
    usual = defaults.get("max_tokens", DecodeConfig.max_tokens)
    if "block_size" in given or given.get("max_tokens", usual) != usual:  # a number of steps is meant for one length
        dropped = (*dropped, "steps")
    return {name: value for name, value in defaults.items() if name not in dropped}


def _is_off(setting: str, value: Any) -> bool:
    return setting in OFF and not isinstance(value, bool) and value == OFF[setting]


def _on(name: str, family: str) -> str:
    users = ", ".join(sorted(TABLE[name, family].settings))
    return f" on a {family} model; it reads {users}"


def _find(name: Any, family: str) -> Decoder:
    known = list(dict.fromkeys(decoder for decoder, _ in TABLE))
    if name not in known:
        raise RequestError("decoder", f"{name!r} is not known; use one of {', '.join(known)}")
    if (name, family) not in TABLE:
        models = " and ".join(f for d, f in TABLE if d == name)
        raise RequestError("decoder", f"{name} is for {models} models; this one is {family}")
    return TABLE[name, family]


def check(decode: DecodeConfig, model: ModelConfig, prompt: Sequence[int], canvas: int) -> None:
    """Raise RequestError, naming the setting, if a decoder cannot serve these settings together.

    Args:
        canvas: positions of a row, which bounds the passes of a schedule too.
    """
    decoder = _find(decode.decoder, model.family)
    for name in _OWN:
        if name not in decoder.settings and getattr(decode, name) != getattr(DecodeConfig, name):
            raise RequestError(name, f"decoder {decode.decoder} does not use it{_on(decode.decoder, model.family)}")
    blocks = len(block_masks(decode, model, prompt))
    on_dream = "alg" in decoder.settings
    by_threshold = on_dream and alg_of(decode) == "confidence_threshold"
    if decode.steps is not None and decode.decoder != "dream" and blocks:
        if decode.steps % blocks:
            raise RequestError("steps", f"{decode.steps} must be a multiple of the {blocks} blocks")
        if on_dream and not by_threshold and decode.steps < 2 * blocks:
            raise RequestError("steps", f"{decode.steps} must be at least 2 for each of the {blocks} blocks")
    if on_dream:
        _check_dream(decode)
    if decode.remasking == "random" and (decode.threshold is not None or decode.factor is not None):
        raise RequestError("remasking", "random has no confidence to compare with threshold or factor; use steps")
    if decode.decoder == "fast-dllm" and decode.remasking == "random" and decode.steps is None:
        raise RequestError("steps", "is needed with remasking random")
    if decode.infill and decode.min_tokens:
        raise RequestError("min_tokens", "is not possible with infill or suffix, whose text has a length already")
    if decode.confidence_eos_eot_inf and decode.eot_id is None:
        raise RequestError("confidence_eos_eot_inf", "the tokenizer has no end-of-turn token")
    if (passes := _scheduled(prompt, decode, model, canvas)) > canvas:
        text = f"{passes} passes to schedule; at most {canvas} are possible, the canvas length (--max-length)"
        raise RequestError("steps", text)


def _scheduled(prompt: Sequence[int], decode: DecodeConfig, model: ModelConfig, canvas: int) -> int:
    """``schedule_length``; of steps that are more than the canvas has positions their number, without making a
    schedule of up to a million passes."""
    if decode.steps is None or decode.steps <= canvas or (decode.decoder, model.family) == ("fast-dllm", "llada"):
        return schedule_length(prompt, decode, model)
    few = dataclasses.replace(decode, steps=2 * max(1, len(block_masks(decode, model, prompt))))
    return decode.steps if schedule_length(prompt, few, model) else 0


def _check_dream(decode: DecodeConfig) -> None:
    alg = alg_of(decode)
    if decode.decoder == "fast-dllm":
        if decode.cache == "none":
            raise RequestError("cache", "fast-dllm on a dream model has prefix and dual")
        if alg == "origin":
            raise RequestError("alg", "fast-dllm has no origin; use the dream decoder")
    if decode.threshold is not None and alg != "confidence_threshold":
        raise RequestError("threshold", f"alg {alg} does not use it; confidence_threshold does")
    if decode.alg_temp and alg in ("origin", "confidence_threshold"):
        raise RequestError("alg_temp", f"alg {alg} does not use it")
    if decode.eps != DecodeConfig.eps and alg == "confidence_threshold":
        raise RequestError("eps", "alg confidence_threshold does not use it")


def alg_of(decode: DecodeConfig) -> str:
    """Dream's algorithm, where none is given: entropy, or with Fast-dLLM and no quota confidence_threshold."""
    if decode.alg is not None:
        return decode.alg
    quota = decode.decoder == "dream" or (decode.steps is not None and decode.threshold is None)
    return "entropy" if quota else "confidence_threshold"


def check_request(
    prompt: Sequence[int], decode: DecodeConfig, model: ModelConfig, canvas: int, rows: int, adapters: int
) -> None:
    """Raise RequestError, naming the field, if an engine cannot serve this request.

    Args:
        canvas, rows, adapters: the engine's positions a row, slots, and adapters beside the weights.
    """
    if not len(prompt):
        raise RequestError("prompt", "is empty; at least one token is needed")
    ids = np.asarray(prompt)
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= model.vocab_size:
        raise RequestError("prompt", f"must be token ids from 0 to {model.vocab_size - 1}")
    if decode.max_tokens < 1 and not (decode.infill and model.mask_id in ids):
        raise RequestError("max_tokens", f"{decode.max_tokens} must be at least 1")
    if len(prompt) + decode.max_tokens > canvas:
        raise RequestError(
            "max_tokens",
            f"the prompt has {len(prompt)} tokens and max_tokens is {decode.max_tokens}, together "
            f"{len(prompt) + decode.max_tokens}; the maximum length is {canvas}",
        )
    for token in decode.stop_ids or ():
        if token >= model.vocab_size:
            raise RequestError("stop_ids", f"{token} is not a token id from 0 to {model.vocab_size - 1}")
    if decode.adapter > adapters:
        raise RequestError("adapter", f"{decode.adapter}: there are {adapters}")
    if slots_needed(decode) > rows:
        raise RequestError("cfg_scale", f"guidance takes two slots, and there are {rows} (--max-rows)")
    check(decode, model, prompt, canvas)


def block_masks(decode: DecodeConfig, model: ModelConfig, prompt: Sequence[int]) -> list[int]:
    """How many masks each block has at the start: its positions, and those of the prompt with the first (infill)."""
    size = max(1, decode.max_tokens if decode.decoder == "dream" else decode.block_size)
    masks = [min(size, decode.max_tokens - start) for start in range(0, decode.max_tokens, size)]
    inside = sum(token == model.mask_id for token in prompt) if decode.infill else 0
    return [inside + (masks[0] if masks else 0), *masks[1:]] if masks or inside else []


def seed_number(seed: int) -> int:
    """What the random numbers of a row hang on: a DecodeConfig's seed, mixed into 32 bits."""
    return int.from_bytes(hashlib.blake2b((seed % (1 << 64)).to_bytes(8, "little"), digest_size=4).digest(), "little")


def row_numbers(
    prompt: Sequence[int], decode: DecodeConfig, model: ModelConfig
) -> tuple[dict[str, Any], Sequence[int]]:
    """The fields of Rows for a request, but for those that hang on its slot, and its schedule."""
    decoder, P, masks = TABLE[decode.decoder, model.family], len(prompt), block_masks(decode, model, prompt)
    ours, schedule = decoder.numbers(decode, model, masks or [0])
    numbers: dict[str, Any] = {**PLAIN, "block_size": decode.block_size, **ours}
    limit = P + decode.max_tokens
    fill_from = P
    if decode.infill:
        fill_from = next((i for i, token in enumerate(prompt) if token == model.mask_id), P)
    first_block = min(P + numbers["block_size"], limit)
    length = first_block if numbers["pipelined"] else limit
    stop_ids = (model.eos_id,) if decode.stop_ids is None else decode.stop_ids
    numbers |= {
        "live": True,
        "failed": False,
        "length": length,
        "start": 0,
        "end": length,
        "settled": P if fill_from == P else 0,
        "block": fill_from,
        "passes": 0,
        "nfe": 0,
        "stopped": False,
        "adapter": decode.adapter,
        "prompt_length": P,
        "fill_from": fill_from,
        "limit": limit,
        "stop_from": P + decode.min_tokens,
        "temperature": decode.temperature,
        "top_p": decode.top_p,
        "top_k": decode.top_k,
        "seed": seed_number(decode.seed),
        "early_stop": decode.early_stop,
        "alternatives": decode.alternatives,
        "stop_ids": (*stop_ids, *[-1] * (MAX_STOP_IDS - len(stop_ids))),
    }
    return numbers, schedule


def slots_needed(decode: DecodeConfig) -> int:
    """Slots that a request takes: two with guidance, which runs a second canvas whose prompt is masked."""
    return 2 if decode.cfg_scale > 0 else 1


def schedule_length(prompt: Sequence[int], decode: DecodeConfig, model: ModelConfig) -> int:
    """Passes for which a row's schedule has an entry; 0 where each commits one by rank."""
    masks = block_masks(decode, model, prompt)
    return len(TABLE[decode.decoder, model.family].numbers(decode, model, masks)[1]) if masks else 0


def canvas_needed(prompt: Sequence[int], decode: DecodeConfig, model: ModelConfig) -> int:
    """Canvas positions that a request takes; a schedule of more passes than positions takes as many."""
    return max(len(prompt) + decode.max_tokens, schedule_length(prompt, decode, model))


def shares(masks: int, passes: int) -> list[int]:
    """``masks`` shared out over ``passes`` as evenly as possible, larger shares first (LLaDA)."""
    return [masks // passes + (i < masks % passes) for i in range(passes)]


def dream_counts(masks: int, passes: int, eps: float, first: int = 0) -> list[int]:
    """How many of ``masks`` each pass from ``first`` on commits (Dream): int(left * (1 - next time / time)), the last
    all that are left, in float32 as torch computes."""
    time, left, counts = linspace(1, eps, passes + 1), np.float32(masks), []
    for i in range(first, passes):
        last = i == passes - 1
        count = int(left) if last else int(left * (np.float32(1) - time[i + 1] / time[i]))
        counts.append(count)
        left -= np.float32(count)
    return counts


def linspace(start: float, end: float, count: int) -> np.ndarray:
    """float32 [count] as torch.linspace rounds it: from both ends to the middle, product and sum rounded once."""
    first, last = np.float32(start), np.float32(end)
    step, index = float((last - first) / np.float32(count - 1)), np.arange(count)
    exact = np.where(index < count // 2, float(first) + step * index, float(last) - step * (count - 1 - index))
    return exact.astype(np.float32)


def at_least(threshold: float) -> float:
    """The float32 strictly above which lies exactly what is at least ``threshold`` (Fast-dLLM accepts equality)."""
    return float(np.nextafter(np.float32(threshold), np.float32(-1))) if threshold > 0 else -1.0
