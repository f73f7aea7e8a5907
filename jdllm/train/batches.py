"""Endless training batches: tasks as token canvases of varying length with their noise.

Every batch has one of a few lengths (one compilation each) and about the same number of tokens. Batches come in rounds,
each made from its own seed, so that training resumed at a round sees what it would have seen.
"""

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np
from tokenizers import Tokenizer

from jdllm.train import objective
from jdllm.train.tasks import MAX_LINES, tasks
from jdllm.train.tokenizer import EOS, EOT, MASK, prompt_text, special_id

Batch = dict[str, np.ndarray]
"""``noisy``, ``targets``, ``blocks`` int32 [B, S] and ``weights`` float32 [B, S]: what the objective takes."""

BUCKET = 32
LONGEST = 288
TOKENS = 2048
EVEN = 2
"""A batch has a multiple of this many rows, so that two cores share them without filling up."""
ROUND = 24
PADDING_WEIGHT = 0.15
"""Loss weight of end-of-text tokens behind the first: most of a canvas, and easy."""

BLOCK_SIZES = (4, 8, 8, 8, 16, 16, 16, 16, 32, 32, 32, 64)
"""Answer blocks in training, the common sizes more often."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One canvas: prompt, answer, end of turn, end-of-text to the end."""

    tokens: np.ndarray
    prompt: int
    end: int
    probability: np.ndarray
    blocks: np.ndarray


MakeRow = Callable[[np.random.Generator, float, list[int], list[int], int], Row]
"""(rng, uniform noise level, prompt ids, answer ids with <|eot_id|>, end-of-text id) -> Row."""


def base_row(rng: np.random.Generator, level: float, prompt: list[int], answer: list[int], eos: int) -> Row:
    """A canvas for the base model, which sees everything.

    70 % of the canvases end up to 32 positions behind the answer, the others up to 128. In 60 % the noise is uniform
    (LLaDA); in the others it grows from left to right, as decoding block by block shows it to the model.
    """
    room = int(rng.integers(1, 33 if rng.random() < 0.7 else 129))
    length = min(len(prompt) + len(answer) + room, LONGEST)
    tokens, start = _canvas(prompt, answer, length, eos), len(prompt)
    if rng.random() < 0.6:
        probability = np.where(np.arange(length) < start, 0.0, level)
    else:
        probability = _ramp(rng, objective.answer_blocks(start, length, int(rng.choice(BLOCK_SIZES))))
    return Row(tokens, start, start + len(answer), probability, np.zeros(length, np.int32))


def d2f_row(rng: np.random.Generator, level: float, prompt: list[int], answer: list[int], eos: int) -> Row:
    """A canvas for the D2F adapter: whole blocks from the prompt's end, none to two more than the answer needs,
    block-causal, noise growing from block to block (``level`` is not used)."""
    size = int(rng.choice(BLOCK_SIZES))
    count = -(-(len(answer) + 1) // size) + int(rng.integers(0, 3))
    length = min(len(prompt) + count * size, LONGEST)
    blocks = objective.answer_blocks(len(prompt), length, size)
    tokens = _canvas(prompt, answer, length, eos)
    return Row(tokens, len(prompt), len(prompt) + len(answer), _ramp(rng, blocks), blocks)


def _canvas(prompt: list[int], answer: list[int], length: int, eos: int) -> np.ndarray:
    return np.array([*prompt, *answer, *[eos] * (length - len(prompt) - len(answer))], np.int32)


def _ramp(rng: np.random.Generator, blocks: np.ndarray) -> np.ndarray:
    return np.concatenate([[0.0], objective.block_noise(rng, int(blocks[-1]))])[blocks]


def rounds(tokenizer: Tokenizer, make_row: MakeRow, seed: int, first: int, warm: int) -> Iterator[list[Batch]]:
    """Lists of about ROUND batches, from round ``first`` on. The first ``warm`` rounds are drills alone."""
    eos, mask = special_id(tokenizer, EOS), special_id(tokenizer, MASK)
    index = first
    while True:
        rng = np.random.default_rng([seed, index])
        max_lines, drills = (1, 1.0) if index < warm else (MAX_LINES, 0.15)
        source = tasks("train", 1_000_000 * seed + index, max_lines, drills)
        rows: list[Row] = []
        while sum(len(row.tokens) for row in rows) < ROUND * TOKENS:
            chosen = [next(source) for _ in range(32)]
            # Noise levels are spread evenly over the rows instead of drawn one by one: less variance.
            levels = 0.05 + 0.95 * (rng.permutation(32) + rng.random(32)) / 32
            for task, level in zip(chosen, levels, strict=True):
                prompt = tokenizer.encode(prompt_text(task.message)).ids
                answer = tokenizer.encode(task.answer + EOT).ids
                rows.append(make_row(rng, level, prompt, answer, eos))
        batches = [_batch(rng, group, length, eos, mask) for length, group in _groups(rows)]
        yield [batches[i] for i in rng.permutation(len(batches))]
        index += 1


def _groups(rows: list[Row]) -> Iterator[tuple[int, list[Row]]]:
    """Rows of similar length together, as many as fit a batch of that bucket; incomplete batches are left out."""
    by_length: dict[int, list[Row]] = {}
    for row in sorted(rows, key=lambda row: len(row.tokens)):
        by_length.setdefault(-(-len(row.tokens) // BUCKET) * BUCKET, []).append(row)
    carried: list[Row] = []
    for length, group in sorted(by_length.items()):
        carried += group
        size = TOKENS // length // EVEN * EVEN
        while len(carried) >= size:
            # From the long end, so that what is left over moves up to the next bucket and is never lost before it.
            yield length, carried[-size:]
            carried = carried[:-size]


def _batch(rng: np.random.Generator, rows: list[Row], length: int, eos: int, mask: int) -> Batch:
    shape = (len(rows), length)
    targets, noisy = np.full(shape, eos, np.int32), np.full(shape, eos, np.int32)
    blocks, weights = np.full(shape, objective.UNSEEN, np.int32), np.zeros(shape, np.float32)
    for i, row in enumerate(rows):
        n = len(row.tokens)
        masked = objective.draw_mask(rng, row.probability)
        targets[i, :n] = row.tokens
        noisy[i, :n] = np.where(masked, mask, row.tokens)
        blocks[i, :n] = row.blocks
        weights[i, :n] = masked * np.where(np.arange(n) > row.end, PADDING_WEIGHT, 1.0)
    return {"noisy": noisy, "targets": targets, "blocks": blocks, "weights": weights}
