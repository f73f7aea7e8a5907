"""Jobs whose rows have ended: their slots are given away before their last words are read."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

from jdllm.serving.schedulers import Slot


def after_each_other(server, kit, *prompts: str, **settings):
    """Replies to prompts of which each is in the queue before the one in the slot has begun."""
    insert, queued = server.engine.insert, threading.Event()

    def insert_later(*args) -> None:
        assert queued.wait(30)
        insert(*args)

    server.engine.insert = insert_later
    with ThreadPoolExecutor(len(prompts)) as pool:
        replies = [pool.submit(server.complete, prompt, **settings) for prompt in prompts]
        kit.until(lambda: server.loop._running and len(server.loop._waiting) == len(prompts) - 1)
        queued.set()
        return [reply.result() for reply in replies]


def test_the_next_call_starts_before_an_answer_is_read(serve, kit):
    server, read_at = serve(kit.says("x", end=False), rows=1), []
    finish = server.loop._finish
    server.loop._finish = lambda job, reason: (read_at.append(server.engine.steps), finish(job, reason))
    after_each_other(server, kit, "a", "b", max_tokens=5)
    assert read_at == [6, 10]  # with the second's first step under way; after its last there is none


def test_a_complete_answer_survives_a_fault_in_the_next_call(serve, kit):
    server = serve(kit.says("x", end=False), rows=1)

    def once() -> None:
        if server.engine.rows[0]["nfe"] == 0 and server.engine.steps:
            server.engine.fault = None
            raise RuntimeError("injected")

    server.engine.fault = once
    replies = after_each_other(server, kit, "a", "b", "c", max_tokens=5)
    texts = sorted(r.json()["choices"][0]["text"] for r in replies if r.status_code == 200)
    assert texts == ["xxxxx"] * 2 and sorted(r.status_code for r in replies) == [200, 200, 500]
    assert server.engine.resets == 1 and server.loop.idle and server.reconciles()


def test_a_complete_answer_survives_a_fault_of_the_policy(serve, kit):
    class Once(Slot):
        failed = False

        def decide(self, view, now):
            if server.engine.steps and not self.failed:
                self.failed = True
                raise RuntimeError("no decision")
            return super().decide(view, now)

    server = serve(kit.says("x", end=False), rows=1, policy=Once())
    assert [r.status_code for r in after_each_other(server, kit, "a", "b", max_tokens=5)] == [200, 200]
    assert server.engine.resets == 1 and server.reconciles()


def test_a_complete_answer_survives_a_fault_while_another_leaves(serve, kit):
    server = serve(kit.says("x", end=False), rows=2)
    alternatives, told = server.engine.alternatives, []

    def fail_at_the_end(slot: int):
        if server.loop._leaving and not told:
            told.append(slot)
            raise RuntimeError("injected")
        return alternatives(slot)

    server.engine.alternatives = fail_at_the_end
    both_queued, insert = threading.Event(), server.engine.insert
    server.engine.insert = lambda *args: (both_queued.wait(30), insert(*args))
    with ThreadPoolExecutor(2) as pool:
        plain = pool.submit(server.complete, "a", max_tokens=5)
        kit.until(lambda: server.loop._running)
        asks = pool.submit(server.complete, "b", max_tokens=4, logprobs=2)  # a step later, so that both end together
        kit.until(lambda: server.loop._waiting)
        both_queued.set()
        assert plain.result().json()["choices"][0]["text"] == "xxxxx" and asks.result().status_code == 500
    assert told == [1] and server.loop.idle and server.reconciles()


def test_who_is_aborted_between_its_end_and_its_last_words_is_cancelled(serve, kit):
    class Aborting(Slot):
        def decide(self, view, now):
            server.loop.abort(list(server.loop._leaving))
            return super().decide(view, now)

    server = serve(kit.says("x", end=False), rows=1, policy=Aborting())
    replies = after_each_other(server, kit, "a", "b", max_tokens=5)
    assert sorted(r.status_code for r in replies) == [200, 499]
    kit.until(lambda: server.loop.idle)
    assert server.metric("jdllm_requests_cancelled_total") == 1 and server.reconciles()


def test_a_complete_answer_is_told_also_when_the_server_stops(serve, kit):
    server, stopped = serve(kit.says("x", end=False), rows=1), threading.Event()
    evict = server.engine.evict

    def stop_then_evict(slot: int) -> None:
        server.loop._stopping = True
        stopped.set()
        evict(slot)

    server.engine.evict = stop_then_evict
    replies = after_each_other(server, kit, "a", "b", max_tokens=5)
    assert stopped.is_set() and sorted(r.status_code for r in replies) == [200, 503]


def test_a_server_whose_last_answer_is_not_read_yet_is_not_idle(serve, kit):
    server, idle = serve(kit.says("x", end=False), rows=1), []
    evict = server.engine.evict
    server.engine.evict = lambda slot: (idle.append(server.loop.idle), evict(slot))
    assert server.complete("a", max_tokens=5).status_code == 200
    kit.until(lambda: server.loop.idle)
    assert idle == [False]


def test_alternatives_are_read_while_the_slot_still_has_them(serve, kit):
    server, seen = serve(kit.says("x", end=False), rows=1), []
    alternatives = server.engine.alternatives

    def watch(slot: int):
        seen.append(server.engine.rows[slot]["tokens"][0].item())
        return alternatives(slot)

    server.engine.alternatives = watch
    for reply in after_each_other(server, kit, "a", "b", "c", max_tokens=5, logprobs=3):
        assert len(reply.json()["choices"][0]["logprobs"]["top_logprobs"]) == 5
    assert [len(list(same)) for _, same in itertools.groupby(seen)] == [1, 1, 1]
