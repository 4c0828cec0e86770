"""The HTTP client: an answer is the same however it is split, and invalid answers are faults."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from certificates import certificate
from hypothesis import given, settings
from hypothesis import strategies as st
from waits import turns, until

from controller.trace.replay.connection import ClientConnection
from controller.trace.replay.endpoint import TURN_S, ConnectionLimits, LoopTurn, ReplayTarget, Reply
from controller.trace.replay.response import ResponseLimits
from events.errors import UsageError

EVENTS = b'data: {"a":1}\n\n: comment\n\ndata:{"b":2}\r\n\r\ndata: [DONE]\n\n'
TAKEN = [b'{"a":1}', b'{"b":2}', b"[DONE]"]
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"


def chunked(data: bytes, size: int, trailer: bytes = b"") -> bytes:
    parts = [data[at : at + size] for at in range(0, len(data), size)]
    body = b"".join(b"%x;ext=1\r\n%s\r\n" % (len(part), part) for part in parts)
    return b"Transfer-Encoding: chunked\r\n\r\n" + body + b"0\r\n" + trailer + b"\r\n"


@asynccontextmanager
async def answering(
    *pieces: bytes,
    then_close: bool = False,
    limits: ConnectionLimits = ConnectionLimits(),  # noqa: B008 (frozen)
) -> AsyncIterator[ReplayTarget]:
    """An endpoint that answers each request with these bytes, each written separately."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    await turns()
                if then_close:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/"
    one = ReplayTarget(url, limits=limits)
    try:
        yield one
    finally:
        one.close()
        server.close()
        await turns(4)  # its connections are closed in the next turns


async def asked(one: ReplayTarget, deadline_s: float = 10.0) -> tuple[Reply, list[bytes]]:
    taken: list[bytes] = []
    reply = await one.ask("GET", "/v1/x", take=lambda event, at: taken.append(event), deadline_s=deadline_s)
    return reply, taken


def fed(
    answer: bytes,
    cut: Callable[[bytes], list[bytes]],
    limits: ResponseLimits = ResponseLimits(),  # noqa: B008 (frozen)
) -> tuple[ClientConnection, list[bytes]]:
    """Return a connection that was fed an answer in pieces, and its events."""

    class Nowhere(asyncio.Transport):
        def write(self, data: object) -> None: ...
        def abort(self) -> None: ...

    taken: list[bytes] = []
    one = ClientConnection(limits=limits)
    one.connection_made(Nowhere())
    one.send(b"", lambda event, at: taken.append(event))
    for piece in cut(answer):
        if not one.how:
            one.data_received(piece)
    return one, taken


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("chunk", [1, 5, 1000])
@pytest.mark.parametrize("trailer", [b"", b"X-Sum: 1\r\n"])
async def test_an_answer_is_the_same_in_pieces_of_any_size(size: int, chunk: int, trailer: bytes) -> None:
    answer = STREAM + chunked(EVENTS, chunk, trailer)
    one, taken = fed(answer, lambda data: [data[at : at + size] for at in range(0, len(data), size)])
    assert taken == TAKEN and one.how == "whole" and one.response.status == 200 and not one.closed


strange = st.one_of(
    st.binary(max_size=6),
    st.sampled_from(
        [b"-6\r\n", b"0\r\n\r\n", b"\r\n", b"HTTP/1.1 100 C\r\n\r\n", b"fffff\r\n", b"Content-Length: 3\r\n"]
    ),
)


@settings(max_examples=80)
@given(strange, st.data())
async def test_any_data_is_an_answer_or_a_fault(what: bytes, data: st.DataObject) -> None:
    answer = STREAM + chunked(EVENTS, 9)
    at = data.draw(st.integers(0, len(answer)))
    left_out = data.draw(st.integers(0, 4))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(answer)), max_size=3)))
    damaged = answer[:at] + what + answer[at + left_out :]
    one, taken = fed(damaged, lambda whole: [whole[a:b] for a, b in pairwise([0, *cuts, len(whole)])])
    one.connection_lost(None)
    assert one.how in ("whole", "broke", "malformed") and len(taken) < 10


async def test_a_stream_may_have_a_length_or_end_with_the_connection() -> None:
    async with answering(STREAM + b"Content-Length: %d\r\n\r\n" % len(EVENTS), EVENTS) as one:
        assert (await asked(one))[1] == TAKEN
    async with answering(STREAM + b"\r\n", EVENTS, then_close=True) as one:
        reply, taken = await asked(one)
        assert taken == TAKEN and reply.fault == ""
    # some servers do not declare what they send
    async with answering(b"HTTP/1.1 200 OK\r\n" + chunked(EVENTS, 9)) as one:
        assert (await asked(one))[1] == TAKEN


