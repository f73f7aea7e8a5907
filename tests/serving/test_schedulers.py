"""Policies by name, and the engine's thread under one that makes everyone wait."""

import threading

import pytest

from jdllm.serve import main
from jdllm.serving.schedulers import POLICIES, Actions, Block, Deadline, Deficit, FixedFill, PerRequest, Slot, parse


def test_policies_by_name_and_setting():
    assert isinstance(parse("slot"), Slot)
    policy = parse("fixed-fill,size=8,timeout=2.5,sealed=true")
    assert isinstance(policy, FixedFill) and vars(policy) == {"size": 8, "timeout": 2.5, "sealed": True}
    assert parse("fixed-fill,size=2,timeout=none").timeout is None and parse("fixed-fill,size=2").timeout == "auto"
    assert set(POLICIES) >= {"slot", "fixed-fill"}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("fifo", "slot, per-request, fixed-fill, block, deficit, deadline, exclusive"),
        ("fixed-fill", "size"),
        ("fixed-fill,size", "name=value"),
        ("fixed-fill,size=0", "size"),
        ("fixed-fill,size=many", "size"),
        ("fixed-fill,size=2,timeout=later", "timeout"),
        ("slot,size=3", "known: none"),
        ("deficit,budget=0", "budget"),
        ("deficit,order=random", "order"),
        ("block,budget=0", "budget"),
        ("deadline,thresholds=high", "thresholds"),
        ("exclusive,mode=both", "mode"),
    ],
)
def test_what_is_wrong_is_named_with_its_flag(text, named, capsys):
    with pytest.raises(SystemExit) as end:
        main(["--scheduler", text])
    error = capsys.readouterr().err
    assert end.value.code == 2 and "--scheduler" in error and named in error


