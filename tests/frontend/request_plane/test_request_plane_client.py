"""The client side of the request plane: connections, notified streams, no worker blamed falsely."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from move_random_walk import Connections, Model
from scripted_worker import Act, ScriptedWorker, undisturbed
from transports import Road
from waits import turns, until

from controller.adapters.request_plane.client import RequestPlaneClient
from controller.adapters.request_plane.dialers import TcpDialer
from controller.adapters.request_plane.hang import HangDetector, HangPolicy, Process
from controller.adapters.request_plane.worker_links import Address, PlaneLimits
from controller.ports import WorkerUnreachable
from controller.processes.controller import PROBER
from events.wire import Beat, Chunk, Generate, Load, Sampling, Welcome, encode

PROMPT = [300, 301, 302]
ENOUGH_S = 20.0


class RecordingSink:
    """A sink that records the answer and its end."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.flushes = 0
        self.end: str | None = None
        self.done = asyncio.Event()

    def take(self, chunk: Chunk) -> None:
        self.tokens += chunk.tokens
        self.end = chunk.finish or chunk.error or self.end
        if chunk.finish or chunk.error:
            self.done.set()

    def flush(self) -> None:
        self.flushes += 1

    def lost(self, cause: str, detail: str) -> None:
        self.end = f"{cause}: {detail}"
        self.done.set()


def question(count: int = 8, rank: int = 0) -> Generate:
    sampling = Sampling(max_tokens=count)
    return Generate(stream=0, request="r", tokens=list(PROMPT), prompt_tokens=3, sampling=sampling, rank=rank)


@asynccontextmanager
async def plane_to(
    road: Road, *workers: ScriptedWorker, limits: PlaneLimits | None = None
) -> AsyncIterator[RequestPlaneClient]:
    plane = road.plane("f1", limits)
    for worker in workers:
        await road.lay(worker).start()
    plane.set_workers({w.name: Address(w.instance, w.url) for w in workers})
    task = asyncio.create_task(plane.run())
    await until(lambda: len(plane.connected) == len(workers))
    try:
        yield plane
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for worker in workers:
            await worker.stop()


async def next_report(plane: RequestPlaneClient, worker: ScriptedWorker) -> None:
    """Wait until another report of the worker's load has arrived."""
    worker.kv_used += 1
    await until(lambda: (plane.load(worker.name) or Load()).kv_used == worker.kv_used)


async def test_a_stream_runs_to_its_end(road: Road) -> None:
    async with plane_to(road, ScriptedWorker()) as plane:
        sink = RecordingSink()
        plane.open("w1", "i1", question(), sink)
        await asyncio.wait_for(sink.done.wait(), 20)
        assert (sink.tokens, sink.end) == (undisturbed(PROMPT, 8), "length")
        assert sink.flushes >= 1


async def test_a_broken_connection_notifies_every_stream_at_once_and_is_reestablished(road: Road) -> None:
    worker = ScriptedWorker(always=Act(after=3, how="stall"))
    async with plane_to(road, worker) as plane:
        sinks = [RecordingSink() for _ in range(5)]
        for sink in sinks:
            plane.open("w1", "i1", question(), sink)
        await until(lambda: all(len(sink.tokens) == 3 for sink in sinks))
        worker.drop()
        await until(lambda: all(sink.end for sink in sinks))
        assert {sink.end for sink in sinks} == {"disconnected: Stream ended before generation completed"}
        await until(lambda: plane.connected == {"w1": "i1"})


async def test_another_instance_at_the_address_is_not_mistaken_for_the_wanted_one(road: Road) -> None:
    worker = await road.lay(ScriptedWorker(instance="i2")).start()
    plane = road.plane("f1")
    plane.set_workers({"w1": Address("i1", worker.url)})
    task = asyncio.create_task(plane.run())
    await until(lambda: len(worker.hellos) >= 2)  # it has been refused once
    assert plane.connected == {}
    with pytest.raises(WorkerUnreachable):
        plane.open("w1", "i1", question(), RecordingSink())
    plane.set_workers({"w1": Address("i2", worker.url)})
    await until(lambda: plane.connected == {"w1": "i2"})
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await worker.stop()


