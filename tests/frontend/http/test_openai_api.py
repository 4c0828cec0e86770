"""The HTTP API: bad input, ids, tiers, knobs of degradation levels, clients that leave or stall."""

import asyncio
import gzip
import io
import json
import socket
from collections import deque
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from frontend_kit import TOKENS, Kit, frontend, text_of
from scripted_worker import Act, ScriptedWorker, undisturbed
from waits import until

from controller.frontend import driver
from controller.frontend.errors import ApiError
from controller.frontend.http.listeners import Listeners
from controller.frontend.openai import writers
from controller.frontend.openai.completion import read_prompts
from controller.frontend.openai.intake import Intake
from controller.frontend.openai.request_head import fresh_id, own_id
from controller.frontend.openai.request_parser import parse_completion
from controller.frontend.openai.text.long_texts import LONG_TEXT
from controller.frontend.openai.text.tokenizer import Tokens, ready_tokens
from controller.frontend.settings import AdmissionSettings, FrontendSettings, StreamSettings
from controller.processes.frontend import FrontendProcess
from events.decisions import DegradationChanged, HealthStatus, Knobs
from events.observations import (
    RequestAbandoned,
    RequestFailed,
    RequestMigrated,
    RequestsRejected,
    RequestsServed,
    WorkerLeft,
)
from events.wire import Chunk, Load

PROMPT = [300, 301, 302]
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


async def test_a_completion_is_the_workers_output() -> None:
    async with frontend(ScriptedWorker()) as kit:
        text, body = await kit.complete(PROMPT, 8)
        assert text == TOKENS.decode(undisturbed(PROMPT, 8))
        assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (3, 8)
        assert body["choices"][0]["finish_reason"] == "length"


async def test_a_stream_returns_the_same_token_by_token() -> None:
    async with frontend(ScriptedWorker(always=Act(per_step=3))) as kit:
        events = await kit.stream(model="m", prompt=PROMPT, max_tokens=8)
        assert text_of(events) == TOKENS.decode(undisturbed(PROMPT, 8))
        assert events[-1] == {"done": True}
        assert [e["choices"][0]["finish_reason"] for e in events[:-1]] == [None] * 7 + ["length"]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"model": "m"}, "messages", "Field required"),
        (CHAT | {"messages": []}, "messages", "at least 1 item"),
        (CHAT | {"messages": [{"content": "x"}]}, "messages", "role"),
        (
            CHAT | {"messages": [{"role": "user", "content": [{}]}]},
            "messages",
            "content.0.type: Field required",
        ),
        (CHAT | {"temperature": 9}, "temperature", "less than or equal to 2"),
        (CHAT | {"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        (CHAT | {"max_tokens": "many"}, "max_tokens", "integer"),
        (CHAT | {"n": 99}, "n", "16"),
        (CHAT | {"top_k": 10**23}, "top_k", "less than"),
        (CHAT | {"stop": [""]}, "stop", "must not be empty"),
        (CHAT | {"stop": ["x"] * 40}, "stop", "at most"),
        (CHAT | {"stop": "x" * 4097}, "stop", "4096 characters together, not 4097"),
        (CHAT | {"stop": ["x" * 2048, "y" * 2048, "z"]}, "stop", "4096 characters together, not 4097"),
        (CHAT | {"top_logprobs": 3}, "top_logprobs", "logprobs"),
        (CHAT | {"logit_bias": {"1": 101}}, "logit_bias", "less than or equal to 100"),
        (CHAT | {"logit_bias": {"hi": 1}}, "logit_bias", "match pattern"),
        (CHAT | {"logit_bias": {"01": 1}}, "logit_bias", "match pattern"),
        (CHAT | {"logit_bias": {"-1": 1}}, "logit_bias", "match pattern"),
        (CHAT | {"logit_bias": {"2048": 1}}, "logit_bias", "the token 2048 is not below 2048"),
        (CHAT | {"logit_bias": {str(n): 1 for n in range(1025)}}, "logit_bias", "at most 1024 tokens"),
        (CHAT | {"min_p": 1.1}, "min_p", "less than or equal to 1"),
        (CHAT | {"tools": [{"function": {"name": "f"}}] * 129}, "tools", "at most 128"),
        (CHAT | {"odd": 1, "best_of": 2}, "best_of", "not supported"),
        (CHAT | {"stream_options": {"include_usage": True}}, "stream_options", "only with stream: true"),
        (CHAT | {"stream_options": {}}, "stream_options", "only with stream: true"),
        (
            CHAT | {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            "stream_options",
            "needs include_usage: true",
        ),
        (CHAT | {"messages": [{"role": "user"}]}, "messages.0.content", "must have content"),
        (
            CHAT | {"messages": [*CHAT["messages"], {"role": "assistant", "content": None}]},
            "messages.1.content",
            "must have content",
        ),
        (CHAT | {"messages": [{"role": "user", "content": []}]}, "messages.0.content", "must have content"),
        (
            CHAT | {"messages": [{"role": "user", "tool_calls": [{}]}]},
            "messages.0.content",
            "only an assistant's",
        ),
        (CHAT | {"guided_choice": ["a"], "guided_regex": "b"}, "guided_choice", "one field"),
        (CHAT | {"echo": True}, "echo", "not supported"),
        (CHAT | {"guided_grammar": "root ::= a"}, "guided_grammar", "is not defined"),
        (CHAT | {"response_format": {"type": "odd"}}, "response_format", "must be"),
        (CHAT | {"min_tokens": 9, "max_tokens": 3}, "min_tokens", "more than max_tokens"),
        (CHAT | {"max_tokens": 5000}, "max_tokens", "context"),
        (
            CHAT | {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages.0.content",
            "image_url",
        ),
        (CHAT | {"messages": [{"role": "user", "content": "hello " * 6000}]}, "messages", "context"),
    ],
)
async def test_bad_input_gets_one_clear_sentence(body: dict[str, Any], param: str, words: str) -> None:
    async with frontend(ScriptedWorker()) as kit:
        status, answer, _ = await kit.post("/v1/chat/completions", **body)
        error = answer["error"]
        assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param), error
        assert words in error["message"]
        assert kit.facts == []


@pytest.mark.parametrize("prompt", [[], "", [[]], [-1], [99999], [[1], ["a"]], {"a": 1}, [1.5]])
async def test_bad_prompts_are_refused(prompt: Any) -> None:
    async with frontend(ScriptedWorker()) as kit:
        status, answer, _ = await kit.post("/v1/completions", model="m", prompt=prompt, max_tokens=1)
        assert (status, answer["error"]["param"]) == (400, "prompt"), answer


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b"{" * 30_000, b"[" * 30_000 + b"]" * 30_000]
)
async def test_bodies_that_are_not_json_objects_are_refused(raw: bytes) -> None:
    async with (
        frontend(ScriptedWorker()) as kit,
        kit.http.post(kit.url + "/v1/chat/completions", data=raw) as answer,
    ):
        assert answer.status == 400
        assert (await answer.json())["error"]["code"] == "invalid_json"


