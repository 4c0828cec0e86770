"""From what was measured to what a simulated engine reads: the arrays of an NPZ.

    prefill_isl[n]  ─▶ prefill_ttft_ms[n]                                  prompt tokens, first token
    decode_active_kv_tokens[a] × decode_context_length[c] ─▶ decode_itl[a, c]     ms between two tokens
    pass_ms                                                                what a pass costs for itself: part of both

As NVIDIA Dynamo's mocker reads them: all float64, axes strictly increasing, between their points straight lines. `pass_ms` is
our own; theirs does not look at it.

A sweep measures a batch of so many requests at so long a context each. How long a step takes bends over (active tokens,
context), because a batch is their quotient, and is nearly straight over (batch, context). So the straight lines are drawn
there, and a finer grid than the measured one is written, from a single token on: readers go on along the lines of its
edge, which would be those of half a request. Less than one request there cannot be: below a single one its time stands, and
so does that of the shortest measured context; above the largest measured batch the last line goes on, but never down.

What else a machine does only ever adds time: so no prompt takes longer than a longer one did.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from events.errors import HoldfastError

Array = npt.NDArray[np.float64]
GRID = 64  # points of each axis beside the measured ones


class TooFewPoints(HoldfastError):
    """Not enough could be measured to draw a line."""


@dataclass(frozen=True, slots=True)
class PrefillPoint:
    """How long a prompt takes to its first token."""

    tokens: int
    ttft_ms: float


@dataclass(frozen=True, slots=True)
class DecodePoint:
    """How long a step takes a batch."""

    batch: int
    asked: int  # the context that the sweep names it by
    context: float  # tokens of one request, on average, while it was measured
    itl_ms: float


@dataclass(frozen=True, slots=True)
class BesidePoint:
    """How long a step took that computed a short prompt beside an answer, and how long the others of that answer."""

    tokens: int  # of the prompt
    step_ms: float
    other_ms: float


def arrays(
    prefill: Sequence[PrefillPoint], decode: Sequence[DecodePoint], beside: Sequence[BesidePoint] = ()
) -> dict[str, Array]:
    """Return the arrays. Raise TooFewPoints."""
    isl, ttft = _curve([(point.tokens, point.ttft_ms) for point in prefill])
    ttft = np.minimum.accumulate(ttft[::-1])[::-1]
    if len(isl) < 2:
        raise TooFewPoints(f"{len(isl)} prompt lengths were measured; it takes 2")
    columns = _columns(decode)
    if len(columns) < 2:
        raise TooFewPoints(f"{len(columns)} context lengths were measured; it takes 2")
    contexts = _axis([context for context, _, _ in columns])
    actives = _axis([context * batch for context, batches, _ in columns for batch in batches])
    itl = np.ascontiguousarray(np.array([_itl(columns, actives, context) for context in contexts]).T)
    return {
        "prefill_isl": isl,
        "prefill_ttft_ms": ttft,
        "decode_active_kv_tokens": actives,
        "decode_context_length": contexts,
        "decode_itl": itl,
        **({"pass_ms": np.array(_pass_ms(beside, isl, ttft))} if beside else {}),
    }


def _pass_ms(beside: Sequence[BesidePoint], isl: Array, ttft: Array) -> float:
    """Return by how much less a prompt and a token take together than each alone: no more than either takes."""
    alone = [float(np.interp(point.tokens, isl, ttft)) for point in beside]
    saved = [ms + point.other_ms - point.step_ms for ms, point in zip(alone, beside, strict=True)]
    most = min(*alone, float(np.median([point.other_ms for point in beside])))
    return min(max(0.0, float(np.median(saved))), most)


_Column = tuple[float, Array, Array]  # a context, batches, and the time between tokens of each


def _columns(decode: Sequence[DecodePoint]) -> list[_Column]:
    """Return what was measured at each context, by the context that it really was."""
    found: dict[int, list[DecodePoint]] = {}
    for point in decode:
        found.setdefault(point.asked, []).append(point)
    columns = []
    for points in found.values():
        batches, itl = _curve([(point.batch, point.itl_ms) for point in points])
        columns.append((float(np.mean([point.context for point in points])), batches, itl))
    columns.sort(key=lambda column: column[0])
    return [
        column for place, column in enumerate(columns) if not place or column[0] > columns[place - 1][0] + 0.5
    ]


def _curve(pairs: Sequence[tuple[float, float]]) -> tuple[Array, Array]:
    """Return points by their place on the axis; of several at the same place their median."""
    by_x: dict[float, list[float]] = {}
    for x, y in pairs:
        by_x.setdefault(x, []).append(y)
    axis = sorted(by_x)
    return np.array(axis, float), np.array([float(np.median(by_x[x])) for x in axis])


def _axis(measured: Sequence[float]) -> Array:
    """Return an axis through what was measured, with points between where they are far apart."""
    low, high = min(1.0, *measured), max(measured)
    points = np.unique(np.round(np.concatenate([np.geomspace(low, high, GRID), measured]), 3))
    kept = [float(points[0])]
    for before, point in pairwise(points):
        if point - before > 0.01:
            kept.append(float(point))
    return np.array(kept)


def _itl(columns: Sequence[_Column], actives: Array, context: float) -> Array:
    """Return the time between tokens of as many requests as these active tokens are."""
    batches = np.maximum(1.0, actives / context)
    place = int(np.searchsorted([column[0] for column in columns], context, side="right")) - 1
    place = min(max(place, 0), len(columns) - 2)
    (left, *_), (right, *_) = near, far = columns[place], columns[place + 1]
    share = min(max((context - left) / (right - left), 0.0), 1.0)  # the axis is rounded
    return _along(near, batches) * (1 - share) + _along(far, batches) * share


def _along(column: _Column, batches: Array) -> Array:
    _, measured, itl = column
    slope = (itl[-1] - itl[-2]) / (measured[-1] - measured[-2]) if len(measured) > 1 else 0.0
    beyond = np.maximum(0.0, batches - measured[-1]) * max(0.0, slope)
    return np.asarray(np.interp(batches, measured, itl) + beyond)
