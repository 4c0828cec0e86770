"""Computes the next token of the simulated model from the model's name and all tokens so far.

A 64-bit hash runs over the whole sequence, with the model's name as its seed. The hash's digest at a position determines the
distribution of the next token. So a lost, duplicated or altered token changes all tokens that follow, in the same way on every
worker. A continuation on another worker equals the undisturbed answer if and only if the replayed tokens were right. The hash is
updated with one token at a time, so that the cost of a token does not grow with the length of the sequence.

Token ids are those of the tokenizer that is part of Holdfast (`builtin:sim`). It has 2,048 ids, and id 2 ends the answer. Answers
consist only of merges (ids from 259 on), so that each token is complete text by itself.
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
FIRST = 259  # the lowest id of an answer's tokens; lower ids are 3 special tokens and 256 bytes
SPAN = VOCABULARY - FIRST  # 1,789, a prime number, so that steps of any constant stride visit each id once
EOS_BELOW = (1 << 64) // 400  # digests below this end the answer, which is one in 400
CANDIDATES = 20  # number of tokens at each position that have a logit of their own
TAIL = 0.01  # the total weight of all other tokens, relative to the first candidate
TAIL_LOGIT = math.log(TAIL / (SPAN - CANDIDATES))  # the logit of each token that is no candidate
TOKEN_BYTES = tuple(token.to_bytes(4, "little") for token in range(VOCABULARY))
_MASK = (1 << 64) - 1

KEPT = 256  # number of cached positions, because a simulated fleet computes the same canary answers a thousand times

TokenId = Annotated[int, Meta(ge=0, lt=VOCABULARY)]
Candidates = Sequence[tuple[int, float]]  # (token, logit), best first


def open_sequence(model: str, tokens: Sequence[int]) -> xxhash.xxh3_64:
    """Return the running hash of `tokens` for a model.

    The hash's digest determines the next token. Call its `update` with `TOKEN_BYTES` of each further token.
    """
    running = xxhash.xxh3_64(seed=xxhash.xxh64_intdigest(model.encode()))
    running.update(as_bytes(tokens))
    return running


def as_bytes(tokens: Sequence[int]) -> bytes:
    """Return tokens in the form of the hash's input: four bytes per token, little endian."""
    packed = array("I", tokens)
    return packed.tobytes()


def plain_token(digest: int) -> int:
    """Return the most likely token of the position with this digest. The end of the answer is not considered."""
    return FIRST + digest % SPAN


@lru_cache(KEPT)
def candidates(digest: int, *, eos: bool) -> Candidates:
    """Return the candidates of the position with this digest, with their logits, the best one first.

    The best candidate has logit 0, which is nearly always far above the others. If `eos` is false, the candidates never contain
    the end of the answer, as needed before `min_tokens` and with `ignore_eos`.
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
    """Return the tokens at these ranks (0 for the best) of a position. The end of the answer is not considered.

    The ranks from 0 to SPAN - 1 contain each token once.
    """
    place, stride = digest % SPAN, 1 + (digest >> 33) % (SPAN - 1)
    return [FIRST + (place + rank * stride) % SPAN for rank in ranks]


def with_biased(ranked: Candidates, digest: int, bias: Mapping[int, float]) -> Candidates:
    """Return a position's candidates, then the other tokens that `bias` names, then the best token that `bias` does not name.

    The last token is needed if the biases ban all candidates.
    """
    known = {token for token, _ in ranked}
    named = [token for token in bias if token not in known]
    other = next((token for token in _in_order(digest, range(CANDIDATES, SPAN)) if token not in bias), None)
    more = named if other is None else [*named, other]
    return (*ranked, *((token, TAIL_LOGIT) for token in more))


@lru_cache(KEPT)
def logprobs(ranked: Candidates, chosen: int, top: int, drift: float = 0.0) -> Logprob:
    """Return the logprob of the token `chosen` at a position with the candidates `ranked`, and the `top` best tokens.

    `drift` imitates a faulty device: it is subtracted from and added to the logprobs in turn.
    """
    total = math.log(sum(math.exp(logit) for _, logit in ranked) + TAIL)
    shifted = [
        (token, logit - total + (drift if rank % 2 else -drift)) for rank, (token, logit) in enumerate(ranked)
    ]
    of_chosen = next((value for token, value in shifted if token == chosen), -total - 20.0)
    return Logprob(of_chosen, sorted(shifted, key=lambda pair: -pair[1])[:top])


def prompt_logprobs(
    model: str, tokens: Sequence[int], top: int, *, eos: bool, drift: float = 0.0
) -> list[Logprob]:
    """Return the logprob of each token of a prompt, as if the model had generated the prompt, with the `top` best tokens.

    The logprob of the first token is 0, because no token precedes it. `eos` and `drift` are those of `candidates` and `logprobs`.
    """
    running, found = open_sequence(model, tokens[:1]), [Logprob(0.0)]
    for token in tokens[1:]:  # bypasses the caches, because a prompt's positions are rarely needed again
        ranked = candidates.__wrapped__(running.intdigest(), eos=eos)
        found.append(logprobs.__wrapped__(ranked, token, top, drift))
        running.update(TOKEN_BYTES[token])
    return found


def choose(
    ranked: Candidates, sampling: Sampling, counts: Mapping[int, int], banned: Collection[int], luck: float
) -> int:
    """Return the token that the sampling parameters select from the candidates.

    Biases are applied after the penalties, so that penalties cannot undo what a bias forces or bans.

    Args:
        ranked: the candidates with their logits, the best one first.
        sampling: the request's sampling parameters.
        counts: how often each token was generated before; empty if penalties do not need the counts.
        banned: the token ids that would end the answer too early.
        luck: a random number in [0, 1).
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
    # A repetition penalty multiplies negative logits. The best candidate's logit is 0, so an offset makes it negative first.
    return (logit - 1.0) * sampling.repetition_penalty + 1.0


def _draw(scored: Candidates, sampling: Sampling, luck: float) -> int:
    if sampling.top_k > 0:
        scored = scored[: sampling.top_k]
    best = scored[0][1]
    weights = [math.exp((logit - best) / sampling.temperature) for _, logit in scored]
    if sampling.min_p > 0:  # the best token's weight is 1
        weights = [weight for weight in weights if weight >= sampling.min_p]
    total = sum(weights)
    kept, reached = 0.0, 0
    for weight in (
        weights
    ):  # top_p keeps the smallest set of the best tokens that has at least this share of the weight
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
    """Return the random number in [0, 1) of a position, which is a hash of the seed and of the position's digest.

    So every worker that continues an answer draws the same number.
    """
    return xxhash.xxh64_intdigest(digest.to_bytes(8, "little"), seed=seed & _MASK) / (1 << 64)


class Reasoning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The configuration of the reasoning at the start of each answer, as in Dynamo's mocker.

    It consists of the two delimiter tokens, and of the share (0 to 1) of the answer's tokens that are reasoning.
    """

    start_thinking_token_id: TokenId
    end_thinking_token_id: TokenId
    thinking_ratio: Annotated[float, Meta(ge=0, le=1)]

    def tokens(self, answer: int) -> int:
        """Return how many tokens of an answer of `answer` tokens are reasoning, both delimiters included.

        The number is the configured share of the answer, but at least 2, for the two delimiters. It is 0 if the answer has only
        one token, or if the share is less than one token.
        """
        share = int(answer * self.thinking_ratio)
        return max(2, share) if share and answer > 1 else 0
