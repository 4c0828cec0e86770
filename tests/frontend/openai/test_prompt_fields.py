"""Fields of the prompt: `echo` and `return_prompt_text` of a chat, and `add_special_tokens`."""

from typing import Any

import pytest
from frontend_kit import frontend, text_of
from scripted_worker import ScriptedWorker
from simulated_frontend import simulated
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from controller.frontend.openai.completion import read_prompts
from controller.frontend.openai.intake import Intake
from controller.frontend.openai.request_parser import parse_any_chat, parse_completion
from controller.frontend.openai.text.chat_templates import ChatTemplate
from controller.frontend.openai.text.tokenizer import BUILTIN, Tokens, load_tokenizer
from controller.frontend.settings import FrontendSettings

ASKED = {"role": "user", "content": "go"}
BEGUN = {"role": "assistant", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}
CHAT: dict[str, Any] = {"model": "m", "messages": [ASKED, BEGUN], "max_tokens": 4, "temperature": 0}
PATH = "/v1/chat/completions"
BEGIN = 1


def with_beginning() -> Tokenizer:
    """Return a tokenizer that begins each text with a special token."""
    tokenizer = load_tokenizer(BUILTIN)
    name = tokenizer.id_to_token(BEGIN)
    tokenizer.post_processor = TemplateProcessing(single=f"{name} $A", special_tokens=[(name, BEGIN)])
    return tokenizer


@pytest.mark.parametrize("more", [{}, {"logprobs": True}, {"return_token_ids": True}], ids=str)
async def test_an_echo_of_a_chat_is_the_last_message_of_an_assistant(more: dict[str, Any]) -> None:
    async with simulated() as kit:
        _, plain, _ = await kit.post(PATH, **CHAT, **more)
        _, whole, _ = await kit.post(PATH, **CHAT, **more, echo=True)
        events = await kit.stream(PATH, **CHAT, **more, echo=True)
    (choice,), (expected,) = whole["choices"], plain["choices"]
    assert choice["message"]["content"] == "one\ntwo" + expected["message"]["content"]
    assert choice["logprobs"] == expected["logprobs"]
    assert whole["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"] == 4
    assert text_of(events) == choice["message"]["content"]
    deltas = [event["choices"][0]["delta"] for event in events[:2]]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "one\ntwo"}]


async def test_a_users_message_is_not_echoed() -> None:
    async with simulated() as kit:
        ask = CHAT | {"messages": [ASKED]}
        _, plain, _ = await kit.post(PATH, **ask)
        _, echoed, _ = await kit.post(PATH, **ask, echo=True)
    assert echoed["choices"] == plain["choices"]


async def test_an_echo_precedes_an_answer_that_is_parsed() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    async with frontend(ScriptedWorker(), tool_call_parsers={"m": "hermes"}) as kit:
        ask = CHAT | {"tools": [tool]}
        _, plain, _ = await kit.post(PATH, **ask)
        _, echoed, _ = await kit.post(PATH, **ask, echo=True)
        events = await kit.stream(PATH, **ask, echo=True)
    text = "one\ntwo" + plain["choices"][0]["message"]["content"]
    assert echoed["choices"][0]["message"]["content"] == text_of(events) == text


async def test_the_prompt_is_returned_as_the_template_writes_it() -> None:
    async with simulated() as kit:
        ask = CHAT | {"messages": [ASKED], "return_prompt_text": True}
        _, whole, _ = await kit.post(PATH, **ask)
        first, *others = await kit.stream(PATH, **ask)
        _, plain, _ = await kit.post(PATH, **ask | {"return_prompt_text": False})
    assert whole["prompt_text"] == first["prompt_text"] == "user: go\nassistant:"
    assert not any("prompt_text" in event for event in (plain, *others))


@pytest.mark.parametrize(("given", "chat", "completion"), [(None, 0, 1), (True, 1, 1), (False, 0, 0)])
async def test_special_tokens_are_added_on_request(given: bool | None, chat: int, completion: int) -> None:
    tokens = Tokens(with_beginning(), ChatTemplate("{{ messages[0].content }}", {}))
    more = {"add_special_tokens": given}
    asked = [
        (parse_any_chat({"messages": [ASKED], **more}), chat),
        (parse_completion({"prompt": "go", **more}), completion),
    ]
    bare = tokens.encode("go", special=False)
    for parsed, added in asked:
        ((read, _),) = await read_prompts(parsed, tokens, 4096, Intake(FrontendSettings()))
        assert read == [BEGIN] * added + bare


async def test_servers_that_take_text_only_refuse_special_tokens() -> None:
    async with frontend() as kit:
        await kit.add(ScriptedWorker(), engine="openai", exact=False)
        ask = CHAT | {"messages": [ASKED]}
        status, body, _ = await kit.post(PATH, **ask, add_special_tokens=True)
        assert (status, body["error"]["param"]) == (400, "add_special_tokens")
