"""How long does one pass of an engine take?

    prefill   of so many new prompt tokens
    decode    of a batch, by how full the KV cache is (the polynomials), or by the tokens of all and of each (a profile)

Two published polynomials, and what `holdfast profile` has measured of a running engine (an NPZ file). Milliseconds.

Both parts were measured apart, and each has in it what a pass costs for itself. A profile may say how much that is
(`pass_ms`); then it counts once in a pass, however many prompts there are beside those who decode. A later chunk of a prompt,
and what a prefix cache leaves of it, takes what it adds to the prompt's time: it looks back at all that was computed before.
"""

import zipfile
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from events.errors import UsageError
from workers.engines.simulated.plan import StepPlan

AXES = ("prefill_isl", "decode_active_kv_tokens", "decode_context_length")
KEYS = (*AXES, "prefill_ttft_ms", "decode_itl")
PASS = "pass_ms"  # not in every profile
DECODE_MS_MIN = 1.0
NUMBER_MAX = 1e12  # tokens, or milliseconds: thirty years
BYTES_MAX = 16 << 20  # of a profile, unpacked; `holdfast profile` writes 30 kB


class BadProfile(UsageError):
    """A profile of an engine's speed that cannot be used."""


class PerfModel(Protocol):
    """How long a pass takes."""

    def prefill_ms(self, plan: StepPlan) -> float:
        """Return what the prompts of a pass take, on top of those who decode; 0 for none."""
        ...

    def decode_ms(self, plan: StepPlan) -> float:
        """Return what one more token for each request takes, at least 1 ms; 0 without requests."""
        ...


@dataclass(frozen=True, slots=True)
class Polynomial:
    """c2·x² + c1·x + c0 for each: x are the new tokens, and the share of the KV blocks that requests hold."""

    prefill: tuple[float, float, float]
    decode: tuple[float, float, float]
    each: bool  # whether prompts are added up request by request, or computed as one

    def prefill_ms(self, plan: StepPlan) -> float:
        prompts = plan.prefills if self.each else (plan.prefill_tokens,)
        return sum(max(0.0, _value(self.prefill, tokens)) for tokens in prompts if tokens)

    def decode_ms(self, plan: StepPlan) -> float:
        if not plan.decodes:
            return 0.0
        share = plan.active_blocks / plan.total_blocks if plan.total_blocks else 1.0
        return max(DECODE_MS_MIN, _value(self.decode, share))


# Dynamo's mocker had the first set until the autumn of 2025, and has the second one since.
POLYNOMIALS: Mapping[Literal["polynomial", "polynomial-v2"], Polynomial] = {
    "polynomial": Polynomial((1.25e-6, 7.41e-2, 26.2), (-5.47, 43.88, 19.44), each=True),
    "polynomial-v2": Polynomial((4.209989e-07, 1.518344e-02, 16.50142), (-25.74, 54.01, 5.74), each=False),
}


