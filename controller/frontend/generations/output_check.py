"""Validation of a worker's output before any of it reaches an answer: token ids, logprobs and counts.

A token outside the vocabulary, a logprob that is no number or above 0, and a count of cached tokens that the prompt does not have
are the worker's fault. Called for each chunk: the usual one, of one token without logprobs, costs a few comparisons.
"""

from collections.abc import Sequence
from math import isfinite

from events.wire import Chunk, Logprob

LOGPROB_MAX = 0.01  # engines round: the logarithm of a probability is 0 at most
OUTSIDE = "a token outside the vocabulary"
TOP_MAX = 256  # alternatives of one position


def invalid(chunk: Chunk, vocabulary: int, prompt_tokens: int) -> str:
    """Return what is invalid in a chunk; empty if nothing is. `vocabulary`: token ids are below it."""
    tokens = chunk.tokens
    if len(tokens) == 1:
        if not 0 <= tokens[0] < vocabulary:
            return OUTSIDE
    elif tokens and not (min(tokens) >= 0 and max(tokens) < vocabulary):
        return OUTSIDE
    if chunk.logprobs and (why := _invalid_logprobs(chunk.logprobs, vocabulary)):
        return why
    if chunk.cached_tokens is not None and not 0 <= chunk.cached_tokens <= prompt_tokens:
        return "a count of cached tokens that its prompt does not have"
    return ""


def _invalid_logprobs(logprobs: Sequence[Logprob], vocabulary: int) -> str:
    for one in logprobs:
        if not (isfinite(one.chosen) and one.chosen <= LOGPROB_MAX) or len(one.top) > TOP_MAX:
            return "a logprob that is no number, or above 0"
        for token, logprob in one.top:
            if not 0 <= token < vocabulary:
                return "an alternative outside the vocabulary"
            if logprob != logprob or logprob > LOGPROB_MAX:  # -inf: it cannot be drawn
                return "a logprob that is no number, or above 0"
    return ""
