"""The HTTP client: an answer is the same however it is split, and invalid answers are faults."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
from certificates import certificate
from hypothesis import given, settings
from hypothesis import strategies as st
from waits import turns, until

from controller.trace.replay.endpoint import ClientLimits, LoopTurn, ReplayTarget, Reply
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
    limits: ClientLimits = ClientLimits(),  # noqa: B008 (frozen)
    connections: list[asyncio.StreamWriter] | None = None,
) -> AsyncIterator[ReplayTarget]:
    """An endpoint that answers each request with these bytes, each written separately."""
    opened = [] if connections is None else connections

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        opened.append(writer)
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
        await one.close()
        server.close()
        await turns(4)  # its connections are closed in the next turns


async def asked(one: ReplayTarget, deadline_s: float = 10.0) -> tuple[Reply, list[bytes]]:
    taken: list[bytes] = []
    reply = await one.ask("POST", "/v1/x", take=lambda event, at: taken.append(event), deadline_s=deadline_s)
    return reply, taken


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("chunk", [1, 5, 1000])
@pytest.mark.parametrize("trailer", [b"", b"X-Sum: 1\r\n"])
async def test_an_answer_is_the_same_in_pieces_of_any_size(size: int, chunk: int, trailer: bytes) -> None:
    answer = STREAM + chunked(EVENTS, chunk, trailer)
    async with answering(*(answer[at : at + size] for at in range(0, len(answer), size))) as one:
        reply, taken = await asked(one)
        assert taken == TAKEN and (reply.fault, reply.status) == ("", 200)


strange = st.one_of(
    st.binary(max_size=6),
    st.sampled_from(
        [b"-6\r\n", b"0\r\n\r\n", b"\r\n", b"HTTP/1.1 100 C\r\n\r\n", b"fffff\r\n", b"Content-Length: 3\r\n"]
    ),
)


@settings(max_examples=80, deadline=None)
@given(strange, st.data())
async def test_any_data_is_an_answer_or_a_fault(what: bytes, data: st.DataObject) -> None:
    answer = STREAM + chunked(EVENTS, 9)
    at = data.draw(st.integers(0, len(answer)))
    left_out = data.draw(st.integers(0, 4))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(answer)), max_size=3)))
    damaged = answer[:at] + what + answer[at + left_out :]
    pieces = [damaged[a:b] for a, b in pairwise([0, *cuts, len(damaged)])]
    async with answering(*pieces, then_close=True) as one:
        reply, taken = await asked(one)
    assert reply.fault in ("", "broke off", "malformed") and len(taken) < 10


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


@pytest.mark.parametrize(
    ("closing", "limits", "opened"),
    [
        (b"", ClientLimits(), 1),
        (b"Connection:close\r\n", ClientLimits(), 3),
        (b"", ClientLimits(idle_s=0.0), 3),
    ],
)
async def test_a_connection_is_reused_unless_it_is_closed_or_was_idle_for_long(
    closing: bytes, limits: ClientLimits, opened: int
) -> None:
    connections: list[asyncio.StreamWriter] = []
    async with answering(
        STREAM + closing + chunked(EVENTS, 1000), limits=limits, connections=connections
    ) as one:
        for _ in range(3):
            assert (await asked(one))[1] == TAKEN
            await turns()
    assert len(connections) == opened


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


async def test_a_request_that_ends_its_connection_is_sent_twice_at_most() -> None:
    heads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            heads.append(head)
            if b"/bad" in head:
                break
            await until(lambda: len(heads) >= 4)  # so that four connections are open, and idle afterwards
            writer.write(STREAM + chunked(EVENTS, 1000))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with ReplayTarget(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}") as one:
        await asyncio.gather(*(asked(one) for _ in range(4)))
        reply = await one.ask("POST", "/bad")
        assert (reply.fault, sum(b"/bad" in head for head in heads)) == ("broke off", 2)
        reply, taken = await asked(one)
        assert (reply.fault, taken) == ("", TAKEN), "the other connections are kept"
    server.close()


async def test_an_event_that_its_reader_cannot_parse_is_malformed() -> None:
    async with answering(STREAM + chunked(EVENTS, 1000)) as one:
        reply = await one.ask("POST", "/v1/x", take=lambda event, at: print(int(event)))
        assert reply.fault == "malformed" and "invalid literal" in reply.detail


@pytest.mark.slow
async def test_a_request_that_its_server_does_not_read_leaves_no_connection() -> None:
    begun: list[bytes] = []
    ended: list[bool] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            begun.append(await reader.readuntil(b"\r\n\r\n"))
        except asyncio.IncompleteReadError:  # given up before its head was sent
            writer.close()
            return
        await until(lambda: given_up)
        with contextlib.suppress(ConnectionError):
            while await reader.read(1 << 20):
                pass
        ended.append(True)
        writer.close()

    def opened() -> list[object]:
        """Return the client's open connections to the server."""
        return [
            one for one in psutil.Process().net_connections("tcp4") if one.raddr and one.raddr.port == port
        ]

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port, given_up = server.sockets[0].getsockname()[1], False
    one = ReplayTarget(f"http://127.0.0.1:{port}")
    while not begun:  # a busy machine may not even send the head in time
        assert (await one.ask("POST", "/v1/x", bytes(64 << 20), deadline_s=0.3)).fault == "timeout"
    await until(lambda: not opened())
    first = len(begun)
    sending = asyncio.ensure_future(one.ask("POST", "/v1/x", bytes(64 << 20)))
    await until(lambda: len(begun) > first)
    sending.cancel()
    await one.close()
    await until(lambda: not opened())
    given_up = True
    await until(lambda: len(ended) == len(begun))
    await turns(4)
    server.close()


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
        ([STREAM + b"Transfer-Encoding: chunked\r\n\r\n5\r\ndata:", b"xx0\r\n\r\n"], "malformed"),
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


