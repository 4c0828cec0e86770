"""The effects of the request state machine: instructions to the driver about a request.

They are applied in order. `SelectWorker` and `Judge` are answered by the driver with an event; they come last.
"""

from typing import Literal, TypeAlias

import msgspec

from controller.frontend.errors import ApiError
from controller.frontend.request.failures import Failure
from controller.frontend.request.state import Move
from controller.router.endpoints import Key

Outcome: TypeAlias = Literal["success", "failure", "cancelled"]


class SelectWorker(msgspec.Struct, frozen=True):
    """Choose a worker and send an attempt. Answered by Sent, ConnectFailed or NoWorkerFound."""

    planned: Key | None = None  # preferred worker
    avoid: frozenset[Key] = frozenset()
    fallback: frozenset[Key] = frozenset()  # avoid only these if no other worker is left
    declined: frozenset[Key] = frozenset()  # those of `avoid` that are closed for a while
    missed: frozenset[Key] = frozenset()  # those of `fallback` that were unreachable just now


class Judge(msgspec.Struct, frozen=True):
    """Count the failed attempt against its worker, if that is at fault. Answered by Judged."""

    failure: Failure
    begun: bool


class CancelStream(msgspec.Struct, frozen=True):
    """Cancel the stream at its worker: it is no longer read."""

    why: Literal["gone", "elsewhere", "complete"] = "gone"


class NoteUnjudged(msgspec.Struct, frozen=True):
    """Record that the attempt ended through no fault of its worker."""

    has_output: bool


class TurnedAway(msgspec.Struct, frozen=True):
    """Record that the worker had no room: it gets no request until it next reports its load."""


class Complete(msgspec.Struct, frozen=True):
    """Leave the worker, count the request as served, and end it: the current attempt completed the answer."""

    finish: str  # finish reason for the client
    alone: bool  # no other attempt has produced any of it


class LeaveWorker(msgspec.Struct, frozen=True):
    """End the current attempt: slots, counters and provenance."""


class Started(msgspec.Struct, frozen=True):
    """Record that the attempt has read its prompt. `first`: this is the answer's first token."""

    first: bool


class Rewind(msgspec.Struct, frozen=True):
    """Drop all accepted tokens after the first `count`."""

    count: int


class Park(msgspec.Struct, frozen=True):
    """Hold the request until a worker may accept it. `keep_room`: keep the room that it was admitted with."""

    keep_room: bool = False


class QueueAgain(msgspec.Struct, frozen=True):
    """Put the request before all others in the admission queue."""


class Reroute(msgspec.Struct, frozen=True):
    """Place the request together with all that lost their workers in this turn of the event loop. Not `planned`: route it
    separately.
    """

    planned: bool = True


class ShipCache(msgspec.Struct, frozen=True):
    """Request the source to send the KV cache."""


class CancelTarget(msgspec.Struct, frozen=True):
    """Cancel the target's reservation, or its stream."""


class StayAtSource(msgspec.Struct, frozen=True):
    """Request the source to continue decoding."""


class SwitchToTarget(msgspec.Struct, frozen=True):
    """Read the target's stream from now on. Answered by Switched."""


class HandOver(msgspec.Struct, frozen=True):
    """Make the target's stream the current attempt; the KV cache carries the provenance of the source."""


class TransferOver(msgspec.Struct, frozen=True):
    """End the transfer, which has switched, stayed or been replayed."""

    state: str
    why: str


class CountFailure(msgspec.Struct, frozen=True):
    """Count a failed attempt of this kind."""

    kind: str  # ongoing_request or new_request


class CountRestored(msgspec.Struct, frozen=True):
    """Count the end of an outage and its duration."""

    kind: str
    outcome: Outcome
    seconds: float


class ReportMigrated(msgspec.Struct, frozen=True):
    """Report that the answer moved. `well`: the next token has arrived; otherwise the new attempt failed too."""

    move: Move
    well: bool
    spoilt: bool


class ReportAbandoned(msgspec.Struct, frozen=True):
    """Report that the answer could not be continued."""

    reason: str


class ReportExposure(msgspec.Struct, frozen=True):
    """Record the policy applied to tokens that may be wrong."""

    action: Literal["continue", "restart", "error"]


class Refuse(msgspec.Struct, frozen=True):
    """End the request with the reason why no worker can serve it. `abandoned`: it had begun, which is reported."""

    abandoned: bool


class End(msgspec.Struct, frozen=True):
    """End the request. `finish` is the finish reason for its client, `error` the error."""

    finish: str | None = None
    error: ApiError | None = None


Effect: TypeAlias = (
    SelectWorker | Judge | CancelStream | NoteUnjudged | TurnedAway | Complete | LeaveWorker | Started | Rewind | Park
    | QueueAgain | Reroute | ShipCache | CancelTarget | StayAtSource | SwitchToTarget | HandOver | TransferOver
    | CountFailure | CountRestored | ReportMigrated | ReportAbandoned | ReportExposure | Refuse | End
)  # fmt: skip
Effects: TypeAlias = tuple[Effect, ...]
