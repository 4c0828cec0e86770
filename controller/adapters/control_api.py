"""Serves the operator's control subjects over NATS, with FastStream.

The subjects are control.drain, .resume, .move, .restart, .status, .versions, .allow, .golden and .chaos. A request is a JSON
object. The answer is a JSON object with the field `says`, a text about what was done, or the field `error`, the reason for a
refusal. Every controller receives each request, and only the leader answers (`controller.runtime.commands`).
"""

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, Literal, Protocol, TypeVar

import structlog
from faststream import ExceptionMiddleware
from faststream.exceptions import SkipMessage
from faststream.nats import NatsBroker
from faststream.nats.security import NatsCredentials, NatsNKey, NatsSecurity, NatsToken, NatsUserPassword
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError, model_validator

from controller.ports import Answer, Command, CommandGate, Control, GoldenWish
from events.chaos import Fault
from events.dead_letters import DeadLetter
from events.errors import HoldfastError
from events.nats.bus import Body
from events.nats.connection import PING_INTERVAL_S, PINGS_MAX
from events.nats.urls import account, addresses, inbox, masked
from events.observations import GoldenAnswer
from events.subjects import CONTROL, DEAD

# maximum number of requests per subject that are handled at once; others wait in the client's queue
AT_ONCE = 64
RECONNECT_WAIT_S = 0.2
STOP_WITHIN_S = 2.0
NAME_MAX = 200
KEY_MAX = 1000

Name = Annotated[str, Field(min_length=1, max_length=NAME_MAX)]
LogProb = Annotated[float, Field(allow_inf_nan=False)]
OperatorName = Annotated[str, Field(max_length=NAME_MAX)]

log = structlog.get_logger(__name__)


Act = Awaitable[object]
B = TypeVar("B", bound="OperatorBody")
F = TypeVar("F", bound="FleetBody")


class OperatorControl(Control, Protocol):
    """The interface to carry out all of the operator's commands, including fault injection, goldens and versions."""

    async def versions(self) -> Body: ...
    async def allow(self, by: str, command: Command = ...) -> str: ...
    async def golden(self, wish: GoldenWish, by: str, command: Command = ...) -> str: ...

    async def chaos(
        self,
        worker: str,
        fault: str,
        argument: float | None,
        duration_s: float | None,
        by: str,
        rank: int | None = None,
        command: Command = ...,
    ) -> str: ...


class OperatorBody(BaseModel):
    """The body of an operator's request. Unknown fields are refused, so that a misspelt field is not ignored."""

    model_config = ConfigDict(extra="forbid")


class FleetBody(OperatorBody):
    """The fields that all commands have."""

    id: Annotated[str, Field(min_length=8, max_length=64, pattern=r"^[\w-]+$")] = Field(
        description="chosen by the sender; a second command with the same id gets the first one's answer, and does nothing"
    )
    deadline: AwareDatetime = Field(
        description="until when the command may be carried out, by the broker's clock; at most 60 s ahead"
    )
    by: OperatorName = ""

    def command(self, verb: str) -> Command:
        """Return the id, deadline and sender of this command. `verb` is the last part of the command's control subject."""
        return Command(self.id, self.deadline, verb, "", self.by)


class CommandBody(FleetBody):
    """The fields that all commands about one worker have."""

    worker: Name

    def command(self, verb: str) -> Command:
        """Return the id, deadline, worker and sender of this command. `verb` is the last part of the command's subject."""
        return Command(self.id, self.deadline, verb, self.worker, self.by)


class DrainBody(CommandBody):
    """Send no new requests to a worker, and let the worker finish its running requests."""

    deadline_s: float | None = Field(default=None, gt=0, le=86_400)


class ResumeBody(CommandBody):
    """Return a drained worker to service after its next good canary."""


class MoveBody(CommandBody):
    """Move a worker's running requests to the worker `to`, or to the best other worker.

    The worker continues to accept new requests.
    """

    to: Annotated[str, Field(max_length=NAME_MAX)] = ""


class RestartBody(CommandBody):
    """Shut a worker down gracefully, so that its supervisor starts the next instance."""


Token = Annotated[int, Field(ge=0, lt=1 << 31)]
TopLogprobs = Annotated[tuple[tuple[Token, LogProb], ...], Field(max_length=64)]
Key = Annotated[str, Field(max_length=KEY_MAX)]


class AnswerBody(OperatorBody):
    """A golden: a canary's prompt tokens, and the tokens and logprobs of the right answer.

    `asked` is the number of tokens that the canary requests; 0 means as many as the answer has. `tolerance` is the maximum
    difference of a logprob; 0 means that only tokens are compared.
    """

    canary: Name
    prompt: Annotated[tuple[Token, ...], Field(min_length=1, max_length=65_536)]
    tokens: Annotated[tuple[Token, ...], Field(min_length=1, max_length=4096)]
    top_k: Annotated[tuple[TopLogprobs, ...], Field(max_length=4096)] = ()
    tolerance: float = Field(default=0.0, ge=0, le=100, allow_inf_nan=False)
    asked: int = Field(default=0, ge=0, le=4096)

    def answer(self) -> GoldenAnswer:
        """Convert the golden to the form that facts on the journal contain."""
        return GoldenAnswer(**self.model_dump())


