"""Defines the controller's ports: protocols that adapters implement and tests replace with doubles.

The port of the journal is in `events.journal.port`.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, Protocol, Unpack

from controller.deciders.fleet import Fleet
from controller.read_model.errors import StoreForbidden as StoreForbidden
from controller.read_model.errors import StoreRefused as StoreRefused
from controller.read_model.errors import StoreUnavailable as StoreUnavailable
from controller.read_model.rows import EventFilter
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
    """A source of time, which is real in a process and virtual in a test."""

    def now(self) -> datetime:
        """Return the current time as a datetime with the time zone UTC."""

    def monotonic(self) -> float:
        """Return the monotonic time in seconds."""

    async def sleep(self, seconds: float) -> None:
        """Sleep for `seconds`."""


class Observe(Protocol):
    """A function that records a fact: `Journal.observe`, or a no-op in a process without a journal."""

    def __call__(self, fact: Observation, *, traceparent: str = "") -> object:
        """Record one fact. `traceparent` is the trace context of the client request that caused the fact; "" without one."""


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
    """How far the read model has come: its rows show the state after all events up to the sequence number `seq`."""

    seq: int = 0
    # the ce-id of the event at `seq`, which detects a recreated stream with a different event there
    id: str = ""
    # time of the event at `seq`, by the stream's clock; None: the read model is empty
    at: datetime | None = None
    settled: Position = Position()  # position of the last settled fold
    deciders_version: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The fleet's settled state, the position of this state on the journal, and the last event of each source.

    The settled state contains all decisions up to the position, and the observations that the last decision took into
    account. It does not contain later observations."""

    fleet: Fleet
    position: Position
    sources: Mapping[str, Last]


@dataclass(frozen=True, slots=True)
class StoreLook:
    """The result of a quick check of whether a store has lost rows."""

    lost: tuple[str, ...] = ()  # tables that lack a required row
    first: int = 0  # sequence number of the oldest stored event; 0: no event is stored
    last: int = 0  # sequence number of the newest stored event; 0: no event is stored


CatchUp = Callable[[ReadPosition], Awaitable[None]]
"""Fills a new state store up to the position of the old one, which does not move meanwhile."""


class StateStore(Protocol):
    """The state store, which the projector writes, and which processes read to start without folding the whole journal."""

    async def load(self) -> Snapshot | None:
        """Return the newest stored snapshot of the fleet's settled state, or None if the store is empty."""

    async def position(self) -> ReadPosition:
        """Return the journal position up to which the rows are current. Raise StoreUnavailable if the store cannot be reached."""

    async def project(self, events: Sequence[Recorded], shown: Fleet, settled: Snapshot, after: int) -> None:
        """Write the next events in one transaction: append `events`, upsert the rows of `shown`, and set the positions.

        `shown` is the fleet's state after all `events`, and `settled` is the settled state at that time. `after` is the sequence
        number at which the caller expects the store; 0 means an empty store. If the store is at another sequence number, raise
        AnotherProjector and write nothing. Raise StoreUnavailable if the store cannot be reached.
        """

    async def look(self) -> StoreLook:
        """Check quickly whether rows are lost. The next `project` writes lost rows of the fleet's state again."""

    async def locate(self, reference: str) -> int | None:
        """Return the sequence number of a stored event, given its CloudEvents id or `decision:N`; None if it is not stored."""

    async def snapshot_before(self, seq: int) -> Snapshot | None:
        """Return the latest stored snapshot that includes no event after the sequence number `seq`; None if there is none."""

    async def snapshot_at(self, when: datetime) -> Snapshot | None:
        """Return the latest stored snapshot that includes no event later than the time `when`; None if there is none.

        Times are by the stream's clock."""

    async def read_status(self) -> "RowsRead":
        """Return the rows of the fleet's current state, the open incidents and the position, all read in one transaction."""


class Archive(Protocol):
    """Reads stored events, selected by incident, worker or request.

    The journal remains the authority. An archive is an index of the journal's events."""

    async def locate(self, reference: str) -> int | None:
        """Return the sequence number of an event, given its CloudEvents id or `decision:N`; None if it is not found."""

    def select(self, **wanted: Unpack[EventFilter]) -> AsyncIterator[Sequence[Recorded]]:
        """Yield the events that match all given filters, in order, in batches of events.

        `after` selects events above a sequence number, and `since` events at or after a time. `incident` selects events that
        carry the incident's id, `worker` events that name the worker (`read_model.rows.concerns`), and `request` the events of
        a request.
        """


