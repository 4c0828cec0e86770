"""How likely was each token of a prompt? Read from the rows of the steps in which it is computed, as they come.

A prompt may be read in pieces; one that is preempted is read anew from its beginning. Of thousands of rows the logits take more
memory than the model, so that they are made a few at a time.
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
    """Add to each sequence that asks for them the logprobs of those tokens of its prompt that this step predicts. `logits`
    returns those of some of the step's rows, of which each token has one, in the order of the works."""
    row = 0
    for work in works:
        sequence = work.sequence
        if sequence.asks_of_prompt:
            if work.start == 0:
                sequence.before = [Logprob(0.0)]
            last = min(
                work.start + work.count, sequence.submitted - 1
            )  # the token behind it is predicted by the last row
            for first in range(work.start, last, ROWS):
                places = range(first, min(first + ROWS, last))
                values = logits([row + place - work.start for place in places])
                tokens = [sequence.tokens[place + 1] for place in places]
                sequence.before += logprobs_of(values, tokens, sequence.sampling.prompt_logprobs or 0)
        row += work.count


def unsound(found: Sequential[Logprob]) -> bool:
    """Say whether one of these is no finite number."""
    return not all(math.isfinite(one.chosen) for one in found)
