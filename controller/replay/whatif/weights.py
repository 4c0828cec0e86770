"""Keeps each worker's traffic weight and health status over time, as recorded or as simulated."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from operator import attrgetter
from typing import NamedTuple

from controller.deciders.fleet import Fleet, Worker
from events.decisions import HealthStatus


class WeightStep(NamedTuple):
    """The weight and status of a worker from the time `at` until the worker's next step."""

    at: float  # seconds since 1970
    weight: float  # share of the traffic, 0 to 1
    status: HealthStatus
    spare: bool  # the worker waits as a spare and serves no requests

    @property
    def in_service(self) -> bool:
        """Whether the worker is in full service, or is a healthy spare."""
        return self.status is HealthStatus.HEALTHY and (self.weight >= 1.0 or self.spare)

    @property
    def fenced(self) -> bool:
        """Whether the worker is out of service. False for a healthy spare, although a spare gets no requests either."""
        return self.weight == 0.0 and not (self.spare and self.status is HealthStatus.HEALTHY)


AT = attrgetter("at")


class Weights:
    """The traffic weight and status of every worker over time, as steps, oldest first. Times are seconds since 1970."""

    def __init__(self, fleet: Fleet) -> None:
        self.steps: dict[str, list[WeightStep]] = defaultdict(list)
        self.gpus: dict[str, int] = {}
        for name, worker in fleet.workers.items():
            self.note(float("-inf"), name, worker)

    def note(self, at: float, name: str, worker: Worker | None) -> None:
        """Record the weight and status of a worker from the time `at` on, if either has changed.

        `worker` is None if the worker is no longer part of the fleet."""
        steps = self.steps[name]
        if worker is None:
            steps.append(WeightStep(at, 0.0, HealthStatus.DEAD, True))
            return
        if name not in self.gpus:
            self.gpus[name] = len(worker.joined.topology.gpus) or worker.joined.tp * worker.joined.dp
        step = WeightStep(at, worker.weight, worker.health.status, worker.spare.kept)
        if not steps or steps[-1][1:] != step[1:]:
            steps.append(step)

    def was(self, name: str, at: float) -> WeightStep | None:
        """Return the weight and status of a worker at the time `at`, or None if the worker had not joined by then."""
        steps = self.steps.get(name, [])
        place = bisect_right(steps, at, key=AT)
        return steps[place - 1] if place else None

    def since(self, name: str, at: float) -> list[WeightStep]:
        """Return a worker's step at the time `at` and all later steps. The list is empty if the worker never joined."""
        steps = self.steps.get(name, [])
        return steps[max(0, bisect_right(steps, at, key=AT) - 1) :]

    def stretches(self, name: str, start: float, end: float) -> Iterator[tuple[float, float, WeightStep]]:
        """Yield the steps of a worker from `start` to `end`, each as (begin, end, step) with times within these limits."""
        steps = self.steps.get(name, [])
        for place, step in enumerate(steps):
            until = steps[place + 1].at if place + 1 < len(steps) else end
            first, last = max(start, step.at), min(end, until)
            if last > first:
                yield first, last, step

    def missing(self, start: float, end: float) -> float:
        """Return the service missing between two times, in GPU-seconds.

        It is the sum of (1 - weight) times seconds times GPUs over all workers. Spares and dead workers do not count."""
        return sum(
            (last - first) * (1.0 - step.weight) * self.gpus[name]
            for name in self.steps
            for first, last, step in self.stretches(name, start, end)
            if not step.spare and step.status is not HealthStatus.DEAD
        )
