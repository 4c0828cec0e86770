"""The request plane's server with the simulated engine, over real sockets and a real broker."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import get_args

import pytest
from engine_contract import prompt
from frontend_routes import FrontendRoute, narrow
from plain_frontend import PlainFrontend
from recording_transport import Line
from simulated_kit import generate, run
from waits import turns

from events.wire import Chunk, Generate, Hello, Load, Logprob, ProxiedPiece, Splitter, Step, Why, to_frontend
from workers.counters import Ends
from workers.engines.engine import Announce, Deliver, EngineIdentity, Import, Phase, discard_events
from workers.engines.simulated.engine import SimulatedEngine
from workers.engines.simulated.scheduler import Scheduler
from workers.engines.simulated.sequence import EngineShape
from workers.engines.simulated.timing import ConstantTiming
from workers.frontends import BufferLimits
from workers.kv_transfer.messages import Description
from workers.server import FrontendProtocol, WorkerServer
from workers.shutdown import DRAINING, LEAVING, drain

Dial = Callable[..., Awaitable[PlainFrontend]]
Eventually = Callable[..., Awaitable[None]]
Serve = Callable[..., Awaitable[WorkerServer]]
SHAPE = EngineShape(kv_blocks=65_536)


@pytest.fixture
async def serve(route: FrontendRoute) -> AsyncIterator[Serve]:
    """`await serve(itl_s=0)` starts a server around a simulated engine."""
    running: list[tuple[WorkerServer, SimulatedEngine]] = []

    async def start(patience: BufferLimits | None = None, **timing: float) -> WorkerServer:
        engine = SimulatedEngine(SHAPE, ConstantTiming(**timing))
        server = WorkerServer(worker="w0", instance="i1", engine=engine, patience=patience)
        await engine.start(server.deliver)
        await route.open(server)
        running.append((server, engine))
        return server

    yield start
    for server, engine in running:
        await server.close()
        await engine.stop()


@pytest.fixture
async def dial(route: FrontendRoute) -> AsyncIterator[Dial]:
    """`await dial(server)` connects a frontend, and closes it at the end."""
    dialled: list[PlainFrontend] = []

    async def connect(server: WorkerServer, hello: Hello | None = None) -> PlainFrontend:
        dialled.append(await route.connect(server, hello))
        return dialled[-1]

    yield connect
    for frontend in dialled:
        frontend.transport.abort()
        await frontend.lost()


def undisturbed(tokens: list[int], most: int) -> list[int]:
    """Return the answer of an undisturbed engine."""
    scheduler = Scheduler(SHAPE)
    scheduler.submit(1, generate(tokens, most))
    return run(scheduler, most + 5)[1]


def engine_of(server: WorkerServer) -> SimulatedEngine:
    assert isinstance(server.engine, SimulatedEngine)
    return server.engine


async def test_a_hello_is_answered_with_the_workers_identity(serve: Serve, dial: Dial) -> None:
    frontend = await dial(await serve())
    await frontend.until(lambda: frontend.welcome and frontend.beats)
    welcome = frontend.welcome
    assert welcome is not None
    assert (welcome.worker, welcome.instance, welcome.model) == ("w0", "i1", "sim")


@pytest.mark.parametrize("first", [Hello("test", version=99), Generate(1, "r", [300], 1, None)])  # type: ignore[arg-type]
async def test_a_connection_without_a_valid_hello_is_closed(serve: Serve, first: Hello, dial: Dial) -> None:
    frontend = await dial(await serve(), first)
    await frontend.lost()


@pytest.mark.parametrize("rubbish", [b"\xff\xff\xff\xff", b"\x03\x00\x00\x00abc", b"GET / HTTP/1.1\r\n\r\n"])
async def test_garbage_closes_only_its_own_connection(serve: Serve, rubbish: bytes, dial: Dial) -> None:
    server = await serve()
    good = await dial(server)
    bad = await dial(server)
    bad.transport.write(rubbish)
    await bad.lost()
    assert await good.answer(good.ask(prompt())) == undisturbed(prompt(), 16)


async def test_a_step_is_one_frame_with_all_streams(serve: Serve, dial: Dial) -> None:
    frontend = await dial(await serve(itl_s=0.002))
    streams = [frontend.ask(prompt(salt=n), max_tokens=50) for n in range(8)]
    for stream in streams:
        await frontend.answer(stream)
    assert max(len(step.chunks) for step in frontend.steps) == 8
    assert len(frontend.steps) < 100


async def test_each_frontend_gets_its_own_streams_only(serve: Serve, dial: Dial) -> None:
    server = await serve()
    frontends = [await dial(server) for _ in range(3)]
    asked = [(f, n, f.ask(prompt(salt=n), max_tokens=100)) for n, f in enumerate(frontends)]
    for frontend, n, stream in asked:
        assert await frontend.answer(stream) == undisturbed(prompt(salt=n), 100)
        assert {chunk.stream for step in frontend.steps for chunk in step.chunks} == {stream}


async def test_two_hundred_streams_at_once_are_all_exact(serve: Serve, dial: Dial) -> None:
    frontend = await dial(await serve())
    streams = {frontend.ask(prompt(20 + n % 50, n), max_tokens=40): n for n in range(200)}
    for stream, n in streams.items():
        assert await frontend.answer(stream) == undisturbed(prompt(20 + n % 50, n), 40)


async def test_a_cancelled_stream_is_removed(serve: Serve, dial: Dial) -> None:
    server = await serve(itl_s=0.005)
    frontend = await dial(server)
    stream = frontend.ask(prompt(), max_tokens=8000)
    await frontend.until(lambda: frontend.tokens(stream))
    frontend.cancel(stream)
    await frontend.until(lambda: server.in_flight == 0 and frontend.beats[-1].load.running == 0)
    assert engine_of(server).load().running == 0
    assert server.counters.cancelled == 1


@pytest.mark.parametrize("how", ["abort", "close"])
async def test_a_broken_connection_ends_its_streams(serve: Serve, how: str, dial: Dial) -> None:
    server = await serve(itl_s=0.005)
    frontend = await dial(server)
    other = await dial(server)
    streams = [frontend.ask(prompt(salt=n), max_tokens=5000) for n in range(5)]
    kept = other.ask(prompt(), max_tokens=60)
    await frontend.until(lambda: all(frontend.tokens(stream) for stream in streams))
    getattr(frontend.transport, how)()
    await other.until(lambda: engine_of(server).load().running <= 1)
    assert await other.answer(kept) == undisturbed(prompt(), 60)


async def test_beats_are_sent_during_a_long_step(serve: Serve, dial: Dial) -> None:
    server = await serve(itl_s=30.0)  # the engine is stuck in one step; the loop is not
    frontend = await dial(server)
    frontend.ask(prompt(), max_tokens=2)
    await frontend.until(lambda: len(frontend.beats) >= 11)
    beat = frontend.beats[-1]
    assert (beat.phase, beat.load.running) == ("decode", 1)
    assert beat.step_age_ms > frontend.beats[-5].step_age_ms > 0


async def test_a_beat_reports_the_tokens_of_a_prefill(serve: Serve, dial: Dial) -> None:
    server = await serve(prefill_tokens_per_s=100)
    frontend = await dial(server)
    frontend.ask(prompt(3000))
    await frontend.until(lambda: frontend.beats and frontend.beats[-1].phase == "prefill")
    assert frontend.beats[-1].prefill_tokens == 3000


# --- frontends that do not read


@pytest.mark.slow
async def test_a_slow_reader_gets_every_token_in_fewer_frames(
    serve: Serve, dial: Dial, eventually: Eventually
) -> None:
    server = await serve(patience=BufferLimits(buffer_bytes=1024))
    frontend = await dial(server)
    await frontend.until(lambda: frontend.welcome)
    narrow(server)
    frontend.transport.pause_reading()  # fills the kernel's buffers
    streams = {frontend.ask(prompt(salt=n), max_tokens=4_000): n for n in range(20)}
    await eventually(lambda: server.counters.requests == 20 and not server.in_flight, 60)
    frontend.transport.resume_reading()
    for stream, n in streams.items():
        assert await frontend.answer(stream) == undisturbed(prompt(salt=n), 4_000)
    assert max(len(chunk.tokens) for step in frontend.steps for chunk in step.chunks) > 1


async def test_the_backlog_of_a_slow_reader_is_one_chunk_per_stream_with_all_output() -> None:
    line, server = Line(), WorkerServer(worker="w0", instance="i1", engine=SimulatedEngine(SHAPE))
    protocol = FrontendProtocol(server)
    protocol.connection_made(line)
    connection = protocol.connection
    assert connection is not None
    protocol.pause_writing()
    for chunk in (
        Chunk(1, [300, 301], None, None, [Logprob(-1.0, [])] * 2, cached_tokens=4),
        Chunk(2, [], cached_tokens=None),
        Chunk(3, [], text="a"),
        Chunk(1, [302], None, None, [Logprob(-2.0, [])]),
        Chunk(2, [303], cached_tokens=8),
        Chunk(3, [], text="b"),
        Chunk(3, [305]),  # tokens after text: one chunk could not express their order
        Chunk(2, [304], finish="length"),
        Chunk(3, [306], finish="stop"),
        Chunk(1, [], error="engine_error: it broke"),
    ):
        connection.batch.append(chunk)
        connection.flush()
    assert not line.written
    protocol.resume_writing()
    (body,) = Splitter().feed(bytes(line.written))
    logprobs = [Logprob(-1.0, []), Logprob(-1.0, []), Logprob(-2.0, [])]
    assert to_frontend.decode(body) == Step(
        [
            Chunk(1, [300, 301, 302], None, "engine_error: it broke", logprobs, cached_tokens=4),
            Chunk(2, [303, 304], "length", cached_tokens=8),
            Chunk(3, [], text="ab"),
            Chunk(3, [305, 306], "stop"),
        ]
    )
    protocol.pause_writing()
    connection.batch.append(Chunk(4, [307]))
    connection.flush()
    protocol.resume_writing()
    assert [to_frontend.decode(body) for body in Splitter().feed(bytes(line.written))][1:] == [
        Step([Chunk(4, [307])])
    ], "what was sent is forgotten"


async def test_a_frontend_that_never_reads_is_closed_at_the_backlog_limit(
    serve: Serve, dial: Dial, eventually: Eventually
) -> None:
    server = await serve(patience=BufferLimits(buffer_bytes=1024, backlog_bytes_max=10_000))
    frontend = await dial(server)
    await frontend.until(lambda: frontend.welcome)
    narrow(server)
    frontend.transport.pause_reading()
    for n in range(60):
        frontend.ask(prompt(salt=n), max_tokens=4_000)
    await eventually(lambda: server.counters.cancelled == 60, 20)
    assert engine_of(server).load() == Load(kv_total=65_536)
    frontend.transport.resume_reading()
    await frontend.lost()


async def test_proxied_responses_count_towards_the_backlog_limit(serve: Serve, dial: Dial) -> None:
    server = await serve(patience=BufferLimits(buffer_bytes=1024, backlog_bytes_max=10_000))
    frontend = await dial(server)
    await frontend.until(lambda: frontend.welcome)
    (connection,) = server.connections.open
    connection.pause()
    for _ in range(3):
        connection.batch.append(Chunk(1, [], proxied=ProxiedPiece(b"x" * 4_000)))
        connection.flush()
    assert connection.transport is None or connection.transport.is_closing()  # before the time limit
    await frontend.lost()


async def test_a_proxied_stream_stays_when_others_are_sent_elsewhere(
    serve: Serve, dial: Dial, eventually: Eventually
) -> None:
    """No other worker can continue it."""
    server = await serve(itl_s=0.01)
    frontend = await dial(server)
    movable, proxied = (
        frontend.ask(prompt(), max_tokens=4_000),
        frontend.ask(prompt(salt=1), max_tokens=4_000),
    )
    await frontend.until(lambda: frontend.tokens(movable) and frontend.tokens(proxied))
    (stream,) = [one for one in server.streams.by_key.values() if one.number == proxied]
    stream.proxied = True
    server.output.send_elsewhere("engine_shutdown: it leaves")
    await frontend.until(lambda: frontend.end(movable) is not None)
    assert server.in_flight == 1 and frontend.end(proxied) is None
    frontend.cancel(proxied)
    await eventually(lambda: not server.in_flight)


async def test_a_frontend_that_stops_reading_is_closed_after_the_time_limit(
    serve: Serve, dial: Dial, eventually: Eventually
) -> None:
    server = await serve(patience=BufferLimits(buffer_bytes=1024, stalled_s_max=0.1))
    frontend = await dial(server)
    await frontend.until(lambda: frontend.welcome)
    frontend.transport.pause_reading()
    frontend.ask(prompt(), max_tokens=16_000, logprobs=20)
    for n in range(20):
        frontend.ask(prompt(salt=n), max_tokens=16_000, logprobs=20)
    await eventually(lambda: not server.connections.open, 30)
    assert server.in_flight == 0


@pytest.mark.slow
async def test_the_backlog_is_sent_before_the_connection_closes(
    serve: Serve, dial: Dial, eventually: Eventually
) -> None:
    server = await serve(patience=BufferLimits(buffer_bytes=1024))
    frontend = await dial(server)
    await frontend.until(lambda: frontend.welcome)
    narrow(server)
    frontend.transport.pause_reading()
    streams = [frontend.ask(prompt(salt=n), max_tokens=4_000) for n in range(60)]
    await eventually(lambda: server.counters.completed > 50, 20)
    closing = asyncio.ensure_future(server.close(10.0))
    await turns()
    frontend.transport.resume_reading()
    await closing
    await frontend.lost()
    assert sum(frontend.end(stream) is not None for stream in streams) > 50


# --- draining


async def test_a_draining_worker_finishes_running_streams_and_accepts_only_canaries(
    serve: Serve, dial: Dial
) -> None:
    server = await serve(itl_s=0.002)
    frontend = await dial(server)
    running = frontend.ask(prompt(), max_tokens=100)
    await frontend.until(lambda: frontend.tokens(running))
    draining = asyncio.ensure_future(drain(server, DRAINING, 20.0))
    await frontend.until(lambda: frontend.beats[-1].draining)
    refused = frontend.ask(prompt(salt=1))
    canary = frontend.ask(prompt(salt=2), canary=True)
    assert await frontend.answer(running) == undisturbed(prompt(), 100)
    assert await frontend.answer(canary) == undisturbed(prompt(salt=2), 16)
    await frontend.answer(refused)
    end = frontend.end(refused)
    assert end is not None and (end.error or "").startswith("engine_shutdown")
    assert (await draining).migrated == 0


async def test_a_drain_counts_how_every_stream_ended(
    serve: Serve, dial: Dial, eventually: Eventually
) -> None:
    server = await serve(itl_s=0.002)
    frontend, broken = await dial(server), await dial(server)
    before = frontend.ask(prompt(salt=9), max_tokens=2)
    await frontend.answer(before)
    streams = {why: frontend.ask(prompt(salt=n), max_tokens=10_000) for n, why in enumerate(get_args(Why))}
    lost, raised = broken.ask(prompt(salt=5), max_tokens=10_000), frontend.ask(prompt(salt=6), max_tokens=400)
    await frontend.until(lambda: all(frontend.tokens(stream) for stream in (*streams.values(), raised)))
    await broken.until(lambda: broken.tokens(lost))
    draining = asyncio.ensure_future(drain(server, DRAINING, 20.0))
    await frontend.until(lambda: frontend.beats[-1].draining)
    for why, stream in streams.items():
        frontend.cancel(stream, why)
    broken.transport.abort()
    await eventually(lambda: server.in_flight == 1)
    engine_of(server).chaos("error", 1)
    assert await draining == Ends(completed=1, migrated=2, cancelled=2, failed=1)
    assert server.drain.drained() == Ends(), "each is reported once"


async def test_a_drain_that_runs_out_of_time_sends_the_rest_elsewhere(serve: Serve, dial: Dial) -> None:
    server = await serve(itl_s=0.01)
    frontend = await dial(server)
    stream = frontend.ask(prompt(), max_tokens=10_000)
    await frontend.until(lambda: frontend.tokens(stream))
    drained = await drain(server, LEAVING, 0.1)
    assert (drained.completed, drained.migrated) == (0, 1)
    tokens = await frontend.answer(stream)
    end = frontend.end(stream)
    assert end is not None and (end.error or "").startswith("engine_shutdown")
    assert tokens == undisturbed(prompt(), 10_000)[: len(tokens)]
    assert engine_of(server).load().running == 0
    canary = frontend.ask(prompt(), canary=True)
    await frontend.answer(canary)
    assert (frontend.end(canary) or Chunk(0, [])).error is not None


async def test_canaries_do_not_count_as_user_requests(serve: Serve, dial: Dial) -> None:
    server = await serve()
    frontend = await dial(server)
    await frontend.answer(frontend.ask(prompt(), canary=True))
    engine_of(server).chaos("error", 1)
    await frontend.answer(frontend.ask(prompt(), canary=True))
    assert (server.counters.requests, server.counters.completed, server.counters.errors) == (0, 0, {})
    await frontend.answer(frontend.ask(prompt()))
    assert (server.counters.requests, server.counters.completed) == (1, 1)


# --- a network that drops everything


async def test_a_blackhole_drops_both_directions_and_closes_nothing_until_it_heals(
    serve: Serve, dial: Dial, eventually: Eventually
) -> None:
    server = await serve(itl_s=0.005)
    frontend = await dial(server)
    stream = frontend.ask(prompt(), max_tokens=10_000)
    await frontend.until(lambda: len(frontend.tokens(stream)) > 3)
    server.connections.blackhole(True)
    await turns()
    newcomer = await dial(server)
    sent = server.counters.tokens
    await eventually(lambda: server.counters.tokens > sent + 20)  # by then, frames under way have arrived
    heard = len(frontend.frames)
    steps = engine_of(server).load().running
    await eventually(lambda: server.counters.tokens > len(frontend.tokens(stream)) + 50)
    assert (len(frontend.frames), steps, frontend.closed.is_set()) == (heard, 1, False)
    assert newcomer.frames == []
    server.connections.blackhole(False)
    await frontend.lost()
    await newcomer.lost()
    after = await dial(server)
    assert await after.answer(after.ask(prompt())) == undisturbed(prompt(), 16)


# --- engines with threads of their own


class ThreadedEngine:
    """Emits one token of every request from another thread, and nothing more."""

    announces = False
    kv: tuple[Description, ...] = ()

    def __init__(self) -> None:
        self.identity: EngineIdentity = SimulatedEngine(SHAPE).identity
        self.deliver: Deliver = lambda out: None

    async def start(self, deliver: Deliver, announce: Announce = discard_events) -> None:
        self.deliver = deliver

    def submit(self, key: int, request: Generate) -> None:
        thread = threading.Thread(target=lambda: self.deliver([(key, Chunk(0, [300], "length"))]))
        thread.start()
        thread.join()

    def export(self, key: int) -> None: ...
    def reserve(self, key: int, request: Generate, room_tokens: int) -> Import | str:
        return "this engine takes no KV cache in"

    def awaits(self) -> None: ...
    def cancel(self, key: int) -> None: ...
    def trust(self, trusted: bool) -> None: ...
    def limit_batch(self, share: float) -> None: ...
    def phase(self) -> Phase:
        return Phase()

    def load(self) -> Load:
        return Load()

    def ranks(self) -> list[Load]:
        return []

    async def check(self) -> None: ...
    def chaos(self, fault: str, argument: float, rank: int = 0) -> bool:
        return False

    def heal(self, fault: str, rank: int = 0) -> None: ...

    async def stop(self) -> None: ...


async def test_output_from_another_thread_is_sent_from_the_loop(route: FrontendRoute, dial: Dial) -> None:
    engine = ThreadedEngine()
    server = WorkerServer(worker="w0", instance="i1", engine=engine)
    await engine.start(server.deliver)
    await route.open(server)
    frontend = await dial(server)
    assert await frontend.answer(frontend.ask([300])) == [300]
    await server.close()