async def test_response_sizes_are_limited() -> None:
    limits = ClientLimits(line=100, body=1000, event=1000)
    for answer in (
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 200,
        b"HTTP/1.1 404 No\r\nContent-Length: 2000\r\n\r\n" + b"x" * 2000,
        STREAM + b"Content-Length: 3000\r\n\r\ndata: " + b"x" * 2000,
        STREAM + b"Transfer-Encoding: chunked\r\n\r\n" + b"f" * 2000,
        STREAM + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"X: y\r\n" * 500,
    ):
        async with answering(answer, limits=limits) as one:
            assert (await asked(one))[0].fault == "malformed", answer[:80]


async def test_a_turn_of_the_loop_processes_for_a_limited_time() -> None:
    clock, turn_s = 100.0, 0.05
    processed: list[int] = []
    turn = LoopTurn(lambda: clock, turn_s)

    async def process(number: int, takes_s: float) -> None:
        nonlocal clock
        assert await turn.wait() == clock
        clock += takes_s
        processed.append(number)

    clock += 60.0  # nothing was processed before: the turn begins with the first answer
    tasks = [asyncio.ensure_future(process(number, 0.03)) for number in range(5)]
    await turns(1)
    assert processed == [0, 1], "the third one waits for the next turn"
    assert turn.behind_s() == pytest.approx(0.06)
    await turns(1)
    assert processed == [0, 1, 2, 3] and turn.behind_s() == pytest.approx(0.12), "since the first paused turn"
    await turns(3)
    assert processed == [0, 1, 2, 3, 4] and turn.behind_s() == 0.0
    await asyncio.gather(*tasks)


async def test_a_flood_does_not_block_the_loop() -> None:
    streams, events = 40, EVENTS * 4_000
    short = ClientLimits(turn_s=0.002)
    async with answering(STREAM + b"\r\n" + events, then_close=True, limits=short) as one:
        taken = [0] * streams

        def take(number: int, event: bytes, at: float) -> None:
            taken[number] += 1

        async def ask(number: int) -> Reply:
            return await one.ask(
                "POST", "/v1/x", take=lambda event, at: take(number, event, at), deadline_s=60.0
            )

        asking = asyncio.gather(*(ask(number) for number in range(streams)))
        behind = False
        while not asking.done():
            await turns()
            behind = behind or one.behind_s() > 0
        assert {reply.fault for reply in await asking} == {""} and set(taken) == {3 * 4_000}
        assert behind and one.behind_s() == 0.0


async def test_a_discarding_client_reads_nothing_more_and_is_no_failure() -> None:
    async with answering(STREAM + b"\r\n" + EVENTS, EVENTS * 200_000) as one:
        taken = list[bytes]()

        def take(event: bytes, at: float) -> None:
            taken.append(event)
            one.hush()  # as a signal handler does, in the middle of it

        asking = asyncio.ensure_future(one.ask("POST", "/v1/x", take=take))
        await until(lambda: taken)
        await turns(100)
        assert len(taken) < 20_000 and not asking.done()
        asking.cancel()
        await asyncio.wait([asking])


async def test_connecting_has_a_time_limit() -> None:
    with socket.socket() as full, contextlib.ExitStack() as stack:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(3):  # Linux accepts one more than the backlog, and ignores the others silently
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        url = f"http://127.0.0.1:{full.getsockname()[1]}"
        one = ReplayTarget(url, limits=ClientLimits(connect_s=0.05))
        reply = await one.ask("GET", "/v1/models", deadline_s=20.0)
        await one.close()
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
        assert reply.fault == "timeout"
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
