"""A controller process: it reads, decides, and appends under the fence, as the reconciler does.

Several of them compete for the lease. The lease only saves work: a controller that was stopped between deciding and
sending (a long garbage collection, a frozen virtual machine) still believes in it, and its append arrives late. What
keeps the history right is the fence.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from random import Random
from typing import TYPE_CHECKING

from controller.deciders.fleet import Asking, FleetPolicy, absorbed, absorption_due
from controller.simulator.broker import LEASE_TTL, Broker, Message, Network
from controller.simulator.kernel import MS, SECOND, Kernel
from controller.simulator.liveness import Ear
from controller.simulator.machines import Machine
from controller.simulator.outbox import Outbox, Said
from controller.simulator.prober import Prober
from controller.simulator.replica import Replica
from controller.simulator.seams import Seams
from events.decisions import HealthStatus
from events.fact import Decision, Recorded

if TYPE_CHECKING:
    from controller.simulator.frontends import Frontend

APPEND_DEADLINE = 2 * SECOND


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What every controller of a simulation has in common."""

    kernel: Kernel
    broker: Broker
    network: Network
    seams: Seams
    said: Said
    policy: Callable[[], FleetPolicy]  # with which a controller starts
    machines: Mapping[str, Machine]
    frontends: Callable[[], Iterable["Frontend"]]
    interval: int  # between canaries of one worker
    tick: int  # between looks at the clock, at heartbeats, and at who is to be probed
    listen: Callable[[Replica, Sequence[Recorded]], None]
    decided: Callable[[str], None]  # an append has reached the broker
    accused: Callable[[str, str], None]  # an observer calls a worker silent


