"""Requests of a trace for a fleet in virtual time: arrival, lengths and block names."""

from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import islice, takewhile
from pathlib import Path
from random import Random

from controller.trace.rows import BLOCK_TOKENS, BadTrace, TraceReader, TraceRow
from events.blocks import follow

NUMBER_MAX = 1_000_000  # of workers, requests, seconds …: more is an error


@dataclass(frozen=True, slots=True)
class Request:
    """One request. `names` are the sequence hashes of its prompt's full blocks."""

    key: int
    at_s: float
    prompt: int  # tokens, at least 1
    answer: int  # tokens, at least 1
    names: Sequence[int]


def recorded(parser: ArgumentParser, path: Path, limit: int | None = None) -> list[TraceRow]:
    """Read the trace that a command line names, or its first `limit` rows.

    Exit with a message if the trace cannot be read, or if all requests arrive at once.
    """
    try:
        rows = list(islice(TraceReader(path), limit))
        if not rows[-1].timestamp:
            raise BadTrace(f"{path}: all {len(rows)} requests arrive at once, so there is no rate to change")
    except BadTrace as error:
        parser.error(f"{error} (set another with --trace)")
    return rows


def copies(rows: Sequence[TraceRow], count: int, seed: int) -> Iterator[TraceRow]:
    """Yield `count` copies of a trace at once, each with its own prefixes and another starting point."""
    dice, span = Random(seed), rows[-1].timestamp
    begun = [0.0, *(dice.uniform(0, span) for _ in range(count - 1))]
    turned = [_turned(rows, later, copy) for copy, later in enumerate(begun)]
    return merge(*turned, key=lambda row: row.timestamp)


def _turned(rows: Sequence[TraceRow], later: float, copy: int) -> Iterator[TraceRow]:
    """Yield a trace from another starting point: earlier requests come last."""
    span = rows[-1].timestamp
    begin = next(number for number, row in enumerate(rows) if row.timestamp >= later)
    for row in [*rows[begin:], *rows[:begin]]:
        at = row.timestamp - later if row.timestamp >= later else row.timestamp - later + span
        yield TraceRow(at, row.input_length, row.output_length, [follow(one, copy) for one in row.hash_ids])


def requests(rows: Iterable[TraceRow], block_tokens: int, speed: float = 1.0) -> Iterator[Request]:
    """Yield a trace's requests, `speed` times as fast, in blocks of the engines' size: a divisor of the trace's."""
    parts = BLOCK_TOKENS // block_tokens
    if parts * block_tokens != BLOCK_TOKENS:
        raise ValueError(f"{block_tokens} tokens do not divide a trace's blocks of {BLOCK_TOKENS}")
    for key, row in enumerate(rows):
        prompt, answer = max(1, row.input_length), max(1, row.output_length)
        names = [follow(one, part) for one in row.hash_ids for part in range(parts)]
        yield Request(key, row.timestamp / 1e3 / speed, prompt, answer, names[: prompt // block_tokens])


def found(requests: Iterable[Request], block_tokens: int, capacity: int) -> Iterator[int]:
    """Yield the prompt tokens of each request that one cache of `capacity` blocks finds, if it has read each prompt before the
    next one arrives: no fleet with as many blocks does better by more than chance. Evicts the least recently used block."""
    kept: dict[int, None] = {}
    for request in requests:
        depth = sum(1 for _ in takewhile(kept.__contains__, request.names))
        for name in reversed(request.names):  # a prefix outlives its continuations
            kept.pop(name, None)
            kept[name] = None
        while len(kept) > capacity:
            del kept[next(iter(kept))]
        yield min(depth * block_tokens, request.prompt - 1)


def whole(text: str) -> int:
    """Parse a flag's whole number above 0."""
    if not text.isdecimal() or not 1 <= int(text) <= NUMBER_MAX:
        raise ArgumentTypeError(f"{text!r} is not a whole number from 1 to {NUMBER_MAX}")
    return int(text)
