"""What a client sees when its frontend dies: after the grace period, by an error, or killed."""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from frontend_kit import frontend
from roles import Process
from scripted_worker import ScriptedWorker
from test_frontend_process import ASK, Rig
from waits import until

from controller.adapters.embedded.free_port import free_port
from controller.frontend.http.api import Api
from controller.frontend.http.listeners import Listeners
from controller.frontend.openai.text.tokenizer import Tokens, ready_tokens
from controller.frontend.settings import FrontendSettings
from controller.processes.frontend import FrontendProcess

GRACE_S = "0.3"
TOKENS = 3_000  # more than any test reads
HEADS = {
    "fast path": "HTTP/1.1\r\nHost: x",
    "aiohttp": "HTTP/1.1\r\nHost: x\r\nExpect: 100-continue",  # not plain
    "HTTP/1.0": "HTTP/1.0",
}


@dataclass
class Client:
    """One raw connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    said: bytes = b""

    @classmethod
    async def ask(cls, port: int, head: str, stream: bool) -> "Client":
        """Send a request for more tokens than the test reads."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = json.dumps(ASK | {"stream": stream, "max_tokens": TOKENS}).encode()
        lines = (
            f"POST /v1/completions {head}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        writer.write(f"{lines}\r\n\r\n".encode() + body)
        return cls(reader, writer)

    async def begun(self) -> None:
        """Wait for a few tokens."""
        while self.said.count(b"data: {") < 5:
            self.said += await self.reader.read(65536)

    async def end(self) -> bytes:
        """Return everything received, once the connection has ended. Raise ConnectionResetError if it was broken."""
        while more := await self.reader.read(65536):
            self.said += more
        self.writer.close()
        return self.said


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with Rig.on(tmp_path) as made:
        yield made


async def connected(port: int) -> Client:
    """A streamed request to a frontend that is starting."""

    async def answered() -> Client | None:
        with contextlib.suppress(OSError):
            client = await Client.ask(port, HEADS["fast path"], stream=True)
            client.said = await client.reader.read(65536)
            if b" 200 OK" in client.said:
                return client
            client.writer.close()
        return None

    return await until(answered)


def port_of(rig: Rig) -> int:
    return int(rig.url.rsplit(":", 1)[1])


async def started(rig: Rig) -> Process:
    """A frontend with a short grace period, and one worker."""
    port, own = free_port(), free_port()
    await rig.worker("w0", port)
    flags = ("--name", "f0", "--static", f"127.0.0.1:{port}", "--port", str(own), "--grace-s", GRACE_S)
    frontend = await rig.start("frontend", *flags)
    rig.url = f"http://127.0.0.1:{own}"
    await until(lambda: rig.healthy("f0", 1))
    return frontend


@pytest.mark.slow
async def test_after_the_grace_period_a_stream_ends_with_an_error_event_and_a_clean_end(rig: Rig) -> None:
    frontend = await started(rig)
    async with asyncio.timeout(60):
        streams = {name: await Client.ask(port_of(rig), head, stream=True) for name, head in HEADS.items()}
        whole = {name: await Client.ask(port_of(rig), head, stream=False) for name, head in HEADS.items()}
        for client in streams.values():
            await client.begun()
        frontend.send_signal(signal.SIGTERM)
        for name, client in streams.items():
            said = await client.end()
            error = b'data: {"error":{"message":"this frontend is shutting down"'
            assert said.count(b'"error"') == 1 and error in said and b"[DONE]" not in said, name
            ending = b"}}\n\n" if name == "HTTP/1.0" else b"}}\n\n\r\n0\r\n\r\n"
            assert said.endswith(ending), (name, said[-80:])
        for name, client in whole.items():
            head, _, body = (await client.end()).rpartition(b"\r\n\r\n")
            assert b" 503 " in head and b"Retry-After: 1" in head, (name, head)
            assert json.loads(body)["error"]["code"] == "draining", name
        assert await frontend.wait() == 0


async def test_a_frontend_with_an_internal_error_also_ends_its_streams_cleanly(tmp_path: Path) -> None:
    class Broken(FrontendProcess):
        async def drain(self, api: Api, listeners: Listeners) -> None:
            raise RuntimeError("an internal error")

    worker = ScriptedWorker("w1", step_s=0.01)
    await worker.start()
    settings = FrontendSettings(
        port=(port := free_port()), static=worker.url.removeprefix("tcp://"), static_tokenizer="builtin:sim"
    )
    running = asyncio.create_task(Broken(settings, "f0", tmp_path).run_static())
    try:
        async with asyncio.timeout(60):
            client = await connected(port)
            await client.begun()
            os.kill(os.getpid(), signal.SIGTERM)
            said = await client.end()
            with pytest.raises(ExceptionGroup) as raised:
                await running
    finally:
        running.cancel()
        await worker.stop()
    assert raised.group_contains(RuntimeError, match="an internal error")
    assert said.count(b'"error"') == 1 and said.endswith(b"}}\n\n\r\n0\r\n\r\n"), said[-80:]


async def test_a_request_still_being_tokenized_at_the_end_of_the_grace_period_gets_an_error() -> None:
    reading, goes_on = asyncio.Event(), asyncio.Event()

    async def tokens(name: str) -> Tokens:
        reading.set()
        await goes_on.wait()
        return await ready_tokens(name)

    async with frontend(worker := ScriptedWorker("w1"), tokens=tokens) as kit:
        asking = asyncio.create_task(kit.post("/v1/completions", model="m", prompt="x", max_tokens=5))
        await reading.wait()
        kit.api.openai.cut_off()
        goes_on.set()
        status, body, headers = await asking
        assert (status, body["error"]["code"], headers["Retry-After"]) == (503, "draining", "1")
        assert not worker.requests


async def test_after_a_kill_a_stream_ends_without_a_final_chunk(rig: Rig) -> None:
    frontend = await started(rig)
    async with asyncio.timeout(60):
        client = await Client.ask(port_of(rig), HEADS["fast path"], stream=True)
        await client.begun()
        frontend.kill()
        try:
            said = await client.end()
        except ConnectionResetError:
            said = client.said
        assert b'"error"' not in said and b"[DONE]" not in said
        assert not said.endswith(b"0\r\n\r\n"), (
            "the final chunk distinguishes an end from a break in HTTP/1.1"
        )
