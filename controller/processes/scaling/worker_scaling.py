"""Worker scaling in `holdfast up`: applies the planner's latest proposal to the worker processes.

    ScaleProposed ─▶ more: start w3, w4 …               ─▶ ScaleApplied
                  └▶ fewer: SIGTERM, the newest first   ─▶ ScaleApplied; the worker drains (its streams end or move) and exits

The arrows lead from the planner's event to what is done and to the event that records it. A worker name is never used twice
while the fleet runs. At least one worker remains, even if the planner proposes none. Spares are not counted, but a spare that
replaces a worker counts as a worker. With `--spares auto` the number of spares follows the number of workers.
"""

import argparse
import re
import signal
from collections.abc import Callable, Iterable, Sequence

from controller.processes.children import Child, shell_status
from controller.processes.fleet_dir import FleetDir
from controller.processes.process_plan import seconds, spare, worker
from controller.processes.up_flags import AUTO, WORKERS_MAX, spares
from events.decisions import SpareActivated, SpareReleased
from events.errors import HoldfastError
from events.fact import Recorded
from events.observations import ScaleApplied, ScaleProposed, WorkerJoined
from events.process import descriptors

SUPERVISOR = "supervisor"
GRACE = "HOLDFAST_WORKER_GRACE_S"
GRACE_S = 60.0  # default of the worker, in which its streams may end or move
CLEANUP_S = 15.0  # time after the grace until the process is killed
SAYS_MAX = 300  # characters of a text in ScaleApplied
NAMED = re.compile(r"([ws])(\d+)")


class NotScaled(HoldfastError):
    """This supervisor cannot carry out a proposal, for the reason in the text."""


def change(there: Sequence[str], used: int, after: int) -> tuple[list[int], list[str]]:
    """Return which workers to start and which to stop, so that `after` workers run.

    A worker to start is returned as the number in its name, and a worker to stop as its whole name. `there` has the names of the
    workers that are not stopping. `used` is the highest number that a name has ever had. The newest workers are stopped first.
    Processes that were started as spares are stopped last.
    """
    after = min(after, WORKERS_MAX)
    if after >= len(there):
        return [used + n for n in range(1, after - len(there) + 1)], []
    return [], sorted(there, key=_newest)[: len(there) - after]


def _newest(name: str) -> tuple[bool, int]:
    letter, number = _named(name)
    return letter != "w", -number


def _named(name: str) -> tuple[str, int]:
    """Return the letter and the number of a worker's name. Return "" and -1 for a name that this module does not assign."""
    found = NAMED.fullmatch(name)
    return (found[1], int(found[2])) if found else ("", -1)


