"""The ports of the controller: protocols that adapters implement and tests replace with doubles.

The port of the journal is in `events.journal.port`.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, Protocol

from controller.deciders.fleet import Fleet
from controller.read_model.errors import StoreForbidden as StoreForbidden
from controller.read_model.errors import StoreRefused as StoreRefused
from controller.read_model.errors import StoreUnavailable as StoreUnavailable
from controller.router.endpoints import ConnectedWorkers
from controller.router.trust import TrustedSource
from events.decisions import PolicyAdopted
from events.errors import Finding, HoldfastError
from events.fact import Observation, Recorded
from events.json_types import Json, JsonView
from events.observations import (
    CapacityReported,
    GoldenAnswer,
    ScaleApplied,
    ScaleProposed,
    ScaleSet,
    TrafficReported,
)
from events.order import Last, Position
from events.wire import Chunk, Committed, Generate, Reserved, Why


class Clock(Protocol):
    """Time: real in a process, virtual in a test."""

    def now(self) -> datetime:
        """Return the current instant, aware and in UTC."""
        ...

    def monotonic(self) -> float:
        """Return the monotonic time, in seconds."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Sleep for `seconds`."""


class Observe(Protocol):
    """A callable that records a fact: `Journal.observe`, or a no-op where there is no journal."""

    def __call__(self, fact: Observation, *, traceparent: str = "") -> object:
        """Record one fact; `traceparent` is the trace of the client request that it belongs to, if any."""
        ...


# --- the state store ------------------------------------------------------------------------------------------------


class StoreAhead(HoldfastError):
    """The state store is ahead of the journal stream: it has folded events that the stream does not hold, so the stream was
    recreated or restored. Check which of the two is right; `holdfast replay rebuild` makes a fresh projection of the stream."""


class StoreLost(Finding):
    """The state store has lost a part of what was projected into it. `holdfast replay rebuild` rebuilds it from the journal;
    where `holdfast up` runs, it does so by itself."""


class AnotherProjector(HoldfastError):
    """Another projector has advanced the projection, so nothing was written. Read the position again and continue from there."""


@dataclass(frozen=True, slots=True)
class ReadPosition:
    """The position of the read model: its rows are the fold of all events up to `seq`."""

    seq: int = 0
    id: str = ""  # the ce-id of the event at `seq`: a recreated stream has another id at that sequence
    at: datetime | None = None  # the stream's timestamp of that event
    settled: Position = Position()
    deciders_version: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A settled fleet, its position, and the last event of each source."""

    fleet: Fleet
    position: Position
    sources: Mapping[str, Last]


@dataclass(frozen=True, slots=True)
class StoreLook:
    """The result of a quick check of a store for losses."""

    lost: tuple[str, ...] = ()  # tables that lack a required row
    first: int = 0  # sequence of the oldest kept event; 0: none is kept
    last: int = 0  # sequence of the newest kept event


CatchUp = Callable[[ReadPosition], Awaitable[None]]
"""Projects into a fresh projection up to the position of another one, which does not move while this runs."""


class StateStore(Protocol):
    """The read model: the projector writes it, the router and the planner read it."""

    async def load(self) -> Snapshot | None:
        """Return the settled state that was stored last; None if the store is empty."""
        ...

    async def position(self) -> ReadPosition:
        """Return the position of the rows. Raise StoreUnavailable."""
        ...

    async def project(self, events: Sequence[Recorded], shown: Fleet, settled: Snapshot, after: int) -> None:
        """Append `events` to `fleet_events`, upsert the shown rows and both positions, all in one transaction.

        `after` must be the store's current position: right before `events`, or before any event if the store is empty. Otherwise
        raise AnotherProjector and write nothing. Raise StoreUnavailable.
        """
        ...

    async def look(self) -> StoreLook:
        """Run a quick check for lost rows. Missing rows of the fleet's state are written again with the next batch."""
        ...

    async def locate(self, reference: str) -> int | None:
        """Return the sequence of the kept event with this ce-id, or of the decision `decision:N`."""
        ...

    async def snapshot_before(self, seq: int) -> Snapshot | None:
        """Return the latest kept snapshot that contains nothing after `seq`, for time travel."""
        ...

    async def snapshot_at(self, when: datetime) -> Snapshot | None:
        """Return the latest kept snapshot that contains nothing after `when`, by the stream's time."""
        ...

    async def read_status(self) -> "RowsRead":
        """Return the rows of the fleet's present state, the open incidents, and their position, as of one instant."""
        ...


