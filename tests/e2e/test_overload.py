"""Overload of a fleet: queued requests are all served, and a degradation level reaches all workers.

The first has more requests than capacity, and nothing looks like a failure. The second has fewer workers than the objectives
need.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fleet import client, holdfast, running, undisturbed
from prometheus_client.parser import text_string_to_metric_families
from waits import until

from benchmarks.local_fleet import LocalFleet
from controller.deciders.capacity import Slo, worker_capacity
from events.observations import (
    RequestAbandoned,
    RequestFailed,
    RequestMigrated,
    RequestsRejected,
    WorkerJoined,
)
from events.process.presence import present
from workers.engines.simulated.engine import SimulatedEngine
from workers.engines.simulated.sequence import EngineShape
from workers.engines.simulated.timing import PREFILL_TOKENS_PER_S, ConstantTiming

FLAGS = ("--workers", "2", "--itl-ms", "30", "--canary-interval", "600")
SMALL = {
    "HOLDFAST_WORKER_BATCH_MAX": "2",
    "HOLDFAST_WORKER_WAITING_MAX": "2",
    "HOLDFAST_FRONTEND__ADMISSION__QUEUE_S": "120",  # however slow this machine is
}
REQUESTS, HELD = 40, 8
LONG, SHORT = 400, 40  # tokens: 12 s in which the others arrive, and 1 s


def tokens_of(number: int) -> int:
    return LONG if number < HELD else SHORT


async def counted(fleet: LocalFleet) -> tuple[float, float]:
    """Return the number of requests in the frontend's queue, and with workers, by its gauges."""
    (url,) = [process.url for process in present(fleet.data) if process.role == "frontend"]
    async with aiohttp.ClientSession() as http, http.get(f"{url}/metrics") as answer:
        families = list(text_string_to_metric_families(await answer.text()))
    values = {f.name: sum(s.value for s in f.samples) for f in families}
    return values.get("dynamo_frontend_queued_requests", 0), values.get(
        "dynamo_frontend_inflight_requests", 0
    )


@pytest.mark.attack
async def test_forty_requests_for_eight_places_wait_in_the_queue_and_are_all_served(tmp_path: Path) -> None:
    async with (
        running(tmp_path / "fleet", *FLAGS, environment=SMALL, stops=True) as fleet,
        client(fleet) as api,
    ):
        await fleet.healthy(2)

        async def ask(number: int) -> str:
            answer: Any = await api.with_options(timeout=120).completions.create(
                model="sim", prompt=[300 + number] * 8, max_tokens=tokens_of(number), temperature=0,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            return str(answer.choices[0].text)

        seen: set[tuple[float, float]] = set()

        async def watch(holds: Callable[[], bool]) -> None:
            async def look() -> bool:
                seen.add(await counted(fleet))
                return holds()

            await until(look, 120, every_s=0.05)

        asked = [asyncio.create_task(ask(number)) for number in range(HELD)]
        await watch(lambda: (0, HELD) in seen)
        asked += [asyncio.create_task(ask(number)) for number in range(HELD, REQUESTS)]
        await watch(lambda: all(one.done() for one in asked))
        answers = await asyncio.gather(*asked)
        assert answers == [undisturbed([300 + number] * 8, tokens_of(number)) for number in range(REQUESTS)]
        assert (REQUESTS - HELD, HELD) in seen, sorted(seen)
        assert max(held for _, held in seen) == HELD
        kinds = (RequestMigrated, RequestAbandoned, RequestFailed, RequestsRejected)
        assert not [event.fact for event in await fleet.events() if isinstance(event.fact, kinds)]


async def thresholds_hold_on_every_frontend(fleet: LocalFleet, http: aiohttp.ClientSession) -> None:
    """Set one at one frontend; see it at both."""
    urls = [f"{p.url}/busy_threshold" for p in present(fleet.data) if p.role == "frontend"]
    body = {"model": "sim", "active_decode_blocks_threshold": 0.75}
    async with http.post(urls[0], json=body) as answer:
        assert answer.status == 200
    async with asyncio.timeout(30):
        for url in urls:
            found: list[dict[str, Any]] = []
            while [one["active_decode_blocks_threshold"] for one in found] != [0.75]:
                async with http.get(url) as answer:
                    found = (await answer.json())["thresholds"]
    assert len(urls) == 2


BATCH, ITL_MS = 4, 20.0
ONE = SimulatedEngine(
    EngineShape(batch_max=BATCH), ConstantTiming(ITL_MS / 1e3, PREFILL_TOKENS_PER_S)
).identity.profile


@pytest.mark.attack
async def test_a_level_reaches_the_workers_schedulers_and_is_withdrawn(tmp_path: Path) -> None:
    """Two workers have some spare capacity for the objectives; one of them has a little more than half of it: level 2."""
    promised = 1.8 * worker_capacity(ONE, Slo()).effective_capacity_rps
    flags = (
        "--workers",
        "2",
        "--itl-ms",
        str(ITL_MS),
        "--canary-interval",
        "1",
        "--slo-throughput",
        str(promised),
    )
    tiers = ("--priority-tiers", "gold,lead", "--tier-default", "gold", "--frontends", "2")
    small = {"HOLDFAST_WORKER_BATCH_MAX": str(BATCH)}
    async with (
        running(tmp_path / "fleet", *flags, *tiers, environment=small, stops=True) as fleet,
        aiohttp.ClientSession() as http,
    ):
        await fleet.healthy(2)
        joined = [e.fact for e in await fleet.events() if isinstance(e.fact, WorkerJoined)]
        assert {fact.profile for fact in joined} == {ONE}

        async def slots() -> list[float]:
            urls = [process.url for process in present(fleet.data) if process.role == "worker"]
            found = []
            for url in urls:
                async with http.get(f"{url}/metrics") as answer:
                    families = text_string_to_metric_families(await answer.text())
                found += [
                    s.value for f in families for s in f.samples if s.name.endswith("_request_total_slots")
                ]
            return found

        async def until_slots(most: float) -> None:
            async def reached() -> bool:
                return await slots() == [most, most]

            await until(reached, 60, every_s=0.1)

        async def status_of(tier: str) -> int:
            body = {"model": "sim", "prompt": [300] * 8, "max_tokens": 2}
            async with http.post(
                f"{fleet.url}/v1/completions", json=body, headers={"X-Priority": tier}
            ) as answer:
                return answer.status

        await until_slots(BATCH)
        assert await status_of("lead") == 200
        await thresholds_hold_on_every_frontend(fleet, http)
        await asyncio.to_thread(holdfast, "drain", "w1", "--data", str(fleet.data))
        await fleet.until(lambda s: s["levels"] == {"sim": 2}, 60)
        assert [await status_of(tier) for tier in ("gold", "lead")] == [200, 503]
        await asyncio.to_thread(holdfast, "resume", "w1", "--data", str(fleet.data))
        await until_slots(BATCH * 3 / 4)
        await fleet.until(lambda s: s["levels"] == {"sim": 0}, 60)
        await until_slots(BATCH)
        assert await status_of("lead") == 200
