"""Every head on a connection has the same time limit; data that waits for its turn is not late."""

import asyncio
import json
import random
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from frontend_kit import Kit, frontend
from scripted_worker import Act, ScriptedWorker
from waits import turns, until

from controller.frontend.http.client_handler import BodyEnd

SECONDS = 20.0
HEAD_S = 0.2
LIVE = b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n"
CHAT = json.dumps(
    {"model": "m", "messages": [{"role": "user", "content": "a\r\n\r\nb"}], "max_tokens": 2}
).encode()
POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
SIZED = POST + b"Content-Length: %d\r\n\r\n" % len(CHAT) + CHAT
BLANK = POST + b"Content-Length: 8\r\n\r\n" + b"\r\n\r\n" * 2  # a body like the end of a head
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
CHUNKS = b"%x;of=two\r\n%b\r\n4\r\n\r\n\r\n\r\n0\r\n" % (len(CHAT), CHAT)
BEFORE = {
    "nothing behind a body": LIVE,
    "a body": SIZED,
    "a body that ends as a head": BLANK,
    "a body in chunks": CHUNKED + CHUNKS + b"\r\n",
    "a body in chunks with a trailer": CHUNKED + CHUNKS + b"Trailer: x\r\n\r\n",
    "blank lines": LIVE + b"\r\n\r\n\r\n",
    "an upgrade that is declined": LIVE[:-2] + b"Connection: upgrade\r\nUpgrade: websocket\r\n\r\n",
    "two kinds of bodies": CHUNKED + CHUNKS + b"\r\n" + SIZED,
    "more than aiohttp reads at once": LIVE * 50,
}


class Client:
    """One connection, from the client's side."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def statuses(self, count: int) -> list[int]:
        """Read this many responses, and return their statuses."""
        found = []
        for _ in range(count):
            head = await self.reader.readuntil(b"\r\n\r\n")
            found.append(int(head.split()[1]))
            length = head.lower().partition(b"content-length: ")[2].split()
            if length:
                await self.reader.readexactly(int(length[0]))
            else:
                await self.reader.readuntil(b"\r\n0\r\n\r\n")
        return found

    async def rest(self) -> bytes:
        """Return everything received until the connection is closed."""
        return await self.reader.read()


@asynccontextmanager
async def client(url: str) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    try:
        async with asyncio.timeout(SECONDS):
            yield Client(reader, writer)
    finally:
        writer.close()


async def pass_the_time_of_a_head(kit: Kit) -> None:
    """Wait until a head that begins now, on another connection, has timed out."""
    async with client(kit.url) as other:
        other.writer.write(LIVE[:-1])
        assert b"head_timeout" in await other.rest()


def served(*workers: ScriptedWorker, head_s: float = HEAD_S) -> Any:
    """A frontend with an idle timeout longer than any test."""
    return frontend(*workers, connections={"head_s": head_s, "idle_s": 600})


@pytest.mark.slow
@pytest.mark.parametrize("head", [b"G", b"POST /v1/chat", POST, LIVE[:-1]])
@pytest.mark.parametrize("before", BEFORE)
async def test_an_endless_head_after_a_response_times_out(before: str, head: bytes) -> None:
    requests = BEFORE[before].count(b" HTTP/1.1")
    async with served(ScriptedWorker()) as kit, client(kit.url) as one:
        one.writer.write(BEFORE[before] + head)
        assert len(await one.statuses(requests)) == requests
        said = await one.rest()
        assert said.startswith(b"HTTP/1.1 408 ") and b"head_timeout" in said


@pytest.mark.parametrize("before", BEFORE)
async def test_a_head_that_begins_after_the_response_times_out_too(before: str) -> None:
    requests = BEFORE[before].count(b" HTTP/1.1")
    async with served(ScriptedWorker()) as kit, client(kit.url) as one:
        one.writer.write(BEFORE[before])
        await one.statuses(requests)
        one.writer.write(POST)
        assert b"head_timeout" in await one.rest()


@pytest.mark.parametrize("before", BEFORE)
async def test_a_connection_without_a_new_head_does_not_time_out(before: str) -> None:
    requests = BEFORE[before].count(b" HTTP/1.1")
    async with served(ScriptedWorker()) as kit, client(kit.url) as one:
        for _ in range(2):
            one.writer.write(BEFORE[before])
            assert 408 not in await one.statuses(requests)
            await pass_the_time_of_a_head(kit)
        one.writer.write(LIVE)
        assert await one.statuses(1) == [200]


def pausing() -> tuple[ScriptedWorker, asyncio.Event]:
    """Return a worker that sends one token, and ends after the event is set."""
    goes_on = asyncio.Event()
    act = Act(after=1, how="error", error="invalid_request: no more", hold=goes_on)
    return ScriptedWorker("w1", acts=deque([act])), goes_on


async def begin(kit: Kit, one: Client) -> None:
    """Send a request that is answered only after the worker's event, on a connection served by aiohttp."""
    one.writer.write(LIVE)
    await one.statuses(1)
    one.writer.write(SIZED)
    await until(lambda: kit.api.openai.completions)


