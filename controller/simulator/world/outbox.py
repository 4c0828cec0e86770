"""The outbox of a simulated process: facts that the broker has not acknowledged yet.

Facts are sent in order and one at a time. The folds drop a fact if its number is not above its source's last, so a fact that
overtook another would cause the other to be dropped. A fact counts as acknowledged only when the broker confirmed it; until then
it is sent again, with the same id and number.

While the broker is unreachable, facts are spooled to a file. A killed process loses what it had not spooled yet; the next
process that starts in its directory sends the rest.
"""

from collections import deque

from controller.simulator.world.broker import Broker, BrokerMessage
from controller.simulator.world.kernel import SECOND
from events.fact import Observation

RETRY_AFTER = 1 * SECOND
SPOOL_MAX = 10_000


class SimulatedOutbox:
    """The facts of one process instance on their way to the journal."""

    def __init__(self, broker: Broker, source: str) -> None:
        self.source = source
        self.reachable = True  # False: this process is cut off from the broker
        self._broker = broker
        self._numbers = broker.acknowledged
        self._number = 0
        self._waiting: deque[BrokerMessage] = deque()
        self._spooled: set[str] = set()  # ids of the facts that survive a crash
        self._busy = False
        self._turn = 0  # the attempt to which an acknowledgement must belong
        self._alive = True

    def __len__(self) -> int:
        return len(self._waiting)

    def observe(self, fact: Observation, causation: str = "") -> str:
        """Queue a fact for publication; return its id."""
        self._number += 1
        id = f"{self.source}/{self._number}"
        if len(self._waiting) >= SPOOL_MAX:
            self._number -= 1
            self._numbers.dropped += 1
            return id
        self._waiting.append(BrokerMessage(fact, id, self.source, self._number, causation))
        self._send()
        return id

    def crash(self) -> list[BrokerMessage]:
        """End with the process; return the contents of its spool."""
        self._alive = False
        return [m for m in self._waiting if m.id in self._spooled]

    def inherit(self, spool: list[BrokerMessage]) -> None:
        """Send what a predecessor in the same directory left, before any new fact."""
        self._waiting.extendleft(reversed(spool))
        self._spooled.update(m.id for m in spool)
        self._send()

    def retry(self) -> None:
        """Try to send now: the broker may be reachable again."""
        self._send()

    def _send(self) -> None:
        if self._busy or not self._waiting or not self._alive:
            return
        self._busy = True
        self._turn += 1
        network, kernel = self._broker.network, self._broker.kernel
        if not network.drops():
            kernel.after(network.delay(), self._arrive, self._waiting[0], self._turn)
        kernel.after(RETRY_AFTER, self._give_up, self._turn)

    def _arrive(self, message: BrokerMessage, turn: int) -> None:
        broker = self._broker
        if not broker.up or not self.reachable:
            return
        broker.store(message)
        if not broker.mute and not broker.network.drops():
            broker.kernel.after(broker.network.delay(), self._acknowledged, message, turn)

    def _acknowledged(self, message: BrokerMessage, turn: int) -> None:
        reachable = self.reachable and self._broker.up
        if turn != self._turn or not (self._busy and self._alive and reachable):
            return  # acknowledges an abandoned attempt: the message is being sent again
        self._busy = False
        self._turn += 1
        self._waiting.popleft()
        self._spooled.discard(message.id)
        known = self._numbers.acknowledged
        known[message.source] = max(known.get(message.source, 0), message.number)
        self._send()

    def _give_up(self, turn: int) -> None:
        if turn != self._turn or not self._alive:
            return
        self._busy = False
        seams = self._broker.seams
        if seams.gives_up(self._waiting[0].fact):
            self._waiting.popleft()
        self._spooled.update(m.id for m in self._waiting)  # spooled before the next attempt
        self._send()