async def test_large_bodies_unknown_paths_and_methods_are_refused() -> None:
    named = {"X-Request-Id": "mine"}
    async with frontend(ScriptedWorker(), admission=AdmissionSettings(body_mb_max=1)) as kit:

        async def refused(method: str, path: str, **more: Any) -> tuple[int, str, str | None]:
            async with kit.http.request(method, kit.url + path, headers=named, **more) as answer:
                assert answer.headers["X-Request-Id"] == "mine"
                return answer.status, (await answer.json())["error"]["code"], answer.headers.get("Allow")

        large = io.BytesIO(b" " * 2_000_000)
        assert await refused("POST", "/v1/completions", data=large) == (413, "body_too_large", None)
        assert await refused("GET", "/v1/completions") == (405, "method_not_allowed", "POST")
        assert await refused("DELETE", "/v1/models") == (405, "method_not_allowed", "GET, HEAD")
        assert await refused("GET", "/nowhere") == (404, "unknown_url", None)
        text = kit.director.render_metrics().decode()
        assert 'error_type="validation",model="",request_type="unary",status="error"} 1.0' in text
        assert 'status="success"' not in text


async def test_head_is_get_without_a_body() -> None:
    async with frontend(ScriptedWorker()) as kit:
        for path in ("/health", "/live", "/ready", "/metrics", "/v1/models", "/v1/models/m"):
            async with kit.http.head(kit.url + path) as answer:
                assert (answer.status, await answer.read()) == (200, b""), path


async def test_a_body_that_cannot_be_decompressed_is_the_clients_error() -> None:
    packed = {"Content-Encoding": "gzip"}
    async with (
        frontend(ScriptedWorker()) as kit,
        kit.http.post(kit.url + "/v1/completions", data=b"no gzip", headers=packed) as answer,
    ):
        assert (answer.status, (await answer.json())["error"]["code"]) == (400, "invalid_json")
        async with kit.http.get(kit.url + "/live") as next_one:
            assert next_one.status == 200


async def test_a_body_may_arrive_long_after_its_head_and_in_pieces() -> None:
    worker = ScriptedWorker()
    async with frontend(worker) as kit:
        body = json.dumps({"model": "m", "prompt": PROMPT, "max_tokens": 2}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", int(kit.url.rpartition(":")[2]))
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: %d"
        writer.write(head % len(body) + b"\r\n\r\n")
        told = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
        assert b" 100 " in told  # it waits for the body now
        for piece in (body[:9], body[9:]):
            writer.write(piece)
            await writer.drain()
        assert b" 200 " in await asyncio.wait_for(reader.readline(), 20)
        assert worker.requests[0].tokens == PROMPT
        writer.close()


async def test_a_body_is_too_large_however_small_it_is_compressed() -> None:
    packed = {"Content-Encoding": "gzip"}
    async with frontend(ScriptedWorker(), admission=AdmissionSettings(body_mb_max=1)) as kit:
        for large, status in ((b" " * 1_000_000, 400), (b" " * 2_000_000, 413)):
            data = gzip.compress(large)
            async with kit.http.post(kit.url + "/v1/completions", data=data, headers=packed) as answer:
                assert answer.status == status


async def test_a_body_that_never_arrives_times_out() -> None:
    async with frontend(ScriptedWorker(), admission=AdmissionSettings(body_s=0.1)) as kit:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(kit.url.rpartition(":")[2]))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{")
        assert b" 408 " in await asyncio.wait_for(reader.readline(), 20)
        writer.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a", "logit_bias": dict.fromkeys(map(str, range(1_000_000)), 1)}),
        ("/v1/completions", {"prompt": [1] * 5_000_000}),
        ("/v1/completions", {"prompt": [[1]] * 1_000_000}),
        ("/v1/completions", {"prompt": ["a"] * 1_000_000}),
        ("/v1/completions", {"prompt": "a", "stop": ["a"] * 1_000_000}),
        ("/v1/completions", {"prompt": "a", "stop_token_ids": [1] * 1_000_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user"}] * 300_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text"}] * 300_000}]}),
    ],
)
async def test_huge_numbers_of_values_are_refused_before_they_are_read(
    path: str, body: dict[str, Any]
) -> None:
    async with frontend(ScriptedWorker()) as kit:
        raw = json.dumps({"model": "m", **body}).encode()
        async with kit.http.post(kit.url + path, data=io.BytesIO(raw)) as answer:
            assert answer.status == 400
            message = (await answer.json())["error"]["message"]
        assert "at most" in message or "the model's context" in message


