"""What happens to a request: the events of its state machine. All are values."""

from collections.abc import Collection
from typing import TypeAlias, final

import msgspec

from controller.frontend.errors import ApiError
from controller.frontend.request.failures import Failure, Suspicion
from controller.frontend.request.state import AnswerProgress, Move
from controller.migration import live
from controller.router.endpoints import Key, Server


@final
class Launched(msgspec.Struct, frozen=True):
    """The request is admitted, and its prompt is read."""

    planned: Key | None = None  # worker that is preferred


@final
class Sent(msgspec.Struct, frozen=True):
    """An attempt was sent to this worker."""

    server: Server


class ConnectFailed(msgspec.Struct, frozen=True):
    """No connection to the chosen worker could be made."""

    key: Key


class NoWorkerFound(msgspec.Struct, frozen=True):
    """No worker can take it now."""

    code: str  # of the `NoWorker` error
    stands_in: bool = False  # a worker that canaries keep out of service will serve in a moment
    reopens_s: float = 0.0  # seconds until a closed worker takes it; inf: each has declined it


@final
class FirstToken(msgspec.Struct, frozen=True):
    """The present attempt has brought its first token."""


@final
class Finished(msgspec.Struct, frozen=True):
    """The answer is complete."""

    reason: str
    cancel: bool = False  # its worker does not know it


class RequestRejected(msgspec.Struct, frozen=True):
    """No worker could answer this request, or none takes it."""

    error: ApiError


class AttemptFailed(msgspec.Struct, frozen=True):
    """The present attempt has failed."""

    failure: Failure
    answer: AnswerProgress
    closed: bool = False  # the worker says that it takes no new requests for a while


class Judged(msgspec.Struct, frozen=True):
    """The failed attempt was counted; `suspicion`: what the failure says of the request itself."""

    suspicion: Suspicion


class WorkerUnhealthy(msgspec.Struct, frozen=True):
    """The fleet took its worker out of service."""

    corrupt: bool  # canaries convict it
    others: Collection[Key]  # workers that could take requests like this one
    answer: AnswerProgress


class Exposed(msgspec.Struct, frozen=True):
    """A worker that gave it tokens is convicted: tokens from index `first` on may be wrong."""

    first: int
    key: Key
    carried: bool  # what comes now is computed from what that worker computed
    stays: bool  # that worker serves on, as the last one of its model
    answer: AnswerProgress


class TransferBegun(msgspec.Struct, frozen=True):
    """A target was asked to take it over with its KV cache."""


class TransferAdvanced(msgspec.Struct, frozen=True):
    """Something happened to the KV transfer. `said`: the tokens accepted from the source since the target was asked."""

    event: live.Event
    said: tuple[int, ...] = ()


class TransferDeclined(msgspec.Struct, frozen=True):
    """A transfer that was wanted does not take place."""

    why: str


class Switched(msgspec.Struct, frozen=True):
    """It continues at the target of its transfer."""

    server: Server
    move: Move


class MovedOnPurpose(msgspec.Struct, frozen=True):
    """It is to leave a worker that has not failed, without its KV cache."""

    move: Move
    target: Key | None  # None: it is put off


class Resumed(msgspec.Struct, frozen=True):
    """It may be sent again."""

    planned: Key | None = None


class Woken(msgspec.Struct, frozen=True):
    """A worker may have come, or may have room."""


class NoneLeft(msgspec.Struct, frozen=True):
    """It was put off for long enough, and no worker is there to take it."""


class Tick(msgspec.Struct, frozen=True):
    """Time has passed. `latency`: the model's factor on waiting times."""

    latency: float = 1.0


class ClientGone(msgspec.Struct, frozen=True):
    """Its client reads no more."""


Event: TypeAlias = (
    Launched | Sent | ConnectFailed | NoWorkerFound | FirstToken | Finished | RequestRejected | AttemptFailed | Judged
    | WorkerUnhealthy | Exposed | TransferBegun | TransferAdvanced | TransferDeclined | Switched | MovedOnPurpose
    | Resumed | Woken | NoneLeft | Tick | ClientGone
)  # fmt: skip