async def test_a_response_without_events_is_a_body() -> None:
    async with answering(b"HTTP/1.1 503 Busy\r\nContent-Length: 7\r\n\r\n", b"data: ", b"x") as one:
        reply, taken = await asked(one)
        assert (reply.status, reply.body, reply.fault, taken) == (503, b"data: x", "", [])
    async with answering(
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
        + chunked(b"{}", 1).replace(b": chunked", b":chunked")
    ) as one:
        reply, _ = await asked(one)
        assert (reply.status, reply.body) == (200, b"{}")


async def test_a_connection_is_reused_unless_it_is_closed() -> None:
    for closing, opened in ((b"", 1), (b"Connection:close\r\n", 3)):
        async with answering(STREAM + closing + chunked(EVENTS, 1000)) as one:
            seen: set[Any] = set()
            for _ in range(3):
                assert (await asked(one))[1] == TAKEN
                seen |= one.connections
            assert len(one.connections) == (0 if closing else 1) and len(seen | one.connections) <= opened


async def test_a_connection_that_closes_on_reuse_is_replaced_once() -> None:
    served: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the first request of a connection, and close it at the second, like llama-server."""
        served.append(0)
        await reader.readuntil(b"\r\n\r\n")
        if len(served) < 4:
            served[-1] += 1
            writer.write(STREAM + chunked(EVENTS, 1000))
            await reader.readuntil(b"\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with ReplayTarget(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}") as one:
        for _ in range(3):
            reply, taken = await asked(one)
            assert (reply.fault, taken) == ("", TAKEN)
        reply, taken = await asked(one)
        assert (reply.fault, taken) == ("broke off", [])
    server.close()
    assert served == [1, 1, 1, 0]


async def test_a_connection_that_was_idle_for_long_is_not_reused() -> None:
    async with answering(STREAM + chunked(EVENTS, 1000), limits=ConnectionLimits(idle_s=0.0)) as one:
        await asked(one)
        (before,) = one.connections
        await asked(one)
        assert before not in one.connections


@pytest.mark.parametrize(
    ("pieces", "fault"),
    [
        ([STREAM + b"Content-Length: 99\r\n\r\n", b"data: {}\n\n"], "broke off"),
        ([STREAM + b"Transfer-Encoding: chunked\r\n\r\n5\r\ndata"], "broke off"),
        ([b""], "broke off"),
        ([STREAM + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n"], "malformed"),
        (
            [STREAM + b"Transfer-Encoding: chunked\r\n\r\n-6\r\ndata: {}\n\n"],
            "malformed",
        ),  # was read for ever
        ([STREAM + b"Transfer-Encoding: chunked\r\n\r\n5\r\ndata:xx0\r\n\r\n"], "malformed"),
        ([b"SSH-2.0-OpenSSH_9.2p1\r\n\r\n"], "malformed"),
        ([b"HTTP/1.1\r\n\r\n"], "malformed"),
        ([b"HTTP/1.1 OK\r\n\r\n"], "malformed"),
        ([b"HTTP/1.1 100 Continue\r\n\r\n" * 3000], "broke off"),
    ],
)
async def test_an_incomplete_answer_is_a_fault(pieces: list[bytes], fault: str) -> None:
    async with answering(*pieces, then_close=True) as one:
        reply, _ = await asked(one)
        assert reply.fault == fault and reply.detail
        assert not one.connections


async def test_response_sizes_are_limited() -> None:
    limits = ResponseLimits(head=100, body=1000, event=1000)
    for answer in (
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 200,
        b"HTTP/1.1 404 No\r\nContent-Length: 2000\r\n\r\n" + b"x" * 2000,
        STREAM + b"Content-Length: 3000\r\n\r\ndata: " + b"x" * 2000,
        STREAM + b"Transfer-Encoding: chunked\r\n\r\n" + b"0" * 2000,
        STREAM + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"X: y\r\n" * 50,
    ):
        assert fed(answer, lambda data: [data], limits)[0].how == "malformed", answer[:80]


class Pausing(asyncio.Transport):
    """A transport that only records whether it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = True

    def is_closing(self) -> bool:
        return False

    def write(self, data: object) -> None: ...
    def abort(self) -> None: ...
    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True


