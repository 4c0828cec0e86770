"""The fast path responds byte for byte like aiohttp; requests that are not plain are handed over."""

import asyncio
import gzip
import json
import random
import re
import socket
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop
from frontend_kit import Kit, frontend
from scripted_worker import Act, ScriptedWorker
from waits import turns, until

from controller.deciders.tiers import Tiers
from controller.frontend.http.client_handler import OpenConnections
from controller.frontend.http.fast_path import BYTES_MAX, FastPathConnection
from controller.frontend.http.listeners import Listeners
from controller.frontend.openai.request_head import KEPT_MAX, HeadCache
from controller.frontend.settings import ConnectionSettings, RouterSettings

SECONDS = 10.0
CHAT: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 5,
    "temperature": 0,
}
LIVE = b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n"


def request(
    body: object = None,
    *headers: str,
    path: str = "/v1/chat/completions",
    method: str = "POST",
    version: str = "1.1",
    length: bool = True,
) -> bytes:
    """Return the bytes of a request."""
    raw = body if isinstance(body, bytes) else json.dumps(CHAT if body is None else body).encode()
    lines = [f"{method} {path} HTTP/{version}", "Host: x", *headers]
    lines += [f"Content-Length: {len(raw)}"] if length else []
    return "\r\n".join([*lines, "", ""]).encode() + raw


async def answer(reader: asyncio.StreamReader) -> bytes:
    """Read one complete response."""
    head = await reader.readuntil(b"\r\n\r\n")
    if b" 100 Continue" in head:
        return head + await answer(reader)
    if b"Transfer-Encoding: chunked" in head:
        return head + await reader.readuntil(b"\r\n0\r\n\r\n")
    if length := re.search(rb"Content-Length: (\d+)", head):
        return head + await reader.readexactly(int(length[1]))
    return head + await reader.read()


def alike(said: bytes) -> bytes:
    """Return the bytes without parts that always differ, and without chunk sizes."""
    said = re.sub(rb"Date: [^\r]*", b"Date", said)
    said = re.sub(rb"\b[0-9a-f]{32}\b", b"ID", said)
    said = re.sub(rb'"created": ?\d+', b'"created"', said)
    return re.sub(rb"X-Holdfast-Explain: [^\r]*|\r\n[0-9a-f]+\r\n", b"", said)


REFUSED = b"the prompt is empty"


def pausing() -> tuple[ScriptedWorker, asyncio.Event]:
    """Return a worker that sends one token, and an error after the event is set."""
    goes_on = asyncio.Event()
    act = Act(after=1, how="error", error=f"invalid_request: {REFUSED.decode()}", hold=goes_on)
    return ScriptedWorker("w1", acts=deque([act])), goes_on


