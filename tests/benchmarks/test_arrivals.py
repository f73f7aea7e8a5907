"""Arrival processes against their distributions, traces against lines by hand, and what a wrong file is told."""

import functools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from benchmarks.arrivals import (
    Arrival,
    burst,
    gamma,
    parse,
    poisson,
    read_azure,
    read_mooncake,
    read_trace,
    scaled,
    static,
)

AZURE = Path(__file__).parents[1] / "data" / "azure_llm_2023_conv_20.csv"
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
ROW = "2023-11-16 18:15:46.68,374,44\n"

PROCESSES = {
    "poisson": poisson,
    "gamma": lambda rng, rate, count: gamma(rng, rate, 2.5, count),
    "static": lambda rng, rate, count: static(rate, count),
    "burst": lambda rng, rate, count: burst(rng, rate, 1e6, 0.5, 2.0, count),
}


def rng() -> np.random.Generator:
    return np.random.default_rng(3)


def gaps(times: np.ndarray) -> np.ndarray:
    return np.diff(times, prepend=0.0)


@pytest.fixture
def file(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "trace"
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize("name", PROCESSES)
@given(seed=st.integers(0, 2**32), rate=st.floats(1e-3, 1e4), count=st.integers(0, 50))
def test_times_are_in_order_and_repeat_with_their_seed(name, seed, rate, count):
    first, again = (PROCESSES[name](np.random.default_rng(seed), rate, count) for _ in range(2))
    assert first.shape == (count,) and first.dtype == np.float64 and (gaps(first) >= 0).all()
    assert first.tolist() == again.tolist()


def test_poisson_gaps_are_exponential():
    assert stats.kstest(gaps(poisson(rng(), 4.0, 20_000)), stats.expon(scale=0.25).cdf).pvalue > 0.01


@pytest.mark.parametrize("cv", [0.2, 1.0, 3.0])
def test_gamma_has_its_mean_and_variation(cv):
    found = gaps(gamma(rng(), 4.0, cv, 200_000))
    assert found.mean() == pytest.approx(0.25, rel=0.03)
    assert found.std() / found.mean() == pytest.approx(cv, rel=0.03)
    if cv == 1:
        assert stats.kstest(found[:20_000], stats.expon(scale=0.25).cdf).pvalue > 0.01


def test_static_gaps_are_equal():
    assert static(4.0, 3).tolist() == [0.25, 0.5, 0.75]


def test_a_burst_counts_as_its_rate_says():
    times = [burst(np.random.default_rng(seed), 5.0, 3.0, 10.0, 14.0, 200) for seed in range(400)]
    for begin, end, expected in ((0, 10, 50), (10, 14, 60), (14, 20, 30), (9, 11, 5 + 15), (13, 15, 15 + 5)):
        counts = np.array([((begin <= t) & (t < end)).sum() for t in times])
        # A Poisson count: its mean is known to sqrt(mean / 400), its variance is its mean.
        assert counts.mean() == pytest.approx(expected, abs=3 * math.sqrt(expected / len(times)))
        assert counts.var() == pytest.approx(expected, rel=0.25)


@pytest.mark.parametrize("factor", [0.5, 4.0])
def test_a_burst_is_poisson_on_its_own_clock(factor):
    times = burst(rng(), 5.0, factor, 100.0, 300.0, 5000)
    clock = times + (factor - 1) * np.clip(times - 100.0, 0, 200.0)
    assert clock == pytest.approx(poisson(rng(), 5.0, 5000))
    assert burst(rng(), 5.0, 1.0, 100.0, 300.0, 5000) == pytest.approx(poisson(rng(), 5.0, 5000))
    assert burst(rng(), 5.0, factor, 0.0, math.inf, 5000) == pytest.approx(poisson(rng(), 5.0 * factor, 5000))


def test_azure_excerpt():
    arrivals = read_azure(AZURE)
    assert arrivals == read_trace(AZURE) and len(arrivals) == 20
    assert arrivals[:3] == [Arrival(0.0, 374, 44), Arrival(4.314579, 396, 109), Arrival(4.541877, 879, 55)]


def test_azure_columns_are_found_by_name_and_times_by_zone(file):
    rows = [
        "GeneratedTokens, Region ,ContextTokens,TIMESTAMP",
        "3,eu,20,2024-05-10 02:00:01.5+02:00",
        "",
        "1,us,10,2024-05-10 00:00:00",
    ]
    assert read_trace(file("\ufeff" + "\r\n".join(rows))) == [Arrival(0.0, 10, 1), Arrival(1.5, 20, 3)]


def test_mooncake_lines(file):
    lines = [
        {"timestamp": 30_000, "input_length": 915, "output_length": 355, "hash_ids": [0, 4]},
        {"timestamp": 27_000, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2]},
        {"timestamp": 27_000, "input_length": 2290, "output_length": 0},
        {"timestamp": 27_000.5},
    ]
    path = file("\n" + "\n".join(map(json.dumps, lines)))
    expected = [Arrival(0.0, 6758, 500), Arrival(0.0, 2290, 0), Arrival(0.0005), Arrival(3.0, 915, 355)]
    assert read_mooncake(path) == read_trace(path) == expected


