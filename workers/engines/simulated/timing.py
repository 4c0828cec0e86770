"""Durations of the simulated engine's passes: plans, performance models, and timings.

    constant      the same for every token and batch: --itl-ms, and the default of `up`
    model         the milliseconds of a performance model, divided by a speed-up
    tiered        either, plus the KV blocks that are copied between the tiers

A performance model has two parts, in milliseconds:

    prefill   of a number of new prompt tokens
    decode    of a batch, by the usage of the KV cache (the polynomials), or by the total and mean tokens (a profile)

A model is one of two published polynomials, or a profile (an NPZ file) that `holdfast profile` has measured on a running
engine. The two parts were measured separately, and each contains the fixed cost of a pass. If a profile states that cost
(`pass_ms`), it counts only once per pass, however many prompts accompany the decoding requests. A later chunk of a prompt, or
the rest after a prefix cache hit, takes the time that it adds to the whole prompt's, because it attends to all earlier tokens.
"""

import zipfile
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from events.errors import UsageError
from events.observations import Profile
from events.wire import Generate
from workers.engines.engine import MOVES_MAX
from workers.engines.simulated.kv_cache import KvManager, TierTraffic
from workers.engines.simulated.sequence import (
    DecodeBatch,
    EngineShape,
    SampledSequence,
    SimulatedSequence,
    prefix_names,
)

AXES = ("prefill_isl", "decode_active_kv_tokens", "decode_context_length")
KEYS = (*AXES, "prefill_ttft_ms", "decode_itl")
PASS = "pass_ms"  # the profile's array with the fixed cost of a pass; optional
DECODE_MS_MIN = 1.0
NUMBER_MAX = 1e12  # tokens, or milliseconds: thirty years
BYTES_MAX = 16 << 20  # maximum size of an unpacked profile; `holdfast profile` writes 30 kB
PREFILL_TOKENS_PER_S = 200_000.0  # if steps take time: about an 8B model on a recent GPU
FLAT_OUT_PREFILL_TOKENS_PER_S = 5_000_000.0  # for the profile only: about the speed of one core
FLAT_OUT_TOKEN_MS = 0.001
SLOWED_STEP_S = 0.001  # assumed duration of a step without one when it is slowed


class StepPlan(NamedTuple):
    """The work of one pass."""

    prefill_tokens: int = 0
    decodes: int = 0  # requests that get one more token
    prefills: tuple[int, ...] = ()  # the prompt tokens of each request
    active_blocks: int = 0  # KV blocks held by requests
    total_blocks: int = 0
    context_tokens: int = 0  # sum of the context lengths of all decoding requests
    traffic: TierTraffic = TierTraffic()  # KV blocks that move between the tiers
    # tokens of each of `prefills` that were computed or cached before; empty: none
    starts: tuple[int, ...] = ()
    later: int = 0  # how many of `prefills`, counted from the first, are later chunks of their prompt

    @property
    def idle(self) -> bool:
        return not self.prefill_tokens and not self.decodes


class BadProfile(UsageError):
    """A profile of an engine's speed that cannot be used."""


class PerfModel(Protocol):
    """The duration of a pass."""

    def prefill_ms(self, plan: StepPlan) -> float:
        """Return the duration of a pass's prompts, in addition to its decodes; 0 without prompts."""

    def decode_ms(self, plan: StepPlan) -> float:
        """Return the duration of one more token for each decoding request, at least 1 ms; 0 without such requests."""


@dataclass(frozen=True, slots=True)
class Polynomial:
    """c2·x² + c1·x + c0 each, with x the new tokens, and the share of the KV blocks held by requests."""

    prefill: tuple[float, float, float]
    decode: tuple[float, float, float]
    each: bool  # whether the durations of prompts are added up; otherwise all prompts count as one

    def prefill_ms(self, plan: StepPlan) -> float:
        prompts = plan.prefills if self.each else (plan.prefill_tokens,)
        return sum(max(0.0, _value(self.prefill, tokens)) for tokens in prompts if tokens)

    def decode_ms(self, plan: StepPlan) -> float:
        if not plan.decodes:
            return 0.0
        share = plan.active_blocks / plan.total_blocks if plan.total_blocks else 1.0
        return max(DECODE_MS_MIN, _value(self.decode, share))


# Dynamo's mocker used the first set until autumn 2025, and uses the second one since.
POLYNOMIALS: Mapping[Literal["polynomial", "polynomial-v2"], Polynomial] = {
    "polynomial": Polynomial((1.25e-6, 7.41e-2, 26.2), (-5.47, 43.88, 19.44), each=True),
    "polynomial-v2": Polynomial((4.209989e-07, 1.518344e-02, 16.50142), (-25.74, 54.01, 5.74), each=False),
}


