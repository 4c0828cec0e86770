"""The events of the request state machine, as values."""

from collections.abc import Collection
from typing import TypeAlias, final

import msgspec

from controller.frontend.errors import ApiError
from controller.frontend.request.failures import Failure, Suspicion
from controller.frontend.request.state import AnswerProgress, Move
from controller.migration import planned_move
from controller.router.endpoints import Key, Server


@final
class Launched(msgspec.Struct, frozen=True):
    """The request was admitted and its prompt tokenized: it can be sent."""

    planned: Key | None = None  # preferred worker


@final
class Sent(msgspec.Struct, frozen=True):
    """An attempt was sent to this worker."""

    server: Server


class ConnectFailed(msgspec.Struct, frozen=True):
    """The frontend could not reach the chosen worker."""

    key: Key


class NoWorkerFound(msgspec.Struct, frozen=True):
    """No worker can serve the request now."""

    code: str  # error code of the `NoWorker` exception
    stands_in: bool = False  # an unhealthy worker is about to serve, because it is the last one of the model
    # seconds until a closed worker accepts requests; inf if every closed worker has declined this request
    reopens_s: float = 0.0


@final
class FirstToken(msgspec.Struct, frozen=True):
    """The current attempt has produced its first token."""


@final
class Finished(msgspec.Struct, frozen=True):
    """The answer is complete."""

    reason: str
    # whether to cancel the stream at its worker, which does not know that the answer is complete
    cancel: bool = False


class RequestRejected(msgspec.Struct, frozen=True):
    """The request must end with this error.

    Either no other worker would accept the request, or the handling of the request has failed.
    """

    error: ApiError


class AttemptFailed(msgspec.Struct, frozen=True):
    """The current attempt has failed."""

    failure: Failure
    answer: AnswerProgress
    closed: bool = False  # the worker accepts no new requests for a while


class Judged(msgspec.Struct, frozen=True):
    """The driver has counted the failed attempt. `suspicion` states whether the request itself may be harmful."""

    suspicion: Suspicion


class WorkerUnhealthy(msgspec.Struct, frozen=True):
    """The controller took the request's worker out of service."""

    corrupt: bool  # canaries found that the worker computes wrong results
    others: Collection[Key]  # other workers that could serve the request
    answer: AnswerProgress


class Exposed(msgspec.Struct, frozen=True):
    """A worker that produced some of the answer's tokens is convicted as corrupt.

    Tokens from index `first` on may be wrong.
    """

    first: int
    key: Key  # of the convicted worker
    carried: bool  # whether new tokens are still computed from the convicted worker's KV cache
    stays: bool  # the convicted worker keeps serving, as the last one of its model
    answer: AnswerProgress


class TransferBegun(msgspec.Struct, frozen=True):
    """A KV transfer has started: the target was requested to reserve room for the request and its KV cache."""


class TransferAdvanced(msgspec.Struct, frozen=True):
    """The KV transfer has advanced.

    `said` contains the tokens that were accepted from the source since the transfer started.
    """

    event: planned_move.Event
    said: tuple[int, ...] = ()


class TransferDeclined(msgspec.Struct, frozen=True):
    """A requested KV transfer will not take place, for the reason `why`."""

    why: str


class Switched(msgspec.Struct, frozen=True):
    """The request continues at the target of its KV transfer."""

    server: Server
    move: Move


class MovedOnPurpose(msgspec.Struct, frozen=True):
    """The request must leave a worker that has not failed, without its KV cache: a planned move, or a preemption."""

    move: Move
    target: Key | None  # the new worker; None if the request is preempted


class Resumed(msgspec.Struct, frozen=True):
    """A waiting request may be sent again."""

    planned: Key | None = None  # preferred worker


class Woken(msgspec.Struct, frozen=True):
    """A parked request may retry, because a worker may have joined or may have capacity."""


class NoneLeft(msgspec.Struct, frozen=True):
    """The preempted request has reached its maximum preemption time, and no worker can serve the request."""


class Tick(msgspec.Struct, frozen=True):
    """Periodic check of time limits.

    The model's limits are multiplied by `latency`, which is above 1 in a degraded fleet.
    """

    latency: float = 1.0


class ClientGone(msgspec.Struct, frozen=True):
    """The client has disconnected."""


Event: TypeAlias = (
    Launched | Sent | ConnectFailed | NoWorkerFound | FirstToken | Finished | RequestRejected | AttemptFailed | Judged
    | WorkerUnhealthy | Exposed | TransferBegun | TransferAdvanced | TransferDeclined | Switched | MovedOnPurpose
    | Resumed | Woken | NoneLeft | Tick | ClientGone
)  # fmt: skip
