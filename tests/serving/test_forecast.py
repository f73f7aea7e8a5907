"""Retry-After: how long a request that was refused would have waited."""

import threading

import pytest

from jdllm.serving.forecast import FOLLOW, Forecast
from jdllm.serving.schedulers import FixedFill


def test_the_first_request_replaces_the_guess_and_others_follow_slowly():
    forecast = Forecast(128)
    assert forecast.wait(ahead=3, slots=2, seconds=0.5) == 2 * 128 * 0.5
    forecast.ended(10)
    assert forecast.wait(ahead=0, slots=1, seconds=1.0) == 10
    forecast.ended(20)
    assert forecast.passes == pytest.approx(10 + FOLLOW * 10)


def test_a_batch_lasts_until_nothing_runs(serve, kit):
    """Ten passes and thirty of 10 ms together: the batch took as long as its longest request."""
    forecast = Forecast(1)
    assert forecast.batch == 0
    forecast.idle(2.0)
    forecast.idle(3.0)
    assert forecast.batch == pytest.approx(2 + FOLLOW)
    server = serve(kit.says("x", end=False), rows=2, policy=FixedFill(2, None), step_seconds=0.01)
    threads = [threading.Thread(target=server.complete, args=("a",), kwargs={"max_tokens": n}) for n in (10, 30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert server.loop._forecast.batch > 0.29 and server.loop._forecast.passes < 30


def test_the_rate_is_that_of_the_last_arrivals():
    forecast = Forecast(1)
    for at in (5.0, 5.5):
        assert forecast.rate == 0
        forecast.arrived(at)
    assert forecast.rate == 2
    forecast.arrived(6.5)
    assert forecast.rate == pytest.approx(1 / 0.55)
    forecast.arrived(10.5, count=8)  # eight choices of one call: half a second each
    assert forecast.rate == pytest.approx(1 / 0.545)


def test_a_full_queue_says_how_long_it_is(serve, kit):
    """Two slots, two that wait, ten passes each of 50 ms: two rounds, so a second and a half with the one refused."""
    server = serve(kit.says("x" * 10, end=False), rows=2, queue_limit=2, step_seconds=0.05)
    server.complete("first", max_tokens=10)
    threads = [threading.Thread(target=server.complete, args=("a",), kwargs={"max_tokens": 10}) for _ in range(4)]
    for thread in threads:
        thread.start()
    kit.until(lambda: server.metric("jdllm_requests_running") == 2 == server.metric("jdllm_requests_waiting"))
    refused = server.complete("b", max_tokens=10)
    for thread in threads:
        thread.join()
    assert refused.status_code == 429
    # (2 waiting + itself) / 2 slots * 10 passes * 0.05 s
    assert int(refused.headers["retry-after-ms"]) == pytest.approx(750, abs=1)
    assert refused.headers["retry-after"] == "1"
