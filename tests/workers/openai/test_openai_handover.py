"""The openai engine moves a request with its KV cache by a handle, if the servers have a KV connector."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from engine_contract import Rig, asked, prompt
from upstream import Upstream

from workers.engines.engine import Import, MoveEnded, MoveRefused
from workers.engines.openai.engine import HANDLE_BYTES, OpenAIEngine, continued
from workers.engines.openai.identity import UpstreamSettings
from workers.kv_transfer.messages import Buffer

Eventually = Callable[..., Awaitable[None]]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 60, "ignore_eos": True}
TOKENS = prompt(50)


@pytest.fixture
async def upstreams() -> AsyncIterator[list[Upstream]]:
    servers = [await Upstream(connector=True, token_s=0.002).start() for _ in range(2)]
    yield servers
    for server in servers:
        await server.stop()


@pytest.fixture
async def rigs(upstreams: list[Upstream]) -> AsyncIterator[list[Rig]]:
    made = [Rig(OpenAIEngine(UpstreamSettings(url=server.url))) for server in upstreams]
    for rig in made:
        await rig.start()
    yield made
    for rig in made:
        await rig.engine.stop()


def reserved(rig: Rig, key: int, tokens: list[int], **sampling: Any) -> Import:
    found = rig.engine.reserve(key, asked(key, tokens, len(TOKENS), **sampling), len(tokens) + 64)
    assert not isinstance(found, str), found
    return found


async def under_way(rig: Rig, count: int = 10, **sampling: Any) -> int:
    key = rig.submit(TOKENS, **sampling)
    await rig.until(lambda: len(rig.answers[key].tokens) >= count)
    return key


async def test_a_stream_continues_at_another_server_with_its_cache(
    rigs: list[Rig], upstreams: list[Upstream]
) -> None:
    source, target = rigs
    whole = (await source.ask(TOKENS, **GREEDY)).tokens
    key = await under_way(source, **GREEDY)
    export = source.engine.export(key)
    assert export is not None
    there = target.key()
    known = list(source.answers[key].tokens)
    room = reserved(target, there, TOKENS + known, **{**GREEDY, "max_tokens": 60 - len(known)})
    await source.until(lambda: len(source.answers[key].tokens) > len(known))  # it continues in the meantime
    stopped = await export.stop()
    said = source.answers[key].tokens
    assert list(stopped.tokens) == TOKENS + said
    await room.take(0, 0, await export.blocks(0, 0, 1))
    await room.commit(stopped.tokens, stopped.computed)
    export.close()
    source.engine.cancel(key)
    answer = await target.answer(there)
    assert said + answer.tokens == whole
    assert answer.finish == "length"
    body = upstreams[1].bodies[-1]
    assert body["kv_transfer_params"]["remote_engine_id"] == upstreams[0].url
    assert body["prompt"] == list(stopped.tokens)


async def test_a_stopped_stream_can_resume_at_its_server(rigs: list[Rig]) -> None:
    source = rigs[0]
    whole = (await source.ask(TOKENS, **GREEDY)).tokens
    key = await under_way(source, **GREEDY)
    export = source.engine.export(key)
    assert export is not None
    await export.stop()
    stopped = len(source.answers[key].tokens)
    assert (await source.ask(TOKENS, **GREEDY)).tokens == whole
    assert len(source.answers[key].tokens) == stopped
    export.resume()
    export.close()
    assert (await source.answer(key)).tokens == whole


async def test_a_server_that_gives_no_handle_in_time_continues_itself(
    upstreams: list[Upstream],
) -> None:
    source = Rig(OpenAIEngine(UpstreamSettings(url=upstreams[0].url, handle_s=0.05)))
    await source.start()
    whole = (await source.ask(TOKENS, **GREEDY)).tokens
    upstreams[0].stalled_handles = True
    key = await under_way(source, **GREEDY)
    export = source.engine.export(key)
    assert export is not None
    with pytest.raises(MoveEnded, match="gives no handle"):
        await export.stop()
    assert (await source.answer(key)).tokens == whole
    await source.engine.stop()


async def test_a_finished_request_cannot_be_handed_over(rigs: list[Rig]) -> None:
    source = rigs[0]
    key = await under_way(source, **GREEDY)
    export = source.engine.export(key)
    assert export is not None
    source.engine.cancel(key)
    with pytest.raises(MoveEnded, match="over"):
        await export.stop()
    assert source.engine.export(key) is None


async def test_a_cancelled_stopped_stream_does_not_continue(
    rigs: list[Rig], upstreams: list[Upstream]
) -> None:
    source = rigs[0]
    key = await under_way(source, **GREEDY)
    export = source.engine.export(key)
    assert export is not None
    await export.stop()
    source.engine.cancel(key)
    asked_before = len(upstreams[0].bodies)
    export.resume()
    await source.ask(TOKENS, **GREEDY)
    assert len(upstreams[0].bodies) == asked_before + 1, "this request alone"
    assert not source.engine.load().running


@pytest.mark.parametrize("words", [b"\x00" * HANDLE_BYTES, b"[1, 2]", b""])
async def test_an_invalid_handle_is_refused(rigs: list[Rig], words: Buffer) -> None:
    target = rigs[1]
    room = reserved(target, target.key(), TOKENS, **GREEDY)
    await room.take(0, 0, words)
    with pytest.raises(MoveRefused, match="not a handle"):
        await room.commit([*TOKENS, 300], len(TOKENS))


async def test_a_server_without_a_connector_neither_sends_nor_receives() -> None:
    server = await Upstream(token_s=0.002).start()
    rig = Rig(OpenAIEngine(UpstreamSettings(url=server.url)))
    await rig.start()
    key = await under_way(rig, **GREEDY)
    assert rig.engine.kv == ()
    assert rig.engine.export(key) is None
    found = rig.engine.reserve(9, asked(9, TOKENS, None, **GREEDY), 100)
    assert isinstance(found, str)
    assert "no KV connector" in found
    await rig.engine.stop()
    await server.stop()


def test_a_continued_request_does_not_ask_for_prompt_logprobs() -> None:
    request = asked(1, prompt(), max_tokens=20, min_tokens=9, prompt_logprobs=3, logprobs=2)
    rest = continued(request, [*prompt(), 300, 301]).sampling
    assert (rest.max_tokens, rest.min_tokens, rest.prompt_logprobs, rest.logprobs) == (18, 7, None, 2)
