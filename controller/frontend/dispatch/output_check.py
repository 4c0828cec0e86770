"""Validates a worker's logprobs before they are added to an answer.

A logprob that is not a number or is above 0 counts as the worker's fault. Token ids are validated in `openai.text.detokenizer`.
"""

from collections.abc import Sequence
from math import isfinite

from controller.frontend.openai.text.detokenizer import InvalidOutput
from events.wire import Logprob

LOGPROB_MAX = 0.01  # tolerance for rounding in engines: a log probability is at most 0
TOP_MAX = 256  # alternatives per position


def check_logprobs(logprobs: Sequence[Logprob], vocabulary: int) -> None:
    """Validate the logprobs of a chunk. Token ids must be below `vocabulary`. Raise InvalidOutput."""
    for one in logprobs:
        if not (isfinite(one.chosen) and one.chosen <= LOGPROB_MAX) or len(one.top) > TOP_MAX:
            raise InvalidOutput("a logprob that is not a number, or above 0")
        for token, logprob in one.top:
            if not 0 <= token < vocabulary:
                raise InvalidOutput("an alternative outside the vocabulary")
            if logprob != logprob or logprob > LOGPROB_MAX:  # -inf means that the token cannot be drawn
                raise InvalidOutput("a logprob that is not a number, or above 0")
