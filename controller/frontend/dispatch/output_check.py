"""Validation of a worker's logprobs before any of them reaches an answer. Token ids: `openai.text.detokenizer`.

A logprob that is no number or above 0 is the worker's fault.
"""

from collections.abc import Sequence
from math import isfinite

from controller.frontend.openai.text.detokenizer import InvalidOutput
from events.wire import Logprob

LOGPROB_MAX = 0.01  # engines round: the logarithm of a probability is 0 at most
TOP_MAX = 256  # alternatives of one position


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
