"""The frontend as a separate process, with real worker processes: it survives them and ends cleanly."""

import asyncio
import json
import re
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from frontend_kit import text_of
from roles import Process, Roles
from waits import until

from controller.adapters.embedded.free_port import free_port

ASK = {"model": "m", "prompt": [300, 301, 302], "max_tokens": 60, "temperature": 0, "ignore_eos": True}


class Rig(Roles):
    """Workers, and frontends configured with their addresses."""

    url = ""

    async def worker(self, name: str, port: int) -> Process:
        sim = ("--itl-ms", "10", "--admin-port", "-1")
        return await self.start("worker", "--name", name, "--model", "m", "--port", str(port), *sim)

    async def frontend(self, name: str, port: int, *ports: int) -> Process:
        static = ",".join(f"127.0.0.1:{p}" for p in ports)
        process = await self.start("frontend", "--name", name, "--static", static, "--port", str(port))
        self.url = f"http://127.0.0.1:{port}"
        await until(lambda: self.healthy(name, len(ports)))
        return process

    async def healthy(self, name: str, workers: int) -> bool:
        url = self.admin(name)
        if not url:
            return False
        async with self.http.get(url + "/health") as answer:
            return answer.status == 200 and len((await answer.json())["workers"]) == workers

    async def serves(self, name: str) -> bool:
        """Return whether this frontend has a request in progress."""
        async with self.http.get(self.admin(name) + "/metrics") as answer:
            return 'dynamo_frontend_active_requests{model="m"} 1.0' in await answer.text()

    async def stream(self, on_token: Any = None, **more: Any) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        body = ASK | {"stream": True} | more
        async with self.http.post(self.url + "/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    events.append(json.loads(line[6:]))
                    if on_token is not None:
                        await on_token(len(events), answer.headers["X-Holdfast-Worker"])
        return events


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with Rig.on(tmp_path) as made:
        yield made


CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
NO_HTTP = [
    (b"GET / HTTP/1.1\r\nAuthorization: Bearer secret\x00\r\n\r\n",),
    (CHUNKED + b"secret\r\n",),
    (CHUNKED, b"secret\r\n"),
]


@pytest.mark.slow
async def test_a_request_that_is_not_http_gets_a_400_and_is_not_quoted_in_a_log(rig: Rig) -> None:
    worker, port = free_port(), free_port()
    await rig.worker("w0", worker)
    await rig.frontend("f0", port, worker)
    for pieces in NO_HTTP:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            async with asyncio.timeout(20):
                for piece in pieces:
                    writer.write(piece)
                    await asyncio.sleep(0.1)  # a packet each: the other process must read it alone
                answer = await reader.readuntil(b"\r\n\r\n")
                assert b" 400 Bad Request" in answer.splitlines()[0]
                await reader.read()  # read to the end: the start of the next request is unknown
                await until(lambda: "aiohttp" in rig.log.read_text())
        finally:
            writer.close()
    said = [json.loads(line) for line in rig.log.read_text().splitlines()]
    levels = [line["level"] for line in said if line.get("library") == "aiohttp.server"]
    assert levels == ["warning"], "of the request without a valid head"
    assert "Traceback" not in str(said) and "secret" not in str(said)


@pytest.mark.slow
async def test_kill_nine_in_the_middle_of_a_stream(rig: Rig) -> None:
    ports = [free_port() for _ in range(3)]
    workers = {f"static-{n}": await rig.worker(f"w{n}", port) for n, port in enumerate(ports)}
    await rig.frontend("f0", free_port(), *ports)

    async def kill(count: int, worker: str) -> None:
        if count == 20:
            workers[worker].kill()

    hows: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.8, "top_p": 0.9, "seed": 7}]
    for how in hows:
        whole = text_of(await rig.stream(**how))
        events = await rig.stream(kill, **how)
        assert text_of(events) == whole
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        assert text_of(await rig.stream(**how)) == whole  # new requests go to live workers


@pytest.mark.slow
async def test_a_stopped_worker_is_left_and_a_stopped_frontend_blames_no_worker(rig: Rig) -> None:
    ports = [free_port(), free_port()]
    workers = {f"static-{n}": await rig.worker(f"w{n}", port) for n, port in enumerate(ports)}
    front = await rig.frontend("f0", free_port(), *ports)
    whole = text_of(await rig.stream())

    async def hangs() -> float:
        async with rig.http.get(rig.admin("f0") + "/metrics") as answer:
            found = re.search(r"^holdfast_worker_hangs (\S+)", await answer.text(), re.M)
            assert found is not None
            return float(found.group(1))

    async def sleep_through(count: int, worker: str) -> None:
        if count == 20:
            front.send_signal(signal.SIGSTOP)
            await asyncio.sleep(1.0)  # the workers continue, and all of it arrives at once
            front.send_signal(signal.SIGCONT)

    for _ in range(3):
        before = await hangs()
        assert text_of(await rig.stream(sleep_through)) == whole
        if await hangs() == before:
            break  # otherwise a worker was stopped by the machine as well, which does not happen every time
    else:
        pytest.fail("it blames its workers for its own stop")

    async def stop(count: int, worker: str) -> None:
        if count == 20:
            workers[worker].send_signal(signal.SIGSTOP)

    assert text_of(await rig.stream(stop)) == whole
    assert await hangs() > before


