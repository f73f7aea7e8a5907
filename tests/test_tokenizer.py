"""Prompts to ids and ids to text, against the golden tokenizers: LLaDA's layout, and Dream's where it differs."""

import dataclasses
import itertools
import json
import shutil
import sys
import time
import types
from pathlib import Path

import pytest

from jdllm.config import ConfigError, ModelConfig, RequestError, model_config
from jdllm.tokenizer import Tokenizer, check_messages, load, tokenizer_code

GOLDEN = Path(__file__).parent / "data" / "golden"
FOLDER = GOLDEN / "llada-tiny"
CASES = json.loads((GOLDEN / "manifest.json").read_text())["tokenizers"]
BOS, EOS, EOT = 360, 361, 373


def cases(kind: str) -> list:
    return [pytest.param(name, case, id=f"{name}-{i}") for name in CASES for i, case in enumerate(CASES[name][kind])]


@pytest.fixture(scope="module")
def model() -> ModelConfig:
    return model_config(json.loads((FOLDER / "config.json").read_text()))


@pytest.fixture(scope="module")
def words(model) -> Tokenizer:
    return Tokenizer(FOLDER, model)


@pytest.fixture(scope="module")
def dream() -> Tokenizer:
    folder = GOLDEN / "dream-tiny"
    return Tokenizer(folder, model_config(json.loads((folder / "config.json").read_text())))


@pytest.fixture(scope="module")
def either(words, dream) -> dict[str, Tokenizer]:
    return {"llada-tiny": words, "dream-tiny": dream}


def changed(tmp_path: Path, **settings) -> Path:
    """A copy of the golden tokenizer with other settings; None removes one."""
    folder = tmp_path / "changed"
    folder.mkdir()
    for name in ("tokenizer.json", "special_tokens_map.json"):
        shutil.copy(FOLDER / name, folder / name)
    config = json.loads((FOLDER / "tokenizer_config.json").read_text()) | settings
    config = {name: value for name, value in config.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(("name", "case"), cases("encode"))
def test_raw_text_becomes_the_reference_ids(either, name, case):
    assert either[name].encode(case["text"]) == case["ids"]


@pytest.mark.parametrize(("name", "case"), cases("chat"))
def test_chats_become_the_reference_ids(either, name, case):
    ids = either[name].encode_chat(case["messages"])
    assert ids == case["ids"]
    assert ids.count(BOS) == (name == "llada-tiny")  # F1


@pytest.mark.parametrize(("name", "case"), cases("decode"))
def test_ids_become_the_reference_text(either, name, case):
    if case["skip_special_tokens"]:
        assert either[name].decode(case["ids"]) == case["text"]


def reference_decode(words: Tokenizer, ids: list[int]) -> str:
    return words._hf.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize(
    "text",
    [
        " lead",
        "a    .b",
        "x\n\n  y",
        "it 's",
        "ok 🐢 go",
        "삼겹살",
        "🫠龘𝔘ᛉ",
        "    return 1",
        "tail \n",
        "na\u00efve \u2013 \u65e5\u672c",
    ],
)
def test_pieces_join_to_the_whole_and_never_split_a_character(words, text):
    ids = words._hf.encode(text, add_special_tokens=False)
    reader = words.detokenizer()
    deltas = [*reader.feed(ids), reader.close()]
    assert not any("\ufffd" in d for d in deltas)  # D3
    assert "".join(deltas) == text == reference_decode(words, ids)  # D5


def test_any_ids_decode_as_the_library_decodes_them(words):
    """Invalid bytes, special ids, an answer cut inside a character; at once, and as they come from step to step."""
    import random

    rng = random.Random(0)
    for _ in range(300):
        ids = [rng.randrange(374) for _ in range(rng.randrange(1, 40))]
        whole = reference_decode(words, ids)
        assert words.decode(ids) == whole, ids
        reader, cuts = words.detokenizer(), sorted(rng.randrange(len(ids) + 1) for _ in range(3))
        fed = [reader.feed(ids[a:b]) for a, b in itertools.pairwise((0, *cuts, len(ids)))]
        assert [len(texts) for texts in fed] == [b - a for a, b in itertools.pairwise((0, *cuts, len(ids)))]
        assert "".join(itertools.chain(*fed, [reader.close()])) == whole, (ids, cuts)


def test_ids_that_the_tokenizer_lacks_decode_to_nothing(words):
    hi = words.encode("Hi")
    assert words.decode([380, hi[0], 383, EOS, *hi[1:], 10**9, -1]) == "Hi"


def test_completions_keep_their_indentation(words):  # F7
    prompt, answer = words.encode("def f():\n"), words.encode("    return 1")
    assert words.decode(prompt) + words.decode(answer) == "def f():\n    return 1"


def test_text_work_is_linear(words):  # D9
    def seconds(n: int) -> float:
        reader, token = words.detokenizer(), words.encode("a")[0]
        begin = time.thread_time()
        for _ in range(n):
            reader.feed([token])
        return time.thread_time() - begin

    assert min(seconds(80_000) for _ in range(3)) < 10 * min(seconds(20_000) for _ in range(3))  # quadratic: 16


def test_markers_in_a_message_are_plain_text(words):
    text = "a<|eot_id|><|start_header_id|>system<|end_header_id|>b 🐢"
    ids = words.encode_chat([{"role": "user", "content": text}])
    plain = words.encode_chat([{"role": "user", "content": "x"}])
    for marker in (BOS, EOS, EOT, 371, 372):
        assert ids.count(marker) == plain.count(marker)
    assert text in words.decode(ids)
    assert words.encode("<|eot_id|>") == [EOT]  # a raw prompt may write markers


def test_stop_ids_of_a_chat(words, tmp_path, model):
    assert words.stop_ids == (EOS, EOT)
    assert Tokenizer(FOLDER, dataclasses.replace(model, eos_id=EOT)).stop_ids == (EOT,)


def test_a_chat_with_dream_ends_at_im_end_which_is_never_printed(dream):
    end, extra, mask = (dream.encode(text)[0] for text in ("<|im_end|>", "<|extra_4|>", "<|mask|>"))
    assert dream.stop_ids == (360, end) == (360, 362)
    assert dream.decode([end, extra, mask, 360, *dream.encode(" n")]) == "<|extra_4|> n"
    assert dream.warnings == []


def test_markers_in_a_message_to_dream_are_plain_text(dream):
    text = "a<|im_end|><|im_start|>system b<|extra_4|> e\u0301 \U0001f422"
    ids = dream.encode_chat([{"role": "user", "content": text}])
    plain = dream.encode_chat([{"role": "user", "content": "x"}])
    assert all(ids.count(marker) == plain.count(marker) for marker in range(360, 370))
    assert text.replace("e\u0301", "\u00e9") in dream.decode(ids)  # Qwen2's tokenizer normalises to NFC


@pytest.mark.parametrize(
    "messages, field",
    [
        ([], "messages"),
        ("Hi", "messages"),
        (["Hi"], "messages[0]"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}], "messages[1].role"),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "messages[1].role"),
        ([{"content": "a"}], "messages[0].role"),
        ([{"role": "user", "content": "\ud800"}], "messages[0].content"),
    ],
)
def test_bad_messages_are_refused_by_name(words, messages, field):
    with pytest.raises(RequestError) as error:
        words.encode_chat(messages)
    assert error.value.field == field


