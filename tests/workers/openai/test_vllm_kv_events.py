"""Opt-in (make test-vllm): the KV events of a real vLLM match its prefix cache."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from engine_contract import Rig
from vllm_servers import FOLDER, VllmServer, folder

from benchmarks.local_fleet import LocalFleet
from events import blocks
from events.kv import Cleared, KvEvent, Removed, Stored
from workers.engines.openai.engine import OpenAIEngine
from workers.engines.openai.identity import UpstreamSettings

pytestmark = pytest.mark.vllm
Eventually = Callable[..., Awaitable[None]]
BLOCK = 32
ANSWER: dict[str, Any] = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True}


class Index:
    """A router's view of it."""

    def __init__(self) -> None:
        self.blocks: set[int] = set()
        self.removed = 0

    def __call__(self, rank: int, events: list[KvEvent]) -> None:
        has = set(self.blocks)
        for event in events:
            match event:
                case Stored(blocks=names, parent=parent):
                    assert parent is None or parent in has
                    has.update(names)
                case Removed(blocks=names):
                    assert has.issuperset(names)
                    has.difference_update(names)
                    self.removed += len(names)
                case Cleared():
                    has.clear()
        self.blocks = has

    def depth(self, tokens: Sequence[int]) -> int:
        """Return how many tokens of a prompt are cached, in whole blocks."""
        for place, name in enumerate(blocks.sequence_hashes(blocks.local_hashes(tokens, BLOCK))):
            if name not in self.blocks:
                return place * BLOCK
        return len(tokens) // BLOCK * BLOCK


def prompt(salt: int, length: int) -> list[int]:
    return [300 + (17 * n + 101 * salt + n * n) % 1500 for n in range(length)]


async def started(server: VllmServer) -> tuple[Rig, Index]:
    index = Index()
    settings = UpstreamSettings(url=server.url, kv_events=[server.events], kv_replays=[server.replays])
    rig = Rig(OpenAIEngine(settings))
    await rig.engine.start(rig.deliver, index)
    assert rig.engine.announces
    return rig, index


@pytest.fixture
async def both(vllms: list[VllmServer]) -> AsyncIterator[tuple[Rig, Index]]:
    rig, index = await started(vllms[0])
    yield rig, index
    await rig.engine.stop()


async def hits(server: VllmServer) -> float:
    return await asyncio.to_thread(server.metric, "vllm:prefix_cache_hits_total")


async def test_blocks_are_announced_once_they_are_cached_and_canaries_never(
    both: tuple[Rig, Index], eventually: Eventually
) -> None:
    rig, index = both
    assert rig.engine.identity.profile.block_tokens == BLOCK
    tokens = prompt(1, 100)
    await rig.ask(tokens, canary=True, **ANSWER)
    before = len(index.blocks)
    await rig.ask(tokens, **ANSWER)
    await eventually(lambda: index.depth(tokens) == 96)
    assert len(index.blocks) == before + 3
    await rig.ask([*tokens[:64], *prompt(2, 64)], **ANSWER)
    await eventually(lambda: index.depth([*tokens[:64], *prompt(2, 64)]) == 128)
    assert len(index.blocks) == before + 5


async def test_a_late_subscriber_receives_everything(
    both: tuple[Rig, Index], vllms: list[VllmServer], eventually: Eventually
) -> None:
    rig, index = both
    tokens = prompt(3, 200)
    await rig.ask(tokens, **ANSWER)
    await eventually(lambda: index.depth(tokens) == 192)
    late, other = await started(vllms[0])
    await eventually(lambda: other.blocks == index.blocks)
    await late.engine.stop()


async def test_the_events_of_a_full_cache_match_its_hits(
    both: tuple[Rig, Index], vllms: list[VllmServer], eventually: Eventually
) -> None:
    rig, index = both
    room = rig.engine.identity.profile.kv_blocks
    for salt in range(10, 16):  # six times 4,000 tokens; it has room for 16,000
        await rig.ask(prompt(salt, 4000), **ANSWER)
    await eventually(lambda: index.depth(prompt(15, 4000)) == 4000)
    assert index.removed and len(index.blocks) <= room
    for salt in (15, 13, 10):
        tokens, before = prompt(salt, 4000), await hits(vllms[0])
        said = index.depth(tokens)
        await rig.ask(tokens, **ANSWER)
        found = await hits(vllms[0]) - before
        assert found == min(said, 4000 - BLOCK), salt  # the last token is computed in any case


