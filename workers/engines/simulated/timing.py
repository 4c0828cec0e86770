"""Computes the durations of the simulated engine's forward passes, and tracks moves of requests.

There are three kinds of timings:

    constant      a fixed time per decode pass, plus a fixed time per prompt token; with --itl-ms, and by default in `holdfast up`
    model         the time of a performance model, divided by a speed-up
    tiered        a constant or model timing, plus the time to copy KV blocks between the tiers

A performance model computes the duration of a pass, in milliseconds, as the sum of two parts:

    prefill   from the number of new prompt tokens
    decode    from the usage of the KV cache (polynomials), or from the total and the mean context length (profiles)

A performance model is one of two published polynomials, or a profile (an NPZ file) that `holdfast profile` has measured on a
running engine. The two parts of a profile were measured separately, and each contains the fixed cost of a pass. If the profile
contains that cost (`pass_ms`), the cost counts only once per pass, however many prompts and decoding requests the pass has.

If the first tokens of a prompt were cached or computed in an earlier pass, the time of the rest is a difference: the time of the
whole prompt minus the time of these first tokens. The reason is that the rest attends to all earlier tokens.
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
NUMBER_MAX = 1e12  # largest number in a profile, in tokens or milliseconds (30 years)
BYTES_MAX = 16 << 20  # maximum size of an unpacked profile; `holdfast profile` writes 30 kB
PREFILL_TOKENS_PER_S = 200_000.0  # default if decode steps take time: about an 8B model on a recent GPU
# in the profile if prefill takes no time: about the speed of one core
FLAT_OUT_PREFILL_TOKENS_PER_S = 5_000_000.0
FLAT_OUT_TOKEN_MS = 0.001  # time per token in the profile if steps have no duration
SLOWED_STEP_S = 0.001  # the fault `slow` treats a shorter step as a step of this duration


class StepPlan(NamedTuple):
    """The work of one forward pass."""

    prefill_tokens: int = 0  # number of prompt tokens that the pass computes
    decodes: int = 0  # number of requests that get one more token
    # for each request in prefill, the number of prompt tokens that the pass computes
    prefills: tuple[int, ...] = ()
    active_blocks: int = 0  # KV blocks held by requests
    total_blocks: int = 0
    context_tokens: int = 0  # sum of the context lengths of all decoding requests
    traffic: TierTraffic = TierTraffic()  # KV blocks that move between the tiers
    # for each entry of `prefills`, the number of tokens computed or cached before; empty: 0 for all
    starts: tuple[int, ...] = ()
    later: int = 0  # number of leading entries of `prefills` that are not the first chunk of their prompt

    @property
    def idle(self) -> bool:
        return not self.prefill_tokens and not self.decodes


class BadProfile(UsageError):
    """A profile of an engine's speed that cannot be used."""


class PerfModel(Protocol):
    """Computes the duration of a pass, as the sum of a prefill and a decode part."""

    def prefill_ms(self, plan: StepPlan) -> float:
        """Return the milliseconds that the prompts of a pass add to the pass's decode part; 0 if there are no prompts."""

    def decode_ms(self, plan: StepPlan) -> float:
        """Return the milliseconds (at least 1) to generate one token for each decoding request; 0 if no request decodes."""


