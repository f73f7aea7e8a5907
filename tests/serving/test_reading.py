"""When the tokens of a report become text."""

import numpy as np
import pytest

from jdllm.config import DecodeConfig
from jdllm.engine import Row
from jdllm.serving import outlook
from jdllm.serving.job import Job
from jdllm.serving.reading import progress, take_over
from jdllm.serving.stream import Answer

EOS = 257
PROMPT, TEXT = [1, 2], list(b"some words")


def row(settled: int, live: bool) -> Row:
    tokens = np.array([*PROMPT, *TEXT], np.int32)
    return Row(0, "a", live, False, len(PROMPT), len(tokens), len(PROMPT) + settled, -1, settled, 4, tokens)


def read_all(job: Job) -> list[str]:
    """The text after each of four reports."""
    texts, job.slots = [], (0,)
    for settled in (0, 4, 7, len(TEXT)):
        end, _ = take_over(row(settled, live=settled < len(TEXT)), job, None, EOS)
        texts.append(job.answer.text)
        assert (end is None) == (settled < len(TEXT)) and job.nfe == settled
        seen = outlook.running(job)
        assert (seen.done, seen.blocks_left) == (settled, max(1, 3 - settled // 4)), "policies see what has settled"
        assert bool(job.first_text) == (settled > 0), "the first settled text is when it settles, read or not"
    return texts


@pytest.mark.parametrize(
    "stream, stops, texts",
    [
        (False, (), ["", "", "", "some words"]),
        (True, (), ["", "some", "some wo", "some words"]),
        (False, ("zz",), ["", "some", "some wo", "some words"]),
    ],
)
def test_text_that_nobody_waits_for_is_made_once(byte_tokenizer, stream, stops, texts):
    decode = DecodeConfig(max_tokens=len(TEXT), block_size=4)
    job = Job(PROMPT, decode, Answer(byte_tokenizer.detokenizer(), stops), lambda: None, stream)
    assert read_all(job) == texts
    assert job.answer.ids == TEXT


def test_a_stop_string_ends_a_plain_answer_before_its_row(byte_tokenizer):
    job = Job(PROMPT, DecodeConfig(), Answer(byte_tokenizer.detokenizer(), ["e w"]), lambda: None)
    assert take_over(row(4, live=True), job, None, EOS)[0] is None
    assert take_over(row(7, live=True), job, None, EOS)[0] == "stop"
    assert job.answer.text == "som"


def test_a_report_that_nobody_read_still_says_how_far_a_job_is(byte_tokenizer):
    job = Job(PROMPT, DecodeConfig(), Answer(byte_tokenizer.detokenizer()), lambda: None)
    assert progress(job) == (0, 0)
    take_over(row(4, live=True), job, None, EOS)
    assert progress(job) == (4, 4)
    job.latest = row(7, live=True)
    assert progress(job) == (7, 7)
    take_over(row(len(TEXT), live=False), job, None, EOS)
    assert progress(job) == (len(TEXT), len(TEXT)), "what was read later is newer"