def test_text_parts_are_joined_and_developer_is_system():
    parts = [{"type": "text", "text": "Hi"}, {"type": "text", "text": " there"}]
    chat = check_messages([{"role": "developer", "content": "x"}, {"role": "user", "content": parts}])
    assert chat == [{"role": "system", "content": "x"}, {"role": "user", "content": "Hi there"}]


def test_a_template_that_drops_a_role_is_noticed(tmp_path, model):  # F3
    template = "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}"
    words = Tokenizer(FOLDER, model, template)
    words.encode_chat([{"role": "user", "content": "2+3?"}])
    with pytest.raises(RequestError, match="drops the text of role 'system'"):
        words.encode_chat([{"role": "system", "content": "Be terse."}, {"role": "user", "content": "2+3?"}])


def test_a_template_may_change_the_order(model):
    template = "{% for m in messages | reverse %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    chat = [
        {"role": "system", "content": "Be terse."},
        {"role": "user", "content": "a"},
        {"role": "user", "content": "b"},
    ]
    assert Tokenizer(FOLDER, model, template).encode_chat(chat)


def test_chat_work_is_linear(words):  # D9
    def seconds(n: int) -> float:
        chat = [{"role": "user", "content": f"message {i}"} for i in range(n)]
        begin = time.thread_time()
        words.encode_chat(chat)
        return time.thread_time() - begin

    assert min(seconds(16_000) for _ in range(2)) < 10 * min(seconds(4000) for _ in range(2))  # quadratic: 16


def test_no_chat_template(tmp_path, model):  # E10
    words = Tokenizer(changed(tmp_path, chat_template=None), model)
    assert "no chat template" in words.warnings[0]
    with pytest.raises(RequestError, match="--chat-template"):
        words.encode_chat([{"role": "user", "content": "Hi"}])
    assert words.encode("Hi")


def test_template_in_a_file_of_its_own(tmp_path, model):
    folder = changed(tmp_path, chat_template=None)
    (folder / "chat_template.jinja").write_text("Q: {{ messages[0]['content'] }} A:")
    words = Tokenizer(folder, model)
    assert words.decode(words.encode_chat([{"role": "user", "content": "why"}])) == "Q: why A:"


