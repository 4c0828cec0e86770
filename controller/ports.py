"""The world, as the shell sees it. Adapters implement these; `cli` plugs them in; tests plug in doubles.

The journal's port lives with the journal: `events.journal.port`.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, Protocol

from controller.deciders.fleet import Fleet
from controller.read_model.errors import StoreForbidden as StoreForbidden
from controller.read_model.errors import StoreRefused as StoreRefused
from controller.read_model.errors import StoreUnavailable as StoreUnavailable
from controller.router.endpoints import ConnectedWorkers
from controller.router.trust import TrustedSource
from events.decisions import PolicyAdopted
from events.errors import Finding, HoldfastError
from events.fact import Observation, Recorded
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
    """Time, as an argument: real in a process, virtual in a test."""

    def now(self) -> datetime:
        """Return the current instant, aware and in UTC."""
        ...

    def monotonic(self) -> float:
        """Return seconds that never go back."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait."""


class Observe(Protocol):
    """How one who is no journal says a fact: `Journal.observe`, or nothing at all where there is no journal."""

    def __call__(self, fact: Observation, *, traceparent: str = "") -> object:
        """Say one fact; `traceparent` is the trace of the client's request that it is about, if there is one."""
        ...


# --- the state store ------------------------------------------------------------------------------------------------


class StoreAhead(HoldfastError):
    """The state store has folded events that the stream does not hold: the stream was recreated or restored. Check which
    of the two is right; `holdfast replay rebuild` makes a fresh projection of the stream."""


class StoreLost(Finding):
    """The state store has lost a part of what was projected into it. `holdfast replay rebuild` makes it anew from the journal;
    where `holdfast up` runs, it does so by itself."""


class AnotherProjector(HoldfastError):
    """Another projector has moved the projection on meanwhile: nothing was written. Read it again and go on from there."""


@dataclass(frozen=True, slots=True)
class ReadPosition:
    """How far the rows of the read model reach: they are the fold of everything up to `seq`."""

    seq: int = 0
    id: str = ""  # the ce-id of that event: a stream that was made anew has another one there
    at: datetime | None = None  # the stream's time of it
    settled: Position = Position()
    deciders_version: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A settled fleet, the position that it was folded to, and how far each source had been heard."""

    fleet: Fleet
    position: Position
    sources: Mapping[str, Last]


@dataclass(frozen=True, slots=True)
class StoreLook:
    """What a quick look at a store shows of what it has lost."""

    lost: tuple[str, ...] = ()  # tables that lack a row which they must have
    first: int = 0  # sequence of the oldest event that is kept; 0: none is
    last: int = 0  # of the newest


CatchUp = Callable[[ReadPosition], Awaitable[None]]
"""Brings a fresh projection to where another one stands (still, as long as this runs)."""


class StateStore(Protocol):
    """The read model: what the projector writes and the router and the planner read."""

    async def load(self) -> Snapshot | None:
        """Return the settled state that was stored last; None if the store is empty."""
        ...

    async def position(self) -> ReadPosition:
        """Return how far the rows reach. Raise StoreUnavailable."""
        ...

    async def project(self, events: Sequence[Recorded], shown: Fleet, settled: Snapshot, after: int) -> None:
        """Append `events` to `fleet_events`, upsert the shown rows and both positions, all in one transaction.

        The store stands at `after`: right before `events`, or where it is empty before any. Raise StoreUnavailable, or
        AnotherProjector if it does not, and write nothing then.
        """
        ...

    async def look(self) -> StoreLook:
        """Look for losses where they show at once. State rows that are gone are remembered, to be written again with the next
        batch."""
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
    """The events that the store keeps, by what they are about. The journal is the truth; this is its index."""

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
        """Yield, in order, the events that match everything given.

        `incident` finds what carries the incident's id, `worker` what `projection.concerns` the worker, `request` what is said of
        one request.
        """
        ...


@dataclass(frozen=True, slots=True)
class RowsRead:
    """Rows of the read model as of one instant: table name to rows, each a mapping of column to value."""

    position: ReadPosition
    rows: Mapping[str, Sequence[Mapping[str, Any]]]


class PlanningStore(Protocol):
    """What the planner reads of the state store."""

    async def read_planning(self, after: int, since: datetime, limit: int) -> "PlanningRead":
        """Return, as of one instant, all workers, and the events that are planned by: those above `after` and not before
        `since`, the oldest first, `limit` at most; and of what holds until something else is said, the latest. Raise
        StoreUnavailable."""
        ...


@dataclass(frozen=True, slots=True)
class PlanningRead:
    """What is planned by, as of one instant."""

    position: ReadPosition
    workers: Sequence[Mapping[str, Any]]  # rows
    events: Sequence[Recorded]  # of PLANNED_BY
    latest: Sequence[Recorded]  # of LATEST: of each kind, and of each model where it is said of one, the last


PLANNED_BY = (TrafficReported, CapacityReported, ScaleProposed, ScaleApplied)
LATEST = (ScaleSet, ScaleProposed, PolicyAdopted)


# --- workers, over the request plane ----------------------------------------------------------------------------------


class WorkerUnreachable(HoldfastError):
    """No connection to the worker could be made, or it broke."""


class Prober(Protocol):
    """Asks one worker one question, over the very path of user requests."""

    def ask(self, worker: str, request: Generate) -> AsyncIterator[Chunk]:
        """Yield the worker's chunks until one finishes. Raise WorkerUnreachable."""
        ...

    def others_work(self, worker: str, own_tokens: int, *, begun: bool) -> "OthersWork":
        """Return how its engine gets on with other requests, beside one of `own_tokens` tokens that has `begun` or not."""


