"""The journal, as everything above it sees it. Two implementations pass one conformance suite: NATS and memory.

Observations never wait for the broker: `observe` numbers the fact and puts it into a bounded outbox, which is
published in order and spooled to a local file while the broker is away. Decisions are never spooled: `append` is
one fenced write that lands entirely or not at all.
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
    """The journal cannot be reached. Whether the last append landed is unknown: read again before deciding again."""


class JournalGone(JournalUnavailable):
    """The broker has no stream. Nobody makes another in its place while anything remembers the old one: put the broker's
    directory back from a backup, or stop the fleet and begin a new history with `holdfast up --accept-journal`."""


class Fenced(HoldfastError):
    """Another one has written since: drop what you believe and read again."""


class JournalChanged(HoldfastError):
    """The stream is not the one that was read before: it was recreated, purged or restored to an earlier state."""


class JournalDropped(JournalChanged):
    """What comes next has been dropped at the journal's bounds: begin with a snapshot that is further on."""


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """Where the stream ended at one instant, by the clock that stamps its events."""

    seq: int  # of its last event; 0: empty
    at: datetime


class JournalReads(Protocol):
    """Who only reads what is kept."""

    def read(self, after: int, *, until: int | None = None) -> AsyncIterator[Sequence[Recorded]]:
        """Yield events as `Journal.read` does."""
        ...


StopsAt: TypeAlias = Literal["all", "decisions", "nothing"]
"""At which events of unknown kinds a reader stops. What it does not stop at is skipped, counted and logged once per kind.

all: it keeps or compares every event (projector, `replay verify`). decisions: it decides, and must know every decision;
an unknown observation only lacks. nothing: it serves or displays, and goes on with what it knows.
"""


Reopen: TypeAlias = Callable[[], AbstractAsyncContextManager[JournalReads]]
"""What another process of this host is given to read the same journal: it can be pickled."""


class Journal(Protocol):
    """Where facts are kept, in one order."""

    source: str  # this process instance, as `ce-source`
    counters: JournalCounters

    def observe(
        self, fact: Observation, *, correlation: str = "", causation: str = "", traceparent: str = ""
    ) -> str:
        """Say one fact and return its id. Never blocks and never fails: what cannot be kept is counted and logged.

        `traceparent` is the trace of the client's request that it is about (W3C Trace Context), if there is one.
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
        """Write one fact, only if it follows the one at `after` on its subject (0: if nothing is there), and return its id. It is
        for what two may say of the same thing at once: never spooled, and never sent twice.

        Raise Fenced if there is a newer one, JournalUnavailable if the outcome is unknown.
        """
        ...

    def read(self, after: int, *, until: int | None = None) -> AsyncIterator[Sequence[Recorded]]:
        """Yield every event with a sequence above `after`, in order, in batches as they arrive. What is no event of ours
        is yielded in its place as `Skipped`, counted, and said in the log once.

        With `until`, end once that sequence has been yielded; else follow for ever, reconnecting by itself.
        Raise UnknownKind at an event that only a newer version can know, unless it was quarantined or this handle does not stop
        there (`StopsAt`), and JournalChanged if
        the stream has lost events that were not read (JournalDropped: at its bounds).
        """
        ...

    def inspect(self, after: int, *, until: int) -> AsyncIterator[Sequence[Recorded]]:
        """Yield as `read` does, for whoever only looks: also what only a newer version can know, as `Skipped`."""
        ...

    def of_kind(self, kind: type[Observation], after: int = 0) -> AsyncIterator[Recorded]:
        """Yield, oldest first, what the stream holds above `after` of a kind that is said of the whole fleet, and end. For rare
        kinds: each is one question to the broker. Raise JournalUnavailable."""
        ...

    async def first_seq(self) -> int:
        """Return the sequence of the oldest event that the stream holds, or of its first one to be. Raise JournalUnavailable."""
        ...

    async def last_seq(self) -> int:
        """Return the sequence of the last event of the stream (0: empty). Raise JournalUnavailable."""
        ...

    async def end(self) -> StreamEnd:
        """Return where the stream ends, and what its own clock says. Raise JournalUnavailable."""
        ...

    def reopen(self) -> Reopen | None:
        """Return what opens this journal in another process, to read it; None: only this one has it."""
        ...

    async def close(self) -> None:
        """Flush what can be flushed in half a second and let go of the broker."""
        ...
