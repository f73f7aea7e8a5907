"""Text and token ids: prompts in, chats through the checkpoint's template, answers out piece by piece.

Byte-level BPE only (LLaDA, Dream and the shipped model have it): there every id stands for bytes, so that text can be
put together id by id, in linear time, and equals the decoding of the whole.

How a prompt becomes ids, the same everywhere:
    raw text   by the tokenizer's own settings (a BOS is added only where the tokenizer adds one); markers such as
               ``<|startoftext|>`` in the text are read as special tokens, so that any prompt form can be written.
    chat       rendered by the template, which writes its own BOS; markers inside a message's content are plain text.
"""

import codecs
import contextlib
import functools
import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from jdllm.config import ConfigError, ModelConfig, RequestError

END_OF_TURN = ("<|eot_id|>", "<|im_end|>")
"""LLaDA's and Dream's."""

ROLES = ("system", "user", "assistant", "developer")


class Tokenizer:
    """The tokenizer of one checkpoint folder. Encoding is not thread-safe; detokenizers are independent of it.

    Args:
        folder: holds ``tokenizer.json``, or Dream's ``vocab.json`` and ``merges.txt``, and, beside it, whatever
            transformers writes. Nothing is fetched.
        model: its special ids win; a contradiction is an error.
        chat_template: Jinja text that replaces the folder's.
        trust_remote_code: run the tokenizer's Python code in the folder, if there is any; otherwise none is run.

    Attributes:
        warnings: what a user should know about this folder, one line each.
        stop_ids: ids that end an answer: the model's end of text, and the end of turn if there is one.
        eot_id: the end of turn, or None.
        unused_ids: ids of the model that stand for no token.
    """

    def __init__(
        self, folder: Path, model: ModelConfig, chat_template: str | None = None, trust_remote_code: bool = False
    ):
        self._hf = _open(folder, trust_remote_code)
        if chat_template is not None:
            self._hf.chat_template = chat_template
        self._hf.backend_tokenizer.no_truncation()  # whatever tokenizer.json says: prompts are refused, never cut
        self._hf.backend_tokenizer.no_padding()
        if not _is_byte_level(json.loads(self._hf.backend_tokenizer.to_str()).get("decoder")):
            raise ConfigError(f"{folder}: tokenizer.json is not byte-level BPE, the only kind that jdllm supports")
        if self._hf.mask_token is not None and self._hf.mask_token_id != model.mask_id:
            raise ConfigError(
                f"{folder}: the tokenizer says mask id {self._hf.mask_token_id}, config.json says {model.mask_id}"
            )
        self._model = model
        added = self._hf.added_tokens_decoder
        vocab = self._hf.get_vocab()
        turns = (vocab.get(text, model.eos_id) for text in END_OF_TURN)
        self.stop_ids = (model.eos_id, *(i for i in turns if i != model.eos_id and i < model.vocab_size))
        self.unused_ids = sorted(set(range(model.vocab_size)) - set(vocab.values()))
        self.eot_id = self.stop_ids[1] if len(self.stop_ids) > 1 else None
        roles, special = set(self._hf.all_special_ids), {i for i, token in added.items() if token.special}
        self._special_text = _alternatives(str(added[i].content) for i in special | roles if i in added)
        # Dream's own code prints added tokens that have no role, such as <|vision_pad|>; so does an answer here.
        unprinted = roles | (special if _has_whole(folder) else set(self.stop_ids))
        self._pieces = _pieces(vocab, unprinted, model.vocab_size)
        self._texts = {i: piece.decode("ascii") for i, piece in enumerate(self._pieces) if piece.isascii()}
        self._longest = max(len(text.encode()) for text in vocab)
        self.warnings = self._find_warnings()

    def piece(self, token: int) -> bytes:
        """What an answer shows for one token; nothing for special ones."""
        return self._pieces[token] if 0 <= token < len(self._pieces) else b""

    @property
    def chat_template(self) -> str | None:
        """Jinja text, or None: then chats cannot be rendered. Of several named ones, ``default``."""
        given = self._hf.chat_template
        return given.get("default") if isinstance(given, dict) else given

    def token(self, name: str) -> str | None:
        """The text of ``eos_token``, ``bos_token`` and so on."""
        return getattr(self._hf, name, None)

    def fewest(self, *texts: str) -> int:
        """A lower bound of the texts' tokens, without the work of encoding them: to refuse what is far too long."""
        # Normalisation may shorten a text; a factor of four is beyond what it does.
        return sum(map(len, texts)) // (4 * self._longest)

    def encode(self, text: str, field: str = "prompt", *, begins: bool = True) -> list[int]:
        """Raw text to ids; ``begins``: with whatever the tokenizer puts around a text."""
        return self._encode(_encodable(text, field), begins)

    def encode_chat(self, messages: Any, field: str = "messages") -> list[int]:
        """Messages in OpenAI's form to ids, ready for the assistant's answer.

        Raises:
            RequestError: a message is malformed, or the template cannot render the chat; names the message.
        """
        return self.encode_checked(check_messages(messages, field), field)

    def encode_checked(self, chat: Sequence[Mapping[str, str]], field: str = "messages") -> list[int]:
        """``encode_chat`` for what ``check_messages`` has returned."""
        if self.chat_template is None:
            raise RequestError(
                field,
                "this model's tokenizer has no chat template; use completions, or start with --chat-template FILE",
            )
        marked = any(self._special_text.search(m["content"]) for m in chat)
        key = secrets.token_hex(8) if marked else ""
        hidden: list[str] = []

        def hide(match: re.Match[str]) -> str:
            hidden.append(match[0])
            return f"\x02{key}:{len(hidden) - 1}\x03"

        masked = [dict(m) for m in chat]
        for message in masked if marked else ():
            message["content"] = self._special_text.sub(hide, message["content"])
        text = self._render(masked, field)
        end = 0
        for at, message in enumerate(masked):
            content = message["content"].strip()
            # Most templates keep the order, so looking on from the last place makes it one pass over the text.
            found = text.find(content, end)
            if found < 0:
                found = text.find(content)
            if found >= 0:
                end = found + len(content)
            elif message["role"] != "assistant":
                raise RequestError(
                    f"{field}[{at}]", f"the model's chat template drops the text of role {message['role']!r}"
                )
        if not hidden:
            return self._encode(text, begins=False)
        # Special tokens cut a text into parts that are encoded on their own, so doing it by hand changes no other id.
        ids: list[int] = []
        for i, part in enumerate(re.split(f"({self._special_text.pattern})", text)):
            if i % 2:
                ids.append(self._hf.convert_tokens_to_ids(part))
            elif part:
                plain = re.sub(f"\x02{key}:(\\d+)\x03", lambda m: hidden[int(m[1])], part)
                ids += self._hf.encode(plain, add_special_tokens=False, split_special_tokens=True)
        return ids

    def _encode(self, text: str, begins: bool) -> list[int]:
        """As ``self._hf.encode`` does, without its half a millisecond around it, and without the places in the text."""
        backend = self._hf.backend_tokenizer
        backend.encode_special_tokens = False
        return backend.encode_batch_fast([text], add_special_tokens=begins)[0].ids

    def detokenizer(self) -> "Detokenizer":
        """A reader for one answer."""
        return Detokenizer(self._pieces, self._texts)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of a whole answer: special tokens skipped, nothing cleaned up."""
        reader = self.detokenizer()
        return "".join(reader.feed(list(ids))) + reader.close()

    def _render(self, messages: list[dict[str, str]], field: str) -> str:
        try:
            return self._template(messages)
        except TemplateError as error:
            raise RequestError(field, f"the model's chat template refuses this chat: {error}") from None

    @functools.cached_property
    def _template(self) -> Callable[[list[dict[str, str]]], str]:
        """What ``apply_chat_template`` comes to for messages that have a role and a text, without its work for tools,
        images and whole batches, which takes as long as the template."""
        from transformers import PreTrainedTokenizerBase

        whole = functools.partial(self._hf.apply_chat_template, tokenize=False, add_generation_prompt=True)
        library = [getattr(PreTrainedTokenizerBase, name) for name in ("apply_chat_template", "get_chat_template")]
        if [getattr(type(self._hf), method.__name__) for method in library] != library:  # a checkpoint's code
            return whole
        try:
            from transformers.utils.chat_template_utils import _compile_jinja_template

            template = _compile_jinja_template(self.chat_template)
        except ImportError:  # the name is not a public one
            return whole
        given = {**self._hf.special_tokens_map, "add_generation_prompt": True, "tools": None, "documents": None}
        return lambda messages: template.render(given, messages=messages)

    def _find_warnings(self) -> list[str]:
        if self.chat_template is None:
            return ["the tokenizer has no chat template: chat requests are refused (see --chat-template)"]
        try:
            self._template  # noqa: B018 (it is made here)
        except TemplateError as error:
            return [f"the chat template is not valid: {error}; chat requests are refused (see --chat-template)"]
        vocab = self._hf.get_vocab()
        split = [m for m in sorted(set(re.findall(r"<\|\w+\|>", self.chat_template))) if m not in vocab]
        if split:
            return [f"the chat template writes {' '.join(split)}, which this tokenizer does not know as single tokens"]
        return []


class Detokenizer:
    """Ids of one answer to text, left to right. A character that is split over ids comes out once, when it is whole;
    what was fed, put together, equals the decoding of all ids at once."""

    def __init__(self, pieces: Sequence[bytes], texts: Mapping[int, str]):
        self._pieces, self._texts = pieces, texts
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._open = False  # in the middle of a character

    def feed(self, ids: Sequence[int]) -> list[str]:
        """The text that each id settles; empty for special ids, unknown ids and the middle of a character."""
        if not self._open:
            with contextlib.suppress(KeyError):  # nearly always all are ASCII, each a text of its own
                return [self._texts[token] for token in ids]
        return [self._one(token) for token in ids]

    def _one(self, token: int) -> str:
        text = self._utf8.decode(self._pieces[token] if 0 <= token < len(self._pieces) else b"")
        self._open = bool(self._utf8.getstate()[0])
        return text

    def close(self) -> str:
        """A U+FFFD if the answer ended in the middle of a character, as decoding the whole would give; else nothing."""
        return self._utf8.decode(b"", final=True)


def check_prompt(ids: Any, model: ModelConfig, field: str) -> list[int]:
    """The ids of a prompt, if they are ids of this model.

    Raises:
        RequestError: they are not, or there is none.
    """
    if not isinstance(ids, list) or {*map(type, ids)} - {int}:  # a bool is none
        raise RequestError(field, "must be a list of token ids")
    if not ids:
        raise RequestError(field, "is empty: there must be at least one token")
    if min(ids) < 0 or max(ids) >= model.vocab_size:
        wrong = next(i for i in ids if not 0 <= i < model.vocab_size)
        raise RequestError(field, f"{wrong} is not a token id from 0 to {model.vocab_size - 1}")
    return ids


def load(
    folder: Path, model: ModelConfig, chat_template: str | None = None, trust_remote_code: bool = False
) -> Tokenizer | None:
    """The folder's tokenizer, or None where it has none that may be used."""
    parts = model.family == "dream" and all((folder / name).is_file() for name in ("vocab.json", "merges.txt"))
    code = trust_remote_code and bool(tokenizer_code(folder))
    found = parts or code or _has_whole(folder)
    return Tokenizer(folder, model, chat_template, trust_remote_code) if found else None


