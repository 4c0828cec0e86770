"""The event with the last text of an answer has its end, and only the last event has the fingerprint."""

from typing import Any

import pytest
from frontend_kit import frontend, text_of
from scripted_worker import ScriptedWorker

from controller.frontend.openai.completion import system_fingerprint

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "hi", "max_tokens": 3}
PATHS = [
    pytest.param("/v1/chat/completions", CHAT, id="chat"),
    pytest.param("/v1/completions", COMPLETION, id="completions"),
]
DETAILS: list[dict[str, Any]] = [{}, {"logprobs": 1}, {"return_token_ids": True}, {"stop": ["\0"]}, {"n": 2}]


@pytest.mark.parametrize(("path", "body"), PATHS)
@pytest.mark.parametrize("more", DETAILS, ids=str)
async def test_the_last_text_of_each_answer_comes_with_the_finish_reason(
    path: str, body: dict[str, Any], more: dict[str, Any]
) -> None:
    if "logprobs" in more and "messages" in body:
        more = {"logprobs": True}
    async with frontend(ScriptedWorker()) as kit:
        *events, _ = await kit.stream(path, **body, **more)
    for index in range(more.get("n", 1)):
        choices = [c for e in events for c in e["choices"] if c["index"] == index]
        last = choices[-1]
        assert last["finish_reason"] == "length" and (last.get("text") or last["delta"]["content"])
        assert last["stop_reason"] is None
        assert {choice["finish_reason"] for choice in choices[:-1]} == {None}
        if "logprobs" in more:
            assert last["logprobs"] is not None


@pytest.mark.parametrize("more", [{}, {"return_token_ids": True}], ids=str)
async def test_an_answer_without_text_ends_after_its_role(more: dict[str, Any]) -> None:
    async with frontend(ScriptedWorker()) as kit:
        text = text_of(await kit.stream("/v1/chat/completions", **CHAT))
        role, *_, end, done = await kit.stream("/v1/chat/completions", **CHAT, **more, stop=[text])
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert role["choices"][0]["finish_reason"] is None
    assert end["choices"][0]["finish_reason"] == "stop" and end["choices"][0]["stop_reason"] == text
    assert "role" not in end["choices"][0]["delta"] and done == {"done": True}


@pytest.mark.parametrize(("path", "body"), PATHS)
@pytest.mark.parametrize("usage", [False, True])
async def test_the_last_event_has_the_fingerprint(path: str, body: dict[str, Any], usage: bool) -> None:
    async with frontend(ScriptedWorker()) as kit:
        _, whole, _ = await kit.post(path, **body)
        *events, last, _ = await kit.stream(path, **body, stream_options={"include_usage": usage})
    assert last["system_fingerprint"] == whole["system_fingerprint"]
    assert ("usage" in last) == usage
    assert not any("system_fingerprint" in event for event in events)


def test_the_fingerprint_depends_on_the_model_its_revision_and_its_tokenizer() -> None:
    known = ("m", "r1", "builtin:sim")
    others = [("m2", "r1", "builtin:sim"), ("m", "r2", "builtin:sim"), ("m", "r1", "/models/m")]
    assert system_fingerprint(*known) == "fp_50268a81e8"
    assert len({system_fingerprint(*one) for one in (known, *others)}) == 4
