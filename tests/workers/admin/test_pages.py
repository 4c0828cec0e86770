"""The admin port's HTTP server: pages by path; no client can block it."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterable
from types import SimpleNamespace

import pytest
from prometheus_client.core import Metric
from waits import turns

from events.process.exposition import LabelSets, written
from workers.admin import server as admin
from workers.admin.server import PageAnswer, Pages
from workers.counters import WorkerCounters
from workers.engines.simulated.engine import SimulatedEngine
from workers.engines.simulated.sequence import EngineShape


@pytest.fixture
async def port(request: pytest.FixtureRequest) -> AsyncIterator[int]:
    """A server of one page. Its parameter: the seconds allowed for a request."""
    bound = getattr(request, "param", admin.REQUEST_S_MAX)
    served = Pages({"/live": lambda: PageAnswer(b'{"status":"live"}')}, bound)
    yield await served.start("127.0.0.1", 0)
    served.close()


async def ask(port: int, request: bytes) -> bytes:
    """Return everything that the server sends until it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        async with asyncio.timeout(30):
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("request_", "begins", "body"),
    [
        (b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n", b"HTTP/1.1 200 OK\r\n", b'{"status":"live"}'),
        (b"GET /live?now=1 HTTP/1.0\r\n\r\n", b"HTTP/1.1 200 OK\r\n", b'{"status":"live"}'),
        (b"HEAD /live HTTP/1.1\r\n\r\n", b"HTTP/1.1 200 OK\r\n", b""),
        (b"GET /nothing HTTP/1.1\r\n\r\n", b"HTTP/1.1 404 Not Found\r\n", b"Not Found\n"),
        (b"POST /live HTTP/1.1\r\n\r\n", b"HTTP/1.1 405 Method Not Allowed\r\n", b"Method Not Allowed\n"),
    ],
)
async def test_a_page_is_found_by_its_path(port: int, request_: bytes, begins: bytes, body: bytes) -> None:
    said = await ask(port, request_)
    assert said.startswith(begins)
    assert said.partition(b"\r\n\r\n")[2] == body


@pytest.mark.parametrize("workers", [1, 1 + admin.INLINE_SAMPLES_MAX])
async def test_a_scrape_does_not_block_the_loop(workers: int) -> None:
    threads = set[int]()

    def generate(families: Iterable[Metric], known: LabelSets) -> bytes:
        threads.add(threading.get_ident())
        return written(families, known)

    engine = SimulatedEngine(EngineShape())
    config, moves = SimpleNamespace(name="w0"), SimpleNamespace(source=[], target=[])
    drain = SimpleNamespace(draining=False)
    server = SimpleNamespace(counters=WorkerCounters(), in_flight=0, drain=drain, moves=moves)
    served, url = await admin.serve(
        [SimpleNamespace(config=config, engine=engine, kv=None, server=server)] * workers,  # type: ignore[list-item]
        lambda: False,
        "127.0.0.1",
        0,
        generate,
    )
    scrape = asyncio.create_task(ask(int(url.rpartition(":")[2]), b"GET /metrics HTTP/1.1\r\n\r\n"))
    passed = 0
    while not scrape.done():
        await turns()
        passed += 1
    served.close()
    families = (await scrape).count(b"# TYPE ")
    assert families > 30 and passed > families  # at least one turn per family
    if workers > admin.INLINE_SAMPLES_MAX:  # long work runs in a thread, short work on the loop
        assert threads - {threading.get_ident()}
    else:
        assert threads == {threading.get_ident()}


async def test_a_request_that_never_ends_is_aborted(port: int) -> None:
    assert await ask(port, b"GET /live HTTP/1.1\r\nX: " + b"x" * 2 * admin.REQUEST_BYTES_MAX) == b""


@pytest.mark.parametrize("port", [0.2], indirect=True)
async def test_a_silent_client_is_closed_and_others_are_answered(port: int) -> None:
    silent = asyncio.create_task(ask(port, b"GET /li"))
    assert b"200 OK" in await ask(port, b"GET /live HTTP/1.1\r\n\r\n")
    assert await silent == b""


async def test_silent_clients_are_closed_to_make_room_for_requests(port: int) -> None:
    silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(admin.CONNECTIONS_MAX + 20)]
    for _ in range(3):
        assert b"200 OK" in await ask(port, b"GET /live HTTP/1.1\r\n\r\n")
    for _, writer in silent:
        writer.close()
