"""What is known of a worker's health? The records that `health.evolve` changes and `health_moves.decide` reads.

What a reader would get wrong: a part (`Canaries`, `Charges`, …) is what is forgotten together. Whoever begins one anew
writes `canaries=Canaries()`, and forgets all of it; whoever changes one writes `replace(state.canaries, …)`.
"""

from dataclasses import dataclass
from datetime import datetime

from events.decisions import HealthStatus
from events.frozen import quickly_made

HEALTHY, SUSPICIOUS, UNHEALTHY, DRAINING, DEAD = HealthStatus
CORRUPT, SILENT, ENGINE, DEVICE = "corrupt", "silent", "engine", "device"  # convictions; a device's names it
CORRUPT_REASONS = ("token_mismatch", "logit_drift", "non_finite")  # reasons of a HealthChanged for corruption
TRIALS_FAILED = "trials_failed"
RELAPSE = "relapse"  # a HealthChanged's reason begins so that tells of a worker which failed on its way back
LIMITED = "device_limit"  # reason of a HealthChanged that only a device's limit has moved


@quickly_made
@dataclass(frozen=True, slots=True)
class Canaries:
    """What canaries say of a worker."""

    failures: int = 0  # in a row, since it was last HEALTHY or became UNHEALTHY
    failure: str = ""  # the reason of the last one
    goods: int = 0  # in a row, since the last move
    streak: int = 0  # good ones in a row, since the last conviction
    quicks: int = 0  # not-slow good ones in a row, since the last move


@quickly_made
@dataclass(frozen=True, slots=True)
class Slowness:
    """How slow a worker is found to be."""

    reports: int = 0  # in a row: of canaries, and of the frontends together
    frontends: tuple[str, ...] = ()  # whose reports were counted as one with the last
    suspected: bool = False  # a reason of the present suspicion


@quickly_made
@dataclass(frozen=True, slots=True)
class Charges:
    """What stands against a worker beyond doubt."""

    convictions: tuple[str, ...] = ()
    accused: str = ""  # the reason of a conviction that no decision has answered yet
    proven: bool = False  # it was taken out of service for more than doubt, and has not been HEALTHY since
    silent_since: datetime | None = None  # by the clock of the controller that said so


@quickly_made
@dataclass(frozen=True, slots=True)
class Trials:
    """How the breaker's trials of a worker ended."""

    passed: bool = False  # the breaker closed since it became UNHEALTHY
    failed: int = 0  # in a row


@quickly_made
@dataclass(frozen=True, slots=True)
class Exit:
    """What leads a worker out of service for good: a drain, or the end of its process."""

    leaving: str = ""  # why it is to drain, until a decision has answered
    draining: bool = False  # a drain is in force, even while it is UNHEALTHY
    given_up: bool = False  # drained by this machine: dead as soon as it is empty
    resumed: bool = False  # an operator wants it back; a good canary will do
    over: str = ""  # how the drain ended
    left: str = ""  # how its process ended


@dataclass(frozen=True, slots=True)
class Health:
    """One worker's health in its current life."""

    worker: str
    instance: str
    status: HealthStatus = SUSPICIOUS
    weight: float = 0.0
    unlimited: float = 0.0  # the weight without the devices' limits
    limits: tuple[tuple[str, float], ...] = ()  # (device and class, the weight that it leaves at most)
    ramp: float = 0.0  # the weight that it had when it was HEALTHY last; below 1 while the ramp goes on
    reason: str = "joined"
    joining: bool = True  # has not been HEALTHY in this life
    disputed: tuple[str, ...] = ()  # canaries over whose goldens it is at odds with another worker
    kept: bool = False  # the ejection budget holds it in service
    canaries: Canaries = Canaries()
    slowness: Slowness = Slowness()
    charges: Charges = Charges()
    trials: Trials = Trials()
    exit: Exit = Exit()
    moved_by: int = 0  # number of the last decision about its health
    dead_since: datetime | None = None  # by the clock of the controller that decided so
    cause: str = ""  # id of the fact that spoke last

    @property
    def limit(self) -> float:
        """The weight that its devices leave it at most."""
        return min(weight for _, weight in self.limits) if self.limits else 1.0

    @property
    def convictions(self) -> tuple[str, ...]:
        """What stands against it."""
        return self.charges.convictions

    @property
    def corrupt(self) -> bool:
        """Whether wrong answers have convicted it."""
        return CORRUPT in self.charges.convictions

    @property
    def convicted(self) -> bool:
        """Whether anything but doubt stands against it, or has taken it out of service: it is never kept there.

        What stood against it may be over (it is heard again, an operator takes its part) before its trial has passed.
        """
        return self.charges.proven or bool(self.charges.convictions)
