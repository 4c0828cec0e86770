"""The canary loop's dependencies: ports, clock, random numbers, and the interface for its metrics."""

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from controller.ports import Clock, Prober
from controller.runtime.canary.goldens import Vocabulary
from events.journal.port import JournalReports
from events.observations import CheckType


class CanaryMeter(Protocol):
    """Records the metrics of the canaries that are sent."""

    def count_probe(self, worker: str, check_type: CheckType, seconds: float) -> None:
        """Record that one question was sent to a worker and took `seconds`."""

    def spent(self, worker: str, gpu_seconds: float) -> None:
        """Add the GPU time that a canary used on a worker."""

    def late(self, seconds: float) -> None:
        """Record by how many seconds a probe started later than scheduled."""


@dataclass(frozen=True, slots=True)
class ProberDependencies:
    """The dependencies of the canary loop, passed as one object."""

    journal: JournalReports
    prober: Prober
    clock: Clock
    meter: CanaryMeter
    vocabulary: Callable[[str], Awaitable[Vocabulary]]  # loads a worker's `tokenizer`; raises HoldfastError
    leading: Callable[[], bool]
    running: Callable[[str], int] = lambda worker: 1  # sequences in a worker's batch, the canary included
    draw: random.Random = field(default_factory=random.Random)
    # for unmarked questions, which workers must not predict
    secret: random.Random = field(default_factory=random.SystemRandom)
