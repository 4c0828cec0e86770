"""Opt-in: the openai engine against real servers, two of each kind with the same model.

    make test-llamacpp        builds llama-server, starts two of them, and runs this against them
    make test-vllm            installs vLLM for the CPU, and does the same with two of those
    HOLDFAST_TEST_LLAMACPP_URLS=URL,URL pytest -m llamacpp tests/workers/openai/test_real_upstreams.py   two running servers
    HOLDFAST_TEST_VLLM_URLS=URL,URL pytest -m vllm tests/workers/openai/test_real_upstreams.py             the same

The results are in docs/guides/engines.md.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from typing import Any

import pytest
from engine_contract import Answer, Rig
from llamacpp import LlamaServer

from events.wire import Generate, Sampling
from workers.engines.openai.engine import OpenAIEngine
from workers.engines.openai.identity import UpstreamSettings
from workers.engines.openai.upstream import Upstream

PROMPT = [40 + n * 7 % 1900 for n in range(48)]  # valid ids for any vocabulary of 2,048
TEXT = "def main(argv):\n    parser = ArgumentParser(description="
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 32, "ignore_eos": True}


def urls(variable: str, request: pytest.FixtureRequest) -> list[str]:
    """Return the two servers named by a variable, or two of the tests' own, or skip."""
    found = [url for url in os.environ.get(variable, "").split(",") if url]
    if not found:
        fixture = "llamas" if "LLAMACPP" in variable else "vllms"
        found = [server.url for server in request.getfixturevalue(fixture)]
    if len(found) < 2:
        pytest.skip(f"{variable}=URL,URL names no two servers: make test-llamacpp, make test-vllm")
    return found[:2]


@pytest.fixture(
    params=[
        pytest.param("HOLDFAST_TEST_VLLM_URLS", marks=pytest.mark.vllm),
        pytest.param("HOLDFAST_TEST_LLAMACPP_URLS", marks=pytest.mark.llamacpp),
    ]
)
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Rig, Rig]]:
    """Two engines in front of two servers."""
    rigs = [Rig(OpenAIEngine(UpstreamSettings(url=url))) for url in urls(request.param, request)]
    for rig in rigs:
        await rig.start()
    yield rigs[0], rigs[1]
    for rig in rigs:
        await rig.engine.stop()


def exact(rig: Rig) -> bool:
    return rig.engine.identity.exact


def text(answer: Answer) -> str:
    return "".join(chunk.text or "" for chunk in answer.chunks)


async def test_a_stream_completes(pair: tuple[Rig, Rig]) -> None:
    answer = await pair[0].ask(PROMPT, prompt_text=TEXT, **GREEDY)
    assert (answer.error, answer.finish) == (None, "length")
    assert len(answer.tokens) == 32 if exact(pair[0]) else text(answer)


async def test_a_canary_has_the_same_answer_on_both(pair: tuple[Rig, Rig]) -> None:
    answers = [await rig.ask(PROMPT, prompt_text=TEXT, canary=True, logprobs=5, **GREEDY) for rig in pair * 2]
    assert all(answer.error is None and answer.tokens for answer in answers)
    assert all(answer.tokens == answers[0].tokens for answer in answers)


@pytest.mark.llamacpp
async def test_a_canary_is_not_answered_from_the_prefix_cache(llamas: list[LlamaServer]) -> None:
    upstream = Upstream(llamas[0].url, "", 8)
    sampling = Sampling(max_tokens=4, temperature=0.0)
    computed: list[int] = []
    try:
        abilities = await upstream.abilities()
        for canary in (False, False, True):
            request = Generate(1, "r", PROMPT, len(PROMPT), sampling, canary=canary)
            async with upstream.complete(abilities, request) as response:
                events = [line for line in (await response.text()).splitlines() if line.startswith("data: {")]
            computed.append(json.loads(events[-1][6:])["timings"]["prompt_n"])
    finally:
        await upstream.close()
    assert computed[1:] == [1, len(PROMPT)]


async def test_a_cut_answer_continues_on_the_other(pair: tuple[Rig, Rig]) -> None:
    here, there = pair
    whole = await here.ask(PROMPT, prompt_text=TEXT, **GREEDY)
    if not exact(here):
        rest = await there.ask(PROMPT, prompt_text=TEXT + text(whole)[:20], **GREEDY)
        assert text(rest)
        return
    cut = whole.tokens[:11]
    rest = await there.ask(PROMPT + cut, prompt=len(PROMPT), **{**GREEDY, "max_tokens": 21})
    assert cut + rest.tokens == whole.tokens


async def test_a_cancelled_stream_leaves_the_server_healthy(pair: tuple[Rig, Rig]) -> None:
    rig = pair[0]
    key = rig.submit(PROMPT, prompt_text=TEXT, **{**GREEDY, "max_tokens": 1000})
    await rig.until(lambda: rig.answers[key].chunks)
    rig.engine.cancel(key)
    assert rig.engine.load().running == 0
    assert (await rig.ask(PROMPT, prompt_text=TEXT, **GREEDY)).finish == "length"
    await rig.engine.check()


async def test_eight_concurrent_streams_complete(pair: tuple[Rig, Rig]) -> None:
    rig = pair[0]
    keys = [rig.submit([*PROMPT, 300 + n], prompt_text=f"{TEXT}{n}", **GREEDY) for n in range(8)]
    ends = await asyncio.gather(*(rig.answer(key) for key in keys))
    assert [end.finish for end in ends] == ["length"] * 8


async def test_a_client_error_is_reported_as_one(pair: tuple[Rig, Rig]) -> None:
    rig = pair[0]
    answer = await rig.ask(PROMPT, prompt_text=TEXT, temperature=-1.0, max_tokens=4)
    assert answer.error is None or answer.error.startswith("invalid_request: ")
