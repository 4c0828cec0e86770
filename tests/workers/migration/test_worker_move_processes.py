"""Streams that move between two worker processes, one of which may be killed in the middle."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engine_contract import prompt
from move_kit import SAMPLING, Cancel, Committed, Declined, alone
from plain_frontend import PlainFrontend
from worker_process import Process, Spawn

from events.wire import Generate, Reserve, Reserved, Sampling, Ship
from workers.kv_transfer.receiver import PREFIX, ROOT, sweep

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/shm: run it on Linux")
COUNT = 1500
FLAGS = ("--itl-ms", "1", "--tp", "2", "--kv-block-bytes", "65536", "--admin-port", "-1")
Eventually = Callable[..., Awaitable[None]]


@dataclass
class Side:
    """A worker process, and a frontend connected to it."""

    name: str
    process: Process
    frontend: PlainFrontend

    @property
    def folder(self) -> Path:
        return ROOT / f"{PREFIX}{self.process.ready[0]['instance']}"

    async def wait_for(self, kind: type[Any], stream: int) -> Any:
        found: list[Any] = []

        def has() -> bool:
            found[:] = [f for f in self.frontend.of(kind) if f.stream == stream]
            return bool(found)

        await self.frontend.until(has)
        return found[0]

    @property
    def free(self) -> bool:
        load = self.frontend.beats[-1].load
        return not (load.kv_used or load.running)


@asynccontextmanager
async def side(spawn: Spawn, eventually: Eventually, name: str) -> AsyncIterator[Side]:
    process = await spawn("--name", name, *FLAGS)
    await eventually(lambda: process.ready, 20)
    frontend = await PlainFrontend.connect(process.port())
    yield Side(name, process, frontend)
    frontend.transport.abort()


@dataclass
class Pair:
    source: Side
    target: Side
    tokens: list[int]
    stream: int = 0
    accepted: int = 0

    async def begin(self) -> None:
        """Send a request to the source, and reserve room at the target."""
        frontend = self.source.frontend
        self.stream = frontend.ask(self.tokens, max_tokens=COUNT, **SAMPLING)
        await frontend.until(lambda: len(frontend.tokens(self.stream)) > 2)
        tokens = frontend.tokens(self.stream)
        self.accepted = len(tokens)
        left = Sampling(**{"max_tokens": COUNT - len(tokens), "ignore_eos": True, **SAMPLING})
        request = Generate(0, f"r{self.stream}", self.tokens + tokens, len(self.tokens), left)
        self.target.frontend.say(Reserve(1, request, len(self.tokens) + len(tokens) + 1500))
        self.grants = (await self.target.wait_for(Reserved, 1)).grants

    def ship(self) -> None:
        self.source.frontend.say(Ship(self.stream, self.grants))

    async def undisturbed(self) -> list[int]:
        return await alone(self.tokens, max_tokens=COUNT, ignore_eos=True, **SAMPLING)


@pytest.fixture
async def pair(spawn: Spawn, eventually: Eventually) -> AsyncIterator[Pair]:
    async with side(spawn, eventually, "w1") as source, side(spawn, eventually, "w2") as target:
        yield Pair(source, target, prompt(1000))
    await asyncio.to_thread(sweep)


@pytest.mark.slow
async def test_a_stream_moves_between_processes_and_nothing_is_left_behind(
    pair: Pair, eventually: Eventually
) -> None:
    source, target = pair.source, pair.target
    assert not source.folder.exists() and not target.folder.exists(), (
        "a worker without incoming moves has no files"
    )
    await pair.begin()
    assert target.folder.exists()
    pair.ship()
    committed = await target.wait_for(Committed, 1)
    assert committed.link == "shm" and committed.bytes > 2 * 62 * 65536
    count = pair.accepted + len(committed.tokens)
    await source.frontend.until(lambda: len(source.frontend.tokens(pair.stream)) >= count)
    source.frontend.say(Cancel(pair.stream))
    whole = source.frontend.tokens(pair.stream)[:count] + await target.frontend.answer(1)
    assert whole == await pair.undisturbed()
    await eventually(lambda: source.free and target.free)
    for one in (source, target):
        one.process.inner.terminate()
        assert await one.process.ended() == 0
    assert not source.folder.exists() and not target.folder.exists()


@pytest.mark.slow
@pytest.mark.parametrize("when", ["reserved", "shipping", "committed"])
async def test_the_stream_stays_at_its_source_if_the_target_is_killed(pair: Pair, when: str) -> None:
    await pair.begin()
    source, target = pair.source, pair.target
    if when != "reserved":
        pair.ship()
    if when == "committed":
        await target.wait_for(Committed, 1)
    target.process.inner.send_signal(signal.SIGKILL)
    await target.process.ended()
    if when == "reserved":
        pair.ship()
    assert (await source.wait_for(Declined, pair.stream)).reason  # or the target did not take over in time
    assert await source.frontend.answer(pair.stream) == await pair.undisturbed()
    await source.frontend.until(lambda: source.free)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["shipping", "committed"])
async def test_a_killed_source_leaves_nothing_at_the_target(
    pair: Pair, eventually: Eventually, when: str
) -> None:
    await pair.begin()
    source, target = pair.source, pair.target
    pair.ship()
    if when == "committed":
        await target.wait_for(Committed, 1)
    source.process.inner.send_signal(signal.SIGKILL)
    await source.process.ended()
    if when == "committed":
        committed = await target.wait_for(Committed, 1)
        whole = await pair.undisturbed()
        assert committed.tokens + await target.frontend.answer(1) == whole[pair.accepted :]
    else:
        target.frontend.cancel(1)
    await eventually(lambda: target.free)
    target.process.inner.terminate()
    assert await target.process.ended() == 0
    assert not target.folder.exists()


@pytest.mark.slow
async def test_the_next_worker_that_starts_sweeps_the_region_of_a_target_that_was_killed(
    pair: Pair, spawn: Spawn, eventually: Eventually
) -> None:
    await pair.begin()
    target = pair.target
    assert list(target.folder.iterdir()), "it holds the reserved region"
    target.process.inner.send_signal(signal.SIGKILL)
    await target.process.ended()
    async with side(spawn, eventually, "w3"):
        assert not target.folder.exists()
