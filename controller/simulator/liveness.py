"""Who has gone quiet? Said only by an observer that was listening all the while, and doubted when it is everybody.

Heartbeats arrive each second; a worker from which nothing came for three seconds is reported, unless a frontend's
live connection vetoes it. If more than half of the fleet fell quiet at once it is the observer that is deaf.
"""

from collections.abc import Callable, Mapping

from controller.deciders.fleet import Fleet
from controller.simulator.kernel import SECOND
from controller.simulator.machines import Machine
from controller.simulator.outbox import Outbox
from controller.simulator.seams import Seams
from events.decisions import HealthStatus
from events.observations import ObserverBlind, WorkerHeard, WorkerSilent

SILENT_AFTER = 3 * SECOND
# After this long without a report a frontend's connections no longer count.
LINKS_FRESH = 3 * SECOND


class Liveness:
    """One controller's ear. Told of every tick at which it was able to listen."""

    def __init__(
        self,
        observer: str,
        seams: Seams,
        linked: Callable[[Machine], bool],
        accused: Callable[[Machine, str], None],
    ) -> None:
        self.observer = observer
        self._seams = seams
        self._linked = linked
        self._tell = accused
        self._listening_since = -1
        self._heard: dict[str, int] = {}  # by instance
        self._accused: set[str] = set()  # instances
        self._blind = False

    def deaf(self) -> None:
        """Nothing could be heard: whoever was quiet now is not thereby silent."""
        self._listening_since = -1

    def listen(self, now: int, fleet: Fleet, machines: Mapping[str, Machine], outbox: Outbox) -> None:
        """Hear who beats, and report who does not."""
        if self._listening_since < 0:
            self._listening_since = now
        quiet: list[Machine] = []
        known = 0
        for name, worker in fleet.workers.items():
            if worker.health.status is HealthStatus.DEAD:
                continue
            known += 1
            machine, instance = machines[name], worker.joined.instance
            if machine.beating and machine.instance == instance:
                self._heard[instance] = now
                if instance in self._accused:
                    self._accused.discard(instance)
                    outbox.observe(WorkerHeard(worker=name, instance=instance, observer=self.observer))
                continue
            since = max(self._heard.get(instance, 0), self._listening_since)
            if now - since >= SILENT_AFTER and instance not in self._accused:
                quiet.append(machine)
        self._report(now, known, quiet, fleet, outbox)

    def _report(self, now: int, known: int, quiet: list[Machine], fleet: Fleet, outbox: Outbox) -> None:
        if len(quiet) * 2 > known and len(quiet) > 1:
            if not self._blind:
                self._blind = True
                outbox.observe(ObserverBlind(observer=self.observer, silent=len(quiet), known=known))
            return
        self._blind = False
        for machine in quiet:
            instance = fleet.workers[machine.name].joined.instance
            linked = machine.instance == instance and self._linked(machine)
            if self._seams.vetoed(linked):
                continue
            self._accused.add(instance)
            self._tell(machine, instance)
            silent_s = (now - max(self._heard.get(instance, 0), self._listening_since)) / SECOND
            outbox.observe(
                WorkerSilent(
                    worker=machine.name, instance=instance, silent_s=silent_s, observer=self.observer
                )
            )
