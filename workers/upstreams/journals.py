"""The journals of all workers of a process as one, for the process's metrics."""

from collections.abc import Iterable

from events.journal.counters import JournalCounters
from events.journal.nats import NatsJournal
from workers.upstreams.slot import UpstreamSlot

COUNTED = ("dropped", "withheld")  # the counters that a worker's metrics show


class UpstreamJournals:
    """The sum of the journals of a process's upstreams, past and present."""

    def __init__(self, slots: Iterable[UpstreamSlot], past: JournalCounters) -> None:
        """Sum up the journals of `slots`. `past` has the counters of lives that have ended."""
        self._slots = slots
        self._past = past

    @property
    def _present(self) -> list[NatsJournal]:
        found = (slot.journal for slot in self._slots)
        return [journal for journal in found if isinstance(journal, NatsJournal)]

    @property
    def counters(self) -> JournalCounters:
        """The sums of the counters."""
        total = JournalCounters()
        for counters in (self._past, *(journal.counters for journal in self._present)):
            add(total, counters)
        return total

    @property
    def reachable(self) -> bool:
        """Whether every worker can write to the journal."""
        return all(journal.reachable for journal in self._present)

    @property
    def spool_depth(self) -> int:
        """Number of facts that the journal has not accepted yet."""
        return sum(journal.spool_depth for journal in self._present)


def add(total: JournalCounters, counters: JournalCounters) -> None:
    """Add the counters that metrics show to `total`."""
    for name in COUNTED:
        setattr(total, name, getattr(total, name) + getattr(counters, name))
