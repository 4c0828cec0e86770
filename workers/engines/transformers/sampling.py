"""Samples the next token of each sequence from the logits of one step.

A random number is a hash of the request's seed and of the token's position in the whole sequence, prompt included. So a sampled
answer continues exactly after a migration, and does not depend on the rest of the batch. A random generator with a state, such
as vLLM's, would lose its state in a migration.

As in vLLM, logit biases are applied before the penalties and the temperature, and `min_p` after the temperature and before
`top_p`. Tokens that the request excludes (`allowed_token_ids`, bad words) are removed before sampling. Presence and frequency
penalties count generated tokens only. The repetition penalty counts the prompt, too. Logprobs are computed from the raw logits,
before all these steps, so that they describe the model alone.
"""

import math
import struct
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Sequential
from dataclasses import dataclass

import numpy as np
import torch
import xxhash
from torch import Tensor

from events.wire import Logprob
from workers.engines.token_limits import completing
from workers.engines.transformers.sequence import SequenceWork, TorchSequence

# prompt rows of logits that are computed at once; with a vocabulary of 150,000, they take 77 MB
PROMPT_ROWS = 128
# below this temperature sampling is greedy, because the division by the temperature would overflow
GREEDY_BELOW = 1e-5


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The next token of one sequence."""

    token: int | None  # None: the logits were not finite
    logprob: Logprob | None = None  # None: the request does not need logprobs, or the logits were not finite


def choose(logits: Tensor, due: Sequential[TorchSequence]) -> list[SampledToken]:
    """Choose the next token of each sequence in `due`.

    `logits` is [sequence, vocabulary] in float32, with one row per sequence, in the same order.
    """
    finite = torch.isfinite(logits).all(dim=-1).tolist()
    greedy = logits.argmax(dim=-1).tolist()
    tokens = [
        (best if plain(one) else _adjusted(row, one)) if sound else None
        for sound, best, row, one in zip(finite, greedy, logits, due, strict=True)
    ]
    logprobs = _logprobs(logits, due, tokens)
    return [SampledToken(token, logprob) for token, logprob in zip(tokens, logprobs, strict=True)]


def plain(one: TorchSequence) -> bool:
    """Return whether the next token of this sequence is simply the one with the largest logit."""
    s = one.sampling
    penalised = s.presence_penalty or s.frequency_penalty or s.repetition_penalty != 1.0
    limited = s.allowed_token_ids or s.bad_word_tokens
    adjusted = penalised or s.logit_bias or limited or one.follower is not None
    return s.temperature < GREEDY_BELOW and not adjusted and one.generated >= s.min_tokens


def uniform(seed: int, position: int) -> float:
    """Return the random number in [0, 1) for this seed and position."""
    return (xxhash.xxh3_64_intdigest(struct.pack("<Qq", seed % 2**64, position)) >> 11) * 2.0**-53


def _adjusted(row: Tensor, one: TorchSequence) -> int:
    scores = row.to("cpu", torch.float64, copy=True)
    if bias := one.sampling.logit_bias:
        scores[list(bias)] += torch.tensor(list(bias.values()), dtype=torch.float64)
    _penalise(scores, one)
    allowed = torch.ones(len(scores), dtype=torch.bool)
    if one.follower is not None and not one.follower.broken:
        allowed = _as_mask(one.follower.allowed(), len(scores))
    allowed = _limited(allowed, one)
    if one.generated < one.sampling.min_tokens and one.barred:
        longer = allowed.clone()
        longer[list(one.barred)] = False
        # an answer that is complete by its grammar ends before its minimum length
        allowed = longer if longer.any() else allowed
    scores[~allowed] = -torch.inf
    if one.sampling.temperature < GREEDY_BELOW:
        return int(scores.argmax())
    return _draw(scores, one)


def _limited(allowed: Tensor, one: TorchSequence) -> Tensor:
    """Return the allowed tokens without those that the request excludes, by `allowed_token_ids` or by a bad word.

    A limit that would leave no token is ignored.
    """
    s = one.sampling
    if s.allowed_token_ids:
        named = torch.zeros_like(allowed)
        named[s.allowed_token_ids] = True
        allowed = named & allowed if (named & allowed).any() else allowed
    if s.bad_word_tokens and (banned := completing(s.bad_word_tokens, one.tokens, one.prompt_tokens)):
        rest = allowed.clone()
        rest[list(banned)] = False
        allowed = rest if rest.any() else allowed
    return allowed


def _as_mask(bits: int, size: int) -> Tensor:
    """Return a bit set of tokens, in which bit n stands for token n, as a tensor of `size` booleans."""
    octets = (bits & (1 << size) - 1).to_bytes(size // 8 + 1, "little")
    return torch.from_numpy(
        np.unpackbits(np.frombuffer(octets, np.uint8), count=size, bitorder="little")
    ).bool()


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
    # the smallest set of the most likely tokens that has a total probability of at least top_p
    if s.top_p < 1.0:
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
    """Return, for each row of raw logits, the logprob of one token, and the `top` best tokens of the row.

    `tokens` has that one token for each row, in order.
    """
    values = logits.float().log_softmax(dim=-1)
    best = values.topk(min(top, values.shape[-1]), dim=-1)
    places = torch.tensor(tokens, device=values.device).unsqueeze(1)
    rows = zip(
        values.gather(1, places).squeeze(1).tolist(), best.indices.tolist(), best.values.tolist(), strict=True
    )
    return [Logprob(chosen, list(zip(ids, numbers, strict=True))) for chosen, ids, numbers in rows]


def read_prompts(works: Sequential[SequenceWork], logits: Callable[[list[int]], Tensor]) -> None:
    """Append this step's prompt logprobs to the attribute `before` of each sequence that needs prompt logprobs.

    A prompt may be computed in several chunks, each in its own step. After a preemption, the prompt and its logprobs are
    computed again from the beginning. The logits of thousands of rows would take more memory than the model. So they are
    computed for 128 (PROMPT_ROWS) rows at a time.

    Args:
        works: the parts of the step.
        logits: returns the logits of some rows of the step. Each token of the works has one row, in order.
    """
    row = 0
    for work in works:
        sequence = work.sequence
        if sequence.needs_prompt_logprobs:
            if work.start == 0:
                sequence.before = [Logprob(0.0)]
            # the last row predicts the token after it
            last = min(work.start + work.count, sequence.submitted - 1)
            for first in range(work.start, last, PROMPT_ROWS):
                places = range(first, min(first + PROMPT_ROWS, last))
                values = logits([row + place - work.start for place in places])
                tokens = [sequence.tokens[place + 1] for place in places]
                found = logprobs_of(values, tokens, sequence.sampling.prompt_logprobs or 0)
                ranks = (values > values.gather(1, torch.tensor(tokens, device=values.device)[:, None])).sum(
                    1
                ) + 1
                sequence.before += [
                    Logprob(one.chosen, one.top, rank)
                    for one, rank in zip(found, ranks.tolist(), strict=True)
                ]
        row += work.count


def unsound(found: Sequential[Logprob]) -> bool:
    """Return whether the logprob of any chosen token is not a finite number."""
    return not all(math.isfinite(one.chosen) for one in found)
