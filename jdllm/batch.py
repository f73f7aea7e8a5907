"""A list of requests through an engine's slots."""

import dataclasses
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from jdllm.config import DecodeConfig, RequestError
from jdllm.decoders import slots_needed

if TYPE_CHECKING:  # the engine imports JAX
    from jdllm.engine import Engine, Row


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request; ``handle`` names it, in the engine too, and is no other's."""

    handle: Hashable
    prompt_ids: Sequence[int]
    decode: DecodeConfig


def decode_all(engine: "Engine", requests: Iterable[Asked]) -> "Iterator[tuple[Hashable, Row | RequestError]]":
    """Decode them all, each taking the next free slot; nothing else may run in the engine. Yields each as it ends, its
    slot already given away, while the device works on."""
    waiting, running = deque(requests), 0
    while waiting or running:
        ended: list[tuple[Hashable, Row | RequestError]] = []
        for row in engine.read():
            if not row.live:
                ended.append((row.handle, row))
                engine.evict(row.slot)
                running -= 1
        free = engine.free_slots
        while waiting and (len(free) >= slots_needed(waiting[0].decode) or not running):
            asked = waiting.popleft()
            try:
                engine.insert(free[0], asked.handle, asked.prompt_ids, asked.decode)
            except RequestError as error:
                ended.append((asked.handle, error))
            else:
                running += 1
                free = engine.free_slots
        engine.dispatch()
        yield from ended
