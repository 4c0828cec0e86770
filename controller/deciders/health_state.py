"""The state of a worker's health, changed by `health.evolve` and read by `health_moves.decide`.

Each part (`Canaries`, `Charges`, …) holds the fields that are reset together. `canaries=Canaries()` resets a part, and
`replace(state.canaries, …)` changes one.
"""

from dataclasses import dataclass
from datetime import datetime

from events.decisions import HealthStatus
from events.frozen import fast_constructor, replace
from events.observations import CanaryFailed

HEALTHY, SUSPICIOUS, UNHEALTHY, DRAINING, DEAD = HealthStatus
# Convictions; a device conviction names the device.
CORRUPT, SILENT, ENGINE, DEVICE = "corrupt", "silent", "engine", "device"
CORRUPT_REASONS = ("token_mismatch", "logit_drift", "non_finite")  # reasons of a HealthChanged for corruption
GOLDENS_MAX = 64  # goldens that convicted one worker; at most one per canary
UNANSWERED = (SILENT, "no_response", "timeout")  # reasons of a HealthChanged when no answer arrived
TRIALS_FAILED = "trials_failed"
INTRUSION = "intrusion"  # prefix of the reason of a HealthChanged that ejects an intruder
RELAPSE = "relapse"  # prefix of the reason of a HealthChanged of a worker that failed while it was returning
# Reason of a HealthChanged that holds a joining worker back until its goldens are agreed.
NEW_LINEAGE = "new_lineage"
LIMITED = "device_limit"  # reason of a HealthChanged caused only by a device's limit


@fast_constructor
@dataclass(frozen=True, slots=True)
class Canaries:
    """Canary results of a worker."""

    failures: int = 0  # in a row, since it was last HEALTHY or became UNHEALTHY
    failure: str = ""  # the reason of the last one
    goods: int = 0  # good ones in a row, since the last move
    streak: int = 0  # good ones in a row, since the last conviction
    quicks: int = 0  # good ones at normal speed in a row, since the last move
    timeouts: int = 0  # of the failures: timeouts while the worker's engine answered other requests
    wrong: bool = False  # one returned a wrong answer or an error since it was last HEALTHY


@fast_constructor
@dataclass(frozen=True, slots=True)
class Slowness:
    """Slowness reports about a worker."""

    reports: int = 0  # in a row: from canaries, and from all frontends together
    frontends: tuple[str, ...] = ()  # frontends merged into the last report
    suspected: bool = False  # slowness is a reason for the present suspicion


@fast_constructor
@dataclass(frozen=True, slots=True)
class Charges:
    """Evidence against a worker that is beyond doubt."""

    convictions: tuple[str, ...] = ()
    goldens: tuple[str, ...] = ()  # canaries with an agreed golden that convicted it of wrong answers
    void: tuple[
        tuple[str, int], ...
    ] = ()  # those with a golden that has been outvoted, and the number of that decision
    own_goldens: tuple[str, ...] = ()  # canaries that convicted it by a golden it had proposed itself
    not_finite: bool = False  # non-finite answers convicted it
    acquitted: bool = False  # the goldens that convicted it were outvoted: only its trial is missing
    accused: str = ""  # the reason of a conviction to which no decision has reacted yet
    proven: bool = False  # taken out of service on more than doubt, and not HEALTHY since
    silent_since: datetime | None = None  # by the clock of the controller that decided it


@fast_constructor
@dataclass(frozen=True, slots=True)
class Trials:
    """Results of the breaker's trials of a worker."""

    passed: bool = False  # the breaker closed since it became UNHEALTHY
    failed: int = 0  # in a row


@fast_constructor
@dataclass(frozen=True, slots=True)
class Exit:
    """The state of a worker's permanent exit from service: a drain, or the end of its process."""

    leaving: str = ""  # reason of a requested drain, until a decision has reacted
    draining: bool = False  # a drain is in force, even while it is UNHEALTHY
    given_up: bool = False  # drained because health gave it up: dead as soon as it is empty
    resumed: bool = False  # an operator resumed it; one good canary returns it to service
    over: str = ""  # how the drain ended
    left: str = ""  # how its process ended


@dataclass(frozen=True, slots=True)
class Health:
    """The health of a worker's current instance."""

    worker: str
    instance: str
    status: HealthStatus = SUSPICIOUS
    weight: float = 0.0
    unlimited: float = 0.0  # the weight without the devices' limits
    limits: tuple[tuple[str, float], ...] = ()  # (device and fault class, highest weight that it allows)
    ramp: float = 0.0  # its weight when last HEALTHY; below 1 during the ramp
    reason: str = "joined"
    joining: bool = True  # this instance has not been HEALTHY yet
    disputed: tuple[str, ...] = ()  # canaries on which it disagrees with another worker
    intrusion: str = ""  # the forbidden action for which it is to be ejected
    kept: bool = False  # the ejection budget keeps it in service
    canaries: Canaries = Canaries()
    slowness: Slowness = Slowness()
    charges: Charges = Charges()
    trials: Trials = Trials()
    exit: Exit = Exit()
    moved_by: int = 0  # number of the last decision about its health
    dead_since: datetime | None = None  # by the clock of the controller that decided it
    cause: str = ""  # id of the last fact that changed this state

    @property
    def held(self) -> bool:
        """Whether it is held back: it joined with a new lineage that has no agreed goldens yet."""
        return self.joining and self.status is SUSPICIOUS and self.reason == NEW_LINEAGE

    @property
    def limit(self) -> float:
        """The highest weight that its devices allow."""
        return min(weight for _, weight in self.limits) if self.limits else 1.0

    @property
    def convictions(self) -> tuple[str, ...]:
        """The convictions of the worker."""
        return self.charges.convictions

    @property
    def corrupt(self) -> bool:
        """Whether wrong answers have convicted it."""
        return CORRUPT in self.charges.convictions

    @property
    def convicted(self) -> bool:
        """Whether it was, or must be, taken out of service on more than doubt. The ejection budget then never keeps it.

        The evidence may be gone (it sends heartbeats again, an operator resumed it) before its trial has passed.
        """
        return self.charges.proven or bool(self.charges.convictions)


def evidence(charges: Charges, fact: CanaryFailed, *, agreed: bool) -> Charges:
    """Record which canary gave a wrong answer. `agreed`: whether an agreed golden proves it."""
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
    """Return a worker's charges after decision `number` retired an outvoted golden.

    The golden no longer convicts a worker that `agrees` with its successor. For any other worker the charge is void: one good
    answer to this canary lifts it.
    """
    if canary not in charges.goldens and canary not in charges.own_goldens:
        return charges
    return lifted(charges, canary) if agrees else replace(charges, void=(*charges.void, (canary, number)))


def redeemed(charges: Charges, canary: str, sent_under: int) -> Charges:
    """Lift a void charge: the worker has given the answer that was agreed after the old golden was outvoted."""
    void = any(name == canary and sent_under >= number for name, number in charges.void)
    return lifted(charges, canary) if void else charges


def lifted(charges: Charges, canary: str) -> Charges:
    """Return the charges without this canary's golden. If no golden is left, the conviction ends."""
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
    """Return the charges without this conviction. If none is left, the accusation ends too."""
    if conviction not in charges.convictions:
        return charges
    left = tuple(c for c in charges.convictions if c != conviction)
    return replace(charges, convictions=left, accused=charges.accused if left else "")
