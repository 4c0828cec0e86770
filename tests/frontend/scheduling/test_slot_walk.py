"""Random walks of slots: however and wherever a request ends, its slot is freed exactly once."""

import asyncio
from collections import Counter
from contextlib import suppress
from random import Random
from typing import Any

import aiohttp
import pytest
from frontend_kit import Kit, check_slot_counts, frontend
from scripted_worker import Act, ScriptedWorker
from waits import turns, until

from controller.frontend.errors import internal
from controller.router.load.active_sequences import ActiveSequences, RankWork, RequestId
from events.decisions import HealthStatus
from events.observations import RequestMigrated

REQUESTS = 80
MODES = ("kv", "kv", "least-loaded", "power-of-two", "round-robin", "random")
ROOM = {"inflight_max": 2, "queue_max": 6, "queue_s": 0.05, "first_token_s": 0.1}


class SlotCounts:
    """Counts how often each slot is added and freed."""

    def __init__(self, slots: ActiveSequences) -> None:
        self.given: Counter[RequestId] = Counter()
        self.freed: Counter[RequestId] = Counter()
        self.slots = slots
        self._add, self._free = slots.add, slots.free
        slots.add, slots.free = self.add, self.free  # type: ignore[method-assign]

    def add(self, request: RequestId, *what: Any, **more: Any) -> bool:
        self.given[request] += 1
        return self._add(request, *what, **more)

    def free(self, request: RequestId, *, now: float) -> bool:
        self.freed[request] += 1
        return self._free(request, now=now)


def act(random: Random) -> Act:
    """Return how a worker serves its next request."""
    how = random.choice(
        ("finish", "finish", "finish", "finish", "error", "error", "error", "disconnect", "finish_late")
    )
    errors = ("engine_error: it broke", "invalid_request: no", "overloaded", "engine_shutdown", "nonsense")
    after = None if how == "finish" else random.randint(0, 8)
    hold = asyncio.Event() if how == "error" and random.random() < 0.2 else None  # the error is never sent
    return Act(after=after, how=how, error=random.choice(errors), hold=hold)


async def ask(kit: Kit, random: Random, ended: Counter[str]) -> None:
    """Send a request, and possibly disconnect before its answer."""
    body = {
        "model": "m", "prompt": [300 + random.randint(0, 3)] * random.randint(1, 60), "n": random.randint(1, 2),
        "max_tokens": random.randint(1, 20), "stream": random.random() < 0.5,
    }  # fmt: skip
    headers = {"X-Holdfast-Router-Mode": random.choice(MODES)}
    patience = random.choice((0.0, 0.005, 0.02, 5.0, 5.0, 5.0, 5.0))
    try:
        async with (
            asyncio.timeout(patience),
            kit.http.post(kit.url + "/v1/completions", json=body, headers=headers) as response,
        ):
            text = await response.text()
            ended[str(response.status) if "error" not in text else "error"] += 1
    except TimeoutError:
        ended["gone"] += 1
    except aiohttp.ClientError:
        ended["cut"] += 1


async def trouble(kit: Kit, random: Random, workers: list[ScriptedWorker]) -> None:
    """Break connections, cut off answers, and take workers out of service and back."""
    while True:
        await kit.ticks(1)
        check_slot_counts(kit.director)
        worker = random.choice(workers)
        what = random.random()
        if what < 0.4:
            worker.drop()
        elif what < 0.5:
            for exchange in list(kit.api.openai.completions)[:1]:
                exchange.finish(internal())  # as at the end of a frontend's grace period
                kit.director.driver.cancel(exchange.answers)
        else:
            kit.health(worker, HealthStatus.UNHEALTHY, 0.0)
            await kit.ticks(1)
            kit.health(worker, HealthStatus.HEALTHY, 1.0)


@pytest.mark.parametrize("seed", range(2))
async def test_every_slot_is_added_and_freed_once(seed: int) -> None:
    random, ended = Random(seed), Counter[str]()
    workers = [ScriptedWorker(f"w{n}", step_s=0.002) for n in range(3)]
    for worker in workers:
        worker.acts.extend(act(random) for _ in range(40))
    counting = {"track_output_blocks": seed > 0, "prefill_load_model": "profile" if seed else "none"}
    async with frontend(*workers, admission=ROOM, reroute_s=0.2, router=counting) as kit:
        counts = SlotCounts(kit.director.routing.slots)
        troubled = asyncio.create_task(trouble(kit, random, workers))
        asked = []
        for _ in range(REQUESTS):
            asked.append(asyncio.create_task(ask(kit, random, ended)))
            await (kit.ticks(1) if random.random() < 0.1 else turns())
        await asyncio.wait(asked, timeout=20)
        troubled.cancel()
        with suppress(asyncio.CancelledError):
            await troubled
        await until(lambda: not len(counts.slots))
        for holder in counts.slots.holders:
            assert counts.slots.work(holder, now=kit.director.now()) == RankWork()
        for endpoint in kit.director.table.endpoints.values():
            assert (endpoint.active, endpoint.kept.requests, endpoint.tokens) == (0, 0, 0)
            assert not kit.director.running.at(endpoint)
        assert kit.director.admission.queued("m") == 0
        moves = len(kit.said(RequestMigrated))
    assert counts.given and set(counts.given.values()) == set(counts.freed.values()) == {1}
    assert counts.given == counts.freed
    assert moves and ended["200"] and ended["gone"] and ended["error"], ended