@dataclass(frozen=True, slots=True)
class Polynomial:
    """Computes each part of a pass's duration by a polynomial c2·x² + c1·x + c0, in milliseconds.

    For prefill, x is the number of new prompt tokens. For decode, x is the share of the KV blocks that requests hold.
    """

    prefill: tuple[float, float, float]  # c2, c1, c0
    decode: tuple[float, float, float]  # c2, c1, c0
    each: bool  # True: the times of the prompts are added up; False: all prompts of a pass count as one

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
    """Computes the durations of passes from a profile, by linear interpolation between its measured points.

    Beyond the measured points, the durations are extrapolated.
    """

    def __init__(self, arrays: Mapping[str, object]) -> None:
        """Use the arrays of a profile, by the names in KEYS. `pass_ms` is optional. Raise BadProfile if an array is invalid."""
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
        """Read a profile from an NPZ file. Raise BadProfile if the file cannot be read or is invalid."""
        import numpy as np  # imported only where it is needed, because the import takes a fifth of a worker's start time

        try:
            if not path.is_file():  # checked before the file is opened, because a pipe would block for ever
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
        """Return the duration in milliseconds of computing `count` tokens of a prompt after its first `start` tokens.

        The duration is the measured time of a prompt that ends after the chunk, minus that of a prompt that ends before the
        chunk. It is at least the measured time of a prompt of `count` tokens.

        `first` means that no earlier chunk of the prompt was computed: the `start` tokens were found in the prefix cache. The
        fixed cost of a pass is then added to the difference. For a later chunk, the difference already contains this cost,
        because the measured engine also split its prompts into chunks.
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
    """Return the interval of `axis` that contains `x` or is nearest to it, and the position of `x` in that interval.

    The interval is given by the index of its lower end. The position is 0 at the lower end and 1 at the upper end. If `x` is
    outside of the axis, the position is below 0 or above 1.
    """
    place = min(max(bisect_right(axis, x) - 1, 0), len(axis) - 2)
    return place, (x - axis[place]) / (axis[place + 1] - axis[place])


def _numbers(key: str, array: object) -> Any:
    """Return an array as floats. Raise BadProfile if it contains a value that is not a number from 0 to NUMBER_MAX (10¹²).

    `key` is the name of the array.
    """
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
    """Computes the durations of an engine's steps."""

    def step_s(self, plan: StepPlan) -> float:
        """Return the duration of a step with this plan in seconds. 0 means as fast as the machine allows."""

    def profile(self, shape: EngineShape) -> Profile:
        """Return the profile that a worker with this timing registers."""


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
    """A timing in which a decode step takes the same time for any batch, and a prompt takes a fixed time per token."""

    itl_s: float = 0.0  # seconds per decode step (inter-token latency)
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
    """A timing with the durations of a performance model, divided by `speedup`.

    The durations of decoding are divided by `decode_speedup`, too.
    """

    model: PerfModel
    speedup: float = 1.0
    decode_speedup: float = 1.0

    def step_s(self, plan: StepPlan) -> float:
        prefill = self.model.prefill_ms(plan) if plan.prefill_tokens else 0.0
        decode = self.model.decode_ms(plan) / self.decode_speedup
        return (prefill + decode) / self.speedup / 1e3

    def profile(self, shape: EngineShape) -> Profile:
        """Return the profile that a worker with this timing registers.

        The prefill speed is that of the longest prompt that fits into one pass. The times per token assume that each request
        holds `kv_blocks` / `batch_max` KV blocks.
        """
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
    """A timing that adds the cost of copying KV blocks between tiers to another timing.

    Blocks are fetched before the pass that needs them, so the time to fetch them is added to the pass. Evicted blocks are written
    during the pass. The pass becomes longer only if the writes take longer than the pass itself. Blocks from the disk are copied
    through host memory.
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
    """A request that is moving to another worker, or is prepared for such a move."""

    sequence: SampledSequence
    held: bool = False  # the request was removed from the batch, so that it gets no more tokens
    lost: str = ""  # the reason why the request cannot move any more; empty: it can
    # blocks kept for this departure after the request has released them
    pinned: list[int] = field(default_factory=list)

    @property
    def computed(self) -> int:
        """Number of tokens with KV in the blocks. The KV of the last token is not computed yet."""
        return self.sequence.length - 1


@dataclass(slots=True, eq=False)
class SimulatedArrival:
    """The reservation of blocks and of a batch slot for an arriving request."""

    key: int
    request: Generate
    room_tokens: int  # number of tokens for which blocks are reserved
    blocks: list[int]  # the reserved blocks
    cached_tokens: int  # number of tokens in blocks that were found in the prefix cache, and need not arrive
    # (TP rank, index of the block) -> the block's bytes; None: they were already compared and are right
    taken: dict[tuple[int, int], bytes | None] = field(default_factory=dict)
    named: bool = True  # full blocks of the request get names when it starts
    over: str = ""  # the reason why no more blocks can arrive; empty: they can


@dataclass(eq=False)
class SimulatedTransit:
    """Tracks the requests that move to or from other workers, and the KV blocks of these requests."""

    shape: EngineShape
    kv: KvManager
    batch: DecodeBatch  # the scheduler's running batch
    prefilling: Mapping[int, SimulatedSequence]  # the scheduler's requests in prefill
    trusted: bool = True  # other requests may reuse the blocks of requests that arrive
    _out: dict[int, SimulatedDeparture] = field(default_factory=dict)
    _in: dict[int, SimulatedArrival] = field(default_factory=dict)
    held: dict[int, SimulatedSequence] = field(default_factory=dict)

    @property
    def places(self) -> int:
        """Number of batch slots that are reserved: for arriving requests, and for requests stopped in order to move."""
        return len(self.held) + len(self._in)

    @property
    def empty(self) -> bool:
        """Whether no request moves to or from another worker, or is prepared to move."""
        return not (self._out or self._in)

    def leaving(self, key: int) -> bool:
        """Return whether a move of the request to another worker is prepared or under way, and can still succeed."""
        return (found := self._out.get(key)) is not None and not found.lost

    def depart(self, key: int) -> SimulatedDeparture | None:
        """Prepare a request's move to another worker, and return the object that tracks the move.

        Return None if the request does not decode, has no output yet, is a canary, or is already prepared to move. Also return
        None if MOVES_MAX (16) requests are already prepared to move.
        """
        sequence = self.batch.sequences.get(key)
        if not isinstance(sequence, SampledSequence) or sequence.fresh or sequence.canary:
            return None
        if key in self._out or len(self._out) >= MOVES_MAX:
            return None
        self._out[key] = made = SimulatedDeparture(sequence)
        return made

    def hold(self, departure: SimulatedDeparture) -> None:
        """Stop a request that moves to another worker: remove it from the batch. It keeps its blocks and its slot."""
        if not departure.lost and not departure.held:
            departure.held = True
            self.held[departure.sequence.key] = self.batch.leave(departure.sequence.key)

    def resume(self, departure: SimulatedDeparture) -> None:
        """Put a request that `hold` has stopped back into the batch. Has no effect on any other request."""
        if departure.held and not departure.lost:
            departure.held = False
            self.batch.enter(self.held.pop(departure.sequence.key))

    def close(self, departure: SimulatedDeparture) -> None:
        """End a request's move, and release the blocks kept for it. A request that `hold` has stopped decodes again."""
        self.resume(departure)
        departure.lost = departure.lost or "it has been closed"
        self.kv.release(departure.pinned)
        departure.pinned = []
        if self._out.get(departure.sequence.key) is departure:
            del self._out[departure.sequence.key]

    def release(self, sequence: SimulatedSequence, why: str) -> None:
        """Release the blocks of a request that has ended or is preempted, for the reason `why`.

        If the request is moving to another worker, the move fails, and the blocks are only released when the move is closed.
        """
        departure = self._out.get(sequence.key)
        if departure is None or departure.lost:
            self.kv.release(sequence.blocks)
        else:
            departure.lost, departure.pinned = why, sequence.blocks
        sequence.blocks = []

    def reserve(self, key: int, request: Generate, room_tokens: int) -> SimulatedArrival | str:
        """Reserve a slot and KV blocks for an arriving request, or return the reason for a refusal.

        `room_tokens` is the largest number of tokens that the request can have when it arrives.
        """
        if request.canary:
            return "a canary does not move"
        if len(self._in) >= MOVES_MAX:
            return f"overloaded: {MOVES_MAX} requests are on their way here already"
        if len(self.batch) + len(self.prefilling) + self.places >= self.shape.batch_max:
            return f"overloaded: all {self.shape.batch_max} places of the batch are taken"
        tokens, size = request.tokens, self.shape.block_tokens
        room_tokens = min(max(room_tokens, len(tokens)), self.shape.context_tokens)
        # The KV of the last token never arrives, because this worker computes it.
        names = prefix_names(tokens[:-1], request, size) if self._names else []
        found = self.kv.cached(names)
        blocks = names[:found] + self.kv.partials(-(-room_tokens // size) - found)
        if not self.kv.use(blocks):
            return f"overloaded: {self.kv.used} of {self.kv.total} KV blocks are in use"
        made = SimulatedArrival(key, request, room_tokens, blocks, found * size, named=self._names)
        self._in[key] = made
        return made

    def settle(self, arrival: SimulatedArrival, tokens: list[int]) -> None:
        """Add an arrived request to the batch, name its full blocks, and free the reserved blocks that it does not need yet.

        `tokens` are all tokens of the request.
        """
        sequence = SampledSequence(arrival.key, arrival.request, self.shape, tokens)
        size, blocks = self.shape.block_tokens, arrival.blocks
        full = (len(tokens) - 1) // size
        sequence.named = arrival.named
        if sequence.named:
            names, found = sequence.name_prefix(size), arrival.cached_tokens // size
            self.kv.promote_all(blocks[found:full], names[found:full], names[found - 1] if found else None)
            blocks[found:full] = names[found:full]
        self.kv.destroy(blocks[full + 1 :])
        sequence.blocks, sequence.fresh = blocks[: full + 1], False
        del self._in[arrival.key]
        arrival.over = "it has been committed"
        self.batch.enter(sequence)

    def forget(self, renamed: Mapping[int, int]) -> None:
        """Renumber the blocks of moving requests by `renamed` (old to new), so that no other request can find the blocks."""
        for sequence in self.held.values():
            sequence.forget(renamed)
        for departure in self._out.values():
            departure.pinned = [renamed.get(block, block) for block in departure.pinned]
        for arrival in self._in.values():
            arrival.blocks = [renamed.get(block, block) for block in arrival.blocks]
            arrival.named = False

    @property
    def _names(self) -> bool:
        return self.shape.prefix_caching and self.trusted

    def abort(self, arrival: SimulatedArrival, why: str = "it has been aborted") -> None:
        """Cancel the reservation of a request that will not arrive. Has no effect on a reservation that has ended."""
        if not arrival.over:
            arrival.over = why
            arrival.taken.clear()
            del self._in[arrival.key]
            self.kv.release(arrival.blocks)

    def cancel(self, key: int) -> None:
        """End a request's move to or from another worker, and free what was reserved for the move.

        A request that is stopped for the move is dropped, too.
        """
        if sequence := self.held.pop(key, None):
            self.release(sequence, "it has been cancelled")
        if departure := self._out.get(key):
            departure.lost = departure.lost or "it has been cancelled"
            self.close(departure)
        if arrival := self._in.get(key):
            self.abort(arrival, "it has been cancelled")

    def drop_all(self) -> None:
        """End all moves and free their blocks and slots."""
        for key in [*self._out, *self._in]:
            self.cancel(key)
