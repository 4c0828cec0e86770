"""Arrivals of requests: those of a trace, at its own times, accelerated."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random

import msgspec

from benchmarks.overload.clients import Coming
from controller.frontend.admission.pool import ALONE_TIMES
from controller.trace.prompts import tokens
from controller.trace.rows import BLOCK_TOKENS, TraceRow
from workers.engines.simulated.language import VOCABULARY

TIERS = (
    ("premium", 0.075, 1.0),
    ("standard", 0.6, 2.0),
    ("best_effort", 0.325, 4.0),
)  # share, deadline in seconds
CLIENTS = 16
VOCABULARY_USED = range(300, VOCABULARY)


class Arrivals:
    """The requests of one trace, with prompts of another size."""

    def __init__(self, rows: Sequence[TraceRow], block_tokens: int, reads_per_s: float) -> None:
        """`block_tokens`: tokens in place of each block's; `reads_per_s`: prompt tokens per second of an idle worker."""
        self.rows = [_scaled(row, block_tokens) for row in rows]
        self._block_tokens, self._reads_per_s = block_tokens, reads_per_s

    def prompt(self, number: int) -> Sequence[int]:
        """Return the prompt of a row; after the last row it starts again at the first."""
        row = self.rows[number % len(self.rows)]
        return tokens(row, self._block_tokens, VOCABULARY_USED) or [VOCABULARY_USED.start]

    def answer(self, number: int) -> int:
        """Return the number of tokens of its answer."""
        return max(1, self.rows[number % len(self.rows)].output_length)

    def coming(self, rate: float, seconds: float, seed: int, since_s: float = 0.0) -> Iterator[Coming]:
        """Yield requests at `rate` per second for `seconds`."""
        dice, rows = Random(seed), self.rows
        span = rows[-1].timestamp / 1e3
        speed = rate / (len(rows) / span)
        for key in itertools.count():
            turn, place = divmod(key, len(rows))
            at = (rows[place].timestamp / 1e3 + turn * span) / speed
            if at >= seconds:
                return
            tier, deadline_s = _tier(dice.random())
            prompt = self.prompt(key)
            deadline_s = max(deadline_s, ALONE_TIMES * len(prompt) / self._reads_per_s)
            client = f"c{dice.randrange(CLIENTS)}"
            yield Coming(key, since_s + at, prompt, self.answer(key), tier, client, deadline_s)


def both(first: Iterator[Coming], then: Iterator[Coming]) -> Iterator[Coming]:
    """Yield the requests of `first`, then those of `then`."""
    count = 0
    for one in first:
        count += 1
        yield one
    for one in then:
        yield replace(one, key=count + one.key)


def _tier(draw: float) -> tuple[str, float]:
    """Return a tier and its deadline, for a number from 0 to 1."""
    for name, share, deadline_s in TIERS:
        if draw < share:
            return name, deadline_s
        draw -= share
    return TIERS[-1][0], TIERS[-1][2]


def _scaled(row: TraceRow, block_tokens: int) -> TraceRow:
    """Return a request with blocks of another size: the same number of blocks, with the same hashes."""
    length = max(1, row.input_length * block_tokens // BLOCK_TOKENS)
    return msgspec.structs.replace(row, input_length=length)