async def test_token_ids_beyond_the_context_are_refused_unread() -> None:
    class Unread(list[int]):
        def __iter__(self) -> Any:
            raise AssertionError("reading millions would delay all streams")

    for prompt in (Unread([1] * 101), [Unread([1] * 100)]):
        ask = parse_completion({"model": "m", "prompt": prompt})
        with pytest.raises(ApiError, match=r"the prompt has 10[01] tokens, the model's context is 100"):
            await read_prompts(ask, TOKENS, 100, Intake(FrontendSettings()))


async def test_token_ids_are_decoded_only_for_engines_that_accept_text() -> None:
    for engine, text in (("simulated", ""), ("openai", TOKENS.decode(PROMPT))):
        worker = ScriptedWorker()
        async with frontend() as kit:
            await kit.add(worker, engine=engine)
            await kit.complete(PROMPT, 2)
            assert worker.requests[0].prompt_text == text


async def test_harmless_unknown_fields_are_accepted() -> None:
    async with frontend(ScriptedWorker()) as kit:
        extra = {"user": "me", "store": False, "metadata": {"a": "b"}, "tool_choice": "none", "odd": [1]}
        text, _ = await kit.complete(PROMPT, 3, **extra)
        assert text == TOKENS.decode(undisturbed(PROMPT, 3))


async def test_text_parts_are_joined_with_newlines() -> None:
    worker = ScriptedWorker()
    async with frontend(worker) as kit:
        parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
        for content in ("h\ni", parts):
            messages = [{"role": "user", "content": content}]
            await kit.post("/v1/chat/completions", model="m", messages=messages, max_tokens=1)
        assert worker.requests[0].tokens == worker.requests[1].tokens


async def test_an_unusable_request_id_is_replaced() -> None:
    async with frontend(ScriptedWorker()) as kit:
        for given in ("x" * 500, "caf\u00e9"):
            named = {"X-Request-Id": given}
            made = [
                (await kit.post("/v1/completions", named, model="m", prompt="a"))[2]["X-Request-Id"]
                for _ in "ab"
            ]
            assert [len(one) for one in made] == [32, 32] and made[0] != made[1]


def test_ids_are_all_different() -> None:
    made = [fresh_id() for _ in range(200)]
    assert len(set(made)) == len(made)
    assert all(len(one) == 32 and set(one) <= set("0123456789abcdef") for one in made)
    assert own_id("mine") == "mine"


async def test_a_stop_token_ends_the_answer_and_is_not_shown() -> None:
    worker = ScriptedWorker(always=Act(after=4, finish="stop"))
    ids = undisturbed(PROMPT, 4)
    async with frontend(worker) as kit:
        text, body = await kit.complete(PROMPT, 9, stop_token_ids=[ids[-1]])
        assert (text, body["choices"][0]["finish_reason"]) == (TOKENS.decode(ids[:-1]), "stop")
        assert body["usage"]["completion_tokens"] == 4


async def test_a_stop_string_before_a_stop_token_counts_no_later_token() -> None:
    ids = undisturbed(PROMPT, 6)
    async with frontend(ScriptedWorker(always=Act(per_step=6, finish="stop"))) as kit:
        ask = {"stop": [TOKENS.decode(ids[:1])], "stop_token_ids": [ids[5]]}
        text, body = await kit.complete(PROMPT, 6, **ask)
        assert (text, body["usage"]["completion_tokens"]) == ("", 1)


class FirstLogprobOnly(ScriptedWorker):
    """Returns logprobs only for the first token of a step."""

    def chunk_of(self, *about: Any) -> Chunk:
        chunk = super().chunk_of(*about)
        chunk.logprobs = chunk.logprobs and chunk.logprobs[:1]
        return chunk


async def test_missing_logprobs_do_not_break_the_connection() -> None:
    async with frontend(FirstLogprobOnly(always=Act(per_step=2))) as kit:
        events = await kit.stream(model="m", prompt=PROMPT, max_tokens=6, logprobs=2)
        assert text_of(events) == TOKENS.decode(undisturbed(PROMPT, 6))
        shown = [e["choices"][0]["logprobs"] is not None for e in events[:-1]]
        assert shown == [True, False] * 3


