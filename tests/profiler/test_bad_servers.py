"""`holdfast profile` against servers that die, refuse, stay silent, or send invalid data.

In each case it prints one sentence, exits with code 1, and writes no file.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from waits import turns

import controller.profiler.target as target
from controller.cli import main
from events.wire import Welcome, encode

OnFaultChange = Callable[[asyncio.StreamWriter, int, int], Awaitable[None]]
FLAGS = ("--isl", "8,16", "--context", "8,16", "--concurrency", "1", "--tokens", "8", "--repeats", "1")
EVENTS = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
MODELS = {"data": [{"id": "m", "max_model_len": 512}]}
TOKEN = b'data: {"choices": [{"text": "so", "finish_reason": null}]}\n\n'


def answer(status: str, body: bytes) -> bytes:
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


@asynccontextmanager
async def serving(say: OnFaultChange, models: bytes = json.dumps(MODELS).encode()) -> AsyncIterator[str]:
    """Serve a model. `say` answers completions; it gets the number of the request and of the requested tokens."""
    asked, tasks = 0, set[asyncio.Task[None] | None]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        tasks.add(asyncio.current_task())
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).lower():
                if head.startswith(b"get"):
                    writer.write(answer("200 OK", models))
                    continue
                body = await reader.readexactly(int(head.split(b"content-length:")[1].split()[0]))
                asked += 1
                await say(writer, asked, json.loads(body)["max_tokens"])
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            tasks.discard(asyncio.current_task())
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tuple(tasks):
            if task is not None:
                task.cancel()
        await turns(8)  # its connections are closed in the loop's next turns


def saying(*parts: bytes, good: int = 0, together: bool = False) -> OnFaultChange:
    """Answer `good` requests well, then with these bytes; TOKEN is repeated for each requested token."""

    async def say(writer: asyncio.StreamWriter, asked: int, wanted: int) -> None:
        said = parts if asked > good else (EVENTS, TOKEN)
        pieces = [part for one in said for part in [one] * (wanted if one is TOKEN else 1)]
        for piece in [b"".join(pieces)] if together else pieces:
            writer.write(piece)
            await asyncio.sleep(0.001)  # the time between two tokens, which is measured
        writer.close()

    return say


async def endless(writer: asyncio.StreamWriter, asked: int, wanted: int) -> None:
    writer.write(EVENTS)
    while not writer.is_closing():
        writer.write(TOKEN)
        await turns(4)


async def silent(writer: asyncio.StreamWriter, asked: int, wanted: int) -> None:
    writer.write(EVENTS + TOKEN)
    await asyncio.Event().wait()


DEEP = b"data: " + b"[" * 100_000 + b"\n\n"
CASES = {
    "dies at once": (saying(), "the connection closed"),
    "dies in a stream": (saying(EVENTS.replace(b"connection: close", b"content-length: 999"), TOKEN), "the connection closed"),
    "dies amid the sweep": (saying(good=7), "the connection closed"),
    "is no HTTP": (saying(b"\x00\r\n\r\n"), "the response is not HTTP/1.1"),
    "breaks an answer off": (saying(EVENTS, b'data: {"error": {"message": "out of memory"}}\n\n'), "out of memory"),
    "streams no JSON": (saying(EVENTS, b"data: {nonsense\n\n"), "streams something other than a completion"),
    "streams something else": (saying(EVENTS, b'data: {"choices": 7}\n\n'), "streams something other than a completion"),
    "streams a tower": (saying(EVENTS, DEEP), "streams something other than a completion"),
    "streams nothing": (saying(EVENTS, b"data: [DONE]\n\n"), "an answer ended without a token"),
    "answers whole": (saying(answer("200 OK", b'{"choices": []}')), "an answer ended without a token"),
    "fails": (saying(answer("500 Oops", b'{"error": "no GPU"}')), "answers 500: no GPU"),
    "refuses every form": (saying(answer("400 Bad", b'{"error": {"message": "no"}}')), "answers 400: no"),
    "refuses amid the sweep": (saying(answer("503 Full", b"full"), good=7), "at least 2 are needed; left out: "),
    "sends all at once": (saying(EVENTS, TOKEN, together=True), "all tokens of an answer arrive at once"),
    "does not stop": (endless, "sends more tokens than requested"),
    "is silent": (silent, "no token came for 0.2 s"),
}  # fmt: skip


async def profiled(url: str, path: Path) -> int:
    async with asyncio.timeout(20):
        return await asyncio.to_thread(main, ["profile", url, "-o", str(path), *FLAGS])


@pytest.mark.parametrize("name", CASES)
async def test_a_server_that_cannot_be_measured_is_reported_in_one_sentence(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    say, says = CASES[name]
    if say is silent:
        monkeypatch.setattr(target, "SILENCE_S_MAX", 0.2)
    async with serving(say) as url:
        assert await profiled(url, tmp_path / "p.npz") == 1
    (last,) = capsys.readouterr().err.splitlines()[-1:]
    assert last.startswith("holdfast: ") and says in last
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("size", ["1e999", "NaN", "-5", '"many"', "[]", "12345678901234567890"])
async def test_implausible_numbers_are_ignored(size: str, tmp_path: Path) -> None:
    usage = f'data: {{"choices": [], "usage": {{"prompt_tokens": {size}, "completion_tokens": {size}}}}}\n\n'
    say = saying(EVENTS, TOKEN, usage.encode())
    models = f'{{"data": [{{"id": "m", "max_model_len": {size}}}]}}'.encode()
    async with serving(say, models) as url:
        # tokens that a busy machine delivers all at once cannot be measured, but not each time
        for _ in range(5):
            if (code := await profiled(url, tmp_path / "p.npz")) == 0:
                break
        assert code == 0
    with np.load(tmp_path / "p.npz") as made:
        assert made["prefill_isl"].tolist() == [8, 16]
        assert made["decode_context_length"].max() < 16 + 8


@pytest.mark.parametrize("closes", [True, False], ids=["closes", "talks nonsense"])
@pytest.mark.parametrize("welcomes", [0, 1])
async def test_a_closed_connection_or_a_non_worker_is_reported_at_once(
    welcomes: int, closes: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    over = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1000)
        writer.write(encode(Welcome("w", "i", "m")) * welcomes)
        if not closes:
            writer.write(b"\x02\0\0\0so")  # a frame's length, and an invalid frame
            await over.wait()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        url = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        assert await profiled(url, tmp_path / "p.npz") == 1
        over.set()
    (last,) = capsys.readouterr().err.splitlines()[-1:]
    # "closed the connection", or a reset
    assert last.startswith(f"holdfast: {url} " + ("" if closes else "is not a worker"))
