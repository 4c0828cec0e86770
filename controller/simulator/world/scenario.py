"""Draws a scenario from a seed: the size of the fleet, its faults and its policy.

A run has two parts. In the first part, the faults that the seed selected are injected. Then all faults end, and the fleet
must recover within the remaining time.
"""

from bisect import bisect_right
from dataclasses import dataclass, replace
from datetime import timedelta
from random import Random

from controller.deciders.capacity import Slo, fleet_capacity
from controller.deciders.fleet import FleetPolicy
from controller.deciders.spares import SparesPolicy
from controller.planner.plan import PlannerPolicy
from controller.runtime.settings import LivenessSettings
from controller.simulator.rates import PRESETS
from controller.simulator.world.kernel import MINUTE, SECOND, Kernel, micros
from controller.simulator.world.machines import PROFILE
from events.observations import Profile


@dataclass(frozen=True, slots=True)
class Steps:
    """A function of time with constant values between steps. Times are in microseconds of virtual time."""

    since: tuple[int, ...]
    values: tuple[float, ...]

    def at(self, now: int) -> float:
        """Return the value of the function at time `now`."""
        return self.values[max(0, bisect_right(self.since, now) - 1)]

    def then(self, at: int, value: float) -> "Steps":
        """Return the same function, but with the constant `value` from time `at` on."""
        kept = bisect_right(self.since, at - 1)
        return Steps((*self.since[:kept], at), (*self.values[:kept], value))


def drawn(chance: Random, until: int, lasts: tuple[int, int], values: tuple[float, ...]) -> Steps:
    """Return a random step function for the time until `until`.

    Each step has one of `values`, and lasts for a random number of minutes within the bounds `lasts`.
    """
    since, drawn_values, at = list[int](), list[float](), 0
    while at < until:
        since.append(at)
        drawn_values.append(chance.choice(values))
        at += chance.randint(*lasts) * MINUTE
    return Steps(tuple(since), tuple(drawn_values))


# Faults per hour: of one worker, and of the fleet as a whole. A seed scales them and disables some.
WORKER_FAULTS = {
    "crash": 1.2, "stop": 0.4, "hang": 0.8, "error": 0.8, "corrupt": 1.2, "slow": 0.6, "flaky": 0.8, "device": 0.4,
    "cut": 0.8, "dark": 0.8, "twice": 0.6, "throttle": 0.6, "nvlink": 0.3,
}  # fmt: skip
FLEET_FAULTS = {
    "broker": 3.0, "lossy": 3.0, "controller_crash": 4.0, "controller_pause": 4.0, "zombie": 6.0, "prober_stall": 3.0,
    "frontend_crash": 3.0, "frontend_lag": 4.0, "projector_crash": 4.0, "drain": 5.0, "together": 3.0, "deaf": 1.0,
    "upgrade": 0.7,
}  # fmt: skip


PLANNER_FAULTS = {"planner_crash": 4.0, "planner_pause": 6.0, "untold": 3.0, "scale_set": 3.0}  # per hour

PLANNED_MINUTES = 15
REQUESTS = 120.0  # requests per minute that one worker serves well
CALM = 0.3  # share of what all workers serve, once every fault is healed


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedPlanning:
    """The planners of a scenario, and the load that frontends report to them."""

    planners: int
    policy: PlannerPolicy
    load: Steps  # requests per minute for each model


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """An overload scenario: workers accept a limited number of requests.

    At times, the load exceeds the fleet's capacity.
    """

    batch: int  # batch size of each worker
    waiting: int  # requests that each worker queues beyond its batch
    times: Steps  # load as a multiple of what all workers serve


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """All parameters of a run, drawn before it begins. Times and durations are in microseconds unless stated."""

    seed: int
    workers: int
    minutes: float
    models: tuple[str, ...]
    controllers: int
    frontends: int
    requests_per_second: float  # requests per second of one frontend
    interval: int  # between canaries of one worker
    tick: int  # between a controller's ticks
    skew: int  # maximum skew of controllers' clocks
    late: int  # time within which every worker starts for the first time
    corrupt_from_start: int  # workers
    policies: tuple[FleetPolicy, ...]  # the first one, and possibly one for restarted controllers
    change_at: int
    faults: dict[str, float]  # of all workers and of the fleet, per hour
    heal_at: int
    end_at: int
    spares: int = 0  # the last workers are spares
    planning: SimulatedPlanning | None = None
    crowd: Crowd | None = None  # None: workers always have room
    silent_after_s: float = LivenessSettings().silent_after_s  # time before a worker counts as silent
    settles: bool  # whether the time after `heal_at` suffices to recover


