"""Dependencies of the canary loop: ports, clock, random sources, and the meter of its measurements."""

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from controller.ports import Clock, Prober
from controller.runtime.canary.goldens import Vocabulary
from events.journal.port import Journal
from events.observations import CheckType


class CanaryMeter(Protocol):
    """Records the prober's own measurements."""

    def asked(self, worker: str, check_type: CheckType, seconds: float) -> None:
        """Count one question and the latency of its answer."""
        ...

    def spent(self, worker: str, gpu_seconds: float) -> None:
        """Count the cost of a canary."""
        ...

    def late(self, seconds: float) -> None:
        """Record the delay of a probe's start."""
        ...


@dataclass(frozen=True, slots=True)
class ProberDependencies:
    """The dependencies of the prober."""

    journal: Journal
    prober: Prober
    clock: Clock
    meter: CanaryMeter
    vocabulary: Callable[[str], Awaitable[Vocabulary]]  # by a worker's `tokenizer`; raises HoldfastError
    leading: Callable[[], bool]
    running: Callable[[str], int] = lambda worker: 1  # sequences in its batch, the canary included
    draw: random.Random = field(default_factory=random.Random)
    # for what workers must not predict: unmarked questions
    secret: random.Random = field(default_factory=random.SystemRandom)