LostCause = Literal["cannot_connect", "disconnected", "stalled"]
OthersWork = Literal[
    "", "beside", "before"
]  # the engine answers others beside ours, or before it; empty: not known


class Sink(Protocol):
    """Whoever reads one stream. Called on the event loop, synchronously; it must not wait."""

    def take(self, chunk: Chunk) -> None:
        """Take what one engine step gave this stream. After `finish` or `error` nothing more comes."""
        ...

    def flush(self) -> None:
        """What one turn of the loop had for this stream is complete: write it out."""
        ...

    def lost(self, cause: LostCause, detail: str) -> None:
        """The worker cannot go on with this stream. Nothing more comes."""
        ...


class TransferSink(Sink, Protocol):
    """Whoever carries one stream from its source to a target. As a sink it takes what the target says once it has
    committed, until another sink adopts the stream; it is told `lost` of the target's connection only."""

    def reserved(self, frame: Reserved) -> None:
        """The target keeps the room."""
        ...

    def declined(self, stream: int, why: str) -> None:
        """The target has let go of its stream, or the source, whose stream that is, goes on decoding."""
        ...

    def committed(self, frame: Committed) -> None:
        """The target decodes: its chunks follow."""
        ...


class RequestPlane(ConnectedWorkers, Protocol):
    """The request plane, as the frontend's scheduler and its streams see it. No call waits."""

    def others_work(self, worker: str, own_tokens: int, *, begun: bool) -> OthersWork:
        """Return what `Prober.others_work` does."""

    def open(self, worker: str, instance: str, request: Generate, sink: Sink) -> int:
        """Send a request and return its stream number, which is also set in it. Raise WorkerUnreachable."""
        ...

    def cancel(self, worker: str, stream: int, why: Why = "gone") -> None:
        """Forget a stream or a reservation: the worker is told, and late frames are dropped. Unknown ones are ignored."""
        ...

    def draining(self, worker: str, instance: str) -> bool:
        """Say whether this instance is connected and has told us to send it nothing new."""
        ...

    def reserve(self, worker: str, instance: str, request: Generate, room: int, carrier: TransferSink) -> int:
        """Ask a worker to keep room for a request of `room` tokens; return the new stream. Raise WorkerUnreachable."""
        ...

    def ship(self, source: TrustedSource, stream: int, offer: Reserved, carrier: TransferSink) -> None:
        """Tell a worker to send a stream to the target that made this offer. Raise WorkerUnreachable."""
        ...

    def stay(self, worker: str, stream: int) -> None:
        """Tell a worker to break a stream's shipment off, and to go on decoding it. Unknown streams are ignored."""
        ...

    def adopt(self, worker: str, stream: int, sink: Sink) -> None:
        """Give a stream another sink. Unknown streams are ignored."""
        ...