@dataclass
class Paths:
    """One frontend: its listeners' port, and another port served by aiohttp alone."""

    kit: Kit
    listeners: Listeners
    fast: int
    aiohttp: int

    async def ask(self, port: int, *pieces: bytes, answers: int = 1) -> tuple[list[bytes], bool]:
        """Return the responses to these pieces on one connection, and whether it is still on the fast path."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            async with asyncio.timeout(SECONDS):
                said = []
                for piece in pieces:
                    writer.write(piece)
                    await turns()
                    if len(pieces) == answers:
                        said.append(await answer(reader))
                while len(said) < answers:
                    said.append(await answer(reader))
            return said, bool(self.listeners.fast_path)
        finally:
            writer.close()
            await writer.wait_closed()
            await until(lambda: not self.listeners.fast_path)


@asynccontextmanager
async def both_paths(*workers: ScriptedWorker, **settings: Any) -> AsyncIterator[Paths]:
    """A frontend that serves both paths."""
    async with frontend(*workers, **settings) as kit:
        listeners = Listeners(kit.api, kit.director.settings)
        await listeners.open()
        await listeners.accept()
        aiohttps = await asyncio.get_running_loop().create_server(listeners.aiohttp, "127.0.0.1", 0)
        try:
            fast = int(listeners.url.rpartition(":")[2])
            yield Paths(kit, listeners, fast, aiohttps.sockets[0].getsockname()[1])
        finally:
            aiohttps.close()
            await listeners.close()


PLAIN = {
    "unary": request(),
    "streamed": request(CHAT | {"stream": True}),
    "with usage": request(CHAT | {"stream": True, "stream_options": {"include_usage": True}}),
    "completion": request({"model": "m", "prompt": "a", "max_tokens": 3}, path="/v1/completions"),
    "own id": request(None, "X-Request-Id: mine"),
    "own id streamed": request(CHAT | {"stream": True}, "x-request-id:  mine "),
    "unusable id": request(None, f"X-Request-Id: {'a' * 200}"),
    "priority": request(None, "X-Priority: batch"),
    "unknown priority": request(CHAT | {"stream": True}, 'X-Priority: "so\tla"'),
    "override": request(None, "X-Holdfast-Router-Mode: round-robin"),
    "explained": request(CHAT | {"stream": True}, "X-Holdfast-Explain: 1"),
    "trace": request(None, f"traceparent: 00-{'1' * 32}-{'2' * 16}-01"),
    "no such model": request(CHAT | {"model": "none"}),
    "wrong field": request(CHAT | {"max_tokens": 0}),
    "odd field": request(CHAT | {"tools": [{}]}),
    "no json": request(b"{"),
    "no text": request(b"\xff\xfe"),
    "long": request(CHAT | {"messages": [{"role": "user", "content": "a" * 60_000}]}),
    "keep-alive": request(None, "Connection: keep-alive"),
    "empty line first": b"\r\n" + request(),
    "many headers": request(None, *(f"X-Stainless-{n}: {n}" for n in range(100))),
}
NOT_PLAIN = {
    "closes": request(None, "Connection: close"),
    "streamed, closes": request(CHAT | {"stream": True}, "Connection: close"),
    "1.0": request(None, version="1.0"),
    "streamed, 1.0": request(CHAT | {"stream": True}, version="1.0"),
    "1.0 that stays": request(None, "Connection: keep-alive", version="1.0"),
    "expects": request(None, "Expect: 100-continue"),
    "chunked": request(b"2\r\n{}\r\n0\r\n\r\n", "Transfer-Encoding: chunked", length=False),
    "chunked and length": request(b"2\r\n{}\r\n0\r\n\r\n", "Transfer-Encoding: chunked"),
    "two lengths": request(b"{}", "Content-Length: 3"),
    "no length": request(b"", length=False),
    "length 0": request(b""),
    "no number": request(b"{}", "Content-Length: two", length=False),
    "signed": request(b"{}", "Content-Length: +2", length=False),
    "gzip": request(gzip.compress(json.dumps(CHAT).encode(), mtime=0), "Content-Encoding: gzip"),
    "upgrade": request(None, "Connection: upgrade", "Upgrade: h2c"),
    "query": request(path="/v1/chat/completions?a=b"),
    "whole url": request(path="http://x/v1/chat/completions"),
    "escaped": request(path="/v1/chat%2Fcompletions"),
    "other path": request(path="/v1/nothing"),
    "models": request(b"", path="/v1/models", method="GET", length=False),
    "get": request(b"", method="GET", length=False),
    "put": request(method="PUT"),
    "live": LIVE,
    "wrong override": request(None, "X-Holdfast-Router-Mode: nonsense"),
    "unknown override": request(None, "X-Holdfast-Router-Luck: 1"),
    "folded": request(None, "X-Long: a", " b"),
    "no host": request().replace(b"Host: x\r\n", b""),
    "two hosts": request(None, "Host: y"),
    "bare newlines": request().replace(b"\r\n", b"\n"),
    "one bare newline": request(None, "X-A: a").replace(b"X-A: a\r\n", b"X-A: a\n"),
    "an empty line of newlines": request(b"{}\r\n\r\n").replace(b"6\r\n\r\n{}", b"6\n\n{}"),
    "bare return": request(None, "X-A: a\rb"),
    "space before colon": request(None, "X-A : b"),
    "null": request(None, "X-A: a\x00b"),
    "too many headers": request(None, *(f"X-{n}: {n}" for n in range(200))),
    "long head": request(None, *(f"X-{n}: {'a' * 1000}" for n in range(20))),
    "long header": request(None, "X-A: " + "a" * 9000),
    "no http": b"hello\r\n\r\n",
}


@pytest.mark.parametrize("name", [*PLAIN, *NOT_PLAIN])
async def test_both_paths_respond_the_same(name: str) -> None:
    plain = name in PLAIN
    raw = PLAIN[name] if plain else NOT_PLAIN[name]
    async with both_paths(ScriptedWorker("w1")) as paths:
        (said,), fast = await paths.ask(paths.fast, raw)
        (reference,), _ = await paths.ask(paths.aiohttp, raw)
        assert alike(said) == alike(reference)
        assert fast == plain
        assert paths.kit.api.openai.answering == 0


@pytest.mark.parametrize("loops", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("seed", range(6))
def test_a_connection_gets_the_same_responses_however_its_bytes_are_split(seed: int, loops: Any) -> None:
    """Consecutive requests, split anywhere, some of them ahead of their turn, and not all of them plain."""
    dice = random.Random(seed)
    kinds = [
        "unary",
        "streamed",
        "own id",
        "no json",
        "completion",
        "live",
        "models",
        "chunked",
        "query",
        "expects",
    ]
    raws = [(PLAIN | NOT_PLAIN)[dice.choice(kinds[: 5 if seed % 2 else None])] for _ in range(8)]
    whole = b"".join(raws)
    cuts = sorted(dice.randrange(len(whole)) for _ in range(dice.choice([0, 3, 40])))
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]

    async def said() -> None:
        async with both_paths(ScriptedWorker("w1")) as paths:
            (fast, _), (slow, _) = [
                await paths.ask(port, *pieces, answers=len(raws)) for port in (paths.fast, paths.aiohttp)
            ]
            assert [alike(one) for one in fast] == [alike(one) for one in slow]

    with asyncio.Runner(loop_factory=loops) as runner:
        runner.run(said())


async def test_consecutive_plain_requests_stay_on_the_fast_path() -> None:
    async with both_paths(ScriptedWorker("w1")) as paths:
        kinds = ["unary", "streamed", "no json", "streamed", "unusable id", "no such model", "unary"]
        said, fast = await paths.ask(paths.fast, *(PLAIN[kind] for kind in kinds), answers=len(kinds))
        assert fast
        assert [one.split(b" ", 2)[1] for one in said] == [
            b"200",
            b"200",
            b"400",
            b"200",
            b"200",
            b"404",
            b"200",
        ]
        said, fast = await paths.ask(paths.fast, PLAIN["unary"], LIVE, PLAIN["streamed"], answers=3)
        assert not fast
        assert [one.split(b" ", 2)[1] for one in said] == [b"200"] * 3


async def test_a_body_may_arrive_after_its_head() -> None:
    raw = PLAIN["streamed"]
    end = raw.index(b"\r\n\r\n") + 4
    async with both_paths(ScriptedWorker("w1")) as paths:
        for cut in (end, end + 1, len(raw) - 1):
            reader, writer = await asyncio.open_connection("127.0.0.1", paths.fast)
            writer.write(raw[:cut])
            await until(lambda: any(one.buffer for one in paths.listeners.fast_path))
            writer.write(raw[cut:])
            async with asyncio.timeout(SECONDS):
                assert b"[DONE]" in await answer(reader)
            assert paths.listeners.fast_path
            writer.close()
            await until(lambda: not paths.listeners.fast_path)


async def test_a_body_that_lags_behind_its_head_is_awaited_by_aiohttp() -> None:
    async with both_paths(ScriptedWorker("w1"), admission={"body_s": 0.2}) as paths:
        reader, writer = await asyncio.open_connection("127.0.0.1", paths.fast)
        writer.write(PLAIN["unary"][:-1])
        async with asyncio.timeout(SECONDS):
            assert b"body_timeout" in await answer(reader)
        writer.close()
        assert not paths.listeners.fast_path


@pytest.mark.parametrize("size", [BYTES_MAX, 2 * BYTES_MAX])
async def test_a_large_body_is_handed_over(size: int) -> None:
    raw = request(CHAT | {"messages": [{"role": "user", "content": "a" * size}]})
    async with both_paths(ScriptedWorker("w1")) as paths:
        (said,), fast = await paths.ask(paths.fast, raw)
        (reference,), _ = await paths.ask(paths.aiohttp, raw)
        assert alike(said) == alike(reference)
        assert not fast


async def test_much_data_sent_ahead_waits_at_the_client_and_is_answered() -> None:
    """More than is buffered: reading pauses until the current response has ended."""
    worker, goes_on = pausing()
    filler = request({"model": "none", "messages": [{"role": "user", "content": "a" * 100_000}]})
    async with both_paths(worker) as paths:
        reader, writer = await asyncio.open_connection("127.0.0.1", paths.fast)
        writer.write(PLAIN["streamed"])
        await until(lambda: paths.kit.api.openai.completions)
        writer.write(filler * 20)
        (connection,) = paths.listeners.fast_path
        await until(lambda: len(connection.buffer) > BYTES_MAX)
        goes_on.set()
        async with asyncio.timeout(SECONDS):
            said = [await answer(reader) for _ in range(21)]
        assert REFUSED in said[0] and all(b"model_not_found" in one for one in said[1:])
        writer.close()


async def test_an_internal_error_is_reported_like_by_aiohttp() -> None:
    async def mistaken(served: str, tier: str) -> Any:
        raise ValueError("an internal error")

    async with both_paths(ScriptedWorker("w1")) as paths:
        paths.kit.director.admission.admit = mistaken  # type: ignore[method-assign]
        for name in ("unary", "streamed"):
            (said,), _ = await paths.ask(paths.fast, PLAIN[name])
            (reference,), _ = await paths.ask(paths.aiohttp, PLAIN[name])
            assert alike(said) == alike(reference) and b" 500 " in said
        assert paths.kit.api.openai.answering == 0


@pytest.mark.parametrize("name", ["unary", "streamed"])
async def test_a_request_cancelled_internally_leaves_no_silent_connection(name: str) -> None:
    async def cancelled(served: str, tier: str) -> Any:
        raise asyncio.CancelledError

    async with both_paths(ScriptedWorker("w1")) as paths:
        paths.kit.director.admission.admit = cancelled  # type: ignore[method-assign]
        for port in (paths.fast, paths.aiohttp):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(PLAIN[name])
            async with asyncio.timeout(SECONDS):
                assert await reader.read() == b""
            writer.close()
        assert not paths.listeners.fast_path


async def test_nothing_follows_a_stream_cut_off_by_an_internal_error() -> None:
    worker, goes_on = pausing()

    async with both_paths(worker) as paths:
        reader, writer = await asyncio.open_connection("127.0.0.1", paths.fast)
        writer.write(PLAIN["streamed"])
        await reader.readuntil(b"data: ")
        (completion,) = paths.kit.api.openai.completions
        completion.over.set_exception(ValueError("an internal error"))
        with pytest.raises(ConnectionResetError):
            async with asyncio.timeout(SECONDS):
                assert b"HTTP/1.1" not in await reader.read()
                raise ConnectionResetError  # or it ended without an error
        goes_on.set()
        writer.close()


async def test_a_workers_name_cannot_inject_a_header() -> None:
    async with both_paths(ScriptedWorker("w1\r\nSet-Cookie: a=b")) as paths:
        for name in ("unary", "streamed"):
            for port in (paths.fast, paths.aiohttp):
                (said,), _ = await paths.ask(port, PLAIN[name])
                assert b" 200 OK" in said and b"\r\nSet-Cookie" not in said


async def unread(port: int, raw: bytes, count: int) -> tuple[socket.socket, int]:
    """Send at most this many requests to this port without reading responses. Return how many were accepted."""
    loop = asyncio.get_running_loop()
    client, sent = socket.socket(), 0
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    await loop.sock_connect(client, ("127.0.0.1", port))
    try:
        while sent < count:
            async with asyncio.timeout(1.0):
                await loop.sock_sendall(client, raw)
            sent += 1
            await asyncio.sleep(0.01)  # otherwise the next request is pipelined, which aiohttp serves
    except TimeoutError:
        pass
    return client, sent


ECHO = {
    "model": "m",
    "prompt": " sentenceing" * 3000,
    "max_tokens": 1,
    "echo": True,
    "n": 8,
    "user": "u" * 150_000,
}
ECHO_BYTES = 12 * 3000 * 8


async def test_a_client_that_reads_no_responses_is_read_no_further() -> None:
    """Each response echoes its request: responses must not pile up in our buffers."""
    raw = request(ECHO, path="/v1/completions")
    async with both_paths(ScriptedWorker("w1")) as paths:
        client, sent = await unread(paths.fast, raw, 150)
        (aiohttps,) = paths.listeners.aiohttp.connections
        assert sent < 150 and not paths.listeners.fast_path
        assert aiohttps.transport is not None
        assert 0 < aiohttps.transport.get_write_buffer_size() < 5 * ECHO_BYTES
        client.close()


async def test_closing_listeners_still_send_written_responses() -> None:
    raw = request(ECHO, path="/v1/completions")
    async with both_paths(ScriptedWorker("w1")) as paths:
        for listening in paths.listeners.sockets:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        client, _ = await unread(paths.fast, raw, 1)
        (connection,) = paths.listeners.fast_path
        await until(lambda: connection.transport.get_write_buffer_size() > 0)
        closing = asyncio.create_task(paths.listeners.close())
        said = b""
        async with asyncio.timeout(SECONDS):
            while got := await asyncio.get_running_loop().sock_recv(client, 2**16):
                said += got
            await closing
        assert b" 200 OK" in said and len(said) > ECHO_BYTES
        client.close()


async def test_a_client_that_disconnects_cancels_its_request() -> None:
    worker, _ = pausing()
    async with both_paths(worker) as paths:
        reader, writer = await asyncio.open_connection("127.0.0.1", paths.fast)
        writer.write(PLAIN["streamed"])
        await reader.readuntil(b"data: ")
        assert paths.kit.api.openai.answering == 1 and paths.listeners.fast_path
        writer.close()
        await until(lambda: paths.kit.api.openai.answering == 0 and not paths.kit.api.openai.completions)
        assert not paths.listeners.fast_path


async def test_an_idle_connection_is_closed() -> None:
    async with both_paths(ScriptedWorker("w1", step_s=0.05)) as paths:
        loop, open = asyncio.get_running_loop(), set[FastPathConnection]()
        heads = HeadCache(paths.kit.director.settings.router, paths.kit.director.table)
        endpoints = paths.kit.api.openai
        clients = OpenConnections(ConnectionSettings(idle_s=0.15), paths.kit.director.metrics.bounds)
        make = partial(FastPathConnection, endpoints, heads, paths.listeners.aiohttp, open, clients)
        server = await loop.create_server(make, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with asyncio.timeout(SECONDS):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            began = loop.time()
            writer.write(request(CHAT | {"max_tokens": 10}))  # takes longer than the idle timeout
            assert b" 200 OK" in await answer(reader)
            told = loop.time()
            assert await reader.read() == b""
            assert told - began > 0.3 and loop.time() - told > 0.1
            silent, other = await asyncio.open_connection("127.0.0.1", port)
            assert await silent.read() == b""
            late, behind = await asyncio.open_connection("127.0.0.1", port)
            behind.write(PLAIN["unary"][:-1])
            began = loop.time()
            await until(lambda: loop.time() - began > 0.3)  # longer than the idle timeout
            behind.write(PLAIN["unary"][-1:])
            assert b" 200 OK" in await answer(late)
            assert await late.read() == b""
        assert not open
        for one in (writer, other, behind):
            one.close()
        server.close()


@pytest.mark.parametrize("in_time", [True, False])
async def test_closing_listeners_let_responses_finish_for_a_moment(in_time: bool) -> None:
    worker, goes_on = pausing()
    async with both_paths(worker) as paths:
        idle, other = await asyncio.open_connection("127.0.0.1", paths.fast)
        reader, writer = await asyncio.open_connection("127.0.0.1", paths.fast)
        writer.write(PLAIN["streamed"])
        await reader.readuntil(b"data: ")
        closing = asyncio.create_task(paths.listeners.close())
        async with asyncio.timeout(SECONDS):
            assert await idle.read() == b""
            if in_time:
                goes_on.set()
            rest = await reader.read()
            await closing
        assert (REFUSED in rest) == in_time
        assert paths.kit.api.openai.answering == 0 and not paths.listeners.fast_path
        writer.close()
        other.close()


def table_of(tiers: Tiers) -> Any:
    """Return the part of a table that a head cache reads."""
    return SimpleNamespace(tiers=tiers)


def test_a_head_with_a_bare_newline_is_not_plain() -> None:
    raw = PLAIN["unary"][: PLAIN["unary"].index(b"\r\n\r\n") + 4]
    assert HeadCache(RouterSettings(), table_of(Tiers())).read(raw) is not None
    assert (
        HeadCache(RouterSettings(), table_of(Tiers())).read(raw.replace(b"Host: x\r\n", b"Host: x\n")) is None
    )


def test_a_head_is_parsed_once_and_a_limited_number_is_cached() -> None:
    heads = HeadCache(RouterSettings(), table_of(Tiers())).read
    raw = PLAIN["override"][: PLAIN["override"].index(b"\r\n\r\n") + 4]
    head = heads(raw)
    assert head is not None and head.overrides.router is not None
    assert heads(raw) is head
    for number in range(KEPT_MAX):
        other = heads(raw.replace(b"Host: x", b"Host: x\r\nX-Request-Id: %d" % number))
        assert other is not None and other.id == str(number)
    again = heads(raw)
    assert again == head and again is not head


def test_a_head_is_parsed_again_after_a_change_of_tiers() -> None:
    table = table_of(Tiers())
    heads = HeadCache(RouterSettings(), table).read
    raw = PLAIN["unary"][: PLAIN["unary"].index(b"\r\n\r\n") + 4]
    raw = raw.replace(b"Host: x", b"Host: x\r\nX-Priority: gold")
    assert (head := heads(raw)) is not None and (head.tier, bool(head.warning)) == ("best_effort", True)
    table.tiers = Tiers(("gold", "silver"), "silver")
    assert (head := heads(raw)) is not None and (head.tier, head.warning) == ("gold", "")
