"""Prompts for requests that are known by lengths and hash ids only: equal ids are equal tokens."""

from random import Random
from typing import cast

import numpy as np

from controller.trace.rows import TraceRow


def tokens(row: TraceRow, block_tokens: int, vocabulary: range) -> list[int]:
    """Return a prompt of a request that has hash ids: for each of them its block of tokens, the last one cut to the length."""
    prompt: list[int] = []
    for name in row.hash_ids:
        prompt += block(name, block_tokens, vocabulary)
    return prompt[: row.input_length]


def block(name: int | str, length: int, vocabulary: range) -> list[int]:
    """Return the tokens of the block of this name: the same ones each time, drawn from consecutive ids."""
    drawn = np.frombuffer(Random(name).randbytes(4 * length), "<u4")  # four times as fast as `choices`
    return cast(list[int], (drawn % len(vocabulary) + vocabulary.start).tolist())
