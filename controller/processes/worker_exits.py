"""What a fleet's journal is told of a worker that ended and could not say so itself: whoever started it saw how it ended."""

from collections.abc import Callable, Mapping
from typing import Literal

from controller.processes.children import Child, shell_status
from events.codec import new_id
from events.observations import WorkerLeft
from workers.exits import FELL


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
    """The instances of all worker processes' present lives, and what is said when one of them ends."""

    def __init__(self, observe: Callable[[WorkerLeft], None]) -> None:
        self._observe = observe
        self._instances: dict[str, str] = {}  # worker process -> instance of its present life

    def begins(self, child: Child) -> Mapping[str, str]:
        """Return what a process that is about to start is told of its life, through its environment."""
        if child.role != "worker":
            return {}
        self._instances[child.name] = new_id()
        return {"HOLDFAST_WORKER_INSTANCE": self._instances[child.name]}

    def ended(self, child: Child, status: int) -> None:
        """Say which workers left with a process that ended with this status, as subprocess gives it."""
        if child.role == "worker":
            for worker, instance in lives(child, self._instances[child.name]):
                if fact := left(worker, instance, status):
                    self._observe(fact)
