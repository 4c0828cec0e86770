"""Opt-in (make test-vllm): moves between two real vLLM servers, with the KV cache and by re-prefill."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from engine_contract import Rig, asked
from vllm_servers import FOLDER, VllmServer, folder

from workers.engines.engine import Export, Import
from workers.engines.openai.engine import OpenAIEngine
from workers.engines.openai.identity import UpstreamSettings

pytestmark = pytest.mark.vllm
CUT, TOKENS = 40, 200  # on a busy machine the stream is still running at its cut
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[VllmServer]]:
    """Two servers with vLLM's NIXL connector."""
    if (made := folder()) is None:
        pytest.skip(f"{FOLDER} names no folder: make test-vllm")
    logs = tmp_path_factory.mktemp("pair")
    servers = VllmServer.start(made, [logs / f"{name}.log" for name in "ab"], connector=True)
    yield servers
    for server in servers:
        server.kill()


@asynccontextmanager
async def rigged(server: VllmServer) -> AsyncIterator[Rig]:
    rig = Rig(OpenAIEngine(UpstreamSettings(url=server.url)))
    await rig.start()
    try:
        yield rig
    finally:
        await rig.engine.stop()


async def begun(rig: Rig, prompt: list[int]) -> int:
    key = rig.submit(prompt, **GREEDY, max_tokens=TOKENS)
    await rig.until(lambda: len(rig.answers[key].tokens) >= CUT)
    return key


async def first_token_ms(rig: Rig, key: int, since: float) -> float:
    await rig.until(lambda: rig.answers[key].tokens)
    return (asyncio.get_running_loop().time() - since) * 1e3


async def by_cache(source: Rig, target: Rig, prompt: list[int]) -> tuple[list[int], float]:
    """Move a stream with its cache; return all its tokens, and the pause."""
    key = await begun(source, prompt)
    export = source.engine.export(key)
    assert export is not None
    there, known = target.key(), list(source.answers[key].tokens)
    rest = asked(there, prompt + known, len(prompt), **GREEDY, max_tokens=TOKENS - len(known))
    room = target.engine.reserve(there, rest, len(prompt) + TOKENS)
    assert not isinstance(room, str), room
    since = asyncio.get_running_loop().time()
    await moved(export, room)
    source.engine.cancel(key)
    pause_ms = await first_token_ms(target, there, since)
    return source.answers[key].tokens + (await target.answer(there)).tokens, pause_ms


async def moved(export: Export, room: Import) -> None:
    stopped = await export.stop()
    await room.take(0, 0, await export.blocks(0, 0, 1))
    await room.commit(stopped.tokens, stopped.computed)
    export.close()


async def by_replay(source: Rig, target: Rig, prompt: list[int]) -> tuple[list[int], float]:
    """Move a stream by re-prefill; return all its tokens, and the pause."""
    key = await begun(source, prompt)
    since = asyncio.get_running_loop().time()
    source.engine.cancel(key)
    said = source.answers[key].tokens
    there = target.submit(prompt + said, prompt=len(prompt), **GREEDY, max_tokens=TOKENS - len(said))
    pause_ms = await first_token_ms(target, there, since)
    return said + (await target.answer(there)).tokens, pause_ms


@pytest.mark.parametrize("length", [200, 1000, 3000])
async def test_a_stream_moves_exactly_by_either_method(
    pair: list[VllmServer], length: int, capsys: pytest.CaptureFixture[str]
) -> None:
    dice, pauses = random.Random(length), dict[str, list[float]]()
    async with rigged(pair[0]) as source, rigged(pair[1]) as target:
        assert source.engine.kv
        for name, method in (("KV hand-over", by_cache), ("re-prefill", by_replay)) * 2:
            prompt = [dice.randrange(10, 1800) for _ in range(length)]
            whole, pause_ms = await method(source, target, prompt)
            undisturbed = (await target.ask(prompt, **GREEDY, max_tokens=TOKENS)).tokens
            assert whole == undisturbed
            pauses.setdefault(name, []).append(pause_ms)
    with capsys.disabled():  # the purpose of this test: the figures
        print(f"\nA stream with a prompt of {length} tokens moves from vLLM to vLLM, without a token for")
        for name, (first, again) in pauses.items():
            print(f"  {first:.0f} ms by {name}, {again:.0f} ms the next time", flush=True)