class Interpolated:
    """Straight lines between measured points, and on beyond them."""

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        """Take the five arrays of a profile. Raise BadProfile, and say what is wrong."""
        if missing := [key for key in KEYS if key not in arrays]:
            raise BadProfile(f"it has no {', '.join(missing)}; a profile has {', '.join(KEYS)}")
        found = {key: _numbers(key, arrays[key]) for key in KEYS}
        shapes = {key: found[key].shape for key in KEYS}
        for key in AXES:
            if len(shapes[key]) != 1 or shapes[key][0] < 2 or not (found[key][1:] > found[key][:-1]).all():
                raise BadProfile(f"{key} must be a list of at least two numbers, each above the one before")
        wanted = {
            "prefill_ttft_ms": shapes["prefill_isl"],
            "decode_itl": shapes["decode_active_kv_tokens"] + shapes["decode_context_length"],
        }
        for key, shape in wanted.items():
            if shapes[key] != shape:
                raise BadProfile(f"{key} has the shape {shapes[key]}, and its axes ask for {shape}")
        self._isl, self._active, self._context, self._ttft, self._itl = (found[key].tolist() for key in KEYS)
        each = _numbers(PASS, arrays.get(PASS, 0.0))
        if each.size != 1:
            raise BadProfile(f"{PASS} must be one number")
        self._pass = float(each.item())

    @classmethod
    def load(cls, path: Path) -> "Interpolated":
        """Read a profile. Raise BadProfile."""
        import numpy as np  # a fifth of a worker's start, which others need not wait for

        try:
            if not path.is_file():  # not even opened: a pipe would wait for ever
                raise BadProfile("it is no file" if path.exists() else "there is no such file")
            unpacked = path.stat().st_size
            if unpacked <= BYTES_MAX:
                with zipfile.ZipFile(path) as packed:
                    unpacked = sum(one.file_size for one in packed.infolist())
            if unpacked > BYTES_MAX:
                raise BadProfile(f"it holds more than {BYTES_MAX >> 20} MiB, and no profile does")
            with np.load(path, allow_pickle=False) as arrays:
                return cls({key: arrays[key] for key in (*KEYS, PASS) if key in arrays.files})
        except BadProfile as error:
            raise BadProfile(f"{path}: {error}") from error
        except Exception as error:  # whatever a parser says of what is no NPZ, or was one
            raise BadProfile(f"{path}: it cannot be read as NPZ: {error or type(error).__name__}") from error

    def prefill_ms(self, plan: StepPlan) -> float:
        if not plan.prefills:
            return 0.0
        starts = plan.starts or (0,) * len(plan.prefills)
        each = (
            self._chunk(start, count, first=place >= plan.later) - self._pass
            for place, (start, count) in enumerate(zip(starts, plan.prefills, strict=True))
        )
        return sum(max(0.0, ms) for ms in each) + (0.0 if plan.decodes else self._pass)

    def decode_ms(self, plan: StepPlan) -> float:
        if not plan.decodes:
            return 0.0
        row, down = _between(self._active, plan.context_tokens)
        column, across = _between(self._context, plan.context_tokens // plan.decodes)
        (a, b), (c, d) = (self._itl[at][column : column + 2] for at in (row, row + 1))
        left, right = a + down * (c - a), b + down * (d - b)
        return float(max(DECODE_MS_MIN, left + across * (right - left)))

    def _chunk(self, start: int, count: int, *, first: bool) -> float:
        """Return what so many tokens take of a prompt whose first `start` tokens are there.

        Where these were found in a cache, the pass costs for itself as well. A later chunk's own pass is part of what was
        measured: the prompts of the engine that was measured were cut, too.
        """
        alone = self._line(count)
        if not start:
            return alone
        return max(alone, self._line(start + count) - self._line(start) + (self._pass if first else 0.0))

    def _line(self, tokens: int) -> float:
        place, share = _between(self._isl, tokens)
        below, above = self._ttft[place : place + 2]
        return float(below + share * (above - below))


def _value(coefficients: tuple[float, float, float], x: float) -> float:
    square, linear, constant = coefficients
    return (square * x + linear) * x + constant


def _between(axis: Sequence[float], x: float) -> tuple[int, float]:
    """Return the interval that x lies in, or the nearest, and how far along it."""
    place = min(max(bisect_right(axis, x) - 1, 0), len(axis) - 2)
    return place, (x - axis[place]) / (axis[place + 1] - axis[place])


def _numbers(key: str, array: Any) -> Any:
    """Return an array of floats. Raise BadProfile if they are none, or below 0, or without end."""
    import numpy as np

    found = np.asarray(array)
    if found.dtype.kind not in "fiu":  # neither text that looks like numbers, nor complex ones
        raise BadProfile(f"{key} does not hold numbers")
    with np.errstate(over="ignore"):
        found = found.astype(np.float64)
    if not ((found >= 0) & (found <= NUMBER_MAX)).all():  # NaN is neither
        raise BadProfile(f"{key} holds a number that is below 0, above {NUMBER_MAX:g} or not finite")
    return found