class InvalidToken(ScriptedWorker):
    """Sends a token outside the vocabulary to requests for seven tokens."""

    def chunk_of(self, request: Any, new: list[int], finish: str | None) -> Chunk:
        odd = request.sampling.max_tokens == 7
        return super().chunk_of(request, [-(2**40)] if odd else new, finish)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("checked", [True, False])
async def test_output_that_cannot_be_decoded_affects_no_other_request(
    checked: bool, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even if the check of a worker's output has missed it."""
    if not checked:
        for module, check in (
            (driver, "check_tokens"),
            (writers, "check_tokens"),
            (driver, "check_logprobs"),
        ):
            monkeypatch.setattr(module, check, lambda *_: None)
    expected = (502, "invalid_output") if checked else (500, "internal")
    worker = InvalidToken(step_s=0.01)
    async with frontend(worker) as kit:
        other = asyncio.create_task(kit.complete(PROMPT, 40))
        await until(lambda: worker.active)
        ask = {"model": "m", "prompt": PROMPT, "max_tokens": 7, "logprobs": 1, "stream": stream}
        async with kit.http.post(kit.url + "/v1/completions", json=ask) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == expected
        assert (await other)[0] == TOKENS.decode(undisturbed(PROMPT, 40))
        assert kit.plane.connected and not kit.said(RequestMigrated)


async def test_stop_strings_do_not_apply_before_min_tokens() -> None:
    worker = ScriptedWorker(step_s=0.01)  # slowly, so that a part remains to cancel
    async with frontend(worker) as kit:
        whole = TOKENS.decode(undisturbed(PROMPT, 8))
        stop = TOKENS.decode(undisturbed(PROMPT, 1))
        text, _ = await kit.complete(PROMPT, 8, stop=[stop])
        assert text == ""
        await until(lambda: worker.why == ["complete"])  # the completed answer, not a cancelled one
        text, _ = await kit.complete(PROMPT, 8, stop=[stop], min_tokens=4)
        assert text == whole


# --- the knobs of a degradation level ---------------------------------------------------------------------


def degrade(kit: Kit, **knobs: Any) -> None:
    kit.tell(
        DegradationChanged(
            model="m",
            before=0,
            after=1,
            ratio=0.9,
            knobs=Knobs(**knobs),
            capacity_rps=1.0,
            decided_at=datetime.now(UTC),
        )
    )


async def ask_as(kit: Kit, tier: str | None) -> tuple[int, Any, Any]:
    headers = {} if tier is None else {"X-Priority": tier}
    return await kit.post("/v1/completions", headers, model="m", prompt=PROMPT, max_tokens=2)


@pytest.mark.parametrize(
    ("shed", "served"),
    [
        (None, {"premium", "standard", "best_effort", "odd", None}),
        ("best_effort", {"premium", "standard", None}),
        ("standard", {"premium"}),
        ("premium", set()),
    ],
)
async def test_knob_shed_tier(shed: str | None, served: set[str | None]) -> None:
    async with frontend(ScriptedWorker()) as kit:
        degrade(kit, shed_tier=shed)
        for tier in ("premium", "standard", "best_effort", "odd", None):
            status, body, headers = await ask_as(kit, tier)
            assert status == (200 if tier in served else 503), (tier, body)
            if status == 503:
                shown = {"odd": "best_effort", None: "standard"}.get(tier, tier)
                assert body["error"]["code"] == f"capacity_shed: tier={shown}"
                assert headers["Retry-After"] == "30"
        await until(lambda: sum(f.count for f in kit.said(RequestsRejected)) == 5 - len(served))


async def test_b25_an_unknown_tier_is_the_lowest_and_causes_a_warning() -> None:
    async with frontend(ScriptedWorker()) as kit:
        status, _, headers = await ask_as(kit, 'gold"\t')
        assert (status, headers["Warning"]) == (200, '299 - "unknown X-Priority gold: served as best_effort"')


async def test_knob_accept_new() -> None:
    async with frontend(ScriptedWorker()) as kit:
        degrade(kit, accept_new=False)
        status, body, headers = await ask_as(kit, "premium")
        assert (status, body["error"]["code"], headers["Retry-After"]) == (503, "not_accepting", "30")
        degrade(kit)  # b22: every level sets all four knobs
        assert (await ask_as(kit, "best_effort"))[0] == 200


async def test_knob_batch_size_scales_the_cap_and_the_rest_is_queued() -> None:
    hold = asyncio.Event()
    worker = ScriptedWorker(always=Act(after=1, how="error", error="invalid_request: over", hold=hold))
    async with frontend(worker, admission=AdmissionSettings(inflight_max=4)) as kit:
        degrade(kit, batch_size=0.5)
        asking = [asyncio.create_task(ask_as(kit, None)) for _ in range(6)]
        await until(lambda: kit.director.admission.queued("m") == 4)
        assert worker.active == 2
        degrade(kit, batch_size=1.0)
        await until(lambda: worker.active == 4)
        hold.set()
        await asyncio.wait_for(asyncio.gather(*asking), 20)
        assert len(worker.requests) == 6


async def test_a_queued_request_is_admitted_when_another_frontends_requests_end() -> None:
    hold = asyncio.Event()
    worker = ScriptedWorker(always=Act(after=1, how="error", error="invalid_request: over", hold=hold))
    worker.others = 2
    async with frontend(worker, admission=AdmissionSettings(inflight_max=2)) as kit:
        kit.director.peers.on_links("", {"frontend": "another", "workers": {}})
        await until(lambda: kit.plane.external_load("w1") == Load(running=2))
        asking = [asyncio.create_task(ask_as(kit, None)) for _ in range(2)]
        await until(lambda: (kit.director.admission.queued("m"), worker.active) == (1, 1))  # its share
        worker.others = 0
        await until(lambda: worker.active == 2)
        hold.set()
        await asyncio.wait_for(asyncio.gather(*asking), 20)


async def test_the_cap_includes_requests_that_are_still_being_tokenized() -> None:
    hold = asyncio.Event()
    busy = Act(after=1, how="error", error="invalid_request: over", hold=hold)
    workers = [ScriptedWorker(name, always=busy) for name in ("w1", "w2")]
    async with frontend(admission=AdmissionSettings(inflight_max=2)) as kit:
        for worker in workers:
            await kit.add(worker, context_tokens=32_768)
        text = "word " * (LONG_TEXT // 5 + 1)  # so long that it is tokenized outside the event loop
        asking = [
            asyncio.create_task(kit.post("/v1/completions", model="m", prompt=text, max_tokens=2))
            for _ in range(12)
        ]
        await until(lambda: kit.director.admission.queued("m") == 8)
        await until(lambda: [worker.active for worker in workers] == [2, 2])
        hold.set()
        await asyncio.wait_for(asyncio.gather(*asking), 20)
        assert sum(len(worker.requests) for worker in workers) == 12
        assert [endpoint.kept.requests for endpoint in kit.director.table.endpoints.values()] == [0, 0]


async def test_copies_of_an_unknown_prompt_keep_their_room_while_they_wait() -> None:
    """They follow the first one, and wait if there is no room for them; no other request gets their room meanwhile."""
    hold = asyncio.Event()
    unread = Act(after=0, how="error", error="invalid_request: over", hold=hold)
    workers = [ScriptedWorker(name, always=unread) for name in ("w1", "w2")]
    async with frontend(*workers, admission=AdmissionSettings(inflight_max=2)) as kit:
        endpoints = kit.director.table.endpoints
        asking = [asyncio.create_task(ask_as(kit, None)) for _ in range(5)]
        await until(lambda: sorted(worker.active for worker in workers) == [0, 2])
        await until(
            lambda: (kit.director.admission.queued("m"), len(kit.director.driver.waiting.parked)) == (1, 2)
        )
        assert sum(endpoint.kept.requests for endpoint in endpoints.values()) == 2
        hold.set()
        await asyncio.wait_for(asyncio.gather(*asking), 20)
        assert max(len(worker.requests) for worker in workers) < 5
        assert [endpoint.kept.requests for endpoint in endpoints.values()] == [0, 0]


async def test_unused_room_goes_to_a_queued_request() -> None:
    worker, read = ScriptedWorker("w1"), asyncio.Event()

    async def tokens_when_told(name: str) -> Tokens:
        async with asyncio.timeout(20):
            await read.wait()
        return await ready_tokens(name)

    async with frontend(tokens=tokens_when_told, admission=AdmissionSettings(inflight_max=1)) as kit:
        await kit.add(worker, context_tokens=1000)
        text = "word " * (LONG_TEXT // 5 + 1)  # more than the context: refused after tokenizing
        refused = asyncio.create_task(kit.post("/v1/completions", model="m", prompt=text, max_tokens=2))
        await until(lambda: kit.director.table.endpoints[("w1", "i1")].kept.requests == 1)
        waiting = asyncio.create_task(ask_as(kit, None))
        await until(lambda: kit.director.admission.queued("m") == 1)
        read.set()
        assert ((await waiting)[0], (await refused)[0], len(worker.requests)) == (200, 400, 1)


async def test_a_frontend_that_shuts_down_waits_for_its_queued_requests(tmp_path: Path) -> None:
    worker = ScriptedWorker()
    async with frontend(worker, admission=AdmissionSettings(inflight_max=1)) as kit:
        kit.director.table.endpoints[("w1", "i1")].begin()
        asking = asyncio.create_task(ask_as(kit, None))
        await until(lambda: kit.director.admission.queued("m") == 1)
        process = FrontendProcess(kit.director.settings, "f1", tmp_path)
        draining = asyncio.create_task(process.drain(kit.api, Listeners(kit.api, kit.director.settings)))
        await until(lambda: not kit.director.admission.open)
        kit.director.table.endpoints[("w1", "i1")].end()
        await draining
        assert len(worker.requests) == 1 and (await asking)[0] == 200
        assert kit.api.openai.answering == 0


async def test_a_frontend_refuses_queued_requests_at_the_end_of_its_grace_period(tmp_path: Path) -> None:
    worker = ScriptedWorker()
    async with frontend(worker, admission=AdmissionSettings(inflight_max=1), grace_s=0.05) as kit:
        kit.director.table.endpoints[("w1", "i1")].begin()
        asking = [asyncio.create_task(ask_as(kit, None)) for _ in range(2)]
        await until(lambda: kit.director.admission.queued("m") == 2)
        await FrontendProcess(kit.director.settings, "f1", tmp_path).drain(
            kit.api, Listeners(kit.api, kit.director.settings)
        )
        for status, body, _ in await asyncio.gather(*asking):
            assert (status, body["error"]["code"]) == (503, "queue_timeout")
            assert body["error"]["message"] == "no worker became free before this frontend shut down"
        kit.director.table.endpoints[("w1", "i1")].end()
        assert (len(worker.requests), kit.director.admission.queued("m")) == (0, 0)


async def test_knob_latency_scales_the_queue_and_first_token_deadlines() -> None:
    worker = ScriptedWorker(always=Act(after=0, how="error", hold=asyncio.Event()))
    limits = AdmissionSettings(inflight_max=1, queue_s=0.1, first_token_s=0.3)
    async with frontend(worker, admission=limits) as kit:
        for latency in (1.0, 3.0):
            degrade(kit, latency=latency)
            began = kit.director.now()
            first = asyncio.create_task(ask_as(kit, None))
            await until(lambda: worker.active == 1)
            status, body, _ = await ask_as(kit, None)
            assert (status, body["error"]["code"]) == (503, "queue_timeout")
            assert kit.director.now() - began >= 0.1 * latency
            status, body, _ = await first
            assert (status, body["error"]["code"]) == (503, "first_token_timeout")
            assert 0.3 * latency <= kit.director.now() - began < 0.3 * latency + 2
            await until(lambda: worker.active == 0)


async def test_a_moved_request_without_a_token_in_time_was_not_continued() -> None:
    hold = asyncio.Event()
    first = ScriptedWorker("w1", always=Act(after=0, how="error"))
    other = ScriptedWorker("w2", always=Act(after=0, how="error", hold=hold))
    async with frontend(first, admission=AdmissionSettings(first_token_s=0.3)) as kit:
        await kit.add(other)
        status, body, _ = await ask_as(kit, None)
        assert (status, body["error"]["code"]) == (503, "first_token_timeout")
        assert (len(first.requests), len(other.requests)) == (1, 1)
        assert [fact.reason for fact in kit.said(RequestAbandoned)] == ["first_token_timeout"]


async def test_requests_are_served_in_order_of_arrival() -> None:
    hold = asyncio.Event()
    worker = ScriptedWorker(acts=deque([Act(after=0, how="error", error="invalid_request: x", hold=hold)]))
    async with frontend(worker, admission=AdmissionSettings(inflight_max=1)) as kit:
        asking = []

        def there(waiting: int) -> bool:
            return kit.director.admission.queued("m") == waiting and worker.active > 0

        for number in range(8):
            ask = kit.post("/v1/completions", model="m", prompt=[300 + number], max_tokens=2)
            asking.append(asyncio.create_task(ask))
            await until(partial(there, number))
        hold.set()
        await asyncio.gather(*asking)
        assert [request.tokens[0] for request in worker.requests] == [300 + n for n in range(8)]
        assert kit.director.admission.queued("m") == 0


async def test_a_client_that_leaves_the_queue_blocks_no_other() -> None:
    worker = ScriptedWorker(step_s=0.01)
    async with frontend(worker, admission=AdmissionSettings(inflight_max=1)) as kit:
        first = asyncio.create_task(kit.complete(PROMPT, 20))
        await until(lambda: worker.active == 1)
        leaving = [asyncio.create_task(kit.complete(PROMPT, 2)) for _ in range(3)]
        await until(lambda: kit.director.admission.queued("m") == 3)
        last = asyncio.create_task(kit.complete(PROMPT, 2))
        await until(lambda: kit.director.admission.queued("m") == 4)
        for task in leaving:
            task.cancel()
        await until(lambda: kit.director.admission.queued("m") == 1)
        await asyncio.wait_for(asyncio.gather(first, last), 20)


async def test_a_full_queue_is_reported() -> None:
    worker = ScriptedWorker(always=Act(after=0, how="error", hold=asyncio.Event()))
    limits = AdmissionSettings(inflight_max=1, queue_max=0)
    async with frontend(worker, admission=limits) as kit:
        first = asyncio.create_task(ask_as(kit, None))
        await until(lambda: worker.active == 1)
        status, body, _ = await ask_as(kit, None)
        assert (status, body["error"]["code"]) == (503, "queue_full")
        first.cancel()


# --- no worker --------------------------------------------------------------------------------------------


async def test_a_frontend_that_does_not_know_the_fleet_yet_denies_no_model() -> None:
    async with frontend(ScriptedWorker(), live=False) as kit:
        for path in ("/v1/completions", "/v1/models/other"):
            method = kit.http.post if path == "/v1/completions" else kit.http.get
            async with method(kit.url + path, json={"model": "other", "prompt": "a"}) as answer:
                assert (answer.status, (await answer.json())["error"]["code"]) == (503, "starting")
                assert answer.headers["Retry-After"] == "1"
        assert (await kit.complete(PROMPT, 4))[0] == TOKENS.decode(undisturbed(PROMPT, 4)), (
            "it is known already"
        )


async def test_an_unknown_model_and_one_without_a_worker_get_different_errors() -> None:
    worker = ScriptedWorker()
    async with frontend(worker) as kit:
        status, body, _ = await kit.post("/v1/completions", model="other", prompt="a")
        assert (status, body["error"]["code"], body["error"]["param"]) == (404, "model_not_found", "model")
        said = "the model 'm-sql-adapter' does not exist: /v1/models lists the available models"
        for path, more in (
            ("completions", {"prompt": "a"}),
            ("chat/completions", {"messages": CHAT["messages"]}),
        ):
            status, body, _ = await kit.post(f"/v1/{path}", model="m-sql-adapter", **more)
            assert (status, body["error"]["message"]) == (404, said)
        status, body, _ = await kit.post("/v1/completions", model="m", prompt="a", lora_path="sql")
        assert (status, body["error"]["param"]) == (400, "lora_path")
        assert not worker.requests
        kit.health(worker, HealthStatus.UNHEALTHY, 0.0)
        status, body, headers = await ask_as(kit, None)
        assert (status, body["error"]["code"]) == (503, "no_routable_worker")
        assert "Retry-After" in headers
        kit.health(worker, HealthStatus.HEALTHY, 1.0)
        await worker.stop()
        await until(lambda: not kit.plane.connected)
        status, body, _ = await ask_as(kit, None)
        assert (status, body["error"]["code"]) == (503, "no_reachable_worker")


async def test_a_model_with_only_dead_workers_is_not_unknown() -> None:
    worker = ScriptedWorker()
    async with frontend(worker) as kit:
        kit.tell(WorkerLeft(worker="w1", instance="i1", mode="immediate", exit=-9))
        kit.health(worker, HealthStatus.DEAD, 0.0)
        status, body, headers = await ask_as(kit, None)
        assert (status, body["error"]["code"]) == (503, "no_routable_worker")
        assert "Retry-After" in headers
        async with kit.http.get(kit.url + "/v1/models") as answer:
            assert (await answer.json())["data"] == []


async def test_counts_of_a_models_requests_continue_after_its_workers_were_away() -> None:
    ends = ("model", "endpoint", "request_type", "status", "error_type")
    async with frontend(ScriptedWorker()) as kit:
        await kit.complete(PROMPT, 2)
        kit.tell(WorkerLeft(worker="w1", instance="i1", mode="immediate", exit=-9))
        kit.health(kit.workers[0], HealthStatus.DEAD, 0.0)
        assert (await ask_as(kit, None))[0] == 503
        await kit.add(ScriptedWorker("w2"))
        await kit.complete(PROMPT, 2)
        assert kit.counted("dynamo_frontend_requests_total", *ends) == {
            ("m", "completions", "unary", "success", ""): 2,
            ("m", "completions", "unary", "error", "unavailable"): 1,
        }
        assert kit.counted("dynamo_frontend_active_requests", "model") == {}


async def test_the_last_worker_dies_while_the_prompt_is_tokenized() -> None:
    worker = ScriptedWorker()
    async with frontend() as kit:
        await kit.add(worker, context_tokens=1_000_000)
        asking = asyncio.create_task(kit.post("/v1/completions", model="m", prompt="hello " * 40_000))
        await until(lambda: 'active_requests{model="m"} 1.0' in kit.director.render_metrics().decode())
        kit.tell(WorkerLeft(worker="w1", instance="i1", mode="immediate", exit=-9))
        kit.health(worker, HealthStatus.DEAD, 0.0)
        status, body, _ = await asking
        assert (status, body["error"]["code"]) == (503, "no_routable_worker")


async def test_metrics_show_no_workers_that_have_left() -> None:
    worker = ScriptedWorker()
    async with frontend(worker) as kit:
        await kit.complete(PROMPT, 4)
        kit.director.table.endpoints[("w1", "i1")].begin()
        assert kit.counted("dynamo_frontend_inflight_requests", "model") == {("m",): 1}
        assert 'worker_id="w1"' in kit.director.render_metrics().decode()
        kit.tell(WorkerLeft(worker="w1", instance="i1", mode="immediate", exit=-9))
        kit.health(worker, HealthStatus.DEAD, 0.0)
        assert kit.counted("dynamo_frontend_inflight_requests", "model") == {}
        assert 'worker_id="w1"' not in kit.director.render_metrics().decode()


async def test_health_ready_live_metrics_and_models_respond() -> None:
    worker = ScriptedWorker()
    async with frontend(worker) as kit:
        await kit.complete(PROMPT, 4)
        for base in (kit.url, kit.admin):
            for path, status in (("/health", 200), ("/ready", 200), ("/live", 200), ("/metrics", 200)):
                async with kit.http.get(base + path) as answer:
                    assert answer.status == status, path
        async with kit.http.get(kit.admin + "/v1/models") as answer:
            assert answer.status == 404
        text = kit.director.render_metrics().decode()
        assert 'dynamo_frontend_output_tokens_total{model="m"} 4.0' in text
        labels = 'endpoint="completions",error_type="",model="m",request_type="unary",status="success"'
        assert f"dynamo_frontend_requests_total{{{labels}}} 1.0" in text
        assert 'dynamo_frontend_time_to_first_token_seconds_count{model="m"} 1.0' in text
        assert f'dynamo_frontend_worker_last_input_sequence_tokens{{worker_id="w1"}} {len(PROMPT)}.0' in text
        assert 'dynamo_frontend_worker_last_time_to_first_token_seconds{worker_id="w1"} 0.' in text
        assert 'dynamo_frontend_worker_last_inter_token_latency_seconds{worker_id="w1"} ' in text
        kit.api.openai.listening = False  # as before the port is open
        async with kit.http.get(kit.admin + "/health") as answer:
            assert (answer.status, (await answer.json())["message"]) == (503, "the port is about to open")
        kit.api.openai.listening = True
        kit.health(worker, HealthStatus.UNHEALTHY, 0.0)
        async with kit.http.get(kit.url + "/health") as answer:
            assert (answer.status, (await answer.json())["status"]) == (503, "not_ready")
        async with kit.http.get(kit.url + "/v1/models") as answer:
            assert (await answer.json())["data"] == []


# --- clients ----------------------------------------------------------------------------------------------


async def test_a_client_that_disconnects_is_cancelled_at_the_worker() -> None:
    worker = ScriptedWorker(step_s=0.01)
    async with frontend(worker) as kit:
        for stream in (True, False):
            asking = asyncio.create_task(
                kit.post("/v1/completions", model="m", prompt=PROMPT, max_tokens=4000, stream=stream)
            )
            await until(lambda: any(one.accepted for c in kit.api.openai.completions for one in c.answers))
            assert worker.active == 1
            began = kit.director.now()
            asking.cancel()
            await until(lambda: worker.active == 0)
            assert kit.director.now() - began < 10.0  # of 40 s
        assert worker.why == ["gone", "gone"]
        assert not kit.api.openai.completions
        text = kit.director.render_metrics().decode()
        assert 'request_type="stream"} 1.0' in text and "model_cancellation_total" in text
        assert kit.said(RequestFailed) == []


async def unread(kit: Kit) -> socket.socket:
    """Request a long stream and read nothing of it."""
    host, port = kit.url.removeprefix("http://").split(":")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((host, int(port)))
    body = json.dumps({"model": "m", "prompt": PROMPT, "max_tokens": 4000, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    client.sendall(head + body)
    return client


@pytest.mark.parametrize(
    "limits",
    [StreamSettings(buffer_bytes_max=65536), StreamSettings(write_deadline_s=0.2)],
    ids=["too many bytes", "too long"],
)
async def test_a_client_that_does_not_read_is_disconnected(limits: StreamSettings) -> None:
    worker = ScriptedWorker(always=Act(per_step=50), step_s=0.001)
    worker.follow = lambda tokens: 300
    async with frontend(worker, stream=limits) as kit:
        # Shrink the kernel's buffers, so that the test does not depend on them.
        client = await unread(kit)
        try:
            await until(lambda: kit.api.openai.completions)
            for completion in kit.api.openai.completions:
                assert completion.stream is not None
                sock = completion.stream.transport.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)

            def cut_off() -> bool:
                kit.api.openai.check(kit.director.now())
                return "holdfast_slow_clients_total 1.0" in kit.director.render_metrics().decode()

            await until(cut_off)
            await until(lambda: worker.active == 0)
        finally:
            client.close()


async def test_http_1_0_gets_an_unchunked_stream() -> None:
    async with frontend(ScriptedWorker()) as kit:
        host, port = kit.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps({"model": "m", "prompt": PROMPT, "max_tokens": 2, "stream": True}).encode()
        writer.write(b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        whole = await asyncio.wait_for(reader.read(), 20)
        assert b"Transfer-Encoding" not in whole and whole.endswith(b"data: [DONE]\n\n")
        writer.close()


async def test_a_client_that_expects_100_continue_gets_it() -> None:
    async with frontend(ScriptedWorker()) as kit:
        body = {"model": "m", "prompt": PROMPT, "max_tokens": 2}
        async with kit.http.post(kit.url + "/v1/completions", json=body, expect100=True) as answer:
            assert answer.status == 200


async def test_accepted_sockets_send_without_delay() -> None:
    worker = ScriptedWorker(always=Act(after=1, how="error", hold=asyncio.Event()))
    async with frontend(worker) as kit:
        asking = asyncio.create_task(kit.stream(model="m", prompt=PROMPT, max_tokens=9))
        await until(lambda: worker.active)
        (completion,) = kit.api.openai.completions
        stream = completion.stream
        assert stream is not None
        sock = stream.transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        asking.cancel()


async def test_a_keep_alive_connection_serves_several_streams() -> None:
    async with frontend(ScriptedWorker()) as kit:
        host, port = kit.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps({"model": "m", "prompt": PROMPT, "max_tokens": 2, "stream": True}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
        for _ in range(3):
            writer.write(head + body)
            whole = await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), 20)
            assert whole.startswith(b"HTTP/1.1 200 OK\r\n") and b"data: [DONE]" in whole
        writer.close()


async def test_served_requests_are_reported() -> None:
    async with frontend(ScriptedWorker()) as kit:
        for _ in range(3):
            await kit.complete(PROMPT, 4)
        kit.director.report()
        (fact,) = kit.said(RequestsServed)
        assert (fact.worker, fact.instance, fact.count, fact.tokens) == ("w1", "i1", 3, 12)
        assert fact.routed_under == 1
