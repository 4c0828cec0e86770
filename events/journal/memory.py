"""A journal in memory: the double that ships beside the real one and passes the same conformance suite."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from events import codec
from events.fact import Decision, Fact, Observation, Recorded
from events.journal.port import Fenced, JournalUnavailable


@dataclass
class MemoryStream:
    """The shared half: what a broker would hold. `reachable` False plays a broker that is away."""

    events: list[Recorded] = field(default_factory=list)
    reachable: bool = True
    clock: Callable[[], datetime] = lambda: datetime.now(UTC)  # noqa: TID251 (a broker has its own clock)
    grown: asyncio.Condition = field(default_factory=asyncio.Condition)
    _ids: set[str] = field(default_factory=set)

    @property
    def decided(self) -> int:
        """The sequence of the last decision."""
        return next((e.seq for e in reversed(self.events) if isinstance(e.fact, Decision)), 0)

    def add(self, fact: Fact, headers: dict[str, str]) -> int:
        """Store one message as a broker would: repeated ids are acknowledged and not stored again."""
        if headers["ce-id"] in self._ids:
            return len(self.events)
        self._ids.add(headers["ce-id"])
        seq = len(self.events) + 1
        self.events.append(codec.decode(seq, self.clock(), headers, codec.encode_body(fact)))
        return seq


class MemoryJournal:
    """One process instance's handle on a MemoryStream."""

    def __init__(self, stream: MemoryStream, source: str) -> None:
        self.source = source
        self._stream = stream
        self._number = 0
        self._outbox: list[tuple[Observation, dict[str, str]]] = []

    def observe(self, fact: Observation, *, correlation: str = "", causation: str = "") -> str:
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
        )
        self._outbox.append((fact, headers))
        self._send()
        return id

    def _send(self) -> None:
        if not self._stream.reachable:
            return
        for fact, headers in self._outbox:
            self._stream.add(fact, headers)
        self._outbox.clear()
        _wake(self._stream)

    async def flush(self, deadline_s: float) -> bool:
        self._send()
        return True

    async def append(self, decisions: Sequence[Decision], *, through: int, after: int) -> int:
        if not self._stream.reachable:
            raise JournalUnavailable
        if self._stream.decided != after:
            raise Fenced(f"the last decision is at {self._stream.decided}, not {after}. {Fenced.__doc__}")
        self._send()
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
            self._stream.add(decision, headers)
        _wake(self._stream)
        return len(self._stream.events)

    async def read(self, after: int, *, until: int | None = None) -> AsyncIterator[Sequence[Recorded]]:
        stream = self._stream
        while until is None or after < until:
            async with stream.grown:
                await stream.grown.wait_for(lambda: len(stream.events) > after)
            batch = stream.events[after:until]
            after = batch[-1].seq
            yield batch

    async def last_seq(self) -> int:
        if not self._stream.reachable:
            raise JournalUnavailable
        return len(self._stream.events)

    async def close(self) -> None:
        self._send()


def _wake(stream: MemoryStream) -> None:
    """Tell readers. A condition needs its lock, and `observe` must not wait: a task takes it."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return  # outside a loop (a plain test) nobody is waiting

    async def notify() -> None:
        async with stream.grown:
            stream.grown.notify_all()

    task = loop.create_task(notify())
    _notifying.add(task)
    task.add_done_callback(_notifying.discard)


_notifying: set[asyncio.Task[None]] = set()
