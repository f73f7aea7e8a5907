"""The text of one answer as its tokens become final: incremental, and never past a stop string."""

import bisect
import itertools
from collections.abc import Sequence

from jdllm.tokenizer import Detokenizer

Alternative = tuple[int, float]
"""A token's id and its log-probability."""


class StopStrings:
    """Finds the stop string that is complete first in a text that comes in pieces; holds back what may begin one."""

    def __init__(self, stops: Sequence[str]):
        self._stops = [s for s in stops if s]
        self._held = ""

    def __bool__(self) -> bool:
        return bool(self._stops)

    def feed(self, text: str) -> tuple[str, bool]:
        """The text that is safe to show, and whether a stop string came (it and what follows are dropped)."""
        text = self._held + text
        # By where it ends, as when every character came alone: the pieces' borders decide nothing.
        found = [(at + len(s), at) for s in self._stops if (at := text.find(s)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)[1]], True
        keep = max((_overlap(text, s) for s in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def close(self) -> str:
        """What was held back, now that nothing follows."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of the text that is a proper prefix of the stop string."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0


class Answer:
    """Text of one row. One thread extends it, another may read ``parts`` at any time (they only ever grow).

    Attributes:
        parts: settled pieces of text.
        stopped: a stop string was met; the text ended before it.
        ids: every token that was given.
        logprobs, alternatives: of each of them, where ``extend`` was told: its log-probability, and the most probable
            tokens at its place with theirs.
    """

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str] = ()):
        self.parts: list[str] = []
        self.stopped = False
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.alternatives: list[Sequence[Alternative]] = []
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops)
        self._ends: list[int] = []  # characters of the text after each token, to know which tokens a cut keeps
        self._shown = 0

    def extend(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float] = (),
        alternatives: Sequence[Sequence[Alternative]] = (),
    ) -> None:
        """Tokens that are final, in order. Those after a stop string are ignored."""
        self.ids.extend(ids)
        self.logprobs.extend(logprobs)
        self.alternatives.extend(alternatives)
        texts = self._detokenizer.feed(ids)
        ends = itertools.accumulate(map(len, texts), initial=self._ends[-1] if self._ends else 0)
        self._ends.extend(itertools.islice(ends, 1, None))
        self._add("".join(texts))

    def close(self) -> None:
        """No more tokens follow."""
        if not self.stopped:
            self._add(self._detokenizer.close())
        if not self.stopped:
            self._append(self._stops.close())

    @property
    def may_stop(self) -> bool:
        """There are stop strings, so that it must be extended as its tokens come."""
        return bool(self._stops)

    @property
    def text(self) -> str:
        """All settled text."""
        return "".join(self.parts)

    @property
    def tokens(self) -> int:
        """Tokens behind the answer: all that were given, or, after a stop string, those its text is made of."""
        if not self.stopped:
            return len(self._ends)
        return bisect.bisect_left(self._ends, self._shown) + 1 if self._shown else 0

    def tokens_within(self, characters: int) -> int:
        """How many tokens lie whole in the first ``characters`` of the text."""
        return min(bisect.bisect_right(self._ends, characters), self.tokens)

    def offset(self, token: int) -> int:
        """Characters of the text before a token."""
        return self._ends[token - 1] if token else 0

    def _add(self, text: str) -> None:
        if not self.stopped:
            safe, self.stopped = self._stops.feed(text)
            self._append(safe)

    def _append(self, text: str) -> None:
        if text:
            self._shown += len(text)
            self.parts.append(text)
