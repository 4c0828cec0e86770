"""Strangers that connect to a worker and send nothing or half a hello keep no frontend out."""

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import pytest
from plain_frontend import PlainFrontend
from waits import until

from workers.engines.simulated.engine import SimulatedEngine
from workers.engines.simulated.sequence import EngineShape
from workers.engines.simulated.timing import ConstantTiming
from workers.frontends import FrontendLimits
from workers.server import WorkerServer

SECONDS = 20.0


@asynccontextmanager
async def serving(limits: FrontendLimits) -> AsyncIterator[WorkerServer]:
    """A server around a simulated engine."""
    engine = SimulatedEngine(EngineShape(), ConstantTiming())
    server = WorkerServer(worker="w0", instance="i1", engine=engine, limits=limits)
    await engine.start(server.deliver)
    await server.start("127.0.0.1", 0)
    try:
        yield server
    finally:
        await server.close()
        await engine.stop()


@asynccontextmanager
async def stranger(server: WorkerServer, sent: bytes = b"") -> AsyncIterator[asyncio.StreamReader]:
    """A client that has connected and sent these bytes."""
    reader, writer = await asyncio.open_connection(*server.address)
    writer.write(sent)
    try:
        async with asyncio.timeout(SECONDS):
            yield reader
    finally:
        writer.close()


async def gone(reader: asyncio.StreamReader) -> None:
    """Wait until the worker has closed the connection."""
    with suppress(ConnectionResetError):
        assert await reader.read() == b""


async def greeted(server: WorkerServer, stack: AsyncExitStack) -> PlainFrontend:
    """A frontend that has completed its handshake."""
    frontend = await PlainFrontend.connect(server.address[1])

    async def leave() -> None:
        frontend.transport.abort()
        await frontend.lost()

    stack.push_async_callback(leave)
    await frontend.until(lambda: frontend.welcome)
    return frontend


HALF = struct.pack("<I", 100) + b"\x93"


@pytest.mark.parametrize("sent", [b"", HALF])
@pytest.mark.parametrize(
    ("limits", "why"),
    [
        (FrontendLimits(8, 0), "connections"),
        (FrontendLimits(0, 8), "connections_of_address"),
    ],
)
async def test_the_oldest_stranger_is_closed_to_make_room(
    sent: bytes, limits: FrontendLimits, why: str
) -> None:
    async with serving(limits) as server, AsyncExitStack() as stack:
        strangers = [await stack.enter_async_context(stranger(server, sent)) for _ in range(20)]
        frontends = [await greeted(server, stack) for _ in range(3)]
        for reader in strangers[:15]:
            await gone(reader)
        assert len(server.connections.open) == 8
        assert server.counters.connections_refused == {why: 15}
        assert not any(frontend.closed.is_set() for frontend in frontends)


@pytest.mark.parametrize("limits", [FrontendLimits(3, 0), FrontendLimits(0, 3)])
async def test_the_frontend_that_is_idle_for_longest_is_closed_to_make_room(limits: FrontendLimits) -> None:
    """Unused connections with the fleet's key keep no frontend out."""
    async with serving(limits) as server, AsyncExitStack() as stack:
        first = await greeted(server, stack)
        second = await greeted(server, stack)
        began = asyncio.get_running_loop().time()
        await until(lambda: asyncio.get_running_loop().time() > began + 0.001)  # it counts milliseconds
        third = await greeted(server, stack)
        await first.answer(first.ask([300, 301], max_tokens=2))
        async with stranger(server), stranger(server):
            assert not any(one.closed.is_set() for one in (first, second, third)), (
                "a stranger displaces no frontend"
            )
            fourth = await greeted(server, stack)
            async with asyncio.timeout(SECONDS):
                await second.closed.wait()
            assert not any(one.closed.is_set() for one in (first, third, fourth))


async def test_the_newcomer_is_refused_if_all_frontends_have_streams() -> None:
    async with serving(FrontendLimits(2, 0)) as server, AsyncExitStack() as stack:
        frontends = [await greeted(server, stack) for _ in range(2)]
        for frontend in frontends:
            frontend.ask([300, 301], max_tokens=100_000)
        await until(lambda: all(one.streams for one in server.connections.open))
        newcomer = await PlainFrontend.connect(server.address[1])
        async with asyncio.timeout(SECONDS):
            await newcomer.closed.wait()
        assert not any(frontend.closed.is_set() for frontend in frontends)
        assert newcomer.welcome is None


async def test_without_limits_any_number_of_frontends_can_connect() -> None:
    async with serving(FrontendLimits(0, 0)) as server, AsyncExitStack() as stack:
        for _ in range(20):
            await stack.enter_async_context(stranger(server))
        await greeted(server, stack)
        assert len(server.connections.open) == 21 and not server.counters.connections_refused


async def test_a_connection_without_a_hello_may_send_only_small_frames() -> None:
    """The server does not buffer sixteen megabytes for an unknown client."""
    async with serving(FrontendLimits()) as server, stranger(server, struct.pack("<I", 5000)) as reader:
        await gone(reader)
        async with AsyncExitStack() as stack:
            frontend = await greeted(server, stack)
            stream = frontend.ask(list(range(300, 8000)), max_tokens=2)
            await frontend.answer(stream)
