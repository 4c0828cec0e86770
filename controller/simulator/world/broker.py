"""The simulated journal server: one total order, fenced decisions, and an unreliable network.

The network delays messages and loses some. If the acknowledgement of a stored message is lost, the sender sends the message
again. Like JetStream, the server drops a message if it has stored a message with the same id in the last two minutes. After
this time, the server stores a repeated message again, and the readers of the journal ignore the repetition.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from controller.simulator.world.kernel import MS, SECOND, Act, Kernel
from controller.simulator.world.seams import Seams
from events.fact import Decision, Fact, Observation, Recorded
from events.frozen import fast_constructor
from events.observations import ScaleProposed

DUPLICATES_REMEMBERED = 120 * SECOND
LEASE_TTL = 3 * SECOND
RETRY_AFTER = 1 * SECOND
SPOOL_MAX = 10_000


@fast_constructor
@dataclass(frozen=True, slots=True)
class BrokerMessage:
    """An observation in transit. `number` is the observation's position among the facts of `source`, from 1."""

    fact: Observation
    id: str
    source: str
    number: int


@dataclass(slots=True)
class Network:
    """The condition of the network between all processes and the broker."""

    chance: Random
    loss: float = 0.0  # probability that a message is lost, each way
    slow: float = 0.0  # share of messages that are delayed by up to `slow_max` microseconds
    slow_max: int = 2 * SECOND

    def delay(self) -> int:
        """Return the transit time of one message, in microseconds, drawn at random."""
        chance = self.chance
        if self.slow and chance.random() < self.slow:
            return int(chance.random() * self.slow_max) + MS
        return int(MS + chance.random() * 4 * MS)

    def drops(self) -> bool:
        """Return whether the next message is lost, drawn at random."""
        return self.loss > 0 and self.chance.random() < self.loss


class Broker:
    """The simulated broker, with the event stream and the controllers' lease.

    While `up` is False, no process can reach the broker. Stored events are kept.
    """

    def __init__(self, kernel: Kernel, seams: Seams, network: Network) -> None:
        self.kernel = kernel
        self.seams = seams
        self.network = network
        self.acknowledged: dict[str, int] = {}  # last acknowledged number of each source, over all outboxes
        self.dropped = 0  # facts dropped because an outbox was full
        self.up = True
        self.mute = False  # the broker stores messages, but acknowledges none
        self.events: list[Recorded] = []
        self.decided = 0  # sequence of the last decision
        self.watch: Callable[[Recorded], None] = lambda event: None  # is called with each event
        self.followers: list[Follower] = []
        self.repeated = 0  # messages that were stored twice, past the duplicate window
        self.fenced = 0
        self._known: dict[str, tuple[int, int]] = {}  # by message id: (sequence, time stored)
        self._lease: tuple[str, int] = ("", 0)  # the lease's holder and expiry
        self._proposed: dict[str, int] = {}  # by model: sequence of the last proposal

    @property
    def last_seq(self) -> int:
        """The sequence of the last event; 0 for an empty stream."""
        return len(self.events)

    def come_up(self) -> None:
        """Make the broker reachable again, so that the subscribed processes continue to read."""
        self.up, self.mute = True, False
        self._announce()

    def transmit(self, act: Act, *args: object, held: int = 0) -> None:
        """Schedule `act(*args)` for the arrival of a message, unless the network loses the message.

        The message is sent `held` microseconds from now.
        """
        if not self.network.drops():
            self.kernel.after(held + self.network.delay(), act, *args)

    def acknowledge(self, act: Act, *args: object) -> None:
        """Schedule `act(*args)` for the arrival of an acknowledgement.

        Nothing is scheduled if the network loses the acknowledgement, or while the broker sends none (`mute`).
        """
        if not self.mute:
            self.transmit(act, *args)

    def store(self, message: BrokerMessage) -> None:
        """Store an observation, unless a message with the same id was stored a short time ago (DUPLICATES_REMEMBERED)."""
        now = self.kernel.now
        known = self._known.get(message.id)
        if known is not None:
            if now - known[1] < DUPLICATES_REMEMBERED:
                return
            self.repeated += 1
        self._known[message.id] = (self._add(message.fact, message.id, message.source, message.number), now)

    def store_next(self, fact: ScaleProposed, *, source: str, after: int) -> bool:
        """Store a proposal of a planner, and return whether it was stored.

        The proposal is stored only if `after` is the sequence of the last stored proposal for the same model. If no proposal
        is stored yet, `after` must be 0.
        """
        last = self._proposed.get(fact.model, 0)
        if self.seams.proposals_fenced and after != last:
            self.fenced += 1
            return False
        self._proposed[fact.model] = self._add(fact, f"{source}/p{self.last_seq + 1}", source)
        return True

    def append(self, batch: Sequence[Decision], *, source: str, through: int, after: int) -> bool:
        """Store all decisions of a batch in one step, and return whether they were stored.

        The batch is stored only if `after` is the sequence of the last stored decision. If no decision is stored yet, `after`
        must be 0.
        """
        if self.seams.fenced and after != self.decided:
            self.fenced += 1
            return False
        for decision in self.seams.lands(batch):
            id = f"d{self.last_seq + 1}"
            self.decided = self._add(decision, id, source, through=through, causation=decision.cause)
        return True

    def lease(self, holder: str) -> str:
        """Give the lease to `holder`, or renew it, and return the present holder's name.

        If another process holds the lease, that process keeps it.
        """
        now = self.kernel.now
        if self._lease[0] == holder or self._lease[1] <= now:
            self._lease = (holder, now + LEASE_TTL)
        return self._lease[0]

    def _add(
        self, fact: Fact, id: str, source: str, number: int = 0, *, through: int = 0, causation: str = ""
    ) -> int:
        seq = len(self.events) + 1
        event = Recorded(
            seq=seq, at=self.kernel.instant(), fact=fact, id=id, source=source, source_number=number,
            through=through, causation=causation,
        )  # fmt: skip
        self.events.append(event)
        self.watch(event)
        self._announce()
        return seq

    def _announce(self) -> None:
        for follower in self.followers:
            follower.wake()