async def test_a_turn_of_the_loop_reads_for_a_limited_time() -> None:
    clock = 100.0

    def now() -> float:
        return clock

    connections: list[ClientConnection] = []
    bound = LoopTurn(connections, now)
    transports = [Pausing() for _ in range(4)]
    for transport in transports:
        connections.append(ClientConnection(bound.read, now))
        connections[-1].connection_made(transport)
        connections[-1].send(b"", lambda event, at: None)
    closed, discarding = connections[2:]
    closed.closed = discarding.discarding = True

    def read(number: int, takes_s: float) -> None:
        nonlocal clock
        clock += takes_s
        connections[number].data_received(STREAM + b"\r\n")

    def reading() -> list[bool]:
        return [transport.reads for transport in transports]

    read(0, 1.0)  # nothing was read before: the turn begins here
    read(1, TURN_S / 2)
    assert reading() == [True] * 4 and bound.behind_s() == 0.0
    read(0, TURN_S)
    assert reading() == [False, False, True, False], "a closed one is ignored"
    assert bound.behind_s() == pytest.approx(1.5 * TURN_S)
    await turns()
    assert reading() == [True, True, True, False], "a discarding one stays paused"
    read(0, 2 * TURN_S)
    assert bound.behind_s() == pytest.approx(3.5 * TURN_S), "since the first paused turn"
    await turns(2)  # the second one without unread data
    assert reading()[:2] == [True, True] and bound.behind_s() == 0.0
    read(0, 60.0)
    assert reading()[:2] == [True, True], (
        "a turn begins with its first read, however long ago the last turn was"
    )
    await turns()


async def test_a_flood_does_not_block_the_loop() -> None:
    streams, events = 40, EVENTS * 4_000
    short = ConnectionLimits(turn_s=0.002)
    async with answering(STREAM + b"\r\n" + events, then_close=True, limits=short) as one:
        taken = [0] * streams

        def take(number: int, event: bytes, at: float) -> None:
            taken[number] += 1

        async def ask(number: int) -> Reply:
            return await one.ask(
                "GET", "/v1/x", take=lambda event, at: take(number, event, at), deadline_s=60.0
            )

        asking = asyncio.gather(*(ask(number) for number in range(streams)))
        behind = False
        while not asking.done():
            await turns()
            behind = behind or one.behind_s() > 0
        assert {reply.fault for reply in await asking} == {""} and set(taken) == {3 * 4_000}
        assert behind and one.behind_s() == 0.0


async def test_a_discarding_connection_reads_nothing_more_and_is_no_failure() -> None:
    async with answering(STREAM + b"\r\n" + EVENTS, EVENTS * 20_000) as one:
        taken = list[bytes]()

        def take(event: bytes, at: float) -> None:
            taken.append(event)
            one.hush()  # as a signal handler does, in the middle of it

        asking = asyncio.ensure_future(one.ask("GET", "/v1/x", take=take))

        def read_on() -> bool:
            return any(c.transport and c.transport.is_reading() for c in one.connections)

        await until(lambda: taken and not read_on())
        assert len(taken) < 20_000 and not asking.done()
        asking.cancel()
        await asyncio.wait([asking])
        assert not one.connections


async def test_connecting_has_a_time_limit() -> None:
    with socket.socket() as full, contextlib.ExitStack() as stack:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(3):  # Linux accepts one more than the backlog, and ignores the others silently
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        url = f"http://127.0.0.1:{full.getsockname()[1]}"
        one = ReplayTarget(url, limits=ConnectionLimits(connect_s=0.05))
        reply = await one.ask("GET", "/v1/models", deadline_s=20.0)
        one.close()
    assert (reply.fault, reply.detail) == ("unreachable", "no connection within 0.05 s")
    assert reply.ended - reply.began < 10.0


async def test_an_untrusted_certificate_is_reported(tmp_path: Path) -> None:
    """Its error has errno 1, which reads "Operation not permitted"."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate(tmp_path))
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0, ssl=context)
    async with server, ReplayTarget(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}") as one:
        reply = await one.ask("GET", "/v1/models")
    assert reply.fault == "unreachable"
    assert "certificate" in reply.detail and "not permitted" not in reply.detail


async def test_a_late_or_unreachable_server_is_a_fault() -> None:
    async with answering(STREAM + b"\r\n") as one:
        reply, _ = await asked(one, deadline_s=0.05)
        assert reply.fault == "timeout" and not one.connections
    async with ReplayTarget("http://127.0.0.1:1") as unreachable:
        reply, _ = await asked(unreachable)
        assert (reply.fault, reply.status) == ("unreachable", 0) and "refused" in reply.detail


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:8000",
        "ftp://x",
        "http://",
        "http://x:port",
        "http://x:99999",
        "http://.x",
        "http://x/a b",
    ],
)
def test_an_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="--url"):
        ReplayTarget(url)