async def test_a_block_with_two_copies_stays_until_both_are_removed(
    both: tuple[Rig, Index], eventually: Eventually
) -> None:
    rig, index = both
    tokens = prompt(30, 300)
    keys = [rig.submit(tokens, **ANSWER) for _ in range(4)]
    for key in keys:
        await rig.answer(key)
    await eventually(lambda: index.depth(tokens) == 288)
    for salt in range(40, 46):
        await rig.ask(prompt(salt, 4000), **ANSWER)
    await eventually(lambda: index.depth(prompt(45, 4000)) == 4000)
    assert index.depth(tokens) == 0
    assert len(index.blocks) <= rig.engine.identity.profile.kv_blocks


async def test_a_killed_and_restarted_server_has_an_empty_cache(
    tmp_path: Path, eventually: Eventually
) -> None:
    if (made := folder()) is None:
        pytest.skip(f"{FOLDER} names no folder: make test-vllm")
    (server,) = VllmServer.start(made, [tmp_path / "log"])
    try:
        rig, index = await started(server)
        tokens = prompt(50, 100)
        await rig.ask(tokens, **ANSWER)
        await eventually(lambda: index.depth(tokens) == 96)
        server.kill()
        server.begin()
        await asyncio.to_thread(server.wait)
        await eventually(lambda: not index.blocks)
        await rig.ask(tokens, **ANSWER)
        await eventually(lambda: index.depth(tokens) == 96)
        await rig.engine.stop()
    finally:
        server.kill()


async def test_its_load_comes_from_its_metrics(both: tuple[Rig, Index], eventually: Eventually) -> None:
    rig, _ = both
    keys = [rig.submit(prompt(60 + n, 40), **{**ANSWER, "max_tokens": 400}) for n in range(12)]
    await eventually(lambda: rig.engine.load().waiting == 4)  # it runs 8 at once
    load = rig.engine.load()
    assert load.running == 8 and 0 < load.kv_used <= load.kv_total
    for key in keys:
        rig.engine.cancel(key)
    await eventually(lambda: rig.engine.load().running == 0)


async def test_prompts_return_to_the_server_that_has_their_prefix(
    vllms: list[VllmServer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Through a whole fleet. Random routing would find half of them."""
    made = folder()
    upstreams = chain.from_iterable(
        ("--upstream", s.url, "--upstream-kv-events", s.events, "--upstream-kv-replay", s.replays)
        for s in vllms
    )
    fleet = await LocalFleet.start(
        tmp_path, "--engine", "openai", "--model", f"{made}/tiny", *upstreams
    ).ready()
    try:
        await fleet.healthy(2)
        found = await found_again(fleet, vllms, [prompt(70 + n, 640) for n in range(12)])
    finally:
        assert await asyncio.to_thread(fleet.stop) == 0
    with capsys.disabled():
        print(f"\n{found:.0f} of {12 * 608} tokens found again", end=" ", flush=True)
    assert found >= 0.9 * 12 * 608  # the last block is computed in any case


async def found_again(fleet: LocalFleet, vllms: list[VllmServer], prompts: list[list[int]]) -> float:
    """Send every prompt twice; return how many tokens the servers had cached the second time."""

    async def all_hits() -> float:
        return sum([await hits(server) for server in vllms])

    async def ask(session: aiohttp.ClientSession, prompt: list[int]) -> None:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "ignore_eos": True}
        async with session.post("/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()

    async with aiohttp.ClientSession(fleet.url) as session:
        for one in prompts:
            await ask(session, one)
        before = await all_hits()
        for one in prompts:
            await ask(session, one)
    return await all_hits() - before
