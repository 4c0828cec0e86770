"""A drain that a frontend learns of before the worker: `drain_finished` counts every stream."""

import asyncio
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial

import pytest
from frontend_kit import first_goes_to, frontend
from json_types import Json
from real_worker import RealWorker
from waits import until

from events.decisions import DrainStarted
from events.observations import DrainFinished, RequestMigrated
from workers.engines.simulated.engine import SimulatedEngine
from workers.engines.simulated.sequence import EngineShape
from workers.engines.simulated.timing import ConstantTiming

STREAMS = 3
NOW = datetime.now(UTC)


@pytest.mark.slow
@pytest.mark.parametrize(("prefill_tokens_per_s", "method"), [(1.0, "transfer"), (1e9, "reprefill")])
async def test_streams_that_left_before_the_worker_learned_of_its_drain_are_in_its_account(
    prefill_tokens_per_s: float, method: str
) -> None:
    source, target = (
        RealWorker(name, SimulatedEngine(EngineShape(), ConstantTiming(itl_s=0.005))) for name in ("w1", "w2")
    )
    async with frontend(moving={"max_migration_time_ms": 10_000}) as kit:
        for worker in (source, target):
            await worker.start()
        profile = replace(source.facts["profile"], prefill_tokens_per_s=prefill_tokens_per_s)
        await first_goes_to(kit, source, target, **source.facts | {"profile": profile})  # type: ignore[arg-type]
        endpoints = kit.director.table.endpoints
        endpoints[("w2", target.instance)].begin(requests=100)
        running = partial(kit.running, "w1", source.instance)
        ask: Json = {"model": "m", "max_tokens": 400, "ignore_eos": True}
        prompts = [[300 + n] * 40 for n in range(STREAMS)]
        asked = [asyncio.ensure_future(kit.stream(prompt=prompt, **ask)) for prompt in prompts]
        await until(lambda: len(running()) == STREAMS and all(len(g.accepted) > 5 for g in running()))
        endpoints[("w2", target.instance)].end(requests=100)
        about: Json = {"worker": "w1", "instance": source.instance}
        kit.tell(DrainStarted(**about, number=0, deadline=NOW, reason="operator", decided_at=NOW))
        await until(lambda: source.empty)
        source.drain()
        await until(lambda: source.drained)
        assert source.drained == [DrainFinished(**about, completed=0, migrated=STREAMS)]
        await asyncio.gather(*asked)  # a move is reported with its first token
        assert [move.method for move in kit.said(RequestMigrated)] == [method] * STREAMS
        for worker in (source, target):
            await worker.stop()