async def test_a_head_sent_ahead_of_its_turn_has_its_time_limit_from_its_turn_on() -> None:
    worker, goes_on = pausing()
    async with served(worker) as kit, client(kit.url) as one:
        await begin(kit, one)
        one.writer.write(LIVE + LIVE[:9])
        await pass_the_time_of_a_head(kit)
        assert sum(kit.counted("holdfast_bound_refusals_total", "bound").values()) == 1, "of that other head"
        goes_on.set()
        assert await one.statuses(2) == [400, 200]
        assert b"head_timeout" in await one.rest()


@pytest.mark.slow
async def test_much_data_sent_ahead_waits_at_the_client_and_is_answered() -> None:
    worker, goes_on = pausing()
    filler = POST + b"Content-Length: 100000\r\n\r\n" + b" " * 100_000
    async with served(worker, head_s=60) as kit, client(kit.url) as one:
        await begin(kit, one)
        one.writer.write(filler * 300 + LIVE * 5000)
        sizes: list[int] = []

        def unchanged() -> bool:
            sizes.append(one.writer.transport.get_write_buffer_size())
            return len(sizes) > 20 and len(set(sizes[-20:])) == 1

        await until(unchanged, what="reading has stopped: the unsent bytes")
        assert sizes[-1] > 15_000_000
        goes_on.set()
        assert await one.statuses(301) == [400] * 301
        assert await one.statuses(5000) == [200] * 5000


@pytest.mark.parametrize("seed", range(20))
async def test_requests_are_answered_in_turn_however_their_bytes_are_split(seed: int) -> None:
    r = random.Random(seed)
    asked = [r.choice(list(BEFORE.values())[:7]) for _ in range(r.randint(1, 12))]
    said, at = b"".join(asked), 0
    async with served(ScriptedWorker(), head_s=60) as kit, client(kit.url) as one:
        reading = asyncio.create_task(one.statuses(len(asked)))
        while at < len(said):
            step = r.choice((1, 2, 7, 100, 1000))
            one.writer.write(said[at : at + step])
            await turns()
            at += step
        assert await reading == [400 if each is BLANK else 200 for each in asked]


@pytest.mark.parametrize("behind", [b"", b"\r\n", LIVE, b"0\r\n\r\n"])
@pytest.mark.parametrize(
    ("length", "body"),
    [
        (len(CHAT), CHAT),
        (None, b"0\r\n\r\n"),
        (None, CHUNKS + b"\r\n"),
        (None, CHUNKS + b"A: b\r\n" + b"C: d" * 50 + b"\r\n\r\n"),
        (None, b"5;" + b"x" * 200 + b"\r\n0\r\n\r\n\r\n0\r\n\r\n"),
        (None, b"1\r\nx\r\n" * 50 + b"000\r\n\r\n"),
    ],
)
def test_the_end_of_a_body_is_found(length: int | None, body: bytes, behind: bytes) -> None:
    said = body + behind
    for piece in (1, 2, 3, 10, len(said)):
        made, taken = BodyEnd(length or 0, length is None), 0
        for at in range(0, len(said), piece):
            assert made.whole == (at >= len(body))
            taken += made.take(said[at : at + piece])
        assert (taken, made.whole) == (len(body), True)


@pytest.mark.parametrize("size", [b"x", b"", b"-1", b"0x0", b"+0", b"0_0", b"1" * 16])
def test_an_invalid_body_has_no_end(size: bytes) -> None:
    body, said = BodyEnd(0, chunked=True), size + b"\r\n0\r\n\r\n" + LIVE
    assert body.take(said) == len(said) and not body.whole