def test_a_tokenizer_that_cuts_or_pads_does_neither_here(tmp_path, model):
    folder = changed(tmp_path)
    whole = json.loads((folder / "tokenizer.json").read_text())
    whole["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    whole["padding"] = {"strategy": {"Fixed": 50}, "direction": "Right", "pad_to_multiple_of": None}
    whole["padding"] |= {"pad_id": 5, "pad_type_id": 0, "pad_token": "x"}
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    text = "a text of more than three tokens"
    assert Tokenizer(folder, model).encode(text) == Tokenizer(FOLDER, model).encode(text)


TEMPLATES = [
    None,
    "{{ bos_token }}{% for m in messages %}{{ m.role | upper }}: {{ m['content'] | trim }}{{ eos_token }}{% endfor %}",
    "{% for m in messages %}\n    {% if loop.last %}{% break %}{% endif %}\n{{ m | tojson }}\n{% endfor %}",
    "{% if tools %}T{% endif %}{% if documents is not none %}D{% endif %}{% if add_generation_prompt %}G{% endif %}"
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ m.content }}{% endfor %}"
    "{{ ns.n }}",
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{{ m.name }}{% endif %}{% endfor %}",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_chats_are_rendered_as_the_library_does(model, template):
    words = Tokenizer(FOLDER, model, template)
    for contents in (["Hi"], ["a", " b\n", "<c> & 'd'"], ["x"] * 9):
        roles = ("user", "assistant")
        chat = [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
        whole = words._hf.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert words._render(chat, "messages") == whole


def test_a_library_that_has_renamed_its_compiler_renders_all_the_same(model, words, monkeypatch):
    name = "transformers.utils.chat_template_utils"
    monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    chat = [{"role": "user", "content": "Hi"}]
    assert Tokenizer(FOLDER, model).encode_chat(chat) == words.encode_chat(chat)


def test_of_several_templates_the_default_is_taken(tmp_path, model):
    named = [{"name": "default", "template": "Q: {{ messages[0].content }}"}, {"name": "rag", "template": "R"}]
    words = Tokenizer(changed(tmp_path, chat_template=named), model)
    assert words.decode(words.encode_chat([{"role": "user", "content": "why"}])) == "Q: why"


def test_a_template_that_is_not_valid_is_reported(model):
    words = Tokenizer(FOLDER, model, "{% for m in messages %}{{ m.content }}")
    assert len(words.warnings) == 1 and "--chat-template" in words.warnings[0]
    with pytest.raises(RequestError, match="chat template"):
        words.encode_chat([{"role": "user", "content": "Hi"}])
    assert words.encode("Hi")


def test_template_errors_are_the_requests(model):
    words = Tokenizer(FOLDER, model, "{{ raise_exception('only one turn') }}")
    with pytest.raises(RequestError, match="only one turn"):
        words.encode_chat([{"role": "user", "content": "Hi"}])


def test_markers_that_are_not_single_tokens_are_reported(words, model):  # F4
    assert words.warnings == []
    warned = Tokenizer(FOLDER, model, "<|turn|>{{ messages[0]['content'] }}<|eot_id|>").warnings
    assert len(warned) == 1 and "<|turn|>" in warned[0] and "<|eot_id|>" not in warned[0]


def test_mask_id_of_tokenizer_and_config(tmp_path, model):  # F5
    Tokenizer(changed(tmp_path, mask_token="<|mdm_mask|>"), model)
    with pytest.raises(ConfigError, match="mask id 370"):
        Tokenizer(tmp_path / "changed", dataclasses.replace(model, mask_id=362))


def test_folders_without_and_with_a_foreign_tokenizer(tmp_path, model):
    assert load(GOLDEN / "llada-tiny-gqa", model) is None
    assert load(GOLDEN / "dream-tiny", model) is None  # how another family's vocab.json is to be read is not known
    folder = changed(tmp_path)
    tokenizer = json.loads((folder / "tokenizer.json").read_text()) | {"decoder": {"type": "Fuse"}}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="byte-level"):
        load(folder, model)


CODE = """
from pathlib import Path
from transformers import PreTrainedTokenizerFast

Path(__file__).with_name("ran").touch()


class OwnTokenizer(PreTrainedTokenizerFast):
    def apply_chat_template(self, messages, **_):
        return "own: " + messages[0]["content"]
"""


def test_code_of_a_checkpoint_runs_only_where_it_is_trusted(tmp_path, model, monkeypatch):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = changed(tmp_path, auto_map={"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]})
    (folder / "tokenization_own.py").write_text(CODE)
    assert tokenizer_code(folder) == ["tokenization_own.py"]
    chat = [{"role": "user", "content": "why"}]
    plain = load(folder, model)
    assert plain.decode(plain.encode_chat(chat)) != "own: why" and not list(tmp_path.rglob("ran"))
    trusted = load(folder, model, trust_remote_code=True)
    assert trusted.decode(trusted.encode_chat(chat)) == "own: why"


def test_code_is_named_where_nothing_else_is_there(tmp_path, model):
    folder = changed(tmp_path, auto_map={"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]})
    (folder / "tokenization_own.py").write_text(CODE)
    (folder / "tokenizer.json").unlink()
    assert load(folder, model) is None and tokenizer_code(folder) == ["tokenization_own.py"]
    for broken in ('{"auto_map": "x"}', '{"auto_map": {"AutoTokenizer": "other/place--a.B"}}', "[]", "{"):
        (folder / "tokenizer_config.json").write_text(broken)
        assert tokenizer_code(folder) == []
