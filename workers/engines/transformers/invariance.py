"""Checks that a row's result is the same alone, in a batch, and in a replay, on this machine.

The engine's exactness depends on how the installed libraries add: see attention.py. They may add differently on another
processor, so exactness is checked at start on the model itself, bit by bit. The check compares the logits of a prompt read at
once with those of the same prompt read in uneven pieces, with other sequences in the batch. It takes a few steps and covers
every matrix of the model.
"""

import random
from collections.abc import Callable

import torch

from events.wire import Sampling
from workers.engines.transformers.attention import Pool
from workers.engines.transformers.blocks import Blocks
from workers.engines.transformers.model import TILES, Model
from workers.engines.transformers.sequence import SequenceWork, TorchSequence

_PROMPT = 80
_PIECES = [37, 1, 1, 2, 16, 1, 21, 1]  # adds up to _PROMPT: single tokens, odd pieces, and a long one
_OTHERS = 3
_ROUNDS = 6  # prompts: rounding to 16 bits hides most differences, so one prompt often shows none

# sets the model's tile, and returns whether it is exact with it
Check = Callable[[Model, Pool, Blocks], bool]


def make_exact(model: Model, pool: Pool, blocks: Blocks) -> bool:
    """Set the smallest tile of rows with which the model is exact here; False if there is none."""
    for model.tile in TILES:
        if is_exact(model, pool, blocks):
            return True
    model.tile = TILES[0]
    return False


def is_exact(model: Model, pool: Pool, blocks: Blocks) -> bool:
    """Return whether the logits of some prompts are bit-identical however they are read. Restores the pool."""
    return all(_reads_alike(model, pool, blocks, random.Random(seed)) for seed in range(_ROUNDS))


def _reads_alike(model: Model, pool: Pool, blocks: Blocks, draw: random.Random) -> bool:
    length = min(
        _PROMPT, model.context_tokens - 2, (blocks.count * blocks.tokens) // (_OTHERS + 2) - blocks.tokens
    )
    if length < _PROMPT:
        return False  # only an engine in tests is this small
    reader = _Reader(model, pool, blocks)
    tokens = [draw.randrange(model.vocabulary) for _ in range(length)]
    whole, pieces = _sequence(tokens), _sequence(tokens)
    others = [
        _sequence([draw.randrange(model.vocabulary) for _ in range(9 + 11 * n)]) for n in range(_OTHERS)
    ]
    try:
        expected = reader.read([(whole, length)])[whole]
        reader.read([(other, 8) for other in others])
        for part in torch.split(expected, _PIECES):
            company = [(other, 1) for other in others if other.uncached]
            if not torch.equal(part, reader.read([(pieces, len(part)), *company])[pieces]):
                return False
        return True
    finally:
        for sequence in (whole, pieces, *others):
            blocks.give_back(sequence.blocks)


class _Reader:
    def __init__(self, model: Model, pool: Pool, blocks: Blocks) -> None:
        self._model, self._pool, self._blocks = model, pool, blocks

    def read(self, parts: list[tuple[TorchSequence, int]]) -> dict[TorchSequence, torch.Tensor]:
        """Read `count` tokens of each sequence in one step; return their logits."""
        works = []
        for sequence, count in parts:
            while len(sequence.blocks) < self._blocks.needed(sequence.cached + count):
                sequence.blocks.append(self._blocks.take())
                self._pool.clear(sequence.blocks[-1:])
            works.append(SequenceWork(sequence, sequence.cached, count))
        works.sort(key=lambda work: work.count > 1)
        logits = self._model.forward(works, self._pool, every=True)
        for work in works:
            work.sequence.cached += work.count
        read = torch.split(logits, [work.count for work in works])
        return {work.sequence: rows for work, rows in zip(works, read, strict=True)}


def _sequence(tokens: list[int]) -> TorchSequence:
    return TorchSequence(0, tokens, len(tokens), Sampling(max_tokens=1), 0)
