"""What one frontend knows of its pools: told by the scheduler, kept as long as there are workers or somebody waits."""

import asyncio
from dataclasses import replace

import pytest
from frontend_kit import PROFILE, joined
from scripted_worker import ScriptedWorker

from controller.frontend.scheduling.pools import Pools, step_s
from controller.router.admission.line import PlaceInLine
from controller.router.endpoints import Endpoint


def endpoint(name: str = "w1", **profile: object) -> Endpoint:
    return Endpoint(joined(ScriptedWorker(name), profile=replace(PROFILE, **profile)), weight=1.0)  # type: ignore[arg-type]


def test_a_frontend_among_others_begins_with_its_part_of_the_workers() -> None:
    assert Pools(lambda: 0.0, lambda: 4).of("m", ("r", "t")).drain.rate(8.0) == 2.0
    assert Pools(lambda: 0.0, lambda: 0).of("m", ("r", "t")).drain.rate(8.0) == 8.0


def test_first_tokens_are_learned_of_and_requests_that_end_without_one_are_forgotten() -> None:
    now = [0.0]
    pools, worker = Pools(lambda: now[0], lambda: 1), endpoint(prefill_tokens_per_s=1000.0)
    first = pools.of(worker.model, worker.lineage).first
    for slot in range(60):
        pools.sent(slot, worker, 100.0, 100.0)  # 0.2 s by its profile
        now[0] += 0.4 + step_s(worker)
        pools.read(slot)
        pools.read(slot)  # that it goes on is no news
    assert first.predicted_s("w1", 0.1, 0.1, 0.0) == pytest.approx(0.4, rel=0.02)
    assert first.ahead_s == pytest.approx(0.1, rel=0.02)
    pools.sent(99, worker, 0.0, 100.0)
    pools.end(99)
    now[0] += 1e6
    pools.read(99)
    assert first.predicted_s("w1", 0.1, 0.1, 0.0) == pytest.approx(0.4, rel=0.02)


def test_a_pool_is_forgotten_with_its_workers_but_not_while_somebody_waits() -> None:
    async def go() -> None:
        pools = Pools(lambda: 0.0, lambda: 1)
        one, other = pools.of("m", ("r1", "t")), pools.of("m", ("r2", "t"))
        other.push(PlaceInLine(asyncio.get_running_loop().create_future(), 0, "", 1.0, 0.0, 1.0), 0.0)
        pools.keep(set(), set())
        assert pools.of("m", ("r2", "t")) is other
        assert pools.of("m", ("r1", "t")) is not one

    asyncio.run(go())


@pytest.mark.parametrize(
    ("tpot_ms", "seconds"), [(((1, 10.0), (8, 20.0)), 0.02), ((), 0.0), (((1, 1e9),), 0.0)]
)
def test_a_step_is_that_of_a_full_batch_where_it_is_known(tpot_ms: object, seconds: float) -> None:
    assert step_s(endpoint(tpot_ms=tpot_ms)) == pytest.approx(seconds)
