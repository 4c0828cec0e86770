"""The effects of the request state machine: instructions to the driver about a request.

The driver applies the effects in order. It responds to some of them, such as `SelectWorker` and `Judge`, with an event.
Such an effect is always the last one of its transition.
"""

from typing import Literal, TypeAlias

import msgspec

from controller.frontend.errors import ApiError
from controller.frontend.request.failures import Failure
from controller.frontend.request.state import Move
from controller.migration.planned_move import Act
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
    """Record that the worker had no capacity. The worker gets no new request until its next load report."""


class Complete(msgspec.Struct, frozen=True):
    """End the request successfully, because the current attempt completed the answer. This also ends the attempt."""

    finish: str  # finish reason for the client
    alone: bool  # whether no other attempt has produced any part of the answer


class LeaveWorker(msgspec.Struct, frozen=True):
    """End the current attempt: release its slot, and update counters.

    Also record that later tokens do not depend on the attempt's KV cache.
    """


class Started(msgspec.Struct, frozen=True):
    """Record that the attempt has completed its prefill.

    `first` states that the attempt's first token is also the answer's first token.
    """

    first: bool


class Rewind(msgspec.Struct, frozen=True):
    """Drop all accepted tokens after the first `count`."""

    count: int


class Park(msgspec.Struct, frozen=True):
    """Park the request until a worker may accept it.

    If `keep_room` is true, the room that was reserved at admission is reserved again.
    """

    keep_room: bool = False


class QueueAgain(msgspec.Struct, frozen=True):
    """Return the request to the admission queue, ahead of all requests that were not admitted before."""


class Reroute(msgspec.Struct, frozen=True):
    """Choose a new worker for the request.

    If `planned` is true, all requests that lost their workers in this event-loop iteration are placed together.
    Otherwise the request is routed separately.
    """

    planned: bool = True


class TransferStep(msgspec.Struct, frozen=True):
    """Take one action of a KV transfer. The driver responds with Switched if the action is `switch`."""

    act: Act


class TransferOver(msgspec.Struct, frozen=True):
    """End the KV transfer. `state` is the outcome, and `why` is the reason if the transfer failed.

    If the state is `switched`, make the stream of the transfer's target the current attempt. Later tokens also depend
    on the source, which computed the KV cache.
    """

    state: str
    why: str


class CountFailure(msgspec.Struct, frozen=True):
    """Count a failed attempt in the metrics, by `kind`."""

    kind: str  # ongoing_request if the attempt had produced tokens, otherwise new_request


class CountRestored(msgspec.Struct, frozen=True):
    """Record the end and the duration of an outage, a period without tokens after a failure."""

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
    """End the request with an error that states why no worker can serve it.

    If `abandoned` is true, a failed migration is reported, too.
    """

    abandoned: bool


class End(msgspec.Struct, frozen=True):
    """End the request, with a finish reason or an error for its client."""

    finish: str | None = None
    error: ApiError | None = None


Effect: TypeAlias = (
    SelectWorker | Judge | CancelStream | NoteUnjudged | TurnedAway | Complete | LeaveWorker | Started | Rewind | Park
    | QueueAgain | Reroute | TransferStep | TransferOver | CountFailure | CountRestored | ReportMigrated
    | ReportAbandoned | ReportExposure | Refuse | End
)  # fmt: skip
Effects: TypeAlias = tuple[Effect, ...]
