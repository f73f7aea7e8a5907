"""What a policy sees of jobs and of the engine: plain data, in its words."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from jdllm.decoders import refreshes, slots_needed
from jdllm.serving.job import Job
from jdllm.serving.schedulers import Pass, Running, Waiting

if TYPE_CHECKING:  # the engine imports JAX
    from jdllm.engine import Pass as EnginePass


def waiting(job: Job) -> Waiting:
    """A job in the queue."""
    slo = math.inf if job.slo is None else job.slo
    length = len(job.prompt_ids) + job.decode.max_tokens
    return Waiting(
        key=job.number,
        arrived=job.arrived,
        slots=slots_needed(job.decode),
        length=length,
        tokens=_tokens(job),
        slo=slo,
        priority=job.priority,
        wanted=job.wanted,
    )


def _tokens(job: Job) -> int:
    """That its answer may have: of infill, the positions from its first mask to where the answer ends."""
    if job.decode.max_tokens:
        return job.decode.max_tokens
    end = len(job.prompt_ids) if job.limit is None else job.limit
    return max(1, end - (job.begin or 0))


def running(job: Job) -> Running:
    """A job in its slot, as of the last report that it was in."""
    length = len(job.prompt_ids) + job.decode.max_tokens
    narrow = job.width if 0 < job.width < length else min(job.decode.block_size, length)
    return Running(
        key=job.slots[0],
        request=job.outlook or waiting(job),
        done=job.settled,
        passes=job.nfe,
        width=job.width or length,
        block=narrow if refreshes(job.decode) else length,
        blocks_left=blocks_left(job, job.settled),
        refreshes=refreshes(job.decode),
        threshold=job.threshold,
    )


def blocks_left(job: Job, done: int) -> int:
    """Of its answer when so many tokens of it are settled, the present one among them; at least one."""
    size = job.decode.block_size
    return max(1, -(-_tokens(job) // size) - done // size)


def passes(found: "Sequence[EnginePass]", jobs: Mapping[int, Job]) -> list[Pass]:
    """What the rows of the engine would do next."""
    out = []
    for one in found:
        job = jobs[one.slot]
        done = max(0, one.prefix - len(job.prompt_ids))
        out.append(Pass(one.slot, one.width, one.refresh, job.arrived, one.nfe, blocks_left(job, done)))
    return out
