"""Stop strings and text deltas."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdllm.serving.stream import Answer, StopStrings


def run(pieces, stops):
    finder = StopStrings(stops)
    shown = []
    for piece in pieces:
        safe, stopped = finder.feed(piece)
        shown.append(safe)
        if stopped:
            return shown, True
    return [*shown, finder.close()], False


def test_a_stop_string_split_over_pieces_never_leaks():  # D1
    assert run(["abc<", "EN", "D>def"], ["<END>"]) == (["abc", "", ""], True)


def test_only_what_may_begin_a_stop_is_held_back():  # D7
    assert run(["hello"], ["zzzz"]) == (["hello", ""], False)
    assert run(["helloz", "z", "y"], ["zzzz"]) == (["hello", "", "zzy", ""], False)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.text("ab", max_size=4)), st.lists(st.text("ab", min_size=1, max_size=4), max_size=4))
def test_pieces_give_what_the_whole_text_gives(pieces, stops):
    text = "".join(pieces)
    found = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
    shown, stopped = run(pieces, stops)
    assert stopped == bool(found)
    assert "".join(shown) == (text[: min(found)[1]] if found else text)


@pytest.mark.parametrize("split", [1, 2, 3, 100])
def test_answer_counts_the_tokens_its_text_is_made_of(byte_tokenizer, split):
    answer = Answer(byte_tokenizer.detokenizer(), ["<END>"])
    ids = list(b"abc<END>def")
    for i in range(0, len(ids), split):
        answer.extend(ids[i : i + split])
    answer.close()
    assert (answer.text, answer.stopped, answer.tokens) == ("abc", True, 3)


def test_answer_counts_whole_characters(byte_tokenizer):
    answer = Answer(byte_tokenizer.detokenizer(), ["x"])
    answer.extend("é🐢x".encode())
    assert (answer.text, answer.tokens) == ("é🐢", 6)
    empty = Answer(byte_tokenizer.detokenizer(), ["é"])
    empty.extend("é".encode())
    assert (empty.text, empty.tokens) == ("", 0)


def test_held_back_text_comes_at_the_end(byte_tokenizer):
    answer = Answer(byte_tokenizer.detokenizer(), ["<END>"])
    answer.extend(b"abc<EN")
    assert answer.text == "abc"
    answer.close()
    assert answer.text == "abc<EN" and answer.tokens == 6 and not answer.stopped


def test_text_work_is_linear(byte_tokenizer):  # D9
    def seconds(n: int) -> float:
        answer = Answer(byte_tokenizer.detokenizer(), ["<END>", "zz"])
        begin = time.thread_time()
        for _ in range(n):
            answer.extend((97,))
        return time.thread_time() - begin

    assert min(seconds(32_000) for _ in range(3)) < 10 * min(seconds(8000) for _ in range(3))  # quadratic: 16
