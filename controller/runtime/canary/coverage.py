"""Canaries that cover more of a model: each question is prefixed with a slice of the vocabulary.

A fault in one row of the embeddings is visible only to requests that use that row. Four questions of thirty-two tokens touch a
few hundred rows; users touch them all. With slices of 512 tokens, four questions read 2,048 rows. That is all of a small
vocabulary, and the most used part of a large one, since byte-pair tokenizers number tokens by how often they merged.
Measured in `docs/concepts/silent-corruption.md`.

Questions are still ranked by margin, but within their slice, so that the best-ranked questions cover every slice.
"""

import random
from collections.abc import Sequence
from dataclasses import replace

from controller.runtime.canary.goldens import Canary

SLICES = 4
SLICE_TOKENS = 512
FIRST_ID = 3  # most vocabularies have their special tokens before it


def covering(pool: Sequence[Canary], vocabulary: int) -> tuple[Canary, ...]:
    """Return the pool with a slice of the vocabulary before each prompt: the n-th canary gets slice n modulo SLICES.

    The text, for engines that accept no token ids, is not changed. Do not pass a configured canary: its answer belongs to its
    exact prompt.
    """
    rows = list(range(FIRST_ID, min(vocabulary, FIRST_ID + SLICES * SLICE_TOKENS)))
    random.Random(len(rows)).shuffle(rows)
    return tuple(
        replace(canary, prompt=(*rows[number % SLICES :: SLICES], *canary.prompt))
        for number, canary in enumerate(pool)
    )


def dealt(order: Sequence[str], pool: Sequence[Canary]) -> tuple[str, ...]:
    """Return the ids of `order` (best first), reordered: the best of each slice, then the second best of each, and so on."""
    slice_of = {canary.id: number % SLICES for number, canary in enumerate(pool)}
    taken = [0] * SLICES
    places = {}
    for place, id in enumerate(order):
        places[id] = (taken[slice_of[id]], place)
        taken[slice_of[id]] += 1
    return tuple(sorted(order, key=places.__getitem__))
