"""A journal in memory: the test double of the NATS journal, which passes the same conformance suite.

Several journals share one `MemoryStream`, as processes share a broker. `reachable` simulates an outage: observations wait in
their `MemoryJournal`, as they would in a spool, and decisions cannot be appended.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from events import codec, subjects
from events.codec import UnknownKind
from events.fact import Decision, Fact, Observation, Recorded, Skipped
from events.journal import messages
from events.journal.broker import parse_headers
from events.journal.counters import JournalCounters
from events.journal.messages import FENCE
from events.journal.port import Fenced, JournalChanged, JournalDropped, JournalUnavailable, StopsAt, StreamEnd

BATCH_MAX = 1000  # events per yielded list, and decisions per append, as in the NATS journal


@dataclass
class MemoryStream:
    """The stream that all journals share, with the state that a broker would hold."""

    events: list[Recorded] = field(default_factory=list)
    clock: Callable[[], datetime] = lambda: datetime.now(UTC)  # stands for the broker's own clock
    first: int = field(default=1, init=False)  # sequence of the oldest event that has not been dropped
    decided: int = field(default=0, init=False)  # sequence of the last message on a decision's subject
    # the event that quarantines a message, by the message's sequence
    quarantined: dict[int, Recorded] = field(default_factory=dict, init=False)
    _places: dict[int, str] = field(default_factory=dict, init=False)  # ids of skipped messages, by sequence
    _last_of: dict[str, int] = field(
        default_factory=dict, init=False
    )  # sequence of the last message, by subject
    _reachable: bool = True
    _ids: dict[str, int] = field(default_factory=dict)
    _waiting: set[asyncio.Future[None]] = field(default_factory=set)
    _handles: list["MemoryJournal"] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._ids.update((event.id, event.seq) for event in self.events)
        self._last_of.update(
            (subjects.subject(e.fact), e.seq) for e in self.events if not isinstance(e.fact, Skipped)
        )
        self.decided = max((e.seq for e in self.events if isinstance(e.fact, Decision)), default=0)

    @property
    def reachable(self) -> bool:
        """Whether the simulated broker is reachable. When it becomes reachable, waiting facts are sent, as from a spool."""
        return self._reachable

    @reachable.setter
    def reachable(self, reachable: bool) -> None:
        self._reachable = reachable
        for handle in self._handles:
            handle.send()
        if reachable:
            self.wake()

    def add(self, fact: Fact, headers: dict[str, str]) -> int:
        """Store one fact as a broker would, and return its sequence. A decision is stored only under the fence.

        If a fact with the same id is stored already, return the sequence of that fact.
        """
        if isinstance(fact, Decision):
            headers = headers | messages.fence(self.decided)
        return self.publish(subjects.subject(fact), codec.encode_body(fact), messages.as_sent(headers))

    def publish(self, subject: str, body: bytes, headers: bytes | None = None) -> int:
        """Store any message, as a broker does for any publisher, and return its sequence. Return 0 if the message's fence
        refused it."""
        named = parse_headers(headers)
        id = named.get("Nats-Msg-Id", "")
        if known := self._ids.get(id):
            return known
        last = self.decided if f"{FENCE}-Subject" in named else self.last_of(subject)
        if FENCE in named and named[FENCE] != str(last):
            return 0
        seq = len(self.events) + 1
        if id:
            self._ids[id] = seq
        event = messages.read(seq, self.clock(), subject.encode(), headers, body)
        self.events.append(event)
        self._places[seq] = messages.place_id(subject.encode(), body)
        self._last_of[subject] = seq
        if subject.startswith(f"{subjects.DECIDED}."):
            self.decided = seq
        if place := messages.quarantines(event):
            self.quarantined.setdefault(place, event)
        return seq

    def last_of(self, subject: str) -> int:
        """Return the sequence of the newest message on a subject. Return 0 if the stream has no such message, or has dropped
        it."""
        last = self._last_of.get(subject, 0)
        return last if last >= self.first else 0

    def drop(self, through: int) -> None:
        """Drop the oldest events, up to the sequence `through`, as a broker does at its bounds."""
        self.first = max(self.first, min(through, len(self.events)) + 1)

    def as_read(self, seq: int, stops_at: StopsAt) -> Recorded:
        """Return the message at sequence `seq` as a reader receives it. Raise UnknownKind if the reader must stop at the
        message."""
        event = self.events[seq - 1]
        if by := self.quarantined.get(seq):
            return messages.quarantined_event(event, by, self._places[seq])
        if messages.stops_reader(event, stops_at):
            raise messages.stops(event)
        return event

    def wake(self) -> None:
        """Wake the readers that wait in `grown`, because there are more events."""
        waiting, self._waiting = self._waiting, set()
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def grown(self) -> None:
        """Wait until the next call of `wake`."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            await future
        finally:
            self._waiting.discard(future)

    def attach(self, handle: "MemoryJournal") -> None:
        """Register a journal, which then sends its waiting facts when the broker becomes reachable."""
        self._handles.append(handle)


