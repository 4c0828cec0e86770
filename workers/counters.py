"""The counts of a worker's own work, which become metrics at scrape time, and the account of a drain.

Canaries are not users' requests and are not counted; their tokens are.
"""

from bisect import bisect_left
from dataclasses import dataclass, field

from events.wire import ERRORS

DURATION_BOUNDS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)

STOP_BOUNDS_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56)
LEAVING = "engine_shutdown"  # the error that sends a stream elsewhere
DIRECTIONS = ("in", "out")
OUTCOMES = ("committed", "declined", "failed")
CONNECTION_BOUNDS = (
    "connections",
    "connections_of_address",
    "connections_unused",
    "connections_of_address_unused",
    "hello_wait",
)


@dataclass(frozen=True, slots=True)
class Ends:
    """How users' streams have ended, each in one of four ways."""

    completed: int = 0
    migrated: int = 0  # they went on elsewhere, or were told to
    cancelled: int = 0  # no frontend read them any more
    failed: int = 0  # with an error

    def __sub__(self, earlier: "Ends") -> "Ends":
        return Ends(
            self.completed - earlier.completed,
            self.migrated - earlier.migrated,
            self.cancelled - earlier.cancelled,
            self.failed - earlier.failed,
        )


@dataclass(slots=True)
class WorkerCounters:
    """One worker's counts since it started."""

    requests: int = 0
    strangers: int = 0  # connections that were refused for want of the fleet's key
    tokens: int = 0
    cancelled: int = 0
    left: int = 0  # computed again elsewhere, though nothing had failed here
    completed: int = 0
    errors: dict[str, int] = field(default_factory=dict)  # by reason
    durations: list[int] = field(default_factory=lambda: [0] * (len(DURATION_BOUNDS_S) + 1))  # per bucket
    duration_sum_s: float = 0.0
    moves: dict[tuple[str, str], int] = field(default_factory=dict)  # by direction and outcome
    moved_bytes: dict[str, int] = field(default_factory=dict)  # by direction
    stops: list[int] = field(default_factory=lambda: [0] * (len(STOP_BOUNDS_S) + 1))  # per bucket
    stop_sum_s: float = 0.0
    connections_refused: dict[str, int] = field(default_factory=dict)  # by bound

    def refused(self, bound: str) -> None:
        """Count a connection that was broken at a bound."""
        self.connections_refused[bound] = self.connections_refused.get(bound, 0) + 1

    def finished(self, lasted_s: float) -> None:
        """Count an answer that came to its end."""
        self.completed += 1
        self.duration_sum_s += lasted_s
        self.durations[bisect_left(DURATION_BOUNDS_S, lasted_s)] += 1

    def dropped(self, why: str, lasted_s: float) -> None:
        """Count a stream that its frontend reads no more: because it had all it wanted, computes it elsewhere, or has gone."""
        if why == "complete":
            self.finished(lasted_s)
        elif why in ("elsewhere", "drained"):
            self.left += 1
        else:
            self.cancelled += 1

    @property
    def ends(self) -> Ends:
        """How streams have ended until now."""
        told = self.errors.get(LEAVING, 0)
        moved = self.moves.get(("out", "committed"), 0)
        failed = sum(self.errors.values()) - told
        return Ends(self.completed, moved + self.left + told, self.cancelled, failed)

    def moved(self, direction: str, outcome: str, size: int = 0, stopped_s: float | None = None) -> None:
        """Count a planned move: `in` or `out`; declined, failed after it began, or committed, and then how large."""
        self.moves[direction, outcome] = self.moves.get((direction, outcome), 0) + 1
        if outcome == "committed":
            self.moved_bytes[direction] = self.moved_bytes.get(direction, 0) + size
        if stopped_s is not None:
            self.stop_sum_s += stopped_s
            self.stops[bisect_left(STOP_BOUNDS_S, stopped_s)] += 1

    def failed(self, error: str) -> None:
        """Count a stream that ended with an error."""
        reason = error.partition(":")[0]
        if reason not in ERRORS:  # a label has few values
            reason = "engine_error"
        self.errors[reason] = self.errors.get(reason, 0) + 1


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why new requests are turned away. Canaries are let through while the worker may come back."""

    reason: str
    canaries_too: bool


class DrainState:
    """One worker's refusal of new requests, and its account of the streams that ended under it.

    A drain begins with the command to the worker; or before that, with the first stream that a frontend, which has read of the
    drain sooner, takes away for it.
    """

    def __init__(self, counters: WorkerCounters) -> None:
        """Take everything. `counters` count how streams end."""
        self.refusal: Refusal | None = None
        self.deregistered = False  # frontends are told to send nothing more; what is on its way is taken
        self._counters = counters
        self._before: Ends | None = None  # when it began to drain, or had last said how it goes
        self._drained_by: set[str] = set()  # frontends that drain it, before it was told to drain

    @property
    def draining(self) -> bool:
        """Whether frontends are told to send nothing new."""
        return self.deregistered or self.refusal is not None

    def refuses(self, canary: bool) -> str:
        """Return why a request is turned away; empty: it is taken."""
        refusal = self.refusal
        return refusal.reason if refusal and (refusal.canaries_too or not canary) else ""

    def deregister(self) -> None:
        """Have frontends told to send nothing more."""
        self._begin()
        self.deregistered = True

    def refuse(self, refusal: Refusal | None) -> None:
        """Turn new requests away from now on (None: no longer)."""
        self.refusal = refusal
        if refusal is None:
            self._before = None
        else:
            self._begin()

    def _begin(self) -> None:
        """From now on this worker drains, unless a frontend has drained it already."""
        self._before = self._before or self._counters.ends
        self._drained_by.clear()

    def taken_away_by(self, frontend: str) -> None:
        """Note that a frontend takes a stream away for a drain: if it has heard of it first, the drain begins now."""
        if not self.draining:
            self._before = self._before or self._counters.ends
            self._drained_by.add(frontend)

    def asked_by(self, frontend: str) -> None:
        """Note a request: of a frontend that drains this worker, the drain was taken back before this worker heard of it."""
        if frontend in self._drained_by:
            self._drained_by.clear()
            self._before = None

    def drained(self) -> Ends:
        """Return how streams have ended since the drain began, or since this was last asked."""
        now = self._counters.ends
        before, self._before = self._before or now, now
        return now - before
