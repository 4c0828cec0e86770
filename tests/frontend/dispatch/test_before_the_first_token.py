"""Before its first token any request is retried on another worker, also with constraints or n > 1."""

import asyncio
from collections import deque
from typing import Any

import pytest
from frontend_kit import TOKENS, Kit, first_goes_to, frontend
from json_types import Json
from scripted_worker import Act, ScriptedWorker, undisturbed

from controller.frontend.request.state import AnswerProgress, RequestState, RequestTerms, refusal
from events.observations import RequestAbandoned, RequestMigrated

PROMPT = [300, 301, 302]
FORM = {"type": "json_object"}
HOW = ("disconnect", "error")


def failing_at_once(how: str, times: int) -> ScriptedWorker:
    """Return a worker that fails its first requests before any token."""
    return ScriptedWorker("w1", acts=deque([Act(0, how)] * times))


async def ask(kit: Kit, *, stream: bool, **more: Any) -> int:
    """Return how many choices of a request were answered completely."""
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 6, **more}
    if not stream:
        status, answer, _ = await kit.post("/v1/completions", **body)
        assert status == 200, answer
        return sum(choice["finish_reason"] == "length" for choice in answer["choices"])
    events = await kit.stream(**body)
    assert events[-1] == {"done": True}, events[-1]
    return sum(c["finish_reason"] == "length" for event in events[:-1] for c in event["choices"])


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("constraint", [{"response_format": FORM}, {"guided_regex": "a+"}])
async def test_a_constrained_request_is_retried(how: str, stream: bool, constraint: Json) -> None:
    """The other worker receives the same constraint, and the client sees no error."""
    first, other = failing_at_once(how, 1), ScriptedWorker("w2")
    async with frontend() as kit:
        await first_goes_to(kit, first, other, engine="openai")
        assert await ask(kit, stream=stream, **constraint) == 1
        assert (len(first.requests), len(other.requests)) == (1, 1)
        assert other.requests[0].guided == first.requests[0].guided is not None
        assert not kit.said(RequestAbandoned)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("stream", [False, True])
async def test_several_choices_are_retried(how: str, stream: bool) -> None:
    """Each choice without a token is retried on another worker."""
    first, other = failing_at_once(how, 3), ScriptedWorker("w2")
    async with frontend() as kit:
        await first_goes_to(kit, first, other)
        assert await ask(kit, stream=stream, n=3) == 3
        assert not kit.said(RequestAbandoned)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("asked", [{"n": 2}, {"response_format": FORM}])
async def test_an_answer_that_is_not_streamed_restarts(how: str, asked: Json) -> None:
    """Its client has seen none of its tokens: they are dropped, and another worker answers from the start."""
    first = ScriptedWorker("w1", acts=deque([Act(3, how), Act(3, how)]), step_s=0.003)
    other = ScriptedWorker("w2")
    async with frontend() as kit:
        await first_goes_to(kit, first, other, engine="openai")
        status, answer, _ = await kit.post(
            "/v1/completions", model="m", prompt=PROMPT, max_tokens=6, temperature=0, **asked
        )
        assert status == 200, answer
        texts = [choice["text"] for choice in answer["choices"]]
        assert texts == [TOKENS.decode(undisturbed(PROMPT, 6))] * asked.get("n", 1)
        assert answer["usage"]["completion_tokens"] == 6 * len(texts)
        assert [len(one.tokens) for one in other.requests] == [len(PROMPT)] * len(texts)
        assert {moved.tokens for moved in kit.said(RequestMigrated)} == {0}


def test_a_constrained_request_does_not_move_after_its_first_token() -> None:
    """A constraint cannot be continued in the middle of an answer."""
    state = RequestState(RequestTerms(migration_limit=3, forbidden="guided_decoding"), 0.0, spent=1)
    assert refusal(state, AnswerProgress(accepted=10, reached=0)) == ""
    assert refusal(state, AnswerProgress(accepted=10, reached=1)) == "guided_decoding"
    never = RequestState(RequestTerms(migration_limit=0, forbidden="n_over_1"), 0.0, spent=1)
    assert refusal(never, AnswerProgress(accepted=10, reached=0)) == "budget_exhausted"


async def test_the_limit_for_the_first_token_grows_with_the_prompt() -> None:
    """With 1 s per 1,000 tokens, a prompt of 600 tokens gets 0.6 s more."""
    worker = ScriptedWorker("w1", always=Act(0, "error", hold=asyncio.Event()))
    limits = {"first_token_s": 0.1, "first_token_s_per_1k": 1.0}
    async with frontend(worker, admission=limits) as kit:
        took = []
        for tokens in (1, 600):
            began = kit.director.now()
            status, body, _ = await kit.post(
                "/v1/completions", model="m", prompt=[300] * tokens, max_tokens=2
            )
            assert (status, body["error"]["code"]) == (503, "first_token_timeout")
            took.append(kit.director.now() - began)
        assert took[0] >= 0.1 and took[1] >= 0.7
