"""Holds back observations of new kinds until these kinds are in force.

    kinds in force not known yet ── wait (bounded) ──▶ in force: published, in the order of observation
                                                  └──▶ not in force: dropped, counted, logged once per kind

Kinds of release 0.2.0 always pass, with older enum values in place of new ones that are not in force (`events.versions`). Kinds
that an earlier process on the same directory knew to be in force also pass (`kind_memory`).
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import structlog

from events.fact import Observation
from events.journal.counters import JournalCounters
from events.versions import BASE_KINDS, NEW_WORDS, NewWord, names, older

WAITING_MAX = 256  # observations; beyond it the oldest is dropped: without a broker the process must not grow
COMMANDS_MAX = 100  # ids of operator commands that led to a dropped observation

IN_FORCE = "kinds_in_force.json"

log = structlog.get_logger(__name__)

Publish = Callable[[Observation], None]


class KindMemory:
    """Stores the kinds in force in a small file beside the spool; without a path, nothing is stored.

    On one stream the set of kinds in force only grows. So a process that starts while the broker is unreachable may publish, into
    its spool on disk, the kinds that were in force before, instead of holding them in memory until then.
    """

    def __init__(self, path: Path | None, *, read: bool = True) -> None:
        self._path = path
        self.kinds = frozenset[str]()
        if read and path is not None and path.exists():
            try:
                self.kinds = names(msgspec.json.decode(path.read_bytes()))
            except (OSError, msgspec.MsgspecError, ValueError) as error:
                log.warning("kinds_in_force_unreadable", file=str(path), error=str(error))

    def keep(self, kinds: frozenset[str]) -> None:
        """Write the kinds in force, atomically."""
        if self._path is None or kinds == self.kinds:
            return
        fresh = self._path.with_suffix(".tmp")
        try:
            fresh.write_bytes(msgspec.json.encode(sorted(kinds)))
            fresh.replace(self._path)
        except OSError as error:
            log.warning("kinds_in_force_not_saved", file=str(self._path), error=str(error))
            return
        self.kinds = kinds


class KindGate:
    """Decides for each observation of a new kind whether it is published, waits or is dropped."""

    def __init__(
        self,
        counters: JournalCounters,
        memory: KindMemory | None = None,
        new_words: Iterable[NewWord] = NEW_WORDS,
    ) -> None:
        self._counters = counters
        self._memory = memory or KindMemory(None)
        self._new_words = tuple(new_words)
        self._withheld: Counter[str] = Counter()  # dropped observations by kind
        self._in_force: frozenset[str] | None = None  # None: not known yet
        self._waiting: deque[tuple[Observation, Publish]] = deque()
        self._commands: deque[str] = deque(maxlen=COMMANDS_MAX)

    @property
    def informed(self) -> bool:
        """Whether this process knows the kinds in force."""
        return self._in_force is not None

    @property
    def waits(self) -> bool:
        """Whether observations wait until the kinds in force are known."""
        return bool(self._waiting)

    def passes(self, kind: str) -> bool:
        """Return whether an observation of this kind may be published now."""
        return kind in BASE_KINDS or kind in self._known_in_force

    @property
    def _known_in_force(self) -> frozenset[str]:
        return self._memory.kinds if self._in_force is None else self._in_force

    def dropped_command(self, id: str) -> bool:
        """Return whether the observation that an operator's command led to was dropped."""
        return bool(id) and id in self._commands

    def in_words_in_force(self, fact: Observation) -> Observation:
        """Return a fact with older enum values in place of those that are not in force."""
        return older(fact, self._known_in_force, self._new_words)

    def take(self, fact: Observation, publish: Publish) -> None:
        """Publish one observation, or queue it, or drop it."""
        if self.passes(fact.kind()):
            publish(self.in_words_in_force(fact))
        elif self._in_force is not None:
            self._drop(fact)
        else:
            if len(self._waiting) >= WAITING_MAX:
                self._drop(self._waiting.popleft()[0])
            self._waiting.append((fact, publish))

    def learn(self, in_force: frozenset[str]) -> None:
        """Set the kinds beyond those of 0.2.0 that are in force."""
        self._in_force = in_force
        self._memory.keep(in_force)
        waiting, self._waiting = self._waiting, deque()
        for fact, publish in waiting:
            self.take(fact, publish)

    def _drop(self, fact: Observation) -> None:
        kind = fact.kind()
        self._withheld[kind] += 1
        self._counters.withheld += 1
        if command := getattr(fact, "command", ""):
            self._commands.append(command)
        if self._withheld[kind] == 1:
            log.warning("kind_withheld", kind=kind, why="not in force: see `holdfast fleet versions`")
