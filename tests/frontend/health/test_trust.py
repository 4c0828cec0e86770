"""Trusted sources of a KV cache: a worker in doubt can never be one, by construction."""

import inspect
from datetime import UTC, datetime

import pytest
from frontend_kit import joined
from json_types import Json
from scripted_worker import ScriptedWorker

from controller.adapters.request_plane.client import RequestPlaneClient
from controller.deciders.fleet import Fleet, evolve
from controller.ports import RequestPlane
from controller.router.trust import SourceDistrusted, TrustedSource
from events.decisions import DrainStarted, HealthChanged, HealthStatus
from events.fact import Fact, Recorded
from events.observations import (
    CanaryFailed,
    CanarySlow,
    DeviceFaulted,
    EngineFaulted,
    WorkerLeft,
    WorkerSilent,
    WorkerSlow,
)

NOW = datetime.now(UTC)
LIFE: Json = {"worker": "w1", "instance": "i1"}
CANARY: Json = {
    **LIFE, "canary_key": "k", "canary": "c", "check_type": "scheduled", "sent_under": 9, "sent_at": NOW, "latency_ms": 1.0,
}  # fmt: skip


def health(after: HealthStatus, weight: float, reason: str = "test") -> HealthChanged:
    return HealthChanged(
        **LIFE,
        number=1,
        before=HealthStatus.HEALTHY,
        after=after,
        reason=reason,
        weight=weight,
        decided_at=NOW,
    )


def fails(reason: str, confirmed: bool = False) -> CanaryFailed:
    return CanaryFailed(**CANARY, reason=reason, confirmed=confirmed, golden="agreed")  # type: ignore[arg-type]


WELL = health(HealthStatus.HEALTHY, 1.0)
FINE: dict[str, list[Fact]] = {
    "healthy": [],
    "draining": [
        DrainStarted(**LIFE, number=2, deadline=NOW, reason="operator", decided_at=NOW),
        health(HealthStatus.DRAINING, 0.0, "operator"),
    ],
    "throttled": [DeviceFaulted(**LIFE, device="GPU-1", fault_class="throttle", fatal=False, weight=0.2)],
    "its NVLink is lost": [
        DeviceFaulted(**LIFE, device="GPU-1", fault_class="nvlink_down", fatal=False, weight=0.0)
    ],
    "slow": [
        WorkerSlow(**LIFE, frontend="f", latency_ms=9.0, baseline_ms=1.0),
        CanarySlow(**CANARY, baseline_ms=0.1),
        health(HealthStatus.SUSPICIOUS, 0.5, "slow"),
    ],
    "a canary was late": [fails("timeout"), health(HealthStatus.SUSPICIOUS, 0.5, "timeout")],
}
DOUBTFUL: dict[str, list[Fact]] = {
    "unhealthy": [health(HealthStatus.UNHEALTHY, 0.0)],
    "dead": [WorkerLeft(**LIFE, mode="immediate"), health(HealthStatus.DEAD, 0.0)],
    "convicted, and no decision yet": [fails("token_mismatch", confirmed=True)],
    "convicted": [fails("token_mismatch", confirmed=True), health(HealthStatus.UNHEALTHY, 0.0, "token_mismatch")],
    "convicted, and told to drain": [
        fails("logit_drift", confirmed=True), health(HealthStatus.DRAINING, 0.0, "operator")
    ],
    "one wrong answer, not confirmed": [fails("token_mismatch"), health(HealthStatus.SUSPICIOUS, 0.5, "token_mismatch")],
    "fatal device fault": [DeviceFaulted(**LIFE, device="GPU-1", fault_class="ecc")],
    "fatal engine fault": [EngineFaulted(**LIFE, reason="CUDA error", fatal=True)],
    "silent": [WorkerSilent(**LIFE, silent_s=9.0, observer="c")],
    "given up after failed trials": [
        health(HealthStatus.UNHEALTHY, 0.0), health(HealthStatus.DRAINING, 0.0, "trials_failed")
    ],
}  # fmt: skip


def fold(*facts: Fact) -> Fleet:
    fleet = Fleet()
    for seq, fact in enumerate((joined(ScriptedWorker("w1")), *facts), 1):
        fleet = evolve(fleet, Recorded(seq, NOW, fact, f"e{seq}"))
    return fleet


@pytest.mark.parametrize("why", FINE)
def test_a_healthy_worker_is_trusted_however_slow_it_is(why: str) -> None:
    source = TrustedSource(fold(WELL, *FINE[why]).workers["w1"])
    assert (source.worker, source.instance) == ("w1", "i1")


@pytest.mark.parametrize("why", DOUBTFUL)
def test_a_worker_in_doubt_is_not_trusted(why: str) -> None:
    with pytest.raises(SourceDistrusted, match="the source is not trusted"):
        TrustedSource(fold(WELL, *DOUBTFUL[why]).workers["w1"])


def test_a_worker_that_has_never_been_healthy_or_is_unknown_is_not_trusted() -> None:
    with pytest.raises(SourceDistrusted):
        TrustedSource(fold().workers["w1"])
    with pytest.raises(SourceDistrusted, match="the source is unknown"):
        TrustedSource(None)


def test_a_transfer_can_be_requested_only_with_a_trusted_source() -> None:
    """The type is required for a transfer, and only its constructor, which checks the worker, creates it."""
    for ship in (RequestPlane.ship, RequestPlaneClient.ship):
        assert inspect.signature(ship).parameters["source"].annotation is TrustedSource
    assert [
        name
        for name in vars(TrustedSource)
        if not name.startswith("__") and name not in ("instance", "key", "worker")
    ] == []
