"""The times to first token of one frontend's pools, as the scheduler reports them."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from frontend_kit import PROFILE, joined
from scripted_worker import ScriptedWorker

from controller.frontend.metrics import FrontendMetrics
from controller.frontend.request_metrics import RequestMetrics
from controller.frontend.scheduling.scheduler import RoutingState, step_s
from controller.frontend.settings import RouterSettings
from controller.router.endpoints import Endpoint


def endpoint(name: str = "w1", **profile: object) -> Endpoint:
    return Endpoint(joined(ScriptedWorker(name), profile=replace(PROFILE, **profile)), weight=1.0)  # type: ignore[arg-type]


def measured(now: Callable[[], float]) -> RoutingState:
    return RoutingState(RouterSettings(), RequestMetrics(FrontendMetrics()), True, now)


def test_first_tokens_are_measured_and_requests_that_end_without_one_are_dropped() -> None:
    now = [0.0]
    pools, worker = measured(lambda: now[0]), endpoint(prefill_tokens_per_s=1000.0)
    first = pools.first_tokens(worker.model, worker.lineage)
    for slot in range(60):
        pools.sent(slot, worker, 100.0, 100.0)  # 0.2 s by its profile
        now[0] += 0.4 + step_s(worker)
        pools.read(slot, now[0])
        pools.read(slot, now[0])  # a second report of the same request changes nothing
    assert first.predicted_s("w1", 0.1, 0.1, 0.0) == pytest.approx(0.4, rel=0.02)
    assert first.ahead_s == pytest.approx(0.1, rel=0.02)
    pools.sent(99, worker, 0.0, 100.0)
    pools.end(99, now[0])
    now[0] += 1e6
    pools.read(99, now[0])
    assert first.predicted_s("w1", 0.1, 0.1, 0.0) == pytest.approx(0.4, rel=0.02)


def test_other_pools_and_workers_are_dropped() -> None:
    pools = measured(lambda: 0.0)
    one, other = pools.first_tokens("m", ("r1", "t")), pools.first_tokens("m", ("r2", "t"))
    other.came("w1", 0.0, 0.1, 0.0, 0.4)
    learned = other.alone_s(0.1, 0.0)
    pools.keep({("m", ("r2", "t"))}, {"w2"})
    assert pools.first_tokens("m", ("r2", "t")) is other
    assert pools.first_tokens("m", ("r1", "t")) is not one
    other.came("w2", 0.0, 0.1, 0.0, 0.01)
    assert other.alone_s(0.1, 0.0) != learned


@pytest.mark.parametrize(
    ("tpot_ms", "seconds"), [(((1, 10.0), (8, 20.0)), 0.02), ((), 0.0), (((1, 1e9),), 0.0)]
)
def test_a_step_is_that_of_a_full_batch_if_it_is_known(tpot_ms: object, seconds: float) -> None:
    assert step_s(endpoint(tpot_ms=tpot_ms)) == pytest.approx(seconds)
