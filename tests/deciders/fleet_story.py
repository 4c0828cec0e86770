"""A fleet scenario for tests: facts go in, time passes, and settles go through an in-memory journal.

Shared by the deciders' tests. Time is virtual. The story keeps every recorded event, so that a test can fold them again.
"""

from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, TypeVar

from controller.deciders.fleet import Fleet, FleetPolicy, Worker, evolve, settle
from events.decisions import HealthStatus
from events.fact import Decision, Fact, Recorded
from events.observations import (
    CanaryFailed,
    CanaryPassed,
    CanaryReason,
    CanarySlow,
    DeviceFaulted,
    DeviceRecovered,
    DrainFinished,
    DrainRequested,
    EngineFaulted,
    GoldenDisputed,
    GoldenProposed,
    Profile,
    RequestFailed,
    RequestPoisonous,
    RequestsServed,
    RequestSuspected,
    ResumeRequested,
    ShutdownBegan,
    TopK,
    WorkerAwaited,
    WorkerHeard,
    WorkerJoined,
    WorkerLeft,
    WorkerSilent,
    WorkerSlow,
    WorkerSlowCleared,
)
from events.order import Order

D = TypeVar("D", bound=Decision)
START = datetime(2026, 1, 1, tzinfo=UTC)
PROFILE = Profile(
    kv_blocks=8192,
    block_tokens=16,
    max_batch=64,
    prefill_tokens_per_s=20_000.0,
    tpot_ms=((1, 10.0), (64, 20.0)),
)


def joined(
    worker: str, instance: str = "i1", *, model: str = "llama", profile: Profile = PROFILE, key: str = "k"
) -> WorkerJoined:
    return WorkerJoined(
        worker=worker,
        instance=instance,
        url="tcp://127.0.0.1:1",
        model=model,
        revision="r1",
        tokenizer="builtin:sim",
        engine="simulated",
        engine_version="1",
        dtype="float32",
        tp=1,
        device="cpu",
        profile=profile,
        canary_key=key,
        pid=1,
    )


def awaited(
    worker: str, instance: str = "i1", *, reason: str = "cannot connect", model: str = ""
) -> WorkerAwaited:
    return WorkerAwaited(worker=worker, instance=instance, reason=reason, model=model)


def passed(
    worker: str,
    instance: str = "i1",
    *,
    under: int = 0,
    canary: str = "c1",
    slow: bool = False,
    key: str = "k",
) -> CanaryPassed | CanarySlow:
    shared: dict[str, Any] = {
        "worker": worker,
        "instance": instance,
        "canary_key": key,
        "canary": canary,
        "check_type": "scheduled",
        "sent_under": under,
        "sent_at": START,
        "latency_ms": 5.0,
    }
    return CanarySlow(**shared, baseline_ms=1.0) if slow else CanaryPassed(**shared)


def failed(
    worker: str,
    instance: str = "i1",
    *,
    under: int = 0,
    reason: CanaryReason = "exception",
    confirmed: bool = False,
    golden: Literal["agreed", "provisional", "none"] = "none",
    canary: str = "c1",
    engine_went_on: bool = False,
) -> CanaryFailed:
    return CanaryFailed(
        worker=worker,
        instance=instance,
        canary_key="k",
        canary=canary,
        check_type="scheduled",
        sent_under=under,
        sent_at=START,
        latency_ms=5.0,
        reason=reason,
        confirmed=confirmed,
        golden=golden,
        engine_went_on=engine_went_on,
    )


def proposed(
    worker: str,
    tokens: Iterable[int] = (1, 2),
    *,
    instance: str = "i1",
    canary: str = "c1",
    top_k: Iterable[TopK] = (),
    tolerance: float = 0.0,
    configured: bool = False,
) -> GoldenProposed:
    return GoldenProposed(
        worker=worker,
        instance=instance,
        canary_key="k",
        canary=canary,
        prompt=(9,),
        tokens=tuple(tokens),
        top_k=tuple(top_k),
        margin=1.0,
        tolerance=tolerance,
        configured=configured,
    )


