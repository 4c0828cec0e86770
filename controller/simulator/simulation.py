"""Runs one simulation: a simulated world around the production deciders, checked at every step."""

import contextlib
import gc
import hashlib
import json
import logging
import multiprocessing
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from heapq import merge
from json.encoder import encode_basestring_ascii as quoted
from operator import itemgetter
from types import ModuleType

import structlog

from controller.deciders.fleet import Fleet, FleetPolicy
from controller.simulator.checks import decisions, end, folds, overload, planner, requests, spares, world
from controller.simulator.checks.watch import Invariant, InvariantWatch, Violated, Violation
from controller.simulator.world.broker import Broker, Network, SimulatedOutbox
from controller.simulator.world.controllers import SimulatedController
from controller.simulator.world.faults import FaultInjector
from controller.simulator.world.kernel import SECOND, Kernel
from controller.simulator.world.machines import Machine
from controller.simulator.world.planner import SimulatedPlanner, SimulatedProjector
from controller.simulator.world.requests.frontends import RequestsUnderWay, SimulatedFrontend
from controller.simulator.world.requests.live_requests import LiveRequests
from controller.simulator.world.scenario import Scenario, draw, profile_of
from controller.simulator.world.seams import Seams, Stored
from controller.simulator.world.surroundings import Remembered, Replica
from controller.simulator.world.traffic import ClientTally, SimulatedDemand
from controller.simulator.world.world import Operators, SimulatedScaling, SimulatedSupervisor, SimulatedWorld
from events import codec
from events.fact import Recorded
from events.order import OutOfOrder


def invariants_of(*modules: ModuleType) -> dict[str, Invariant]:
    """Return the invariants that these modules define, by name."""
    stated = [value for module in modules for value in vars(module).values()]
    return {found.name: found for found in stated if isinstance(found, Invariant)}


