"""Runs the production heartbeat observer (`controller.runtime.liveness`) on simulated heartbeats.

Which workers send heartbeats and which are linked is read from the machines once a second. The code that evaluates them is
that of a controller.
"""

from collections.abc import Callable, Mapping

from controller.deciders.fleet import Fleet
from controller.runtime.beats import Beats
from controller.runtime.liveness import Liveness
from controller.runtime.settings import LivenessSettings
from controller.simulator.world.kernel import KernelClock
from controller.simulator.world.machines import Machine
from controller.simulator.world.outbox import SimulatedOutbox
from controller.simulator.world.surroundings import Surroundings
from events import subjects
from events.fact import Observation
from events.observations import WorkerSilent


class SimulatedObserver:
    """The heartbeat observer of one controller. It is called for every second in which it can receive heartbeats."""

    unread = 0  # unread bytes on the bus; always 0, because every message is read at once

    def __init__(
        self, surroundings: Surroundings, fleet: Callable[[], Fleet], outbox: SimulatedOutbox
    ) -> None:
        self.source = outbox.source
        self.since: float | None = None  # since when it has been connected and not paused, in seconds
        self._surroundings = surroundings
        self._fleet = fleet
        self._outbox = outbox
        self._clock = clock = KernelClock(surroundings.kernel)
        self._beats = Beats(clock)
        settings = LivenessSettings(silent_after_s=surroundings.scenario.silent_after_s)
        # This object serves as the view, the journal and the bus.
        self._liveness = Liveness(self, self._beats, self, self, clock, settings, lambda: True)

    def disconnected(self) -> None:
        """Record that the bus was unreachable: a worker without heartbeats during that time does not count as silent."""
        self.since = None

    def listen(self, machines: Mapping[str, Machine]) -> None:
        """Read which workers send heartbeats and which are linked, and run the observer."""
        now = self._clock.monotonic()
        self.since = now if self.since is None else self.since
        at, quiet = self._clock.now().isoformat(), []
        for name, machine in machines.items():
            if machine.beating:
                beat = {"worker": name, "instance": machine.instance, "draining": machine.draining, "at": at}
                self._beats.on_beat(subjects.beat(name), beat)
            else:
                quiet.append(machine)
        vetoed = self._surroundings.seams.vetoed
        for frontend in self._surroundings.frontends():
            # Connections to workers that send heartbeats do not matter.
            linked = {m.name: m.instance for m in quiet if vetoed(frontend.linked(m))}
            self._beats.on_links(frontend.name, {"frontend": frontend.name, "workers": linked})
        self._liveness.look(now)

    # --- the interfaces that the observer needs -----------------------------------------------------------------------

    @property
    def fleet(self) -> Fleet:
        """The fleet as this controller has folded it (as a view)."""
        return self._fleet()

    def observe(self, fact: Observation) -> str:
        """Publish what the observer found (as a journal)."""
        if isinstance(fact, WorkerSilent):
            surroundings = self._surroundings
            surroundings.notify("accused", surroundings.machines[fact.worker], fact.instance)
        return self._outbox.observe(fact)