async def test_n17_silence_with_open_streams_is_a_hang_within_a_second(road: Road) -> None:
    """A worker with a hanging collective is detected by its missing frames; NCCL's own watchdog waits ten minutes (N17)."""
    quiet, other = ScriptedWorker("w1", always=Act(after=2, how="silence")), ScriptedWorker("w2")
    async with plane_to(road, quiet, other) as plane:
        sink = RecordingSink()
        plane.open("w1", "i1", question(), sink)
        began = time.monotonic()
        await asyncio.wait_for(sink.done.wait(), 20)
        assert sink.end is not None and sink.end.startswith("stalled: no frame for")
        assert (
            0.3 < time.monotonic() - began < 5.0
        )  # a loose limit: test_hang_watch.py and test_late_process.py use no clock
        assert plane.watch.hangs == 1
        assert not plane.reachable("w1", "i1")


async def test_workers_of_one_process_that_fall_silent_together_get_more_time(road: Road) -> None:
    workers = [ScriptedWorker(f"w{n}", step_s=0.02) for n in range(3)]
    async with plane_to(road, *workers) as plane:
        house = {"w0": "h:1", "w1": "h:1", "w2": "h:2"}
        plane.set_workers({w.name: Address(w.instance, w.url, house[w.name]) for w in workers})
        await until(lambda: len(plane.connected) == 0)
        await until(lambda: len(plane.connected) == 3)
        sinks = [RecordingSink() for _ in workers]
        for worker, sink in zip(workers, sinks, strict=True):
            plane.open(worker.name, worker.instance, question(10_000), sink)
        await until(lambda: all(sink.tokens for sink in sinks))
        began = time.monotonic()
        for late in workers[:2]:
            late.silent = True
        await until(lambda: all(sink.end for sink in sinks[:2]))
        assert time.monotonic() - began > 2 * HangPolicy().silence_s
        assert sinks[2].end is None


async def test_silence_without_open_streams_is_no_hang(road: Road) -> None:
    worker, streams = ScriptedWorker(), ScriptedWorker("w2", step_s=0.02)
    async with plane_to(road, worker, streams) as plane:
        plane.open("w2", "i1", question(10_000), sink := RecordingSink())
        await until(lambda: sink.tokens)
        worker.silent = True
        streams.silent = True
        await until(lambda: sink.end)
        assert (sink.end or "").startswith("stalled: no frame for")
        assert plane.watch.hangs == 1 and plane.connected["w1"] == "i1" and plane.reachable("w1", "i1")


async def test_a_silent_worker_does_not_count_as_recently_heard(road: Road) -> None:
    worker = ScriptedWorker()
    async with plane_to(road, worker, limits=PlaneLimits(heard_s=0.3)) as plane:
        await until(lambda: plane.responsive == {"w1": "i1"})
        worker.silent = True  # idle: stopped, or behind a network that drops everything
        await until(lambda: plane.responsive == {})
        assert plane.connected == {"w1": "i1"}
        worker.silent = False
        await until(lambda: plane.responsive == {"w1": "i1"})


async def test_a_stuck_engine_with_a_live_loop_is_detected_and_recovers(road: Road) -> None:
    worker = ScriptedWorker(always=Act(after=2, how="stall"))
    async with plane_to(road, worker, ScriptedWorker("w2")) as plane:
        sink = RecordingSink()
        plane.open("w1", "i1", question(), sink)
        await asyncio.wait_for(sink.done.wait(), 20)
        assert sink.end is not None and "its engine's step is" in sink.end
        assert plane.connected["w1"] == "i1"  # the process is alive
        assert not plane.reachable("w1", "i1")
        assert not plane.recently_heard("w1", "i1")  # an unreachable worker never counts as recently heard
        await until(lambda: bool(worker.cancelled))
        worker.phase, worker.step_age_ms = "idle", 0.0
        await until(lambda: plane.reachable("w1", "i1") and plane.recently_heard("w1", "i1"))


async def test_a_blocked_local_loop_blames_no_worker(road: Road) -> None:
    worker = ScriptedWorker(step_s=0.02)
    async with plane_to(road, worker) as plane:
        sink = RecordingSink()
        plane.open("w1", "i1", question(20), sink)
        await until(lambda: len(sink.tokens) >= 2)
        time.sleep(0.8)  # noqa: ASYNC251 (blocks the frontend's loop, and here the worker's)
        await asyncio.wait_for(sink.done.wait(), 20)
        assert (plane.watch.hangs, sink.end) == (0, "length")
        assert sink.tokens == undisturbed(PROMPT, 20)


