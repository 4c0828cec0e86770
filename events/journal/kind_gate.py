"""Holds back observations of new kinds until these kinds are in force.

    kinds in force not known yet ── wait (bounded) ──▶ in force: published, in the order of observation
                                                  └──▶ not in force: dropped, counted, logged once per kind

The arrows show what happens to an observation of a new kind. A kind is in force when the leading controller has allowed the
fleet to write it (`events.versions`). Kinds of release 0.2.0 are always in force. If an observation of a 0.2.0 kind
contains a new enum value that is not in force, an older value replaces the new one. While the kinds in force are not known yet,
the gate publishes observations of the stored kinds (`KindMemory`). An earlier process with the same directory has stored them.
"""

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import msgspec
import structlog
from nats.aio.msg import Msg

from events import subjects
from events.decisions import PolicyAdopted
from events.fact import Observation
from events.journal import stream
from events.journal.counters import JournalCounters
from events.journal.port import JournalUnavailable
from events.nats.connection import DISCONNECTED, BrokerConnection, when_connected
from events.versions import BASE_KINDS, NEW_WORDS, Known, NewWord, names, new_kinds, older, stated_kinds

# observations; beyond it the oldest is dropped, so that memory stays bounded without a broker
WAITING_MAX = 256
COMMANDS_MAX = 100  # ids of operator commands that led to a dropped observation

IN_FORCE = "kinds_in_force.json"

log = structlog.get_logger(__name__)

Publish = Callable[[Observation], None]


class KindMemory:
    """Stores the kinds in force (those that the fleet may write) in a small file beside the spool. Without a path, nothing is
    stored.

    On one stream the set of kinds in force only grows, so the stored kinds stay in force after a restart. If a process starts
    while the broker is unreachable, it writes observations of the stored kinds to its spool on disk. Without the file, the
    process would hold these observations in memory until the broker is reachable.
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
        """Write the kinds in force to the file, atomically. If the file cannot be written, log a warning."""
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
    """Decides for each observation of a new kind whether the observation is published, is held back, or is dropped."""

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
        self._in_force: frozenset[str] | None = None  # None: the kinds in force are not known yet
        self._waiting: deque[tuple[Observation, Publish]] = deque()
        self._commands: deque[str] = deque(maxlen=COMMANDS_MAX)

    @property
    def informed(self) -> bool:
        """Whether this process knows which kinds are in force."""
        return self._in_force is not None

    @property
    def waits(self) -> bool:
        """Whether any observation is held back until the kinds in force are known."""
        return bool(self._waiting)

    def passes(self, kind: str) -> bool:
        """Return whether an observation of this kind may be published now."""
        return kind in BASE_KINDS or kind in self._known_in_force

    @property
    def _known_in_force(self) -> frozenset[str]:
        return self._memory.kinds if self._in_force is None else self._in_force

    def dropped_command(self, id: str) -> bool:
        """Return whether this gate dropped the observation that resulted from the operator's command with this id."""
        return bool(id) and id in self._commands

    def in_words_in_force(self, fact: Observation) -> Observation:
        """Return the fact with older enum values in place of enum values that are not in force."""
        return older(fact, self._known_in_force, self._new_words)

    def take(self, fact: Observation, publish: Publish) -> None:
        """Publish the observation if its kind is in force, drop it if not, or queue it while the kinds in force are unknown."""
        if self.passes(fact.kind()):
            publish(self.in_words_in_force(fact))
        elif self._in_force is not None:
            self._drop(fact)
        else:
            if len(self._waiting) >= WAITING_MAX:
                self._drop(self._waiting.popleft()[0])
            self._waiting.append((fact, publish))

    def learn(self, in_force: frozenset[str]) -> None:
        """Set the kinds newer than 0.2.0 that are in force, and publish or drop the observations that waited for them."""
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


ANNOUNCE_S = 5.0
UNINFORMED_S = 0.5  # interval of the announcements while the kinds in force are not known
LOOK_S = 5.0  # interval of reads of the journal while some kinds of this version are not in force


class Announcer:
    """Announces the kinds of facts that a process knows, and receives the kinds that are in force.

    Every few seconds the process publishes its `Known` on `live.known.ROLE.NAME`, and the leading controller replies with the
    kinds in force on `live.kinds.NAME`. A controller of an older release does not reply. So a process also reads the last
    `PolicyAdopted` from the journal, unless it is a worker process, which may not read the journal.

    `workers` are the workers of a worker process. For other processes it is empty.
    """

    def __init__(
        self,
        connection: BrokerConnection,
        gate: KindGate,
        source: str,
        known: Known,
        workers: Sequence[str] = (),
    ) -> None:
        self._connection, self._gate = connection, gate
        self._source, self._known, self._workers = source, known, list(workers)
        role, _, rest = source.partition(":")
        name = self._workers[0] if self._workers else rest.partition(":")[0]
        self._subject = subjects.known(role, name)
        self._answers = subjects.command("kinds", name if self._workers else f"{role}-{name}")

    async def run(self) -> None:
        """Announce the known kinds and update the gate with the kinds in force, until cancelled."""
        await when_connected(
            partial(self._connection.subscribe, self._answers, self._heard), retry_s=UNINFORMED_S
        )
        looking = [] if self._workers else [self._look()]
        await asyncio.gather(self._announce(), *looking)

    async def leave(self) -> None:
        """Announce that this process ends."""
        await self._publish(left=True)

    async def _announce(self) -> None:
        while True:
            await self._connection.up.wait()
            await self._publish()
            await asyncio.sleep(ANNOUNCE_S if self._gate.informed else UNINFORMED_S)

    async def _publish(self, *, left: bool = False) -> None:
        if not self._connection.connected:
            return
        body = {"source": self._source, **self._known.as_body(), "workers": self._workers, "left": left}
        client = self._connection.client
        with contextlib.suppress(*DISCONNECTED):
            await client.publish(self._subject, msgspec.json.encode(body))

    async def _look(self) -> None:
        ours, found = new_kinds(), None
        while found is None or not ours <= found:
            await self._connection.up.wait()
            with contextlib.suppress(JournalUnavailable, *DISCONNECTED):
                found = await adopted(self._connection)
            if found is not None:
                self._gate.learn(found)
            await asyncio.sleep(LOOK_S if self._gate.informed else UNINFORMED_S)

    async def _heard(self, message: Msg) -> None:
        try:
            self._gate.learn(names(msgspec.json.decode(message.data, type=dict[str, list[str]])["kinds"]))
        except (msgspec.MsgspecError, KeyError, ValueError) as error:
            log.debug("kinds_refused", why=str(error))


async def adopted(connection: BrokerConnection) -> frozenset[str] | None:
    """Return the kinds newer than 0.2.0 that the last `PolicyAdopted` decision allows. Return None if the journal has no such
    decision.

    Raise JournalUnavailable if the broker does not answer.
    """
    event = await stream.last_on(connection, f"{subjects.DECIDED}.{PolicyAdopted.kind()}")
    if event is None or not isinstance(event.fact, PolicyAdopted):
        return None
    return stated_kinds(event.fact.kinds, event.fact.deciders_version)
