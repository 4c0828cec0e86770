"""Production's observer of heartbeats (`controller.runtime.liveness`), fed with played heartbeats.

Who beats and who is linked is taken from the machines once a second; what follows from it is said by the very code
that runs in a controller.
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
    """One controller's observer. Told of every second in which it was able to listen."""

    unread = 0  # bytes of the bus: what can be heard is heard at once

    def __init__(
        self, surroundings: Surroundings, fleet: Callable[[], Fleet], outbox: SimulatedOutbox
    ) -> None:
        self.source = outbox.source
        self.since: float | None = None  # connected, and awake, since then
        self._surroundings = surroundings
        self._fleet = fleet
        self._outbox = outbox
        self._clock = clock = KernelClock(surroundings.kernel)
        self._beats = Beats(clock)
        settings = LivenessSettings(silent_after_s=surroundings.scenario.silent_after_s)
        # It plays the view, the journal and the bus.
        self._liveness = Liveness(self, self._beats, self, self, clock, settings, lambda: True)

    def disconnected(self) -> None:
        """Nothing could be heard: whoever was quiet now is not thereby silent."""
        self.since = None

    def listen(self, machines: Mapping[str, Machine]) -> None:
        """Hear who beats and who is linked, and let the observer judge."""
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
            # Connections to workers that are heard change nothing.
            linked = {m.name: m.instance for m in quiet if vetoed(frontend.linked(m))}
            self._beats.on_links(frontend.name, {"frontend": frontend.name, "workers": linked})
        self._liveness.look(now)

    # --- what the observer needs ----------------------------------------------------------------------------------

    @property
    def fleet(self) -> Fleet:
        """As a view: the fleet as this controller has folded it."""
        return self._fleet()

    def observe(self, fact: Observation) -> str:
        """As a journal: say what the observer found."""
        if isinstance(fact, WorkerSilent):
            surroundings = self._surroundings
            surroundings.tell("accused", surroundings.machines[fact.worker], fact.instance)
        return self._outbox.observe(fact)
