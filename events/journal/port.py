"""The port of the journal, with two implementations: NATS and memory.

Both pass one conformance suite.

Observations never wait for the broker: `observe` numbers the fact and puts it into a bounded outbox, which is
published in order and spooled to a local file while the broker is unreachable. Decisions are never spooled: `append` is
one fenced write that is stored entirely or not at all.
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
    """The end of the stream at one instant, by the clock that stamps its events."""

    seq: int  # of its last event; 0: empty
    at: datetime


class JournalReads(Protocol):
    """Read-only access to the journal."""

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
    """The ordered store of facts."""

    source: str  # this process instance, as `ce-source`
    counters: JournalCounters

    def observe(
        self, fact: Observation, *, correlation: str = "", causation: str = "", traceparent: str = ""
    ) -> str:
        """Publish one fact and return its id. Never blocks and never fails: a fact that cannot be stored is counted and logged.

        `traceparent` is the trace of the client's request that the fact is about (W3C Trace Context), if there is one.
        """
        ...

    def withheld(self, command: str) -> bool:
        """Return whether the observation that an operator's command led to was dropped, because its kind is not in force."""
        ...

    async def flush(self, deadline_s: float) -> bool:
        """Wait until everything observed so far is acknowledged or safely spooled; False if time ran out."""
        ...

    async def append(self, decisions: Sequence[Decision], *, through: int, after: int) -> int:
        """Write decisions as one unit and return the stream sequence of the last.

        `after` is the stream sequence of the last decision that the caller has folded (0: none).
        Raise Fenced if there is a newer one, JournalUnavailable if the outcome is unknown.
        """
        ...

    async def observe_next(self, fact: Observation, *, after: int) -> str:
        """Write one fact, only if it follows the one at `after` on its subject (0: if the subject is empty), and return its id.

        Use it for facts that two processes may publish about the same subject at once: never spooled, and never sent twice.

        Raise Fenced if there is a newer one, JournalUnavailable if the outcome is unknown.
        """
        ...

    def read(self, after: int, *, until: int | None = None) -> AsyncIterator[Sequence[Recorded]]:
        """Yield every event with a sequence above `after`, in order, in batches as they arrive. A message that is not an event of
        ours is yielded in its position as `Skipped`, counted, and logged once.

        With `until`, end once that sequence has been yielded; else follow forever and reconnect automatically.
        Raise UnknownKind at an event that only a newer version can know, unless it was quarantined or this handle does not stop
        at such events (`StopsAt`). Raise JournalChanged if the stream has lost unread events (JournalDropped: at its bounds).
        """
        ...

    def inspect(self, after: int, *, until: int) -> AsyncIterator[Sequence[Recorded]]:
        """Yield as `read` does, for inspection: events that only a newer version can know are yielded as `Skipped`."""
        ...

    def of_kind(self, kind: type[Observation], after: int = 0) -> AsyncIterator[Recorded]:
        """Yield, oldest first, all events above `after` of a kind about the whole fleet, and end. For rare
        kinds: each event is one request to the broker. Raise JournalUnavailable."""
        ...

    async def first_seq(self) -> int:
        """Return the sequence of the oldest event, or of the next event if the stream is empty. Raise JournalUnavailable."""
        ...

    async def last_seq(self) -> int:
        """Return the sequence of the last event of the stream (0: empty). Raise JournalUnavailable."""
        ...

    async def end(self) -> StreamEnd:
        """Return the stream's end, with the time of its own clock. Raise JournalUnavailable."""
        ...

    def reopen(self) -> Reopen | None:
        """Return a function that opens this journal for reading in another process; None: only this process can read it."""
        ...

    async def close(self) -> None:
        """Flush for up to half a second and close the connection."""
        ...
