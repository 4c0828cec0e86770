"""Canaries that touch more of a model: a slice of its vocabulary before each question.

A fault in the embeddings is seen only by whoever uses the row that it is in. Four questions of thirty-two tokens touch a
few hundred rows; users touch them all. So each question is put behind a slice of the vocabulary: four slices of 512
tokens read 2,048 rows, which is all of a small vocabulary and, since byte-pair tokenizers number their tokens by how
often they merged, the most used part of a large one. Measured in `docs/silent-corruption.md`.

Questions still compete by their margins, but within their slice: the first of an order cover every slice.
"""

import random
from collections.abc import Sequence
from dataclasses import replace

from controller.runtime.canary.goldens import Canary

SLICES = 4
SLICE_TOKENS = 512
FIRST_ID = 3  # before it stand the special tokens of most vocabularies


def covering(pool: Sequence[Canary], vocabulary: int) -> tuple[Canary, ...]:
    """Return the pool with a slice of the vocabulary before each prompt: the n-th canary gets slice n modulo SLICES.

    The text, for engines that take no token ids, stays what it is. A configured canary must not pass through here: its
    answer belongs to its prompt.
    """
    rows = list(range(FIRST_ID, min(vocabulary, FIRST_ID + SLICES * SLICE_TOKENS)))
    random.Random(len(rows)).shuffle(rows)
    return tuple(
        replace(canary, prompt=(*rows[number % SLICES :: SLICES], *canary.prompt))
        for number, canary in enumerate(pool)
    )


def dealt(order: Sequence[str], pool: Sequence[Canary]) -> tuple[str, ...]:
    """Return the ids of `order` (best first), rearranged so that the best of each slice come before all second best."""
    slice_of = {canary.id: number % SLICES for number, canary in enumerate(pool)}
    taken = [0] * SLICES
    places = {}
    for place, id in enumerate(order):
        places[id] = (taken[slice_of[id]], place)
        taken[slice_of[id]] += 1
    return tuple(sorted(order, key=places.__getitem__))