@dataclass(frozen=True, slots=True)
class RowsRead:
    """Rows of the read model, read in one transaction, by table. A row is a mapping from column to value."""

    position: ReadPosition
    rows: Mapping[str, Sequence[JsonView]]


class PlanningStore(Protocol):
    """The planner's read access to the state store."""

    async def read_planning(self, after: int, since: datetime, limit: int) -> "PlanningRead":
        """Return all workers and the events that planning uses, read in one transaction.

        The result's `events` are those above the sequence number `after` and not older than `since`, oldest first, at most
        `limit`. The result's `latest` does not depend on the arguments. Raise StoreUnavailable if the store cannot be reached.
        """


@dataclass(frozen=True, slots=True)
class PlanningRead:
    """The planner's input, read in one transaction."""

    position: ReadPosition
    workers: Sequence[JsonView]  # rows of the table `workers`
    events: Sequence[Recorded]  # events of the kinds in PLANNED_BY
    # the last event of each kind in LATEST, per model if the kind is about a model
    latest: Sequence[Recorded]


PLANNED_BY = (TrafficReported, CapacityReported, ScaleProposed, ScaleApplied)
LATEST = (ScaleSet, ScaleProposed, PolicyAdopted)


# --- workers, over the request plane ----------------------------------------------------------------------------------


class WorkerUnreachable(HoldfastError):
    """The worker cannot be connected to, or its connection broke."""


class Prober(Protocol):
    """Sends requests to workers over the same path as user requests, for canaries."""

    def ask(self, worker: str, request: Generate) -> AsyncGenerator[Chunk]:
        """Send a request to a worker, and yield the chunks of the answer, including the final one.

        Raise WorkerUnreachable if the worker cannot be reached or its connection breaks.
        """

    def others_work(self, worker: str, own_tokens: int, *, begun: bool) -> "OthersWork":
        """Return how the worker's engine serves other requests while one request of this process is open.

        The result is "beside" if the engine serves the other requests together with this process's request, and "before" if it
        serves them first. It is "" if no other requests are known, or if the engine makes no progress. `own_tokens` is the number
        of tokens of this process's request, and `begun` is true if its answer has begun.
        """


LostCause = Literal["cannot_connect", "disconnected", "stalled"]
# the engine serves other requests beside our request, or before it; empty: unknown
OthersWork = Literal["", "beside", "before"]


class Sink(Protocol):
    """Consumes the chunks of one stream. The methods are called on the event loop and must not block."""

    def take(self, chunk: Chunk) -> None:
        """Accept the output of one engine step. A chunk with `finish` or `error` is the last one."""

    def flush(self) -> None:
        """Write out buffered output. Called when the current event-loop iteration has no more chunks for the stream."""

    def lost(self, cause: LostCause, detail: str) -> None:
        """Handle the loss of the stream, which its worker cannot continue. No more calls follow."""


class TransferSink(Sink, Protocol):
    """Moves one stream with its KV cache from a source worker to a target worker.

    After the target's commit, this sink receives the target's chunks, until `RequestPlane.adopt` replaces the sink. `lost` is
    called if the connection to the target is lost. A lost connection to the source is not reported to this sink.
    """

    def reserved(self, frame: Reserved) -> None:
        """Handle the target's message that it has reserved memory for the KV cache."""

    def declined(self, stream: int, why: str) -> None:
        """Handle a refusal of the move by the source or the target, for the reason `why`.

        `stream` is the stream number at the refusing worker. A target that refuses has dropped its stream. A source that refuses
        continues to decode the stream.
        """

    def committed(self, frame: Committed) -> None:
        """Handle the target's commit, after which the target decodes the stream and sends its chunks."""


class RequestPlane(ConnectedWorkers, Protocol):
    """The connections to workers, as the scheduler and the streams of a frontend use them. Calls do not block."""

    def others_work(self, worker: str, own_tokens: int, *, begun: bool) -> OthersWork:
        """Return whether the worker's engine serves other requests before or beside one of this frontend's requests.

        The values and parameters are those of `Prober.others_work`.
        """

    def open(self, worker: str, instance: str, request: Generate, sink: Sink) -> int:
        """Send a request and return its stream number, which is also set in `request`.

        Raise WorkerUnreachable if the instance is not connected or does not read its input.
        """

    def cancel(self, worker: str, stream: int, why: Why = "gone") -> None:
        """Drop a stream or a reservation, and notify the worker. Frames of the stream that arrive later are ignored.

        A call for an unknown stream has no effect."""

    def draining(self, worker: str, instance: str) -> bool:
        """Return whether this instance is connected and has announced that it drains."""

    def reserve(self, worker: str, instance: str, request: Generate, room: int, carrier: TransferSink) -> int:
        """Instruct a worker to reserve KV cache memory for `room` tokens of a request. Return the new stream's number.

        `carrier` receives the worker's frames about this stream. Raise WorkerUnreachable if the instance is not connected or does
        not read its input.
        """

    def ship(self, source: TrustedSource, stream: int, offer: Reserved, carrier: TransferSink) -> None:
        """Instruct the source worker to send a stream's KV cache to the target that made the reservation `offer`.

        `carrier` is told if the source refuses. Raise WorkerUnreachable if the source is not connected or does not read its
        input.
        """

    def stay(self, worker: str, stream: int) -> None:
        """Instruct a worker to stop a stream's transfer and to continue decoding. An unknown stream is ignored."""

    def adopt(self, worker: str, stream: int, sink: Sink) -> None:
        """Replace the sink of a stream. An unknown stream is ignored."""


