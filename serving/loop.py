"""The one thread that owns the device: it loads, compiles, and then steps for as long as there is work.

Other threads talk to it through ``submit``, ``cancel`` and ``drain``; it talks back by filling a job's answer and
posting the job's ``notify``. Requests wait for a free slot by priority, equal ones first in, first out, and join and
leave at any step. One that misses its deadline leaves with an error, wherever it is.
"""

import bisect
import gc
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from jdllm.config import RequestError
from jdllm.decoders import slots_needed, sure_above
from jdllm.runtime import default_max_tokens
from jdllm.serving import outlook
from jdllm.serving.errors import ApiError, from_exception, retry_headers
from jdllm.serving.forecast import Forecast
from jdllm.serving.job import Job
from jdllm.serving.logs import fields
from jdllm.serving.metrics import Metrics
from jdllm.serving.reading import take_over
from jdllm.serving.schedulers import Policy, Running, Slot, View

if TYPE_CHECKING:  # the engine imports JAX, and the server answers /health before that is done
    from jdllm.engine import Engine, Row, Timing
    from jdllm.engine import Pass as EnginePass
    from jdllm.serving.model import ServedModel

log = logging.getLogger("jdllm.serving")

MOST_FAULTS = 5
"""In a row, without a call of the engine between them, after which the server gives up instead of starting again."""

Post = Callable[[Callable[[], None]], object]
"""Runs a function on the thread that answers clients (``asyncio``'s ``call_soon_threadsafe``)."""


