"""/openapi.json describes exactly what is served, and no body that it allows causes an internal error."""

import asyncio
import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from frontend_kit import Kit, frontend
from schema_bodies import AT, Maker
from simulated_frontend import simulated

from controller.frontend.errors import CODES
from controller.frontend.http.routes import MODEL, RESPONSE, ROUTE_OF, ROUTES, document, templated
from controller.frontend.openai.messages.models import (
    IGNORED_BY_COUNT_TOKENS,
    IGNORED_BY_MESSAGES,
    REFUSED_BY_MESSAGES,
    CountTokensBody,
    MessagesBody,
)
from controller.frontend.openai.request_head import ENDPOINTS
from controller.frontend.openai.request_models import (
    IGNORED,
    REFUSED_BY_CHAT,
    REFUSED_BY_COMPLETIONS,
    REFUSED_BY_TOKENIZE,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    PlainChat,
    PlainMessage,
    PlainOptions,
    TokenizeChatBody,
    TokenizePromptBody,
)
from controller.frontend.openai.responses.models import (
    IGNORED_BY_RESPONSES,
    REFUSED_BY_RESPONSES,
    ResponsesBody,
)
from events.observations import RequestsServed, TrafficReported

MESSAGES = [{"role": "user", "content": "hi"}]
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "ChatBody": ("/v1/chat/completions", {"model": "m", "messages": MESSAGES, "max_tokens": 2}),
    "CompletionBody": ("/v1/completions", {"model": "m", "prompt": "hi", "max_tokens": 2}),
    "TokenizePromptBody": ("/tokenize", {"prompt": "hi"}),
    "TokenizeChatBody": ("/tokenize", {"messages": MESSAGES}),
    "DetokenizeBody": ("/detokenize", {"tokens": [300]}),
    "MessagesBody": ("/v1/messages", {"model": "m", "messages": MESSAGES, "max_tokens": 2}),
    "CountTokensBody": ("/v1/messages/count_tokens", {"messages": MESSAGES}),
    "ResponsesBody": ("/v1/responses", {"model": "m", "input": "hi", "max_output_tokens": 2}),
}
MODELS = {
    one.__name__: one
    for one in (
        *(ChatBody, CompletionBody, TokenizePromptBody, TokenizeChatBody, DetokenizeBody),
        *(MessagesBody, CountTokensBody, ResponsesBody),
    )
}
REFUSED = {
    "ChatBody": REFUSED_BY_CHAT,
    "CompletionBody": REFUSED_BY_COMPLETIONS,
    "TokenizePromptBody": REFUSED_BY_TOKENIZE,
    "TokenizeChatBody": REFUSED_BY_TOKENIZE,
    "DetokenizeBody": {},
    "MessagesBody": REFUSED_BY_MESSAGES,
    "CountTokensBody": REFUSED_BY_MESSAGES,
    "ResponsesBody": REFUSED_BY_RESPONSES,
}
IGNORES = {
    "ChatBody": IGNORED,
    "CompletionBody": IGNORED,
    "MessagesBody": IGNORED_BY_MESSAGES,
    "CountTokensBody": IGNORED_BY_COUNT_TOKENS,
    "ResponsesBody": IGNORED_BY_RESPONSES,
}
# A value of each field that a simulated worker supports, without side effects on other fields.
GOOD: dict[str, Any] = {
    "model": "m", "messages": MESSAGES, "prompt": "hi", "tokens": [300, 301], "stream": False, "stream_options": None,
    "max_tokens": 3, "max_completion_tokens": 3, "min_tokens": 1, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1,
    "seed": 7, "stop": ["never"], "stop_token_ids": [9], "n": 2, "ignore_eos": True, "cache_salt": "salt",
    "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1, "logit_bias": {"300": -1},
    "return_token_ids": True, "return_tokens_as_token_ids": True, "response_format": {"type": "text"}, "logprobs": True,
    "top_logprobs": None, "chat_template_kwargs": {"a": 1}, "tools": [], "tool_choice": "none", "reasoning_effort": None,
    "echo": True, "add_special_tokens": False, "add_generation_prompt": False, "return_token_strs": True,
    "structured_outputs": {"choice": ["abc"]}, "guided_json": {"type": "object"}, "guided_regex": "abc",
    "guided_choice": ["abc"], "guided_grammar": 'root ::= "abc"', "skip_special_tokens": False, "parallel_tool_calls": False,
    "include_reasoning": False, "documents": [{"text": "x"}], "continue_final_message": False,
    "include_stop_str_in_output": True, "truncate_prompt_tokens": 5, "system": "be kind", "stop_sequences": ["never"],
    "thinking": {"type": "enabled"}, "output_config": {"effort": "low"}, "metadata": {"user_id": "u"},
    "input": "hi", "instructions": "be kind", "previous_response_id": None, "store": False, "max_output_tokens": 3,
    "text": {"format": {"type": "text"}}, "reasoning": {"effort": "low"}, "include": ["message.output_text.logprobs"],
    "user": "u",
    "allowed_token_ids": [300, 301], "bad_words": ["me"],
    "prompt_logprobs": 1, "return_prompt_text": True,
}  # fmt: skip
# Values of fields that differ between bodies.
SPECIAL: dict[tuple[str, str], Any] = {
    ("CompletionBody", "logprobs"): 2,
    ("MessagesBody", "tool_choice"): {"type": "none"},
    ("CountTokensBody", "tool_choice"): {"type": "none"},
    ("ResponsesBody", "top_logprobs"): 2,
    ("ResponsesBody", "metadata"): {"a": "b"},
}


