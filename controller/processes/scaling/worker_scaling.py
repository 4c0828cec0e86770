"""How many worker processes does a fleet of `up` have? As many as the planner's last proposal says.

    ScaleProposed ─▶ more: start w3, w4 …               ─▶ ScaleApplied
                  └▶ fewer: SIGTERM, the newest first   ─▶ ScaleApplied; the worker drains, its streams go on, and it leaves

No worker gets a name that another one has, or has had since this fleet was started. One worker stays, whatever is proposed.
Spares are not counted, whoever they are by now; with `--spares auto` there are more or fewer of them with the workers.
"""

import argparse
import os
import re
import signal
from collections.abc import Callable, Iterable, Sequence

from controller.processes.children import Child, shell_status
from controller.processes.fleet_dir import FleetDir
from controller.processes.restart_plan import spare, worker
from controller.processes.up_flags import AUTO, WORKERS_MAX, spares
from events.decisions import SpareActivated, SpareReleased
from events.errors import HoldfastError
from events.fact import Recorded
from events.observations import ScaleApplied, ScaleProposed, WorkerJoined
from events.process import descriptors

SUPERVISOR = "supervisor"
GRACE = "HOLDFAST_WORKER_GRACE_S"
GRACE_S = 60.0  # a worker's own, until its streams must have ended or moved
CLEANUP_S = 15.0  # beyond it, until its process is killed
SAYS_MAX = 300  # characters
NAMED = re.compile(r"([ws])(\d+)")


class NotScaled(HoldfastError):
    """A proposal that this supervisor cannot carry out; the text says why."""


def change(there: Sequence[str], used: int, after: int) -> tuple[list[int], list[str]]:
    """Return the numbers of those to start, and the names of those to let go: the newest first, and who was started as a spare
    last.

    `there`: those that are not on their way out; `used`: the highest number that was ever given.
    """
    after = min(after, WORKERS_MAX)
    if after >= len(there):
        return [used + n for n in range(1, after - len(there) + 1)], []
    return [], sorted(there, key=_newest)[: len(there) - after]


def _newest(name: str) -> tuple[bool, int]:
    letter, number = _named(name)
    return letter != "w", -number


def _named(name: str) -> tuple[str, int]:
    """Return what a worker was started as, and its number; nothing and -1 for a name that is not of ours."""
    found = NAMED.fullmatch(name)
    return (found[1], int(found[2])) if found else ("", -1)


class WorkerScaling:
    """Carries proposals out, the last one last. Times are monotonic seconds."""

    def __init__(
        self,
        args: argparse.Namespace,
        directory: FleetDir,
        children: list[Child],
        start: Callable[[Child], object],
        say: Callable[[ScaleApplied], object],
    ) -> None:
        """`children`: all processes of the fleet, now and later; `start` is given those to be added to them."""
        self._args, self._directory = args, directory
        self._children, self._start, self._say = children, start, say
        self._model = ""  # of our workers, once one has joined
        self._used = {"w": -1, "s": -1}
        self._kept: set[str] = set()  # workers that are spares
        self._known: set[str] = set()  # those of which that is known
        self._wanted: dict[str, Recorded] = {}  # the last proposal, by model
        self._until: dict[str, float] = {}  # until when a worker that was told to leave may take, by name

    def begin(self, kept: Iterable[str]) -> None:
        """Take in who is a spare as the fleet begins to serve: who lost his place before this `up` is one still."""
        self._kept |= {*kept}
        self._known |= {child.name for child in self._workers()}

    def hear(self, recorded: Recorded) -> None:
        """Take in an event of the journal."""
        fact = recorded.fact
        if isinstance(fact, ScaleProposed) and fact.by == SUPERVISOR:
            self._wanted[fact.model] = recorded
        elif isinstance(fact, WorkerJoined):
            if any(child.name == fact.worker for child in self._workers()):
                self._model = fact.model
            letter, number = _named(fact.worker)  # somebody else may have started it
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
        """Do what is due: carry the last proposal out, and end who should have left long ago. What is proposed before it is known
        what our workers serve waits until it is."""
        wanted: dict[str, Recorded] = {}
        if self._model or self._cannot:
            wanted, self._wanted = self._wanted, {}
        for model, recorded in wanted.items():
            assert isinstance(recorded.fact, ScaleProposed)
            after = recorded.fact.after
            try:
                ok, says = True, self._carry_out(model, after, now)
            except (HoldfastError, OSError) as error:  # OSError: no room for a new worker's key
                ok, says = False, str(error)
            applied = ScaleApplied(
                model=model, proposal=recorded.id, after=after, by=SUPERVISOR, ok=ok, says=says[:SAYS_MAX]
            )
            self._say(applied)
        for child in self._workers():
            if now > self._until.get(child.name, now):
                child.signal(signal.SIGKILL)

    def left(self, child: Child, status: int) -> str:
        """A worker that was told to leave has left: it is no process of the fleet any more. Return what is said of it."""
        self._until.pop(child.name, None)
        self._kept.discard(child.name)
        self._children.remove(child)
        return f"{child.name} has left" + (f", with status {shell_status(status)}" if status else "")

    def _carry_out(self, model: str, after: int, now: float) -> str:
        """Return what was done. Raise NotScaled, another HoldfastError or OSError."""
        if self._cannot:
            raise NotScaled(
                "`holdfast up` starts and stops workers of --engine simulated and transformers only, one in each process: "
                "give the planner a hook"
            )
        if model != self._model:
            raise NotScaled(f"the workers of this `holdfast up` serve {self._model}")
        after = max(1, after)
        kept = [child.name for child in self._workers() if child.restart and child.name in self._kept]
        besides = spares(self._args, after) if self._args.spares == AUTO else len(kept)
        descriptors.require(after + besides + descriptors.SPARE, "set the planner a lower workers_max")
        serving = [child.name for child in self._workers() if child.restart and child.name not in self._kept]
        done = [self._to("w", serving, after, now), self._to("s", kept, besides, now)]
        return ", ".join(filter(None, done)) or "there are as many"

    def _to(self, letter: str, there: Sequence[str], after: int, now: float) -> str:
        """Have so many workers, or spares. Return what was done."""
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
            self._let_go(children[name], now)
        started = [f"{letter}{number}" for number in more]
        return _said("starts", started) or _said("lets go", fewer)

    def _let_go(self, child: Child, now: float) -> None:
        child.restart = False
        if child.process is None:  # it fell, and has not been started again
            self._children.remove(child)
            return
        self._until[child.name] = now + _grace_s() + CLEANUP_S
        for number in (signal.SIGTERM, signal.SIGCONT):
            child.signal(number)


def _grace_s() -> float:
    try:
        return float(os.environ.get(GRACE) or GRACE_S)
    except ValueError:  # the workers refuse to start with it, and say why
        return GRACE_S


def _said(verb: str, names: Sequence[str]) -> str:
    return f"{verb} {', '.join(names)}" if names else ""
