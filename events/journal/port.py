"""Defines the journal's interface, which NATS and memory implement.

The two implementations pass one conformance suite.

Observations never wait for the broker. `observe` numbers the fact and puts it into a bounded outbox. The outbox is published in
order, and spooled to a local file while the broker is unreachable. Decisions are never spooled: `append` is one fenced write
that stores all decisions or none.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, Protocol, TypeAlias

from events.errors import HoldfastError
from events.fact import Decision, Observation, Recorded
from events.journal.counters import JournalCounters


class JournalUnavailable(HoldfastError):
    """The journal cannot be reached. Whether the last append was stored is unknown: read again before deciding again."""


class JournalGone(JournalUnavailable):
    """The broker has no stream. No process creates another while any data remembers the old one: restore the broker's
    directory from a backup, or stop the fleet and begin a new history with `holdfast up --accept-journal`."""


class Fenced(HoldfastError):
    """Another writer has written since: discard the local state and read again."""


class JournalChanged(HoldfastError):
    """The stream is not the one that was read before: it was recreated, purged or restored to an earlier state."""


class JournalDropped(JournalChanged):
    """The next events have been dropped at the journal's bounds: begin with a later snapshot."""


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """The last position of the stream at one instant, with the time by the clock that stamps the stream's events."""

    seq: int  # sequence of the last event; 0: the stream is empty
    at: datetime


class JournalReads(Protocol):
    """The part of the journal that only reads."""

    def read(self, after: int, *, until: int | None = None) -> AsyncIterator[Sequence[Recorded]]:
        """Yield events as `Journal.read` does."""
        ...


StopsAt: TypeAlias = Literal["all", "decisions", "nothing"]
"""The events of unknown kinds at which a reader stops. Other such events are skipped, counted and logged once per kind.

all: for a reader that stores or compares every event (projector, `replay verify`). decisions: for one that decides, and must
know every decision; an unknown observation is only missing. nothing: for one that serves or displays, and continues with what
it knows.
"""


Reopen: TypeAlias = Callable[[], AbstractAsyncContextManager[JournalReads]]
"""Opens the same journal for reading in another process of this host. It can be pickled."""


class Journal(Protocol):
    """The ordered store of facts, as one process instance uses it."""

    source: str  # the process instance that publishes, as in the header `ce-source`
    counters: JournalCounters

    def observe(
        self, fact: Observation, *, correlation: str = "", causation: str = "", traceparent: str = ""
    ) -> str:
        """Publish one fact and return its id. Never blocks and never fails. A fact that cannot be stored is dropped, counted
        and logged.

        `traceparent` is the trace of the client request that the fact is about (W3C Trace Context), or empty.
        """
        ...

    def withheld(self, command: str) -> bool:
        """Return whether the observation that resulted from this operator's command was dropped, because its kind is not in
        force."""
        ...

    async def flush(self, deadline_s: float) -> bool:
        """Wait until the broker has acknowledged all facts observed so far, or they are safely spooled. Return False if time
        ran out."""
        ...

    async def append(self, decisions: Sequence[Decision], *, through: int, after: int) -> int:
        """Write decisions as one unit and return the stream sequence of the last decision.

        `through` is the last stream sequence that the caller had read when it decided. `after` is the stream sequence of the
        last decision that the caller has folded (0: no decision). Raise Fenced if the stream has a newer decision,
        JournalUnavailable if the outcome is unknown.
        """
        ...

    async def observe_next(self, fact: Observation, *, after: int) -> str:
        """Write one fact only if the last event on its subject is at `after` (0: the subject is empty), and return the fact's
        id.

        This is for facts that two processes may publish about the same subject at once. Such a fact is never spooled and never
        sent twice.

        Raise Fenced if the subject has a newer event, JournalUnavailable if the outcome is unknown.
        """
        ...

    def read(self, after: int, *, until: int | None = None) -> AsyncIterator[Sequence[Recorded]]:
        """Yield every event with a sequence above `after`, in order, in lists as the events arrive.

        A message that is not an event of Holdfast is yielded in its position as `Skipped`, and is counted and logged once. With
        `until`, end after that sequence. Without `until`, follow the stream forever and reconnect automatically.

        Raise UnknownKind at an event that may be from a newer version, unless the event was quarantined or this journal does
        not stop at such events (`StopsAt`). Raise JournalChanged if the stream has lost unread events, or JournalDropped if its
        bounds dropped them.
        """
        ...

    def inspect(self, after: int, *, until: int) -> AsyncIterator[Sequence[Recorded]]:
        """Yield events as `read` does, for inspection. An event that may be from a newer version is yielded as `Skipped`."""
        ...

    def of_kind(self, kind: type[Observation], after: int = 0) -> AsyncIterator[Recorded]:
        """Yield, oldest first, all events of a kind about the whole fleet with a sequence above `after`, and end.

        Use it for rare kinds, because each event is one request to the broker. Raise JournalUnavailable.
        """
        ...

    async def first_seq(self) -> int:
        """Return the sequence of the oldest event. If the stream is empty, return that of the next event. Raise
        JournalUnavailable."""
        ...

    async def last_seq(self) -> int:
        """Return the sequence of the last event of the stream, or 0 if the stream is empty. Raise JournalUnavailable."""
        ...

    async def end(self) -> StreamEnd:
        """Return the last sequence of the stream with the current time by the stream's clock. Raise JournalUnavailable."""
        ...

    def reopen(self) -> Reopen | None:
        """Return a function that opens this journal for reading in another process. Return None if only this process can
        read it."""
        ...

    async def close(self) -> None:
        """Flush for up to 0.5 s, then close the connection."""
        ...
