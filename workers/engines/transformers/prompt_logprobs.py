"""Collects the logprobs of a prompt's tokens from the steps that compute it.

A prompt may be read in pieces; a preempted prompt is read again from its beginning. The logits of thousands of rows take more
memory than the model, so they are computed a few rows at a time.
"""

import math
from collections.abc import Callable
from collections.abc import Sequence as Sequential

from torch import Tensor

from events.wire import Logprob
from workers.engines.transformers.sampling import logprobs_of
from workers.engines.transformers.sequence import SequenceWork

ROWS = 128  # of a vocabulary of 150,000: 77 MB


def read_prompts(works: Sequential[SequenceWork], logits: Callable[[list[int]], Tensor]) -> None:
    """Add the prompt logprobs that this step predicts to each sequence that asks for them.

    `logits` returns the logits of some rows of the step; each token has one row, in the order of the works.
    """
    row = 0
    for work in works:
        sequence = work.sequence
        if sequence.asks_of_prompt:
            if work.start == 0:
                sequence.before = [Logprob(0.0)]
            last = min(
                work.start + work.count, sequence.submitted - 1
            )  # the last row predicts the token after it
            for first in range(work.start, last, ROWS):
                places = range(first, min(first + ROWS, last))
                values = logits([row + place - work.start for place in places])
                tokens = [sequence.tokens[place + 1] for place in places]
                sequence.before += logprobs_of(values, tokens, sequence.sampling.prompt_logprobs or 0)
        row += work.count


def unsound(found: Sequential[Logprob]) -> bool:
    """Return whether one of these is not a finite number."""
    return not all(math.isfinite(one.chosen) for one in found)