# --- operator commands ------------------------------------------------------------------------------------------------

Answer = Mapping[str, str]
"""The answer to a command: `says` is what was done, or `error` is why the command was refused."""


@dataclass(frozen=True, slots=True)
class Command:
    """An operator's command about a worker, with its id and deadline."""

    id: str = ""  # chosen by the sender; a second command with the same id is a repetition of the first
    deadline: datetime | None = None  # by the stream's clock; None: no deadline
    verb: str = ""
    worker: str = ""
    by: str = ""


NO_COMMAND = Command()


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenWish:
    """An operator's request about the goldens of a worker, of a canary key (model build and device), or of a model."""

    act: Literal["approve", "retire", "record"]
    worker: str = ""
    canary_key: str = ""
    model: str = ""
    canaries: tuple[str, ...] = ()  # names of canaries; empty: all canaries of the selection
    answers: tuple[GoldenAnswer, ...] = ()  # for `approve`: the goldens that the operator supplies


class CommandGate(Protocol):
    """Decides whether this controller carries out a command. Only one controller carries out each command."""

    async def carry_out(self, command: Command, act: Callable[[], Awaitable[object]]) -> Answer | None:
        """Run `act` if this controller must carry out the command, and return the answer for the operator.

        If `act` raises a HoldfastError, the answer is a refusal with the error as its reason. Return None if another controller
        answers, or if the outcome is unknown."""

    async def ours_to_answer(self) -> bool:
        """Return whether this controller must answer a read-only query. Only one controller answers each query."""


class Control(Protocol):
    """The operator's commands, independent of the transport.

    Each command returns one sentence about what was done; only `status` returns JSON values. A refused command raises
    a HoldfastError with the reason. `by` names the operator. Facts that a command records carry the id and deadline of `command`.
    """

    async def drain(
        self, worker: str, deadline_s: float | None, by: str, command: Command = NO_COMMAND
    ) -> str:
        """Drain a worker. Its running requests may finish within `deadline_s` seconds.

        If `deadline_s` is None, the time in the policy applies.
        """

    async def resume(self, worker: str, by: str, command: Command = NO_COMMAND) -> str:
        """Put a drained worker back into service once it passes a canary."""

    async def move(self, worker: str, to: str, by: str, command: Command = NO_COMMAND) -> str:
        """Move a worker's running requests to the worker `to`. If `to` is empty, each request moves to the best worker."""

    async def restart(self, worker: str, by: str, command: Command = NO_COMMAND) -> str:
        """Instruct a worker to shut down gracefully; its supervisor then starts it again."""

    async def status(self) -> Json:
        """Return the fleet's status as plain JSON values."""


# --- scaling ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRequest:
    """A new number of workers for one model, proposed by a planner."""

    model: str
    before: int  # number of workers at the time of the proposal
    after: int  # proposed number of workers
    why: str  # up, down, lost, floor, operator
    proposal: str  # id of the ScaleProposed event
    planner: str  # name of the planner


@dataclass(frozen=True, slots=True)
class HookResult:
    """The outcome of a call of a `ScaleHook`, as `ScaleApplied` reports it."""

    ok: bool
    says: str  # what was done, or why it failed: one line of at most 300 printable characters


class ScaleHook(Protocol):
    """Starts and stops workers in a fleet that `holdfast up` does not run, such as one on Kubernetes."""

    by: str  # name of the hook in `ScaleApplied`: command, http

    async def scale(self, wanted: ScaleRequest) -> HookResult:
        """Scale the workers of a model to `wanted.after`.

        The call is idempotent and returns within the hook's deadline. A failure of the called program or server is returned, not
        raised. Success does not mean that the new workers already serve."""