def disputed(
    worker: str, tokens: Iterable[int], *, against: str, instance: str = "i1", canary: str = "c1"
) -> GoldenDisputed:
    return GoldenDisputed(
        worker=worker,
        instance=instance,
        canary_key="k",
        canary=canary,
        proposed_by=against,
        tokens=tuple(tokens),
    )


def request_failed(
    worker: str, count: int, *, instance: str = "i1", under: int = 0, frontend: str = "f0"
) -> RequestFailed:
    return RequestFailed(
        worker=worker,
        instance=instance,
        frontend=frontend,
        failures_in_a_row=count,
        reason="disconnected",
        routed_under=under,
    )


def poisonous(
    worker: str, left: int, *, instance: str = "i1", under: int = 0, frontend: str = "f0"
) -> RequestPoisonous:
    """Return a request that fails on every worker; `in_a_row` failures remain counted on this worker without it."""
    return RequestPoisonous(
        worker=worker, instance=instance, frontend=frontend, request="r", model="llama", fingerprint="0" * 32,
        reason="engine_error", prompt_tokens=3, max_tokens=9, guided="", failures_in_a_row=left, routed_under=under,
        refused_s=10.0,
    )  # fmt: skip


def suspected(worker: str, *, instance: str = "i1", frontend: str = "f0") -> RequestSuspected:
    return RequestSuspected(
        worker=worker, instance=instance, frontend=frontend, request="r", model="llama", fingerprint="0" * 32,
        reason="disconnected", prompt_tokens=3,
    )  # fmt: skip


def served(worker: str, *, instance: str = "i1", under: int = 0, frontend: str = "f0") -> RequestsServed:
    return RequestsServed(
        worker=worker,
        instance=instance,
        frontend=frontend,
        count=3,
        tokens=30,
        ttft_ms=1.0,
        itl_ms=1.0,
        routed_under=under,
        window_s=1.0,
    )


def slow(worker: str, instance: str = "i1", frontend: str = "f0") -> WorkerSlow:
    return WorkerSlow(worker=worker, instance=instance, frontend=frontend, latency_ms=9.0, baseline_ms=1.0)


def slow_cleared(worker: str, instance: str = "i1") -> WorkerSlowCleared:
    return WorkerSlowCleared(worker=worker, instance=instance, frontend="f0", latency_ms=1.0, baseline_ms=1.0)


def silent(worker: str, instance: str = "i1") -> WorkerSilent:
    return WorkerSilent(worker=worker, instance=instance, silent_s=3.0, observer="o")


def heard(worker: str, instance: str = "i1") -> WorkerHeard:
    return WorkerHeard(worker=worker, instance=instance, observer="o")


def left(
    worker: str, instance: str = "i1", mode: Literal["graceful", "immediate", "self_initiated"] = "graceful"
) -> WorkerLeft:
    return WorkerLeft(worker=worker, instance=instance, mode=mode, exit=0)


def drain_requested(worker: str, instance: str = "i1", deadline_s: float | None = None) -> DrainRequested:
    return DrainRequested(worker=worker, instance=instance, deadline_s=deadline_s, by="op")


def resume(worker: str, instance: str = "i1") -> ResumeRequested:
    return ResumeRequested(worker=worker, instance=instance, by="op")


def shutdown(
    worker: str, instance: str = "i1", mode: Literal["graceful", "self_initiated"] = "graceful"
) -> ShutdownBegan:
    return ShutdownBegan(worker=worker, instance=instance, mode=mode)


def drained(worker: str, instance: str = "i1") -> DrainFinished:
    return DrainFinished(worker=worker, instance=instance, completed=1, migrated=0)


def device_faulted(
    worker: str, instance: str = "i1", fatal: bool = True, device: str = "gpu0"
) -> DeviceFaulted:
    return DeviceFaulted(
        worker=worker, instance=instance, device=device, fault_class="xid", code="48", fatal=fatal
    )


