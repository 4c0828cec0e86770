"""Simulates controller processes, which read, decide and append with a fence like the reconciler.

Several controllers compete for the lease, which only saves work. A controller that was stopped between deciding and sending
(by a long garbage collection, or in a frozen virtual machine) still assumes that it holds the lease, and its append arrives
late. Only the fence rejects such an append.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta

from controller.deciders.fleet import Fleet, SettleCache, absorbed, absorption_due
from controller.runtime.beats import Beats
from controller.runtime.liveness import Liveness
from controller.runtime.settings import LivenessSettings
from controller.simulator.world.broker import LEASE_TTL
from controller.simulator.world.kernel import MS, SECOND, KernelClock
from controller.simulator.world.prober import SimulatedProber
from controller.simulator.world.surroundings import Replica, SimulatedProcess, Surroundings
from events import subjects
from events.decisions import HealthStatus
from events.fact import Decision, Observation, Recorded
from events.observations import WorkerSilent

APPEND_DEADLINE = 2 * SECOND


class SimulatedController(SimulatedProcess):
    """A host that runs controller processes, one after another.

    Each process runs the production heartbeat observer (`Liveness`) while it can receive heartbeats. For the observer, this
    class implements the interfaces of the fleet's view, the journal and the message bus.
    """

    unread = 0  # unread bytes on the bus; always 0, because every message is read at once

    def __init__(self, name: str, surroundings: Surroundings) -> None:
        super().__init__(name, surroundings)
        skew = surroundings.scenario.skew
        self.skew = timedelta(microseconds=self._chance.randint(-skew, skew))
        self.paused = False
        self.hold_append = False  # stop between deciding and sending
        self.leading = False
        self._held: tuple[tuple[Decision, ...], int, int] | None = None

    # --- lifecycle ---------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Start a process with an empty fold, which reads the journal from its beginning."""
        surroundings = self.surroundings
        self.paused = self.leading = False
        self._asking = SettleCache(surroundings.policy(), surroundings.seams.settle)
        self._sent: object = None  # the append in flight; answers to earlier ones are ignored
        # Sequence to read before deciding; None: the journal's end, which is not known yet.
        self._must_read: int | None = 0
        self._believed_until = 0
        self._held = None
        self._pending_since: datetime | None = None
        self.outbox = self._outbox()
        self.replica = Replica(self.name, self._broker, self._absorbed)
        self.since: float | None = None  # since when it has been connected and not paused, in seconds
        self._virtual = clock = KernelClock(surroundings.kernel)
        self._beats = Beats(clock)
        settings = LivenessSettings(silent_after_s=surroundings.scenario.silent_after_s)
        self._liveness = Liveness(self, self._beats, self, self, clock, settings, lambda: True)
        self.prober = SimulatedProber(
            surroundings,
            self._chance,
            fleet=lambda: self.replica.fleet,
            outbox=self.outbox,
            clock=self.clock,
            leading=lambda: self.leading,
        )
        self._later(self._chance.randrange(SECOND), self._tick)

    def _end(self) -> None:
        """End the process. An append that is in transit may still reach the broker."""
        self.leading = False
        self.prober.alive = False
        self._spool = self.outbox.crash()
        self.replica.close()

    def pause(self, duration: int) -> None:
        """Stop the process for `duration` microseconds. It then continues without noticing the interruption."""
        if self.up and not self.paused:
            self.paused = True
            self.replica.follower.open = False
            self._later(duration, self._resume)

    def clock(self) -> datetime:
        """Return this controller's own time, which differs from virtual time by `skew`."""
        return self._kernel.instant() + self.skew

    def _resume(self) -> None:
        self.paused = False
        self.since = None
        follower = self.replica.follower
        follower.open = True
        follower.wake()
        if self._held is not None:
            (batch, through, after), self._held = self._held, None
            self._send(batch, through, after)  # a stale append: the lease has expired
        self._tick_body()

    # --- the loop -----------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        self._later(self.surroundings.scenario.tick, self._tick)
        if not self.paused:
            self._tick_body()

    def _tick_body(self) -> None:
        broker, now = self._broker, self._kernel.now
        self._renew(now)
        if self._must_read is None and broker.up:
            self._must_read = broker.last_seq
        if not self.leading or not broker.up:
            self.since = None
            return
        if self._caught_up():
            self._listen()
            self.prober.round()
            self._act_on_drains()
        self._decide()

    def _renew(self, now: int) -> None:
        broker = self._broker
        if broker.up and not broker.network.drops():
            acquired = broker.lease(self.name) == self.name
            if acquired:
                self._believed_until = now + LEASE_TTL - 500 * MS
                if not self.leading:
                    self.leading, self._must_read = True, broker.last_seq
                return
            self.leading = False
        elif now >= self._believed_until:
            self.leading = False

    def _caught_up(self) -> bool:
        return self._must_read is not None and self.replica.seq >= self._must_read and self.replica.whole

    def _absorbed(self, replica: Replica, batch: Sequence[Recorded]) -> None:
        self.surroundings.notify("absorbed", replica, batch)
        if self.leading and not self.paused:
            self._decide()
            if any(e.source != self.outbox.source for e in batch):
                self.prober.round()

    # --- liveness -----------------------------------------------------------------------------------------------

    @property
    def fleet(self) -> Fleet:
        """The fleet as this controller has folded it. The heartbeat observer reads this property."""
        return self.replica.fleet

    def observe(self, fact: Observation) -> str:
        """Publish a fact that the heartbeat observer has found, and return its id."""
        if isinstance(fact, WorkerSilent):
            surroundings = self.surroundings
            surroundings.notify("accused", surroundings.machines[fact.worker], fact.instance)
        return self.outbox.observe(fact)

    def _listen(self) -> None:
        """Pass heartbeats and the frontends' links to the heartbeat observer, and run the observer."""
        now = self._virtual.monotonic()
        self.since = now if self.since is None else self.since
        at, quiet = self._virtual.now().isoformat(), []
        for name, machine in self.surroundings.machines.items():
            if machine.beating:
                beat = {"worker": name, "instance": machine.instance, "draining": machine.draining, "at": at}
                self._beats.on_beat(subjects.beat(name), beat)
            else:
                quiet.append(machine)
        veto = self.surroundings.seams.links_veto
        for frontend in self.surroundings.linking():
            # Connections to workers that send heartbeats do not matter.
            linked = {m.name: m.instance for m in quiet if veto and frontend.linked(m)}
            self._beats.on_links(frontend.name, {"frontend": frontend.name, "workers": linked})
        self._liveness.look(now)

    # --- deciding -----------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        if self._sent is not None or self._held is not None or not self.leading or not self._caught_up():
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
        self._sent = sent = object()
        self._broker.transmit(self._arrive, self.source, sent, batch, through, after)
        self._kernel.after(APPEND_DEADLINE, self._unknown, sent)

    def _arrive(
        self, source: str, sent: object, batch: tuple[Decision, ...], through: int, after: int
    ) -> None:
        """Deliver an append to the broker, even if its sender has ended meanwhile."""
        broker = self._broker
        if not broker.up:
            return
        landed = broker.append(batch, source=source, through=through, after=after)
        self.surroundings.decided(source)
        broker.acknowledge(self._answered, sent, landed, broker.last_seq)

    def _answered(self, sent: object, landed: bool, last_seq: int) -> None:
        if not self.up or self._sent is not sent:
            return
        self._sent = None
        self._must_read = max(self._must_read or 0, last_seq)
        if not landed:  # another controller has decided: discard the fold and read again
            self.leading = False
            self.replica.close()
            self.replica = Replica(self.name, self._broker, self._absorbed)

    def _unknown(self, sent: object) -> None:
        if self.up and self._sent is sent:
            self._sent = self._must_read = None

    # --- acting -------------------------------------------------------------------------------------------------

    def _act_on_drains(self) -> None:
        """Drain and resume workers, so that each is draining exactly if the fold requires it."""
        fleet, machines = self.replica.fleet, self.surroundings.machines
        for name, worker in fleet.workers.items():
            machine = machines[name]
            if machine.instance != worker.joined.instance or machine.condition.cut:
                continue
            status = worker.health.status
            drains = status is HealthStatus.DRAINING or worker.drain.active
            should_drain = drains and not worker.health.exit.resumed
            if should_drain and not machine.draining:
                machine.drain()
            elif not should_drain and machine.draining and status is not HealthStatus.DEAD:
                machine.resume()