class MemoryJournal:
    """The journal of one process instance, on a shared MemoryStream."""

    def __init__(self, stream: MemoryStream, source: str) -> None:
        self.source = f"{source}:{codec.new_id()}"
        self.counters = JournalCounters()
        self.stops_at: StopsAt = "all"
        self._stream = stream
        self._number = 0
        self._outbox: list[tuple[Observation, dict[str, str]]] = []
        stream.attach(self)

    @property
    def connected(self) -> bool:
        """Whether the simulated broker is reachable."""
        return self._stream.reachable

    @property
    def reachable(self) -> bool:
        """Whether the simulated broker accepts facts."""
        return self.connected

    @property
    def spool_depth(self) -> int:
        """Number of facts that the simulated broker has not accepted yet."""
        return len(self._outbox)

    def observe(
        self, fact: Observation, *, correlation: str = "", causation: str = "", traceparent: str = ""
    ) -> str:
        self._number += 1
        id = codec.new_id()
        headers = codec.encode_headers(
            fact,
            id=id,
            source=self.source,
            source_number=self._number,
            said_at=self._stream.clock(),
            correlation=correlation,
            causation=causation,
            traceparent=traceparent,
        )
        self._outbox.append((fact, headers))
        self.send()
        return id

    def send(self) -> None:
        """Send the facts that wait, if the simulated broker is reachable."""
        if not self._stream.reachable or not self._outbox:
            return
        for fact, headers in self._outbox:
            self._stream.add(fact, headers)
        self._outbox.clear()
        self._stream.wake()

    def withheld(self, command: str) -> bool:
        return False

    async def flush(self, deadline_s: float) -> bool:
        self.send()
        return not self._outbox

    async def append(self, decisions: Sequence[Decision], *, through: int, after: int) -> int:
        stream = self._stream
        if not 0 < len(decisions) <= BATCH_MAX:
            raise ValueError(
                f"{len(decisions)} decisions in one append; 1 to {BATCH_MAX} fit one atomic batch"
            )
        if not stream.reachable:
            raise JournalUnavailable
        if stream.decided != after:
            raise Fenced(f"the last decision is at {stream.decided}, not {after}. {Fenced.__doc__}")
        for decision in decisions:
            headers = codec.encode_headers(
                decision,
                id=codec.new_id(),
                source=self.source,
                source_number=0,
                said_at=decision.decided_at,
                through=through,
                correlation=decision.incident,
                causation=decision.cause,
            )
            stream.add(decision, headers)
        stream.wake()
        return stream.decided

    async def observe_next(self, fact: Observation, *, after: int) -> str:
        if not self._stream.reachable:
            raise JournalUnavailable
        id = codec.new_id()
        said_at = self._stream.clock()
        headers = codec.encode_headers(fact, id=id, source=self.source, source_number=0, said_at=said_at)
        if not self._stream.add(fact, {**headers, FENCE: str(after)}):
            raise Fenced(f"the last one is not at {after}. {Fenced.__doc__}")
        self._stream.wake()
        return id

    def read(self, after: int, *, until: int | None = None) -> AsyncIterator[Sequence[Recorded]]:
        return self._read(after, until, self.stops_at)

    def reopen(self) -> None:
        return None

    def inspect(self, after: int, *, until: int) -> AsyncIterator[Sequence[Recorded]]:
        return self._read(after, until, "nothing")

    async def _read(
        self, after: int, until: int | None, stops_at: StopsAt
    ) -> AsyncIterator[Sequence[Recorded]]:
        stream = self._stream
        if after > len(stream.events):
            raise JournalChanged(
                f"the stream ends at {len(stream.events)}, but {after} has been read. {JournalChanged.__doc__}"
            )
        while until is None or after < until:
            if stream.first > after + 1:
                raise JournalDropped(
                    f"the stream begins at {stream.first}: the events after {after} are gone"
                )
            if not stream.reachable or after >= len(stream.events):
                await stream.grown()
                continue
            end = after + BATCH_MAX if until is None else min(until, after + BATCH_MAX)
            batch: list[Recorded] = []
            for seq in range(after + 1, min(end, len(stream.events)) + 1):
                try:
                    event = stream.as_read(seq, stops_at)
                except UnknownKind:
                    if not batch:
                        raise
                    break  # the events before the unknown one are yielded first
                batch.append(event)
                self.counters.note(event)
            after = batch[-1].seq
            yield batch

    async def of_kind(self, kind: type[Observation], after: int = 0) -> AsyncIterator[Recorded]:
        if not self._stream.reachable:
            raise JournalUnavailable
        for event in self._stream.events[max(after, self._stream.first - 1) :]:
            if isinstance(event.fact, kind):
                yield event

    async def first_seq(self) -> int:
        if not self._stream.reachable:
            raise JournalUnavailable
        return self._stream.first

    async def last_seq(self) -> int:
        if not self._stream.reachable:
            raise JournalUnavailable
        return len(self._stream.events)

    async def end(self) -> StreamEnd:
        return StreamEnd(await self.last_seq(), self._stream.clock())

    async def close(self) -> None:
        self.send()