class Interpolated:
    """Linear interpolation between measured points, extrapolated beyond them."""

    def __init__(self, arrays: Mapping[str, object]) -> None:
        """Use the five arrays of a profile. Raise BadProfile with the reason."""
        if missing := [key for key in KEYS if key not in arrays]:
            raise BadProfile(f"missing {', '.join(missing)}; a profile has {', '.join(KEYS)}")
        found = {key: _numbers(key, arrays[key]) for key in KEYS}
        shapes = {key: found[key].shape for key in KEYS}
        for key in AXES:
            if len(shapes[key]) != 1 or shapes[key][0] < 2 or not (found[key][1:] > found[key][:-1]).all():
                raise BadProfile(f"{key} must be a list of at least two increasing numbers")
        decode = shapes["decode_active_kv_tokens"] + shapes["decode_context_length"]
        for key, shape in (("prefill_ttft_ms", shapes["prefill_isl"]), ("decode_itl", decode)):
            if shapes[key] != shape:
                raise BadProfile(f"{key} has the shape {shapes[key]}, but its axes require {shape}")
        self._isl, self._active, self._context, self._ttft, self._itl = (found[key].tolist() for key in KEYS)
        each = _numbers(PASS, arrays.get(PASS, 0.0))
        if each.size != 1:
            raise BadProfile(f"{PASS} must be one number")
        self._pass = float(each.item())

    @classmethod
    def load(cls, path: Path) -> "Interpolated":
        """Read a profile. Raise BadProfile."""
        import numpy as np  # imported only where needed: the import takes a fifth of a worker's start time

        try:
            if not path.is_file():  # checked before it is opened: a pipe would block for ever
                raise BadProfile("it is not a file" if path.exists() else "there is no such file")
            unpacked = path.stat().st_size
            if unpacked <= BYTES_MAX:
                with zipfile.ZipFile(path) as packed:
                    unpacked = sum(one.file_size for one in packed.infolist())
            if unpacked > BYTES_MAX:
                raise BadProfile(f"it has more than {BYTES_MAX >> 20} MiB, more than any profile")
            with np.load(path, allow_pickle=False) as arrays:
                return cls({key: arrays[key] for key in (*KEYS, PASS) if key in arrays.files})
        except BadProfile as error:
            raise BadProfile(f"{path}: {error}") from error
        except Exception as error:  # parsers raise many kinds of errors for invalid or damaged NPZ files
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
        """Return the duration of `count` tokens of a prompt after its first `start` tokens.

        If the first tokens were found in a cache, add the cost of a pass. The pass of a later chunk is already part of the
        measurement, because the measured engine also split its prompts into chunks.
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
    """Return the interval of `x`, or the nearest one, and the fraction of it below `x`."""
    place = min(max(bisect_right(axis, x) - 1, 0), len(axis) - 2)
    return place, (x - axis[place]) / (axis[place + 1] - axis[place])


def _numbers(key: str, array: object) -> Any:
    """Return an array as floats. Raise BadProfile if it contains anything but finite numbers of at least 0."""
    import numpy as np

    found = np.asarray(array)
    if found.dtype.kind not in "fiu":  # rejects text that looks like numbers, and complex numbers
        raise BadProfile(f"{key} does not hold numbers")
    with np.errstate(over="ignore"):
        found = found.astype(np.float64)
    if not ((found >= 0) & (found <= NUMBER_MAX)).all():  # NaN fails both comparisons
        raise BadProfile(f"{key} holds a number that is below 0, above {NUMBER_MAX:g} or not finite")
    return found


class Timing(Protocol):
    """The durations of an engine's steps."""

    def step_s(self, plan: StepPlan) -> float:
        """Return the duration of a step on `plan` in seconds; 0: as fast as the machine allows."""

    def profile(self, shape: EngineShape) -> Profile:
        """Return the profile that a worker of this speed registers."""


def _profile(shape: EngineShape, prefill_tokens_per_s: float, tpot_ms: Mapping[int, float]) -> Profile:
    return Profile(
        kv_blocks=shape.kv_blocks,
        block_tokens=shape.block_tokens,
        max_batch=shape.batch_max,
        prefill_tokens_per_s=prefill_tokens_per_s,
        tpot_ms=tuple(tpot_ms.items()),
        prefill_tokens_max=shape.prefill_tokens_max,
    )


@dataclass(frozen=True, slots=True)
class ConstantTiming:
    """A decode step takes the same time for any batch; prompts take time in proportion to their tokens."""

    itl_s: float = 0.0
    prefill_tokens_per_s: float = 0.0  # 0: prefill takes no time

    def step_s(self, plan: StepPlan) -> float:
        prefill = plan.prefill_tokens / self.prefill_tokens_per_s if self.prefill_tokens_per_s else 0.0
        return prefill + (self.itl_s if plan.decodes else 0.0)

    def profile(self, shape: EngineShape) -> Profile:
        tpot_ms = {
            batch: self.itl_s * 1e3 or FLAT_OUT_TOKEN_MS * max(10, batch) for batch in (1, shape.batch_max)
        }
        return _profile(shape, self.prefill_tokens_per_s or FLAT_OUT_PREFILL_TOKENS_PER_S, tpot_ms)


