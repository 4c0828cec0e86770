"""Samples the next token of every due sequence from one step's logits.

Random numbers are keyed by (seed, position); the position is the token's index in the whole sequence, prompt included. So a
sampled answer continues exactly after a migration, and does not depend on the rest of the batch. A generator with state would
lose its state in a migration (vLLM's does).

Biases come before penalties and the temperature, `min_p` after it and before `top_p`: as in vLLM. Presence and frequency
penalties count generated tokens, repetition counts the prompt too. Logprobs are those of the raw logits, before all of that, so
that they describe the model alone.
"""

import math
import struct
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Sequential
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

from events.wire import Logprob
from workers.engines.transformers.sequence import SequenceWork, TorchSequence

PROMPT_ROWS = 128  # computed at once; of a vocabulary of 150,000: 77 MB
GREEDY_BELOW = 1e-5  # a lower temperature is greedy: dividing by it would overflow


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The next token; None if its logits were not finite."""

    token: int | None
    logprob: Logprob | None = None


def choose(logits: Tensor, due: Sequential[TorchSequence]) -> list[SampledToken]:
    """Choose one token per row of `logits` (rows by vocabulary, float32)."""
    finite = torch.isfinite(logits).all(dim=-1).tolist()
    greedy = logits.argmax(dim=-1).tolist()
    tokens = [
        (best if plain(one) else _adjusted(row, one)) if sound else None
        for sound, best, row, one in zip(finite, greedy, logits, due, strict=True)
    ]
    logprobs = _logprobs(logits, due, tokens)
    return [SampledToken(token, logprob) for token, logprob in zip(tokens, logprobs, strict=True)]


def plain(one: TorchSequence) -> bool:
    """Return whether the largest logit is the answer."""
    s = one.sampling
    penalised = s.presence_penalty or s.frequency_penalty or s.repetition_penalty != 1.0
    adjusted = penalised or s.logit_bias
    return s.temperature < GREEDY_BELOW and not adjusted and one.generated >= s.min_tokens


def uniform(seed: int, position: int) -> float:
    """Return the random number in [0, 1) for this seed and position."""
    return (xxhash.xxh3_64_intdigest(struct.pack("<Qq", seed % 2**64, position)) >> 11) * 2.0**-53


def _adjusted(row: Tensor, one: TorchSequence) -> int:
    scores = row.to("cpu", torch.float64, copy=True)
    if bias := one.sampling.logit_bias:
        scores[list(bias)] += torch.tensor(list(bias.values()), dtype=torch.float64)
    _penalise(scores, one)
    if one.generated < one.sampling.min_tokens and one.barred:
        scores[list(one.barred)] = -torch.inf
    if one.sampling.temperature < GREEDY_BELOW:
        return int(scores.argmax())
    return _draw(scores, one)


def _penalise(scores: Tensor, one: TorchSequence) -> None:
    s = one.sampling
    if s.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(one.tokens)))
        values = scores[seen]
        scores[seen] = torch.where(values > 0, values / s.repetition_penalty, values * s.repetition_penalty)
    if s.presence_penalty or s.frequency_penalty:
        counts = Counter(one.tokens[one.prompt_tokens :])
        if counts:
            ids = torch.tensor(list(counts))
            times = torch.tensor(list(counts.values()), dtype=torch.float64)
            scores[ids] -= s.presence_penalty + s.frequency_penalty * times


def _draw(scores: Tensor, one: TorchSequence) -> int:
    s = one.sampling
    values, ids = scores.sort(descending=True, stable=True)
    if 0 < s.top_k < len(values):
        values, ids = values[: s.top_k], ids[: s.top_k]
    if s.min_p > 0:  # tokens with at least this share of the best one's probability
        near = int((values / s.temperature >= values[0] / s.temperature + math.log(s.min_p)).sum())
        values = values[: max(1, near)]
    cumulated = (values / s.temperature).softmax(dim=0).cumsum(dim=0)
    kept = len(cumulated)
    if s.top_p < 1.0:  # the smallest set with a total probability of at least top_p
        kept = min(kept, int((cumulated < s.top_p).sum()) + 1)
    target = uniform(one.seed, len(one.tokens)) * float(cumulated[kept - 1])
    drawn = int(torch.searchsorted(cumulated[:kept], target, right=True))
    return int(ids[min(drawn, kept - 1)])


def _logprobs(
    logits: Tensor, due: Sequential[TorchSequence], tokens: Sequential[int | None]
) -> list[Logprob | None]:
    found: list[Logprob | None] = [None] * len(due)
    rows = [i for i, one in enumerate(due) if one.sampling.logprobs > 0 and tokens[i] is not None]
    if not rows:
        return found
    widest = max(due[i].sampling.logprobs for i in rows)
    for i, one in zip(rows, logprobs_of(logits[rows], [tokens[i] or 0 for i in rows], widest), strict=True):
        found[i] = Logprob(one.chosen, one.top[: due[i].sampling.logprobs])
    return found


def logprobs_of(logits: Tensor, tokens: Sequential[int], top: int) -> list[Logprob]:
    """Return the logprob of one token for each row of raw logits, with the row's best `top`."""
    values = logits.float().log_softmax(dim=-1)
    best = values.topk(min(top, values.shape[-1]), dim=-1)
    places = torch.tensor(tokens, device=values.device).unsqueeze(1)
    rows = zip(
        values.gather(1, places).squeeze(1).tolist(), best.indices.tolist(), best.values.tolist(), strict=True
    )
    return [Logprob(chosen, list(zip(ids, numbers, strict=True))) for chosen, ids, numbers in rows]


def read_prompts(works: Sequential[SequenceWork], logits: Callable[[list[int]], Tensor]) -> None:
    """Add the prompt logprobs that this step predicts to each sequence that asks for them.

    A prompt may be read in pieces; a preempted prompt is read again from its beginning. The logits of thousands of rows take
    more memory than the model, so they are computed a few rows at a time.

    `logits` returns the logits of some rows of the step; each token has one row, in the order of the works.
    """
    row = 0
    for work in works:
        sequence = work.sequence
        if sequence.asks_of_prompt:
            if work.start == 0:
                sequence.before = [Logprob(0.0)]
            # the last row predicts the token after it
            last = min(work.start + work.count, sequence.submitted - 1)
            for first in range(work.start, last, PROMPT_ROWS):
                places = range(first, min(first + PROMPT_ROWS, last))
                values = logits([row + place - work.start for place in places])
                tokens = [sequence.tokens[place + 1] for place in places]
                sequence.before += logprobs_of(values, tokens, sequence.sampling.prompt_logprobs or 0)
        row += work.count


def unsound(found: Sequential[Logprob]) -> bool:
    """Return whether one of these is not a finite number."""
    return not all(math.isfinite(one.chosen) for one in found)
