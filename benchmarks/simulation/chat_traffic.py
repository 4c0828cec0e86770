"""Generates chat traffic with the lengths and the prefix sharing published for a real service.

Source: the two hours of "Trace A", a chat service for consumers, of J. Wang et al., "KVCache Cache in the Wild: Characterizing
and Optimizing KVCache Cache at a Large Cloud Provider", USENIX ATC 2025 (arXiv 2506.02634). The paper reports a hit rate of 62
% for an unbounded cache. The other figures, PUBLISHED, were computed by third parties from the trace that the paper's authors
released (github.com/alibaba-edu/qwen-bailian-usagetraces-anon). No request of that trace is included. Conversations are drawn
from distributions with these figures, and a test compares the generated traffic with the figures. The demo's profile is learned
from this traffic:

    python -m benchmarks.simulation.chat_traffic controller/demo/profile.json.gz

    prompt      one of a few system prompts, then the whole conversation so far, then the user's message
    block       16 tokens, as in the published trace
"""

import sys
from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import count
from math import exp, log
from random import Random

import msgspec

from controller.trace.profile import TraceProfile, learn, save
from controller.trace.rows import TraceRow

BLOCK_TOKENS = 16
PUBLISHES = "chat traffic of our own making, its lengths and sharing as published: see benchmarks/simulation/chat_traffic.py"
SECONDS = 7200.0
RATE = 1.2  # requests per second, a fifth of the published 5.98, which suffices for the profile
PUBLISHED = {
    "input mean": 2331, "input median": 1046, "input p99": 14_359,
    "output mean": 430, "output median": 375, "output p99": 1641,
    "conversations of one request": 0.610, "requests that follow another": 0.463,
    "hit rate of all blocks": 0.579, "hits on other conversations' blocks": 0.289,
    "gap median s": 110.6, "gap p90 s": 718.5,
}  # fmt: skip

ONE_TURN = 0.545  # share of conversations with a single request
MORE_TURNS = 0.55  # probability that a conversation continues after its second or a later request
SYSTEM_PROMPTS = ((0.59, 30), (0.20, 320), (0.13, 900), (0.08, 2000))  # share of conversations, tokens
FIRST_MESSAGE = (135.0, 2.25)  # tokens: median, and standard deviation of the logarithm
NEXT_MESSAGE = (85.0, 1.9)
MESSAGE_MAX = 13_000
OUTPUT = (362.0, 0.62)
OUTPUT_MAX = 2000
PROMPT_MAX = 30_000
# seconds between two requests of a conversation; long conversations end after the two hours
GAP_S = (120.0, 1.6)


class _Conversation(msgspec.Struct):
    """The conversation so far: its length in tokens, and its complete blocks."""

    tokens: int
    blocks: list[int]


def requests(seed: int = 0, seconds: float = SECONDS, rate: float = RATE) -> Iterator[TraceRow]:
    """Yield the requests of `seconds` seconds in order of time, about `rate` per second."""
    chance, fresh, order = Random(seed), count(), count()
    systems = [[next(fresh) for _ in range(tokens // BLOCK_TOKENS)] for _, tokens in SYSTEM_PROMPTS]
    begin_rate = rate * (1 - PUBLISHED["requests that follow another"])
    due: list[tuple[float, int, _Conversation | None]] = [(0.0, next(order), None)]
    while due and due[0][0] < seconds:
        at, _, conversation = heappop(due)
        if conversation is None:
            heappush(due, (at + chance.expovariate(begin_rate), next(order), None))
            ((which, (_, tokens)),) = chance.choices(
                list(enumerate(SYSTEM_PROMPTS)), [share for share, _ in SYSTEM_PROMPTS]
            )
            conversation = _Conversation(tokens, list(systems[which]))
            message, onward = FIRST_MESSAGE, 1 - ONE_TURN
        else:
            message, onward = NEXT_MESSAGE, MORE_TURNS
        _append(conversation, _drawn(chance, message, MESSAGE_MAX), fresh)
        output = _drawn(chance, OUTPUT, OUTPUT_MAX)
        ids = list(conversation.blocks)
        if conversation.tokens % BLOCK_TOKENS:
            ids.append(next(fresh))
        yield TraceRow(round(at * 1e3, 1), conversation.tokens, output, ids)
        if chance.random() < onward and conversation.tokens < PROMPT_MAX:
            _append(conversation, output, fresh)
            heappush(due, (at + _lognormal(chance, GAP_S), next(order), conversation))


def learned() -> TraceProfile:
    """Return the profile that is learned from this traffic with the default arguments."""
    return learn(requests(), BLOCK_TOKENS, says=PUBLISHES)


def _append(conversation: _Conversation, tokens: int, fresh: Iterator[int]) -> None:
    conversation.tokens += tokens
    whole = conversation.tokens // BLOCK_TOKENS
    conversation.blocks += [next(fresh) for _ in range(whole - len(conversation.blocks))]


def _drawn(chance: Random, shape: tuple[float, float], limit: int) -> int:
    return max(1, min(limit, round(_lognormal(chance, shape))))


def _lognormal(chance: Random, shape: tuple[float, float]) -> float:
    median, sigma = shape
    return exp(chance.gauss(log(median), sigma))


if __name__ == "__main__":
    from pathlib import Path

    Path(sys.argv[1]).write_bytes(save(learned()))
