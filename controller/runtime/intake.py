"""Intake of workers' facts: checks each fact of a worker before it reaches the journal.

    worker ── say.ACCOUNT.WORKER.KIND ──▶ intake ── fleet.observed.worker.WORKER.KIND ──▶ journal
           ◀── acknowledgement or refusal ───┘

The broker lets an account publish only below its own `say.ACCOUNT`, so the subject proves the sender. The intake checks the
sender's budget, its reply address, the fact's source and source number, and the fact's kind and values. It writes new headers, so
that no worker can set a header that JetStream obeys (atomic batches, expected sequences, expiry). A fact that can never be
accepted is refused permanently, and its worker drops it. Each such refusal is reported with the sender's name.

All controllers of a fleet share the subjects: if one controller fails, another serves the next message. The journal deduplicates
repeated facts by their ids. The sender restores the order of facts that overtook one another (`events.journal.publisher`).
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

import msgspec
import structlog

from controller.ports import Clock
from controller.runtime.host_processes import HostProcesses
from controller.runtime.settings import ControllerBudgets
from controller.runtime.view import View
from events import codec, subjects
from events.broker_users import WORKER, account_of, workers_of
from events.errors import HoldfastError
from events.fact import Recorded, Skipped
from events.intrusion.control_message import acknowledged
from events.intrusion.registration import impossible
from events.intrusion.reports import Intrusions, ReportIntrusion
from events.intrusion.send_budget import SendBudget, TrafficBudget
from events.intrusion.source_rule import forged
from events.journal import broker, messages
from events.journal.port import Journal
from events.nats.connection import DISCONNECTED, BrokerConnection
from events.observations import WorkerJoined
from events.permissions import PUBLISHES

QUEUE = "intake"
KB = 1024
UNANSWERED_MAX = 1_024  # facts in progress: accepted, and not acknowledged by the journal yet
ACK_S = 2.0
ACCOUNTS_MAX = 16_384
ROLES = ("worker", "watch")
NO_TIME = datetime(1970, 1, 1, tzinfo=UTC)  # timestamp of an event that is not on the journal yet
KINDS = frozenset(kind.kind() for kind in PUBLISHES["worker"])

log = structlog.get_logger(__name__)


class FactRefused(HoldfastError):
    """A worker's fact is refused permanently."""


class SourceForged(FactRefused):
    """A worker's fact names another process as its source. The sender is ejected.

    On the journal, such a fact would use up a source number of that process. Readers would then take the process's own fact with
    this number for a repeated one, and drop it.
    """


class NotNow(HoldfastError):
    """A worker's fact cannot be accepted now; its sender repeats it."""


def accepted(
    user: str, worker: str, kind: str, headers: bytes | None, body: bytes, bytes_max: int = 64 * KB
) -> Recorded:
    """Decode and check a worker's fact, and return it as an event without a journal position.

    Raise FactRefused if the fact can never be accepted. Raise NotNow if this controller does not know its kind.
    """
    if worker not in workers_of(user):
        raise FactRefused(f"publish facts of {worker}")
    if len(body) > bytes_max:
        raise FactRefused(f"publish a fact of {len(body)} bytes")
    subject = f"{subjects.OBSERVED}.worker.{worker}.{kind}"
    event = messages.read(0, NO_TIME, subject.encode(), headers, body)
    if isinstance(event.fact, Skipped):
        if event.fact.unknown:
            raise NotNow(f"this controller does not know it: {event.fact.why}")
        raise FactRefused(f"publish what is no fact: {event.fact.why}")
    if kind not in KINDS:
        raise FactRefused(f"publish {kind}, which no worker observes")
    check_source(user, event.source, event.source_number)
    if why := impossible(event.fact):
        raise FactRefused(f"register an impossible value: {why}")
    if isinstance(event.fact, WorkerJoined) and event.fact.account not in ("", user):
        raise FactRefused(f"register the account {event.fact.account}, which is not its own")
    return event


def check_source(user: str, source: str, number: int) -> None:
    """Raise SourceForged unless a fact's source is a process of this account and its source number is positive."""
    role, _, rest = source.partition(":")
    name, _, life = rest.rpartition(":")
    first = user.removeprefix(WORKER).partition("+")[0]
    if role not in ROLES or not life or subjects.token(name) != first or number <= 0:
        raise SourceForged(f"publish as another source: {source}, number {number}")