async def said(kit: Kit, path: str, body: Any) -> tuple[int, Any]:
    """Return the status of a response, and its error if it has one."""
    async with kit.http.post(kit.url + path, data=json.dumps(body).encode()) as answer:
        text = await answer.text()
        return answer.status, json.loads(text)["error"] if answer.status != 200 else text


@cache
def schemas() -> dict[str, Any]:
    return dict(json.loads(document())["components"]["schemas"])


# --- the document


async def test_the_document_is_served_as_generated() -> None:
    async with frontend() as kit, kit.http.get(kit.url + "/openapi.json") as answer:
        assert answer.content_type == "application/json"
        assert await answer.json() == json.loads(document())


def test_it_is_openapi_3_1_and_every_reference_resolves() -> None:
    made = json.loads(document())
    assert made["openapi"] == "3.1.0" and made["info"]["title"] and made["info"]["version"]

    def references(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            for name, part in value.items():
                if name == "$ref":
                    yield part
                else:
                    yield from references(part)
        elif isinstance(value, list):
            for part in value:
                yield from references(part)

    found = set(references(made))
    assert {AT + name for name in made["components"]["schemas"]} == {
        one for one in found if one.startswith(AT)
    }
    for reference in found:
        place: Any = made
        for step in reference.removeprefix("#/").split("/"):
            place = place[step]
    operations = [one for path in made["paths"].values() for one in path.values()]
    assert len({one["operationId"] for one in operations}) == len(operations)
    assert all(one["summary"] and one["responses"]["200"]["description"] for one in operations)


async def test_the_documented_routes_are_exactly_the_served_ones() -> None:
    async with frontend(admin_api=True) as kit:
        documented = {
            (m.upper(), path) for path, ways in json.loads(document())["paths"].items() for m in ways
        }
        assert documented == {(route.method, route.path) for route in ROUTES}
        assert all(ROUTE_OF[route.method, templated(route.path)] is route for route in ROUTES)
        assert {("POST", path) for path in ENDPOINTS} < documented  # those of the fast path
        for method, path in documented:
            async with kit.http.request(
                method, kit.url + path.replace(MODEL, "m").replace(RESPONSE, "r")
            ) as answer:
                named = answer.status == 404 and (MODEL in path or RESPONSE in path)
                assert answer.status not in (404, 405) or named, path
        for method, path in (("DELETE", "/tokenize"), ("GET", "/detokenize"), ("POST", "/v1/models/m")):
            async with kit.http.request(method, kit.url + path) as answer:
                assert answer.status == 405 and answer.headers["Allow"]


def test_it_lists_exactly_the_fields() -> None:
    for name, schema in schemas().items():
        if name not in MODELS:
            continue
        ignored = {field for field in IGNORES.get(name, {}) if "." not in field}
        assert set(schema["properties"]) == {*MODELS[name].model_fields, *REFUSED[name], *ignored}, name
    assert "include_obfuscation" in schemas()["StreamOptions"]["properties"]


def test_every_listed_error_code_exists() -> None:
    described = schemas()["Error"]["properties"]["error"]["properties"]["code"]["description"]
    assert set(described.removeprefix("one of ").split(", ")) == CODES


# --- every field


@pytest.mark.parametrize("name", BODIES)
async def test_every_listed_field_is_served_or_refused_as_documented(name: str) -> None:
    path, usual = BODIES[name]
    properties = schemas()[name]["properties"]
    async with simulated() as kit:
        for field, schema in properties.items():
            if "enum" in schema and field in REFUSED[name]:
                for value in schema["enum"]:
                    assert (await said(kit, path, usual | {field: value}))[0] == 200, field
                status, error = await said(kit, path, usual | {field: "odd"})
                assert (status, error["code"], error["param"]) == (400, "unsupported_parameter", field)
            else:
                value = "anything" if field in IGNORES.get(name, ()) else GOOD.get(field)
                value = SPECIAL.get((name, field), value)
                status, error = await said(kit, path, usual | {field: value})
                assert status == 200, (field, error)


def test_no_field_is_missing_from_the_tests() -> None:
    for name in BODIES:
        assert set(schemas()[name]["properties"]) <= {*GOOD, *REFUSED[name], *IGNORES.get(name, ())}


# --- random bodies


@pytest.mark.slow
@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("seed", range(4))
async def test_no_allowed_body_causes_an_internal_error(name: str, seed: int) -> None:
    """Nor one that is not allowed: in every third body a field has a value of another type."""
    maker = Maker(json.loads(document()), seed)
    path, usual = BODIES[name]
    served = 0
    async with simulated() as kit:
        for number in range(60):
            body = maker.body(schemas()[name], fields=1 + number % 6) | {"model": "m"}
            if number % 2:
                body = usual | {key: value for key, value in body.items() if key not in usual}
            if not number % 3:
                field = maker.dice.choice(sorted(schemas()[name]["properties"]))
                body[field] = maker.dice.choice(
                    [None, True, -1, 1e9, "x", [], {}, [[]], [{}], {"a": {"b": []}}]
                )
            for limit in ("max_tokens", "max_output_tokens"):
                if limit in MODELS[name].model_fields:
                    body[limit] = min(int(body.get(limit) or 2), 8) if is_int(body, limit) else 2
            async with asyncio.timeout(60):
                status, error = await said(kit, path, body)
            assert status in (200, 400, 404), (status, error, body)
            served += status == 200
            if status != 200:
                assert error["code"] in CODES and len(error["message"]) < 1000, body
        assert await said(kit, *BODIES["CompletionBody"]), "it still serves requests"
        blames = [fact for fact in kit.facts if not isinstance(fact, RequestsServed | TrafficReported)]
        assert blames == [], "no worker is blamed"
    assert served > 10, "too few of them were served"


def is_int(body: dict[str, Any], name: str) -> bool:
    return isinstance(body.get(name), int)


def test_the_fields_of_a_plain_chat_are_documented() -> None:
    """The fast path must not accept more than the document allows."""
    known = schemas()
    assert set(PlainChat.__struct_fields__) <= set(known["ChatBody"]["properties"])
    assert set(PlainOptions.__struct_fields__) <= set(known["StreamOptions"]["properties"])
    assert set(PlainMessage.__struct_fields__) <= set(known["ChatMessage"]["properties"])


def test_the_same_seed_generates_the_same_bodies() -> None:
    made = [Maker(json.loads(document()), 5).body(schemas()["ChatBody"], 9) for _ in "ab"]
    assert made[0] == made[1] != Maker(json.loads(document()), 6).body(schemas()["ChatBody"], 9)
