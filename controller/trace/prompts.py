"""Generates prompts from lengths and hash ids: equal ids give equal tokens."""

from random import Random
from typing import cast

import numpy as np

from controller.trace.rows import TraceRow


def tokens(row: TraceRow, block_tokens: int, vocabulary: range) -> list[int]:
    """Return the prompt of a request with hash ids: one block of tokens per id, cut to the prompt's length."""
    prompt: list[int] = []
    for name in row.hash_ids:
        prompt += block(name, block_tokens, vocabulary)
    return prompt[: row.input_length]


def block(name: int | str, length: int, vocabulary: range) -> list[int]:
    """Return the tokens of the block with this name. The same name always gives the same tokens."""
    drawn = np.frombuffer(Random(name).randbytes(4 * length), "<u4")  # four times as fast as `choices`
    return cast(list[int], (drawn % len(vocabulary) + vocabulary.start).tolist())
