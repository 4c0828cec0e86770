"""Counts the events of unknown kinds that a command skips, and reports them on stderr."""

import sys
from collections import Counter
from dataclasses import dataclass, field

from controller.terminal_text import escape_controls
from events.fact import Recorded, Skipped

UNKNOWN_KINDS_MAX = 100  # kinds that are counted separately; further kinds are counted together


@dataclass(slots=True)
class UnknownKinds:
    """Counts events of kinds that this release does not know. Prints each kind once on stderr."""

    counts: Counter[str] = field(default_factory=Counter)

    def note(self, event: Recorded) -> None:
        """Count an event if its kind is unknown."""
        fact = event.fact
        if not isinstance(fact, Skipped) or not fact.unknown:
            return
        kind = escape_controls(fact.subject.rpartition(".")[2])
        if kind not in self.counts and len(self.counts) >= UNKNOWN_KINDS_MAX:
            kind = "other kinds"
        self.counts[kind] += 1
        if self.counts[kind] == 1:
            print(
                f"holdfast: event {event.seq} has a kind that this release does not know ({kind}) and is skipped",
                file=sys.stderr,
            )

    def report(self) -> None:
        """Print the number of skipped events."""
        if self.counts:
            print(
                f"holdfast: skipped {self.counts.total()} events of unknown kinds: upgrade to read them",
                file=sys.stderr,
            )
