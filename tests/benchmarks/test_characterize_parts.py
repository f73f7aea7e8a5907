"""The pieces of the characterization: statistics, problems from files, early signals, equality of batches."""

import json

import numpy as np
import pytest

from benchmarks.characterize import __main__ as characterize
from benchmarks.characterize.batches import check_equal
from benchmarks.characterize.runs import Answer, Batch, run_batch
from benchmarks.characterize.signals import first_look
from benchmarks.characterize.statistics import pearson, r_squared, spread
from benchmarks.characterize.subject import open_subject
from jdllm.config import DecodeConfig, EngineConfig
from jdllm.denoise.window import Bucket
from jdllm.engine import Engine
from jdllm.models import llada


def test_correlation_of_known_data():
    assert pearson([1, 2, 3], [2, 4, 6]) == pytest.approx(1)
    assert pearson([1, 2, 3], [6, 4, 2]) == pytest.approx(-1)
    assert r_squared([1, 2, 3], [6, 4, 2]) == pytest.approx(1)
    # By hand: covariance 1, variances 2/3 and 2.
    assert r_squared([1, 2, 3], [1, 1, 4]) == pytest.approx(0.75)
    assert r_squared([-1, 0, 1], [1, 0, 1]) == pytest.approx(0)
    assert r_squared([1, 1, 1], [1, 2, 3]) is None and r_squared([1, 2], [5, 5]) is None and pearson([1], [1]) is None
    with pytest.raises(ValueError, match="2 values beside 1"):
        pearson([1, 2], [1])


def test_r_squared_is_the_share_that_a_fitted_line_explains():
    rng = np.random.default_rng(0)
    x = rng.normal(size=50)
    y = 2 * x + rng.normal(size=50)
    left = y - np.polyval(np.polyfit(x, y, 1), x)
    assert r_squared(x.tolist(), y.tolist()) == pytest.approx(1 - left.var() / y.var())


def test_spread():
    found = spread([1, 2, 3, 4, 5])
    assert found["mean"] == found["p50"] == 3 and (found["least"], found["most"]) == (1, 5)
    assert found["sd"] == pytest.approx(2**0.5) and found["cv"] == pytest.approx(2**0.5 / 3)
    with pytest.raises(ValueError, match="no values"):
        spread([])


@pytest.mark.parametrize(
    "form, line, answer, right",
    [
        ("gsm8k", {"question": "3 and 4?", "answer": "3 + 4\n#### 7"}, "7", True),
        ("gsm8k", {"question": "3 and 4?", "answer": "3 + 4\n#### 7"}, "8", False),
        ("orders", {"message": "Send me 3 cups.", "answer": "items:"}, "items:", True),
        ("humaneval", {"prompt": "def f():", "test": "pass", "entry_point": "f"}, "items:", None),
    ],
)
def test_problems_from_a_file(form, line, answer, right, tmp_path):
    file = tmp_path / "problems.jsonl"
    file.write_text(3 * (json.dumps(line) + "\n"))
    flags = ["--problems", str(file), "--form", form, "--n", "2", "--max-tokens", "64", "--block-size", "32"]
    subject = open_subject(characterize._parser().parse_args(flags), lambda text: None)
    assert len(subject.problems) == 2 and (subject.length - 64) % 32 == 0
    assert (subject.words.decode(subject.prompts[0]) == "def f():") == (form == "humaneval")
    assert subject.d2f().block_size == 32 and subject.other("llada").max_tokens == 64
    found = 2 * [Answer(subject.words.encode(answer), 8, 1, 1, 0.1, truncated=False)]
    assert subject.right(found) == [right, right]
    assert subject.accuracy(found) == (None if right is None else right)


def test_bad_problems_are_named(tmp_path, capsys):
    (tmp_path / "p.jsonl").write_text('{"message": "a"}')
    assert characterize.main(["requests", "--problems", str(tmp_path / "p.jsonl"), "--out", str(tmp_path)]) == 2
    assert "--problems: line 1 is not of form orders" in capsys.readouterr().err


def test_the_first_look_is_what_the_first_pass_sees(tiny):
    """The highest confidence is the probability of the token that the engine's first pass commits."""
    params, prompt, block = llada.init(tiny, 3), [7, 8, 9, 10], 8
    signals = first_look(params, tiny, block, 32)(prompt)
    engine = Engine(params, tiny, EngineConfig(1, 32))
    engine.buckets = [Bucket(1, 32)]
    engine.compile()
    decode = DecodeConfig(max_tokens=8, block_size=block, skip_threshold=1.0, stop_ids=(), early_stop=False)
    engine.insert(0, "request", prompt, decode)
    rows = []
    while not rows:
        rows = engine.step()
    (place,) = np.flatnonzero(rows[0].committed == 1)
    assert signals.highest == pytest.approx(float(np.exp(rows[0].logprobs[place])), rel=1e-4)
    assert signals.prompt == 4 and 0 < signals.confidence <= signals.highest
    assert 0 < signals.entropy <= np.log(tiny.vocab_size)
    while engine.step():
        pass
    engine.evict(0)
    batch = run_batch(engine, [prompt], [decode])
    assert batch.answers[0].nfe == batch.steps == 8 and batch.answers[0].truncated
    assert (batch.answers[0].blocks, batch.answers[0].written) == (1, 1)


def test_an_answer_that_hangs_on_its_batch_ends_the_run():
    answer = lambda ids, nfe=8: Answer(ids, nfe, 1, 1, 0.1, False)
    run = lambda *found: [Batch(list(found), 0.1, 8)]
    check_equal({1: [run(answer([1]), answer([2]))], 2: [run(answer([1]), answer([2]))]})
    with pytest.raises(SystemExit, match="batch size 2: the answer to problem 1 is not that of batch size 1"):
        check_equal({1: [run(answer([1]), answer([2]))], 2: [run(answer([1]), answer([3]))]})
    with pytest.raises(SystemExit, match="problem 0"):
        check_equal({1: [run(answer([1]))], 2: [run(answer([1], nfe=9))]})
