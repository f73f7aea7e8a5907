"""From a row of a report to the answer of its job."""

import math
import time
from typing import TYPE_CHECKING

from jdllm.runtime import NOT_FINITE
from jdllm.serving.errors import ApiError
from jdllm.serving.job import Commit, Job
from jdllm.serving.stream import Alternative

if TYPE_CHECKING:  # the engine imports JAX
    from jdllm.engine import Engine, Row


def take_over(row: "Row", job: Job, engine: "Engine", eos_id: int) -> tuple[str | ApiError | None, bool]:
    """Give the job what the report has of its row: settled tokens, and commits where they are asked for. Tokens of a
    row that goes on are left for later where neither client nor stop string waits for them.

    Returns:
        how the job ends, with a finish reason or an error, None if it goes on; and whether its client has anything to
        read already.
    """
    news = False
    if job.commits is not None and row.nfe > job.nfe:
        job.commits += _commits(row, job.nfe)
        news = True
    job.nfe, job.width = row.nfe, row.width
    if row.failed:
        return ApiError(500, NOT_FINITE, code="non_finite"), news
    begin, end = _settled(row, job)
    job.settled = max(0, end)
    if end > job.read:
        job.first_text = job.first_text or time.monotonic()
        if not (row.live and job.unwatched):
            _settle(row, job, engine, slice(begin + job.read, begin + end), eos_id)
            job.read = end
            news |= job.stream
    if not job.answer.stopped and row.live:
        return None, news
    job.answer.close()
    return "stop" if job.answer.stopped or job.cut else row.finish_reason or "length", news


def progress(job: Job) -> tuple[int, int]:
    """Settled tokens of a job, and its passes, as of the last report of its row, read or not."""
    latest = job.latest
    if latest is None or latest.nfe <= job.nfe:
        return job.settled, job.nfe
    return max(0, _settled(latest, job)[1]), latest.nfe


def _settled(row: "Row", job: Job) -> tuple[int, int]:
    """Where on its canvas the answer begins, and how many positions from there are final."""
    begin = row.prompt_length if job.begin is None else job.begin
    end = row.stop if row.stop >= 0 else row.prefix
    return begin, (end if job.limit is None else min(end, job.limit)) - begin


def _settle(row: "Row", job: Job, engine: "Engine", new: slice, eos_id: int) -> None:
    """Add the canvas positions ``new`` to the answer."""
    ids, kept = row.tokens[new].tolist(), None
    if job.limit is not None:
        stops = (eos_id,) if job.decode.stop_ids is None else job.decode.stop_ids
        kept = 0 if job.cut else next((i for i, token in enumerate(ids) if token in stops), None)
        job.cut = kept is not None
    logprobs = row.logprobs[new][:kept].tolist() if job.logprobs else ()
    job.answer.extend(ids[:kept], logprobs, _alternatives(engine, job, new)[:kept])


def _commits(row: "Row", seen: int) -> list[Commit]:
    """What was committed after the first ``seen`` passes of a row."""
    passes, logprobs = row.committed, row.logprobs
    return [
        Commit(int(at) - row.prompt_length, int(row.tokens[at]), float(logprobs[at]), int(passes[at]))
        for at in (passes > seen).nonzero()[0]
    ]


def _alternatives(engine: "Engine", job: Job, new: slice) -> list[list[Alternative]]:
    """Of the canvas positions ``new``, if they were asked for."""
    if not job.decode.alternatives:
        return []
    ids, logprobs = (array[new, : job.decode.alternatives].tolist() for array in engine.alternatives(job.slots[0]))
    pairs = [zip(*both, strict=True) for both in zip(ids, logprobs, strict=True)]
    return [[pair for pair in one if pair[1] > -math.inf] for one in pairs]  # a small vocabulary has fewer
