"""The operator's control subjects over NATS, by FastStream: control.drain, .resume, .move, .restart, .status and
.chaos.

Each takes a JSON object and answers with one: `says`, what was done, or `error`, why not. Controllers share
the subjects as one queue group, so each request is handled once, by whichever controller is there.
"""

import asyncio
import contextlib
from typing import Annotated, Any, Literal, Protocol

import structlog
from faststream import ExceptionMiddleware
from faststream.nats import NatsBroker
from faststream.nats.security import NatsSecurity, NatsToken, NatsUserPassword
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from controller.ports import Control
from events.errors import HoldfastError
from events.nats.connection import PING_INTERVAL_S, PINGS_MAX
from events.nats.urls import account, masked
from events.subjects import CONTROL

QUEUE = "controllers"
RECONNECT_WAIT_S = 0.2
STOP_WITHIN_S = 2.0
NAME_MAX = 200

Fault = Literal[
    "kill", "hang", "unhang", "error", "corrupt", "drift", "slow", "xid", "nvlink", "blackhole", "heal"
]
Name = Annotated[str, Field(min_length=1, max_length=NAME_MAX)]
Answer = dict[str, str]  # "says": what was done, or "error": why it was not
Who = Annotated[str, Field(max_length=NAME_MAX)]

log = structlog.get_logger(__name__)


class OperatorControl(Control, Protocol):
    """What an operator can ask for, rehearsals included."""

    async def chaos(
        self,
        worker: str,
        fault: str,
        argument: float | None,
        duration_s: float | None,
        by: str,
        rank: int | None = None,
    ) -> str: ...


class OperatorBody(BaseModel):
    """What an operator sends. Unknown fields are refused: a misspelt one must not be ignored."""

    model_config = ConfigDict(extra="forbid")


class DrainBody(OperatorBody):
    """Let a worker finish what it runs, and give it nothing new."""

    worker: Name
    deadline_s: float | None = Field(default=None, gt=0, le=86_400)
    by: Who = ""


class ResumeBody(OperatorBody):
    """Take a drained worker back, after its next good canary."""

    worker: Name
    by: Who = ""


class MoveBody(OperatorBody):
    """Move a worker's running requests elsewhere, to the worker `to` or to whoever suits best; it goes on taking new ones."""

    worker: Name
    to: Annotated[str, Field(max_length=NAME_MAX)] = ""
    by: Who = ""


class RestartBody(OperatorBody):
    """Let a worker shut down in good order; whoever supervises it starts its successor."""

    worker: Name
    by: Who = ""


class StatusBody(OperatorBody):
    """Show the fleet as it is."""


class ChaosBody(OperatorBody):
    """Break a worker on purpose, or heal it. `argument`: one token in X wrong, X times slower, X requests
    fail, Xid X. `rank`: the one of a group that is struck. `duration_s`: until this fault ends by itself; without
    one it lasts until `heal`, which ends all of them."""

    worker: Name
    fault: Fault
    argument: float | None = Field(default=None, ge=0)
    duration_s: float | None = Field(default=None, gt=0, le=86_400)
    by: Who = ""
    rank: int | None = Field(default=None, ge=0, le=63)


def declare(broker: NatsBroker, operations: OperatorControl | None) -> None:
    """Register the control subjects on `broker`. Without operations they only serve documentation."""

    def subscribe(verb: str, description: str) -> Any:
        return broker.subscriber(
            f"{CONTROL}.{verb}",
            queue=QUEUE,
            title=f"{CONTROL}.{verb}",
            description=description,
            no_reply=False,
        )

    def ready() -> OperatorControl:
        assert operations is not None, "a broker for documentation only was started"
        return operations

    @subscribe("drain", DrainBody.__doc__ or "")  # type: ignore[untyped-decorator]
    async def drain(body: DrainBody) -> Answer:
        return {"says": await ready().drain(body.worker, body.deadline_s, body.by)}

    @subscribe("resume", ResumeBody.__doc__ or "")  # type: ignore[untyped-decorator]
    async def resume(body: ResumeBody) -> Answer:
        return {"says": await ready().resume(body.worker, body.by)}

    @subscribe("move", MoveBody.__doc__ or "")  # type: ignore[untyped-decorator]
    async def move(body: MoveBody) -> Answer:
        return {"says": await ready().move(body.worker, body.to, body.by)}

    @subscribe("restart", RestartBody.__doc__ or "")  # type: ignore[untyped-decorator]
    async def restart(body: RestartBody) -> Answer:
        return {"says": await ready().restart(body.worker, body.by)}

    @subscribe("status", StatusBody.__doc__ or "")  # type: ignore[untyped-decorator]
    async def status(body: StatusBody) -> dict[str, Any]:
        return await ready().status()

    @subscribe("chaos", ChaosBody.__doc__ or "")  # type: ignore[untyped-decorator]
    async def chaos(body: ChaosBody) -> Answer:
        b = body
        return {"says": await ready().chaos(b.worker, b.fault, b.argument, b.duration_s, b.by, b.rank)}


class ControlApi:
    """The control subjects, served until cancelled."""

    def __init__(self, url: str, operations: OperatorControl) -> None:
        guard = ExceptionMiddleware(
            publish_handlers={ValidationError: _invalid, HoldfastError: _refused, Exception: _failed}
        )
        security = _account(url)
        self._broker = NatsBroker(
            [part.strip() for part in (url if security is None else masked(url)).split(",")],
            middlewares=[guard],
            security=security,
            max_reconnect_attempts=-1,
            reconnect_time_wait=1,
            ping_interval=PING_INTERVAL_S,
            max_outstanding_pings=PINGS_MAX,
            logger=None,
        )
        declare(self._broker, operations)
        self.serving = asyncio.Event()  # a flag: the subjects are subscribed

    async def run(self) -> None:
        """Serve. A broker that is away is tried again until it is there."""
        await serve(self._broker, self.serving)


async def serve(broker: NatsBroker, serving: asyncio.Event) -> None:
    """Serve the subjects that a broker has declared until cancelled, and say when they are subscribed."""
    try:
        while not serving.is_set():
            try:
                await broker.start()
                for _ in range(2):  # a flush's ping overtakes what is pending; the second one does not
                    await broker.connection.flush()
                serving.set()
            except Exception as error:  # whatever the client library raises while nobody answers
                log.debug("control_api_waits", error=repr(error))
                await asyncio.sleep(RECONNECT_WAIT_S)
            _heed_cancellation()
        await asyncio.Event().wait()
    finally:
        with contextlib.suppress(Exception):  # a broker that is away need not be told
            async with asyncio.timeout(STOP_WITHIN_S):
                await broker.stop()


def _heed_cancellation() -> None:
    """Raise CancelledError if this task is cancelled, and has not heard of it: the `wait_for` of Python 3.11, which nats-py
    uses, swallows a cancellation that comes with the answer, and the process would wait for us for ever."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def _account(url: str) -> NatsSecurity | None:
    match account(url):
        case {"token": token}:
            return NatsToken(token)
        case {"user": user, "password": password}:
            return NatsUserPassword(user, password)
        case _:
            return None


def _invalid(error: ValidationError) -> Answer:
    says = "; ".join(
        f"{'.'.join(str(part) for part in e['loc']) or 'body'}: {e['msg']}" for e in error.errors()
    )
    return {"error": f"the request is not valid: {says}"}


def _refused(error: HoldfastError) -> Answer:
    return {"error": str(error)}


def _failed(error: Exception) -> Answer:
    log.error("control_request_failed", error=repr(error), exc_info=error)
    return {"error": "internal error, see the controller's log"}