def tokenizer_code(folder: Path) -> list[str]:
    """Names of the folder's Python files in which its tokenizer is written, as ``auto_map`` tells."""
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        classes = (config.get("auto_map") or {}).get("AutoTokenizer") or []
    except (OSError, ValueError, AttributeError):
        return []
    named = [classes] if isinstance(classes, str) else [name for name in classes if isinstance(name, str)]
    files = [f"{name.partition('.')[0]}.py" for name in named if "--" not in name]  # "--": in another repository
    return [name for name in dict.fromkeys(files) if (folder / name).is_file()]


def check_messages(messages: Any, field: str = "messages") -> list[dict[str, str]]:
    """Messages as plain ``{"role", "content"}`` with text contents; ``developer`` becomes ``system``."""
    if not isinstance(messages, list) or not messages:
        raise RequestError(field, "must be a list of at least one message")
    chat = []
    for i, message in enumerate(messages):
        where = f"{field}[{i}]"
        if not isinstance(message, Mapping):
            raise RequestError(where, "must be an object with role and content")
        role = message.get("role")
        if role not in ROLES:
            raise RequestError(f"{where}.role", f"{role!r} is not supported; use one of {', '.join(ROLES)}")
        content = _encodable(_content(message.get("content"), f"{where}.content"), f"{where}.content")
        chat.append({"role": "system" if role == "developer" else str(role), "content": content})
    if chat[-1]["role"] == "assistant":
        raise RequestError(f"{field}[{len(chat) - 1}].role", "the last message must not be the assistant's")
    return chat


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(where, "must be a string or a list of text parts")
    texts = []
    for i, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RequestError(f"{where}[{i}]", 'only parts of the form {"type": "text", "text": ...} are supported')
        texts.append(part["text"])
    return "".join(texts)


