"""Counters of one worker: requests, moves of streams, connections, and ends of streams in a drain.

The admin port exports the counters as metrics. Canaries are not counted as requests, but their tokens are counted.
"""

from bisect import bisect_left
from dataclasses import astuple, dataclass, field
from operator import sub

from events.wire import ERRORS

DURATION_BOUNDS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)

STOP_BOUNDS_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56)
LEAVING = "engine_shutdown"  # the error that makes a frontend continue a stream on another worker
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
    """Counts of users' streams that have ended, by the way they ended. Each stream counts in exactly one field."""

    completed: int = 0
    migrated: int = 0  # continued on another worker, with or without its KV cache
    cancelled: int = 0  # no longer read by a frontend
    failed: int = 0  # with an error

    def __sub__(self, earlier: "Ends") -> "Ends":
        return Ends(*map(sub, astuple(self), astuple(earlier)))


@dataclass(slots=True)
class WorkerCounters:
    """Counts of one worker instance since it started."""

    requests: int = 0
    strangers: int = 0  # connections refused because the client did not know the fleet's key
    tokens: int = 0
    cancelled: int = 0
    left: int = 0  # streams that a frontend moved to another worker by recomputation, although this worker had not failed
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
        """Count a connection that was closed because of the limit `bound`, a name in CONNECTION_BOUNDS."""
        self.connections_refused[bound] = self.connections_refused.get(bound, 0) + 1

    def finished(self, lasted_s: float) -> None:
        """Count a stream that completed after `lasted_s` seconds."""
        self.completed += 1
        self.duration_sum_s += lasted_s
        self.durations[bisect_left(DURATION_BOUNDS_S, lasted_s)] += 1

    def dropped(self, why: str, lasted_s: float) -> None:
        """Count a stream that its frontend no longer reads.

        `why` is "complete" if the frontend has all the output that it needs. If the frontend moved the request to another
        worker, `why` is "elsewhere", or "drained" if the move was due to a drain. Any other reason counts as cancelled.
        """
        if why == "complete":
            self.finished(lasted_s)
        elif why in ("elsewhere", "drained"):
            self.left += 1
        else:
            self.cancelled += 1

    @property
    def ends(self) -> Ends:
        """The counts of users' ended streams since the worker started."""
        sent_elsewhere = self.errors.get(LEAVING, 0)
        moved = self.moves.get(("out", "committed"), 0)
        failed = sum(self.errors.values()) - sent_elsewhere
        return Ends(self.completed, moved + self.left + sent_elsewhere, self.cancelled, failed)

    def moved(self, direction: str, outcome: str, size: int = 0, stopped_s: float | None = None) -> None:
        """Count a planned move of a stream to this worker ("in") or away from it ("out").

        `outcome` is "declined", "failed" (after the move began) or "committed". `size` is the number of bytes that a committed
        move has transferred.
        `stopped_s` is the time in seconds for which the stream produced no tokens; None if it is not measured.
        """
        self.moves[direction, outcome] = self.moves.get((direction, outcome), 0) + 1
        if outcome == "committed":
            self.moved_bytes[direction] = self.moved_bytes.get(direction, 0) + size
        if stopped_s is not None:
            self.stop_sum_s += stopped_s
            self.stops[bisect_left(STOP_BOUNDS_S, stopped_s)] += 1

    def failed(self, error: str) -> None:
        """Count a stream that ended with `error`, by the reason: the text before the first colon of `error`.

        A reason that is not in ERRORS counts as engine_error.
        """
        reason = error.partition(":")[0]
        if reason not in ERRORS:  # keeps the number of label values small
            reason = "engine_error"
        self.errors[reason] = self.errors.get(reason, 0) + 1


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason why a worker refuses new requests, and whether it also refuses canaries.

    A worker that can return to service without a restart still accepts canaries.
    """

    reason: str
    canaries_too: bool


class DrainState:
    """Decides whether a worker refuses a new request, and counts the streams that end during a drain.

    Counting begins when the worker receives the drain command. A frontend may learn of the drain earlier, from the journal. In
    that case, counting begins when that frontend moves its first stream away.
    """

    def __init__(self, counters: WorkerCounters) -> None:
        """Start without a drain: every request is accepted. `counters` counts the ways in which streams end."""
        self.refusal: Refusal | None = None
        # whether frontends are notified to send no new requests; requests already in transit are still accepted
        self.deregistered = False
        self._counters = counters
        # counts at the start of the drain or at its last report; None: no drain
        self._before: Ends | None = None
        # frontends that moved streams away before the drain command arrived
        self._drained_by: set[str] = set()

    @property
    def draining(self) -> bool:
        """Whether the worker tells frontends to send no new requests."""
        return self.deregistered or self.refusal is not None

    def refuses(self, canary: bool) -> str:
        """Return why a new request is refused; empty if it is accepted. `canary` is true if the request is a canary."""
        refusal = self.refusal
        return refusal.reason if refusal and (refusal.canaries_too or not canary) else ""

    def deregister(self) -> None:
        """Begin a drain in which the worker tells frontends to send no new requests, but refuses none."""
        self._begin()
        self.deregistered = True

    def refuse(self, refusal: Refusal | None) -> None:
        """Refuse new requests for the reason `refusal`, or accept them again if `refusal` is None."""
        self.refusal = refusal
        if refusal is None:
            self._before = None
        else:
            self._begin()

    def _begin(self) -> None:
        """Start counting for the drain, unless counting began earlier because a frontend moved a stream away."""
        self._before = self._before or self._counters.ends
        self._drained_by.clear()

    def taken_away_by(self, frontend: str) -> None:
        """Record that `frontend` moves a stream away because of a drain.

        If the drain command has not arrived yet, start counting for the drain now.
        """
        if not self.draining:
            self._before = self._before or self._counters.ends
            self._drained_by.add(frontend)

    def note_request(self, frontend: str) -> None:
        """Record a request from `frontend`.

        A frontend sends no requests to a draining worker. If this frontend moved streams away before the drain command
        arrived, a new request therefore means that the drain was cancelled, and counting stops.
        """
        if frontend in self._drained_by:
            self._drained_by.clear()
            self._before = None

    def drained(self) -> Ends:
        """Return the counts of streams that ended since the drain began, or since the last call in this drain."""
        now = self._counters.ends
        before, self._before = self._before or now, now
        return now - before