class EngineLoop:
    """Queue, slots and state of the engine's thread.

    Args:
        open_model: loads weights and tokenizer; given a function that takes progress lines.
        post: how to reach the clients' thread.
        queue_limit: jobs that may wait.
        policy: decides who leaves the queue when; None: Slot.
        on_change: told, by the engine's thread, whenever the state has become ``ready`` (after the start and after
            each recovery) or ``failed``.
    """

    def __init__(
        self,
        open_model: "Callable[[Callable[[str], None]], ServedModel]",
        metrics: Metrics,
        post: Post,
        queue_limit: int = 256,
        on_change: Callable[["EngineLoop"], None] = lambda loop: None,
        policy: Policy | None = None,
    ):
        self._open_model = open_model
        self._metrics = metrics
        self._post = post
        self._on_change = on_change
        self._policy, self._wake = policy or Slot(), math.inf
        self.queue_limit = queue_limit
        self.model: ServedModel | None = None
        self.state = "loading"  # then compiling, ready, recovering, failed
        self.detail = "loading the model"
        self.failure: BaseException | None = None
        self.draining = False
        self._stopping = False
        self._numbers = itertools.count()
        self._waiting: list[Job] = []  # by priority, then arrival
        self._running: dict[int, Job] = {}  # by slot; the engine's thread alone changes this and the next
        self._leaving: list[Job] = []  # their slots may be others' by now, their last words are not read yet
        self._news: dict[int, Job] = {}
        self._timing: Timing | None = None  # of the last call, until it is published
        self._ended: list[Running] = []  # since the policy was last asked, where it steers
        self._forecast, self._busy_since = Forecast(1.0), 0.0
        self._pass_seconds: Callable[[], float] = lambda: 0.0
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="jdllm-engine", daemon=True)
        metrics.gauge("requests_running", "Requests in a slot.", lambda: len(self._running) + len(self._leaving))
        metrics.gauge("requests_waiting", "Requests in the queue.", lambda: len(self._waiting))
        metrics.gauge("oldest_wait_seconds", "How long the head of the queue has waited.", self._oldest_wait)

    def start(self) -> None:
        """Begin loading."""
        self._thread.start()

    @property
    def not_ready(self) -> str | None:
        """Why requests are refused now; None when they are taken. (While the engine recovers, which is soon over, they
        wait in the queue.)"""
        if self.state == "failed" or not self.draining:
            return None if self.state in ("ready", "recovering") else f"{self.state}: {self.detail}"
        return "draining: the server is shutting down"

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue all of these jobs or none.

        Raises:
            ApiError: 503 while no request can be taken, 429 when the queue is full.
        """
        with self._changed:
            if reason := self.not_ready:
                self._metrics.rejected.labels("not_ready").inc(len(jobs))
                raise ApiError(503, reason, code="not_ready", headers=retry_headers(5))
            if len(self._running) + len(self._waiting) + len(jobs) > self.capacity:
                self._metrics.rejected.labels("queue_full").inc(len(jobs))
                ahead = sum(slots_needed(job.decode) for job in self._waiting)
                wait = self._forecast.wait(ahead, self._slots, self._pass_seconds())
                raise ApiError(
                    429,
                    f"{len(self._waiting)} requests wait already, {self.queue_limit} may",
                    code="rate_limit_exceeded",
                    headers=retry_headers(wait),
                )
            self._metrics.admitted.inc(len(jobs))
            self._forecast.arrived(jobs[0].arrived, len(jobs))
            for job in jobs:
                job.number = next(self._numbers)
                job.outlook = outlook.waiting(job)
                place = bisect.bisect_right(self._waiting, job.priority, key=lambda waiting: waiting.priority)
                self._waiting.insert(place, job)
            self._changed.notify()

    @property
    def capacity(self) -> int:
        """Jobs that may run and wait at once."""
        return self._slots + self.queue_limit

    def cancel(self, jobs: Iterable[Job]) -> None:
        """Forget these jobs: those in the queue never start, those in a slot leave before the next step."""
        jobs = [job for job in jobs if not job.finish_reason]
        if not jobs:  # the end of nearly every call, which need not wake anybody
            return
        with self._changed:
            for job in jobs:
                if job.cancelled or job.finish_reason:
                    continue
                if job.error and job not in (*self._waiting, *self._running.values(), *self._leaving):
                    continue
                job.cancelled = True
                if job in self._waiting:
                    self._waiting.remove(job)
                    self._metrics.cancelled.inc()
            self._changed.notify()

    def abort(self, jobs: Iterable[Job]) -> None:
        """Cancel jobs whose clients are still there: they get an error that says so."""
        error = ApiError(499, "the request was aborted", code="aborted", headers={"x-should-retry": "false"})
        open_jobs = [job for job in jobs if not job.done]
        for job in open_jobs:
            job.error = error
        self.cancel(open_jobs)
        for job in open_jobs:
            job.notify()

    def drain(self) -> None:
        """Take no more requests; those taken are finished."""
        with self._changed:
            self.draining = True
            self._changed.notify()

    @property
    def idle(self) -> bool:
        """Nothing runs and nothing waits."""
        with self._changed:  # a job that moves to its slot is, for a moment, in neither
            return not (self._waiting or self._running or self._leaving)

    def stop(self, timeout: float = 10.0) -> None:
        """End the thread; jobs that are left get an error. While it loads or compiles it is abandoned instead."""
        with self._changed:
            self._stopping = self.draining = True
            self._changed.notify()
        if self._thread.is_alive() and self.state in ("ready", "recovering"):
            self._thread.join(timeout)

    # From here on: the engine's thread.

    @property
    def _used(self) -> int:
        """Slots taken."""
        return sum(len(set(job.slots)) for job in list(self._running.values()))

    @property
    def _slots(self) -> int:
        return self.model.max_rows if self.model else 0

    def _run(self) -> None:
        try:
            model = self.model = self._open_model(self._progress)
            self.state, self.detail = "compiling", "compiling"
            engine = model.new_engine(self._progress)
            counters = engine.counters
            self._metrics.watch(engine, model, lambda: self._used)
            self._forecast = Forecast(default_max_tokens(model.defaults))
            self._pass_seconds = lambda: _pass_seconds(engine)
            # What has been made until now stays: the collector need not look through it, which takes a fifth of a
            # second in which no thread runs.
            gc.collect()
            gc.freeze()
            self._become_ready()
            faults, calls = 0, 0
            while not self._stopping:
                try:
                    self._serve(engine)
                except Exception:
                    faults, calls = 0 if counters.calls > calls else faults + 1, counters.calls
                    if faults > MOST_FAULTS:
                        raise
                    log.exception("the engine failed; its rows are lost, and it starts again from an empty state")
                    self.state, self.detail = "recovering", "the engine is being reset after a fault"
                    self._metrics.resets.inc()
                    self._fail_running()
                    engine.reset()
                    self._become_ready()
            self._end_all(ApiError(503, "the server is shutting down", code="shutting_down", headers=retry_headers(5)))
        except BaseException as error:
            with self._changed:
                self.state, self.detail, self.failure = "failed", f"{type(error).__name__}: {error}", error
            self._fail_running()
            self._end_all(ApiError(503, "the engine has failed", code="engine_failed"))
            self._on_change(self)

    def _become_ready(self) -> None:
        with self._changed:
            self.state, self.detail = "ready", ""
        self._on_change(self)

    def _progress(self, text: str) -> None:
        self.detail = text
        log.info("%s", text)

    def _serve(self, engine: "Engine") -> None:
        """Step while there is work, sleep while there is none; returns when told to stop."""
        going = True
        while going:
            rows, reported = self._report(engine)
            # Rows that have ended leave before the next call, so that others have their slots in it. What the report
            # says is read while the device works, unless the policy steers by it, or the slot holds more of it.
            ended, later = [], []
            try:
                for row in rows:
                    if row.live and not self._policy.steers:
                        later.append(row)
                        continue
                    job = self._running.get(row.slot)
                    if job is None or job.cancelled or row.handle != job:
                        continue
                    if self._policy.steers or job.decode.alternatives:
                        self._read(engine, row, job)
                    else:
                        ended.append((row, job))
                        self._release(engine, row.slot, job)
                if not (self._running or ended):  # it may have to wait
                    self._publish()
                going = self._step(engine, reported)
            finally:  # whatever fails, these answers are complete
                for row, job in ended:
                    self._read(engine, row, job)
            for row in later:
                job = row.handle
                assert isinstance(job, Job)
                if job.first_text and job.unwatched:
                    job.latest = row
                else:
                    self._read(engine, row, job)
            self._publish()

    def _step(self, engine: "Engine", reported: float | None) -> bool:
        """Wait for work, let jobs leave and join as the policy says, and start the next call; False when told to stop.

        Args:
            reported: when the last call's report came, if rows go on from it.
        """
        with self._changed:
            while not (self._waiting or self._running or self._leaving or self._stopping):
                reported = None
                self._changed.wait()
            if self._stopping:
                return False
            left = [slot for slot, job in self._running.items() if job.cancelled]
            if left:
                self._metrics.cancelled.inc(len(left))
            late = self._late()
            overdue = [slot for slot, job in self._running.items() if job in late]
            for slot in (*left, *overdue):
                del self._running[slot]
            for job in late:
                self._miss(job)
            joined, thresholds = self._decide(engine)
            if not (joined or left or self._running or self._leaving or self._news):  # the policy lets them wait
                until = min([self._wake, *(job.deadline for job in self._waiting if job.deadline is not None)])
                pause = min(max(0.0, until - time.monotonic()), threading.TIMEOUT_MAX)
                self._changed.wait(None if until == math.inf else pause)
                return True
        # Outside the lock: this takes the device's time, and clients must not wait for it.
        for slot in (*left, *overdue):
            engine.evict(slot)
        for job in joined:
            self._insert(engine, job)
        if thresholds:
            self._set_thresholds(engine, thresholds)
        if self._running and engine.dispatch(self._hold if self._policy.holds else None):
            self._metrics.steps.inc()
            if reported is not None:
                self._metrics.between_steps_seconds.observe(time.perf_counter() - reported)
        for job in joined:
            if job.started:
                self._metrics.queue_seconds.observe(job.started - job.arrived)
        return True

    def _report(self, engine: "Engine") -> "tuple[list[Row], float | None]":
        """The rows of the call in flight, and when its report came; None where there was none, or nobody left."""
        before, rows = engine.last_call, engine.read()
        call = engine.last_call
        if call is None or call is before:
            return rows, None
        self._timing = call
        return rows, call.ended

    def _decide(self, engine: "Engine") -> tuple[list[Job], Mapping[int, float]]:
        """Ask the policy. Move those that it admits to the lowest free slots, end those that it sheds; return the
        former, and by slot the thresholds that it changes. (While it shuts down the server keeps nobody waiting for a
        batch to fill.)"""
        taken = {slot for job in self._running.values() for slot in job.slots}
        free, joined = [slot for slot in range(self._slots) if slot not in taken], []
        self._wake = math.inf
        policy = Slot() if self.draining else self._policy
        if not policy.steers and not (free and self._waiting):
            return [], {}
        assert self.model is not None
        waiting = {job.number: job for job in self._waiting}
        view = View(
            [job.outlook or outlook.waiting(job) for job in self._waiting],
            len(free),
            self._slots,
            self._forecast.rate,
            self._forecast.batch,
            len(free) * self.model.max_length,
            [outlook.running(job) for job in self._running.values()] if policy.steers else (),
            self._ended,
            engine.step_seconds,
        )
        self._ended = []
        actions = policy.decide(view, time.monotonic())
        self._wake = actions.wake
        for number in actions.shed:
            self._shed(waiting.pop(number))
        if not self._running:
            self._busy_since = time.monotonic()
        for number in actions.admit:
            job = waiting.pop(number)
            job.slots, free = free[: slots_needed(job.decode)], free[slots_needed(job.decode) :]
            self._running[job.slots[0]] = job
            joined.append(job)
        if actions.admit or actions.shed:
            self._waiting = [job for job in self._waiting if job.number in waiting]
        return joined, actions.thresholds

    def _hold(self, passes: "list[EnginePass]") -> list[int]:
        """Slots that the policy lets sit out the next step."""
        return list(self._policy.hold(outlook.passes(passes, self._running)))

    def _set_thresholds(self, engine: "Engine", thresholds: Mapping[int, float]) -> None:
        changed = {}
        for slot, threshold in thresholds.items():
            if job := self._running.get(slot):
                job.threshold = threshold
                changed[slot] = sure_above(job.decode, threshold)
        engine.set_thresholds(changed)

    def _shed(self, job: Job) -> None:
        """End a job that the policy does not want to serve."""
        self._metrics.failed.inc()
        self._metrics.shed.inc()
        self._news[id(job)] = job
        text = "the server has too much to do for this answer to be in time"
        job.error = ApiError(503, text, code="shed", headers={"x-should-retry": "false"})

    def _late(self) -> list[Job]:
        """Those that have missed their deadlines, in slots (whether they step or not) and in the queue, which they
        leave."""
        now, jobs = time.monotonic(), (*self._running.values(), *self._waiting)
        late = [job for job in jobs if job.deadline is not None and now > job.deadline and not job.cancelled]
        self._waiting = [job for job in self._waiting if job not in late] if late else self._waiting
        return late

    def _miss(self, job: Job) -> None:
        """End a job because of its deadline. (Clients must not repeat it.)"""
        self._metrics.failed.inc()
        self._news[id(job)] = job
        text = "the deadline passed before the answer was complete"
        job.error = ApiError(504, text, code="deadline_exceeded", headers={"x-should-retry": "false"})

    def _insert(self, engine: "Engine", job: Job) -> None:
        try:
            engine.insert(job.slots[0], job, job.prompt_ids, job.decode, job.slots[-1], job.packed)
        except RequestError as error:  # checked before it was queued, so this does not happen; the others go on
            del self._running[job.slots[0]]
            self._fail(job, from_exception(error))
        else:
            job.started, job.packed = time.monotonic(), None

    def _release(self, engine: "Engine", slot: int, job: Job) -> None:
        """Free the slot of a job whose row has ended; what its row has written is still to be read."""
        self._leaving.append(job)  # first: others look on
        del self._running[slot]
        engine.evict(slot)
        if not self._running:
            self._forecast.idle(time.monotonic() - self._busy_since)

    def _read(self, engine: "Engine", row: "Row", job: Job) -> None:
        """Take over what a report says of one row, and end its job if that is over."""
        leaving, cancelled = job in self._leaving, job.cancelled  # others may set this any time
        if cancelled and leaving:
            self._metrics.cancelled.inc()
            self._leaving.remove(job)
        if cancelled or not (leaving or self._running.get(row.slot) is job):
            return
        assert self.model is not None
        first_text = job.first_text
        end, news = take_over(row, job, engine, self.model.config.eos_id)
        if job.first_text and not first_text:
            self._metrics.first_text_seconds.observe(job.first_text - job.arrived)
        if news:
            self._news[id(job)] = job
        if end is None:
            return
        if not leaving:
            self._release(engine, row.slot, job)
        if isinstance(end, ApiError):
            self._fail(job, end)
        else:
            self._finish(job, end)
        self._leaving.remove(job)

    def _finish(self, job: Job, reason: str) -> None:
        now = time.monotonic()
        self._forecast.ended(job.nfe)
        self._metrics.finished.labels(reason).inc()
        self._count(job)
        if self._policy.steers:
            self._ended.append(outlook.running(job))
        self._metrics.request_seconds.observe(now - job.arrived)
        if job.slo is not None:
            self._metrics.slo.labels("yes" if now - job.arrived <= job.slo else "no").inc()
        self._news[id(job)] = job
        job.finish_reason = reason  # last: whoever sees it may read everything else

    def _count(self, job: Job) -> None:
        """Tokens and passes of a job that has ended: their quotient is the tokens per NFE."""
        self._metrics.forward_passes.inc(job.nfe)
        self._metrics.committed.inc(len(job.answer.ids))

    def _fail(self, job: Job, error: ApiError) -> None:
        """End one job with an error; the others go on."""
        log.error("a request failed: %s", error.message, extra=fields(request_id=job.request_id))
        self._metrics.failed.inc()
        self._news[id(job)] = job
        job.error = error  # last, as in _finish

    def _fail_running(self) -> None:
        error = from_exception(RuntimeError("engine fault"))
        for job in (*self._running.values(), *self._leaving):
            if not job.cancelled:
                job.error = error
                self._metrics.failed.inc()
                self._news[id(job)] = job
            else:
                self._metrics.cancelled.inc()
        self._running.clear()
        self._leaving.clear()
        self._publish()

    def _end_all(self, error: ApiError) -> None:
        with self._changed:
            left = [*self._running.values(), *self._leaving, *self._waiting]
            self._running.clear()
            self._leaving.clear()
            self._waiting.clear()
        for job in left:
            self._metrics.cancelled.inc()
            if not job.cancelled:
                job.error = error
                self._news[id(job)] = job
        self._publish()

    def _publish(self) -> None:
        """The last call's time, and one hop to the clients' thread a step, however many jobs have news."""
        if call := self._timing:
            self._metrics.step_seconds.labels(f"{call.bucket.rows}x{call.bucket.packed}").observe(call.seconds)
            self._timing = None
        if not self._news:
            return
        notify = [job.notify for job in self._news.values()]
        self._news = {}

        def tell() -> None:
            for each in notify:
                each()

        try:
            self._post(tell)
        except RuntimeError:  # the clients' event loop is closed: nobody is left to tell
            log.debug("news for nobody")

    def _oldest_wait(self) -> float:
        try:
            return time.monotonic() - min(job.arrived for job in self._waiting)
        except ValueError:
            return 0.0


def _pass_seconds(engine: "Engine") -> float:
    """Of one denoising step, in calls as the last one: where requests wait, that one was full. Before the first, of the
    widest."""
    if (call := engine.last_call) is None:  # read once: the engine's thread may set it meanwhile
        return max(engine.costs.table().values(), default=0.0)
    return engine.costs.of(call.bucket) / call.bucket.steps
