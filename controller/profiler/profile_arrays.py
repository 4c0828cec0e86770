"""Converts measured points into the arrays that a simulated engine reads (NPZ).

    prefill_isl[n]  ─▶ prefill_ttft_ms[n]                                  prompt tokens ─▶ ms to the first token
    decode_active_kv_tokens[a] × decode_context_length[c] ─▶ decode_itl[a, c]     ms between two tokens
    pass_ms                                                                ms of fixed cost of a pass, included in both

The format is that of NVIDIA Dynamo's mocker: all arrays are float64, axes strictly increase, and readers interpolate linearly.
`pass_ms` is an extension, which Dynamo ignores.

A sweep measures batches of several sizes at several context lengths. The duration of a decode step is nearly linear in the batch
size and the context length. It is not linear in the active tokens and the context length, because the batch size is their
quotient. So values are interpolated by batch size and context length, and written on a finer grid than the measured one, which
starts at a single token. Readers extrapolate from the edge of the grid. So below one request, and below the shortest measured
context, the time is constant. Above the largest measured batch the last line continues, but never downwards.

Other work on the machine can only add time. So the time of a prompt is at most the time measured for any longer prompt.
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
    """Return the arrays of a profile by name, without `pass_ms` if `beside` is empty. Raise TooFewPoints."""
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
    """Return the fixed cost of a pass: the time in ms that is saved if a prompt and a token are computed in one pass.

    `isl` and `ttft` give the time of a prompt alone. The result is at most the time of either alone, and at least 0.
    """
    alone = [float(np.interp(point.tokens, isl, ttft)) for point in beside]
    saved = [ms + point.other_ms - point.step_ms for ms, point in zip(alone, beside, strict=True)]
    most = min(*alone, float(np.median([point.other_ms for point in beside])))
    return min(max(0.0, float(np.median(saved))), most)


_Column = tuple[float, Array, Array]  # context length, batch sizes, time between tokens for each


def _columns(decode: Sequence[DecodePoint]) -> list[_Column]:
    """Return one column per context length of the sweep, sorted by the actual mean context length.

    Of columns with nearly equal lengths, only the first is kept.
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
    """Return an axis that contains the measured values and GRID geometrically spaced values, from 1 or less to the largest."""
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