INVARIANTS = invariants_of(decisions, spares, overload, planner, folds, world, end)
ALL_INVARIANTS = INVARIANTS | invariants_of(requests)  # with --live-requests


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of one run. `violation` is None if no invariant was violated."""

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
    levels: dict[str, int]  # worst level reached, by model

    @property
    def speed(self) -> float:
        """Virtual seconds per second of real time."""
        return self.scenario.minutes * 60 / self.wall_s if self.wall_s else 0.0


class Simulation(SimulatedWorld):
    """The simulated world of one scenario. `run` simulates it to the end or to the first violated invariant."""

    def __init__(
        self, scenario: Scenario, seams: Seams | None = None, *, live_requests: bool = False
    ) -> None:
        """Create the world. With `live_requests`, each request is simulated token by token."""
        self.scenario = scenario
        seams = seams or Seams()
        self.seams = replace(seams, evolve=Remembered(seams.evolve))
        self.kernel = kernel = Kernel(scenario.seed)
        self.notes: list[tuple[int, str]] = []  # sequence of the event before the fault, line of the history
        self.broker = Broker(kernel, self.seams, Network(kernel.chance("network")))
        self.watch = watch = InvariantWatch(self, seams, ALL_INVARIANTS if live_requests else INVARIANTS)
        self.broker.watchers.append(watch.recorded)
        self.notify, self.decided, self.stepped = watch.notify, watch.appended, watch.stepped
        self.machines = {name: self._machine(name, i) for i, name in enumerate(self._names())}
        self.tally, self.demand = ClientTally(), SimulatedDemand(scenario, kernel)
        self.projector = SimulatedProjector(self)
        planning = scenario.planning
        planners = numbered("planner", planning.planners if planning is not None else 0)
        self.planners = [SimulatedPlanner(name, self, self.projector) for name in planners]
        controllers = numbered("controller", scenario.controllers)
        self.controllers = [SimulatedController(name, self) for name in controllers]
        underway = LiveRequests if live_requests else RequestsUnderWay
        frontends = numbered("frontend", scenario.frontends)
        self.frontends = [SimulatedFrontend(name, self, underway) for name in frontends]
        self.operators, self.supervisor = Operators(self), SimulatedSupervisor(self)
        self.scaling = SimulatedScaling(self) if planning is not None else None
        self.faults = FaultInjector(self)

    def run(self) -> Result:
        """Run the scenario to its end or to the first violated invariant, which the result then names."""
        began = time.perf_counter()
        violation = None
        try:
            with quiet():
                self.begin()
                self.kernel.run(self.scenario.end_at)
                self.watch.notify("end")
        except Violated as found:
            violation = found.violation
        except OutOfOrder as found:
            violation = self.watch.out_of_order(found)
        return self._result(violation, time.perf_counter() - began)

    def policy(self) -> FleetPolicy:
        """Return the policy that a controller uses if it starts now."""
        return self.scenario.policies[-1 if self.kernel.now >= self.scenario.change_at else 0]

    def believed(self) -> Fleet:
        """Return the fleet that the leader has folded. Without a running leader, return the fold of the whole journal."""
        for controller in self.controllers:
            if controller.up and controller.leading and not controller.paused:
                return controller.replica.fleet
        return self.watch.reference.shown

    def stored(self) -> Stored | None:
        """Return the contents of the state store; None if nothing has been stored."""
        return self.projector.stored

    def linking(self) -> list[SimulatedFrontend]:
        """Return the running frontends."""
        return [frontend for frontend in self.frontends if frontend.up]

    def replicas(self) -> list[Replica]:
        """Return the folds of all running processes."""
        reading = (*self.controllers, *self.frontends, self.projector)
        return [process.replica for process in reading if process.up]

    def outboxes(self) -> list[SimulatedOutbox]:
        """Return the outboxes of all running processes."""
        publishing = (*self.controllers, *self.frontends, *self.planners)
        boxes = [process.outbox for process in publishing if process.up]
        boxes += [machine.outbox for machine in self.machines.values() if machine.up]
        return [*boxes, self.scaling.outbox] if self.scaling is not None else boxes

    def history(self) -> Iterator[str]:
        """Yield the history as JSON lines: all events of the journal and all faults, in order of time."""
        events = ((event.seq, _event_line(event)) for event in self.broker.events)
        return (line for _, line in merge(events, self.notes, key=itemgetter(0)))

    def note(self, text: str) -> None:
        """Record a fault in the history."""
        line = json.dumps({"at_us": self.kernel.now, "fault": text}) + "\n"
        self.notes.append((self.broker.last_seq, line))

    def add_machine(self, model: str) -> Machine:
        """Add a machine for one more worker of a model, and return it. No process is started yet."""
        models, index = self.scenario.models, len(self.machines)
        while models[index % len(models)] != model:
            index += 1
        while (name := f"w{index + 1}") in self.machines:
            index += len(models)
        machine = self.machines[name] = self._machine(name, index)
        updates = self.faults.updates
        updates.fit(machine)
        return machine

    def _names(self) -> list[str]:
        return numbered("w", self.scenario.workers)

    def _machine(self, name: str, index: int) -> Machine:
        scenario, crowd = self.scenario, self.scenario.crowd
        spare = scenario.workers - scenario.spares <= index < scenario.workers
        waiting = crowd.waiting if crowd is not None else None
        model, host = scenario.models[index % len(scenario.models)], (self.kernel, self.broker, self._broken)
        return Machine(name, model, *host, profile=profile_of(crowd), spare=spare, waiting=waiting)

    def begin(self) -> None:
        """Schedule the start of all processes, and the first faults."""
        kernel, chance = self.kernel, self.kernel.chance("start")
        for machine in self.machines.values():
            kernel.after(int(chance.random() * self.scenario.late), machine.start)
        faults, corrupt = self.faults.workers, min(self.scenario.corrupt_from_start, len(self.machines))
        for machine in chance.sample([*self.machines.values()], corrupt):
            faults.corrupt_from_start(machine)
        for process in (*self.controllers, *self.frontends, *self.planners, self.projector):
            kernel.after(int(chance.random() * 2 * SECOND), process.start)
        kernel.after(SECOND, self.watch.tick)
        kernel.after(20 * SECOND, self.faults.begin)
        kernel.after(self.scenario.heal_at, self._heal)
        if len(self.scenario.policies) > 1:
            kernel.after(self.scenario.change_at, self._change_policy)

    def _change_policy(self) -> None:
        """Restart the controllers one after another with the next policy."""
        self.note("another policy")
        for i, controller in enumerate(self.controllers):
            self.kernel.after(i * 45 * SECOND, controller.crash)
            self.kernel.after(i * 45 * SECOND + 2 * SECOND, controller.start)

    def _heal(self) -> None:
        self.faults.heal()
        self.operators.resume_all()

    def _broken(self, machine: Machine) -> None:
        for frontend in self.frontends:
            frontend.broken(machine)

    def _result(self, violation: Violation | None, wall_s: float) -> Result:
        kinds = Counter(event.fact.kind() for event in self.broker.events)
        digest = hashlib.sha256()
        for line in self.history():
            digest.update(line.encode())
        return Result(
            scenario=self.scenario,
            violation=violation,
            events=self.broker.last_seq,
            decisions=self.watch.ledger.number,
            kinds=dict(sorted(kinds.items())),
            faults=dict(sorted(self.faults.struck.items())),
            checks=dict(sorted(self.watch.checks.items())),
            tally=self.tally,
            fenced=self.broker.fenced,
            repeated=self.broker.repeated,
            happened=self.kernel.happened,
            wall_s=wall_s,
            digest=digest.hexdigest(),
            levels=dict(self.watch.worst_level),
        )


def numbered(name: str, count: int) -> list[str]:
    """Return `count` names that consist of `name` and a number from 1 up."""
    return [f"{name}{number + 1}" for number in range(count)]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress the log messages of the production code, which would be too many for a virtual hour."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        yield
    finally:
        structlog.configure(**before)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Disable the garbage collector within the context, and restore it afterwards.

    A run creates few reference cycles, so the collector would cost time and free little memory.
    """
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
    """Simulate `minutes` virtual minutes of a seed's scenario, and return the result.

    If an invariant is violated, the run ends and the result contains the violation. With `rates`, the name of a preset, the
    faults of workers are distributed as in that field study. Raise KeyError for an unknown preset.
    """
    with uncollected():
        return Simulation(draw(seed, workers, minutes, rates), seams, live_requests=live_requests).run()


def _event_line(event: Recorded) -> str:
    return (
        f'{{"seq": {event.seq}, "at": "{event.at.isoformat()}", "id": {quoted(event.id)}, '
        f'"source": {quoted(event.source)}, "number": {event.source_number}, "through": {event.through}, '
        f'"causation": {quoted(event.causation)}, "kind": "{event.fact.kind()}", '
        f'"body": {codec.encode_body(event.fact).decode()}}}\n'
    )


@dataclass(frozen=True, slots=True)
class SweepRun:
    """The parameters of one run in a sweep."""

    seed: int
    workers: int
    minutes: float
    rates: str | None = None
    live_requests: bool = False


def play(run: SweepRun) -> Result:
    """Simulate one run of a sweep. An exception gets a note that names the run."""
    try:
        return simulate(run.seed, run.workers, run.minutes, rates=run.rates, live_requests=run.live_requests)
    except Exception as error:
        error.add_note(f"while playing {run}")
        raise


def sweep(runs: Iterable[SweepRun], processes: int) -> Iterator[Result]:
    """Yield the result of each run, in the order of `runs`. The runs are distributed over `processes` processes."""
    if processes == 1:
        yield from map(play, runs)
        return
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(play, runs, chunksize=4)
