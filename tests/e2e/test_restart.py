"""A rolling restart of all workers under load is unnoticed by users."""

import asyncio
import sys

import pytest
from fleet import client, running

from benchmarks.local_fleet import LocalFleet
from events.observations import WorkerLeft

WORKERS = 3
STREAMS_AT_ONCE = 16
TOKENS = 60


async def answer(fleet: LocalFleet, prompt: int) -> str:
    """Read one streamed answer to its end."""
    text = ""
    async with client(fleet) as api:
        stream = await api.completions.create(
            model="sim", prompt=[300 + prompt] * 20, max_tokens=TOKENS, temperature=0, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        async for chunk in stream:
            text += chunk.choices[0].text if chunk.choices else ""
    return text


@pytest.mark.slow
async def test_a_rolling_restart_fails_and_alters_nothing(tmp_path_factory: pytest.TempPathFactory) -> None:
    flags = ("--workers", str(WORKERS), "--itl-ms", "10", "--canary-interval", "0.5")
    async with running(tmp_path_factory.mktemp("rolling"), *flags) as fleet:
        before = {w["id"]: w["pid"] for w in (await fleet.healthy(WORKERS))["workers"]}
        expected = await asyncio.gather(*(answer(fleet, n) for n in range(STREAMS_AT_ONCE)))
        command = (sys.executable, "-m", "controller.cli", "restart", "--rolling", "--data", str(fleet.data))
        process = await asyncio.create_subprocess_exec(*command)
        restarting = asyncio.ensure_future(process.wait())

        async def user(number: int) -> list[str]:
            said = []
            while not restarting.done():
                said.append(await answer(fleet, number))
            return said

        async with asyncio.timeout(120):
            users = await asyncio.gather(*(user(n) for n in range(STREAMS_AT_ONCE)))
            assert await restarting == 0
        for said, whole in zip(users, expected, strict=True):
            assert said and set(said) == {whole}
        after = {w["id"]: w["pid"] for w in (await fleet.healthy(WORKERS))["workers"]}
        assert set(after) == set(before) and not set(after.values()) & set(before.values())
        left = [e.fact for e in await fleet.events() if isinstance(e.fact, WorkerLeft)]
        assert [(f.worker, f.mode, f.exit) for f in left] == [(w, "graceful", 0) for w in sorted(before)]
