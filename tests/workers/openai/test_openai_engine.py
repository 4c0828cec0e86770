"""The openai engine against a test double of an upstream: the engine contract, and all its faults."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from engine_contract import EngineContract, Rig, prompt
from upstream import Upstream
from waits import turns

from events.wire import Chunk, Generate, Sampling
from workers.engines.engine import CANARIES_MAX, Engine, EngineDead, Phase
from workers.engines.openai.capabilities import Abilities
from workers.engines.openai.engine import OpenAIEngine
from workers.engines.openai.identity import UpstreamSettings
from workers.engines.openai.requests import JOINS_WITHIN_S
from workers.engines.openai.stream_decoder import UpstreamStream
from workers.engines.openai.upstream import NOTHING_ADDED
from workers.engines.openai.upstream import Upstream as Client

Eventually = Callable[..., Awaitable[None]]


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    server = await Upstream().start()
    yield server
    await server.stop()


@pytest.fixture
async def rig(upstream: Upstream) -> AsyncIterator[Rig]:
    async for rig in rigged(upstream):
        yield rig


async def rigged(upstream: Upstream, **settings: Any) -> AsyncIterator[Rig]:
    rig = Rig(OpenAIEngine(UpstreamSettings(url=upstream.url, **settings)))
    await rig.start()
    yield rig
    await rig.engine.stop()


class TestOverTokenIds(EngineContract):
    """An upstream like vLLM."""

    @pytest.fixture
    async def engine(self, upstream: Upstream) -> Engine:
        upstream.token_s = 0.0005
        return OpenAIEngine(UpstreamSettings(url=upstream.url))

    @pytest.mark.skip(reason="an upstream cannot tell replayed tokens from the prompt: penalties start anew")
    async def test_penalties_count_replayed_tokens(self, rig: Rig) -> None: ...

    @pytest.mark.skip(
        reason="an upstream cannot tell replayed tokens from the prompt, which is no part of a word"
    )
    async def test_a_bad_word_is_found_across_a_cut(self, rig: Rig) -> None: ...


async def test_biases_and_min_p_are_sent_to_the_upstream(upstream: Upstream) -> None:
    async for rig in rigged(upstream):
        await rig.ask(prompt(), temperature=0.5, min_p=0.2, logit_bias={300: -100.0, 301: 2.5}, max_tokens=2)
        asked = upstream.bodies[-1]
        assert (asked["min_p"], asked["logit_bias"]) == (0.2, {"300": -100.0, "301": 2.5})
        await rig.ask(prompt(), max_tokens=2)
        assert upstream.bodies[-1]["min_p"] == 0.0 and "logit_bias" not in upstream.bodies[-1]


# --- identity of the upstream


@pytest.mark.parametrize(
    ("manner", "exact", "version"),
    [
        ("vllm", True, "0.32.0"),
        ("llamacpp", False, "b7777"),
        ("strict", False, "b7777"),
        ("text", False, "b7777"),
    ],
)
async def test_the_upstreams_abilities_are_probed(
    upstream: Upstream, manner: Any, exact: bool, version: str
) -> None:
    upstream.manner = manner
    async for rig in rigged(upstream, tokenizer="/models/x", revision="r7"):
        identity = rig.engine.identity
        assert (identity.model, identity.exact, identity.engine_version) == ("up", exact, version)
        assert (identity.context_tokens, identity.tokenizer, identity.revision) == (2048, "/models/x", "r7")
        assert identity.profile.tpot_ms[0][1] > 0


async def test_a_text_only_upstream_is_sent_text(upstream: Upstream) -> None:
    upstream.manner = "text"
    async for rig in rigged(upstream):
        answer = await rig.ask(prompt(), prompt_text="OnFaultChange it.", max_tokens=5)
        assert upstream.bodies[-1]["prompt"] == "OnFaultChange it."
        assert answer.tokens == []
        assert "".join(chunk.text or "" for chunk in answer.chunks).count("<") == 5
        assert answer.finish == "length"
        refused = await rig.ask(prompt())
        assert refused.error == "invalid_request: this model's server takes text only, no token ids"


@pytest.mark.parametrize("manner", ["llamacpp", "strict", "text"])
async def test_canaries_are_compared_by_numbers_even_if_users_get_text(
    upstream: Upstream, manner: Any
) -> None:
    upstream.manner = manner
    async for rig in rigged(upstream):
        canaries = [await rig.ask(prompt(salt=salt), canary=True) for salt in (0, 0, 1)]
        assert canaries[0].tokens == canaries[1].tokens != canaries[2].tokens
        assert len(canaries[0].tokens) > 10


async def test_an_upstream_that_omits_tokens_is_not_exact(upstream: Upstream) -> None:
    upstream.manner = "llamacpp"
    async for rig in rigged(upstream):
        canary = await rig.ask(prompt(), max_tokens=40, canary=True)
        assert 20 < len(canary.tokens) < 40  # some are missing, and a replay would be wrong
        user = await rig.ask(prompt(), max_tokens=40, prompt_text="x")
        assert user.tokens == []
        assert upstream.bodies[-1]["prompt"] == prompt()


async def test_a_late_upstream_is_awaited(upstream: Upstream) -> None:
    port = int(upstream.url.rsplit(":", 1)[1])
    await upstream.stop()
    rig = Rig(OpenAIEngine(UpstreamSettings(url=upstream.url)))
    starting = asyncio.ensure_future(rig.start())
    await turns()
    late = await Upstream().start(port)
    await starting
    assert (await rig.ask(prompt())).finish == "length"
    await rig.engine.stop()
    await late.stop()


async def test_a_missing_upstream_is_reported_with_the_reason(upstream: Upstream) -> None:
    await upstream.stop()
    with pytest.raises(EngineDead, match=r"after 0 s: cannot connect to http://127.0.0.1:\d+ \("):
        await Rig(OpenAIEngine(UpstreamSettings(url=upstream.url, start_s=0.0))).start()


async def test_an_upstream_that_refuses_everything_is_quoted(upstream: Upstream) -> None:
    upstream.context = 4
    with pytest.raises(
        EngineDead, match="completes neither token ids nor text: this model's maximum context"
    ):
        await Rig(OpenAIEngine(UpstreamSettings(url=upstream.url, start_s=0.0))).start()


async def test_an_upstream_is_dead_after_three_failed_checks(upstream: Upstream, rig: Rig) -> None:
    await rig.engine.check()
    upstream.healthy = False
    await rig.engine.check()
    await rig.engine.check()
    with pytest.raises(EngineDead, match="/health answers 503"):
        await rig.engine.check()


async def test_one_failed_check_is_tolerated(upstream: Upstream, rig: Rig) -> None:
    for healthy in (False, False, True, False, False):
        upstream.healthy = healthy
        await rig.engine.check()


# --- requests


STANDARD = {"model": "up", "prompt": prompt(), "max_tokens": 4, "temperature": 0.0, "stream": True}


async def test_an_upstream_is_sent_values_that_its_model_might_override(upstream: Upstream, rig: Rig) -> None:
    await rig.ask(prompt(), max_tokens=4, ignore_eos=False)
    assert upstream.bodies == [{**STANDARD, **NOTHING_ADDED, "return_token_ids": True}]


async def test_a_standard_upstream_is_sent_only_standard_fields(upstream: Upstream) -> None:
    upstream.manner = "strict"
    async for rig in rigged(upstream):
        await rig.ask(prompt(), max_tokens=4, ignore_eos=False)
    assert upstream.bodies == [STANDARD]


@pytest.mark.parametrize("canary", [True, False])
async def test_the_defaults_of_an_upstreams_model_change_no_answer(
    upstream: Upstream, rig: Rig, canary: bool
) -> None:
    right = await rig.ask(prompt(), canary=canary)
    upstream.defaults = {"repetition_penalty": 1.5, "top_p": 0.1, "top_k": 3}
    answer = await rig.ask(prompt(), canary=canary)
    assert answer.tokens == right.tokens
    sampled = {"temperature": 1.0, "seed": 7}
    answer = await rig.ask(prompt(), canary=canary, **sampled)
    upstream.defaults = {}
    assert answer.tokens == (await rig.ask(prompt(), canary=canary, **sampled)).tokens


async def test_a_canary_is_salted_so_that_no_cache_answers_for_it(upstream: Upstream, rig: Rig) -> None:
    for _ in range(2):
        await rig.ask(prompt(), canary=True)
    salts = [body["cache_salt"] for body in upstream.bodies]
    assert len(set(salts)) == 2
    assert all(len(salt) >= 16 for salt in salts)


async def test_a_canary_is_recomputed_if_salts_are_not_supported(upstream: Upstream) -> None:
    upstream.manner = "llamacpp"
    async for rig in rigged(upstream):
        await rig.ask(prompt(), canary=True)
        await rig.ask(prompt(), prompt_text="x")
    assert [body.get("cache_prompt") for body in upstream.bodies] == [False, None]


async def test_no_connection_is_reused_because_the_upstream_may_close_it(upstream: Upstream) -> None:
    client = Client(upstream.url, "", 8)
    request = Generate(1, "r", prompt(), 40, Sampling(max_tokens=1))
    for _ in range(3):
        async with client.complete(Abilities("up", token_prompts=True), request) as response:
            assert b"[DONE]" in await response.read()
    await client.close()
    assert len(set(upstream.peers)) == 3


async def test_an_upstream_gets_the_clients_trace(upstream: Upstream, rig: Rig) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    for given in (trace, ""):
        await rig.ask(prompt(), max_tokens=2, traceparent=given)
    assert upstream.traces == [trace, None]


async def test_a_cancelled_stream_is_closed_at_the_upstream(
    upstream: Upstream, rig: Rig, eventually: Eventually
) -> None:
    upstream.token_s = 0.02
    key = rig.submit(prompt(), max_tokens=1500)
    await rig.until(lambda: rig.answers[key].tokens)
    rig.engine.cancel(key)
    await eventually(lambda: upstream.abandoned == 1 and upstream.streaming == 0)  # of 30 s


async def test_requests_are_bounded(upstream: Upstream) -> None:
    upstream.fault, upstream.after = "stall", 0
    async for rig in rigged(upstream, batch_max=2, waiting_max=1):
        keys = [rig.submit(prompt(salt=n)) for n in range(4)]
        answer = await rig.answer(keys[3])
        assert (answer.error or "").startswith("overloaded: ")
        assert (rig.engine.load().running, rig.engine.load().waiting) == (2, 1)
        for n in range(CANARIES_MAX):
            rig.submit(prompt(salt=10 + n), canary=True)
        assert rig.engine.load().waiting == 1 + CANARIES_MAX, "a full worker is checked, too"


async def test_a_stalled_upstream_shows_in_the_age_of_the_step(upstream: Upstream, rig: Rig) -> None:
    upstream.fault = "stall"
    key = rig.submit(prompt())
    await rig.until(lambda: len(rig.answers[key].tokens) == 3)
    since = rig.engine.phase().since
    upstream.after = 0
    rig.submit(prompt(salt=1))  # more work does not make a stuck engine look alive
    await rig.until(lambda: len(upstream.bodies) == 2)
    assert rig.engine.phase() == Phase("prefill", since, 40)
    await asyncio.sleep(JOINS_WITHIN_S)  # of the real clock, by which the engine counts
    rig.submit(prompt(salt=2))  # requests that arrived after its step began do not excuse its length either
    await rig.until(lambda: len(upstream.bodies) == 3)
    assert rig.engine.phase() == Phase("prefill", since, 40)


# --- faults of an upstream

STREAM_FAULTS = [
    ("abort", "engine_error: the upstream ended the request itself (abort)"),
    ("error_then_done", "engine_error: the upstream reports an error: EngineCore died"),
    ("done_without_finish", "stream_incomplete: "),
    ("no_finish", "stream_incomplete: "),
    ("not_json", "engine_error: the upstream sent what is not JSON"),
    ("odd_choice", "engine_error: the upstream sent an event that makes no sense"),
    ("odd_choices", "engine_error: the upstream sent an event that makes no sense"),
    ("odd_ids", "engine_error: the upstream calls None a token id"),
    ("cut", "upstream_lost: the upstream's connection broke"),
    ("too_many", "engine_error: more than the 16 tokens asked for"),
    ("long_line", "engine_error: the upstream sent a line of more than"),
    ("null_logprob", "non_finite: a logprob is None"),
    ("zeros", "non_finite: 8 times token id 0 in a row"),
]


@pytest.mark.parametrize(("fault", "error"), STREAM_FAULTS)
async def test_a_fault_in_the_stream_is_an_error_not_an_answer(
    upstream: Upstream, rig: Rig, fault: str, error: str
) -> None:
    right = (await rig.ask(prompt(), logprobs=2)).tokens
    upstream.fault = fault
    answer = await rig.ask(prompt(), logprobs=2)
    assert (answer.error or "").startswith(error)
    assert answer.finish is None
    assert answer.tokens == right[:3]  # good tokens before the fault are kept, and no bad token passes


@pytest.mark.parametrize(
    ("fault", "error"),
    [pair for pair in STREAM_FAULTS if pair[0] not in ("zeros", "too_many", "null_logprob", "odd_ids")],
)
async def test_a_fault_in_a_stream_of_text_is_an_error_too(
    upstream: Upstream, fault: str, error: str
) -> None:
    upstream.manner, upstream.fault = "text", fault
    async for rig in rigged(upstream):
        answer = await rig.ask(prompt(), prompt_text="OnFaultChange it.")
        assert (answer.error or "").startswith(error)
        assert "".join(chunk.text or "" for chunk in answer.chunks).count("<") == 3


@pytest.mark.parametrize(
    ("status", "canary", "error"),
    [
        (500, False, "engine_error: the upstream answers 500: told to answer 500"),
        (503, False, "engine_error: the upstream answers 503"),
        (404, False, "engine_error: the upstream answers 404"),
        (401, False, "engine_error: the upstream answers 401"),
        (429, False, "overloaded: "),
        (400, False, "invalid_request: told to answer 400"),
        (422, False, "invalid_request: "),
        (400, True, "engine_error: the upstream answers 400"),
        (422, True, "engine_error: "),
    ],
)
async def test_a_refusal_is_a_client_or_a_server_error(
    upstream: Upstream, rig: Rig, status: int, canary: bool, error: str
) -> None:
    upstream.fault = f"http_{status}"
    answer = await rig.ask(prompt(), canary=canary)
    assert (answer.error or "").startswith(error)


# --- zeros that are tokens, and zeros that are not


def read(
    *tokens: list[int], most: int = 50, canary: bool = False, finish: str | None = "length"
) -> list[Chunk]:
    """Return the chunks of a stream of token ids, the last one with a finish reason."""
    reading = UpstreamStream(Generate(1, "r", [5], 1, Sampling(max_tokens=most), canary), "token_ids")
    chunks: list[Chunk] = []
    for place, ids in enumerate(tokens):
        reason = f'"{finish}"' if finish and place == len(tokens) - 1 else "null"
        chunks += reading.feed(
            f'data: {{"choices": [{{"token_ids": {ids}, "finish_reason": {reason}}}]}}\n'.encode()
        )
    return chunks + reading.end()


def test_a_zero_is_held_back_until_something_else_follows() -> None:
    assert [chunk.tokens for chunk in read([7], [0], [0], [8])] == [[7], [0, 0, 8]]


def test_zeros_at_the_end_of_an_answer_are_part_of_it() -> None:
    assert [(chunk.tokens, chunk.finish) for chunk in read([7], [0], [0])] == [
        ([7], None),
        ([0, 0], "length"),
    ]


@pytest.mark.parametrize(
    ("zeros", "canary", "good"), [(1, False, True), (3, False, True), (4, False, False), (1, True, False)]
)
def test_an_answer_of_only_zeros_is_an_error(zeros: int, canary: bool, good: bool) -> None:
    last = read(*[[0]] * zeros, canary=canary)[-1]
    assert (last.error is None) is good


def test_bytes_may_arrive_one_by_one() -> None:
    reading = UpstreamStream(Generate(1, "r", [5], 1, Sampling(max_tokens=9)), "token_ids")
    stream = b'data: {"choices": [{"token_ids": [7, 8], "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'
    chunks = [chunk for place in range(len(stream)) for chunk in reading.feed(stream[place : place + 1])]
    assert [(chunk.tokens, chunk.finish) for chunk in chunks] == [([7, 8], "stop")]
    assert reading.end() == []


async def test_omitted_client_values_are_omitted_upstream(upstream: Upstream, rig: Rig) -> None:
    """The server's own defaults decide, as if the client had asked it directly; a canary leaves nothing out."""
    names = ["temperature", "top_p", "top_k", "min_p"]
    names += ["repetition_penalty", "presence_penalty", "frequency_penalty"]
    await rig.ask(prompt(), unset=names, max_tokens=2)
    assert not set(names) & set(upstream.bodies[-1])
    await rig.ask(prompt(), unset=names[2:], max_tokens=2, temperature=0.5, top_p=1.0)
    asked = upstream.bodies[-1]
    assert (asked["temperature"], asked["top_p"]) == (0.5, 1.0)
    assert not set(names[2:]) & set(asked)
    await rig.ask(prompt(), max_tokens=2, canary=True)
    assert set(names) <= set(upstream.bodies[-1])
