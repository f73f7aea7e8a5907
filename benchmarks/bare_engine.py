"""The engine of a server without the server, in a process of its own:
``python -m benchmarks.bare_engine N ROWS [MODEL]``.

Every line on standard input makes it decode the same N held-out messages, each taking the next free slot; one line of
JSON on standard output tells how long that took. Prompts are ids and answers are ids: nothing is tokenized, queued,
detokenized or sent anywhere meanwhile. (jdllm.batch packs a request when a slot is free for it; a server has another
thread for that.)
"""

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from jdllm import runtime
from jdllm.train.tasks import held_out

MAX_TOKENS, LENGTH = 128, 256


def bodies(count: int) -> list[dict[str, Any]]:
    """Chat requests for held-out messages, everything else at its default."""
    messages = (task.message for task in held_out("test", count))
    return [{"messages": [{"role": "user", "content": text}], "max_tokens": MAX_TOKENS} for text in messages]


def main(arguments: Sequence[str]) -> None:
    count, rows = map(int, arguments[:2])
    folder = runtime.model_folder(arguments[2] if len(arguments) > 2 else None)
    runtime.configure()  # the compile cache of the server, before JAX is imported
    from benchmarks.decoders import run
    from jdllm.serving.model import open_model
    from jdllm.serving.schemas import ChatRequest

    model = open_model(folder, log, max_rows=rows, max_length=LENGTH)
    engine, words = model.new_engine(log), model.tokenizer
    requests = []
    for i, body in enumerate(bodies(count)):
        ours = {"max_tokens": MAX_TOKENS, "seed": 0}
        settings = ChatRequest(**body).decode(model.config.family, model.defaults, words, ours)
        requests.append((("", i), words.encode_chat(body["messages"]), settings))
    print(json.dumps({"ready": True}), flush=True)
    for _ in sys.stdin:
        steps, cpu, begin = engine.counters.steps, time.process_time(), time.perf_counter()
        outcome = run(engine, requests)
        told: dict[str, Any] = {
            "seconds": time.perf_counter() - begin,
            "cpu_seconds": time.process_time() - cpu,
            "steps": engine.counters.steps - steps,
        }
        answers = [ids for _, (ids, _) in sorted(outcome.items())]
        told |= {"tokens": sum(map(len, answers)), "texts": [words.decode(ids) for ids in answers]}
        print(json.dumps(told), flush=True)


def log(text: str) -> None:
    """Nobody needs to read how it loads."""


if __name__ == "__main__":
    main(sys.argv[1:])
