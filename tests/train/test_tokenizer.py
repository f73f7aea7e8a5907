"""The tokenizer: whole words, numbers, clean answers, and the chat template as trained."""

import itertools

import pytest
from transformers import AutoTokenizer

from jdllm.train import tasks, tokenizer


@pytest.fixture(scope="module")
def build():
    return tokenizer.build()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(folder)
    return AutoTokenizer.from_pretrained(folder)


def test_numbers_and_words_are_single_tokens_and_come_back(build):
    for word in [*map(str, range(100)), *tasks.vocabulary()]:
        ids = build.encode(f" {word}").ids
        assert len(ids) == 1 and build.decode(ids) == f" {word}"


def test_all_text_of_the_tasks_is_whole_tokens_and_comes_back(build):
    for task in itertools.islice(tasks.tasks("validation", 0), 200):
        prompt, answer = build.encode(tokenizer.prompt_text(task.message)).ids, build.encode(task.answer).ids
        assert build.encode(tokenizer.prompt_text(task.message) + task.answer).ids == prompt + answer
        assert build.decode(answer) == task.answer
        assert build.decode(prompt).strip().startswith("user\n\n " + task.message)
        pieces = {build.id_to_token(i) for i in prompt + answer}
        assert {piece for piece in pieces if len(piece) == 1} <= set(",.!:")


def test_other_text_falls_back_to_bytes(build):
    text = " Zürich, 12345 straße\t日本 \n\n end"
    assert build.decode(build.encode(text).ids) == text


def test_the_chat_template_is_what_was_trained(saved):
    task = tasks.held_out("validation", 1)[0]
    messages = [{"role": "user", "content": f"  {task.message}\n"}]
    text = saved.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == tokenizer.prompt_text(task.message)
    ids = saved.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids == tokenizer.build().encode(text).ids
    without = saved.apply_chat_template(messages, tokenize=False)
    assert text == without + "<|start_header_id|>assistant<|end_header_id|>\n\n"


def test_the_chat_template_refuses_a_system_message(saved):
    with pytest.raises(Exception, match="system"):
        saved.apply_chat_template([{"role": "system", "content": "Be brief."}], tokenize=False)


def test_the_saved_tokenizer_has_lladas_special_tokens(saved, build):
    assert (saved.bos_token, saved.eos_token, saved.pad_token) == (tokenizer.BOS, tokenizer.EOS, tokenizer.EOS)
    assert saved.convert_tokens_to_ids(list(tokenizer.SPECIAL)) == [build.token_to_id(t) for t in tokenizer.SPECIAL]
    assert len(saved) == build.get_vocab_size()
