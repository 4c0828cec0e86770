"""What the driver does for a request: the effects of its state machine, in the order in which they are applied. All are values.

`SelectWorker` and `Judge` ask: the driver answers with an event of its own. They come last.
"""

from typing import Literal, TypeAlias

import msgspec

from controller.frontend.errors import ApiError
from controller.frontend.request.failures import Failure
from controller.frontend.request.state import Move
from controller.router.endpoints import Key

Outcome: TypeAlias = Literal["success", "failure", "cancelled"]


class SelectWorker(msgspec.Struct, frozen=True):
    """Choose a worker and send an attempt. Answered by Sent, Unreachable or NoWorkerFound."""

    planned: Key | None = None  # worker that is preferred
    avoid: frozenset[Key] = frozenset()
    fallback: frozenset[Key] = frozenset()  # avoid only these where no other worker is left
    declined: frozenset[Key] = frozenset()  # of `avoid`, those that are closed for a while
    missed: frozenset[Key] = frozenset()  # of `fallback`, those that could not be reached just now


class Judge(msgspec.Struct, frozen=True):
    """Count the failed attempt against its worker, if that is to blame. Answered by Judged."""

    failure: Failure
    begun: bool


class CancelStream(msgspec.Struct, frozen=True):
    """Tell the worker that its stream is read no more."""

    why: Literal["gone", "elsewhere", "complete"] = "gone"


class NoteUnjudged(msgspec.Struct, frozen=True):
    """The attempt ends through no fault of its worker."""

    has_output: bool


class TurnedAway(msgspec.Struct, frozen=True):
    """The worker had no room: it gets no request until it next reports its load."""


class Complete(msgspec.Struct, frozen=True):
    """The answer was completed by the present attempt: leave the worker, count it as served, and end the request."""

    finish: str  # the reason that its client is given
    alone: bool  # no other attempt has brought any of it


class LeaveWorker(msgspec.Struct, frozen=True):
    """End the present attempt: slots, counters and provenance."""


class Started(msgspec.Struct, frozen=True):
    """The attempt has read its prompt; `first`: this is the answer's first token."""

    first: bool


class Rewind(msgspec.Struct, frozen=True):
    """Forget all accepted tokens after the first `count`."""

    count: int


class Park(msgspec.Struct, frozen=True):
    """Keep it until a worker may take it; `keep_room`: with the room that it was admitted with."""

    keep_room: bool = False


class QueueAgain(msgspec.Struct, frozen=True):
    """Put it before all others in the admission queue."""


class Reroute(msgspec.Struct, frozen=True):
    """Place it together with all that lost their workers in this turn of the loop. Not `planned`: it is routed by itself."""

    planned: bool = True


class ShipCache(msgspec.Struct, frozen=True):
    """Tell the source to send the KV cache."""


class CancelTarget(msgspec.Struct, frozen=True):
    """Give up the target's reservation, or its stream."""


class StayAtSource(msgspec.Struct, frozen=True):
    """Tell the source to go on decoding."""


class SwitchToTarget(msgspec.Struct, frozen=True):
    """Read the target's stream from now on. Answered by Switched."""


class HandOver(msgspec.Struct, frozen=True):
    """The target's stream is the present attempt; the KV cache carries the provenance of the source."""


class TransferOver(msgspec.Struct, frozen=True):
    """The transfer has ended: switched, stayed or replayed."""

    state: str
    why: str


class CountFailure(msgspec.Struct, frozen=True):
    """Count a failed attempt of this kind."""

    kind: str  # ongoing_request or new_request


class CountRestored(msgspec.Struct, frozen=True):
    """Count the end of an outage."""

    kind: str
    outcome: Outcome
    seconds: float


class ReportMigrated(msgspec.Struct, frozen=True):
    """Emit that the answer moved. `well`: the next token has come; else the new attempt failed too."""

    move: Move
    well: bool
    spoilt: bool


class ReportAbandoned(msgspec.Struct, frozen=True):
    """Emit that the answer could not be continued."""

    reason: str


class ReportExposure(msgspec.Struct, frozen=True):
    """State what was done about tokens that may be wrong."""

    action: Literal["continue", "restart", "error"]


class Refuse(msgspec.Struct, frozen=True):
    """End it with the reason why no worker takes it. `abandoned`: it had begun, and that is reported."""

    abandoned: bool


class End(msgspec.Struct, frozen=True):
    """The request is over: `finish` is the reason that its client is given, `error` the error."""

    finish: str | None = None
    error: ApiError | None = None


Effect: TypeAlias = (
    SelectWorker | Judge | CancelStream | NoteUnjudged | TurnedAway | Complete | LeaveWorker | Started | Rewind | Park
    | QueueAgain | Reroute | ShipCache | CancelTarget | StayAtSource | SwitchToTarget | HandOver | TransferOver
    | CountFailure | CountRestored | ReportMigrated | ReportAbandoned | ReportExposure | Refuse | End
)  # fmt: skip
Effects: TypeAlias = tuple[Effect, ...]
