"""What is known of a worker's health? The records that `health.evolve` changes and `health_moves.decide` reads.

What a reader would get wrong: a part (`Canaries`, `Charges`, …) is what is forgotten together. Whoever begins one anew
writes `canaries=Canaries()`, and forgets all of it; whoever changes one writes `replace(state.canaries, …)`.
"""

from dataclasses import dataclass
from datetime import datetime

from events.decisions import HealthStatus
from events.frozen import quickly_made, replace
from events.observations import CanaryFailed

HEALTHY, SUSPICIOUS, UNHEALTHY, DRAINING, DEAD = HealthStatus
CORRUPT, SILENT, ENGINE, DEVICE = "corrupt", "silent", "engine", "device"  # convictions; a device's names it
CORRUPT_REASONS = ("token_mismatch", "logit_drift", "non_finite")  # reasons of a HealthChanged for corruption
GOLDENS_MAX = 64  # that convicted one worker, as many as there are canaries at most
UNANSWERED = (SILENT, "no_response", "timeout")  # reasons of a HealthChanged where nothing was answered
TRIALS_FAILED = "trials_failed"
INTRUSION = "intrusion"  # a HealthChanged's reason begins so that ejects a worker for what it tried
RELAPSE = "relapse"  # a HealthChanged's reason begins so that tells of a worker which failed on its way back
NEW_LINEAGE = (
    "new_lineage"  # reason of a HealthChanged that keeps a joining worker back until its goldens are agreed
)
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
    timeouts: int = 0  # of the failures: timeouts while the worker's engine answered other requests
    wrong: bool = False  # one brought a wrong answer or an error, since it was last HEALTHY


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
    goldens: tuple[str, ...] = ()  # canaries whose agreed golden convicted it of wrong answers
    void: tuple[tuple[str, int], ...] = ()  # of these, whose golden was outvoted since, and by which decision
    own_goldens: tuple[str, ...] = ()  # canaries whose golden it had proposed itself, and that convicted it
    not_finite: bool = False  # answers that were no numbers convicted it
    acquitted: bool = False  # the goldens that convicted it were outvoted: its trial is all that is missing
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
    intrusion: str = ""  # what it tried and was refused, where it is to be ejected for that
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
    def held(self) -> bool:
        """Whether it is kept back: it has joined with a new lineage, whose goldens are not agreed yet."""
        return self.joining and self.status is SUSPICIOUS and self.reason == NEW_LINEAGE

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


def evidence(charges: Charges, fact: CanaryFailed, *, agreed: bool) -> Charges:
    """Note which canary gave a wrong answer, and whether an agreed golden says so."""
    if fact.reason == "non_finite":
        return replace(charges, not_finite=True)
    if not agreed:
        others = tuple(one for one in charges.own_goldens if one != fact.canary)[-GOLDENS_MAX + 1 :]
        return replace(charges, own_goldens=(*others, fact.canary))
    canary = fact.golden_canary
    others = tuple(one for one in charges.goldens if one != canary)[-GOLDENS_MAX + 1 :]
    void = tuple(one for one in charges.void if one[0] != canary)
    return replace(charges, goldens=(*others, canary), void=void)


def outvoted_charges(charges: Charges, canary: str, number: int, *, agrees: bool) -> Charges:
    """Take that decision `number` retired an outvoted golden. It no longer convicts a worker that `agrees` with the new one.
    Of any other worker it is void: one good answer to this canary lifts it."""
    if canary not in charges.goldens and canary not in charges.own_goldens:
        return charges
    return lifted(charges, canary) if agrees else replace(charges, void=(*charges.void, (canary, number)))


def redeemed(charges: Charges, canary: str, sent_under: int) -> Charges:
    """Lift what an outvoted golden said: the worker has given the answer that was agreed instead."""
    void = any(name == canary and sent_under >= number for name, number in charges.void)
    return lifted(charges, canary) if void else charges


def lifted(charges: Charges, canary: str) -> Charges:
    """Return the charges without this canary's golden. With the last of them the conviction ends."""
    left = replace(
        charges,
        goldens=tuple(one for one in charges.goldens if one != canary),
        own_goldens=tuple(one for one in charges.own_goldens if one != canary),
        void=tuple(one for one in charges.void if one[0] != canary),
    )
    if left.goldens or left.own_goldens or left.not_finite:
        return left
    return replace(without(left, CORRUPT), acquitted=True)


def without(charges: Charges, conviction: str) -> Charges:
    """Return what stands against it besides this. Where nothing does, no proof of its health is missing."""
    if conviction not in charges.convictions:
        return charges
    left = tuple(c for c in charges.convictions if c != conviction)
    return replace(charges, convictions=left, accused=charges.accused if left else "")
