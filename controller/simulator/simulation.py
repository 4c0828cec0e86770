"""Runs one simulation: a simulated world around the production deciders, checked at every step."""

import contextlib
import gc
import hashlib
import logging
import multiprocessing
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from heapq import merge
from json.encoder import encode_basestring_ascii as quoted
from operator import itemgetter
from types import ModuleType

import structlog

from controller.simulator.checks import decisions, end, folds, overload, planner, requests, spares, world
from controller.simulator.checks.watch import Invariant, InvariantWatch, Violated, Violation
from controller.simulator.world.faults import FaultInjector
from controller.simulator.world.kernel import SECOND
from controller.simulator.world.requests.frontends import SimulatedFrontend
from controller.simulator.world.requests.live_requests import LiveFrontend
from controller.simulator.world.scenario import Scenario, draw
from controller.simulator.world.seams import Seams
from controller.simulator.world.traffic import ClientTally
from controller.simulator.world.world import SimulatedWorld
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
    requests: ClientTally
    worst_level: dict[str, int]  # by model
    appends_fenced: int
    stored_twice: int  # facts
    steps: int  # calls that the kernel has made
    wall_s: float
    digest: str  # hash of the history

    @property
    def speed(self) -> float:
        """Virtual seconds per second of real time."""
        return self.scenario.minutes * 60 / self.wall_s if self.wall_s else 0.0


class Simulation(SimulatedWorld):
    """The simulated world of one scenario. `run` simulates it to the end or to the first violated invariant."""

    def __init__(
        self, scenario: Scenario, seams: Seams | None = None, *, live_requests: bool = False
    ) -> None:
        """Create the world. With `live_requests`, each request is simulated token by token.

        `seams` can plant a deliberate fault, to test that an invariant detects it.
        """
        seams = seams or Seams()
        super().__init__(scenario, seams, LiveFrontend if live_requests else SimulatedFrontend)
        self.watch = watch = InvariantWatch(self, seams, ALL_INVARIANTS if live_requests else INVARIANTS)
        self.broker.watch, self.notify, self.stepped = watch.recorded, watch.notify, watch.stepped
        self.shown = lambda: watch.reference.shown
        self.faults = FaultInjector(self)
        self.update = self.faults.updates.fit

    def run(self) -> Result:
        """Run the scenario to its end or to the first violated invariant. The result contains the violation."""
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

    def history(self) -> Iterator[str]:
        """Yield the history as JSON lines: all events of the journal and all faults, in order of time."""
        events = ((event.seq, _event_line(event)) for event in self.broker.events)
        return (line for _, line in merge(events, self.notes, key=itemgetter(0)))

    def begin(self) -> None:
        """Schedule the start of all processes, and the first faults."""
        kernel, chance = self.kernel, self.kernel.chance("start")
        for machine in self.machines.values():
            kernel.after(int(chance.random() * self.scenario.late), machine.start)
        faults, corrupt = self.faults.workers, min(self.scenario.corrupt_from_start, len(self.machines))
        for machine in chance.sample([*self.machines.values()], corrupt):
            faults.corrupt_from_start(machine)
        for process in self.processes:
            kernel.after(int(chance.random() * 2 * SECOND), process.start)
        kernel.after(SECOND, self.watch.tick)
        kernel.after(20 * SECOND, self.faults.begin)
        kernel.after(self.scenario.heal_at, self.faults.heal)
        if len(self.scenario.policies) > 1:
            kernel.after(self.scenario.change_at, self._change_policy)

    def _change_policy(self) -> None:
        """Restart the controllers one after another with the next policy."""
        self.note("another policy")
        for i, controller in enumerate(self.controllers):
            self.kernel.after(i * 45 * SECOND, controller.crash)
            self.kernel.after(i * 45 * SECOND + 2 * SECOND, controller.start)

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
            requests=self.tally,
            worst_level=dict(self.watch.ledger.worst_levels),
            appends_fenced=self.broker.fenced,
            stored_twice=self.broker.repeated,
            steps=self.kernel.happened,
            wall_s=wall_s,
            digest=digest.hexdigest(),
        )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress the log messages of the production code, because a virtual hour would produce too many."""
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


def _event_line(event: Recorded) -> str:
    return (
        f'{{"seq": {event.seq}, "at": "{event.at.isoformat()}", "id": {quoted(event.id)}, '
        f'"source": {quoted(event.source)}, "number": {event.source_number}, "through": {event.through}, '
        f'"causation": {quoted(event.causation)}, "kind": "{event.fact.kind()}", '
        f'"body": {codec.encode_body(event.fact).decode()}}}\n'
    )


@dataclass(frozen=True, slots=True)
class SweepRun:
    """The parameters of one run: the seed, the number of workers, and the virtual minutes to simulate.

    `rates` names a preset of `rates.py`. The workers' faults are then distributed as in the preset's field study.
    """

    seed: int
    workers: int
    minutes: float
    rates: str | None = None
    live_requests: bool = False

    @property
    def command(self) -> str:
        """The command line that repeats the run."""
        flags = f" --rates {self.rates}" if self.rates else ""
        flags += " --live-requests" if self.live_requests else ""
        # All digits: a rounded duration would give another history.
        exact = int(self.minutes) if self.minutes == int(self.minutes) else self.minutes
        return f"holdfast simulate --seed {self.seed} --workers {self.workers} --minutes {exact}{flags}"

    def simulation(self, seams: Seams | None = None) -> Simulation:
        """Create the simulation of the run without starting it. Raise KeyError for an unknown preset of rates."""
        scenario = draw(self.seed, self.workers, self.minutes, self.rates)
        return Simulation(scenario, seams, live_requests=self.live_requests)

    def play(self, seams: Seams | None = None) -> Result:
        """Simulate the run, and return the result. An exception gets a note that names the run.

        If an invariant is violated, the run ends and the result contains the violation.
        """
        try:
            with uncollected():
                return self.simulation(seams).run()
        except Exception as error:
            error.add_note(f"while playing {self}")
            raise


def sweep(runs: Iterable[SweepRun], processes: int) -> Iterator[Result]:
    """Yield the result of each run, in the order of `runs`. The runs are distributed over `processes` processes."""
    if processes == 1:
        yield from map(SweepRun.play, runs)
        return
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(SweepRun.play, runs, chunksize=4)