def test_one_row_a_step_lets_all_advance_alike(serve, kit):
    """Three requests of six passes: eighteen steps, and nobody is more than a pass ahead."""
    seen = []

    def script(prompt, decode):
        for step in kit.says("x", end=False)(prompt, decode):
            seen.append(prompt[0])
            yield step

    class Together(PerRequest):
        """Nobody begins before all three are there."""

        def decide(self, view, now):
            return super().decide(view, now) if len(view.waiting) == 3 else Actions()

    server = serve(script, rows=4, policy=Together(), step_seconds=0.002)
    threads = [threading.Thread(target=server.complete, args=([i],), kwargs={"max_tokens": 6}) for i in (65, 66, 67)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert sorted(seen) == sorted([65, 66, 67] * 6) and server.engine.steps >= 18
    for i in range(len(seen)):
        counts = [seen[:i].count(prompt) for prompt in (65, 66, 67)]
        assert max(counts) - min(counts) <= 1


def test_a_row_that_is_held_for_ever_misses_its_deadline(serve, kit):
    class First(Slot):
        holds = True

        def hold(self, passes):
            return [one.key for one in passes if one.key]

    server = serve(kit.says("x", end=False), rows=2, policy=First(), step_seconds=0.005)
    threads = ask(server, 1, max_tokens=100)
    kit.until(lambda: server.metric("jdllm_requests_running") == 1)
    assert server.complete("late", max_tokens=4, deadline_ms=80).status_code == 504
    for thread in threads:
        thread.join(10)
    assert server.metric("jdllm_requests_finished_total") == 1 and not server.engine.rows


def test_sangams_rule_lets_decoding_rows_go_on(serve, kit):
    """First passes are refreshes of eight positions here: with a budget of eight no two of them share a step."""
    steps: list[int] = []
    rule = Deficit(8)
    hold = rule.hold

    def watched(passes):
        held = hold(passes)
        steps.append(sum(one.refresh for one in passes if one.key not in held))
        return held

    rule.hold = watched
    server = serve(kit.says("x", end=False), rows=4, policy=rule, step_seconds=0.01)
    threads = ask(server, 4)
    for thread in threads:
        thread.join(10)
    assert server.metric("jdllm_requests_finished_total") == 4 == sum(steps) and max(steps) == 1


def test_who_comes_inside_a_block_cycle_joins_when_it_is_over(serve, kit):
    """Two blocks of four passes. A request that comes in the first of them starts with the second."""
    seen = []

    def script(prompt, decode):
        for step in kit.says("x", end=False)(prompt, decode):
            seen.append(prompt[0])
            yield step

    server = serve(script, rows=4, policy=Block(), step_seconds=0.02)
    threads = ask(server, 1, max_tokens=8, block_size=4)
    kit.until(lambda: seen)
    server.complete("b", max_tokens=8, block_size=4)
    threads[0].join(10)
    # (a byte of the prompt each) four passes of the first alone, four together, four of the second.
    assert bytes(seen[:4]) == b"aaaa" and sorted(seen[4:12]) == sorted(b"aaaabbbb") and bytes(seen[12:]) == b"bbbb"


def test_thresholds_follow_what_requests_want(serve, kit):
    """A row whose target is out of reach gets the lowest candidate; one without a target is left alone; and targets
    kept and missed are counted."""
    server = serve(kit.says("x", end=False), rows=4, policy=Deadline(thresholds="0.8/0.5"), step_seconds=0.01)
    given, set_thresholds = [], server.engine.set_thresholds
    server.engine.set_thresholds = lambda above: (given.append(dict(above)), set_thresholds(above))
    assert server.complete("a", max_tokens=8).status_code == 200
    assert given == [] and server.metric("jdllm_requests_with_slo_total") == 0
    assert server.complete("a", max_tokens=8, slo_ms=1).status_code == 200
    assert given and given[0] == {0: 0.5}
    text = server.http.get("/metrics").text
    assert 'jdllm_requests_with_slo_total{kept="no"} 1' in text
    server.complete("a", max_tokens=8, slo_ms=60_000)
    assert 'jdllm_requests_with_slo_total{kept="yes"} 1' in server.http.get("/metrics").text


def test_what_a_policy_sheds_ends_with_an_error(serve, kit):
    server = serve(kit.says("x", end=False), rows=1, policy=Deadline(shed=True), step_seconds=0.02)
    threads = ask(server, 1, max_tokens=30)
    kit.until(lambda: server.metric("jdllm_requests_running") == 1)
    refused = server.complete("b", max_tokens=30, slo_ms=1)
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "shed"
    assert refused.headers["x-should-retry"] == "false"  # in overload, of all times, clients repeat a 503 by themselves
    threads[0].join(10)
    assert server.metric("jdllm_requests_shed_total") == 1 == server.metric("jdllm_requests_failed_total")
    assert server.metric("jdllm_requests_finished_total") == 1


def ask(server, count: int, max_tokens: int = 8, **settings) -> list[threading.Thread]:
    settings |= {"max_tokens": max_tokens}
    threads = [threading.Thread(target=server.complete, args=("a",), kwargs=settings) for _ in range(count)]
    for thread in threads:
        thread.start()
    return threads


def test_a_batch_starts_when_it_is_full(serve, kit):
    server = serve(kit.says("x", end=False), rows=4, policy=FixedFill(3, None))
    threads = ask(server, 2)
    kit.until(lambda: server.metric("jdllm_requests_waiting") == 2)
    steps = server.engine.steps
    threads += ask(server, 1)
    for thread in threads:
        thread.join(10)
    assert steps == 0 and server.metric("jdllm_requests_finished_total") == 3
    # Eight passes, together: with the report one call late, not three times as many.
    assert server.engine.steps <= 10


def test_the_timer_starts_a_batch_that_is_not_full(serve, kit):
    server = serve(kit.says("x"), rows=4, policy=FixedFill(3, 0.2))
    assert server.complete("a", max_tokens=4).status_code == 200


def test_who_waits_for_a_batch_can_leave_and_be_late(serve, kit):
    server = serve(kit.says("x"), rows=4, policy=FixedFill(3, None))
    assert server.complete("a", max_tokens=4, deadline_ms=100).status_code == 504
    body = {"model": "tiny", "prompt": "a", "stream": True}
    thread = threading.Thread(
        target=server.http.post, args=("/v1/completions",), kwargs={"json": body, "headers": {"X-Request-ID": "gone"}}
    )
    thread.start()
    kit.until(lambda: server.metric("jdllm_requests_waiting") == 1)
    assert server.http.post("/v1/abort", json={"request_id": "gone"}).json()["aborted"] == 1
    thread.join(10)
    assert server.metric("jdllm_requests_waiting") == 0 and server.engine.steps == 0


def test_a_server_that_shuts_down_fills_no_batch(serve, kit):
    server = serve(kit.says("x"), rows=4, policy=FixedFill(3, None))
    (thread,) = ask(server, 1)
    kit.until(lambda: server.metric("jdllm_requests_waiting") == 1)
    server.loop.drain()
    thread.join(10)
    assert not thread.is_alive() and server.metric("jdllm_requests_finished_total") == 1
