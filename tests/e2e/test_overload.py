"""More requests than there is room for: they wait in line, all are served, and nothing looks like a failure."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
from fleet import client, running, undisturbed
from prometheus_client.parser import text_string_to_metric_families

from controller.demo.fleet import DemoFleet
from events.observations import RequestAbandoned, RequestFailed, RequestMigrated, RequestsRejected
from events.process.presence import present

FLAGS = ("--workers", "2", "--itl-ms", "30", "--canary-interval", "600")
SMALL = {
    "HOLDFAST_WORKER_BATCH_MAX": "2",
    "HOLDFAST_WORKER_WAITING_MAX": "2",
    "HOLDFAST_FRONTEND__ADMISSION__QUEUE_S": "120",  # however slow this machine is
}
REQUESTS, HELD = 40, 8
LONG, SHORT = 400, 40  # tokens: 12 s in which the others come, and 1 s


def tokens_of(number: int) -> int:
    return LONG if number < HELD else SHORT


async def counted(fleet: DemoFleet) -> tuple[float, float]:
    """Return how many requests wait in the frontend's line, and how many are with workers, by its gauges."""
    (url,) = [process.url for process in present(fleet.data) if process.role == "frontend"]
    async with aiohttp.ClientSession() as http, http.get(f"{url}/metrics") as answer:
        families = list(text_string_to_metric_families(await answer.text()))
    values = {f.name: sum(s.value for s in f.samples) for f in families}
    return values.get("dynamo_frontend_queued_requests", 0), values.get(
        "dynamo_frontend_inflight_requests", 0
    )


async def test_forty_at_once_for_eight_places_wait_in_line_and_are_all_served(tmp_path: Path) -> None:
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
            while not holds():
                seen.add(await counted(fleet))
                await asyncio.sleep(0.05)

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
