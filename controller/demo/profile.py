"""The demo's load: the times and lengths of requests, from the built-in profile or a recorded trace.

Lengths are scaled down so that a request fits the demo's engine. The arrival times of a trace are divided by the speed-up.
Prompts come from a small pool, so that the undisturbed answer to each prompt can be requested before the faults.
"""

import math
import random
from dataclasses import dataclass
from importlib.resources import as_file, files
from itertools import islice
from pathlib import Path

from controller.trace import synthesis
from controller.trace.profile import TraceProfile, load
from controller.trace.rows import BadTrace, TraceReader, TraceRow
from controller.trace.synthesis import SynthesisKnobs, synthesize

PROMPTS = 16  # number of distinct prompts
INPUT_MAX = 384
OUTPUT_MAX = 192
OUTPUT_MIN = 8  # tokens; long enough for a fault to happen during an answer
INPUT_SCALE, OUTPUT_SCALE = 0.16, 0.25
ENDLESS = 1_000_000_000
VOCABULARY = range(260, 2040)  # token ids that are valid for any model with a vocabulary of at least 2,048


@dataclass(frozen=True, slots=True)
class DemoRequest:
    """One planned request. `at_s` is in seconds from the start, and `prompt` is the prompt's index in the pool."""

    at_s: float
    prompt: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class DemoLoad:
    """The pool of prompts (as token ids), and the requests to send."""

    prompts: tuple[tuple[int, ...], ...]
    requests: tuple[DemoRequest, ...]


def built_in() -> TraceProfile:
    """Return the built-in profile of chat traffic."""
    with as_file(files(__package__).joinpath("profile.json.gz")) as path:
        return load(path)


def from_profile(seconds: float, rate: float, seed: int = 0) -> DemoLoad:
    """Return a load of about `rate` requests per second for `seconds` seconds, from the built-in profile."""
    profile = built_in()
    knobs = SynthesisKnobs(
        prefix_len_multiplier=INPUT_SCALE,
        prompt_len_multiplier=INPUT_SCALE,
        osl_multiplier=OUTPUT_SCALE,
        speedup_ratio=rate / profile.rate,
        max_isl=INPUT_MAX,
        max_osl=OUTPUT_MAX,
    )
    chance = random.Random(seed)
    rows = synthesize(profile, ENDLESS, knobs, seed=seed)
    pool = tuple(
        tuple(synthesis.tokens(row, profile.block_tokens, VOCABULARY)) for row in islice(rows, PROMPTS)
    )
    requests = []
    began: float | None = None
    for row in rows:
        began = row.timestamp if began is None else began
        if (at_s := (row.timestamp - began) / 1e3) >= seconds:
            break
        requests.append(DemoRequest(at_s, chance.randrange(PROMPTS), max(OUTPUT_MIN, row.output_length)))
    return DemoLoad(pool, tuple(requests))


def from_trace(path: Path, seconds: float, speedup: float, seed: int = 0) -> DemoLoad:
    """Return a load from the requests in the first `seconds` × `speedup` seconds of a trace.

    Raise BadTrace if a line is invalid; the message names the line."""
    chance = random.Random(seed)
    rows = _first(path, seconds * speedup)
    longest_in = max(1, *(row.input_length for row in rows))
    longest_out = max(1, *(row.output_length for row in rows))
    sizes = [row.input_length for row in chance.sample(rows, min(PROMPTS, len(rows)))]
    pool = tuple(tuple(chance.choices(VOCABULARY, k=_scaled(n, longest_in, INPUT_MAX))) for n in sizes)
    requests = (
        DemoRequest(
            row.timestamp / 1e3 / speedup,
            chance.randrange(len(pool)),
            _scaled(row.output_length, longest_out, OUTPUT_MAX),
        )
        for row in rows
    )
    return DemoLoad(pool, tuple(requests))


def _first(path: Path, seconds: float) -> list[TraceRow]:
    """Return the requests in the first `seconds` seconds of a trace. Raise BadTrace if there are none."""
    rows = [row for row in TraceReader(path, None) if row.timestamp / 1e3 < seconds]
    if not rows:
        raise BadTrace(f"{path} holds no request in its first {seconds:.0f} seconds")
    return rows


def _scaled(length: int, longest: int, limit: int) -> int:
    """Scale a length so that `longest` becomes `limit`.

    The result is proportional to the square root of the length, so that short requests shrink less than long ones. It is at
    least OUTPUT_MIN.
    """
    return max(OUTPUT_MIN, min(limit, round(limit * math.sqrt(length / longest))))
