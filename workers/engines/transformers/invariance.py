"""Is a row's answer the same alone, in a batch, and in a replay, on this very machine?

The engine's claim of exactness rests on how the installed libraries add: see attention.py. They may do it otherwise on
another processor, so the claim is checked at start on the model itself, bit by bit: the logits of every token of a prompt
that is read at once, and of the same prompt read in uneven pieces with strangers in the batch. It takes a few steps, and
covers every matrix of the model.
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
_STRANGERS = 3
_ROUNDS = 6  # prompts: rounding to 16 bits hides most differences, so that one prompt often shows none

Check = Callable[[Model, Pool, Blocks], bool]  # gives the model a tile, and says whether it is exact with it


def make_exact(model: Model, pool: Pool, blocks: Blocks) -> bool:
    """Give the model the smallest tile of rows with which it is exact here; False if there is none."""
    for model.tile in TILES:
        if is_exact(model, pool, blocks):
            return True
    model.tile = TILES[0]
    return False


def is_exact(model: Model, pool: Pool, blocks: Blocks) -> bool:
    """Return whether the logits of some prompts are bit-identical however they are read. Leaves the pool as it was."""
    return all(_reads_alike(model, pool, blocks, random.Random(seed)) for seed in range(_ROUNDS))


def _reads_alike(model: Model, pool: Pool, blocks: Blocks, draw: random.Random) -> bool:
    length = min(
        _PROMPT, model.context_tokens - 2, (blocks.count * blocks.tokens) // (_STRANGERS + 2) - blocks.tokens
    )
    if length < _PROMPT:
        return False  # an engine this small is a test's; it may say so
    reader = _Reader(model, pool, blocks)
    tokens = [draw.randrange(model.vocabulary) for _ in range(length)]
    whole, pieces = _sequence(tokens), _sequence(tokens)
    strangers = [
        _sequence([draw.randrange(model.vocabulary) for _ in range(9 + 11 * n)]) for n in range(_STRANGERS)
    ]
    try:
        expected = reader.read([(whole, length)])[whole]
        reader.read([(stranger, 8) for stranger in strangers])
        for part in torch.split(expected, _PIECES):
            company = [(stranger, 1) for stranger in strangers if stranger.uncached]
            if not torch.equal(part, reader.read([(pieces, len(part)), *company])[pieces]):
                return False
        return True
    finally:
        for sequence in (whole, pieces, *strangers):
            blocks.give_back(sequence.blocks)


class _Reader:
    def __init__(self, model: Model, pool: Pool, blocks: Blocks) -> None:
        self._model, self._pool, self._blocks = model, pool, blocks

    def read(self, parts: list[tuple[TorchSequence, int]]) -> dict[TorchSequence, torch.Tensor]:
        """Read so many tokens of each sequence in one step; return their logits."""
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
