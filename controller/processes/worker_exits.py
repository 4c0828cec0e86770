"""How do the lives of worker processes end? What the fleet's journal is told of one that ended and could not say so itself,
and which process is ended because the fleet holds all of its workers for dead.

    lives ── DEAD, says the journal ──▶ SIGTERM, SIGCONT ── it lives on for GRACE_S ──▶ SIGKILL ──▶ ended, started again

DEAD is for ever: whatever such a process does, nobody asks it for anything any more. One that was stopped (SIGSTOP) goes on
at the SIGCONT, finds the SIGTERM, and ends in order; one that hangs for good does not.
"""

import signal
from collections.abc import Callable, Mapping
from typing import Literal

from controller.processes.children import Child, shell_status
from events.codec import new_id
from events.decisions import HealthChanged, HealthStatus
from events.fact import Fact
from events.observations import WorkerJoined, WorkerLeft
from workers.exits import FELL

GRACE_S = 5.0  # what a worker needs for its cleanup, or to break off


def left(worker: str, instance: str, status: int) -> WorkerLeft | None:
    """Return what must be said of a worker that ended, or None if it has said so itself."""
    if status in (0, FELL):
        return None
    mode: Literal["immediate", "self_initiated"] = "immediate" if status < 0 else "self_initiated"
    return WorkerLeft(worker=worker, instance=instance, mode=mode, exit=shell_status(status))


def lives(child: Child, instance: str) -> list[tuple[str, str]]:
    """Return the workers of a process and the instances that they began as; `workers.many` gives their successors others."""
    if child.workers == 1:
        return [(child.name, instance)]
    first = int(child.name.removeprefix("w"))
    return [(f"w{first + n}", f"{instance}-{n}") for n in range(child.workers)]


class WorkerExits:
    """The instances of all worker processes' present lives, what is said when one of them ends, and who is to end."""

    def __init__(self, observe: Callable[[WorkerLeft], object]) -> None:
        self._observe = observe
        self._lives: dict[
            str, dict[str, str]
        ] = {}  # worker process -> its workers -> instances of their lives
        self._dead: dict[str, str] = {}  # instance -> why the fleet holds it for dead
        self._ending: dict[str, float] = {}  # worker process -> until when it may end by itself, monotonic

    def begins(self, child: Child) -> Mapping[str, str]:
        """Return what a process that is about to start is told of its life, through its environment."""
        if child.role != "worker":
            return {}
        instance = new_id()
        self._forget(child)
        self._lives[child.name] = dict(lives(child, instance))
        return {"HOLDFAST_WORKER_INSTANCE": instance}

    def ended(self, child: Child, status: int) -> None:
        """Say which workers left with a process that ended with this status, as subprocess gives it."""
        if child.role == "worker":
            for worker, instance in self._lives[child.name].items():
                if fact := left(worker, instance, status):
                    self._observe(fact)
            self._forget(child)

    def hear(self, fact: Fact, children: Mapping[int, str]) -> None:
        """Take in what the journal says of our workers' lives. `children`: the worker processes by pid."""
        match fact:
            case WorkerJoined() if fact.pid in children:  # one of many has a successor
                own = self._lives.get(children[fact.pid], {})
                if fact.worker in own:
                    self._dead.pop(own[fact.worker], None)
                    own[fact.worker] = fact.instance
            case HealthChanged(after=HealthStatus.DEAD):
                if any(own.get(fact.worker) == fact.instance for own in self._lives.values()):
                    self._dead[fact.instance] = fact.reason
            case _:
                pass

    def carry_out(self, child: Child, now: float) -> str:
        """End a process whose workers are all dead, as the fleet holds, and that lives; return what is said of it, if anything.
        `now`: monotonic seconds."""
        own = self._lives.get(child.name)
        if child.pid is None or not own or not all(instance in self._dead for instance in own.values()):
            return ""
        until = self._ending.get(child.name)
        if until is None:
            self._ending[child.name] = now + GRACE_S
            reasons = {self._dead[instance] for instance in own.values()}
            if all(reason.startswith("left") for reason in reasons):
                return ""  # it has said so, and is on its way out
            for number in (signal.SIGTERM, signal.SIGCONT):
                child.signal(number)
            return f"the fleet holds {child.name} for dead ({', '.join(sorted(reasons))}), but its process lives: ending it"
        if now < until:
            return ""
        self._ending[child.name] = float("inf")
        child.signal(signal.SIGKILL)
        return f"{child.name} does not end: killing it"

    def _forget(self, child: Child) -> None:
        self._ending.pop(child.name, None)
        for instance in self._lives.pop(child.name, {}).values():
            self._dead.pop(instance, None)
