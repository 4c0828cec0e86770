"""The next token as a pure function of the model's name and of all tokens so far.

The name seeds a 64-bit hash that runs over the whole sequence; its digest at a position *is* the distribution there. So any
lost, doubled or altered token changes everything that follows it, in the same way on every worker. A continuation elsewhere
equals the undisturbed answer if and only if the replayed tokens were right. A hash that consumes one token at a time costs the
same at any length; rehashing the sequence for each token would make long answers quadratic.

Ids follow the shipped tokenizer (`builtin:sim`): 2,048 ids, and 2 ends the answer. Answers consist only of merges (from 259
on), so every token is whole text by itself.
"""

import math
from array import array
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Annotated

import msgspec
import xxhash
from msgspec import Meta

from events.wire import Logprob, Sampling

VOCABULARY = 2048
EOS = 2
FIRST = 259  # the ids below are 3 special tokens and 256 bytes
SPAN = VOCABULARY - FIRST  # 1,789, a prime: every stride below visits all ids once
EOS_BELOW = (1 << 64) // 400  # digests below this end the answer: one in 400
CANDIDATES = 20
TAIL = 0.01  # the total weight of all other tokens, relative to the first candidate
TAIL_LOGIT = math.log(TAIL / (SPAN - CANDIDATES))  # the logit of each other token, to which a bias is added
TOKEN_BYTES = tuple(token.to_bytes(4, "little") for token in range(VOCABULARY))
_MASK = (1 << 64) - 1

KEPT = 256  # cached positions: a simulated fleet computes the same canary answers a thousand times

TokenId = Annotated[int, Meta(ge=0, lt=VOCABULARY)]
Candidates = Sequence[tuple[int, float]]  # (token, logit), best first


def open_sequence(model: str, tokens: Sequence[int]) -> xxhash.xxh3_64:
    """Return the running hash of `tokens` under a model's name.

    `digest` it for the next position, `update` it with the next token.
    """
    running = xxhash.xxh3_64(seed=xxhash.xxh64_intdigest(model.encode()))
    running.update(as_bytes(tokens))
    return running


def as_bytes(tokens: Sequence[int]) -> bytes:
    """Return tokens as the hash's input: four bytes each, little endian."""
    packed = array("I", tokens)
    return packed.tobytes()


def plain_token(digest: int) -> int:
    """Return the best token of a position, ignoring the end of the answer."""
    return FIRST + digest % SPAN


@lru_cache(KEPT)
def candidates(digest: int, *, eos: bool) -> Candidates:
    """Return the best candidates of a position with their logits. The first has logit 0, nearly always far above the others.

    With `eos` False they exclude the end of the answer (min_tokens not reached, or ignore_eos).
    """
    tokens = _in_order(digest, range(CANDIDATES))
    if eos and digest < EOS_BELOW:
        tokens.insert(0, EOS)
    noise = digest ^ (digest >> 29)
    logit, ranked = 0.0, []
    for rank, token in enumerate(tokens[:CANDIDATES]):
        if rank:
            noise = (noise * 6364136223846793005 + 1442695040888963407) & _MASK
            fraction = (noise >> 40) / (1 << 24)
            logit -= 0.05 + (3.0 if rank == 1 else 0.4) * fraction
        ranked.append((token, logit))
    return tuple(ranked)


def _in_order(digest: int, ranks: range) -> list[int]:
    """Return the tokens at these ranks of a position, without the end of the answer. The `SPAN` ranks contain each token once."""
    place, stride = digest % SPAN, 1 + (digest >> 33) % (SPAN - 1)
    return [FIRST + (place + rank * stride) % SPAN for rank in ranks]


def with_biased(ranked: Candidates, digest: int, bias: Mapping[int, float]) -> Candidates:
    """Return a position's candidates, followed by the other tokens that `bias` names.

    The best remaining token comes last, in case the bias bans all candidates.
    """
    known = {token for token, _ in ranked}
    named = [token for token in bias if token not in known]
    other = next((token for token in _in_order(digest, range(CANDIDATES, SPAN)) if token not in bias), None)
    more = named if other is None else [*named, other]
    return (*ranked, *((token, TAIL_LOGIT) for token in more))