class WorkerScaling:
    """Carries out the planner's scaling proposals, always the latest one of each model. Times are monotonic seconds."""

    def __init__(
        self,
        args: argparse.Namespace,
        directory: FleetDir,
        children: list[Child],
        start: Callable[[Child], object],
        say: Callable[[ScaleApplied], object],
    ) -> None:
        """Create an instance that has received no proposals.

        `children` lists all processes of the fleet. `start` starts a child and adds it to `children`. `say` records a
        `ScaleApplied` on the journal.
        """
        self._args, self._directory = args, directory
        self._children, self._start, self._say = children, start, say
        self._model = ""  # model of this supervisor's workers; empty until one has joined
        self._used = {"w": -1, "s": -1}
        self._kept: set[str] = set()  # workers that are spares now
        self._known: set[str] = set()  # workers that are known to be spares or not
        self._wanted: dict[str, Recorded] = {}  # the last proposal, by model
        self._until: dict[str, float] = {}  # deadline of each stopping worker, by name

    def begin(self, kept: Iterable[str]) -> None:
        """Record which workers are spares when this supervisor starts to scale. `kept` has the names of the spares.

        A worker's name does not show whether it is a spare. In an earlier run, a spare may have replaced a worker and exchanged
        roles with it.
        """
        self._kept |= {*kept}
        self._known |= {child.name for child in self._workers()}

    def receive(self, recorded: Recorded) -> None:
        """Update the known proposals, worker names and spares with an event of the journal."""
        fact = recorded.fact
        if isinstance(fact, ScaleProposed) and fact.by == SUPERVISOR:
            self._wanted[fact.model] = recorded
        elif isinstance(fact, WorkerJoined):
            if any(child.name == fact.worker for child in self._workers()):
                self._model = fact.model
            letter, number = _named(fact.worker)  # the worker may have been started by another supervisor
            self._used[letter] = max(self._used.get(letter, -1), number)
            if fact.spare and fact.worker not in self._known:
                self._kept.add(fact.worker)
            self._known.add(fact.worker)
        elif isinstance(fact, SpareActivated):
            self._kept = {*self._kept, fact.replaces} - {fact.worker}
        elif isinstance(fact, SpareReleased):
            self._kept = {*self._kept, fact.worker} - {fact.returned}

    @property
    def _cannot(self) -> bool:
        return bool(self._args.engine == "openai" or self._args.workers_per_process > 1)

    def _workers(self) -> list[Child]:
        return [child for child in self._children if child.role == "worker"]

    def tend(self, now: float) -> None:
        """Carry out the latest proposals, and kill stopping workers after their deadline.

        Proposals wait until the model of this supervisor's workers is known.
        """
        wanted: dict[str, Recorded] = {}
        if self._model or self._cannot:
            wanted, self._wanted = self._wanted, {}
        for model, recorded in wanted.items():
            assert isinstance(recorded.fact, ScaleProposed)
            after = recorded.fact.after
            try:
                ok, says = True, self._carry_out(model, after, now)
            except (HoldfastError, OSError) as error:  # OSError: no disk space for a new worker's key
                ok, says = False, str(error)
            applied = ScaleApplied(
                model=model, proposal=recorded.id, after=after, by=SUPERVISOR, ok=ok, says=says[:SAYS_MAX]
            )
            self._say(applied)
        for child in self._workers():
            if now > self._until.get(child.name, now):
                child.signal(signal.SIGKILL)

    def left(self, child: Child, status: int) -> str:
        """Remove a stopped worker from the fleet's processes, and return a line for the terminal."""
        self._until.pop(child.name, None)
        self._kept.discard(child.name)
        self._children.remove(child)
        return f"{child.name} has stopped" + (f", with status {shell_status(status)}" if status else "")

    def _carry_out(self, model: str, after: int, now: float) -> str:
        """Scale a model to `after` workers and return a text of what was done.

        Raise NotScaled, another HoldfastError or OSError if that is not possible."""
        if self._cannot:
            raise NotScaled(
                "`holdfast up` scales only --engine simulated and transformers, with one worker per process: "
                "configure a hook for the planner"
            )
        if model != self._model:
            raise NotScaled(f"the workers of this `holdfast up` serve {self._model}")
        after = max(1, after)
        kept = [child.name for child in self._workers() if child.restart and child.name in self._kept]
        besides = spares(self._args, after) if self._args.spares == AUTO else len(kept)
        descriptors.require(after + besides + descriptors.SPARE, "set a lower workers_max for the planner")
        serving = [child.name for child in self._workers() if child.restart and child.name not in self._kept]
        done = [self._to("w", serving, after, now), self._to("s", kept, besides, now)]
        return ", ".join(filter(None, done)) or "no change needed"

    def _to(self, letter: str, there: Sequence[str], after: int, now: float) -> str:
        """Scale to `after` workers (letter w) or spares (letter s), and return a text of what was done.

        `there` has the names of those workers or spares that are not stopping. `now` is in monotonic seconds."""
        children = {child.name: child for child in self._workers()}
        self._used[letter] = max([self._used[letter], *(_named(n)[1] for n in children if n[0] == letter)])
        more, fewer = change(there, self._used[letter], after)
        make = worker if letter == "w" else spare
        for number in more:
            self._used[letter] = number
            if letter == "s":
                self._kept.add(f"s{number}")
            self._start(make(self._args, self._directory, number))
        for name in fewer:
            self._stop(children[name], now)
        started = [f"{letter}{number}" for number in more]
        return _phrase("starts", started) or _phrase("stops", fewer)

    def _stop(self, child: Child, now: float) -> None:
        child.restart = False
        if child.process is None:  # the worker has crashed and is not running
            self._children.remove(child)
            return
        self._until[child.name] = now + seconds(GRACE, GRACE_S) + CLEANUP_S
        for number in (signal.SIGTERM, signal.SIGCONT):
            child.signal(number)


def _phrase(verb: str, names: Sequence[str]) -> str:
    return f"{verb} {', '.join(names)}" if names else ""
