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
    """The request is admitted, and its prompt is tokenized."""

    planned: Key | None = None  # preferred worker


@final
class Sent(msgspec.Struct, frozen=True):
    """An attempt was sent to this worker."""

    server: Server


class ConnectFailed(msgspec.Struct, frozen=True):
    """No connection to the chosen worker could be established."""

    key: Key


class NoWorkerFound(msgspec.Struct, frozen=True):
    """No worker can serve the request now."""

    code: str  # of the `NoWorker` error
    stands_in: bool = False  # a worker that canaries keep out of service is about to serve
    reopens_s: float = 0.0  # seconds until a closed worker accepts it; inf: all have declined it


@final
class FirstToken(msgspec.Struct, frozen=True):
    """The current attempt has produced its first token."""


@final
class Finished(msgspec.Struct, frozen=True):
    """The answer is complete."""

    reason: str
    cancel: bool = False  # cancel the stream: its worker does not know that the answer is complete


class RequestRejected(msgspec.Struct, frozen=True):
    """No worker could answer this request, or none accepts it."""

    error: ApiError


class AttemptFailed(msgspec.Struct, frozen=True):
    """The current attempt has failed."""

    failure: Failure
    answer: AnswerProgress
    closed: bool = False  # the worker accepts no new requests for a while


class Judged(msgspec.Struct, frozen=True):
    """The failed attempt was counted. `suspicion`: what the failure implies about the request itself."""

    suspicion: Suspicion


class WorkerUnhealthy(msgspec.Struct, frozen=True):
    """The fleet took the request's worker out of service."""

    corrupt: bool  # canaries convict it
    others: Collection[Key]  # workers that could serve requests like this one
    answer: AnswerProgress


class Exposed(msgspec.Struct, frozen=True):
    """A worker that produced some of its tokens is convicted: tokens from index `first` on may be wrong."""

    first: int
    key: Key
    carried: bool  # new tokens are computed from that worker's results
    stays: bool  # that worker keeps serving, as the last one of its model
    answer: AnswerProgress


class TransferBegun(msgspec.Struct, frozen=True):
    """A target was asked to reserve room for the request and its KV cache."""


class TransferAdvanced(msgspec.Struct, frozen=True):
    """The KV transfer advanced. `said`: tokens accepted from the source since the target was asked."""

    event: planned_move.Event
    said: tuple[int, ...] = ()


class TransferDeclined(msgspec.Struct, frozen=True):
    """A requested transfer does not take place."""

    why: str


class Switched(msgspec.Struct, frozen=True):
    """The request continues at the target of its transfer."""

    server: Server
    move: Move


class MovedOnPurpose(msgspec.Struct, frozen=True):
    """The request must leave a worker that has not failed, without its KV cache."""

    move: Move
    target: Key | None  # None: it is preempted


class Resumed(msgspec.Struct, frozen=True):
    """The request may be sent again."""

    planned: Key | None = None


class Woken(msgspec.Struct, frozen=True):
    """A worker may have joined, or may have room."""


class NoneLeft(msgspec.Struct, frozen=True):
    """The request was preempted for long enough, and no worker can serve it."""


class Tick(msgspec.Struct, frozen=True):
    """Time has passed. `latency`: the model's factor on waiting times."""

    latency: float = 1.0


class ClientGone(msgspec.Struct, frozen=True):
    """The client has disconnected."""


Event: TypeAlias = (
    Launched | Sent | ConnectFailed | NoWorkerFound | FirstToken | Finished | RequestRejected | AttemptFailed | Judged
    | WorkerUnhealthy | Exposed | TransferBegun | TransferAdvanced | TransferDeclined | Switched | MovedOnPurpose
    | Resumed | Woken | NoneLeft | Tick | ClientGone
)  # fmt: skip
