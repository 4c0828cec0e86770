"""One simulation run: a simulated world around the real deciders, checked at every step."""

import contextlib
import gc
import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from json.encoder import encode_basestring_ascii as quoted

import structlog

from controller.deciders.fleet import Fleet, FleetPolicy
from controller.simulator.checks.invariants import ALL_INVARIANTS, INVARIANTS
from controller.simulator.checks.watch import InvariantWatch, Violated, Violation
from controller.simulator.world.broker import Broker, Network
from controller.simulator.world.controllers import SimulatedController
from controller.simulator.world.faults import FaultInjector
from controller.simulator.world.kernel import SECOND, Kernel
from controller.simulator.world.machines import Hardware, Machine, Standing
from controller.simulator.world.operators import Operators, SimulatedSupervisor
from controller.simulator.world.outbox import SimulatedOutbox
from controller.simulator.world.planner import SimulatedPlanner
from controller.simulator.world.planning.scaling import SimulatedScaling
from controller.simulator.world.projector import SimulatedProjector
from controller.simulator.world.replica import Remembered
from controller.simulator.world.requests.demand import SimulatedDemand
from controller.simulator.world.requests.frontends import SimulatedFrontend
from controller.simulator.world.requests.live_requests import LiveRequests
from controller.simulator.world.requests.request_driver import RequestsUnderWay
from controller.simulator.world.requests.traffic import ClientTally, SimulatedTraffic
from controller.simulator.world.scenario import Scenario, draw, profile_of
from controller.simulator.world.seams import Seams
from controller.simulator.world.surroundings import Surroundings
from controller.simulator.world.world import SimulatedWorld
from events import codec
from events.fact import Recorded
from events.order import OutOfOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of one run. `violation` is None if every invariant held."""

    scenario: Scenario
    violation: Violation | None
    events: int
    decisions: int
    kinds: dict[str, int]
    faults: dict[str, int]
    checks: dict[str, int]
    tally: ClientTally
    fenced: int
    repeated: int
    happened: int
    wall_s: float
    digest: str  # hash of the history
    levels: dict[str, int] = field(default_factory=dict)  # worst level reached, by model

    @property
    def speed(self) -> float:
        """Virtual seconds per second."""
        return self.scenario.minutes * 60 / self.wall_s if self.wall_s else 0.0


class Simulation(SimulatedWorld):
    """The simulated world of one seed. `run` plays it to the end or to the first violated invariant."""

    def __init__(
        self, scenario: Scenario, seams: Seams | None = None, *, live_requests: bool = False
    ) -> None:
        """Build the world; with `live_requests`, simulate each request token by token."""
        self.scenario, self._live_requests = scenario, live_requests
        self.seams = seams or Seams()
        self.kernel = kernel = Kernel(scenario.seed)
        self.notes: list[tuple[int, int, str]] = []  # time in microseconds, sequence of the last event, text
        self.broker = Broker(kernel, self.seams, Network(kernel.chance("network")))
        invariants = ALL_INVARIANTS if live_requests else INVARIANTS
        self.watch = InvariantWatch(self, invariants)
        self.broker.watchers.append(self.watch.recorded)
        self.machines = {name: self._machine(name, i) for i, name in enumerate(self._names())}
        self.surroundings = self._surroundings()
        self.projector = SimulatedProjector(self.surroundings, kernel.chance("projector"))
        self.planners = [*self._planners()]
        self.controllers = [self._controller(i) for i in range(scenario.controllers)]
        self.tally = ClientTally()
        self.demand = SimulatedDemand(scenario, kernel)
        self.frontends = [self._frontend(i) for i in range(scenario.frontends)]
        self.operators = Operators(self, kernel.chance("operators"))
        self.supervisor = SimulatedSupervisor(self, kernel.chance("supervisor"))
        self.scaling = self._scaling()
        self.faults = FaultInjector(
            self, self.operators, self.supervisor, kernel.chance("faults"), self._note
        )

    def run(self) -> Result:
        """Play the scenario to its end or to the first violated invariant, which is then in the result."""
        began = time.perf_counter()
        violation = None
        try:
            with quiet():
                self._play()
        except Violated as found:
            violation = found.violation
        except OutOfOrder as found:
            violation = self.watch.out_of_order(found)
        return self._result(violation, time.perf_counter() - began)

    def policy(self) -> FleetPolicy:
        """Return the policy that a controller started now would use."""
        return self.scenario.policies[-1 if self.kernel.now >= self.scenario.change_at else 0]

    def believed(self) -> Fleet:
        """Return the fleet as the leader has folded it; without a leader, the fold of the whole journal."""
        for controller in self.controllers:
            if controller.up and controller.leading and not controller.paused:
                return controller.replica.fleet
        return self.watch.reference.shown

    def outboxes(self) -> list[SimulatedOutbox]:
        """Return the outboxes of all running processes."""
        boxes = [c.outbox for c in self.controllers if c.up] + [f.outbox for f in self.frontends if f.up]
        boxes += [p.outbox for p in self.planners if p.up] + [
            m.outbox for m in self.machines.values() if m.up
        ]
        return [*boxes, self.scaling.outbox] if self.scaling is not None else boxes

    def history(self) -> Iterator[str]:
        """Yield the history as JSON lines: all events of the journal and all faults, in order of time."""
        notes = iter([*self.notes, (0, len(self.broker.events) + 1, "")])
        note = next(notes)
        for event in self.broker.events:
            while note[1] < event.seq:
                yield _note_line(note)
                note = next(notes)
            yield _event_line(event)
        while note[2]:
            yield _note_line(note)
            note = next(notes)

    # --- setting up ---------------------------------------------------------------------------------------------

    def _names(self) -> list[str]:
        return [f"w{i + 1}" for i in range(self.scenario.workers)]

    def _machine(self, name: str, index: int) -> Machine:
        models = self.scenario.models
        chance = self.kernel.chance(name)
        model = models[index % len(models)]
        spare = self.scenario.workers - self.scenario.spares <= index < self.scenario.workers
        crowd = self.scenario.crowd
        waiting = crowd.waiting if crowd is not None else None
        hardware = Hardware(profile=profile_of(crowd), spare=spare, waiting=waiting)
        return Machine(
            name, model, self.kernel, self.broker, chance, self._broken, hardware=hardware,
            standing=Standing(created=self.kernel.now),
        )  # fmt: skip

    def _one_more(self, model: str) -> Machine:
        """Add one more worker of a model, and return its machine."""
        models, index = self.scenario.models, len(self.machines)
        while models[index % len(models)] != model:
            index += 1
        while (name := f"w{index + 1}") in self.machines:
            index += len(models)
        machine = self.machines[name] = self._machine(name, index)
        updates = self.faults.updates
        updates.fit(machine)
        return machine

    def _planners(self) -> Iterator[SimulatedPlanner]:
        planning = self.scenario.planning
        for index in range(planning.planners if planning is not None else 0):
            assert planning is not None
            name = f"planner{index + 1}"
            yield SimulatedPlanner(
                name, self.surroundings, self.projector, planning, self.kernel.chance(name)
            )

    def _scaling(self) -> SimulatedScaling | None:
        if self.scenario.planning is None:
            return None
        return SimulatedScaling(self, self.supervisor, self._one_more, self.kernel.chance("scaling"))

    def _surroundings(self) -> Surroundings:
        return Surroundings(
            kernel=self.kernel,
            broker=self.broker,
            seams=replace(self.seams, evolve=Remembered(self.seams.evolve)),
            policy=self.policy,
            machines=self.machines,
            frontends=lambda: [f for f in self.frontends if f.up],
            scenario=self.scenario,
            notify=self.watch.notify,
            decided=self.watch.appended,
        )

    def _controller(self, index: int) -> SimulatedController:
        name = f"controller{index + 1}"
        chance = self.kernel.chance(name)
        return SimulatedController(
            name, self.surroundings, chance, chance.randint(-self.scenario.skew, self.scenario.skew)
        )

    def _frontend(self, index: int) -> SimulatedFrontend:
        name = f"frontend{index + 1}"
        scenario, chance = self.scenario, self.kernel.chance(name)
        underway: Callable[..., RequestsUnderWay] = partial(
            RequestsUnderWay, crowded=scenario.crowd is not None
        )
        request_chance = chance
        if self._live_requests:
            underway, request_chance = LiveRequests, self.kernel.chance(f"{name} requests")
        traffic = SimulatedTraffic(
            per_second=self.demand.per_second,
            machines=self.machines,
            models=self.scenario.models,
            tally=self.tally,
            stepped=self.watch.stepped,
            stored=lambda: self.projector.stored,
            traffic_reports=self.demand.traffic_reports,
        )
        return SimulatedFrontend(name, self.surroundings, traffic, chance, underway, request_chance)

    # --- playing ------------------------------------------------------------------------------------------------

    def _play(self) -> None:
        self.begin()
        self.kernel.run(self.scenario.end_at)
        self.watch.end()

    def begin(self) -> None:
        """Schedule the start of every process and of the faults."""
        kernel, chance = self.kernel, self.kernel.chance("start")
        for machine in self.machines.values():
            kernel.after(int(chance.random() * self.scenario.late), machine.start)
        for machine in chance.sample(
            list(self.machines.values()), min(self.scenario.corrupt_from_start, len(self.machines))
        ):
            self.faults.corrupt_from_start(machine)
        starts = [c.start for c in self.controllers] + [f.start for f in self.frontends]
        starts += [planner.start for planner in self.planners]
        for start in (*starts, self.projector.start):
            kernel.after(int(chance.random() * 2 * SECOND), start)
        kernel.after(SECOND, self.watch.tick)
        kernel.after(20 * SECOND, self.faults.begin)
        kernel.after(self.scenario.heal_at, self._heal)
        if len(self.scenario.policies) > 1:
            kernel.after(self.scenario.change_at, self._change_policy)

    def _change_policy(self) -> None:
        """Restart the controllers one after another with the next policy."""
        self._note("another policy")
        for i, controller in enumerate(self.controllers):
            self.kernel.after(i * 45 * SECOND, controller.crash)
            self.kernel.after(i * 45 * SECOND + 2 * SECOND, controller.start)

    def _heal(self) -> None:
        self.faults.heal()
        self.operators.resume_all()

    def _broken(self, machine: Machine) -> None:
        for frontend in self.frontends:
            frontend.broken(machine)

    def _note(self, text: str) -> None:
        self.notes.append((self.kernel.now, self.broker.last_seq, text))

    def _result(self, violation: Violation | None, wall_s: float) -> Result:
        kinds: dict[str, int] = {}
        for event in self.broker.events:
            kind = event.fact.kind()
            kinds[kind] = kinds.get(kind, 0) + 1
        digest = hashlib.sha256()
        for line in self.history():
            digest.update(line.encode())
        return Result(
            scenario=self.scenario,
            violation=violation,
            events=self.broker.last_seq,
            decisions=self.watch.ledger.number,
            kinds=dict(sorted(kinds.items())),
            faults=dict(sorted((self.faults.struck | self.faults.updates.struck).items())),
            checks=dict(sorted(self.watch.checks.items())),
            tally=self.tally,
            fenced=self.broker.fenced,
            repeated=self.broker.repeated,
            happened=self.kernel.happened,
            wall_s=wall_s,
            digest=digest.hexdigest(),
            levels=dict(self.watch.worst_level),
        )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress the production code's logs: a virtual hour would write too many."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        yield
    finally:
        structlog.configure(**before)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Disable the garbage collector during a run. A run creates few cycles, and is freed as a whole afterwards."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
        gc.collect(1)  # only the generations of objects created by this run


def simulate(
    seed: int,
    workers: int = 16,
    minutes: float = 60.0,
    *,
    rates: str | None = None,
    seams: Seams | None = None,
    live_requests: bool = False,
) -> Result:
    """Run one seed for `minutes` virtual minutes and return the result, including a violated invariant.

    With `rates`, a preset's name, the workers' faults follow the mix of that field study. Raise KeyError for an unknown
    preset.
    """
    with uncollected():
        return Simulation(draw(seed, workers, minutes, rates), seams, live_requests=live_requests).run()


def _note_line(note: tuple[int, int, str]) -> str:
    return json.dumps({"at_us": note[0], "fault": note[2]}) + "\n"


def _event_line(event: Recorded) -> str:
    return (
        f'{{"seq": {event.seq}, "at": "{event.at.isoformat()}", "id": {quoted(event.id)}, '
        f'"source": {quoted(event.source)}, "number": {event.source_number}, "through": {event.through}, '
        f'"causation": {quoted(event.causation)}, "kind": "{event.fact.kind()}", '
        f'"body": {codec.encode_body(event.fact).decode()}}}\n'
    )
