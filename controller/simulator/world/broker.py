"""The simulated journal server: one total order, fenced decisions, and an unreliable network.

A message may be lost, arrive late, or arrive while its acknowledgement is lost: it is then stored, but its sender treats
it as not stored. The server recognises a repeated id for two minutes, as JetStream does. After that a repetition is stored,
and the folds must drop it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from controller.simulator.world.kernel import MS, SECOND, Kernel
from controller.simulator.world.seams import Seams
from events.fact import Decision, Fact, Observation, Recorded
from events.frozen import fast_constructor
from events.observations import ScaleProposed

DUPLICATES_REMEMBERED = 120 * SECOND
LEASE_TTL = 3 * SECOND


@fast_constructor
@dataclass(frozen=True, slots=True)
class BrokerMessage:
    """An observation in transit. `number` counts the facts of its source."""

    fact: Observation
    id: str
    source: str
    number: int
    causation: str = ""


@dataclass(slots=True)
class Network:
    """The condition of the network between any process and the broker."""

    chance: Random
    loss: float = 0.0  # probability that a message is lost, each way
    slow: float = 0.0  # share of messages that are delayed by up to `slow_max` microseconds
    slow_max: int = 2 * SECOND

    def delay(self) -> int:
        """Return the transit time of a message in microseconds."""
        chance = self.chance
        if self.slow and chance.random() < self.slow:
            return int(chance.random() * self.slow_max) + MS
        return int(MS + chance.random() * 4 * MS)

    def drops(self) -> bool:
        """Return whether a message is lost."""
        return self.loss > 0 and self.chance.random() < self.loss


@dataclass(slots=True)
class AcknowledgedNumbers:
    """The last acknowledged number of each source over all outboxes, for the watch to check."""

    acknowledged: dict[str, int] = field(default_factory=dict)
    dropped: int = 0  # dropped because an outbox was full


class Broker:
    """The stream and the lease. While `up` is False no process can reach it; stored events are kept."""

    def __init__(self, kernel: Kernel, seams: Seams, network: Network) -> None:
        self.kernel = kernel
        self.seams = seams
        self.network = network
        self.acknowledged = AcknowledgedNumbers()
        self.up = True
        self.mute = False  # the broker stores messages, but acknowledges none
        self.events: list[Recorded] = []
        self.decided = 0  # sequence of the last decision
        self.watchers: list[Callable[[Recorded], None]] = []
        self.followers: list[Follower] = []
        self.repeated = 0  # messages that were stored twice, past the duplicate window
        self.fenced = 0
        self._known: dict[str, tuple[int, int]] = {}  # by message id: (sequence, time stored)
        self._lease: tuple[str, int] = ("", 0)  # the lease's holder and expiry
        self._proposed: dict[str, int] = {}  # by model: sequence of the last proposal

    @property
    def last_seq(self) -> int:
        """The sequence of the last event."""
        return len(self.events)

    def go_down(self) -> None:
        """Become unreachable."""
        self.up = False

    def come_up(self) -> None:
        """Become reachable again; followers continue reading."""
        self.up, self.mute = True, False
        self._announce()

    def store(self, message: BrokerMessage) -> None:
        """Store an observation, unless its id is within the duplicate window."""
        now = self.kernel.now
        known = self._known.get(message.id)
        if known is not None:
            if now - known[1] < DUPLICATES_REMEMBERED:
                return
            self.repeated += 1
        seq = self._add(message.fact, message.id, message.source, message.number, 0, message.causation)
        self._known[message.id] = (seq, now)
        self._announce()

    def store_next(self, fact: ScaleProposed, *, source: str, after: int) -> bool:
        """Store a proposal if the last one about its model is at sequence `after` (0: none), else reject it."""
        last = self._proposed.get(fact.model, 0)
        if not self.seams.follows(after, last):
            self.fenced += 1
            return False
        self._proposed[fact.model] = self._add(fact, f"{source}/p{self.last_seq + 1}", source, 0, 0, "")
        self._announce()
        return True

    def append(self, batch: Sequence[Decision], *, source: str, through: int, after: int) -> bool:
        """Store decisions as one unit, or reject all of them because another decision was stored since `after`."""
        if not self.seams.fence(after, self.decided):
            self.fenced += 1
            return False
        for decision in self.seams.lands(batch):
            id = f"d{self.last_seq + 1}"
            self.decided = self._add(decision, id, source, 0, through, decision.cause)
        self._announce()
        return True

    def lease(self, holder: str) -> str:
        """Acquire or renew the lease if it is free, and return its holder."""
        now = self.kernel.now
        if self._lease[0] == holder or self._lease[1] <= now:
            self._lease = (holder, now + LEASE_TTL)
        return self._lease[0]

    def _add(self, fact: Fact, id: str, source: str, number: int, through: int, causation: str) -> int:
        seq = len(self.events) + 1
        event = Recorded(
            seq=seq,
            at=self.kernel.instant(),
            fact=fact,
            id=id,
            source=source,
            source_number=number,
            through=through,
            causation=causation,
        )
        self.events.append(event)
        for watcher in self.watchers:
            watcher(event)
        return seq

    def _announce(self) -> None:
        for follower in self.followers:
            follower.wake()


class Follower:
    """One process's subscription to the stream: in order, without gaps, some time after each event was stored."""

    __slots__ = ("_broker", "_take", "_waiting", "after", "lag", "open")

    def __init__(self, broker: Broker, after: int, take: Callable[[Sequence[Recorded]], None]) -> None:
        self.after = after
        self.open = True
        self.lag = 0  # added to the network's delay
        self._broker = broker
        self._take = take
        self._waiting = False
        broker.followers.append(self)
        self.wake()

    def wake(self) -> None:
        """Schedule a delivery if there are unread events."""
        if not self._waiting and self.open and self.after < len(self._broker.events):
            self._waiting = True
            kernel, network = self._broker.kernel, self._broker.network
            kernel.after(network.delay() + self.lag, self._deliver)

    def close(self) -> None:
        """Stop reading: the process has ended."""
        if self.open:
            self.open = False
            self._broker.followers.remove(self)

    def _deliver(self) -> None:
        self._waiting = False
        if not self.open or not self._broker.up:
            return
        batch = self._broker.events[self.after :]
        self.after += len(batch)
        if batch:
            self._take(batch)
        self.wake()