MOONCAKE_LINE = '{"timestamp": 0, "input_length": 1, "output_length": 1}\n'


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "line 1: the columns must have TIMESTAMP, ContextTokens, GeneratedTokens; TIMESTAMP is not among them"),
        ("TIMESTAMP,ContextTokens\n", "line 1: .*; GeneratedTokens is not among them"),
        ("PK\x03\x04\xff", "line 1: the columns must have"),
        (HEADER + "\n", "trace: must have an arrival at least"),
        (HEADER + ROW + "2023-11-16 18:15:47,374\n", "line 3: 2 cells must be 3"),
        (HEADER + ROW + "2023-11-16 18:15:47,1,374,44\n", "line 3: 4 cells must be 3"),
        (HEADER + "12.5,374,44\n", "line 2, TIMESTAMP: '12.5' must be a time like 2023-11-16 18:15:46.68"),
        (HEADER + "\n" + ROW.replace("374", "-3"), "line 3, ContextTokens: '-3' must be a whole number of tokens"),
        (HEADER + ROW.replace("44", "4.0"), "line 2, GeneratedTokens: '4.0' must be a whole number"),
        (HEADER + ROW.replace("44", ""), "line 2, GeneratedTokens: '' must be"),
        (HEADER + ROW.replace("44", "1_0"), "line 2, GeneratedTokens: '1_0' must be"),
        (HEADER + ROW.replace("44", "9" * 5000), "line 2, GeneratedTokens: '999"),
        (MOONCAKE_LINE + "{\n", "line 2: must be a JSON object: "),
        (MOONCAKE_LINE + "\n[1]\n", "line 3: must be a JSON object, not .1."),
        (MOONCAKE_LINE.replace("timestamp", "time"), "line 1, timestamp: None must be a number of milliseconds"),
        *((MOONCAKE_LINE.replace("0", bad), "line 1, timestamp: ") for bad in ("NaN", "1e999", "true", '"0"')),
        (MOONCAKE_LINE.replace("0", "1" + "0" * 400), "line 1, timestamp: 1000"),
        *((MOONCAKE_LINE.replace("1", bad), "line 1, input_length: ") for bad in ("-1", "1.5", "null", "true")),
    ],
)
def test_a_wrong_file_is_told_where_and_what(file, text, message):
    path = file(text)
    with pytest.raises(ValueError, match=message) as caught:
        read_trace(path)
    assert str(caught.value).startswith(str(path))


@given(st.lists(st.floats(0, 1e5), min_size=2, max_size=30), st.floats(1e-3, 1e4))
def test_scaled_gives_the_rate_and_keeps_the_shape(times, rate):
    arrivals = [Arrival(at, key, None) for key, at in enumerate(sorted(times))]
    assume(max(times) - min(times) > 1e-3)
    found = scaled(arrivals, rate)
    assert [(one.prompt, one.tokens) for one in found] == [(one.prompt, one.tokens) for one in arrivals]
    at = np.array([one.at for one in found])
    assert at[0] == 0 and (np.diff(at) >= 0).all()
    assert np.diff(at).mean() == pytest.approx(1 / rate)
    shape = (np.sort(times) - min(times)) / (max(times) - min(times))
    assert at / at[-1] == pytest.approx(shape)


@pytest.mark.parametrize("times", [[], [1.0], [1.0, 1.0]])
def test_what_has_no_rate_is_not_scaled(times):
    with pytest.raises(ValueError, match=f"{len(times)} arrivals must come at two moments"):
        scaled([Arrival(at) for at in times], 1.0)


@pytest.mark.parametrize(
    "text, times",
    [
        ("poisson", poisson),
        ("gamma:cv=2", functools.partial(gamma, cv=2.0)),
        ("static", lambda rng, rate, count: static(rate, count)),
        ("burst:factor=2,begin=1,end=3", functools.partial(burst, factor=2.0, begin=1.0, end=3.0)),
    ],
)
def test_a_flag_names_a_process(text, times):
    assert parse(text)(rng(), 2.0, 10).tolist() == times(rng=rng(), rate=2.0, count=10).tolist()


def test_a_flag_names_a_trace():
    times = parse(f"trace:{AZURE}")
    assert times(rng(), 2.0, 5).tolist() == [one.at for one in scaled(read_azure(AZURE)[:5], 2.0)]
    assert times(rng(), 2.0, 20)[-1] == pytest.approx(19 / 2.0)
    for count in (1, 21):
        with pytest.raises(ValueError, match=f"count: {count} must be from 2 to 20"):
            times(rng(), 2.0, count)


@pytest.mark.parametrize(
    "text, message",
    [
        ("pareto", "'pareto' is not one of poisson, gamma, static, burst, trace"),
        ("poisson:cv=2", "'cv=2' is no setting of poisson; known: none"),
        ("gamma", "gamma needs cv, as in gamma:cv=2"),
        ("gamma:2", "'2' is no setting of gamma; known: cv"),
        ("gamma:cv=two", "cv: 'two' must be a number"),
        ("gamma:cv=0", r"cv: 0\.0 must be from 0\.001"),
        ("gamma:cv=nan", "cv: nan must be"),
        ("burst:factor=2,begin=3", "burst needs end"),
        ("burst:factor=2,begin=3,end=3", "begin, end: 3.0, 3.0 must be"),
        ("burst:factor=0,begin=3,end=4", "factor: 0.0 must be"),
        ("trace:", "trace needs a file, as in trace:FILE"),
    ],
)
def test_a_wrong_flag_is_told_what_is_right(text, message):
    with pytest.raises(ValueError, match=message):
        parse(text)


@pytest.mark.parametrize("name", PROCESSES)
def test_rates_and_counts_out_of_range_are_refused(name):
    for rate in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match=f"rate: {rate} must be"):
            PROCESSES[name](rng(), rate, 3)
    with pytest.raises(ValueError, match="count: -1 must be"):
        PROCESSES[name](rng(), 1.0, -1)
