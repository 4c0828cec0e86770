"""The effects of the request state machine: instructions to the driver about a request.

The driver applies them in order. It responds to `SelectWorker` and `Judge` with an event, so these two come last.
"""

from typing import Literal, TypeAlias

import msgspec

from controller.frontend.errors import ApiError
from controller.frontend.request.failures import Failure
from controller.frontend.request.state import Move
from controller.router.endpoints import Key

Outcome: TypeAlias = Literal["success", "failure", "cancelled"]


class SelectWorker(msgspec.Struct, frozen=True):
    """Choose a worker and send an attempt. The driver responds with Sent, ConnectFailed or NoWorkerFound."""

    planned: Key | None = None  # preferred worker
    avoid: frozenset[Key] = frozenset()  # workers that must not be chosen
    fallback: frozenset[Key] = frozenset()  # the only workers to avoid if all others are in `avoid`
    declined: frozenset[Key] = frozenset()  # workers in `avoid` that accept no new requests for a while
    missed: frozenset[Key] = frozenset()  # workers in `fallback` that were unreachable a moment ago


class Judge(msgspec.Struct, frozen=True):
    """Count the failed attempt against its worker, if the worker is at fault. The driver responds with Judged."""

    failure: Failure
    begun: bool


class CancelStream(msgspec.Struct, frozen=True):
    """Cancel the attempt's stream at its worker, because the frontend no longer reads it."""

    why: Literal["gone", "elsewhere", "complete"] = "gone"


class NoteUnjudged(msgspec.Struct, frozen=True):
    """Record that the attempt ended without a fault of its worker."""

    has_output: bool


class TurnedAway(msgspec.Struct, frozen=True):
    """Record that the worker had no capacity, so that it gets no new request until its next load report."""


class Complete(msgspec.Struct, frozen=True):
    """End the request successfully, because the current attempt completed the answer. This also ends the attempt."""

    finish: str  # finish reason for the client
    alone: bool  # whether no other attempt has produced any part of the answer


class LeaveWorker(msgspec.Struct, frozen=True):
    """End the current attempt: release its slot, and update counters and token provenance."""


class Started(msgspec.Struct, frozen=True):
    """Record that the attempt has completed its prefill.

    `first` states that its first token is also the answer's first token.
    """

    first: bool


class Rewind(msgspec.Struct, frozen=True):
    """Drop all accepted tokens after the first `count`."""

    count: int


class Park(msgspec.Struct, frozen=True):
    """Park the request until a worker may accept it. `keep_room` reserves the room of its admission again."""

    keep_room: bool = False


class QueueAgain(msgspec.Struct, frozen=True):
    """Return the request to the admission queue, before all requests that were not admitted yet."""


class Reroute(msgspec.Struct, frozen=True):
    """Choose a new worker for the request.

    If `planned` is true, all requests that lost their workers in this event-loop iteration are placed together.
    Otherwise the request is routed separately.
    """

    planned: bool = True


class ShipCache(msgspec.Struct, frozen=True):
    """Request the source to send the KV cache."""


class CancelTarget(msgspec.Struct, frozen=True):
    """Cancel the target's reservation, or its stream."""


class StayAtSource(msgspec.Struct, frozen=True):
    """Request the source to continue decoding."""


class SwitchToTarget(msgspec.Struct, frozen=True):
    """Read the target's stream from now on. The driver responds with Switched."""


class HandOver(msgspec.Struct, frozen=True):
    """Make the target's stream the current attempt. Later tokens also depend on the source, which computed the KV cache."""


class TransferOver(msgspec.Struct, frozen=True):
    """End the KV transfer. `state` is its outcome, `why` the reason if it failed."""

    state: str
    why: str


class CountFailure(msgspec.Struct, frozen=True):
    """Count a failed attempt of this kind."""

    kind: str  # ongoing_request if the attempt had produced tokens, otherwise new_request


class CountRestored(msgspec.Struct, frozen=True):
    """Count the end of an outage and its duration."""

    kind: str
    outcome: Outcome
    seconds: float


class ReportMigrated(msgspec.Struct, frozen=True):
    """Report a migration. `well` states whether the next token has arrived; if not, the new attempt has failed too."""

    move: Move
    well: bool
    spoilt: bool


class ReportAbandoned(msgspec.Struct, frozen=True):
    """Report that the answer could not be continued."""

    reason: str


class ReportExposure(msgspec.Struct, frozen=True):
    """Record which policy was applied to tokens that may be wrong."""

    action: Literal["continue", "restart", "error"]


class Refuse(msgspec.Struct, frozen=True):
    """End the request with an error that states why no worker can serve it. `abandoned` also reports a failed migration."""

    abandoned: bool


class End(msgspec.Struct, frozen=True):
    """End the request, with a finish reason or an error for its client."""

    finish: str | None = None
    error: ApiError | None = None


Effect: TypeAlias = (
    SelectWorker | Judge | CancelStream | NoteUnjudged | TurnedAway | Complete | LeaveWorker | Started | Rewind | Park
    | QueueAgain | Reroute | ShipCache | CancelTarget | StayAtSource | SwitchToTarget | HandOver | TransferOver
    | CountFailure | CountRestored | ReportMigrated | ReportAbandoned | ReportExposure | Refuse | End
)  # fmt: skip
Effects: TypeAlias = tuple[Effect, ...]