@pytest.mark.slow
async def test_while_a_frontend_reaches_no_worker_the_other_one_on_its_port_gets_the_requests(
    rig: Rig,
) -> None:
    port, shared = free_port(), free_port()
    await rig.worker("w0", port)
    await rig.frontend("f0", shared, port)

    def serving() -> int:
        return rig.log.read_text().count("frontend_serves")

    async def health() -> int:
        async with aiohttp.ClientSession() as alone, alone.get(rig.url + "/health") as answer:
            return answer.status

    assert serving() == 1
    static = f"127.0.0.1:{free_port()}"  # no process listens there
    await rig.start("frontend", "--name", "f1", "--static", static, "--port", str(shared))
    await until(lambda: rig.admin("f1"))
    began = time.monotonic()

    async def both_serve() -> bool:
        status = await health()
        assert status == 200 or serving() == 2
        return serving() == 2

    await until(both_serve, every_s=0.005)
    assert time.monotonic() - began > 1.0

    async def without_workers() -> bool:
        return await health() != 200  # finally it reports itself that it has no worker

    await until(without_workers, every_s=0.005)


@pytest.mark.slow
async def test_sigterm_finishes_requests_in_flight_and_the_other_frontend_gets_new_ones(rig: Rig) -> None:
    port, shared = free_port(), free_port()
    await rig.worker("w0", port)
    first, second = [await rig.frontend(name, shared, port) for name in ("f0", "f1")]
    begun = asyncio.Event()

    async def note(count: int, worker: str) -> None:
        if count == 10:
            begun.set()

    async with asyncio.timeout(30):
        while True:  # until the kernel assigns the connection to the first
            begun.clear()
            streaming = asyncio.create_task(rig.stream(note, max_tokens=500))
            await begun.wait()
            if await rig.serves("f0"):
                break
            streaming.cancel()
            await asyncio.wait([streaming])
    seen: list[tuple[str, int]] = []

    async def gone() -> bool:
        """Probe the first frontend. Return whether it no longer answers."""
        with suppress(aiohttp.ClientError):
            for path in ("/ready", "/live"):
                async with rig.http.get(admin + path) as answer:
                    seen.append((path, answer.status))
            return False
        return True

    admin = rig.admin("f0")
    first.send_signal(signal.SIGTERM)
    looking = asyncio.ensure_future(until(gone, every_s=0.01))
    await until(lambda: ("/ready", 503) in seen)
    assert not streaming.done(), "at once, while there is still something to finish"
    assert len(await rig.stream()) == 60  # on a new connection, which only the second one accepts
    events = await asyncio.wait_for(streaming, 20)
    assert (len(events), events[-1]["choices"][0]["finish_reason"]) == (500, "length")
    assert await asyncio.wait_for(first.wait(), 20) == 0
    await looking
    ready = [code for path, code in seen if path == "/ready"]
    assert ready == sorted(ready) and ready[-1] == 503, "it never becomes ready again"
    assert {code for path, code in seen if path == "/live"} == {200}, "it is alive until the end"
    second.send_signal(signal.SIGINT)
    assert await asyncio.wait_for(second.wait(), 20) == 0


async def test_streams_that_exceed_the_grace_period_end_with_an_error(rig: Rig) -> None:
    port, own = free_port(), free_port()
    await rig.worker("w0", port)
    flags = ("--name", "f0", "--static", f"127.0.0.1:{port}", "--port", str(own), "--grace-s", "0.3")
    first = await rig.start("frontend", *flags, HOLDFAST_FRONTEND__ADMISSION__INFLIGHT_MAX="1")
    rig.url = f"http://127.0.0.1:{own}"
    await until(lambda: rig.healthy("f0", 1))

    async def waits() -> tuple[int, str]:
        async with rig.http.post(rig.url + "/v1/completions", json=ASK) as answer:
            return answer.status, (await answer.json())["error"]["message"]

    waiting: list[asyncio.Task[tuple[int, str]]] = []

    async def leave(count: int, worker: str) -> None:
        if count == 1:
            waiting.append(asyncio.create_task(waits()))
        if count == 20:
            first.send_signal(signal.SIGTERM)

    events = await asyncio.wait_for(rig.stream(leave, max_tokens=3_000), 20)
    assert events[-1]["error"]["code"] == "draining"
    assert 10 <= len(events) < 3_000
    assert await waiting[0] == (503, "no worker became free before this frontend shut down")
    assert await asyncio.wait_for(first.wait(), 20) == 0


@asynccontextmanager
async def occupied() -> AsyncIterator[int]:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield int(holder.getsockname()[1])


@pytest.mark.slow
async def test_a_port_in_use_gives_one_sentence_and_exit_code_one(rig: Rig, nats_url: str) -> None:
    async with occupied() as port:
        process = await rig.start("frontend", "--port", str(port), HOLDFAST_NATS_URL=nats_url)
        assert await asyncio.wait_for(process.wait(), 20) == 1
        words = rig.log.read_text()
        assert f"port {port}" in words
        assert "Traceback" not in words and "Warning" not in words
