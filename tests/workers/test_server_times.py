"""The send times of the request plane's server, in virtual time.

In real time, a busy machine would be late with all frames.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from engine_contract import prompt
from plain_frontend import PlainFrontend
from recording_transport import Line
from waits import turns, virtual

from benchmarks.virtual_loop import VirtualLoop
from events.wire import Beat, Chunk, Hello, Splitter, Step, to_frontend
from workers.engines.simulated.engine import SimulatedEngine
from workers.engines.simulated.sequence import EngineShape
from workers.engines.simulated.timing import ConstantTiming
from workers.frontends import LOAD_S, TICK_S, BufferLimits
from workers.server import FrontendProtocol, WorkerServer

LOOP = VirtualLoop
SHAPE = EngineShape(kv_blocks=65_536)


@asynccontextmanager
async def serving(**timing: float) -> AsyncIterator[WorkerServer]:
    """A server around a simulated engine."""
    engine = SimulatedEngine(SHAPE, ConstantTiming(**timing))
    server = WorkerServer(worker="w0", instance="i1", engine=engine)
    await engine.start(server.deliver)
    await server.start("127.0.0.1", 0)
    try:
        yield server
    finally:
        await server.close()
        await engine.stop()


@asynccontextmanager
async def entered(server: WorkerServer) -> AsyncIterator[PlainFrontend]:
    """A frontend that has sent a hello."""
    _, frontend = await asyncio.get_running_loop().create_connection(PlainFrontend, *server.address)
    frontend.say(Hello("test"))
    try:
        yield frontend
    finally:
        frontend.transport.abort()
        await frontend.lost()


def now() -> float:
    return asyncio.get_running_loop().time()


async def test_beats_are_sent_ten_times_a_second_while_streams_are_open() -> None:
    async with serving(itl_s=30.0) as server, entered(server) as frontend:  # stuck in one step
        frontend.ask(prompt(), max_tokens=2)
        began = now()
        await frontend.until(lambda: len(frontend.beats) >= 11)
        assert now() - began == pytest.approx(11 * TICK_S, abs=0.1) and TICK_S < 0.1


async def test_beats_are_rare_while_steps_are_sent() -> None:
    async with serving(itl_s=0.01) as server, entered(server) as frontend:
        began, before = now(), len(frontend.beats)
        await frontend.answer(frontend.ask(prompt(), max_tokens=101))
        assert now() - began == pytest.approx(1.0, abs=0.05)
        assert 1.0 // LOAD_S <= len(frontend.beats) - before <= 6


async def test_an_idle_worker_sends_one_beat_a_second_to_all_frontends_at_once() -> None:
    async with serving() as server, entered(server) as frontend:
        await virtual(0.4)
        async with entered(server) as other:
            await frontend.until(lambda: len(frontend.beats) >= 4)
            await other.until(lambda: len(other.beats) >= 3)
            assert frontend.beats[-1].phase == "idle"
            assert frontend.heard_at[-1] - frontend.heard_at[-2] == pytest.approx(1.0, abs=0.1)
            assert frontend.heard_at[-1] == other.heard_at[-1]


async def test_a_cancelled_stream_is_removed_within_a_tenth_of_a_second() -> None:
    async with serving(itl_s=0.005) as server, entered(server) as frontend:
        stream = frontend.ask(prompt(), max_tokens=5000)
        await frontend.until(lambda: frontend.tokens(stream))
        frontend.cancel(stream)
        began = now()
        await turns()
        await frontend.until(lambda: server.in_flight == 0)
        assert now() - began < 0.1


async def test_steps_of_a_burst_are_sent_together_and_begins_and_ends_at_once() -> None:
    patience = BufferLimits(burst_s=0.3)
    line, server = (
        Line(),
        WorkerServer(worker="w0", instance="i1", engine=SimulatedEngine(SHAPE), patience=patience),
    )
    protocol = FrontendProtocol(server)
    protocol.connection_made(line)
    connection = protocol.connection
    assert connection is not None
    splitter = Splitter()

    def say(*chunks: Chunk) -> None:
        connection.batch += chunks
        connection.flush()

    def sent() -> list[object]:
        frames = [to_frontend.decode(body) for body in splitter.feed(bytes(line.written))]
        line.written.clear()
        return frames

    say(Chunk(1, [300], cached_tokens=0))
    assert sent() == [Step([Chunk(1, [300], cached_tokens=0)])]
    await virtual(0.4)
    say(Chunk(1, [301]))
    assert sent() == [Step([Chunk(1, [301])])], "the last step was long ago"
    say(Chunk(1, [302]))
    say(Chunk(1, [303]))
    assert sent() == []
    await virtual(0.4)
    assert sent() == [Step([Chunk(1, [302, 303])])]
    say(Chunk(1, [304]))
    say(Chunk(1, [305]))
    say(Chunk(2, [400], cached_tokens=16))
    assert sent() == [Step([Chunk(1, [304, 305]), Chunk(2, [400], cached_tokens=16)])]
    say(Chunk(1, [306]))
    connection.send(Beat("decode", 1.0))
    assert sent() == [Step([Chunk(1, [306])]), Beat("decode", 1.0)], "in the order in which it happened"
    say(Chunk(2, [401]))
    say(Chunk(2, [402], "length"))
    assert sent() == [Step([Chunk(2, [401, 402], "length")])]
    say(Chunk(4, [600], cached_tokens=0), Chunk(1, [307]))
    assert sent() == [Step([Chunk(4, [600], cached_tokens=0), Chunk(1, [307])])], "there was no backlog"
    say(Chunk(4, [601]))
    assert sent() == [], "the burst continues"
    say(Chunk(4, [602], "stop"))
    assert sent() == [Step([Chunk(4, [601, 602], "stop")])]
    say(Chunk(1, [307]))
    protocol.pause_writing()
    await virtual(0.4)
    assert sent() == [], "the frontend has stopped reading meanwhile"
    say(Chunk(1, [308], "stop"))
    assert sent() == []
    protocol.resume_writing()
    assert sent() == [Step([Chunk(1, [307, 308], "stop")])]
    say(Chunk(3, [500]))
    connection.close()
    assert sent() == [Step([Chunk(3, [500])])]
    say(Chunk(3, [501]))
    protocol.connection_lost(None)
    await virtual(0.4)
    assert sent() == []