def _encodable(text: str, field: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError(field, "has half of a surrogate pair, which is not a character") from None
    return text


def _has_whole(folder: Path) -> bool:
    """The tokenizer in one file, as fast tokenizers are saved. Dream's is written in Python, and has none."""
    return (folder / "tokenizer.json").is_file()


def _open(folder: Path, trust_remote_code: bool) -> Any:
    # Slow to import, and not needed by those who work with ids alone.
    import transformers

    if trust_remote_code and tokenizer_code(folder):
        found = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=True)
        if not found.is_fast:
            raise ConfigError(f"{folder}: {type(found).__name__} is written in Python alone; it needs a tokenizer.json")
        return found
    kind = transformers.PreTrainedTokenizerFast
    if not _has_whole(folder):
        # Dream's code is Qwen2's tokenizer under another name. (transformers 5 makes the class an alias at run time.)
        kind = transformers.Qwen2TokenizerFast  # type: ignore[attr-defined]
    return kind.from_pretrained(str(folder), local_files_only=True)


def _is_byte_level(decoder: Mapping[str, Any] | None) -> bool:
    if decoder is None:
        return False
    if decoder["type"] == "Sequence":
        return len(decoder["decoders"]) == 1 and _is_byte_level(decoder["decoders"][0])
    return decoder["type"] == "ByteLevel"


def _alternatives(texts: Iterable[str]) -> re.Pattern[str]:
    """Matches any of the texts, the longest first; nothing at all if there is none."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")


def _pieces(vocab: Mapping[str, int], skipped: set[int], size: int) -> list[bytes]:
    """The bytes that each id stands for; none for special ids and ids without an entry."""
    # GPT-2's alphabet: printable bytes stand for themselves, the others for the characters from 256 on.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in set(printable)]
    alphabet = {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(rest)}
    pieces = [b""] * max(size, max(vocab.values(), default=-1) + 1)
    for token, i in vocab.items():
        if i not in skipped:
            known = all(c in alphabet for c in token)
            pieces[i] = bytes(alphabet[c] for c in token) if known else token.encode()
    return pieces