@lru_cache(KEPT)
def logprobs(ranked: Candidates, chosen: int, top: int, drift: float = 0.0) -> Logprob:
    """Return a position's logprobs. `drift` shifts them with alternating sign, as a faulty device would."""
    total = math.log(sum(math.exp(logit) for _, logit in ranked) + TAIL)
    shifted = [
        (token, logit - total + (drift if rank % 2 else -drift)) for rank, (token, logit) in enumerate(ranked)
    ]
    of_chosen = next((value for token, value in shifted if token == chosen), -total - 20.0)
    return Logprob(of_chosen, sorted(shifted, key=lambda pair: -pair[1])[:top])


def prompt_logprobs(
    model: str, tokens: Sequence[int], top: int, *, eos: bool, drift: float = 0.0
) -> list[Logprob]:
    """Return the logprobs of a prompt's own tokens, as if each had been generated. The first one has no meaning."""
    running, found = open_sequence(model, tokens[:1]), [Logprob(0.0)]
    for token in tokens[1:]:  # not cached: no position of a prompt returns
        ranked = candidates.__wrapped__(running.intdigest(), eos=eos)
        found.append(logprobs.__wrapped__(ranked, token, top, drift))
        running.update(TOKEN_BYTES[token])
    return found


def choose(
    ranked: Candidates, sampling: Sampling, counts: Mapping[int, int], banned: Collection[int], luck: float
) -> int:
    """Return the token that the sampling parameters select. `luck` in [0, 1) is the random number.

    `counts` is how often each token was generated before; `banned` are the ids that may not end the answer yet. Biases are
    applied last: penalties cannot undo what they force or ban.
    """
    bias = sampling.logit_bias
    if sampling.temperature <= 0 and not counts and not banned and not bias:
        return ranked[0][0]
    allowed = [pair for pair in ranked if pair[0] not in banned] or ranked
    scored = [(token, _penalised(logit, counts.get(token, 0), sampling)) for token, logit in allowed]
    if bias:
        scored = [(token, logit + bias.get(token, 0.0)) for token, logit in scored]
    scored.sort(key=lambda pair: -pair[1])
    if sampling.temperature <= 0:
        return scored[0][0]
    return _draw(scored, sampling, luck)


def _penalised(logit: float, count: int, sampling: Sampling) -> float:
    if not count:
        return logit
    logit -= sampling.presence_penalty + sampling.frequency_penalty * count
    # Candidate logits are at most 0, where a repetition penalty multiplies; the offset lets it affect the best one.
    return (logit - 1.0) * sampling.repetition_penalty + 1.0


def _draw(scored: Candidates, sampling: Sampling, luck: float) -> int:
    if sampling.top_k > 0:
        scored = scored[: sampling.top_k]
    best = scored[0][1]
    weights = [math.exp((logit - best) / sampling.temperature) for _, logit in scored]
    if sampling.min_p > 0:  # the best one's weight is 1
        weights = [weight for weight in weights if weight >= sampling.min_p]
    total = sum(weights)
    kept, reached = 0.0, 0
    for weight in weights:  # top_p keeps the smallest set of the best tokens with at least this share
        kept += weight
        reached += 1
        if kept >= sampling.top_p * total:
            break
    mark = luck * kept
    for (token, _), weight in zip(scored[:reached], weights, strict=False):
        mark -= weight
        if mark < 0:
            return token
    return scored[reached - 1][0]


def luck_at(seed: int, digest: int) -> float:
    """Return a position's random number in [0, 1), keyed by the seed and all tokens so far.

    It is the same after an interruption, on any worker.
    """
    return xxhash.xxh64_intdigest(digest.to_bytes(8, "little"), seed=seed & _MASK) / (1 << 64)


class Reasoning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The reasoning part of an answer, as in Dynamo's mocker: two delimiter tokens, and the share of the answer."""

    start_thinking_token_id: TokenId
    end_thinking_token_id: TokenId
    thinking_ratio: Annotated[float, Meta(ge=0, le=1)]

    def tokens(self, answer: int) -> int:
        """Return how many of the answer's tokens are reasoning, both delimiters included.

        The number follows from the configured share, and includes at least the two delimiters. It is 0 if the answer is too short
        for them, or if the share is below one token.
        """
        share = int(answer * self.thinking_ratio)
        return max(2, share) if share and answer > 1 else 0
