"""Opt-in (make test-vllm): behaviour specific to vLLM."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
from engine_contract import Rig
from vllm_servers import VllmServer, folder

from controller.frontend.openai.text.tokenizer import load_tokens
from events.wire import Generate, Sampling
from workers.engines.engine import EngineDead
from workers.engines.openai.engine import OpenAIEngine
from workers.engines.openai.identity import UpstreamSettings
from workers.engines.openai.stream_decoder import UpstreamStream
from workers.engines.openai.upstream import Upstream

PROMPT = [300 + (11 * k) % 1500 for k in range(40)]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 32, "ignore_eos": True}

pytestmark = pytest.mark.vllm
Eventually = Callable[..., Awaitable[None]]


async def rigged(server: VllmServer) -> AsyncIterator[Rig]:
    rig = Rig(OpenAIEngine(UpstreamSettings(url=server.url)))
    await rig.start()
    yield rig
    await rig.engine.stop()


@pytest.fixture
async def rig(vllms: list[VllmServer]) -> AsyncIterator[Rig]:
    async for rig in rigged(vllms[0]):
        yield rig


async def test_its_identity_is_detected(rig: Rig) -> None:
    identity = rig.engine.identity
    assert (identity.model, identity.engine_version, identity.context_tokens) == ("tiny", "0.32.0", 4096)
    assert identity.exact


async def test_the_token_that_ends_an_answer_is_its_last(rig: Rig) -> None:
    whole = (await rig.ask(PROMPT, **GREEDY)).tokens
    stop = whole[20]
    answer = await rig.ask(PROMPT, **GREEDY, stop_token_ids=[stop])
    assert (answer.finish, answer.tokens) == ("stop", whole[: whole.index(stop) + 1])


async def test_every_token_has_logprobs_best_first(rig: Rig) -> None:
    answer = await rig.ask(PROMPT, **GREEDY, logprobs=3)
    assert len(answer.logprobs) == len(answer.tokens) == 32
    for token, logprob in zip(answer.tokens, answer.logprobs, strict=True):
        assert logprob.top[0] == (token, logprob.chosen)
        assert [value for _, value in logprob.top] == sorted((v for _, v in logprob.top), reverse=True)


@pytest.mark.parametrize(
    ("guided", "answers"),
    [
        (
            {"guided_choice": ["yes", "no"]},
            {"yes", "no"},
        ),  # a name that current vLLM does not know, and would ignore
        ({"guided_regex": "ab|cd"}, {"ab", "cd"}),
        ({"guided_grammar": 'root ::= "ab" | "cd"'}, {"ab", "cd"}),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, {"yes", "no"}),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "boolean"}},
                }
            },
            {"true", "false"},
        ),
    ],
)
async def test_a_constraint_is_obeyed_under_either_name(
    rig: Rig, vllms: list[VllmServer], guided: dict[str, Any], answers: set[str]
) -> None:
    key = rig.key()
    rig.engine.submit(key, Generate(key, "r", PROMPT, len(PROMPT), Sampling(max_tokens=16), guided=guided))
    answer = await rig.answer(key)
    assert answer.finish == "stop", answer.error
    assert load_tokens(str(vllms[0].model)).decode(answer.tokens) in answers


async def test_biases_and_min_p_are_obeyed(rig: Rig) -> None:
    whole = (await rig.ask(PROMPT, **GREEDY)).tokens
    without = (await rig.ask(PROMPT, **GREEDY, logit_bias={whole[3]: -100.0})).tokens
    assert without[: whole.index(whole[3])] == whole[: whole.index(whole[3])] and whole[3] not in without
    assert (await rig.ask(PROMPT, **GREEDY, logit_bias={700: 100.0})).tokens == [700] * 32
    warm = GREEDY | {"temperature": 1.5, "seed": 3}
    assert (
        (await rig.ask(PROMPT, **warm, min_p=1.0)).tokens == whole != (await rig.ask(PROMPT, **warm)).tokens
    )


@pytest.mark.parametrize("top", [0, 3])
async def test_logprobs_of_a_prompt_are_those_of_an_answer(rig: Rig, top: int) -> None:
    said = await rig.ask(PROMPT, **GREEDY, logprobs=3)
    whole = PROMPT + said.tokens
    answer = await rig.ask(whole, max_tokens=4, prompt_logprobs=top, logprobs=1)
    assert len(answer.logprobs) == len(whole) + 4
    for ours, theirs in zip(said.logprobs, answer.logprobs[len(PROMPT) : len(whole)], strict=True):
        assert theirs.chosen == pytest.approx(ours.chosen, abs=1e-4)
        assert [token for token, _ in theirs.top] == [token for token, _ in ours.top[:top]]


async def test_a_cancelled_request_is_removed_from_it(
    rig: Rig, vllms: list[VllmServer], eventually: Eventually
) -> None:
    running = "vllm:num_requests_running"
    key = rig.submit(PROMPT, **{**GREEDY, "max_tokens": 3000})
    await rig.until(lambda: rig.answers[key].tokens)
    assert await asyncio.to_thread(vllms[0].metric, running) == 1
    rig.engine.cancel(key)
    await eventually(lambda: not rig.engine.load().running)

    async def gone() -> bool:
        return await asyncio.to_thread(vllms[0].metric, running) == 0

    await eventually(gone)
    assert len(rig.answers[key].tokens) < 2000


async def test_every_cut_of_an_answer_continues_to_the_same_end(rig: Rig, vllms: list[VllmServer]) -> None:
    whole = (await rig.ask(PROMPT, **GREEDY)).tokens
    async for other in rigged(vllms[1]):
        for cut in range(1, 32):
            rest = await other.ask(PROMPT + whole[:cut], **{**GREEDY, "max_tokens": 32 - cut})
            assert whole[:cut] + rest.tokens == whole, f"cut after {cut}"


# --- NaN weights


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """A server with a NaN final norm: every logit is NaN."""
    made = folder()
    if made is None:
        pytest.skip("needs a vLLM: make test-vllm")
    place = tmp_path_factory.mktemp("broken")
    model = Path(shutil.copytree(made / "tiny", place / "tiny"))
    from safetensors.numpy import load_file, save_file  # part of the transformers extra, like the model

    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"] = numpy.full_like(weights["model.norm.weight"], numpy.nan)
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    (server,) = VllmServer.start(made, [place / "log"], model)
    yield server
    server.kill()


@pytest.mark.parametrize("logprobs", [0, 5])
@pytest.mark.parametrize("canary", [False, True])
async def test_nan_is_an_error_not_an_answer(
    vllms: list[VllmServer], broken: VllmServer, canary: bool, logprobs: int
) -> None:
    """As if the weights broke while it serves: its abilities are already known."""
    sound, server = Upstream(vllms[0].url, "", 8), Upstream(broken.url, "", 8)
    sampling = Sampling(max_tokens=32, ignore_eos=True, logprobs=logprobs)
    request = Generate(1, "r", PROMPT, len(PROMPT), sampling, canary=canary)
    try:
        abilities = await sound.abilities()
        reading = UpstreamStream(request, abilities.ids_for(request))
        async with server.complete(abilities, request) as response:
            assert response.status == 200
            chunks = [chunk async for data in response.content.iter_any() for chunk in reading.feed(data)]
    finally:
        await sound.close()
        await server.close()
    assert (chunks[-1].error or "").startswith("non_finite: "), chunks
    assert not [token for chunk in chunks for token in chunk.tokens]


async def test_a_server_with_only_nan_gets_no_worker(broken: VllmServer) -> None:
    engine = OpenAIEngine(UpstreamSettings(url=broken.url, start_s=1.0))
    with pytest.raises(EngineDead, match="Out of range float values"):
        await engine.start(lambda out: None)
