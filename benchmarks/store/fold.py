"""Measures how fast a fleet folds and decides: `python -m benchmarks fold`

Events per second through `evolve`, by kind and fleet size, and microseconds of one `settle` of a calm fleet.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

from benchmarks.registration import played_worker
from controller.deciders.capacity import Slo
from controller.deciders.degradation import DegradationPolicy
from controller.deciders.fleet import Fleet, FleetPolicy, evolve, settle
from events.decisions import HealthChanged, HealthStatus
from events.fact import Fact, Recorded
from events.observations import CanaryFailed, CanaryPassed, Profile, RequestsServed, WorkerJoined

AT = datetime(2026, 1, 1, tzinfo=UTC)
EVENTS = 20_000
ROUNDS = 5
PROFILE = Profile(
    kv_blocks=8192,
    block_tokens=16,
    max_batch=64,
    prefill_tokens_per_s=20_000.0,
    tpot_ms=((1, 10.0), (64, 20.0)),
)
SLO = FleetPolicy(degradation=DegradationPolicy(slos={"llama": Slo(slo_throughput_rps=1.0)}))


def recorded(facts: Iterator[Fact]) -> list[Recorded]:
    """Return facts as the journal would hold them."""
    return [
        Recorded(seq=n, at=AT, fact=fact, id=f"e{n}", source="s", source_number=n)
        for n, fact in enumerate(facts, 1)
    ]


def joined(worker: str) -> WorkerJoined:
    return played_worker(worker, PROFILE, instance="i", model="llama", canary_key="k")


def canary(kind: type[CanaryPassed] | type[CanaryFailed], worker: str, under: int) -> Fact:
    shared = {
        "worker": worker,
        "instance": "i",
        "canary_key": "k",
        "canary": "c",
        "check_type": "scheduled",
        "sent_under": under,
        "sent_at": AT,
        "latency_ms": 5.0,
    }
    return kind(**shared, **({"reason": "timeout", "confirmed": False} if kind is CanaryFailed else {}))  # type: ignore[arg-type]


def served(worker: str, under: int) -> Fact:
    return RequestsServed(
        worker=worker,
        instance="i",
        frontend="f",
        count=9,
        tokens=90,
        ttft_ms=1.0,
        itl_ms=1.0,
        routed_under=under,
        window_s=1.0,
    )


def health(worker: str, under: int) -> Fact:
    h = HealthStatus.HEALTHY
    return HealthChanged(
        worker=worker, instance="i", before=h, after=h, reason="ramp", weight=1.0, number=under, decided_at=AT
    )


KINDS: dict[str, Callable[[str, int], Fact]] = {
    "canary_passed": lambda worker, under: canary(CanaryPassed, worker, under),
    "canary_failed": lambda worker, under: canary(CanaryFailed, worker, under),
    "requests_served": served,
    "health_changed": health,
}


def fleet_of(workers: int) -> Fleet:
    """Return a calm fleet of HEALTHY workers."""
    fleet = Fleet()
    names = [f"w{n}" for n in range(workers)]
    for event in recorded(joined(name) for name in names):
        fleet = evolve(fleet, event)
    for event in recorded(canary(CanaryPassed, name, 0) for name in names):
        fleet = evolve(fleet, event)
    for decision in settle(SLO, fleet, AT):
        fleet = evolve(fleet, Recorded(seq=0, at=AT, fact=decision, id="d"))
    return fleet


def rate(fleet: Fleet, workers: int, make: Callable[[str, int], Fact]) -> float:
    """Return events per second through `evolve`."""
    events = recorded(make(f"w{n % workers}", fleet.number) for n in range(EVENTS))
    began = time.perf_counter()
    for event in events:
        fleet = evolve(fleet, event)
    return EVENTS / (time.perf_counter() - began)


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "").parse_args()
    for workers in (16, 1000):
        fleet = fleet_of(workers)
        for name, make in KINDS.items():
            rates = [rate(fleet, workers, make) for _ in range(ROUNDS)]
            print(f"{workers:5} workers  evolve {name:16} {statistics.median(rates):10,.0f} events/s")
        times = []
        for _ in range(20):
            began = time.perf_counter()
            assert settle(SLO, fleet, AT) == ()
            times.append(time.perf_counter() - began)
        print(f"{workers:5} workers  settle, nothing due {statistics.median(times) * 1e6:12,.0f} us")


if __name__ == "__main__":
    main()