class Controller:
    """One place that runs controller processes, one after another."""

    def __init__(self, name: str, around: Surroundings, chance: Random, skew: int) -> None:
        self.name = name
        self.around = around
        self.skew = timedelta(microseconds=skew)
        self.up = False
        self.paused = False
        self.hold_append = False  # stop between deciding and sending
        self.life = 0
        self.leading = False
        self._chance = chance
        self._spool: list[Message] = []
        self._held: tuple[tuple[Decision, ...], int, int] | None = None

    # --- life ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start a process: an empty fold, read from the beginning."""
        if self.up:
            return
        around = self.around
        self.life += 1
        self.up, self.paused, self.leading = True, False, False
        self._asking = Asking(around.policy(), around.seams.settle)
        self._appending = 0  # which append is on its way; 0: none
        self._appends = 0
        self._must_read = 0
        self._believed_until = 0
        self._held = None
        self._wait_read = False
        self._pending_since: datetime | None = None
        self.outbox = Outbox(around.broker, f"{self.name}.{self.life}", around.said)
        self.outbox.inherit(self._spool)
        self._spool = []
        self.replica = self._replica()
        self.ear = Ear(
            around.kernel,
            around.seams,
            lambda: self.replica.fleet,
            self.outbox,
            around.frontends,
            around.accused,
        )
        self.prober = Prober(
            kernel=around.kernel,
            chance=self._chance,
            machines=around.machines,
            fleet=lambda: self.replica.fleet,
            outbox=self.outbox,
            interval=around.interval,
            clock=self.clock,
            leading=lambda: self.leading,
        )
        around.kernel.after(self._chance.randrange(SECOND), self._tick, self.life)

    def crash(self) -> None:
        """End without a word; an append on its way may still arrive."""
        if not self.up:
            return
        self.up = self.leading = False
        self.prober.alive = False
        self._spool = self.outbox.crash()
        self.replica.close()

    def pause(self, duration: int) -> None:
        """Stop in the middle of whatever it was doing, and go on later as if nothing had been."""
        if self.up and not self.paused:
            self.paused = True
            self.replica.follower.open = False
            self.around.kernel.after(duration, self._go_on, self.life)

    def clock(self) -> datetime:
        """Return this controller's own time: it is a little off."""
        return self.around.kernel.instant() + self.skew

    def _go_on(self, life: int) -> None:
        if not self.up or self.life != life:
            return
        self.paused = False
        self.ear.deaf()
        self.replica.follower.open = True
        self.replica.follower.wake()
        if self._held is not None:
            (batch, through, after), self._held = self._held, None
            self._send(batch, through, after)  # the zombie's append: its lease is long gone
        self._tick_body()

    def _replica(self) -> Replica:
        around = self.around
        return Replica(self.name, around.broker, around.network, around.seams, self._absorbed)

    # --- the loop -----------------------------------------------------------------------------------------------

    def _tick(self, life: int) -> None:
        if not self.up or self.life != life:
            return
        self.around.kernel.after(self.around.tick, self._tick, life)
        if not self.paused:
            self._tick_body()

    def _tick_body(self) -> None:
        broker, now = self.around.broker, self.around.kernel.now
        self._renew(now)
        if self._wait_read and broker.up:
            self._wait_read, self._must_read = False, broker.last_seq
        if not self.leading or not broker.up:
            self.ear.deaf()
            return
        if self._caught_up():
            self.ear.listen(self.around.machines)
            self.prober.round()
            self._act_on_drains()
        self._decide()

    def _renew(self, now: int) -> None:
        broker = self.around.broker
        if broker.up and not broker.network.loses():
            mine = broker.lease(self.name) == self.name
            if mine:
                self._believed_until = now + LEASE_TTL - 500 * MS
                if not self.leading:
                    self.leading, self._must_read = True, broker.last_seq
                return
            self.leading = False
        elif now >= self._believed_until:
            self.leading = False

    def _caught_up(self) -> bool:
        return not self._wait_read and self.replica.seq >= self._must_read and self.replica.whole

    def _absorbed(self, replica: Replica, batch: Sequence[Recorded]) -> None:
        self.around.listen(replica, batch)
        if self.leading and not self.paused:
            self._decide()
            if any(e.source != self.outbox.source for e in batch):
                self.prober.round()

    # --- deciding -----------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        if self._appending or self._held is not None or not self.leading or not self._caught_up():
            return
        now = self.clock()
        batch = self._due(now)
        if not batch:
            return
        order = self.replica.order
        through, after = order.last_seq, order.position.decided
        if self.hold_append:
            self.hold_append = False
            self._held = (batch, through, after)
            self.pause(self._chance.randrange(2, 20) * SECOND)
            return
        self._send(batch, through, after)

    def _due(self, now: datetime) -> tuple[Decision, ...]:
        fleet = self.replica.fleet
        batch = self._asking.due(fleet, now)
        if batch or not self.replica.order.pending:
            self._pending_since = None
            return batch
        self._pending_since = self._pending_since or now
        if not absorption_due(len(self.replica.order.pending), now - self._pending_since):
            return ()
        self._pending_since = None
        return (absorbed(fleet, now),)

    def _send(self, batch: tuple[Decision, ...], through: int, after: int) -> None:
        around, network = self.around, self.around.broker.network
        self._appends += 1
        self._appending = turn = self._appends
        if not network.loses():
            around.kernel.after(network.delay(), self._arrive, self.life, turn, batch, through, after)
        around.kernel.after(APPEND_DEADLINE, self._unknown, self.life, turn)

    def _arrive(self, life: int, turn: int, batch: tuple[Decision, ...], through: int, after: int) -> None:
        """The append reaches the broker, whether or not its sender still lives."""
        broker = self.around.broker
        if not broker.up:
            return
        source = f"{self.name}.{life}"
        landed = broker.append(batch, source=source, through=through, after=after)
        self.around.decided(source)
        if not broker.mute and not broker.network.loses():
            self.around.kernel.after(
                broker.network.delay(), self._answered, life, turn, landed, broker.last_seq
            )

    def _answered(self, life: int, turn: int, landed: bool, last_seq: int) -> None:
        if not self.up or self.life != life or turn != self._appending:
            return
        self._appending = 0
        self._must_read = max(self._must_read, last_seq)
        if not landed:  # somebody else has decided: drop what we believe, read again
            self.leading = False
            self.replica.close()
            self.replica = self._replica()

    def _unknown(self, life: int, turn: int) -> None:
        if self.up and self.life == life and turn == self._appending:
            self._appending = 0
            self._wait_read = True  # read up to the end before deciding again

    # --- acting -------------------------------------------------------------------------------------------------

    def _act_on_drains(self) -> None:
        """Tell workers what the fold wants of them, until it is so."""
        for name, worker in self.replica.fleet.workers.items():
            machine = self.around.machines[name]
            if machine.instance != worker.joined.instance or machine.condition.cut:
                continue
            status = worker.health.status
            wanted = (status is HealthStatus.DRAINING or worker.drain.active) and not worker.health.resumed
            if wanted and not machine.draining:
                machine.drain()
            elif not wanted and machine.draining and status is not HealthStatus.DEAD:
                machine.resume()