class GoldenBody(FleetBody):
    """Approve goldens, retire them, or let a worker record them again.

    The goldens are selected by a worker, a canary key or a model, and optionally by the names of canaries. If `answers` is given,
    these goldens are approved for `canary_key` instead of the workers' answers.
    """

    act: Literal["approve", "retire", "record"]
    worker: Annotated[str, Field(max_length=NAME_MAX)] = ""
    canary_key: Key = ""
    model: Key = ""
    canaries: Annotated[tuple[Name, ...], Field(max_length=64)] = ()
    answers: Annotated[tuple[AnswerBody, ...], Field(max_length=64)] = ()

    @model_validator(mode="after")
    def _named(self) -> "GoldenBody":
        if self.act == "record" and not self.worker:
            raise ValueError("record requires a worker")
        if self.act == "retire" and self.worker:
            raise ValueError("retire accepts a canary key or a model, but no worker")
        if not (self.worker or self.canary_key or self.model):
            raise ValueError("one of worker, canary_key and model is required")
        if self.answers and (self.act != "approve" or self.worker or not self.canary_key):
            raise ValueError("answers are only accepted with act=approve and a canary_key, without a worker")
        return self

    def golden_request(self) -> GoldenWish:
        """Convert the body to the request that the controller carries out."""
        answers = tuple(body.answer() for body in self.answers)
        return GoldenWish(
            act=self.act, worker=self.worker, canary_key=self.canary_key, model=self.model,
            canaries=self.canaries, answers=answers,
        )  # fmt: skip


class AllowBody(FleetBody):
    """Put in force all kinds of facts and the newest rules of decision (deciders version) that the leading controller supports.

    A kind or version that is not in force is not used, so that older processes of the fleet can still work. This command puts
    all of them in force, even those that some process of the fleet does not support.
    """


class VersionsBody(OperatorBody):
    """Show the kinds of facts and the deciders version that each process knows, and those in force."""


class StatusBody(OperatorBody):
    """Show the fleet's present status."""


class ChaosBody(CommandBody):
    """Inject a fault into a worker, or end all of the worker's faults with `heal`.

    The meaning of `argument`, a number X, depends on the fault: one token in X is wrong, steps are X times slower, X requests
    fail, or the Xid is X. `rank` is the rank in which the fault occurs. The fault ends after `duration_s` seconds, or with `heal`
    if no duration is given.
    """

    fault: Fault
    argument: float | None = Field(default=None, ge=0)
    duration_s: float | None = Field(default=None, gt=0, le=86_400)
    rank: int | None = Field(default=None, ge=0, le=63)


def declare(broker: NatsBroker, operations: OperatorControl | None, gate: CommandGate | None) -> None:
    """Register the handlers of all control subjects on `broker`.

    If `operations` and `gate` are None, the broker can only be documented and must not be started.
    """

    def ready() -> tuple[OperatorControl, CommandGate]:
        assert operations is not None and gate is not None, "a broker for documentation only was started"
        return operations, gate

    def subscribe(verb: str, body: type[B], handle: Callable[[B], Awaitable[Body]]) -> None:
        handle.__annotations__["body"] = body  # FastStream uses the annotation to parse and document the body
        subject = f"{CONTROL}.{verb}"
        broker.subscriber(
            subject, title=subject, description=body.__doc__ or "", no_reply=False, max_workers=AT_ONCE
        )(handle)

    def command(verb: str, kind: type[F], act: Callable[[OperatorControl, F, Command], Act]) -> None:
        async def handle(body: F) -> Answer:
            (ours, gate), order = ready(), body.command(verb)
            answer = await gate.carry_out(order, lambda: act(ours, body, order))
            if answer is None:
                raise SkipMessage  # sends no answer, because another controller answers or the outcome is unknown
            return answer

        subscribe(verb, kind, handle)

    def query(verb: str, kind: type[B], ask: Callable[[OperatorControl], Awaitable[Body]]) -> None:
        async def handle(body: B) -> Body:
            ours, gate = ready()
            if not await gate.ours_to_answer():
                raise SkipMessage
            return await ask(ours)

        subscribe(verb, kind, handle)

    command("drain", DrainBody, lambda ours, b, order: ours.drain(b.worker, b.deadline_s, b.by, order))
    command("resume", ResumeBody, lambda ours, b, order: ours.resume(b.worker, b.by, order))
    command("move", MoveBody, lambda ours, b, order: ours.move(b.worker, b.to, b.by, order))
    command("restart", RestartBody, lambda ours, b, order: ours.restart(b.worker, b.by, order))
    query("status", StatusBody, lambda ours: ours.status())
    query("versions", VersionsBody, lambda ours: ours.versions())
    command("golden", GoldenBody, lambda ours, b, order: ours.golden(b.golden_request(), b.by, order))
    command("allow", AllowBody, lambda ours, b, order: ours.allow(b.by, order))
    command(
        "chaos",
        ChaosBody,
        lambda ours, b, order: ours.chaos(b.worker, b.fault, b.argument, b.duration_s, b.by, b.rank, order),
    )


