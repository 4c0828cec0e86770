"""Production's observer of heartbeats (`controller.runtime.liveness`), fed with played heartbeats.

Who beats and who is linked is taken from the machines once a second; what follows from it is said by the very code
that runs in a controller.
"""

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, cast

from controller.deciders.fleet import Fleet
from controller.runtime.beats import Beats
from controller.runtime.liveness import Liveness
from controller.runtime.settings import LivenessSettings
from controller.simulator.kernel import SECOND, Kernel
from controller.simulator.machines import Machine
from controller.simulator.outbox import Outbox
from controller.simulator.seams import Seams
from events.fact import Observation
from events.observations import WorkerSilent

if TYPE_CHECKING:
    from controller.simulator.frontends import Frontend


class Ear:
    """One controller's observer. Told of every second in which it was able to listen."""

    unread = 0  # bytes of the bus: what can be heard is heard at once

    def __init__(
        self,
        kernel: Kernel,
        seams: Seams,
        fleet: Callable[[], Fleet],
        outbox: Outbox,
        frontends: Callable[[], Iterable["Frontend"]],
        accused: Callable[[str, str], None],
    ) -> None:
        self.source = outbox.source
        self.since: float | None = None  # connected, and awake, since then
        self._kernel = kernel
        self._seams = seams
        self._fleet = fleet
        self._outbox = outbox
        self._frontends = frontends
        self._accused = accused
        port = cast(Any, self)  # it plays the view, the journal, the bus and the clock
        self._beats = Beats(port, port)
        self._liveness = Liveness(port, self._beats, port, port, port, LivenessSettings(), lambda: True)

    def deaf(self) -> None:
        """Nothing could be heard: whoever was quiet now is not thereby silent."""
        self.since = None

    def listen(self, machines: Mapping[str, Machine]) -> None:
        """Hear who beats and who is linked, and let the observer judge."""
        now = self.monotonic()
        self.since = now if self.since is None else self.since
        at, quiet = self.now().isoformat(), []
        for name, machine in machines.items():
            if machine.beating:
                beat = {"worker": name, "instance": machine.instance, "draining": machine.draining, "at": at}
                self._beats.on_beat(name, beat)
            else:
                quiet.append(machine)
        for frontend in self._frontends():  # connections to workers that are heard change nothing
            linked = {m.name: m.instance for m in quiet if self._seams.vetoed(frontend.linked(m))}
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
            self._accused(fact.worker, fact.instance)
        return self._outbox.observe(fact)

    def monotonic(self) -> float:
        """As a clock: virtual seconds."""
        return self._kernel.now / SECOND

    def now(self) -> datetime:
        """As a clock: the virtual instant."""
        return self._kernel.instant()
