"""One HTTP call of a completions endpoint: its request becomes jobs, the jobs become JSON or a stream of it."""

import asyncio
import dataclasses
import json
import math
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from jdllm.config import RequestError
from jdllm.decoders import check_request
from jdllm.runtime import default_max_tokens
from jdllm.serving.errors import ApiError
from jdllm.serving.gate import new_id
from jdllm.serving.job import Commit, Job
from jdllm.serving.loop import EngineLoop
from jdllm.serving.model import ServedModel
from jdllm.serving.reading import progress
from jdllm.serving.schemas import ChatRequest, CompletionRequest, prompts
from jdllm.serving.stream import Alternative, Answer
from jdllm.tokenizer import check_messages, check_prompt

MAX_CHOICES = 128


@dataclasses.dataclass
class Call:
    """The jobs of one request, and what their answers look like.

    Attributes:
        chat: answers are messages, not texts.
        piece: the bytes of a token, for log-probabilities.
        text: the text of token ids, for the log.
        jobs: by ``index`` of the choice.
        heads: text to put before each answer (``echo``).
        prompt_tokens: of all prompts; a prompt counts once, however many answers it gets.
        news: set whenever a job has news.
    """

    model: str
    fingerprint: str
    chat: bool
    piece: Callable[[int], bytes]
    text: Callable[[Sequence[int]], str]
    jobs: list[Job]
    heads: list[str]
    prompt_tokens: int
    news: asyncio.Event
    usage_chunk: bool = False
    usage_always: bool = False
    id: str = ""
    created: int = 0

    def __post_init__(self) -> None:
        self.id = ("chatcmpl-" if self.chat else "cmpl-") + new_id()
        self.created = int(time.time())

    async def result(self) -> dict[str, Any]:
        """The plain answer, when all jobs have ended."""
        while True:
            if error := next((job.error for job in self.jobs if job.error), None):
                raise error
            if any(job.cancelled for job in self.jobs):
                raise ApiError(499, "the client closed the connection")
            if all(job.done for job in self.jobs):
                break
            await self.news.wait()
            self.news.clear()
        choices = []
        for i, job in enumerate(self.jobs):
            text = self.heads[i] + job.answer.text
            content = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
            logprobs = self._logprobs(i, 0, job.answer.tokens)
            choices.append({"index": i, **content, "logprobs": logprobs, "finish_reason": job.finish_reason})
        name = "chat.completion" if self.chat else "text_completion"
        return {**self._frame(name), "choices": choices, "usage": self.usage()}

    async def events(self, keep_alive: float) -> AsyncIterator[str]:
        """Server-sent events: settled text as it comes, then the reasons, then usage where it was asked for."""
        sent = [0] * len(self.jobs)  # parts of each answer
        shown = [0] * len(self.jobs)  # characters in them
        told = [0] * len(self.jobs)  # tokens whose log-probabilities were sent
        drawn = [0] * len(self.jobs)  # commits that were sent
        open_jobs = set(range(len(self.jobs)))
        for i, head in enumerate(self.heads):
            if head:
                yield self._chunk(i, head, first=True)
        while open_jobs:
            try:
                async with asyncio.timeout(keep_alive):
                    await self.news.wait()
            except TimeoutError:
                yield ": waiting\n\n"
                continue
            self.news.clear()
            for i in sorted(open_jobs):
                job = self.jobs[i]
                done = job.done  # before the text is read, so that none that comes between is lost
                parts = job.answer.parts[sent[i] :]
                if job.commits and len(job.commits) > drawn[i]:
                    news = job.commits[drawn[i] :]
                    drawn[i] += len(news)
                    yield self._canvas(i, news)
                if job.error:
                    yield _event(job.error.body())
                    return
                if parts or (done and self.chat and not sent[i]):
                    text = "".join(parts)
                    shown[i] += len(text)
                    tokens = job.answer.tokens_within(shown[i])
                    yield self._chunk(i, text, first=not sent[i], logprobs=self._logprobs(i, told[i], tokens))
                    sent[i], told[i] = sent[i] + len(parts), tokens
                if done:
                    open_jobs.remove(i)
                    rest = self._logprobs(i, told[i], job.answer.tokens) if told[i] < job.answer.tokens else None
                    yield self._chunk(i, None, reason=job.finish_reason, logprobs=rest)
        if self.usage_chunk:
            yield _event({**self._frame(self._chunk_name), "choices": [], "usage": self.usage()})
        yield "data: [DONE]\n\n"

    def usage(self) -> dict[str, int]:
        """Exact numbers: ids before the first stop id or stop string."""
        completion = sum(job.answer.tokens for job in self.jobs)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self.prompt_tokens + completion,
        }

    def summary(self, content: bool) -> dict[str, Any]:
        """What the log says of a call that has ended; ``content``: with its prompts and answers."""
        ends = {job.error.code or "error" if job.error else job.finish_reason or "cancelled" for job in self.jobs}
        started = [job.started - job.arrived for job in self.jobs if job.started]
        told = [progress(job) for job in self.jobs]
        first = [job.first_text - job.arrived for job in self.jobs if job.first_text]
        about = {
            "model": self.model,
            "decoder": self.jobs[0].decode.decoder,
            "choices": len(self.jobs),
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": sum(
                job.answer.tokens if job.finish_reason else settled
                for job, (settled, _) in zip(self.jobs, told, strict=True)
            ),
            "nfe": sum(nfe for _, nfe in told),
            "queue_seconds": round(max(started), 6) if started else None,
            "first_text_seconds": round(min(first), 6) if first else None,
            "finish": ",".join(sorted(ends)),
        }
        if content:
            about |= {"prompts": [self.text(job.prompt_ids) for job in self.jobs]}
            about |= {"answers": [job.answer.text for job in self.jobs]}
        return about

    @property
    def _chunk_name(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _frame(self, name: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": name,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    def _canvas(self, index: int, commits: Sequence[Commit]) -> str:
        """What the canvas of an answer got in one or more passes, as a chunk without choices, which clients of text
        pass over."""
        found = [
            {
                "position": c.position,
                "id": c.token,
                "text": self.piece(c.token).decode("utf-8", "replace"),
                "confidence": round(math.exp(c.logprob), 6),
                "step": c.step,
            }
            for c in commits
        ]
        frame = {**self._frame(self._chunk_name), "choices": [], "canvas": {"index": index, "commits": found}}
        return _event(frame)

    def _logprobs(self, index: int, start: int, stop: int) -> dict[str, Any] | None:
        """OpenAI's object for some tokens of an answer: the log-probability that each had in the pass that committed
        it, before temperature and filters. None if they were not asked for."""
        job = self.jobs[index]
        if not job.logprobs:
            return None
        answer, tokens = job.answer, range(start, stop)
        own = [(answer.ids[t], answer.logprobs[t]) for t in tokens]
        others = answer.alternatives[start:stop] or [[]] * len(own)
        if self.chat:
            content = [
                {**self._told(one), "top_logprobs": [self._told(other) for other in beside]}
                for one, beside in zip(own, others, strict=True)
            ]
            return {"content": content, "refusal": None}
        head = len(self.heads[index])
        return {
            "tokens": [self._told(one)["token"] for one in own],
            "token_logprobs": [value for _, value in own],
            # The token itself is always among them, also where it was drawn from further down.
            "top_logprobs": [
                {self._told(other)["token"]: other[1] for other in (*beside, one)}
                for one, beside in zip(own, others, strict=True)
            ],
            "text_offset": [head + answer.offset(t) for t in tokens],
        }

    def _told(self, alternative: Alternative) -> dict[str, Any]:
        piece = self.piece(alternative[0])
        return {"token": piece.decode("utf-8", "replace"), "logprob": alternative[1], "bytes": list(piece)}

    def _chunk(
        self,
        index: int,
        text: str | None,
        first: bool = False,
        reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> str:
        if self.chat:
            # The role comes with the first text, so that a client's time to first token is that of a token.
            delta = ({"role": "assistant"} if first else {}) | ({} if text is None else {"content": text})
            content: dict[str, Any] = {"delta": delta}
        else:
            content = {"text": text or ""}
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}
        chunk = {**self._frame(self._chunk_name), "choices": [choice]}
        if self.usage_always:
            chunk["usage"] = self.usage()
        elif self.usage_chunk:
            chunk["usage"] = None
        return _event(chunk)


def open_call(
    request: ChatRequest | CompletionRequest, name: str, model: ServedModel, loop: EngineLoop, request_id: str
) -> Call:
    """Check a request, make its jobs and queue them. ``name``: an adapter's, or any other for the model alone.

    Raises:
        RequestError, ApiError: it cannot be served; nothing was queued.
    """
    words = model.tokenizer
    options = request.stream_options
    if options is not None and not request.stream:
        raise RequestError("stream_options", "is only possible with stream: true")
    if request.canvas and not request.stream:
        raise RequestError("canvas", "is only possible with stream: true")
    if request.infill and request.stop:
        raise RequestError("stop", "is not possible with infill, whose answer holds text that was given")
    stops, (wants_logprobs, alternatives) = request.stop_strings(), request.wanted_logprobs()
    seconds, slo, priority = request.timing()
    n = 1 if request.n is None else request.n
    heads: list[str] = []
    if isinstance(request, ChatRequest):
        field = "messages"
        limit_name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
        lowest = 1
        _check_choices(n, 1, loop)
        _refuse_far_too_many(request.messages, model, field)
        chat = check_messages(request.messages)
        refuse_far_too_long([m["content"] for m in chat], model, field)
        encoded = [words.encode_checked(chat)]
    else:
        field = "prompt"
        limit_name, lowest = "max_tokens", 0 if request.echo or request.infill else 1
        _refuse_far_too_many(request.prompt, model, field)
        given = prompts(request.prompt)
        _check_choices(n, len(given), loop)
        for p in given:
            if isinstance(p, str):
                refuse_far_too_long([p], model, field)
        encoded = [words.encode(p) if isinstance(p, str) else p for p in given]
    asked = getattr(request, limit_name)
    if asked is not None and asked < lowest:
        raise RequestError(limit_name, f"{asked} must be at least {lowest}")
    behind = []
    if isinstance(request, CompletionRequest) and request.suffix:
        behind = words.encode(request.suffix, "suffix", begins=False)
    seed = random.getrandbits(32) if request.seed is None else request.seed
    news = asyncio.Event()
    jobs = []
    for ids in encoded:
        max_tokens = _room(len(check_prompt(ids, model.config, field)) + len(behind), asked, limit_name, field, model)
        plan = model.plans.of(request, name, max_tokens, alternatives)
        settings = plan.decode.with_seed(seed)
        begin = limit = None
        if behind:
            if model.config.mask_id in (*ids, *behind):
                raise RequestError("suffix", "prompt and suffix must not hold the mask id, which would be filled too")
            begin, limit = len(ids), len(ids) + max_tokens
            ids = [*ids, *[model.config.mask_id] * max_tokens, *behind]
            settings = dataclasses.replace(settings, infill=True, max_tokens=0)
        elif settings.infill:
            begin = ids.index(model.config.mask_id) if model.config.mask_id in ids else None
        if asked == 0 and not request.infill:  # nothing but the echo
            packed = None
        elif settings.infill:
            check_request(ids, settings, model.config, model.max_length, model.max_rows, len(model.adapters))
            packed = model.pack(ids, settings)
        else:
            packed = plan.pack(ids, seed)
        for i in range(n):
            own = (seed + i) % 2**64  # the engine takes seeds modulo 2**64 too
            decode = settings if own == seed else settings.with_seed(own)
            job = Job(ids, decode, Answer(words.detokenizer(), stops), news.set, bool(request.stream))
            job.begin, job.limit, job.logprobs, job.priority = begin, limit, wants_logprobs, priority
            job.deadline, job.slo = None if seconds is None else job.arrived + seconds, slo
            job.wanted = job.threshold = plan.threshold
            job.commits = [] if request.canvas else None
            job.packed = packed if own == seed or packed is None else model.reseed(packed, own)
            job.request_id = request_id
            jobs.append(job)
    if isinstance(request, CompletionRequest) and request.echo:
        if behind or request.infill:
            raise RequestError("echo", "is not possible with suffix or infill: the prompt itself is filled")
        heads = [p if isinstance(p, str) else words.decode(p) for p in given]
    if asked == 0 and not request.infill:
        for job in jobs:
            job.finish_reason = "length"
        news.set()
    else:
        loop.submit(jobs)
    return Call(
        model=name,
        fingerprint=model.fingerprint,
        chat=isinstance(request, ChatRequest),
        piece=words.piece,
        text=words.decode,
        jobs=jobs,
        heads=[head for head in heads or [""] * len(encoded) for _ in range(n)],
        prompt_tokens=sum(map(len, encoded)) + len(behind) * len(encoded),
        news=news,
        usage_chunk=bool(options and options.include_usage),
        usage_always=bool(options and options.continuous_usage_stats),
    )


def _check_choices(n: int, prompt_count: int, loop: EngineLoop) -> None:
    """Before the prompts are encoded, since millions of them would keep everyone else waiting."""
    most = min(MAX_CHOICES, loop.capacity)
    if n < 1 or n * prompt_count > most:
        raise RequestError("n" if n != 1 else "prompt", f"from 1 to {most} answers a call are possible")


def _refuse_far_too_many(given: Any, model: ServedModel, field: str) -> None:
    """Before each of the ids or messages in a list is looked at, which for a million of them takes as long."""
    if not isinstance(given, list) or not given or isinstance(given[0], str):  # how many texts: _check_choices
        return
    most = max(len(one) for one in (given if isinstance(given[0], list) else [given]) if isinstance(one, list))
    if most > model.max_length:  # a message, too, has at least one token
        raise _too_long(f"at least {most} tokens", model, field)


def refuse_far_too_long(texts: Sequence[str], model: ServedModel, field: str) -> None:
    """Megabytes of text are refused before they are encoded, which would keep everyone else waiting."""
    # A message has at least one token, whatever its text: the one that begins it.
    fewest = max(model.tokenizer.fewest(*texts), len(texts) if field == "messages" else 0)
    if fewest >= model.max_length:
        raise _too_long(f"at least {fewest} tokens", model, field)


def _room(prompt: int, asked: int | None, asked_field: str, field: str, model: ServedModel) -> int:
    """max_tokens, after its default and the canvas."""
    room = model.max_length - prompt
    if room < (0 if asked == 0 else 1):
        raise _too_long(f"{prompt} tokens", model, field)
    if asked is None:
        return min(default_max_tokens(model.defaults), room)
    if asked > room:
        raise _too_long(f"{prompt} tokens and {asked_field} is {asked}", model, asked_field)
    return asked


def _too_long(what: str, model: ServedModel, field: str) -> ApiError:
    text = f"the prompt has {what}; prompt and answer together may have {model.max_length} tokens"
    return ApiError(400, f"{field}: {text}", param=field, code="context_length_exceeded")


_LINE_ENDS = {ord(c): f"\\u{ord(c):04x}" for c in "\x85\u2028\u2029"}
"""Legal inside JSON, but where some clients split a stream into lines."""


def _event(data: dict[str, Any]) -> str:
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":")).translate(_LINE_ENDS)
    return f"data: {text}\n\n"