class Archive(Protocol):
    """Reads the events in the store, selected by incident, worker or request. The journal is authoritative; the store is its
    index."""

    async def locate(self, reference: str) -> int | None:
        """Return the sequence of the event with this ce-id, or of the decision `decision:N`."""
        ...

    def select(
        self,
        *,
        after: int = 0,
        since: datetime | None = None,
        worker: str | None = None,
        incident: str | None = None,
        request: str | None = None,
    ) -> AsyncIterator[Sequence[Recorded]]:
        """Yield, in order, the events that match all given filters.

        `incident` selects events that carry the incident's id, `worker` those that concern the worker (`projection.concerns`),
        `request` those about one request.
        """
        ...


@dataclass(frozen=True, slots=True)
class RowsRead:
    """Rows of the read model as of one instant: table name to rows, each a mapping of column to value."""

    position: ReadPosition
    rows: Mapping[str, Sequence[JsonView]]


class PlanningStore(Protocol):
    """The planner's read access to the state store."""

    async def read_planning(self, after: int, since: datetime, limit: int) -> "PlanningRead":
        """Return all workers and the events that planning uses, as of one instant.

        Events: those above `after` and not older than `since`, oldest first, at most `limit`. `latest`: the last event of each
        kind that holds until replaced. Raise StoreUnavailable."""
        ...


@dataclass(frozen=True, slots=True)
class PlanningRead:
    """The planner's input, as of one instant."""

    position: ReadPosition
    workers: Sequence[JsonView]  # rows
    events: Sequence[Recorded]  # of PLANNED_BY
    latest: Sequence[Recorded]  # of LATEST: the last of each kind, and of each model where the kind has one


PLANNED_BY = (TrafficReported, CapacityReported, ScaleProposed, ScaleApplied)
LATEST = (ScaleSet, ScaleProposed, PolicyAdopted)


# --- workers, over the request plane ----------------------------------------------------------------------------------


class WorkerUnreachable(HoldfastError):
    """The worker cannot be connected to, or its connection broke."""


class Prober(Protocol):
    """Sends one request to one worker, over the same path as user requests."""

    def ask(self, worker: str, request: Generate) -> AsyncGenerator[Chunk]:
        """Yield the worker's chunks until one finishes. Raise WorkerUnreachable."""
        ...

    def others_work(self, worker: str, own_tokens: int, *, begun: bool) -> "OthersWork":
        """Return how the engine serves other requests, relative to ours of `own_tokens` tokens. `begun`: our answer has begun."""


LostCause = Literal["cannot_connect", "disconnected", "stalled"]
OthersWork = Literal[
    "", "beside", "before"
]  # the engine serves others beside ours, or before ours; empty: unknown


class Sink(Protocol):
    """The consumer of one stream. Called synchronously on the event loop; it must not block."""

    def take(self, chunk: Chunk) -> None:
        """Accept the output of one engine step. After `finish` or `error` no more chunks follow."""
        ...

    def flush(self) -> None:
        """Write out buffered output: this turn of the event loop has no more chunks for the stream."""
        ...

    def lost(self, cause: LostCause, detail: str) -> None:
        """Handle the loss of the stream: the worker cannot continue it. No more calls follow."""
        ...


class TransferSink(Sink, Protocol):
    """Carries one stream from its source to a target. As a sink it receives the target's chunks after the commit, until
    another sink adopts the stream; `lost` concerns only the connection to the target."""

    def reserved(self, frame: Reserved) -> None:
        """Handle the target's reservation of the room."""
        ...

    def declined(self, stream: int, why: str) -> None:
        """Handle the end of the move: the target has dropped its stream, or the source, which owns it, continues to decode."""
        ...

    def committed(self, frame: Committed) -> None:
        """Handle the target's commit: it decodes now, and its chunks follow."""
        ...


