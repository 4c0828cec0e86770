"""Counts the events of unknown kinds that a command skips, for the person who reads its output."""

import sys
from collections import Counter
from dataclasses import dataclass, field

from controller.terminal_text import safe
from events.fact import Recorded, Skipped

UNKNOWN_KINDS_MAX = 100  # named; further kinds are counted together


@dataclass(slots=True)
class UnknownKinds:
    """Counts events of kinds that this release does not know, and names each kind once on stderr."""

    counts: Counter[str] = field(default_factory=Counter)

    def note(self, event: Recorded) -> None:
        """Count an event if its kind is unknown."""
        fact = event.fact
        if not isinstance(fact, Skipped) or not fact.unknown:
            return
        kind = safe(fact.subject.rpartition(".")[2])
        if kind not in self.counts and len(self.counts) >= UNKNOWN_KINDS_MAX:
            kind = "other kinds"
        self.counts[kind] += 1
        if self.counts[kind] == 1:
            print(
                f"holdfast: event {event.seq} is of a kind that this release does not know ({kind}); it is skipped",
                file=sys.stderr,
            )

    def report(self) -> None:
        """Print how many were skipped."""
        if self.counts:
            print(
                f"holdfast: {self.counts.total()} events of unknown kinds were skipped: upgrade to read them",
                file=sys.stderr,
            )