def written(event: Recorded, headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers with which an accepted fact is published, made from the event's decoded values.

    Of `headers`, which the worker sent, only `traceparent` is copied.
    """
    assert event.said_at is not None
    return codec.encode_headers(
        event.fact,
        id=event.id,
        source=event.source,
        source_number=event.source_number,
        said_at=event.said_at,
        correlation=event.correlation,
        causation=event.causation,
        traceparent=headers.get("traceparent", ""),
    )


class _Account:
    """Counts the facts and bytes of one account against its budgets."""

    def __init__(self, budgets: ControllerBudgets, now: float) -> None:
        self._facts, self._day = TrafficBudget(budgets.facts, now), SendBudget(budgets.facts_of_a_day, now)
        # facts beyond the budget before the sender is ejected: a correct worker waits 2.5 s before it sends again
        self._patience = SendBudget(budgets.facts.messages, now)

    def excess(self, size: int, now: float) -> tuple[str, bool] | None:
        """Count one fact of `size` bytes. Return None if it is within all budgets.

        If a budget is exceeded, return a phrase that names it, and whether the sender is to be ejected.
        """
        if not self._facts.take(1, size, now):
            return "its budget", not self._patience.take(1, now)
        return None if self._day.take(size, now) else ("its budget of a day", True)


@dataclass(eq=False)
class FactIntake:
    """Receives, checks and publishes workers' facts.

    A separate broker connection is used, so that a flood of facts delays neither the journal nor heartbeats.
    """

    journal: Journal
    report: ReportIntrusion
    instance_of: Callable[[str], str]  # the live instance of a worker by name; "" if it has none
    now: Callable[[], float]
    budgets: ControllerBudgets = field(default_factory=ControllerBudgets)

    def __post_init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._connection: BrokerConnection | None = None

    @property
    def unanswered(self) -> int:
        """Number of messages in progress, most of them facts that the journal has not acknowledged yet."""
        return len(self._tasks)

    async def run(self, url: str, name: str) -> None:
        """Connect to the broker at `url` and handle facts until cancelled."""
        connection = self._connection = await BrokerConnection.open(url, f"intake:{name}")
        try:
            await connection.subscribe_raw(subjects.SAY_ALL, self.receive, queue=QUEUE)
            await asyncio.Event().wait()
        finally:
            for task in self._tasks:
                task.cancel()
            await connection.close()

    def receive(self, subject: bytes, reply: bytes, body: bytes, headers: bytes | None) -> None:
        """Count a message against its sender's budget, check its reply address, and start a task that handles it.

        Called in the connection's read loop. Beyond UNANSWERED_MAX tasks, the message is dropped, and its sender repeats it.
        """
        _, user, *rest = subject.decode("utf-8", "replace").split(".")
        if not self._within_budget(user, len(body) + len(headers or b"")):
            return
        if not reply.startswith(f"_INBOX.{user}.".encode()):
            self._refuse(user, "", f"have an answer sent to {reply[:100].decode('utf-8', 'replace')}")
            return
        if len(self._tasks) >= UNANSWERED_MAX:
            return  # without an answer, the sender repeats the fact
        work = self._end(reply) if not rest else self._take(user, rest, reply, body, headers)
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _within_budget(self, user: str, size: int) -> bool:
        now, account = self.now(), self._accounts.get(user)
        if account is None:
            if len(self._accounts) >= ACCOUNTS_MAX:
                self._accounts.pop(next(iter(self._accounts)))
            account = self._accounts[user] = _Account(self.budgets, now)
        excess = account.excess(size, now)
        if excess is None:
            return True
        self._refuse(user, "", f"publish facts beyond {excess[0]}: {size} bytes", eject=excess[1])
        return False

    def _refuse(self, user: str, worker: str, tried: str, *, eject: bool = False) -> None:
        named = worker or next(iter(workers_of(user)), "")
        self.report(user, tried, worker=named, instance=self.instance_of(named), eject=eject)

    async def _end(self, reply: bytes) -> None:
        with contextlib.suppress(HoldfastError):
            self._answer(reply, msgspec.json.encode(await self.journal.end()))

    async def _take(
        self, user: str, rest: list[str], reply: bytes, body: bytes, headers: bytes | None
    ) -> None:
        worker, kind = rest if len(rest) == 2 else ("", "")
        try:
            event = accepted(user, worker, kind, headers, body, self.budgets.fact_kb_max * KB)
            answer = await self._publish(event, broker.parse_headers(headers))
        except FactRefused as error:
            self._refuse(user, worker, str(error), eject=isinstance(error, SourceForged))
            answer = _error(broker.INTAKE_REFUSES, str(error))
        except NotNow as error:
            answer = _error(broker.INTAKE_LATER, str(error))
        except DISCONNECTED as error:
            log.debug("intake_not_acknowledged", why=repr(error))
            return
        self._answer(reply, answer)

    async def _publish(self, event: Recorded, headers: Mapping[str, str]) -> bytes:
        """Publish an accepted fact to the journal, and return the broker's acknowledgement unchanged.

        Raise one of the exceptions in DISCONNECTED if the broker does not answer.
        """
        assert self._connection is not None
        body = codec.encode_body(event.fact)
        subject = subjects.subject(event.fact)
        reply = await self._connection.request(subject, body, ACK_S, written(event, headers))
        return reply.body

    def _answer(self, reply: bytes, body: bytes) -> None:
        if self._connection is not None:
            client = self._connection.client
            client.post(reply + b" ", b"", body)
            client.write()


def _error(code: int, why: str) -> bytes:
    return msgspec.json.encode({"error": {"err_code": code, "description": why[:200]}})


@dataclass(eq=False)
class Intruders:
    """Runs one controller's intake, and reports the intrusion attempts that the intake and other checks detect.

    The other checks concern signals to processes, the lease, and heartbeats.
    """

    view: View
    journal: Journal
    clock: Clock
    leading: Callable[[], bool]
    budgets: ControllerBudgets = field(default_factory=ControllerBudgets)

    def __post_init__(self) -> None:
        self._lookup: asyncio.Task[None] | None = None
        self.intrusions = Intrusions(self.journal.observe, self.clock.monotonic)
        self.intake = FactIntake(
            self.journal, self.intrusions.report, self._instance_of, self.clock.monotonic, self.budgets
        )
        self.processes = HostProcesses(report=self.intrusions.report)
        self.view.listen(self._on_batch)

    def foreign_lease(self, value: bytes) -> None:
        """Report the intrusion attempt that put the foreign bytes `value` into the controllers' lease.

        If `value` is a broker's acknowledgement, report the publisher of the acknowledged fact.
        """
        seq = acknowledged(value)
        if seq is None:
            self.intrusions.report("unknown", "write into the controllers' lease")
        elif self._lookup is None or self._lookup.done():
            self._lookup = asyncio.get_running_loop().create_task(self._blame_publisher(seq))

    async def _blame_publisher(self, seq: int) -> None:
        with contextlib.suppress(HoldfastError):
            async for batch in self.journal.read(seq - 1, until=seq):
                for recorded in batch:
                    name = str(getattr(recorded.fact, "worker", ""))
                    account = None if recorded.seq == seq and name else "unknown"
                    tried = "have an acknowledgement sent into the controllers' lease"
                    self._blame(name, tried, eject=bool(self._instance_of(name)), account=account)

    def flooding(self, worker: str) -> None:
        """Report a worker that exceeds its heartbeat budget. Every controller receives heartbeats; only the leader reports."""
        if self.leading():
            eject = bool(self._instance_of(worker))
            self._blame(worker, "flood the controllers with heartbeats", eject=eject)

    def _blame(self, name: str, tried: str, *, eject: bool, account: str | None = None) -> None:
        """Report that a worker tried what the phrase `tried` says.

        The report names `account`; if None, the account that the worker registered. `eject` requests the worker's ejection.
        """
        workers = self.view.fleet.workers
        worker = workers.get(name)
        account = account or account_of(name, worker.joined.account if worker is not None else "")
        self.intrusions.report(account, tried, worker=name, instance=self._instance_of(name), eject=eject)

    def _instance_of(self, name: str) -> str:
        workers = self.view.fleet.workers
        worker = workers.get(name)
        return worker.joined.instance if worker is not None and worker.alive else ""

    def _on_batch(self, view: object, batch: Sequence[Recorded]) -> None:
        """Report forged facts and impossible registrations that bypassed the intake.

        A fact bypasses the intake if it is published to the journal directly, or on a broker without accounts.
        """
        if not self.leading():
            return
        for recorded in batch:
            fact = recorded.fact
            if why := impossible(fact):
                name = str(getattr(fact, "worker", ""))
                account = account_of(name, getattr(fact, "account", ""))
                self.intrusions.report(account, f"register an impossible value: {why}", worker=name)
            if why := forged(fact, recorded.source):
                name = str(getattr(fact, "worker", ""))
                self._blame(name, f"publish as another source: {why}", eject=True)
