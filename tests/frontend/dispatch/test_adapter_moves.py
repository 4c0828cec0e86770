"""Streams of an adapter on simulated workers: a wrong adapter would change the tokens after a move."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from frontend_kit import Kit, frontend, text_of
from real_worker import RealWorker
from waits import until

from events.observations import MoveRequested, RequestMigrated
from workers.engines.simulated.engine import SimulatedEngine
from workers.engines.simulated.sequence import EngineShape
from workers.engines.simulated.timing import ConstantTiming

ASKED: dict[str, Any] = {"prompt": [300 + n for n in range(40)], "max_tokens": 150, "ignore_eos": True}
EACH = (("sql",), (), ("legal", "sql"))  # the adapters of w1, w2 and w3


@asynccontextmanager
async def fleet(*each: tuple[str, ...], **settings: Any) -> AsyncIterator[tuple[Kit, list[RealWorker]]]:
    """Run a frontend with a worker for each of these groups of adapters. The first with `sql` gets its requests."""
    async with frontend(moving={"setup_s": 0.0, "max_migration_time_ms": 10_000}, **settings) as kit:
        workers = []
        for number, adapters in enumerate(each, 1):
            engine = SimulatedEngine(EngineShape(adapters=adapters), ConstantTiming(itl_s=0.004))
            worker = await RealWorker(f"w{number}", engine).start()
            await kit.add(worker, **worker.facts)  # type: ignore[arg-type]
            workers.append(worker)
            if number > 1:
                kit.director.table.endpoints[worker.name, worker.instance].begin(requests=50)
        yield kit, workers


async def undisturbed() -> tuple[str, str]:
    """Return the answers with the adapter and without one."""
    async with fleet(("sql",)) as (kit, _):
        answers = [text_of(await kit.stream(model=model, **ASKED)) for model in ("sql", "m")]
    return answers[0], answers[1]


async def begun(kit: Kit, worker: RealWorker) -> "asyncio.Future[list[dict[str, Any]]]":
    """Begin a stream with the adapter, and wait until it has a few tokens."""
    asked = asyncio.ensure_future(kit.stream(model="sql", **ASKED))
    await until(lambda: any(len(live.accepted) > 5 for live in kit.running(worker.name, worker.instance)))
    return asked


async def test_a_killed_workers_stream_continues_exactly_where_the_adapter_is() -> None:
    expected, base = await undisturbed()
    async with fleet(*EACH) as (kit, (first, plain, other)):
        asked = await begun(kit, first)
        first.server.abort()
        assert text_of(await asked) == expected != base
        [moved] = kit.said(RequestMigrated)
        assert (moved.target, moved.exact, moved.method) == ("w3", True, "reprefill")
        assert (len(plain.requests), len(other.requests)) == (0, 1)


async def test_a_stream_moves_with_its_kv_cache_only_to_a_worker_that_has_the_adapter() -> None:
    expected, _ = await undisturbed()
    async with fleet(*EACH) as (kit, (first, plain, _)):
        asked = await begun(kit, first)
        kit.tell(MoveRequested(worker="w1", instance=first.instance, by="test"))
        assert text_of(await asked) == expected
        [moved] = kit.said(RequestMigrated)
        assert (moved.target, moved.exact, moved.method) == ("w3", True, "transfer")
        assert moved.blocks > 0 and plain.requests == []


async def test_a_stream_does_not_move_to_a_worker_without_the_adapter() -> None:
    expected, _ = await undisturbed()
    async with fleet(*EACH[:2]) as (kit, (first, plain)):
        asked = await begun(kit, first)
        kit.tell(MoveRequested(worker="w1", instance=first.instance, to="w2", by="test"))
        assert text_of(await asked) == expected
        assert kit.said(RequestMigrated) == [] and plain.requests == []


@pytest.mark.parametrize("each", [EACH[:1], EACH[:2]])
async def test_a_killed_workers_stream_ends_with_an_error_if_no_other_has_the_adapter(
    each: tuple[tuple[str, ...], ...],
) -> None:
    async with fleet(*each, reroute_s=0.2) as (kit, workers):
        asked = await begun(kit, workers[0])
        workers[0].server.abort()
        await workers[0].stop()
        error = (await asked)[-1]["error"]
        assert (error["code"], error["message"]) == (
            "disconnected",
            "Stream ended before generation completed",
        )
        assert all(worker.requests == [] for worker in workers[1:])
