"""The retry manager with real processes: a worker's death and shutdown under several limits.

Three frontends and their workers are real processes. One frontend may migrate, one may not, and one may but its requests are
over its cap. `tests/frontend/dispatch/test_retry_manager.py` has the whole matrix in one process.
"""

import asyncio
import contextlib
import itertools
import json
import signal
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families
from roles import Process, Roles
from waits import until

from controller.adapters.embedded.free_port import free_port

TOKENS = 600  # six seconds: a busy machine needs some to see that all are running
NO_PLANNED_MOVES = {
    "HOLDFAST_FRONTEND__MOVING__ON_DRAIN": "finish"
}  # planned moves are no failures, and cost no retries
FRONTENDS = {
    "free": ["--migration-limit", "3", "--migration-max-seq-len", "1000000"],
    "off": ["--migration-limit", "0"],
    "capped": ["--migration-limit", "3", "--migration-max-seq-len", "1"],
}


class Rig(Roles):
    """Workers, and three frontends for all of them. With a broker, requests pass through it, and a controller tells the frontends
    where to send them."""

    def __init__(self, data: Path, http: aiohttp.ClientSession) -> None:
        super().__init__(data, http)
        self.broker = ""
        self.urls: dict[str, str] = {}

    async def fleet(self, workers: int) -> list[Process]:
        """Start everything, and wait until every frontend reaches every worker."""
        ports = [free_port() for _ in range(workers)]
        sim = ["--model", "m", "--itl-ms", "10", "--admin-port", "-1", "--grace-s", "0.2"]
        way = ["--static", ",".join(f"127.0.0.1:{port}" for port in ports)]
        if self.broker:
            way = ["--request-plane", "nats", "--nats-url", self.broker]
            sim += way
            await self.start("controller", *way)
        made = [
            await self.start("worker", "--name", f"static-{n}", "--port", str(p), *sim)
            for n, p in enumerate(ports)
        ]
        for name, flags in FRONTENDS.items():
            port = free_port()
            self.urls[name] = f"http://127.0.0.1:{port}"
            await self.start(
                "frontend", "--name", name, *way, "--port", str(port), *flags, **NO_PLANNED_MOVES
            )
        for name in FRONTENDS:
            await until(partial(self._reaches, name, workers), 30, every_s=0.05)
        return made

    async def _reaches(self, name: str, workers: int) -> bool:
        if not (url := self.admin(name)):
            return False
        async with self.http.get(url + "/health") as answer:
            endpoints = (await answer.json())["workers"]
        if sum(w["reachable"] and w["weight"] == 1 for w in endpoints) != workers:
            return False
        with contextlib.suppress(aiohttp.ClientConnectorError):  # its clients' port opens last
            async with self.http.get(self.urls[name] + "/health") as answer:
                return answer.status == 200
        return False

    async def busy_for_all(self, among: dict[str, Process]) -> str:
        """Return one of these workers that answers requests of every frontend."""
        found = set(among)
        for name in FRONTENDS:
            async with self.http.get(self.admin(name) + "/health") as answer:
                found &= {w["id"] for w in (await answer.json())["workers"] if w["in_flight"]}
        assert found, "no worker answers requests of every frontend"
        return min(found)

    async def ask(self, frontend: str, number: int, chat: bool, stream: bool) -> tuple[str, str]:
        """Return the text of an answer and the code of its error."""
        body: dict[str, Any] = {"model": "m", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        prompt = f"question {number}"
        body |= {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
        url = f"{self.urls[frontend]}/v1/{'chat/' if chat else ''}completions"
        async with self.http.post(url, json=body | {"stream": stream}) as answer:
            if not stream or answer.status != 200:
                events = [await answer.json()]
            else:
                events = [
                    json.loads(line[6:]) async for line in answer.content if line.startswith(b"data: {")
                ]
        pieces = [_text(choice) for event in events for choice in event.get("choices", ())]
        return "".join(pieces), next((event["error"]["code"] for event in events if "error" in event), "")

    async def counted(self, frontend: str, name: str) -> float:
        """Return the value of a counter, over all of its labels."""
        async with self.http.get(self.admin(frontend) + "/metrics") as answer:
            families = text_string_to_metric_families(await answer.text())
        return sum(
            s.value for family in families for s in family.samples if s.name == f"dynamo_frontend_{name}"
        )

    async def underway(self, tokens: int) -> None:
        """Wait until every frontend has relayed this number of further tokens."""
        wanted = {name: await self.counted(name, "output_tokens_total") + tokens for name in FRONTENDS}

        async def relayed() -> bool:
            return all(
                [await self.counted(name, "output_tokens_total") >= wanted[name] for name in FRONTENDS]
            )

        await until(relayed)


def _text(choice: dict[str, Any]) -> str:
    return choice.get("text") or (choice.get("delta") or choice.get("message") or {}).get("content") or ""


@pytest.fixture(params=["tcp", "nats"])
async def rig(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Rig]:
    broker = request.getfixturevalue("nats_url") if request.param == "nats" else ""
    async with Rig.on(tmp_path) as made:
        made.broker = broker
        yield made


FORMS = list(itertools.product((True, False), (True, False)))  # chat or not, streamed or whole
ASKS = [(number, *FORMS[number % 4]) for number in range(12)]


@pytest.mark.attack
async def test_a_killed_and_a_stopping_worker_have_the_effects_that_the_limits_define(rig: Rig) -> None:
    workers = {f"static-{n}": process for n, process in enumerate(await rig.fleet(3))}
    expected = [
        text for text, _ in await asyncio.gather(*(rig.ask("free", n, chat, False) for n, chat, _ in ASKS))
    ]
    for sent, codes in ((signal.SIGKILL, {"disconnected"}), (signal.SIGTERM, {"engine_shutdown"})):
        before = {name: await rig.counted(name, "model_migration_total") for name in FRONTENDS}
        asking = {name: [asyncio.create_task(rig.ask(name, *ask)) for ask in ASKS] for name in FRONTENDS}
        await rig.underway(10 * len(ASKS))
        victim = workers.pop(await rig.busy_for_all(workers))
        victim.send_signal(sent)
        for name, tasks in asking.items():
            answers = await asyncio.gather(*tasks)
            broken = [number for number, (_, error) in enumerate(answers) if error]
            moved = await rig.counted(name, "model_migration_total") - before[name]
            assert moved >= 1, (name, sent)
            if name == "free":
                assert [text for text, _ in answers] == expected
                continue
            assert {answers[number][1] for number in broken} == codes
            assert len(broken) == moved
            for (_, _, stream), (text, error), whole in zip(ASKS, answers, expected, strict=True):
                assert whole.startswith(text) if error and stream else text == ("" if error else whole)
        await victim.wait()
    too_long = {
        name: await rig.counted(name, "model_migration_max_seq_len_exceeded_total") for name in FRONTENDS
    }
    assert too_long == {"free": 0, "off": 0, "capped": 2 * len(ASKS)}
