"""Servers that compute vectors or scores only: how they join, and how their canaries are answered."""

import json
import math
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
from engine_contract import Rig
from upstream import OtherPath, Upstream

from events.wire import Generate, ProxiedRequest, Sampling
from workers.engines.engine import EngineDead
from workers.engines.openai.engine import OpenAIEngine
from workers.engines.openai.identity import UpstreamSettings
from workers.engines.openai.pooling import CANARIES, NUMBERS, projected, read_numbers
from workers.engines.openai.stream_decoder import Fault


def vectors(*values: list[float]) -> OtherPath:
    data = [{"object": "embedding", "index": place, "embedding": one} for place, one in enumerate(values)]
    return OtherPath([json.dumps({"object": "list", "data": data, "usage": {"prompt_tokens": 9}}).encode()])


def vector(seed: int = 1, size: int = 1024) -> list[float]:
    dice = random.Random(seed)
    return [dice.gauss(0, 1) for _ in range(size)]


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    server = Upstream(generates=False, others={"/v1/embeddings": vectors(vector())})
    await server.start()
    yield server
    await server.stop()


async def rigged(upstream: Upstream) -> Rig:
    rig = Rig(OpenAIEngine(UpstreamSettings(url=upstream.url)))
    await rig.start()
    return rig


async def canary(rig: Rig, **more: Any) -> list[float]:
    """Return the logprobs of the answer to a canary."""
    answer = await rig.ask([1, 2, 3], canary=True, prompt_text="a question", max_tokens=NUMBERS, **more)
    assert answer.finish == "length" and answer.tokens == [*range(1, NUMBERS + 1)]
    return [one.chosen for chunk in answer.chunks for one in chunk.logprobs or ()]


async def test_it_joins_and_answers_canaries_with_its_vector(upstream: Upstream) -> None:
    rig = await rigged(upstream)
    identity = rig.engine.identity
    assert identity.paths == ("/v1/embeddings",) and not identity.exact
    first, second = await canary(rig), await canary(rig)
    assert first == second and len(set(first)) > NUMBERS / 2
    assert json.loads(upstream.passed_on[-1][2]) == {"model": "up", "input": "a question"}
    await rig.engine.stop()


async def test_rounding_is_far_below_the_effect_of_a_fault(upstream: Upstream) -> None:
    rig = await rigged(upstream)
    right = await canary(rig)
    rounded = [one * (1 + 1e-3 * random.Random(place).uniform(-1, 1)) for place, one in enumerate(vector())]
    upstream.others["/v1/embeddings"] = vectors(rounded)
    noise = max(abs(a - b) for a, b in zip(right, await canary(rig), strict=True))
    wrong = vector()
    wrong[100:120] = [0.0] * 20  # twenty of 1,024 numbers
    upstream.others["/v1/embeddings"] = vectors(wrong)
    fault = max(abs(a - b) for a, b in zip(right, await canary(rig), strict=True))
    assert noise < 5e-3 < 0.1 < fault
    await rig.engine.stop()


async def test_a_vector_that_is_not_finite_is_a_fault(upstream: Upstream) -> None:
    rig = await rigged(upstream)
    upstream.others["/v1/embeddings"] = OtherPath([b'{"data": [{"embedding": [1.0, null]}]}'])
    answer = await rig.ask([1, 2, 3], canary=True, prompt_text="x")
    assert answer.error is not None and answer.error.startswith("non_finite")
    await rig.engine.stop()


async def test_users_requests_are_passed_on_and_tokens_are_refused(upstream: Upstream) -> None:
    rig = await rigged(upstream)
    proxied = ProxiedRequest("/v1/embeddings", b'{"input": "x"}')
    rig.engine.submit(key := rig.key(), Generate(1, "r", [], 1, Sampling(max_tokens=1), proxied=proxied))
    assert (await rig.answer(key)).finish == "stop"
    answer = await rig.ask([1, 2, 3], prompt_text="x")
    assert answer.error is not None and "does not serve /v1/completions" in answer.error
    await rig.engine.stop()


@pytest.mark.parametrize("path", CANARIES)
async def test_every_kind_of_pooling_server_joins(path: str) -> None:
    results: dict[str, list[object]] = {
        "/classify": [{"index": 0, "label": "b", "probs": [0.1, 0.9], "num_classes": 2}],
        "/score": [{"index": 0, "object": "score", "score": 0.25}],
    }
    name = "results" if path == "/rerank" else "data"
    ranked = [{"index": 1, "relevance_score": 0.5}, {"index": 0, "relevance_score": 0.125}]
    found = ranked if path == "/rerank" else results.get(path, [{"embedding": [0.5, 2.0]}])
    upstream = Upstream(generates=False, others={path: OtherPath([json.dumps({name: found}).encode()])})
    await upstream.start()
    rig = await rigged(upstream)
    assert len(await canary(rig)) == NUMBERS
    await rig.engine.stop()
    await upstream.stop()


async def test_a_server_that_computes_nothing_does_not_join() -> None:
    upstream = await Upstream(
        generates=False, others={"/v1/embeddings": OtherPath([b"{}"], status=500)}
    ).start()
    engine = OpenAIEngine(UpstreamSettings(url=upstream.url, start_s=0.1))
    with pytest.raises(EngineDead, match="computes neither tokens nor vectors nor scores"):
        await engine.start(lambda out: None)
    await upstream.stop()


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b'{"data": []}', b'{"data": [{"index": 3}]}', b'{"data": "x"}']
)
def test_a_response_without_numbers_is_a_fault(body: bytes) -> None:
    with pytest.raises(Fault):
        read_numbers(body)


def test_projected_numbers_are_of_equal_size_and_depend_on_every_number() -> None:
    one = projected(vector())
    assert 0.5 < math.sqrt(sum(value * value for value in one) / NUMBERS) < 1.5
    for place in range(0, 1024, 37):
        other = vector()
        other[place] += 3.0
        assert max(abs(a - b) for a, b in zip(one, projected(other), strict=True)) > 0.05