@dataclass(frozen=True, slots=True)
class ModelTiming:
    """A performance model's durations, divided by `speedup`, and for decoding by `decode_speedup` as well."""

    model: PerfModel
    speedup: float = 1.0
    decode_speedup: float = 1.0

    def step_s(self, plan: StepPlan) -> float:
        prefill = self.model.prefill_ms(plan) if plan.prefill_tokens else 0.0
        decode = self.model.decode_ms(plan) / self.decode_speedup
        return (prefill + decode) / self.speedup / 1e3

    def profile(self, shape: EngineShape) -> Profile:
        """Return the profile for a full batch of requests that share the blocks equally, and for prompts of one pass."""
        prompt = min(shape.prefill_tokens_max, shape.context_tokens)
        prefill_s = self.step_s(StepPlan(prompt, 0, (prompt,)))
        batches = sorted({max(1, shape.batch_max * quarter // 4) for quarter in range(5)})
        tpot_ms = {batch: self._tpot_ms(batch, shape) for batch in batches}
        return _profile(shape, prompt / max(prefill_s, 1e-9), tpot_ms)

    def _tpot_ms(self, batch: int, shape: EngineShape) -> float:
        blocks = shape.kv_blocks * batch // shape.batch_max
        tokens = min(blocks * shape.block_tokens, batch * shape.context_tokens)
        return self.step_s(StepPlan(0, batch, (), blocks, shape.kv_blocks, tokens)) * 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class TieredTiming:
    """A timing with the cost of moving KV blocks between tiers.

    Blocks are fetched before the pass that needs them. Evicted blocks are written during the pass, and delay it only if that
    takes longer. Blocks from the disk pass through the host's memory.
    """

    timing: Timing
    block_bytes: int
    host_bytes_per_s: float
    disk_bytes_per_s: float

    def step_s(self, plan: StepPlan) -> float:
        lasts, moved = self.timing.step_s(plan), plan.traffic
        if not any(moved):
            return lasts
        host, disk = self.block_bytes / self.host_bytes_per_s, self.block_bytes / self.disk_bytes_per_s
        fetched = moved.from_host * host + moved.from_disk * (disk + host)
        return fetched + max(lasts, moved.to_host * host + moved.to_disk * disk)

    def profile(self, shape: EngineShape) -> Profile:
        return self.timing.profile(shape)


@dataclass(slots=True, eq=False)
class SimulatedDeparture:
    """A request that may move to another worker."""

    sequence: SampledSequence
    held: bool = False  # the request produces no more output
    lost: str = ""  # the reason why the request cannot move any more
    pinned: list[int] = field(default_factory=list)  # blocks that the request itself no longer holds

    @property
    def computed(self) -> int:
        """Tokens with KV in the blocks: all but the last generated one, which has yet to go through the model."""
        return self.sequence.length - 1


@dataclass(slots=True, eq=False)
class SimulatedArrival:
    """The reservation for an arriving request."""

    key: int
    request: Generate
    room_tokens: int
    blocks: list[int]
    cached_tokens: int
    # (rank, block) -> arrived bytes; None: already compared and found right
    taken: dict[tuple[int, int], bytes | None] = field(default_factory=dict)
    named: bool = True  # the request's full blocks will have names
    over: str = ""  # the reason why no more blocks can arrive


class SimulatedTransit:
    """The requests that move in or out. `batch` and `prefilling` are the scheduler's objects."""

    def __init__(
        self,
        shape: EngineShape,
        kv: KvManager,
        batch: DecodeBatch,
        prefilling: Mapping[int, SimulatedSequence],
    ) -> None:
        self._prefilling = prefilling
        self._shape = shape
        self._kv = kv
        self._batch = batch
        self.trusted = True  # blocks may be found by other requests
        self._out: dict[int, SimulatedDeparture] = {}
        self._in: dict[int, SimulatedArrival] = {}
        self.held: dict[int, SimulatedSequence] = {}

    @property
    def places(self) -> int:
        """Number of batch slots that are reserved for held and for arriving requests."""
        return len(self.held) + len(self._in)

    @property
    def empty(self) -> bool:
        """Whether no request is moving, in or out."""
        return not (self._out or self._in)

    def leaving(self, key: int) -> bool:
        """Whether a request may still move to another worker."""
        return (found := self._out.get(key)) is not None and not found.lost

    def depart(self, key: int) -> SimulatedDeparture | None:
        """Begin the departure of a decoding request."""
        sequence = self._batch.sequences.get(key)
        if not isinstance(sequence, SampledSequence) or sequence.fresh or sequence.canary:
            return None
        if key in self._out or len(self._out) >= MOVES_MAX:
            return None
        self._out[key] = made = SimulatedDeparture(sequence)
        return made

    def hold(self, departure: SimulatedDeparture) -> None:
        """Remove a request from the batch; it keeps its blocks."""
        if not departure.lost and not departure.held:
            departure.held = True
            self.held[departure.sequence.key] = self._batch.leave(departure.sequence.key)

    def resume(self, departure: SimulatedDeparture) -> None:
        """Return a held request to the batch."""
        if departure.held and not departure.lost:
            departure.held = False
            self._batch.enter(self.held.pop(departure.sequence.key))

    def close(self, departure: SimulatedDeparture) -> None:
        """Release the blocks of a departure; a held request continues here."""
        self.resume(departure)
        departure.lost = departure.lost or "it has been closed"
        self._kv.release(departure.pinned)
        departure.pinned = []
        if self._out.get(departure.sequence.key) is departure:
            del self._out[departure.sequence.key]

    def release(self, sequence: SimulatedSequence, why: str) -> None:
        """Free the blocks of a request that has ended or is preempted. If it is departing, its departure keeps them."""
        departure = self._out.get(sequence.key)
        if departure is None or departure.lost:
            self._kv.release(sequence.blocks)
        else:
            departure.lost, departure.pinned = why, sequence.blocks
        sequence.blocks = []

    def reserve(self, key: int, request: Generate, room_tokens: int) -> SimulatedArrival | str:
        """Reserve the blocks for a request that will have grown to `room_tokens` tokens, or return the reason for a refusal."""
        if request.canary:
            return "a canary does not move"
        if len(self._in) >= MOVES_MAX:
            return f"overloaded: {MOVES_MAX} requests are on their way here already"
        if len(self._batch) + len(self._prefilling) + self.places >= self._shape.batch_max:
            return f"overloaded: all {self._shape.batch_max} places of the batch are taken"
        tokens, size = request.tokens, self._shape.block_tokens
        room_tokens = min(max(room_tokens, len(tokens)), self._shape.context_tokens)
        # The last token's KV is computed here in any case.
        names = prefix_names(tokens[:-1], request, size) if self._names else []
        found = self._kv.cached(names)
        blocks = names[:found] + self._kv.partials(-(-room_tokens // size) - found)
        if not self._kv.use(blocks):
            return f"overloaded: {self._kv.used} of {self._kv.total} KV blocks are in use"
        made = SimulatedArrival(key, request, room_tokens, blocks, found * size, named=self._names)
        self._in[key] = made
        return made

    def settle(self, arrival: SimulatedArrival, tokens: list[int]) -> None:
        """Start an arrived request: name its full blocks, and free surplus blocks."""
        sequence = SampledSequence(arrival.key, arrival.request, self._shape, tokens)
        size, blocks = self._shape.block_tokens, arrival.blocks
        full = (len(tokens) - 1) // size
        sequence.named = arrival.named
        if sequence.named:
            names, found = sequence.name_prefix(size), arrival.cached_tokens // size
            self._kv.promote_all(blocks[found:full], names[found:full], names[found - 1] if found else None)
            blocks[found:full] = names[found:full]
        self._kv.destroy(blocks[full + 1 :])
        sequence.blocks, sequence.fresh = blocks[: full + 1], False
        del self._in[arrival.key]
        arrival.over = "it has been committed"
        self._batch.enter(sequence)

    def forget(self, renamed: Mapping[int, int]) -> None:
        """Replace the names of blocks in use by these, so that no other request can find them."""
        for sequence in self.held.values():
            sequence.forget(renamed)
        for departure in self._out.values():
            departure.pinned = [renamed.get(block, block) for block in departure.pinned]
        for arrival in self._in.values():
            arrival.blocks = [renamed.get(block, block) for block in arrival.blocks]
            arrival.named = False

    @property
    def _names(self) -> bool:
        return self._shape.prefix_caching and self.trusted

    def abort(self, arrival: SimulatedArrival, why: str = "it has been aborted") -> None:
        """Free the reservation of a request that does not arrive."""
        if not arrival.over:
            arrival.over = why
            arrival.taken.clear()
            del self._in[arrival.key]
            self._kv.release(arrival.blocks)

    def cancel(self, key: int) -> None:
        """Free the blocks and slots reserved for a key, in any state of the move."""
        if sequence := self.held.pop(key, None):
            self.release(sequence, "it has been cancelled")
        if departure := self._out.get(key):
            departure.lost = departure.lost or "it has been cancelled"
            self.close(departure)
        if arrival := self._in.get(key):
            self.abort(arrival, "it has been cancelled")

    def drop_all(self) -> None:
        """Free everything."""
        for key in [*self._out, *self._in]:
            self.cancel(key)
