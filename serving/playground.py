"""The page at /: type a prompt, choose a decoder, watch the canvas fill. It speaks to the server as any client does.

The form is made from what /playground.json tells of the decoders, so that a new one needs no change of the page.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from fastapi.responses import Response

from jdllm.config import ALGS, CACHES, CONFIDENCES, REMASKINGS, DecodeConfig
from jdllm.decoders import TABLE

if TYPE_CHECKING:
    from jdllm.serving.loop import EngineLoop

KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

COMMON = ("temperature", "seed", "early_stop")
"""Settings of every decoder that the page offers."""
CHOICES = {"confidence": CONFIDENCES, "cache": CACHES, "remasking": REMASKINGS, "alg": ALGS}
HINTS = {
    "temperature": "0 takes the most probable token; above, tokens are sampled",
    "seed": "of the random numbers; left empty the page draws one",
    "early_stop": "end once the text up to the first end of text is settled",
    "block_size": "positions a block",
    "steps": "passes of all blocks together, a multiple of their number; left empty: one a token",
    "block_add_threshold": "decoded share of the newest block at which the next is added",
    "decoded_token_threshold": "decoded share of a block at which the next is fully activated",
    "skip_threshold": "a position is committed when its probability is above this",
    "confidence": "what ranks positions where none is above the skip threshold",
    "cache": "which keys and values are kept between the passes of a block; left empty: prefix",
    "threshold": "a position is committed when its confidence is at least this; left empty: 0.9, unless something "
    "else sets the pace",
    "factor": "commits as many positions as this allows, in place of a threshold",
    "remasking": "which positions are committed first",
    "cfg_scale": "guidance by the same canvas without its prompt; above 0 a request takes two slots",
    "logits_eos_inf": "end of text is never a candidate",
    "confidence_eos_eot_inf": "end of text and end of turn are committed last",
    "alg": "what ranks positions",
    "alg_temp": "noise on the ranking",
    "eps": "where the time schedule ends",
    "top_p": "nucleus filter; 1 is off",
    "top_k": "only so many candidates; 0 is off",
}


def install(app: FastAPI, names: Sequence[str]) -> None:
    """Add the page, its files and what it asks for; ``names``: what ``model`` may say."""

    def add(path: str, body: bytes, kind: str) -> None:
        async def send() -> Response:
            return Response(body, media_type=kind, headers=HEADERS)

        app.add_api_route(path, send, include_in_schema=False)

    for file in sorted(Path(__file__).parent.glob("playground*")):
        if kind := KINDS.get(file.suffix):
            add("/" if kind == "text/html" else f"/{file.name}", file.read_bytes(), kind)

    @app.get("/playground.json", include_in_schema=False)
    async def playground() -> Mapping[str, Any]:
        return describe(names, app.state.engine_loop)


def describe(names: Sequence[str], loop: "EngineLoop") -> dict[str, Any]:
    """What the form needs: the decoders of the model's family with the settings that each reads, and the defaults of
    each served name. Without decoders while the model is loading; ``not_ready`` says why requests are not taken."""
    about: dict[str, Any] = {"not_ready": loop.not_ready or None, "decoders": {}, "settings": {}, "models": {}}
    if (model := loop.model) is None:
        return about
    order = {field.name: field for field in dataclasses.fields(DecodeConfig)}
    for (name, family), decoder in TABLE.items():
        if family == model.config.family:
            about["decoders"][name] = [setting for setting in order if setting in {*COMMON, *decoder.settings}]
    used = {setting for settings in about["decoders"].values() for setting in settings}
    about["settings"] = {name: _setting(field) for name, field in order.items() if name in used}
    offered = {"decoder", "max_tokens", *used}
    for name in names:
        defaults = model.defaults_of(name)
        about["models"][name] = {setting: value for setting, value in defaults.items() if setting in offered}
    about |= {"family": model.config.family, "slots": model.max_rows, "max_length": model.max_length}
    about |= {"decoder": DecodeConfig.decoder, "max_tokens": DecodeConfig.max_tokens}
    return about


def _setting(field: dataclasses.Field) -> dict[str, Any]:
    """One input of the form: its ``kind`` (choice, flag, whole, number), default, hint."""
    kinds: dict[Any, str] = {bool: "flag", int: "whole", int | None: "whole"}
    told: dict[str, Any] = {"kind": kinds.get(field.type, "number"), "default": field.default}
    if field.name in CHOICES:
        told |= {"kind": "choice", "choices": CHOICES[field.name]}
    if field.name == "seed":
        told["default"] = None  # the server draws one, as the page does
    return {**told, "hint": HINTS.get(field.name, "")}
