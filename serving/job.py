"""What passes between the clients' thread and the engine's."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from jdllm.config import DecodeConfig
from jdllm.serving.errors import ApiError
from jdllm.serving.schedulers import Waiting
from jdllm.serving.stream import Answer

if TYPE_CHECKING:  # it imports JAX
    from jdllm.denoise.state import Request
    from jdllm.engine import Row


@dataclasses.dataclass(frozen=True)
class Commit:
    """One position of the canvas, decided.

    Attributes:
        position: counted from the end of the prompt.
        token: its id.
        logprob: in the pass that committed it.
        step: that pass, from 1.
    """

    position: int
    token: int
    logprob: float
    step: int


@dataclasses.dataclass(eq=False)
class Job:
    """One row's worth of work, from its arrival to its end.

    Attributes:
        answer: its text so far; the engine's thread extends it.
        notify: posted when there is news: with ``stream`` at every new text, always at the end.
        finish_reason: ``stop`` or ``length`` once it ended well.
        error: why it ended otherwise.
        nfe: forward passes so far.
        arrived, started, first_text: by time.monotonic; when it was made, got its slot, and had its first settled text;
            0 until then.
        request_id: of the call that it belongs to, for the log.
        deadline: by time.monotonic; when it ends with an error if it has not ended, or None.
        slo: seconds from its arrival in which it wants to have ended, or None; it goes on if it has not.
        wanted, threshold: the probability at which its positions are to be committed, and are at present; None where
            its decoder has no such rule.
        number: in order of submission.
        outlook: what a policy sees of it in the queue, from its submission on.
        width: positions of its next window, as of the last report; 0 before.
        logprobs: the answer shall have those of its tokens.
        commits: what the canvas got, in order (``Commit``), or None where nobody watches.
        priority: lower ones leave the queue first; equal ones in order of arrival.
        settled, read: tokens of the row that are final, and those of them that the answer has already.
        latest: a report of its row that nobody had to read; reading.progress knows whether it is newer.
        slots: those that it holds; its row is in the first.
        begin, limit: canvas positions between which its answer lies; None for the prompt's end and for no limit. With
            a limit the first stop id between them ends the answer, though the row goes on to its last mask.
        cut: such a stop id was met.
        packed: what its slot will hold at the start, until it has one.
    """

    prompt_ids: Sequence[int]
    decode: DecodeConfig
    answer: Answer
    notify: Callable[[], None]
    stream: bool = False
    finish_reason: str | None = None
    error: ApiError | None = None
    nfe: int = 0
    cancelled: bool = False
    started: float = 0.0
    first_text: float = 0.0
    request_id: str = ""
    arrived: float = dataclasses.field(default_factory=time.monotonic)
    deadline: float | None = None
    slo: float | None = None
    wanted: float | None = None
    threshold: float | None = None
    number: int = 0
    outlook: Waiting | None = None
    width: int = 0
    priority: int = 0
    logprobs: bool = False
    commits: list[Commit] | None = None
    settled: int = 0
    read: int = 0
    latest: "Row | None" = None
    slots: Sequence[int] = ()
    begin: int | None = None
    limit: int | None = None
    cut: bool = False
    packed: "Request | None" = None

    @property
    def done(self) -> bool:
        """Nothing more will come."""
        return self.finish_reason is not None or self.error is not None or self.cancelled

    @property
    def unwatched(self) -> bool:
        """Nobody waits for its tokens before its row has ended."""
        return not (self.stream or self.commits is not None or self.answer.may_stop)
