"""Records exits that worker processes could not record, and ends the processes of dead workers.

    runs ── the journal declares it DEAD ──▶ SIGTERM, SIGCONT ── still running after GRACE_S ──▶ SIGKILL ──▶ ended, restarted

The arrows show what happens to a worker process. DEAD is final: no process sends a request to such an instance again. A
suspended process (SIGSTOP) continues at the SIGCONT, handles the SIGTERM and ends in order. A process that hangs permanently
does not end, and is killed.
"""

import signal
from collections.abc import Callable, Mapping
from typing import Literal

from controller.processes.children import Child, shell_status
from events.codec import new_id
from events.decisions import HealthChanged, HealthStatus
from events.fact import Fact
from events.observations import WorkerJoined, WorkerLeft
from workers.exits import FAILED

GRACE_S = 5.0  # time for a worker to clean up or abort


def exit_fact(worker: str, instance: str, status: int) -> WorkerLeft | None:
    """Return the fact that records the end of a worker, or None if the worker has recorded its exit itself.

    `status` is the exit status of the process, as `subprocess` returns it."""
    if status in (0, FAILED):
        return None
    mode: Literal["immediate", "self_initiated"] = "immediate" if status < 0 else "self_initiated"
    return WorkerLeft(worker=worker, instance=instance, mode=mode, exit=shell_status(status))


def lives(child: Child, instance: str) -> list[tuple[str, str]]:
    """Return the name and the first instance id of each worker of a process that is about to start.

    `instance` is the id that was assigned to the process. If the process runs several workers, the workers' ids begin with
    `instance`. When one of these workers restarts within the process, `workers.worker_group` assigns its next id.
    """
    if not child.workers:  # known when they join
        return []
    if child.workers == 1:
        return [(child.name, instance)]
    first = int(child.name.removeprefix("w"))
    return [(f"w{first + n}", f"{instance}-{n}") for n in range(child.workers)]


class WorkerExits:
    """Tracks the instances of all worker processes, records their exits, and ends the processes of dead workers."""

    def __init__(self, observe: Callable[[WorkerLeft], object]) -> None:
        self._observe = observe
        # worker process -> its workers -> their current instances
        self._lives: dict[str, dict[str, str]] = {}
        # process with a file of upstreams -> its id, with which the instances of its workers begin
        self._changing: dict[str, str] = {}
        self._dead: dict[str, str] = {}  # instance -> why it was declared dead
        # worker process -> deadline for ending by itself, in monotonic seconds
        self._ending: dict[str, float] = {}

    def begins(self, child: Child) -> Mapping[str, str]:
        """Assign a new instance id to a process that is about to start, and return the id as an environment variable.

        The result is empty if the process is not a worker process.
        """
        if child.role != "worker":
            return {}
        instance = new_id()
        self._forget(child)
        self._lives[child.name] = dict(lives(child, instance))
        if not child.workers:
            self._changing[child.name] = instance
        return {"HOLDFAST_WORKER_INSTANCE": instance}

    def ended(self, child: Child, status: int) -> None:
        """Record which workers left because their process ended.

        `status` is the exit status of the process, as `subprocess` returns it.
        """
        if child.role == "worker":
            for worker, instance in self._lives[child.name].items():
                if fact := exit_fact(worker, instance, status):
                    self._observe(fact)
            self._forget(child)

    def receive(self, fact: Fact, children: Mapping[int, str]) -> None:
        """Update the known instances and dead workers with a fact of the journal.

        `children` maps pids to the names of the fleet's processes.
        """
        match fact:
            # a worker of `workers.worker_group` has got a new instance
            case WorkerJoined() if fact.pid in children:
                name = children[fact.pid]
                own = self._lives.get(name, {})
                if fact.worker in own or fact.instance.startswith(f"{self._changing.get(name)}-"):
                    self._dead.pop(own.get(fact.worker, ""), None)
                    own[fact.worker] = fact.instance
            # a worker that leaves in order is not started again if its upstream was removed
            case WorkerLeft() if fact.mode != "immediate":
                for name in self._changing:
                    if self._lives[name].get(fact.worker) == fact.instance:
                        del self._lives[name][fact.worker]
                        self._dead.pop(fact.instance, None)
            case HealthChanged(after=HealthStatus.DEAD):
                if any(own.get(fact.worker) == fact.instance for own in self._lives.values()):
                    self._dead[fact.instance] = fact.reason
            case _:
                pass

    def carry_out(self, child: Child, now: float) -> str:
        """End a running process if all of its workers were declared dead, at first by SIGTERM and after GRACE_S by SIGKILL.

        Return a line for the terminal, or "" if no signal was sent. `now` is in monotonic seconds.
        """
        own = self._lives.get(child.name)
        if child.pid is None or not own or not all(instance in self._dead for instance in own.values()):
            return ""
        until = self._ending.get(child.name)
        if until is None:
            self._ending[child.name] = now + GRACE_S
            reasons = {self._dead[instance] for instance in own.values()}
            if all(reason.startswith("left") for reason in reasons):
                return ""  # the process reported its exit and is about to end
            for number in (signal.SIGTERM, signal.SIGCONT):
                child.signal(number)
            return f"{child.name} was declared dead ({', '.join(sorted(reasons))}), but its process is running: ending it"
        if now < until:
            return ""
        self._ending[child.name] = float("inf")
        child.signal(signal.SIGKILL)
        return f"{child.name} did not end: killing it"

    def _forget(self, child: Child) -> None:
        self._ending.pop(child.name, None)
        self._changing.pop(child.name, None)
        for instance in self._lives.pop(child.name, {}).values():
            self._dead.pop(instance, None)