# --- what the operator asks for ---------------------------------------------------------------------------------------

Answer = Mapping[str, str]
"""`says`: what was done, or `error`: why it was not."""


@dataclass(frozen=True, slots=True)
class Command:
    """What an operator asks for, by which id it is known, and until when it may be carried out."""

    id: str = ""  # of the asker's own making; a second one of the same id is the first one again
    deadline: datetime | None = None  # by the clock that stamps the journal
    verb: str = ""
    worker: str = ""
    by: str = ""


NO_COMMAND = Command()


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenWish:
    """What an operator wants of goldens. They are named by a worker, a canary key or a model."""

    act: Literal["approve", "retire", "record"]
    worker: str = ""
    canary_key: str = ""
    model: str = ""
    canaries: tuple[str, ...] = ()  # empty: all of that key
    answers: tuple[GoldenAnswer, ...] = ()  # approve: the goldens that the operator brings


class CommandGate(Protocol):
    """Who decides whether a command is carried out here."""

    async def carry_out(self, command: Command, act: Callable[[], Awaitable[object]]) -> Answer | None:
        """Return the answer; None if it is not ours to give, or if nobody can know. `act` raises HoldfastError to refuse."""
        ...

    async def ours_to_answer(self) -> bool:
        """Say whether a question that changes nothing is ours to answer."""
        ...


class Control(Protocol):
    """What an operator can ask for, from wherever it comes. Each answers with one sentence on what was done, and raises a
    HoldfastError whose text says why it was not. What it leads to carries the id and the deadline of `command`."""

    async def drain(
        self, worker: str, deadline_s: float | None, by: str, command: Command = NO_COMMAND
    ) -> str:
        """Let a worker finish what it runs, within `deadline_s` seconds (None: the policy's wait)."""
        ...

    async def resume(self, worker: str, by: str, command: Command = NO_COMMAND) -> str:
        """Take a worker back, after its next good canary."""
        ...

    async def move(self, worker: str, to: str, by: str, command: Command = NO_COMMAND) -> str:
        """Let what runs on a worker go on at `to`, or wherever it is best if that is empty."""
        ...

    async def restart(self, worker: str, by: str, command: Command = NO_COMMAND) -> str:
        """Tell a worker to shut down in good order."""
        ...

    async def status(self) -> dict[str, Any]:
        """Return the fleet as it is, as plain JSON values."""
        ...


# --- who carries a planner's proposals out ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedScale:
    """Another number of workers for one model, as a planner has proposed it."""

    model: str
    before: int  # workers that there were when it was proposed
    after: int  # that there should be
    why: str  # up, down, lost, floor, operator
    proposal: str  # id of the ScaleProposed
    planner: str


@dataclass(frozen=True, slots=True)
class HookResult:
    """What came of it, as `ScaleApplied` tells it."""

    ok: bool
    says: str  # one line of printable characters, 300 at most: what was done, or why not


class ScaleHook(Protocol):
    """Who can start and stop workers, and is no `holdfast up`."""

    by: str  # as `ScaleApplied` names it: command, http

    async def scale(self, wanted: WantedScale) -> HookResult:
        """Have the workers of a model become so many. It ends within the hook's deadline, and raises nothing for what the
        other side does. That it is done says nothing of when those workers serve. To repeat it does no harm."""
        ...
