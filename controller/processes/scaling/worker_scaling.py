"""How many worker processes does a fleet of `up` have? As many as the planner's last proposal says.

    ScaleProposed ─▶ more: start w3, w4 …               ─▶ ScaleApplied
                  └▶ fewer: SIGTERM, the newest first   ─▶ ScaleApplied; the worker drains, its streams go on, and it leaves

No worker gets a name that another one has, or has had since this fleet was started. One worker stays, whatever is proposed.
"""

import argparse
import os
import re
import signal
from collections.abc import Callable, Sequence

from controller.processes.children import Child, shell_status
from controller.processes.fleet_dir import FleetDir
from controller.processes.restart_plan import worker
from controller.processes.up_flags import WORKERS_MAX
from events.errors import HoldfastError
from events.fact import Recorded
from events.observations import ScaleApplied, ScaleProposed, WorkerJoined
from events.process import descriptors

SUPERVISOR = "supervisor"
GRACE = "HOLDFAST_WORKER_GRACE_S"
GRACE_S = 60.0  # a worker's own, until its streams must have ended or moved
CLEANUP_S = 15.0  # beyond it, until its process is killed
SAYS_MAX = 300  # characters
NAMED = re.compile(r"w(\d+)")


class NotScaled(HoldfastError):
    """A proposal that this supervisor cannot carry out; the text says why."""


def change(serving: Sequence[int], used: int, after: int) -> tuple[list[int], list[int]]:
    """Return the numbers of the workers to start, and of those to let go, the newest first.

    `serving`: of those that are there and not on their way out; `used`: the highest number that was ever given.
    """
    after = max(1, min(after, WORKERS_MAX))
    if after >= len(serving):
        return [used + n for n in range(1, after - len(serving) + 1)], []
    return [], sorted(serving, reverse=True)[: len(serving) - after]


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
        self._used = -1
        self._wanted: dict[str, Recorded] = {}  # the last proposal, by model
        self._until: dict[str, float] = {}  # until when a worker that was told to leave may take, by name

    def hear(self, recorded: Recorded) -> None:
        """Take in an event of the journal."""
        fact = recorded.fact
        if isinstance(fact, ScaleProposed) and fact.by == SUPERVISOR:
            self._wanted[fact.model] = recorded
        elif isinstance(fact, WorkerJoined):
            if any(child.name == fact.worker for child in self._workers()):
                self._model = fact.model
            if found := NAMED.fullmatch(fact.worker):  # somebody else may have started it
                self._used = max(self._used, int(found[1]))

    def _workers(self) -> list[Child]:
        return [child for child in self._children if child.role == "worker"]

    def tend(self, now: float) -> None:
        """Do what is due: carry the last proposal out, and end who should have left long ago."""
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
        self._children.remove(child)
        return f"{child.name} has left" + (f", with status {shell_status(status)}" if status else "")

    def _carry_out(self, model: str, after: int, now: float) -> str:
        """Return what was done. Raise NotScaled, another HoldfastError or OSError."""
        if self._args.engine == "openai" or self._args.workers_per_process > 1:
            raise NotScaled(
                "`holdfast up` starts and stops workers of --engine simulated and transformers only, one in each process: "
                "give the planner a hook"
            )
        if model != self._model:
            raise NotScaled(f"the workers of this `holdfast up` serve {self._model or 'no model yet'}")
        descriptors.require(after + descriptors.SPARE, "set the planner a lower workers_max")
        numbers = {int(child.name.removeprefix("w")): child for child in self._workers()}
        self._used = max([self._used, *numbers])
        serving = [number for number, child in numbers.items() if child.restart]
        more, fewer = change(serving, self._used, after)
        for number in more:
            self._used = number
            self._start(worker(self._args, self._directory, number))
        for number in fewer:
            self._let_go(numbers[number], now)
        return _said(more, fewer)

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


def _said(more: Sequence[int], fewer: Sequence[int]) -> str:
    started = "starts " + ", ".join(f"w{n}" for n in more) if more else ""
    ended = "lets go " + ", ".join(f"w{n}" for n in fewer) if fewer else ""
    return started or ended or "there are as many"
