"""Which token ids a model has. A token outside its vocabulary is the worker's fault.

`GenerationOutput` checks the first tokens of an attempt; writers check all others, because the one that writes most tokens looks
them up in a table of the vocabulary anyway.
"""

from collections.abc import Sequence

from events.errors import HoldfastError


class InvalidOutput(HoldfastError):
    """A worker's output cannot be its model's. The text says what of it."""


def check_tokens(tokens: Sequence[int], vocabulary: int) -> None:
    """Check that token ids are below `vocabulary`, and none is negative. Raise InvalidOutput."""
    if len(tokens) == 1 and 0 <= tokens[0] < vocabulary:
        return  # the least and the greatest of one take four times as long
    if tokens and not (min(tokens) >= 0 and max(tokens) < vocabulary):
        raise InvalidOutput("a token outside the vocabulary")