async def test_while_the_local_loop_is_blocked_workers_stay_recently_heard(road: Road) -> None:
    worker = ScriptedWorker(step_s=0.02)
    async with plane_to(road, worker) as plane:
        sink = RecordingSink()
        plane.open("w1", "i1", question(20), sink)
        await until(lambda: len(sink.tokens) >= 2)
        assert plane.recently_heard("w1", "i1")
        time.sleep(0.5)  # noqa: ASYNC251 (twice as long as a worker may send no frame)
        assert plane.recently_heard("w1", "i1")
        await asyncio.wait_for(sink.done.wait(), 20)


async def test_a_request_too_large_for_a_frame_breaks_no_other_stream(road: Road) -> None:
    worker = ScriptedWorker(step_s=0.01)
    async with plane_to(road, worker) as plane:
        other, big = RecordingSink(), RecordingSink()
        plane.open("w1", "i1", question(40), other)
        large = question()
        large.guided = {"guided_regex": "x" * (17 << 20)}
        stream = plane.open("w1", "i1", large, big)
        await asyncio.wait_for(big.done.wait(), 20)
        assert big.end is not None
        assert big.end.startswith("invalid_request: the request takes 17")
        plane.cancel("w1", stream)
        await asyncio.wait_for(other.done.wait(), 20)
        assert (other.tokens, len(worker.requests)) == (undisturbed(PROMPT, 40), 1)


async def test_late_chunks_of_a_cancelled_stream_are_dropped(road: Road) -> None:
    worker = ScriptedWorker(step_s=0.01)
    async with plane_to(road, worker) as plane:
        sink = RecordingSink()
        stream = plane.open("w1", "i1", question(50), sink)
        await until(lambda: len(sink.tokens) >= 2)
        plane.cancel("w1", stream)
        count = len(sink.tokens)
        await until(lambda: worker.cancelled == [stream])
        assert len(sink.tokens) == count
        await until(lambda: worker.active == 0)


async def test_a_probe_gets_its_answer_and_its_errors(road: Road) -> None:
    worker = ScriptedWorker(acts=deque([Act(), Act(after=1, how="disconnect")]))
    async with plane_to(road, worker) as plane:
        tokens = [t async for chunk in plane.ask("w1", question()) for t in chunk.tokens]
        assert tokens == undisturbed(PROMPT, 8)
        with pytest.raises(WorkerUnreachable):
            async for _ in plane.ask("w1", question()):
                pass
        with pytest.raises(WorkerUnreachable):
            await anext(plane.ask("none", question()))


def test_a_long_prefill_gets_a_longer_limit() -> None:
    detector = HangDetector(HangPolicy(), 0.0, Process(0.0))
    detector.opened(0.0)
    detector.heard_at = 30.0
    detector.beat(Beat(phase="prefill", step_age_ms=30_000, prefill_tokens=3000))
    assert not detector.suspect(30.0)
    detector.beat(Beat(phase="decode", step_age_ms=30_000, prefill_tokens=0))
    assert "step is 30.0 s old" in detector.suspect(30.0)


def test_the_step_limit_follows_the_recent_step_time() -> None:
    detector = HangDetector(HangPolicy(), 0.0, Process(0.0))
    detector.opened(0.0)
    for at in range(5):
        detector.stepped(float(at))
    detector.heard_at = 10.0
    detector.beat(Beat(phase="decode", step_age_ms=6_000))
    assert not detector.suspect(10.0)
    detector.beat(Beat(phase="decode", step_age_ms=11_000))
    assert detector.suspect(10.0)


def test_our_own_lag_is_subtracted_before_a_worker_is_judged() -> None:
    detector = HangDetector(HangPolicy(), 0.0, Process(0.0))
    detector.opened(0.0)
    assert detector.suspect(0.5)
    detector.excuse(0.45, 0.5)
    assert not detector.suspect(0.5)