class Follower:
    """The subscription of one process to the stream.

    Events are delivered in order and without gaps, each some time after it was stored.
    """

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
        """Schedule a delivery, if there are unread events and no delivery is scheduled yet."""
        if not self._waiting and self.open and self.after < len(self._broker.events):
            self._waiting = True
            kernel, network = self._broker.kernel, self._broker.network
            kernel.after(network.delay() + self.lag, self._deliver)

    def close(self) -> None:
        """Stop reading, because the process has ended."""
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


class SimulatedOutbox:
    """The facts of one process that the broker has not acknowledged yet. One fact is sent at a time."""

    def __init__(self, broker: Broker, source: str) -> None:
        self.source = source
        self.reachable = True  # False: this process is cut off from the broker
        self._broker = broker
        self._number = 0
        self._waiting: deque[BrokerMessage] = deque()
        self._spooled: set[str] = set()  # ids of the facts that survive a crash
        self._attempt: object = None  # the attempt to send the first fact; None: no fact is in transit
        self._alive = True

    def __len__(self) -> int:
        return len(self._waiting)

    def observe(self, fact: Observation, *, traceparent: str = "") -> str:
        """Queue a fact for publication, and return its id. `traceparent` is ignored, because no trace is simulated."""
        id = f"{self.source}/{self._number + 1}"
        if len(self._waiting) >= SPOOL_MAX:
            self._broker.dropped += 1
            return id
        self._number += 1
        self._waiting.append(BrokerMessage(fact, id, self.source, self._number))
        self.send()
        return id

    def crash(self) -> list[BrokerMessage]:
        """Stop sending, because the process has ended, and return the facts that survive in the process's spool."""
        self._alive = False
        return [m for m in self._waiting if m.id in self._spooled]

    def inherit(self, spool: list[BrokerMessage]) -> None:
        """Queue the facts that a previous process left in the spool, ahead of all new facts."""
        self._waiting.extendleft(reversed(spool))
        self._spooled.update(m.id for m in spool)
        self.send()

    def send(self) -> None:
        """Send the next fact, unless a fact is in transit.

        This method is also called when the process can reach the broker again.
        """
        if self._attempt is not None or not self._waiting or not self._alive:
            return
        self._attempt = attempt = object()
        broker, kernel = self._broker, self._broker.kernel
        broker.transmit(self._arrive, self._waiting[0], attempt)
        kernel.after(RETRY_AFTER, self._give_up, attempt)

    def _arrive(self, message: BrokerMessage, attempt: object) -> None:
        if self._broker.up and self.reachable:
            self._broker.store(message)
            self._broker.acknowledge(self._acknowledged, message, attempt)

    def _acknowledged(self, message: BrokerMessage, attempt: object) -> None:
        if attempt is not self._attempt or not (self._alive and self.reachable and self._broker.up):
            return  # acknowledges an abandoned attempt: the message is being sent again
        self._attempt = None
        self._waiting.popleft()
        self._spooled.discard(message.id)
        known = self._broker.acknowledged
        known[message.source] = max(known.get(message.source, 0), message.number)
        self.send()

    def _give_up(self, attempt: object) -> None:
        if attempt is not self._attempt or not self._alive:
            return
        self._attempt = None
        seams = self._broker.seams
        if seams.gives_up(self._waiting[0].fact):
            self._waiting.popleft()
        self._spooled.update(m.id for m in self._waiting)  # spooled before the next attempt
        self.send()