class RequestPlane(ConnectedWorkers, Protocol):
    """The request plane, as the frontend's scheduler and its streams use it. No call blocks."""

    def others_work(self, worker: str, own_tokens: int, *, begun: bool) -> OthersWork:
        """Return how the engine serves other requests: see `Prober.others_work`."""

    def open(self, worker: str, instance: str, request: Generate, sink: Sink) -> int:
        """Send a request and return its stream number, which is also set in `request`. Raise WorkerUnreachable."""
        ...

    def cancel(self, worker: str, stream: int, why: Why = "gone") -> None:
        """Drop a stream or a reservation, notify the worker, and ignore late frames. Unknown streams are ignored."""
        ...

    def draining(self, worker: str, instance: str) -> bool:
        """Return whether this instance is connected and has announced that it drains."""
        ...

    def reserve(self, worker: str, instance: str, request: Generate, room: int, carrier: TransferSink) -> int:
        """Request that a worker reserve `room` tokens for a request; return the new stream. Raise WorkerUnreachable."""
        ...

    def ship(self, source: TrustedSource, stream: int, offer: Reserved, carrier: TransferSink) -> None:
        """Instruct a worker to send a stream to the target that made this offer. Raise WorkerUnreachable."""
        ...

    def stay(self, worker: str, stream: int) -> None:
        """Instruct a worker to stop a stream's transfer and to continue decoding. Unknown streams are ignored."""
        ...

    def adopt(self, worker: str, stream: int, sink: Sink) -> None:
        """Attach another sink to a stream. Unknown streams are ignored."""
        ...


# --- operator commands ------------------------------------------------------------------------------------------------

Answer = Mapping[str, str]
"""`says`: what was done, or `error`: why it was refused."""


@dataclass(frozen=True, slots=True)
class Command:
    """An operator's command, its id, and its deadline."""

    id: str = ""  # chosen by the sender; a second command with the same id is a repetition of the first
    deadline: datetime | None = None  # by the clock that stamps the journal
    verb: str = ""
    worker: str = ""
    by: str = ""


NO_COMMAND = Command()


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenWish:
    """An operator's request about goldens. They are selected by a worker, a canary key or a model."""

    act: Literal["approve", "retire", "record"]
    worker: str = ""
    canary_key: str = ""
    model: str = ""
    canaries: tuple[str, ...] = ()  # empty: all of that key
    answers: tuple[GoldenAnswer, ...] = ()  # approve: the goldens that the operator supplies


class CommandGate(Protocol):
    """Decides whether a command is carried out by this controller."""

    async def carry_out(self, command: Command, act: Callable[[], Awaitable[object]]) -> Answer | None:
        """Run `act` and return the answer; None if another controller answers, or if the outcome is unknown. A HoldfastError that
        `act` raises is the reason of a refusal."""
        ...

    async def ours_to_answer(self) -> bool:
        """Return whether this controller answers a read-only query."""
        ...


class Control(Protocol):
    """The operator's commands, independent of the transport. Each returns one sentence on what was done, or raises a
    HoldfastError with the reason. The facts that follow carry the id and the deadline of `command`."""

    async def drain(
        self, worker: str, deadline_s: float | None, by: str, command: Command = NO_COMMAND
    ) -> str:
        """Drain a worker: its running requests may finish within `deadline_s` seconds (None: the policy's wait)."""
        ...

    async def resume(self, worker: str, by: str, command: Command = NO_COMMAND) -> str:
        """Return a worker to service after its next good canary."""
        ...

    async def move(self, worker: str, to: str, by: str, command: Command = NO_COMMAND) -> str:
        """Move a worker's running requests to `to`, or to the best worker if that is empty."""
        ...

    async def restart(self, worker: str, by: str, command: Command = NO_COMMAND) -> str:
        """Instruct a worker to shut down gracefully."""
        ...

    async def status(self) -> Json:
        """Return the fleet's status as plain JSON values."""
        ...


# --- scaling ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRequest:
    """A new number of workers for one model, as a planner has proposed it."""

    model: str
    before: int  # workers when it was proposed
    after: int  # proposed number of workers
    why: str  # up, down, lost, floor, operator
    proposal: str  # id of the ScaleProposed
    planner: str


@dataclass(frozen=True, slots=True)
class HookResult:
    """The outcome of a scaling call, as `ScaleApplied` reports it."""

    ok: bool
    says: str  # one line of printable characters, 300 at most: what was done, or why it failed


class ScaleHook(Protocol):
    """Starts and stops workers where `holdfast up` does not."""

    by: str  # as `ScaleApplied` names it: command, http

    async def scale(self, wanted: ScaleRequest) -> HookResult:
        """Scale the workers of a model to `wanted.after`.

        The call is idempotent, returns within the hook's deadline, and raises nothing if the other side fails. Success does not
        mean that the new workers serve already."""
        ...
