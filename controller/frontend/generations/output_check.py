"""Validation of a worker's logprobs and counts before any of them reaches an answer. Token ids: `text.vocabulary`.

A logprob that is no number or above 0, and a count of cached tokens that the prompt does not have are the worker's fault.
"""

from collections.abc import Sequence
from math import isfinite

from controller.frontend.text.vocabulary import InvalidOutput
from events.wire import Logprob

LOGPROB_MAX = 0.01  # engines round: the logarithm of a probability is 0 at most
TOP_MAX = 256  # alternatives of one position


def check_cached(cached_tokens: int, prompt_tokens: int) -> None:
    """Check how many tokens of a prompt a worker says it had cached. Raise InvalidOutput."""
    if not 0 <= cached_tokens <= prompt_tokens:
        raise InvalidOutput("a count of cached tokens that its prompt does not have")


def check_logprobs(logprobs: Sequence[Logprob], vocabulary: int) -> None:
    """Check the logprobs of a chunk. `vocabulary`: token ids are below it. Raise InvalidOutput."""
    for one in logprobs:
        if not (isfinite(one.chosen) and one.chosen <= LOGPROB_MAX) or len(one.top) > TOP_MAX:
            raise InvalidOutput("a logprob that is no number, or above 0")
        for token, logprob in one.top:
            if not 0 <= token < vocabulary:
                raise InvalidOutput("an alternative outside the vocabulary")
            if logprob != logprob or logprob > LOGPROB_MAX:  # -inf: it cannot be drawn
                raise InvalidOutput("a logprob that is no number, or above 0")
