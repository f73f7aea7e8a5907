"""Requests to compare schedulers on: held-out messages to the shipped model, and what each does in its passes."""

import dataclasses
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.engine_model import Step, Work
from jdllm.config import DecodeConfig
from jdllm.decoders import refreshes, threshold
from jdllm.serving.model import ServedModel
from jdllm.serving.schemas import ChatRequest
from jdllm.train.tasks import Task, held_out

if TYPE_CHECKING:  # the engine imports JAX, before which runtime.configure has to run
    from jdllm.engine import Engine, Pass

ROWS, LENGTH, ROOM = 16, 256, 8
"""Slots and canvas of the server; answers may be so many tokens longer than they are (the next multiple of it)."""

KINDS: dict[str, dict[str, Any]] = {
    "d2f": {},
    "dual": {"decoder": "fast-dllm", "cache": "dual", "block_size": 8, "threshold": 1.5},
    "threshold": {"decoder": "fast-dllm", "cache": "none", "block_size": 8, "threshold": 0.9999},
}
"""Settings of the requests of a workload: the shipped model's defaults; Fast-dLLM's dual cache a token at a time, where
every block begins with a refresh and answers take as many passes as they have tokens; and Fast-dLLM without a cache, by
a threshold so high that the model is not often so sure, where a pass costs the whole canvas."""


@dataclasses.dataclass(frozen=True)
class Request:
    """A chat request as a client sends it, and as the engine gets it."""

    task: Task
    body: dict[str, Any]
    prompt_ids: list[int]
    decode: DecodeConfig


def requests(model: ServedModel, count: int, kind: str, seed: int = 0, **fields: Any) -> list[Request]:
    """Held-out messages of all lengths, mixed. ``fields`` are added to each body."""
    out = []
    tasks = held_out("validation", count, seed)
    # Neighbours differ by a line; the order of arrival shall say nothing about lengths.
    random.Random(seed).shuffle(tasks)
    for task in tasks:
        words = len(model.tokenizer.encode(task.answer))
        body = {
            "messages": [{"role": "user", "content": task.message}],
            "max_tokens": -(-(words + 2) // ROOM) * ROOM,
            **KINDS[kind],
            **fields,
        }
        ours = {"max_tokens": body["max_tokens"], "seed": 0}
        decode = ChatRequest(**body).decode(model.config.family, model.defaults, model.tokenizer, ours)
        out.append(Request(task, body, model.tokenizer.encode_chat(body["messages"]), decode))
    return out


def record(
    engine: "Engine", model: ServedModel, asked: Sequence[Request], thresholds: Sequence[float] = ()
) -> list[Work]:
    """Run them all through the engine, at their own threshold and at each of these below it."""
    traces: list[dict[float | None, list[Step]]] = [{} for _ in asked]
    for choice in (None, *thresholds):
        chosen = {}
        for i, request in enumerate(asked):
            own = threshold(request.decode, model.config)
            if choice is None or (own is not None and choice < own):
                name = "skip_threshold" if request.decode.decoder == "d2f" else "threshold"
                settings: dict[str, Any] = {} if choice is None else {name: choice}
                chosen[i] = dataclasses.replace(request.decode, **settings)
                traces[i][own if choice is None else choice] = []
        _run(engine, asked, chosen, traces)
    return [
        Work(
            length=len(one.prompt_ids) + one.decode.max_tokens,
            tokens=one.decode.max_tokens,
            block=one.decode.block_size,
            traces=trace,
            refreshes=refreshes(one.decode),
        )
        for one, trace in zip(asked, traces, strict=True)
    ]


def _run(
    engine: "Engine",
    asked: Sequence[Request],
    chosen: dict[int, DecodeConfig],
    traces: Sequence[dict[float | None, list[Step]]],
) -> None:
    """Fill the newest trace of each chosen request."""
    waiting = list(chosen)
    slots: dict[int, int] = {}
    seen: dict[int, list[Pass]] = {}

    def look(passes: "list[Pass]") -> list[int]:
        for one in passes:
            seen.setdefault(slots[one.slot], []).append(one)
        return []

    while waiting or slots:
        for row in engine.read():
            if not row.live:
                key = slots.pop(row.slot)
                prompt = len(asked[key].prompt_ids)
                ends = [max(0, one.prefix - prompt) for one in seen[key][1:]]
                done = (row.stop if row.stop >= 0 else row.prefix) - prompt
                steps = [Step(one.width, one.refresh, end) for one, end in zip(seen[key], [*ends, done], strict=True)]
                list(traces[key].values())[-1][:] = steps
                engine.evict(row.slot)
        for slot in engine.free_slots[: len(waiting)]:
            key = waiting.pop(0)
            engine.insert(slot, ("recorded", key, len(seen)), asked[key].prompt_ids, chosen[key])
            slots[slot] = key
        engine.dispatch(look)


def with_fields(request: Request, fields: dict[str, Any]) -> Request:
    """The same request, its body with other fields. (What the engine gets is read from the body by the server.)"""
    return dataclasses.replace(request, body={**request.body, **fields})
