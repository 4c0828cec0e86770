"""Limits on a client's cost before its request is valid: connections, heads, bodies, texts."""

import asyncio
import gzip
import io
import json
import re
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
from frontend_kit import TOKENS, Kit, frontend
from scripted_worker import ScriptedWorker
from waits import turns, until

from controller.frontend.openai.text.long_texts import LONG_TEXT
from controller.frontend.openai.text.tokenizer import BUILTIN, Tokens, load_tokenizer

SECONDS = 20.0
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
LIVE = b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n"
REFUSED = "holdfast_bound_refusals_total"


def port_of(kit: Kit) -> int:
    return int(kit.url.rpartition(":")[2])


@asynccontextmanager
async def client(port: int, said: bytes = b"") -> AsyncIterator[asyncio.StreamReader]:
    """A connection on which these bytes were sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(said)
    try:
        async with asyncio.timeout(SECONDS):
            yield reader
    finally:
        writer.close()


# --- texts


async def test_a_text_that_cannot_fit_is_never_tokenized() -> None:
    class Unread(Tokens):
        async def encode_soon(self, *given: Any, **more: Any) -> list[int]:
            raise AssertionError("tokenizing takes a second per megabyte")

    unread = Unread(load_tokenizer(BUILTIN), TOKENS.template)

    async def tokens(name: str) -> Tokens:
        return unread

    async with frontend(ScriptedWorker(), tokens=tokens) as kit:
        text = "a" * (12 * 5000)
        for path, body, param in (
            ("/v1/completions", {"prompt": text}, "prompt"),
            ("/v1/completions", {"prompt": ["a", text]}, "prompt"),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}, "messages"),
        ):
            status, answer, _ = await kit.post(path, model="m", **body)
            error = answer["error"]
            assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", param)
            assert re.match(
                r"the prompt has at least 50\d\d tokens, the model's context is 4096", error["message"]
            )
        assert kit.counted(REFUSED, "bound") == {("text_length",): 3}


# --- bodies


async def test_a_body_is_decompressed_up_to_the_limit_only() -> None:
    """A gigabyte compressed into a megabyte is neither decompressed nor waited for."""
    bomb = zlib.compressobj(9, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    packed = b"".join(bomb.compress(b" " * 2**20) for _ in range(32)) + bomb.flush()
    async with frontend(ScriptedWorker(), admission={"body_mb_max": 4}) as kit:
        async with kit.http.post(
            kit.url + "/v1/completions", data=packed, headers={"Content-Encoding": "gzip"}
        ) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (413, "body_too_large")
        assert kit.counted(REFUSED, "bound") == {("body_bytes",): 1}


RAW = zlib.compressobj(wbits=-zlib.MAX_WBITS)
BODY = json.dumps(CHAT).encode()
GZIPPED = gzip.compress(BODY, mtime=0)


@pytest.mark.parametrize(
    ("encoding", "packed"),
    [
        ("gzip", GZIPPED),
        ("GZIP", gzip.compress(BODY[:9], mtime=0) + gzip.compress(BODY[9:], mtime=0)),
        ("deflate", zlib.compress(BODY)),
        ("deflate", RAW.compress(BODY) + RAW.flush()),
        ("identity", BODY),
    ],
    ids=["gzip", "two gzips", "zlib", "bare deflate", "not at all"],
)
async def test_bodies_may_be_compressed(encoding: str, packed: bytes) -> None:
    async with frontend(ScriptedWorker()) as kit:
        for pieces in ([packed], [packed[n : n + 1] for n in range(len(packed))]):

            async def sent(pieces: list[bytes] = pieces) -> AsyncIterator[bytes]:
                for piece in pieces:
                    yield piece

            headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
            path = kit.url + "/v1/chat/completions"
            async with kit.http.post(path, data=sent(), headers=headers) as answer:
                assert answer.status == 200, await answer.text()


@pytest.mark.parametrize(
    ("encoding", "packed", "why"),
    [
        ("br", BODY, "unsupported encoding 'br': send the body uncompressed, or use gzip or deflate"),
        ("gzip", GZIPPED[:-9], "the gzip data is truncated"),
        ("gzip", b"no gzip", "invalid gzip data"),
        ("deflate", b"x no deflate", "invalid deflate data"),
    ],
    ids=["unknown", "cut off", "no gzip", "no deflate"],
)
async def test_a_body_that_cannot_be_decompressed_is_refused_with_the_reason(
    encoding: str, packed: bytes, why: str
) -> None:
    async with frontend(ScriptedWorker()) as kit:
        path, headers = kit.url + "/v1/chat/completions", {"Content-Encoding": encoding}
        async with kit.http.post(path, data=packed, headers=headers) as answer:
            error = (await answer.json())["error"]
            assert (answer.status, error["code"]) == (400, "invalid_json") and why in error["message"]


async def test_all_bodies_together_have_a_limit() -> None:
    async with frontend(ScriptedWorker(), admission={"bodies_mb_max": 1}) as kit:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
        async with client(port_of(kit), head % 2_000_000 + b" " * 900_000):
            await until(lambda: kit.api.openai.intake.body_bytes == 900_000)
            async with client(port_of(kit), head % 1_000_000 + b" " * 999_999) as second:
                assert b" 503 " in await second.readline()
                assert b"queue_full" in await second.readuntil(b"}}")
        status, _, _ = await kit.post("/v1/chat/completions", **CHAT)
        assert status == 200, "the bytes of the refused body are released"


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b'{"a":[' + b"[]," * 200_000 + b"0]}", "40960 lists and objects"),
        (b'{"a":[' + b"0," * 2_200_000 + b"0]}", "2097152 values"),
        (b'{"a":[' + b'"",' * 2_200_000 + b"0]}", "131072 texts and names"),
    ],
    ids=["lists", "numbers", "texts"],
)
async def test_a_body_of_too_many_values_is_refused_before_they_are_created(body: bytes, why: str) -> None:
    async with frontend(ScriptedWorker()) as kit:
        async with kit.http.post(kit.url + "/v1/completions", data=io.BytesIO(body)) as answer:
            assert answer.status == 400
            assert (await answer.json())["error"]["message"] == f"a body may have at most {why}"
        assert kit.counted(REFUSED, "bound") == {("body_values",): 1}


async def test_a_text_may_contain_any_number_of_commas_and_brackets() -> None:
    text = '[],{}\\"' * 300_000
    async with frontend(ScriptedWorker()) as kit:
        body = io.BytesIO(json.dumps({"model": "m", "prompt": text}).encode())
        async with kit.http.post(kit.url + "/v1/completions", data=body) as answer:
            found = (await answer.json())["error"]["code"]
        assert (answer.status, found) == (400, "context_length_exceeded")


# --- connections


async def test_an_endless_head_times_out() -> None:
    beginnings = (b"P", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n", LIVE + b"GET")
    async with frontend(ScriptedWorker(), connections={"head_s": 0.2, "idle_s": 600}) as kit:
        for port in (port_of(kit), int(kit.admin.rpartition(":")[2])):
            for said in beginnings:
                async with client(port, said) as reader:
                    answers = await reader.read()
                    assert answers.count(b"HTTP/1.1 200 ") == said.count(LIVE)
                    assert answers.count(b"HTTP/1.1 408 ") == 1 and b"head_timeout" in answers
        assert kit.counted(REFUSED, "bound")[("head_wait",)] == 6


async def test_a_head_may_arrive_in_pieces() -> None:
    async with frontend(ScriptedWorker(), connections={"head_s": 30, "idle_s": 30}) as kit:
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(kit))
        for _ in range(2):
            for at in range(len(LIVE)):
                writer.write(LIVE[at : at + 1])
                await turns()
            async with asyncio.timeout(SECONDS):
                assert b" 200 " in await reader.readuntil(b"}")
        writer.close()


async def test_an_idle_connection_is_closed_after_the_setting() -> None:
    async with frontend(ScriptedWorker(), connections={"idle_s": 0.1}) as kit:
        for port in (port_of(kit), int(kit.admin.rpartition(":")[2])):
            async with client(port) as reader:
                assert await reader.read() == b""


@pytest.mark.parametrize(
    ("bound", "why"), [("per_address_max", "connections_of_address"), ("total_max", "connections")]
)
async def test_connections_are_limited_in_total_and_per_address(bound: str, why: str) -> None:
    async with frontend(ScriptedWorker(), connections={bound: 3}) as kit:
        port, admin = port_of(kit), int(kit.admin.rpartition(":")[2])
        async with client(port), client(port, LIVE) as second, client(port, LIVE) as third:
            for reader in (second, third):  # these are served by aiohttp
                assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
            async with client(port, LIVE) as fourth:
                assert b" 503 " in await fourth.readline()
                assert b"too_many_connections" in await fourth.read()
            assert kit.counted(REFUSED, "bound") == {(why,): 1}
            async with client(admin, LIVE) as other:
                assert b" 200 " in await other.readline(), "the admin port has its own limit"
        await free_again(port)


async def free_again(port: int) -> None:
    async def answered() -> bool:
        async with client(port, LIVE) as reader:
            return b" 200 " in await reader.readline()

    await until(answered, SECONDS)  # closed connections are noticed after a moment


async def test_without_limits_any_number_of_connections_is_accepted() -> None:
    async with frontend(ScriptedWorker(), connections={"per_address_max": 0, "total_max": 0}) as kit:
        await free_again(port_of(kit))


# --- quoted input

WORDS = "w" * 20_000
LONG: dict[str, Callable[[], tuple[str, dict[str, Any]]]] = {
    "model": lambda: ("/v1/chat/completions", CHAT | {"model": WORDS}),
    "role": lambda: ("/v1/chat/completions", CHAT | {"messages": [{"role": WORDS, "content": 1}]}),
    "part": lambda: (
        "/v1/chat/completions",
        CHAT | {"messages": [{"role": "user", "content": [{"type": WORDS}]}]},
    ),
    "bias": lambda: ("/v1/chat/completions", CHAT | {"logit_bias": {WORDS: 1}}),
    "effort": lambda: ("/v1/chat/completions", CHAT | {"reasoning_effort": WORDS}),
    "form": lambda: ("/v1/chat/completions", CHAT | {"response_format": {"type": WORDS}}),
    "field": lambda: ("/v1/chat/completions", CHAT | {WORDS: 1, "max_tokens": "x"}),
    "number": lambda: ("/v1/chat/completions", CHAT | {"temperature": WORDS}),
    "schema": lambda: ("/v1/chat/completions", CHAT | {"guided_json": WORDS}),
    "stop": lambda: ("/v1/chat/completions", CHAT | {"stop": [WORDS, 1]}),
    "path": lambda: ("/" + WORDS[:8000], CHAT),
    "tokenizer's model": lambda: ("/tokenize", {"model": WORDS, "prompt": "a"}),
    "tokenizer's field": lambda: ("/detokenize", {"model": "m", "tokens": [WORDS]}),
}


@pytest.mark.parametrize("name", LONG)
async def test_errors_quote_only_a_part_of_client_input(name: str) -> None:
    path, body = LONG[name]()
    async with frontend(ScriptedWorker()) as kit, kit.http.post(kit.url + path, json=body) as answer:
        said = await answer.text()
        assert 400 <= answer.status < 500
        assert "w" * 201 not in said and len(said) < 1200, said[:2000]


async def test_an_invalid_http_request_is_quoted_only_in_part() -> None:
    async with frontend(ScriptedWorker()) as kit:
        for said in (WORDS[:7000].encode() + b"\r\n\r\n", LIVE[:-2] + WORDS[:7000].encode() + b"\r\n\r\n"):
            async with client(port_of(kit), said) as reader:
                answer = await reader.read()
                assert b" 400 " in answer and b"w" * 201 not in answer


# --- tokenizing long texts


async def test_long_texts_are_tokenized_a_few_at_a_time_and_a_limited_number_waits() -> None:
    text = "a b " * (LONG_TEXT // 4)
    bounds = {"long_at_once": 1, "waiting_mb_max": 1, "wait_s": 60}
    async with frontend(ScriptedWorker(), tokenizing=bounds) as kit:
        reading = kit.api.openai.intake.long_texts
        goes_on = asyncio.Event()
        loop = asyncio.get_running_loop()

        def held() -> str:
            asyncio.run_coroutine_threadsafe(goes_on.wait(), loop).result(SECONDS)
            return "read"

        first = asyncio.create_task(reading.read(500_000, partial(held)))
        await until(lambda: reading.chars == 500_000)
        asked = asyncio.create_task(kit.post("/v1/completions", model="m", prompt=text, max_tokens=1))
        await until(lambda: reading.chars > 500_000)
        status, answer, headers = await kit.post("/tokenize", model="m", prompt="a b " * 250_000)
        assert (status, answer["error"]["code"], headers["Retry-After"]) == (503, "queue_full", "1")
        assert not asked.done()
        goes_on.set()
        assert await first == "read"
        status, answer, _ = await asked
        assert answer["error"]["code"] == "context_length_exceeded" if status == 400 else status == 200
        await until(lambda: reading.chars == 0)
