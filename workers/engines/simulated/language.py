"""Computes the next token of the simulated model from the names of the weights and all tokens so far.

A 64-bit hash runs over the whole sequence, with the weights' name as its seed. The hash's digest at a position determines the
distribution of the next token. So a lost, duplicated or altered token changes all tokens that follow, in the same way on every
worker. A continuation on another worker equals the undisturbed answer if and only if the replayed tokens were right. The hash is
updated with one token at a time, so that the cost of a token does not grow with the length of the sequence.

Token ids are those of the tokenizer that is part of Holdfast (`builtin:sim`). It has 2,048 ids, and id 2 ends the answer. Answers
consist only of BPE merges (ids from 259 on), so that each token is complete text by itself.
"""

import math
from array import array
from collections.abc import Collection, Mapping, Sequence
from functools import cache, lru_cache
from typing import Annotated

import msgspec
import xxhash
from msgspec import Meta

from events.token_bytes import BUILTIN_FILE, read_token_bytes
from events.wire import Logprob, Sampling
from workers.engines.constrained import ConstraintMatchers

VOCABULARY = 2048
EOS = 2
BYTES = 3  # the lowest id of the tokens that are single bytes
FIRST = 259  # the lowest id of an answer's tokens; lower ids are 3 special tokens and 256 bytes
SPAN = VOCABULARY - FIRST  # 1,789, a prime number, so that steps of any constant stride visit each id once
EOS_BELOW = (1 << 64) // 400  # digests below this end the answer, which is one in 400
CANDIDATES = 20  # number of tokens at each position that have a logit of their own
TAIL = 0.01  # the total weight of all other tokens, relative to the first candidate
TAIL_LOGIT = math.log(TAIL / (SPAN - CANDIDATES))  # the logit of each token that is no candidate
TOKEN_BYTES = tuple(token.to_bytes(4, "little") for token in range(VOCABULARY))
_MASK = (1 << 64) - 1
TOOLS = b"tools: "  # begins a prompt that lists tools: see the chat template of `builtin:sim`
_CLOSING = b'"}],'
_SPACE = b" \t\r\n"

KEPT = 256  # number of cached positions, because a simulated fleet computes the same canary answers a thousand times

TokenId = Annotated[int, Meta(ge=0, lt=VOCABULARY)]
Candidates = Sequence[tuple[int, float]]  # (token, logit), best first


def open_sequence(weights: str, tokens: Sequence[int]) -> xxhash.xxh3_64:
    """Return the running hash of `tokens` for the weights of this name (`EngineShape.weights`).

    The hash's digest determines the next token. For each further token, pass the token's four bytes (`TOKEN_BYTES`) to the
    hash's method `update`.
    """
    running = xxhash.xxh3_64(seed=xxhash.xxh64_intdigest(weights.encode()))
    running.update(as_bytes(tokens))
    return running


def as_bytes(tokens: Sequence[int]) -> bytes:
    """Return tokens in the form of the hash's input: four bytes per token, little endian."""
    packed = array("I", tokens)
    return packed.tobytes()


def plain_token(digest: int) -> int:
    """Return the most likely next token for a digest of the sequence's hash, never one that ends the answer."""
    return FIRST + digest % SPAN


