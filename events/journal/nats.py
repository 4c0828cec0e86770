"""The journal on NATS JetStream.

`publisher` publishes observations in order, with a spool and with retries. `append` writes decisions in one write, which the
broker refuses if the caller has not read the last decision. That write is never retried. If its outcome is unknown, the caller
must read the journal again. `reader` reads all events.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import structlog
from nats.errors import MaxPayloadError

from events import codec, subjects
from events.errors import HoldfastError
from events.fact import Decision, Observation
from events.journal import broker, messages, stream
from events.journal.acknowledged import ACKNOWLEDGED, AcknowledgedPosition
from events.journal.broker import Ack
from events.journal.cell import NatsCell
from events.journal.kind_gate import IN_FORCE, Announcer, KindGate, KindMemory
from events.journal.port import (
    Fenced,
    JournalChanged,
    JournalGone,
    JournalUnavailable,
    StopsAt,
    StreamEnd,
)
from events.journal.publisher import Outbox, Publisher
from events.journal.reader import JournalReadAccess
from events.journal.spool import BYTES_MAX, OutboxMessage, Spool, SpoolUnusable
from events.journal.stream import StreamRefused
from events.nats import keys
from events.nats.connection import DISCONNECTED, BrokerConnection
from events.versions import Known

APPEND_DEADLINE_S = 2.0
APPEND_MAX = 1000  # decisions in one atomic batch; the limit of nats-server
CLOSE_DEADLINE_S = 0.5
FLUSH_LOOK_S = 0.02

log = structlog.get_logger(__name__)


class NatsJournal(JournalReadAccess):
    """The journal of one process instance, on the stream FLEET. Created by `connect`."""

    def __init__(
        self,
        connection: BrokerConnection,
        source: str,
        spool: Spool | None,
        make: bool,
        known: Known | None,
        workers: Sequence[str],
    ) -> None:
        super().__init__(connection)
        self.source = source
        # why the stream cannot be trusted, or None; while this is set, facts are spooled
        self.fault: HoldfastError | None = None
        self.append_deadline_s = APPEND_DEADLINE_S
        self._make = make
        self._number = 0
        self._acknowledged_position = AcknowledgedPosition(spool.directory / ACKNOWLEDGED if spool else None)
        self._publisher = Publisher(
            connection,
            self.counters,
            Outbox(spool, self.counters),
            self._acknowledged_position,
            renumber=self._renumber,
            check=self._check,
            route=self._route,
        )
        # this process's account publishes to a controller's fact intake, and may read nothing
        self._intake = False
        self._gate: KindGate | None = None  # None: every observation is published
        self._announcer: Announcer | None = None
        if known is not None:
            # Without an acknowledged position on this stream, the stored kinds in force may belong to another stream.
            remembered = spool is not None and self._acknowledged_position.seen is not None
            self._gate = KindGate(
                self.counters, KindMemory(spool.directory / IN_FORCE, read=remembered) if spool else None
            )
            self._announcer = Announcer(connection, self._gate, source, known, workers)
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def connect(
        cls,
        url: str,
        source: str,
        spool_dir: Path | None = None,
        *,
        wait_s: float | None = None,
        spool_bytes_max: int = BYTES_MAX,
        make: bool = True,
        known: Known | None = None,
        workers: Sequence[str] = (),
        stops_at: StopsAt = "all",
    ) -> "NatsJournal":
        """Return a journal that publishes facts as `source` ("<role>:<name>"; the instance's id is appended).

        If the broker is unreachable for longer than `wait_s` (2 s by default), the journal continues to connect in the
        background. While the broker is unreachable or has no stream, facts are spooled under `spool_dir`, or held in memory if
        `spool_dir` is None. A missing stream is created only if `make` is set and this process knows of no earlier stream.

        If `known` is set, the process announces which kinds it knows, and holds back observations of kinds that are not in
        force. `workers` are the workers of a worker process. `stops_at` states at which events of unknown kinds a reader of
        this journal stops: all of them, only the decisions, or none.

        Raise StreamRefused or JournalChanged if the stream cannot be trusted, SpoolUnusable if `spool_dir` cannot be written.
        """
        life = codec.new_id()
        connection = await BrokerConnection.open(url, source, wait_s=wait_s)
        try:
            spool = Spool(spool_dir, life, bytes_max=spool_bytes_max) if spool_dir is not None else None
        except SpoolUnusable:
            await connection.close()
            raise
        journal = cls(connection, f"{source}:{life}", spool, make, known, workers)
        journal.stops_at = stops_at
        try:
            await journal._start()
        except BaseException:
            await journal.close()
            raise
        return journal

    async def _start(self) -> None:
        await self._publisher.start()
        self._intake = keys.uses_intake(self.connection.url)
        if self.connection.connected and not self._intake:
            with contextlib.suppress(JournalUnavailable):
                await self._examine()
        self._tasks = [
            asyncio.create_task(self._serve(work)) for work in (self._publisher.run, self._publisher.keep)
        ]
        if self._announcer is not None:
            self._tasks.append(asyncio.create_task(self._serve(self._announcer.run)))

    async def _serve(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run one of the background loops. If a bug ends the loop, set `fault`. Every later append then fails, so that the bug
        is noticed."""
        try:
            await work()
        except Exception as error:
            log.exception("journal_failed")
            self.fault = HoldfastError(f"a background loop of the journal failed: {error!r}")

    async def _examine(self) -> None:
        """Check that the stream can be trusted.

        Raise StreamRefused if its configuration is wrong, JournalChanged if it is another stream, or JournalUnavailable if the
        broker does not answer.
        """
        seen = self._acknowledged_position.seen
        make = self._make and seen is None and self.state is None
        found = await stream.ensure(self.connection, make=make)
        if self.state is not None and found.created != self.state.created:
            raise JournalChanged(f"the stream was recreated at {found.created}. {JournalChanged.__doc__}")
        await self._acknowledged_position.check(self.connection, seen, found)
        self.state = self.state or found
        self.fault = None

    def _route(self, subject: str) -> str:
        return subjects.fact_of_worker(self.connection.user, subject) if self._intake else subject

    async def _check(self) -> bool:
        """Return whether facts may be sent to the broker. Called each time the broker has been connected."""
        self._intake = keys.uses_intake(self.connection.url)
        try:
            await (self.end() if self._intake else self._examine())
        except (StreamRefused, JournalChanged) as error:
            if self.fault is None:
                log.error("journal_refused", why=str(error))
            self.fault = error
            return False
        except JournalGone as error:
            if self.fault is None:
                log.warning("journal_has_no_stream", why=str(error))
            self.fault = error
            return False
        except JournalUnavailable as error:
            log.debug("journal_unavailable", why=str(error))
            return False
        return True

    async def end(self) -> StreamEnd:
        if not self._intake:
            return await super().end()
        try:
            subject = subjects.journal_end(self.connection.user)
            reply = await self.connection.request(subject, b"", broker.API_DEADLINE_S)
            end = msgspec.json.decode(reply.body, type=StreamEnd)
        except DISCONNECTED as error:
            raise JournalUnavailable(f"no controller runs the intake: {error!r}") from error
        except msgspec.MsgspecError as error:
            raise JournalUnavailable(f"a controller's reply cannot be decoded: {error}") from error
        self.fault = None
        return end

    # --- observations -----------------------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """Whether the broker is connected."""
        return self.connection.connected

    @property
    def reachable(self) -> bool:
        """Whether the broker is connected and has a stream that can be trusted."""
        return self.connected and self.fault is None

    @property
    def certificate_ends(self) -> float | None:
        """When the broker's certificate expires, in seconds since 1970. None if the broker presents no certificate."""
        return self.connection.certificate_ends

    @property
    def spool_depth(self) -> int:
        """Number of facts that the broker has not acknowledged."""
        return len(self._publisher.outbox)

    @property
    def spool_bytes(self) -> int:
        """Approximate size in bytes of the facts that the broker has not acknowledged."""
        return self._publisher.outbox.bytes

    def observe(
        self, fact: Observation, *, correlation: str = "", causation: str = "", traceparent: str = ""
    ) -> str:
        id, said_at = codec.new_id(), datetime.now(UTC)

        def publish(fact: Observation) -> None:
            self._number += 1
            headers = codec.encode_headers(
                fact,
                id=id,
                source=self.source,
                source_number=self._number,
                said_at=said_at,
                correlation=correlation,
                causation=causation,
                traceparent=traceparent,
            )
            subject, body = subjects.subject(fact), codec.encode_body(fact)
            self._publisher.add(OutboxMessage(self._number, subject, headers, body))

        if self._gate is None:
            publish(fact)
        else:
            self._gate.take(fact, publish)
        return id

    def withheld(self, command: str) -> bool:
        """Return whether the observation that resulted from the operator's command with the id `command` was dropped.

        An observation is dropped if its kind is not in force (the fleet may not write it yet).
        """
        return self._gate is not None and self._gate.dropped_command(command)

    def _renumber(self, message: OutboxMessage) -> OutboxMessage:
        """Return the fact of `message` as a new fact of this process, with a new id and this process's next number."""
        self._number += 1
        id = codec.new_id()
        fresh = {"ce-id": id, "Nats-Msg-Id": id, "ce-source": self.source, "source-number": str(self._number)}
        return OutboxMessage(self._number, message.subject, {**message.headers, **fresh}, message.body)

    async def flush(self, deadline_s: float) -> bool:
        loop = asyncio.get_running_loop()
        until = loop.time() + deadline_s
        while self._gate is not None and self._gate.waits:  # observations wait rarely, and not long
            if loop.time() >= until:
                return False
            await asyncio.sleep(FLUSH_LOOK_S)
        return await self._publisher.flush(max(0.0, until - loop.time()))

    # --- decisions --------------------------------------------------------------------------------------------------

    async def append(self, decisions: Sequence[Decision], *, through: int, after: int) -> int:
        if not 0 < len(decisions) <= APPEND_MAX:
            raise ValueError(
                f"{len(decisions)} decisions in one append; 1 to {APPEND_MAX} fit one atomic batch"
            )
        if self.fault is not None:
            raise self.fault
        if not self.connection.connected:
            raise JournalUnavailable
        self.counters.appends += 1
        try:
            ack, id = await self._write(decisions, through, after)
        except JournalUnavailable:
            self.counters.appends_unknown += 1
            raise
        if ack.code in broker.WRONG_LAST_SEQUENCE:
            self.counters.appends_fenced += 1
            raise Fenced(f"{ack.error}: the last decision is not at {after}. {Fenced.__doc__}")
        if ack.error:
            self.counters.appends_unknown += 1
            raise JournalUnavailable(f"the journal refused to append: {ack.error}")
        self._acknowledged_position.note(ack.seq, id)
        return ack.seq

    async def observe_next(self, fact: Observation, *, after: int) -> str:
        if self.fault is not None:
            raise self.fault
        if self._gate is not None and not self._gate.passes(fact.kind()):
            raise JournalUnavailable(
                f"the kind {fact.kind()} is not in force yet: see `holdfast fleet versions`"
            )
        if not self.connection.connected:
            raise JournalUnavailable
        fact = fact if self._gate is None else self._gate.in_words_in_force(fact)
        id = codec.new_id()
        headers = codec.encode_headers(
            fact,
            id=id,
            source=self.source,
            source_number=0,  # this fact is not ordered among the facts that go through the spool
            said_at=datetime.now(UTC),
        )
        headers[messages.FENCE] = str(after)
        subject, body = subjects.subject(fact), codec.encode_body(fact)
        try:
            answer = await self.connection.request(subject, body, self.append_deadline_s, headers)
        except DISCONNECTED as error:
            raise JournalUnavailable(f"{error!r}: {JournalUnavailable.__doc__}") from error
        ack = broker.decode_ack(answer.body)
        if ack.code in broker.WRONG_LAST_SEQUENCE:
            raise Fenced(f"{ack.error}: the last one is not at {after}. {Fenced.__doc__}")
        if ack.error:
            raise JournalUnavailable(f"the journal refused a {fact.kind()}: {ack.error}")
        self._acknowledged_position.note(ack.seq, id)
        return id

    async def _write(self, decisions: Sequence[Decision], through: int, after: int) -> tuple[Ack, str]:
        """Publish one decision, or an atomic batch of decisions, unless the decisions' subjects have a message after `after`.

        Return the broker's acknowledgement and the id of the last decision. Raise JournalUnavailable if the outcome is
        unknown, or if a decision is too large.
        """
        batch = codec.new_id() if len(decisions) > 1 else ""
        try:
            with self.connection.expect() as (address, future):
                client = self.connection.client
                async with asyncio.timeout(self.append_deadline_s):
                    for place, decision in enumerate(decisions, 1):
                        last = place == len(decisions)
                        headers = self._decision_headers(decision, through)
                        if place == 1:
                            headers |= messages.fence(after)
                        if batch:
                            headers |= {"Nats-Batch-Id": batch, "Nats-Batch-Sequence": str(place)}
                            headers |= {"Nats-Batch-Commit": "1"} if last else {}
                        body = codec.encode_body(decision)
                        if len(body) > codec.BODY_BYTES_MAX:
                            raise MaxPayloadError
                        reply = address if last else ""
                        await client.publish(subjects.subject(decision), body, reply, headers)
                    answer = await future
            return broker.NO_RESPONDERS if answer.no_responders else broker.decode_ack(answer.body), headers[
                "ce-id"
            ]
        except MaxPayloadError as error:
            raise JournalUnavailable(f"a decision is larger than the broker accepts: {error!r}") from error
        except DISCONNECTED as error:
            raise JournalUnavailable(f"{error!r}: {JournalUnavailable.__doc__}") from error

    def _decision_headers(self, decision: Decision, through: int) -> dict[str, str]:
        return codec.encode_headers(
            decision,
            id=codec.new_id(),
            source=self.source,
            source_number=0,  # decisions are numbered by the fleet, not by their source
            said_at=decision.decided_at,
            through=through,
            correlation=decision.incident,
            causation=decision.cause,
        )

    def cell(self, key: str) -> NatsCell:
        """Return the compare-and-set value under `key`, over the connection of this journal."""
        return NatsCell(self.connection, key)

    async def close(self) -> None:
        if self._tasks:
            await self.flush(CLOSE_DEADLINE_S)
        if self._announcer is not None:
            await self._announcer.leave()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_DEADLINE_S)
        self._publisher.close()
        await self.connection.close()