async def test_a_workers_external_load_is_separated_from_our_share(road: Road) -> None:
    worker = ScriptedWorker(always=Act(after=1, how="error", hold=asyncio.Event()))
    async with plane_to(road, worker) as plane:
        for _ in range(3):
            plane.open("w1", "i1", question(), RecordingSink())
        await until(lambda: (plane.load("w1") or Load()).running == 3)
        assert plane.external_load("w1") == Load()
        stranger = road.plane("f2")
        stranger.set_workers({"w1": Address("i1", worker.url)})
        task = asyncio.create_task(stranger.run())
        await until(lambda: stranger.external_load("w1") == Load(running=3))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_the_external_load_of_each_rank_is_separated_from_our_share() -> None:
    connections = Connections({"w1": Model("w1")}, lambda: None)
    connection = connections.connections["w1"]

    def others(*running: int) -> None:
        """Report two and three requests at its ranks, and check how many of these are not ours."""
        ranks = [Load(running=2, active_tokens=20), Load(running=3, active_tokens=30)]
        connections.say("w1", Beat("decode", 0.0, load=Load(running=5), ranks=ranks))
        expected = [Load(running=count, active_tokens=10 * count) for count in running]
        assert connection.load.external_by_rank == expected

    others(2, 3)
    stream, sink = connections.open("w1", "i1", question(rank=1), RecordingSink()), RecordingSink()
    connections.open("w1", "i1", question(), sink)
    others(1, 2)
    reserved = connections.reserve("w1", "i1", question(rank=1), 10, sink)  # type: ignore[arg-type]
    others(1, 2)
    connection.cancel(stream, "gone")
    others(1, 3)
    connections.cancel("w1", reserved, "gone")
    others(1, 3)
    assert not connection.load.ranks
    connections.cancel("w1", connections.open("w1", "i1", question(rank=1), RecordingSink()), "gone")
    connections.say("w1", Beat("decode", 0.0))
    assert not connection.load.external_by_rank
    assert not connection.load.ranks, (
        "an entry per rank would be kept forever for a worker that does not report its ranks"
    )


async def test_an_engine_busy_with_other_requests_is_distinguished_from_one_busy_with_ours_or_stuck(
    road: Road,
) -> None:
    worker = ScriptedWorker(always=Act(after=1, how="error", hold=asyncio.Event()))
    stranger = road.plane("f2")
    async with plane_to(road, worker) as plane:
        stranger.set_workers({"w1": Address("i1", worker.url)})
        task = asyncio.create_task(stranger.run())
        await until(lambda: stranger.reachable("w1", "i1"))
        worker.phase, worker.prefill_tokens, worker.step_age_ms = "prefill", 3_000, 20_000.0
        plane.open("w1", "i1", question(), RecordingSink())
        await until(lambda: (plane.load("w1") or Load()).running == 1)
        await next_report(plane, worker)
        assert not plane.others_work("w1", 3, begun=False)  # it works only on our own request
        stranger.open("w1", "i1", question(), RecordingSink())
        await until(lambda: plane.others_work("w1", 3, begun=False) == "before")
        assert plane.others_work("w1", 3, begun=True) == "before"
        assert not plane.others_work("w1", 3_000, begun=True)  # an old step, on a prompt that may be ours
        worker.phase, worker.prefill_tokens, worker.step_age_ms = "decode", 0, 10.0
        await until(
            lambda: plane.others_work("w1", 3, begun=False) == "beside"
        )  # it decodes, and no request waits
        worker.phase, worker.prefill_tokens, worker.step_age_ms = "prefill", 10, 60_000.0
        await until(lambda: not plane.reachable("w1", "i1"))
        assert not plane.others_work("w1", 3, begun=False)  # stuck
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert not plane.others_work("w1", 3, begun=False)


@pytest.mark.parametrize(
    "url",
    [
        "tcp://host:99999",
        "tcp://[::1:80",
        "tcp://host:x",
        "nothing",
        "",
        f"tcp://{'x' * 70}.y:80",
        "tcp://\u00ad:80",
        "nats:plane.a b",
        "nats:plane.>",
        "nats:plane.w1.i1\r\nPUB x 1\r\n",
        "nats:other.w1.i1",
        "nats:plane.w1.*",
    ],
)
async def test_a_worker_that_registers_an_invalid_address_is_only_unreachable(road: Road, url: str) -> None:
    worker = ScriptedWorker()
    async with plane_to(road, worker) as plane:
        plane.set_workers({"w1": Address("i1", worker.url), "odd": Address("i1", url)})
        await next_report(plane, worker)
        assert plane.reachable("w1", "i1")
        assert not plane.reachable("odd", "i1")
        plane.set_workers({"w1": Address("i1", worker.url)})


async def test_a_worker_without_frames_for_a_quarter_of_a_second_is_asked_last_before_it_counts_as_hung(
    road: Road,
) -> None:
    busy, idle = ScriptedWorker("w1", step_s=0.01), ScriptedWorker("w2")
    async with plane_to(road, busy, idle, limits=PlaneLimits(hang=HangPolicy(silence_s=30.0))) as plane:
        plane.open("w1", busy.instance, question(1000), RecordingSink())
        await until(lambda: busy.active)
        assert plane.recently_heard("w1", busy.instance) and plane.recently_heard("w2", idle.instance)
        busy.silent = idle.silent = True
        await until(lambda: not plane.recently_heard("w1", busy.instance))
        assert plane.reachable("w1", busy.instance)
        assert plane.recently_heard("w2", idle.instance)


