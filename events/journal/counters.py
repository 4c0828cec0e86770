"""Counters of a process's journal connection, from the start of the process, for metrics."""

from dataclasses import dataclass, field
from typing import Protocol

import structlog

from events.fact import Recorded, Skipped

KNOWN_MAX = 10_000  # skipped messages that are remembered, so that a second read does not count them
TOLD_MAX = 100  # skipped messages, and unknown kinds, that are each logged

log = structlog.get_logger(__name__)


class ObservedJournal(Protocol):
    """A process's journal connection as its metrics show it: counters, reachability, and the number of unacknowledged facts."""

    @property
    def counters(self) -> "JournalCounters": ...
    @property
    def reachable(self) -> bool: ...
    @property
    def spool_depth(self) -> int: ...


@dataclass
class JournalCounters:
    """Numbers of facts, appends and messages since the process began. Each counter only grows."""

    observed: int = 0
    acknowledged: int = 0
    retried: int = 0  # facts that were sent again
    dropped: int = 0  # facts that did not fit into the outbox, or that the broker will never accept
    appends: int = 0
    appends_fenced: int = 0
    appends_unknown: int = 0
    withheld: int = 0  # observations that were dropped because their kind is not in force
    skipped: int = 0  # messages on the stream that are not Holdfast's events; each is counted once
    unknown: int = 0  # skipped events of kinds that this version does not know; each is counted once
    # sequences of skipped messages, in the order of reading
    _known: dict[int, None] = field(default_factory=dict)
    _unknown_kinds: set[str] = field(default_factory=set)  # kinds that have been logged

    def note(self, event: Recorded) -> None:
        """Count and log a skipped message (`Skipped`). Ignore any other event.

        A process reads the stream more than once, so a message that was noted before is neither counted nor logged again.
        After the first 100 messages only the 128th, the 256th, and so on, are logged.
        """
        fact = event.fact
        if not isinstance(fact, Skipped) or event.seq in self._known:
            return
        self._known[event.seq] = None
        if len(self._known) > KNOWN_MAX:
            del self._known[next(iter(self._known))]
        if fact.unknown:
            self._note_unknown(event, fact)
            return
        self.skipped += 1
        if self.skipped <= TOLD_MAX or self.skipped.bit_count() == 1:
            log.warning(
                "message_skipped", seq=event.seq, subject=fact.subject, why=fact.why, bytes=fact.bytes
            )

    def _note_unknown(self, event: Recorded, fact: Skipped) -> None:
        self.unknown += 1
        kind = fact.subject.rpartition(".")[2]
        if kind not in self._unknown_kinds and len(self._unknown_kinds) < TOLD_MAX:
            self._unknown_kinds.add(kind)
            log.warning("unknown_kind_skipped", kind=kind, seq=event.seq, subject=fact.subject, why=fact.why)