def device_limited(worker: str, weight: float, instance: str = "i1", device: str = "gpu0") -> DeviceFaulted:
    return DeviceFaulted(
        worker=worker, instance=instance, device=device, fault_class="throttle", fatal=False, weight=weight
    )


def device_recovered(
    worker: str, instance: str = "i1", device: str = "gpu0", fault_class: str = "xid"
) -> DeviceRecovered:
    return DeviceRecovered(worker=worker, instance=instance, device=device, fault_class=fault_class)


def engine_faulted(worker: str, instance: str = "i1", fatal: bool = True) -> EngineFaulted:
    return EngineFaulted(worker=worker, instance=instance, reason="died", fatal=fatal)


class Story:
    """One fleet, its journal and its clock."""

    def __init__(self, policy: FleetPolicy | None = None) -> None:
        self.policy = policy or FleetPolicy()
        self.now = START
        self.events: list[Recorded] = []
        self.order: Order[Fleet] = Order(evolve, Fleet())
        self.settle()  # adopts the policy

    @property
    def fleet(self) -> Fleet:
        return self.order.shown

    def worker(self, name: str = "w0") -> Worker:
        return self.fleet.workers[name]

    def status(self, name: str = "w0") -> HealthStatus:
        return self.worker(name).health.status

    def record(self, fact: Fact, *, through: int = 0) -> Recorded:
        """Append one fact to the journal, as a broker would."""
        seq = len(self.events) + 1
        said = isinstance(fact, Decision)
        event = Recorded(
            seq=seq,
            at=self.now,
            fact=fact,
            id=f"e{seq}",
            source="" if said else "world",
            source_number=0 if said else seq,
            through=through,
        )
        self.events.append(event)
        self.order.absorb(event)
        return event

    def settle(self, *, quiet: bool = True) -> tuple[Decision, ...]:
        """Decide, append, absorb; and check that nothing more is due."""
        decisions = settle(self.policy, self.fleet, self.now)
        through = self.order.last_seq
        for decision in decisions:
            self.record(decision, through=through)
        if quiet:
            assert settle(self.policy, self.fleet, self.now) == (), "not quiescent"
        return decisions

    def tell(self, *facts: Fact, fresh: bool = True) -> tuple[Decision, ...]:
        """Record facts and settle. `fresh`: mark probes as sent just now."""
        for fact in facts:
            self.record(self.stamp(fact) if fresh else fact)
        return self.settle()

    def stamp(self, fact: Fact) -> Fact:
        if isinstance(fact, CanaryPassed | CanarySlow | CanaryFailed):
            return replace(fact, sent_under=self.fleet.number, sent_at=self.now)
        if isinstance(fact, RequestFailed | RequestPoisonous | RequestsServed):
            return replace(fact, routed_under=self.fleet.number)
        return fact

    def wait(self, seconds: float) -> tuple[Decision, ...]:
        """Let time pass and settle once at its end."""
        self.now += timedelta(seconds=seconds)
        return self.settle()

    def reach_trial(self, name: str = "w0") -> None:
        """Let time pass until the trial of an open breaker is due."""
        retry_at = self.worker(name).breaker.retry_at
        assert retry_at is not None
        self.now = retry_at
        self.settle()

    def up(self, *names: str, model: str = "llama") -> "Story":
        """Bring workers to HEALTHY, weight 1."""
        for name in names:
            self.tell(joined(name, model=model))
            self.tell(passed(name))
            assert self.worker(name).weight == 1.0
        return self


def kinds(decisions: Iterable[Decision]) -> list[str]:
    """Return the kinds of decisions, in order."""
    return [type(decision).__name__ for decision in decisions]


def only(decisions: Iterable[Decision], kind: type[D]) -> D:
    """Return the one decision of a kind."""
    (found,) = [decision for decision in decisions if isinstance(decision, kind)]
    return found
