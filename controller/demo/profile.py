"""What does the load look like: when requests arrive, how long they are. From our own profile, or a recorded trace.

Lengths are scaled down so that a request fits the engine that the demo runs; a trace's arrival times are divided by
the speed-up. Prompts come from a small pool, so that the undisturbed answer to each can be asked for beforehand.
"""

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from itertools import pairwise
from pathlib import Path

from events.errors import HoldfastError

PROMPTS = 16  # distinct ones
INPUT_MAX = 384
OUTPUT_MAX = 192
FIRST_TOKEN, LAST_TOKEN = 260, 2040  # of any model with a vocabulary of 2,048


class BadTrace(HoldfastError):
    """The trace cannot be read. Each line is a JSON object with timestamp (ms), input_length and output_length."""


@dataclass(frozen=True, slots=True)
class Planned:
    """One request to come: when (seconds from the start), which prompt of the pool, how many tokens."""

    at_s: float
    prompt: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Load:
    """The pool of prompts (token ids) and the requests to send."""

    prompts: tuple[tuple[int, ...], ...]
    requests: tuple[Planned, ...]


def from_profile(seconds: float, rate: float, seed: int = 0) -> Load:
    """Return a load of `rate` requests a second, its lengths and burstiness those of the shipped profile."""
    shape = json.loads(files(__package__).joinpath("profile.json").read_text())
    chance = random.Random(seed)
    prompts = _pool(chance, [_quantile(shape["input_tokens"], chance.random()) for _ in range(PROMPTS)])
    requests, at, k = [], 0.0, 1 / shape["arrival_cv"] ** 2
    while (at := at + chance.gammavariate(k, 1 / (rate * k))) < seconds:
        length = _scaled(_quantile(shape["output_tokens"], chance.random()), 1000, OUTPUT_MAX)
        requests.append(Planned(at, chance.randrange(PROMPTS), length))
    return Load(prompts, tuple(requests))


def from_trace(path: Path, seconds: float, speedup: float, seed: int = 0) -> Load:
    """Return the trace's requests of the first `seconds × speedup` seconds. Raise BadTrace, naming the line."""
    chance = random.Random(seed)
    rows = [row for row in _rows(path) if row[0] / speedup < seconds]
    if not rows:
        raise BadTrace(f"{path} holds no request in its first {seconds * speedup:.0f} seconds")
    longest_in, longest_out = max(1, *(r[1] for r in rows)), max(1, *(r[2] for r in rows))
    sizes = [r[1] for r in chance.sample(rows, min(PROMPTS, len(rows)))]
    prompts = _pool(chance, [_scaled(n, longest_in, INPUT_MAX) for n in sizes])
    requests = (
        Planned(t / speedup, chance.randrange(len(prompts)), _scaled(o, longest_out, OUTPUT_MAX))
        for t, _, o in rows
    )
    return Load(prompts, tuple(requests))


def _rows(path: Path) -> Iterator[tuple[float, int, int]]:
    try:
        with path.open(errors="replace") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    row = json.loads(line)
                    at, size = float(row["timestamp"]), (int(row["input_length"]), int(row["output_length"]))
                    if not (0 <= at < math.inf and min(size) >= 0):
                        raise ValueError("a time or a length below 0")
                    yield at / 1000, *size
                except (ValueError, KeyError, TypeError, OverflowError) as error:
                    raise BadTrace(f"{path}, line {number}: {error}. {BadTrace.__doc__}") from error
    except OSError as error:
        raise BadTrace(f"the trace {path} cannot be read: {error.strerror}") from error


def _pool(chance: random.Random, lengths: list[int]) -> tuple[tuple[int, ...], ...]:
    span = range(FIRST_TOKEN, LAST_TOKEN)
    return tuple(tuple(chance.choices(span, k=_scaled(n, 14_000, INPUT_MAX))) for n in lengths)


def _quantile(points: list[int], u: float) -> int:
    steps = list(pairwise(points))
    place = u * len(steps)
    low, high = steps[min(int(place), len(steps) - 1)]
    return round(low + (high - low) * (place % 1))


def _scaled(length: int, longest: int, limit: int) -> int:
    """Shorten by a square root, so that short requests stay short and long ones fit."""
    return max(8, min(limit, round(limit * math.sqrt(length / longest))))