@lru_cache(KEPT)
def candidates(digest: int, *, eos: bool) -> Candidates:
    """Return the candidates for the next token, with their logits, best first.

    `digest` is that of the sequence's hash. The best candidate has logit 0. The second is lower by 0.05 to 3.05, and each further
    one is lower than its predecessor by 0.05 to 0.45. If `eos` is false, the candidates do not contain the token that ends the
    answer. Callers need this for answers shorter than `min_tokens`, and with `ignore_eos`.
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


@cache
def token_bytes() -> dict[int, bytes]:
    """Return the bytes of each token, without the special tokens."""
    return read_token_bytes(BUILTIN_FILE)


@cache
def tool_tokens() -> frozenset[int]:
    """Return the tokens with which a prompt that lists tools can begin."""
    return frozenset(token for token, text in token_bytes().items() if TOOLS.startswith(text))


@cache
def matchers() -> ConstraintMatchers:
    """Return the token matchers of constrained answers.

    All simulated engines share them, because all have the same vocabulary.
    """
    return ConstraintMatchers(token_bytes(), {EOS})


@cache
def _single_bytes() -> dict[int, int]:
    """Return a map from each byte to the token that consists of this byte alone."""
    tokens = token_bytes()
    return {tokens[token][0]: token for token in range(BYTES, FIRST)}


def constrained(ranked: Candidates, digest: int, allowed: int) -> Candidates:
    """Return those of the candidates `ranked` that a grammar allows. In `allowed`, bit n stands for token n.

    If the grammar allows no candidate, return one allowed token that is no candidate. At one in four positions, selected by
    `digest`, another rule comes first: if the grammar allows a token that ends the answer or closes a part of a JSON text,
    return only that token. Without this rule, an answer could be one long string.
    """
    single = _single_bytes()
    if digest >> 20 & 3 == 0:
        for token in (EOS, *(single[byte] for byte in _CLOSING)):
            if allowed >> token & 1:
                return ((token, 0.0),)
    found = tuple(pair for pair in ranked if allowed >> pair[0] & 1)
    if found:
        return found
    merges = (token for token in _in_order(digest, range(CANDIDATES, SPAN)) if allowed >> token & 1)
    token = next(merges, EOS)
    if token == EOS and (others := {byte: one for byte, one in single.items() if allowed >> one & 1}):
        visible = [one for byte, one in others.items() if byte not in _SPACE] or [*others.values()]
        token = visible[(digest >> 24) % len(visible)]
    return ((token, 0.0),)


def permitted(ranked: Candidates, digest: int, allowed: Sequence[int], banned: Collection[int]) -> Candidates:
    """Return those of the candidates `ranked` that are in `allowed`, or all if it is empty, and not in `banned`.

    If there is none, return other tokens, with the logits of the candidates. If all tokens in `allowed` are banned, they are
    allowed nevertheless.
    """
    if allowed:
        left = [token for token in dict.fromkeys(allowed) if token not in banned] or allowed
        found = tuple(pair for pair in ranked if pair[0] in left)
        begin = digest % len(left)
        others = [*left[begin:], *left[:begin]]
    else:
        found = tuple(pair for pair in ranked if pair[0] not in banned)
        others = [token for token in _in_order(digest, range(CANDIDATES, SPAN)) if token not in banned]
    return found or tuple((token, logit) for token, (_, logit) in zip(others, ranked, strict=False))


def permitted_bits(bits: int, allowed: Sequence[int], banned: Collection[int]) -> int:
    """Return the tokens in `bits` that are in `allowed`, or all if it is empty, and not in `banned`.

    Bit n stands for token n. Return `bits` if no token is left.
    """
    if allowed:
        bits = bits & sum(1 << token for token in set(allowed)) or bits
    return bits & ~sum(1 << token for token in banned) or bits


def _in_order(digest: int, ranks: range) -> list[int]:
    """Return the tokens at these ranks of preference for the next token. The best token has rank 0.

    `digest` is that of the sequence's hash, and determines the ranks. SPAN tokens have a rank: the BPE merges, of which answers
    consist. The token that ends an answer has no rank.
    """
    place, stride = digest % SPAN, 1 + (digest >> 33) % (SPAN - 1)
    return [FIRST + (place + rank * stride) % SPAN for rank in ranks]


def with_biased(ranked: Candidates, digest: int, bias: Mapping[int, float]) -> Candidates:
    """Return `ranked`, the candidates of a position, and after them further tokens that biases can make the best.

    The further tokens are those in `bias` that are not candidates, and then the best token that is neither a candidate nor in
    `bias`. That token is needed if the biases ban all candidates.
    """
    known = {token for token, _ in ranked}
    named = [token for token in bias if token not in known]
    other = next((token for token in _in_order(digest, range(CANDIDATES, SPAN)) if token not in bias), None)
    more = named if other is None else [*named, other]
    return (*ranked, *((token, TAIL_LOGIT) for token in more))


@lru_cache(KEPT)
def logprobs(ranked: Candidates, chosen: int, top: int, drift: float = 0.0) -> Logprob:
    """Return the logprob of the token `chosen` at a position with the candidates `ranked`, and the `top` best tokens.

    `drift` imitates a faulty device. It is subtracted from the logprob of the first candidate, added to that of the second, and
    so on, alternately.
    """
    total = math.log(sum(math.exp(logit) for _, logit in ranked) + TAIL)
    shifted = [
        (token, logit - total + (drift if rank % 2 else -drift)) for rank, (token, logit) in enumerate(ranked)
    ]
    of_chosen = next((value for token, value in shifted if token == chosen), -total - 20.0)
    return Logprob(of_chosen, sorted(shifted, key=lambda pair: -pair[1])[:top])


def prompt_logprobs(
    weights: str, tokens: Sequence[int], top: int, *, eos: bool, drift: float = 0.0
) -> list[Logprob]:
    """Return the logprob of each prompt token, as if generated, and the `top` best tokens at its position.

    The logprob of the first token is 0, because no token precedes it. `eos` is passed on to `candidates`, and `drift` to
    `logprobs`.
    """
    running, found = open_sequence(weights, tokens[:1]), [Logprob(0.0)]
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
    # top_p keeps the smallest set of the best tokens that has at least this share of the weight
    for weight in weights:
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
    """Return the random number in [0, 1) for the choice of a token: a hash of the request's seed and the sequence's digest.

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