def profile_of(crowd: Crowd | None) -> Profile:
    """Return the performance profile that each worker registers.

    In an overload scenario (`crowd`), the profile depends on the scenario's batch size.
    """
    if crowd is None:
        return PROFILE
    slowest = PROFILE.tpot_ms[-1][1]
    return replace(PROFILE, max_batch=crowd.batch, tpot_ms=((1, slowest), (crowd.batch + 1, slowest)))


def draw(seed: int, workers: int, minutes: float, rates: str | None = None) -> Scenario:
    """Return the scenario of a seed.

    `rates` names a preset of `rates.py`. The workers' faults are then distributed as in the preset's field study.
    """
    chance = Kernel(seed).chance("scenario")
    interval = chance.choice((5, 10, 30) if minutes >= 30 else (5,)) * SECOND
    models = ("llama", "qwen")[: 2 if workers >= 4 and chance.random() < 0.3 else 1]
    spares, crowd = _spares(seed, workers, len(models)), _crowd(seed, minutes)
    of_model = (workers - spares) // len(models)
    policies = _policies(seed, chance, minutes, models, capacity_of(of_model, profile_of(crowd)))
    if spares:
        policies = [replace(policy, spares=_on_return(seed)) for policy in policies]
    end = int(minutes * MINUTE)
    calm = max(settling_time(policy, interval) for policy in policies)
    heal_at = max(end - calm, end // 4)
    worker_faults, fleet_faults = _faults(chance, rates)
    planning = _planning(seed, of_model, minutes, heal_at)
    if planning is not None:
        fleet_faults |= PLANNER_FAULTS
    if workers // len(models) < 2:
        # The first answer of a lone worker counts as correct: there is no other answer to compare it with.
        worker_faults.pop("corrupt", None)
    return Scenario(
        seed=seed, workers=workers, minutes=minutes, models=models, interval=interval, spares=spares, planning=planning,
        controllers=chance.choice((2, 2, 3)),
        frontends=chance.choice((1, 2, 2, 3)),
        requests_per_second=chance.choice((0.05, 0.1, 0.2)),
        tick=chance.choice((1, 1, 2)) * SECOND,
        skew=chance.choice((0, 50_000, 2 * SECOND)),
        late=chance.choice((2 * SECOND, 2 * SECOND, 5 * MINUTE)),
        corrupt_from_start=chance.choice((0, 0, 0, 1, 1, 2)) if "corrupt" in worker_faults else 0,
        change_at=int(chance.uniform(0.2, 0.8) * heal_at), heal_at=heal_at, end_at=end, settles=end - heal_at >= calm,
        policies=tuple(policies), faults={kind: rate * workers for kind, rate in worker_faults.items()} | fleet_faults,
        crowd=crowd and replace(crowd, times=crowd.times.then(heal_at, CALM)),
    )  # fmt: skip


def _faults(chance: Random, rates: str | None) -> tuple[dict[str, float], dict[str, float]]:
    """Return the faults per hour by kind: first those of each worker, then those of the fleet."""
    heavy = chance.choice((0.5, 1.0, 1.0, 2.0))
    worker_faults = {k: v * heavy for k, v in WORKER_FAULTS.items() if chance.random() < 0.65}
    fleet_faults = {k: v * heavy for k, v in FLEET_FAULTS.items() if chance.random() < 0.65}
    if rates is not None:
        total = sum(WORKER_FAULTS.values()) * heavy
        mix = PRESETS[rates].mix.items()
        worker_faults = {"cut" if k == "network" else k: share * total for k, share in mix if share}
    return worker_faults, fleet_faults


def _policies(
    seed: int, chance: Random, minutes: float, models: tuple[str, ...], capacity_rps: float
) -> list[FleetPolicy]:
    """Return the first policy and, for one seed in four, a second policy.

    The controllers are later restarted with the second policy. `capacity_rps` is the number of requests per second that all
    workers of a model can carry. For one seed in three, the SLO's throughput is set to this capacity or slightly below it.
    """
    policies = [_policy(chance, minutes, models, capacity_rps)]
    if chance.random() < 0.25:
        policies.append(_policy(chance, minutes, models, capacity_rps))
    close = Kernel(seed).chance("provisioned")
    tight = close.choice((None, None, close.choice((1.0, 1.02, 1.05))))
    if tight is not None:
        policies = [promising(policy, models, capacity_rps / tight) for policy in policies]
    return policies


def _spares(seed: int, workers: int, models: int) -> int:
    """Return the number of spares in the whole fleet: none, one per model, or two per model.

    For most seeds there are none. `workers` includes the spares. If more than a quarter of the workers would be spares, there
    are none.
    """
    chance = Kernel(seed).chance("waiting")
    many = chance.choice((0, 0, 1)) * chance.choice((1, 1, 2))
    return models * many if workers >= 4 * models * many else 0


def _planning(seed: int, workers: int, minutes: float, heal_at: int) -> SimulatedPlanning | None:
    """Return the planners of a seed; None for two seeds in three, and for short runs.

    `workers` is the number of workers per model. From `heal_at` on, the load stays at the normal value for this number
    of workers.
    """
    chance = Kernel(seed).chance("planners")
    if minutes < PLANNED_MINUTES or chance.random() < 0.67:
        return None
    policy = PlannerPolicy(
        workers_min=chance.choice((1, 2)),
        workers_max=2 * workers + 1,
        start_s=30.0,
        ahead_s=chance.choice((60.0, 240.0)),
        step_max=chance.choice((1, 8)),
    )
    parts = (0.0, 0.2, 0.5, 1.0, 1.5)
    normal = REQUESTS * workers
    load = drawn(chance, heal_at, (4, 12), tuple(normal * part for part in parts)).then(heal_at, normal)
    return SimulatedPlanning(planners=chance.choice((1, 2, 2)), policy=policy, load=load)


def _crowd(seed: int, minutes: float) -> Crowd | None:
    """Return the overload scenario of a seed; None for two seeds in three."""
    chance = Kernel(seed).chance("rush")
    if chance.random() < 0.67:
        return None
    times = drawn(chance, int(minutes * MINUTE), (1, 3), (0.2, 0.6, 1.5, 4.0))
    return Crowd(batch=chance.choice((1, 2)), waiting=chance.choice((0, 1)), times=times)


def _on_return(seed: int) -> SparesPolicy:
    return SparesPolicy(on_return=Kernel(seed).chance("spares return").choice(("swap", "release")))


def _policy(chance: Random, minutes: float, models: tuple[str, ...], capacity_rps: float) -> FleetPolicy:
    """Return the production default policy with random changes.

    Waiting times may be shortened, so that more events happen in an hour. If an SLO is drawn, the whole fleet can meet it with
    a margin, so every degradation level can be left again.
    """
    policy = FleetPolicy()
    if minutes < 30 or chance.random() < 0.7:
        wait = chance.choice((5, 15, 30))
        longest = timedelta(seconds=wait * chance.choice((1, 4, 8)))
        breaker = replace(policy.breaker, wait_min=timedelta(seconds=wait), wait_max=longest)
        forgetting = replace(policy.forgetting, forget_after=timedelta(seconds=wait))
        policy = replace(policy, breaker=breaker, forgetting=forgetting)
    if chance.random() < 0.6:
        share = chance.choice((0.5, 0.7, 0.9))
        policy = promising(policy, models, share * capacity_rps)
    if chance.random() < 0.3:
        budget = replace(policy.budget, max_ejection_share=chance.choice((0.25, 0.34, 1.0)))
        policy = replace(policy, budget=budget)
    return policy


def promising(policy: FleetPolicy, models: tuple[str, ...], throughput_rps: float) -> FleetPolicy:
    """Return the policy with `throughput_rps` as the SLO throughput of each model."""
    slos = {model: Slo(slo_throughput_rps=throughput_rps) for model in models}
    return replace(policy, degradation=replace(policy.degradation, slos=slos))


def capacity_of(workers: int, profile: Profile) -> float:
    """Return the requests per second that `workers` workers can carry within the default SLO."""
    return fleet_capacity([(profile, 1.0)] * workers, Slo()).effective_capacity_rps


def settling_time(policy: FleetPolicy, interval: int) -> int:
    """Return the time in microseconds within which a fleet must recover from its last fault.

    `interval` is the canary interval in microseconds. The returned time is the sum of these parts:

    - the longest breaker wait, with two trials
    - a drain that may be running, and the start of a new process
    - 14 canary intervals plus 20 %, in which a convicted worker is acquitted, is tried, and returns gradually to full weight
    - two minutes, in which incidents are closed and degradation levels are left
    """
    waits = micros(policy.breaker.wait_max) + micros(policy.breaker.trial_timeout) * 2
    drains = micros(policy.drain.wait) + micros(policy.drain.margin) + 30 * SECOND
    canaries = 14 * int(interval * 1.2)
    return waits + drains + canaries + 2 * MINUTE