class ControlApi:
    """Serves the control subjects of one controller."""

    def __init__(self, url: str, operations: OperatorControl, gate: CommandGate) -> None:
        guard = ExceptionMiddleware(
            publish_handlers={ValidationError: _invalid, HoldfastError: _refused, Exception: _failed}
        )
        security = _security(account(url))
        places = addresses(url if security is None else masked(url))
        self._broker = NatsBroker(
            places,
            middlewares=[guard],
            security=security,
            inbox_prefix=inbox(url),
            max_reconnect_attempts=-1,
            reconnect_time_wait=1,
            ping_interval=PING_INTERVAL_S,
            max_outstanding_pings=PINGS_MAX,
            logger=None,
        )
        declare(self._broker, operations, gate)
        self.serving = asyncio.Event()  # set once the subjects are subscribed

    async def run(self) -> None:
        """Serve the control subjects until cancelled. While the broker is unavailable, try to connect again."""
        await serve(self._broker, self.serving)


async def serve(broker: NatsBroker, serving: asyncio.Event) -> None:
    """Serve the subjects that are declared on `broker` until cancelled. Set `serving` once all of them are subscribed."""
    try:
        while not serving.is_set():
            try:
                await broker.start()
                for _ in range(2):  # the first flush's ping may overtake pending subscriptions
                    await broker.connection.flush()
                serving.set()
            # the client library may raise any error while the broker is unavailable
            except Exception as error:
                log.debug("control_api_waits", error=repr(error))
                await asyncio.sleep(RECONNECT_WAIT_S)
            _raise_if_cancelled()
        await asyncio.Event().wait()
    finally:
        with contextlib.suppress(Exception):  # an unavailable broker need not be notified
            async with asyncio.timeout(STOP_WITHIN_S):
                await broker.stop()


def _raise_if_cancelled() -> None:
    """Raise CancelledError if a cancellation of this task was swallowed.

    The `wait_for` of Python 3.11, which nats-py uses, swallows a cancellation that arrives together with the result. Without
    this check, the process would then wait for this task forever.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def _security(options: Mapping[str, str]) -> NatsSecurity | None:
    match options:
        case {"nkeys_seed": seed}:
            return NatsNKey(seed)
        case {"user_credentials": creds}:
            return NatsCredentials(creds)
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


DESCRIPTION = """Every fact of a Holdfast fleet, and the operator's control subjects.

Facts are CloudEvents 1.0 in binary mode on the JetStream stream FLEET: the headers `ce-id` (a UUIDv7, also
`Nats-Msg-Id`), `ce-type` (`holdfast.` and the kind), `ce-source`, `ce-time`, `source-number`, and where they apply
`through`, `correlation`, `causation` and `traceparent`; the body is JSON. docs/reference/events.md lists the
guarantees of each kind. Control subjects are core NATS requests with JSON bodies; an answer with `error` is a
refusal. A command has an `id`, chosen by the sender, and a `deadline`, an instant by the broker's clock, which
`$JS.API.STREAM.INFO.FLEET` returns as `ts`. It is carried out once and before its deadline, or refused.
"""


def document() -> str:
    """Return the AsyncAPI document of all events and control subjects, as YAML."""
    from faststream.specification import AsyncAPI

    from controller.catalogue import entries

    broker = NatsBroker("nats://localhost:4222")
    declare(broker, None, None)
    for entry in entries():
        broker.publisher(
            re.sub(r"<(\w+)>", r"{\1}", entry.subject),
            schema=entry.fact,
            title=entry.kind,
            description=f"{entry.promise} Emitted by {entry.emitter}.",
        )
    broker.publisher(
        f"{DEAD}.{{webhook}}",
        schema=DeadLetter,
        title="dead_letter",
        description="An event that a webhook did not accept, on stream DEAD_LETTERS (docs/guides/webhooks.md). Emitted by "
        "the notifier.",
    )
    made: Any = AsyncAPI(broker, title="Holdfast", version="1", description=DESCRIPTION).to_specification()
    parts = (
        (made, "channels"),
        (made, "operations"),
        (made.components, "messages"),
        (made.components, "schemas"),
    )
    for part, name in parts:  # sorted, because FastStream keeps registrations in a set with a random order
        setattr(part, name, dict(sorted(getattr(part, name).items())))
    text: str = made.to_yaml()
    return text
