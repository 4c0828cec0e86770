"""Converts measured points into the arrays that a simulated engine reads (NPZ).

    prefill_isl[n]  ─▶ prefill_ttft_ms[n]                                  prompt tokens ─▶ ms to the first token
    decode_active_kv_tokens[a] × decode_context_length[c] ─▶ decode_itl[a, c]     ms between two tokens
    pass_ms                                                                ms of fixed cost of a forward pass, included in both

The format is that of NVIDIA Dynamo's mocker: all arrays are float64, axes strictly increase, and readers interpolate linearly.
`pass_ms` is an extension, which Dynamo ignores.

Batches of several sizes are measured at several context lengths. The duration of a decode step is nearly linear in the batch size
and the context length. The batch size is the number of active tokens divided by the context length. So the duration is not linear
in active tokens and context length. Values are therefore interpolated by batch size and context length, and then written on a
finer grid of active tokens and context lengths. Both axes of the written grid start at one token or less, because readers
extrapolate from the edge of the grid. Below the smallest measured batch, and below the shortest measured context, the time is
constant. Above the largest measured batch, the line through the last two points continues, but never downwards.

A short prompt takes no longer than a long one. If the measurements show otherwise, other work on the machine has added time. So
the written time of a prompt is the shortest time measured for this prompt or for a longer one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from events.errors import HoldfastError

Array = npt.NDArray[np.float64]
GRID = 64  # number of points of each axis besides the measured ones


class TooFewPoints(HoldfastError):
    """Too few points were measured to draw a line."""


@dataclass(frozen=True, slots=True)
class PrefillPoint:
    """The measured time from sending a prompt to the first token of its answer."""

    tokens: int  # tokens of the prompt
    ttft_ms: float


@dataclass(frozen=True, slots=True)
class DecodePoint:
    """The measured duration of one decode step of a batch of requests."""

    batch: int  # number of requests
    asked: int  # context length in tokens, as listed in the sweep
    context: float  # actual context length in tokens, the mean during the measurement
    itl_ms: float  # time between two tokens


@dataclass(frozen=True, slots=True)
class BesidePoint:
    """The measured duration of a decode step in which the engine also computed a short prompt."""

    tokens: int  # tokens of the prompt
    step_ms: float  # duration of the step with the prompt
    other_ms: float  # median duration of the same answer's steps


def arrays(
    prefill: Sequence[PrefillPoint], decode: Sequence[DecodePoint], beside: Sequence[BesidePoint] = ()
) -> dict[str, Array]:
    """Return the arrays of a profile by name, without `pass_ms` if `beside` is empty.

    Raise TooFewPoints if fewer than two prompt lengths or fewer than two context lengths were measured.
    """
    isl, ttft = _curve([(point.tokens, point.ttft_ms) for point in prefill])
    ttft = np.minimum.accumulate(ttft[::-1])[::-1]
    if len(isl) < 2:
        raise TooFewPoints(f"{len(isl)} prompt lengths were measured; at least 2 are needed")
    columns = _columns(decode)
    if len(columns) < 2:
        raise TooFewPoints(f"{len(columns)} context lengths were measured; at least 2 are needed")
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
    """Return the fixed cost of a forward pass in ms.

    This is the time that is saved by computing a prompt and a token in one pass instead of two. `isl` holds prompt lengths in
    tokens. For each length, `ttft` holds the ms of a pass that computes only one such prompt. The result is at least 0. It is at
    most the time of a pass with only a prompt or only a token, whichever is shorter.
    """
    alone = [float(np.interp(point.tokens, isl, ttft)) for point in beside]
    saved = [ms + point.other_ms - point.step_ms for ms, point in zip(alone, beside, strict=True)]
    most = min(*alone, float(np.median([point.other_ms for point in beside])))
    return min(max(0.0, float(np.median(saved))), most)


_Column = tuple[float, Array, Array]  # context length, batch sizes, time between tokens for each


def _columns(decode: Sequence[DecodePoint]) -> list[_Column]:
    """Return one column per context length of the sweep, sorted by the mean of the measured context lengths.

    A column holds this mean, the batch sizes, and the ms between tokens for each batch size. If the means of two neighbouring
    columns are nearly equal, the later column is left out.
    """
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
    """Return the x and y values of points, sorted by x. Points with the same x are replaced by their median."""
    by_x: dict[float, list[float]] = {}
    for x, y in pairs:
        by_x.setdefault(x, []).append(y)
    axis = sorted(by_x)
    return np.array(axis, float), np.array([float(np.median(by_x[x])) for x in axis])


def _axis(measured: Sequence[float]) -> Array:
    """Return the points of an axis: the measured values and GRID geometrically spaced values, in ascending order.

    The spaced values reach from 1, or the smallest measured value if that is less, to the largest measured value.
    """
    low, high = min(1.0, *measured), max(measured)
    points = np.unique(np.round(np.concatenate([np.geomspace(low, high, GRID), measured]), 3))
    kept = [float(points[0])]
    for before, point in pairwise(points):
        if point - before > 0.01:
            kept.append(float(point))
    return np.array(kept)


def _itl(columns: Sequence[_Column], actives: Array, context: float) -> Array:
    """Return the ms between two tokens at each number of active tokens, for requests of `context` tokens each."""
    batches = np.maximum(1.0, actives / context)
    place = int(np.searchsorted([column[0] for column in columns], context, side="right")) - 1
    place = min(max(place, 0), len(columns) - 2)
    (left, *_), (right, *_) = near, far = columns[place], columns[place + 1]
    share = min(max((context - left) / (right - left), 0.0), 1.0)  # limited, because the axis is rounded
    return _along(near, batches) * (1 - share) + _along(far, batches) * share


def _along(column: _Column, batches: Array) -> Array:
    _, measured, itl = column
    slope = (itl[-1] - itl[-2]) / (measured[-1] - measured[-2]) if len(measured) > 1 else 0.0
    beyond = np.maximum(0.0, batches - measured[-1]) * max(0.0, slope)
    return np.asarray(np.interp(batches, measured, itl) + beyond)
