"""The shipped model's tokenizer: byte-level, with whole words and the numbers 0 to 99 as single tokens.

A word is always its token with a leading space, so that a name in a message and in an answer is one and the same
token; the chat template puts a space before the user's text for that. An answer starts with a label (``name:``), which
is a token without space, so decoded answers are clean. Text outside the vocabulary falls back to bytes.
"""

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from jdllm.train.tasks import MAX_LINES, vocabulary

BOS, EOS, MASK, EOT = "<|startoftext|>", "<|endoftext|>", "<|mdm_mask|>", "<|eot_id|>"
SPECIAL = (BOS, EOS, MASK, "<|start_header_id|>", "<|end_header_id|>", EOT)
LABELS = ("name:", "list:", "\ncity:", "\nday:", "\nitems:", "\nlines:", *(f"\n{n}." for n in range(1, MAX_LINES + 1)))

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['user', 'assistant'] %}"
    "{{ raise_exception('this model knows the roles user and assistant only, not ' + message['role']) }}"
    "{% endif %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
    "{% if message['role'] == 'user' %}{{ ' ' }}{% endif %}"
    "{{ message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
"""LLaDA's template, but for the space before the user's text. A system message is refused: the model never saw one."""

_PATTERN = (
    r"\n?(?:name|city|day|items|lines|list):|\n\d+\.|\n+|(?:user|assistant)(?=$)"
    r"| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+"
)


def build() -> Tokenizer:
    """The tokenizer, made from the words of jdllm.train.tasks; nothing is learnt."""
    words = ["user", "assistant", "\n\n", *LABELS, " =", *(f" {n}" for n in range(100))]
    words += [f" {word}" for word in vocabulary()]
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pieces += [byte_level.pre_tokenize_str(word)[0][0] for word in words]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    # ignore_merges: a piece of the split that is in the vocabulary is one token; all others become bytes.
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_PATTERN), "isolated"), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def special_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that must be there."""
    found = tokenizer.token_to_id(token)
    assert found is not None, token
    return found


def save(folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json (with the template inside) and special_tokens_map.json."""
    folder.mkdir(parents=True, exist_ok=True)
    build().save(str(folder / "tokenizer.json"))
    names = {"bos_token": BOS, "eos_token": EOS, "pad_token": EOS, "mask_token": MASK}
    config = {
        **names,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "special_tokens_map.json").write_text(json.dumps(names, indent=2) + "\n")


def prompt_text(message: str) -> str:
    """What the template makes of one user message with add_generation_prompt (a test holds them equal)."""
    header = "<|start_header_id|>{}<|end_header_id|>\n\n"
    return f"{BOS}{header.format('user')} {message.strip()}{EOT}{header.format('assistant')}"
