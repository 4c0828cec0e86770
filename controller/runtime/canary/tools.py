"""What the canary loop works with: ports, clock, and where its own measurements go."""

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from controller.ports import Clock, Prober
from controller.runtime.canary.goldens import Vocabulary
from events.journal.port import Journal
from events.observations import CheckType


class CanaryMeter(Protocol):
    """Where the prober's own measurements go."""

    def asked(self, worker: str, check_type: CheckType, seconds: float) -> None:
        """Count one question and how long its answer took."""
        ...

    def spent(self, worker: str, gpu_seconds: float) -> None:
        """Count what a canary cost."""
        ...

    def late(self, seconds: float) -> None:
        """Say how late a probe began."""
        ...


@dataclass(frozen=True, slots=True)
class Tools:
    """What the prober works with."""

    journal: Journal
    prober: Prober
    clock: Clock
    meter: CanaryMeter
    vocabulary: Callable[[str], Awaitable[Vocabulary]]  # by a worker's `tokenizer`; raises HoldfastError
    leading: Callable[[], bool]
    running: Callable[[str], int] = lambda worker: 1  # sequences in its batch, the canary's included
    draw: random.Random = field(default_factory=random.Random)
    secret: random.Random = field(
        default_factory=random.SystemRandom
    )  # what workers must not foresee: unmarked questions
