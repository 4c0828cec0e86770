"""A group lost its link but is still readable: its streams move, with their KV cache, to its spare."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from frontend_kit import PROFILE, TOKENS, Kit, frontend, text_of
from json_types import Json
from moving_worker import MovingWorker
from scripted_worker import undisturbed
from waits import turns, until

from events.decisions import HealthStatus, SpareActivated
from events.observations import DeviceFaulted, KvLayout, RequestMigrated

PROMPT = [300 + n for n in range(40)]
KV = KvLayout(layers=2, kv_heads=2, head_size=8, element_bytes=2)
GROUP: Json = {"kv": KV, "profile": replace(PROFILE, prefill_tokens_per_s=100.0)}
NOW = datetime.now(UTC)


class Lost:
    """A worker that streams, others that serve, and a spare."""

    def __init__(self, kit: Kit, source: MovingWorker) -> None:
        self.kit, self.source = kit, source
        self.asked: list[asyncio.Task[Any]] = []

    async def stream(self, count: int) -> None:
        """Start this many streams, and return when all of them have tokens."""
        for _ in range(count):
            ask: Json = {"model": "m", "prompt": PROMPT, "max_tokens": 400}
            self.asked.append(asyncio.create_task(self.kit.stream(**ask)))
        await until(lambda: len(self.source.running) == count)
        running = self.source.running
        await until(lambda: all(len(one.tokens) > len(PROMPT) + 3 for one in running.values()))

    def device(self) -> None:
        self.kit.tell(
            DeviceFaulted(
                worker="w1", instance="i1", device="GPU-1", fault_class="nvlink", fatal=False, weight=0.0
            )
        )

    def decided(self) -> None:
        """Let the controller activate the spare in the worker's place."""
        self.kit.health(self.source, HealthStatus.HEALTHY, 0.0, "device_limit")
        self.kit.tell(
            SpareActivated(
                worker="s1",
                instance="i1",
                replaces="w1",
                reason="device GPU-1 nvlink",
                number=9,
                decided_at=NOW,
            )
        )

    async def moved(self) -> Sequence[RequestMigrated]:
        for task in self.asked:
            assert text_of(await task) == TOKENS.decode(undisturbed(PROMPT, 400))
        return self.kit.said(RequestMigrated)


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 8])
async def test_streams_of_a_lost_group_move_to_its_spare(tp: int) -> None:
    async with frontend(moving={"max_migration_time_ms": 10_000}) as kit:
        source, other, spare = (MovingWorker(name, step_s=0.004) for name in ("w1", "w2", "s1"))
        await kit.add(source, tp=tp, **GROUP)
        lost = Lost(kit, source)
        await lost.stream(4)
        await kit.add(other, tp=tp, **GROUP)
        await kit.add(spare, tp=tp, spare=True, **GROUP)
        lost.device()
        await turns()
        assert not other.reservations and not spare.reservations, "the streams must wait for the spare"
        lost.decided()
        moves = await lost.moved()
        assert {(move.method, move.target, move.cause) for move in moves} == {
            ("transfer", "s1", "device_fault")
        }
        assert len(moves) == 4


async def test_a_lost_worker_without_a_stream_leaves_nothing_to_move() -> None:
    async with frontend() as kit:
        source, spare = MovingWorker("w1"), MovingWorker("s1")
        await kit.add(source, **GROUP)
        await kit.add(spare, spare=True, **GROUP)
        lost = Lost(kit, source)
        lost.device()
        lost.decided()
        status, _, headers = await kit.post("/v1/completions", model="m", prompt=PROMPT, max_tokens=2)
        assert (status, headers["X-Holdfast-Worker"]) == (200, "s1")


async def test_without_a_spare_streams_move_to_the_others_at_once() -> None:
    async with frontend(moving={"max_migration_time_ms": 10_000}) as kit:
        source, other = MovingWorker("w1", step_s=0.004), MovingWorker("w2", step_s=0.004)
        await kit.add(source, **GROUP)
        lost = Lost(kit, source)
        await lost.stream(2)
        await kit.add(other, **GROUP)
        lost.device()
        assert {(move.method, move.target) for move in await lost.moved()} == {("transfer", "w2")}


async def test_a_spare_gets_no_request_before_it_is_activated() -> None:
    async with frontend() as kit:
        worker, spare = MovingWorker("w1"), MovingWorker("s1")
        await kit.add(spare, spare=True, **GROUP)
        status, body, _ = await kit.post("/v1/completions", model="m", prompt=PROMPT, max_tokens=2)
        assert status == 503, body
        await kit.add(worker, **GROUP)
        for _ in range(6):
            status, body, _ = await kit.post("/v1/completions", model="m", prompt=PROMPT, max_tokens=2)
            assert status == 200, body
        assert len(worker.requests) == 6 and not spare.requests
