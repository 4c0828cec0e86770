"""Defines the journal's interface.

`events.journal.nats` implements it. The journal in memory that the tests use passes the same conformance suite.

Observations never wait for the broker. `observe` numbers the fact and puts it into a bounded outbox. The outbox is published in
order, and spooled to a local file while the broker is unreachable. Decisions are never spooled: `append` is one write that
stores all decisions or none, and that fails if the caller has not read the last decision.
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
    """The part of the journal's interface that only reads."""

    def read(self, after: int, *, until: int | None = None) -> AsyncIterator[Sequence[Recorded]]:
        """Yield events in the same way as `Journal.read`."""


class JournalReports(Protocol):
    """The part of the journal's interface that a worker uses: it reports observations and reads the time of the stream."""

    def observe(
        self, fact: Observation, *, correlation: str = "", causation: str = "", traceparent: str = ""
    ) -> str:
        """Publish one fact and return its id. Never blocks and never fails. A fact that cannot be stored is dropped, counted
        and logged.

        `correlation` is the id of the fact's incident, and `causation` names the event that caused the fact. `traceparent` is
        the trace of the client request that the fact is about (W3C Trace Context). Each of them may be empty.
        """

    async def flush(self, deadline_s: float) -> bool:
        """Wait until all facts observed so far are acknowledged by the broker or safely spooled. Return False if time ran out."""

    async def end(self) -> StreamEnd:
        """Return the last sequence of the stream, and the current time by the stream's clock. Raise JournalUnavailable if the
        broker does not answer."""

    async def close(self) -> None:
        """Flush for up to 0.5 s, then close the connection."""


StopsAt: TypeAlias = Literal["all", "decisions", "nothing"]
"""The events of unknown kinds at which a reader stops. Other such events are skipped, counted and logged once per kind.

all: for a reader that stores or compares every event (projector, `replay verify`). decisions: for a reader that decides; it must
know every decision, but can continue without an unknown observation. nothing: for a reader that serves requests or displays the
fleet; it continues with the events that it knows.
"""


Reopen: TypeAlias = Callable[[], AbstractAsyncContextManager[JournalReads]]
"""A function that opens the same journal for reading in another process of this host. The function can be pickled."""


class Journal(JournalReports, Protocol):
    """The ordered store of facts, as one process instance uses it."""

    source: str  # the process instance that publishes, as in the header `ce-source`
    counters: JournalCounters

    def withheld(self, command: str) -> bool:
        """Return whether the observation that resulted from the operator's command with the id `command` was dropped.

        An observation is dropped if its kind is not in force (the fleet may not write it yet).
        """

    async def append(self, decisions: Sequence[Decision], *, through: int, after: int) -> int:
        """Write decisions as one unit and return the stream sequence of the last decision.

        `through` is the last stream sequence that the caller had read when it decided. `after` is the stream sequence of the
        last decision that the caller has applied to its state (0: no decision). Raise Fenced if the stream has a newer
        decision, JournalUnavailable if the outcome is unknown.
        """

    async def observe_next(self, fact: Observation, *, after: int) -> str:
        """Write a fact if the last event on its subject is at the sequence `after` (0: the subject is empty), and return the
        fact's id.

        Use this for facts that two processes can publish on the same subject at once. Such a fact is never spooled and never
        sent twice.

        Raise Fenced if the subject has a newer event, JournalUnavailable if the outcome is unknown.
        """

    def read(self, after: int, *, until: int | None = None) -> AsyncIterator[Sequence[Recorded]]:
        """Yield every event with a sequence above `after`, in order, in lists as the events arrive.

        A message that is not an event of Holdfast is yielded in its position as `Skipped`, and is counted and logged once. With
        `until`, end after that sequence. Without `until`, follow the stream forever and reconnect automatically.

        Raise UnknownKind at an event that may be from a newer version of Holdfast, unless the event was quarantined or this
        journal does not stop at such events (`StopsAt`). Raise JournalChanged if the stream has lost unread events, or
        JournalDropped if its bounds dropped them.
        """

    def inspect(self, after: int, *, until: int) -> AsyncIterator[Sequence[Recorded]]:
        """Yield events in the same way as `read`, but never stop at an event that this version does not know.

        Yield a `Skipped` in place of an event that may be from a newer version of Holdfast.
        """

    def of_kind(self, kind: type[Observation], after: int = 0) -> AsyncIterator[Recorded]:
        """Yield the events of `kind` with a sequence above `after`, the oldest first, and end. The observations of this kind must
        be about the whole fleet.

        Use this for rare kinds, because each event costs one request to the broker. Raise JournalUnavailable if the broker does
        not answer.
        """

    async def first_seq(self) -> int:
        """Return the sequence of the oldest event. If the stream is empty, return the sequence that the next event will get.

        Raise JournalUnavailable if the broker does not answer.
        """

    async def last_seq(self) -> int:
        """Return the sequence of the last event of the stream, or 0 if the stream is empty. Raise JournalUnavailable if the
        broker does not answer."""

    def reopen(self) -> Reopen | None:
        """Return a function that opens this journal for reading in another process. Return None if only this process can
        read it."""