async def test_a_worker_with_a_slow_welcome_is_not_dialed_repeatedly() -> None:
    visits: list[asyncio.StreamWriter] = []
    repeated: list[asyncio.StreamWriter] = []

    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        repeated.append(writer)
        writer.close()

    async def visited(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        visits.append(writer)
        await until(lambda: len(repeated) > 3)  # dials of a worker that hangs up
        writer.write(encode(Welcome("w1", "i1", "m")))

    servers = [await asyncio.start_server(serve, "127.0.0.1", 0) for serve in (visited, hang_up)]
    slow, other = (f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in servers)
    plane = RequestPlaneClient("f1", PlaneLimits(backoff_s_max=0.1))
    plane.set_workers({"w1": Address("i1", slow), "w2": Address("i1", other)})
    running = asyncio.create_task(plane.run())
    try:
        await until(lambda: plane.connected)
        assert len(visits) == 1
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        for writer in visits:
            writer.close()
            await writer.wait_closed()
        for server in servers:
            server.close()
            await server.wait_closed()


class DelayedDialer(TcpDialer):
    """A dialer that establishes no connection for a while."""

    def __init__(self) -> None:
        self.free = asyncio.Event()

    async def ready(self) -> None:
        await self.free.wait()


async def test_a_probe_waits_for_a_connection_in_progress_but_not_for_an_impossible_one() -> None:
    worker, dialer = await ScriptedWorker().start(), DelayedDialer()
    plane = RequestPlaneClient(
        "f1", PlaneLimits(ask_connect_s=0.05, ask_connect_first_s=ENOUGH_S), {"tcp": dialer}
    )
    plane.set_workers({"w1": Address("i1", worker.url), "gone": Address("i1", "tcp://127.0.0.1:1")})
    running = asyncio.create_task(plane.run())
    asking = asyncio.ensure_future(anext(plane.ask("w1", question())))
    try:
        with pytest.raises(WorkerUnreachable):  # after `ask_connect_s`: it has no connection in progress
            await anext(plane.ask("unknown", question()))
        assert not asking.done()
        dialer.free.set()
        first = (await asking).tokens  # as many steps as lay in the socket when it was read
        assert first == undisturbed(PROMPT, len(first)) != []
        async with asyncio.timeout(ENOUGH_S / 2):
            with pytest.raises(WorkerUnreachable):
                await anext(plane.ask("gone", question()))
    finally:
        running.cancel()
        await asyncio.gather(running, asking, return_exceptions=True)
        await worker.stop()


async def test_a_process_at_its_connection_limit_connects_to_another_worker_when_one_leaves() -> None:
    workers = [await ScriptedWorker(f"w{n}").start() for n in range(3)]
    plane = RequestPlaneClient("f1", PlaneLimits(connections_max=2, backoff_s_max=0.05))
    plane.set_workers({w.name: Address(w.instance, w.url) for w in workers})
    task = asyncio.create_task(plane.run())
    await until(lambda: len(plane.connected) == 2)
    gone, _ = plane.connected
    others = [w for w in workers if w.name != gone]
    (waits,) = plane.by_worker.keys() - plane.connected.keys()
    await until(lambda: plane.by_worker[waits].failures > 3)  # attempts at the limit
    plane.set_workers({w.name: Address(w.instance, w.url) for w in others})
    await until(lambda: set(plane.connected) == {w.name for w in others})
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    for worker in workers:
        await worker.stop()


async def test_many_connections_that_break_at_once_cause_one_notification() -> None:
    workers = [ScriptedWorker(f"w{n}") for n in range(20)]
    told: list[int] = []
    async with plane_to(Road("tcp"), *workers) as plane:
        plane.listen(lambda: told.append(len(plane.connected)))
        plane.set_workers({})
        await until(lambda: told)
        await turns()
    assert told[0] == 0
    assert len(told) < len(workers)


async def test_canary_clients_tolerate_a_silence_that_frontends_do_not(road: Road) -> None:
    quiet = ScriptedWorker("w1", always=Act(after=2, how="silence"))
    async with plane_to(road, quiet, limits=PROBER) as plane:
        sink = RecordingSink()
        plane.open("w1", "i1", question(), sink)
        await until(lambda: len(sink.tokens) == 2)
        await asyncio.sleep(3 * HangPolicy().silence_s)  # the silence itself
        assert sink.end is None
