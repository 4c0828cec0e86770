"""The request plane's client side: connections kept up, streams told at once, nobody accused falsely."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from move_walk import Connections, Model
from roads import Road
from scripted_worker import Act, ScriptedWorker, undisturbed

from controller.adapters.request_plane.client import RequestPlaneClient
from controller.adapters.request_plane.dialers import TcpDialer
from controller.adapters.request_plane.hang import HangDetector, HangPolicy
from controller.adapters.request_plane.links import Address, PlaneLimits
from controller.ports import WorkerUnreachable
from controller.processes.controller import PROBER
from events.wire import Beat, Chunk, Generate, Load, Sampling, Welcome, encode

PROMPT = [300, 301, 302]
ENOUGH_S = 20.0


class Ear:
    """A sink that keeps what it hears."""

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


async def until(condition: object, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, "not in time"
        await asyncio.sleep(0.005)


@asynccontextmanager
async def plane_to(
    road: Road, *workers: ScriptedWorker, limits: PlaneLimits | None = None
) -> AsyncIterator[RequestPlaneClient]:
    plane = road.plane("f1", limits)
    for worker in workers:
        await road.lay(worker).start()
    plane.want({w.name: Address(w.instance, w.url) for w in workers})
    task = asyncio.create_task(plane.run())
    await until(lambda: len(plane.connected) == len(workers))
    try:
        yield plane
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for worker in workers:
            await worker.stop()


async def test_a_stream_runs_to_its_end(road: Road) -> None:
    async with plane_to(road, ScriptedWorker()) as plane:
        ear = Ear()
        plane.open("w1", "i1", question(), ear)
        await asyncio.wait_for(ear.done.wait(), 20)
        assert (ear.tokens, ear.end) == (undisturbed(PROMPT, 8), "length")
        assert ear.flushes >= 1


async def test_a_broken_connection_tells_every_stream_at_once_and_is_made_again(road: Road) -> None:
    worker = ScriptedWorker(always=Act(after=3, how="stall"))
    async with plane_to(road, worker) as plane:
        ears = [Ear() for _ in range(5)]
        for ear in ears:
            plane.open("w1", "i1", question(), ear)
        await until(lambda: all(len(ear.tokens) == 3 for ear in ears))
        worker.drop()
        await until(lambda: all(ear.end for ear in ears))
        assert {ear.end for ear in ears} == {"disconnected: Stream ended before generation completed"}
        await until(lambda: plane.connected == {"w1": "i1"})


async def test_another_instance_at_the_address_is_not_taken_for_the_wanted_one(road: Road) -> None:
    worker = await road.lay(ScriptedWorker(instance="i2")).start()
    plane = road.plane("f1")
    plane.want({"w1": Address("i1", worker.url)})
    task = asyncio.create_task(plane.run())
    await asyncio.sleep(0.2)
    assert plane.connected == {}
    with pytest.raises(WorkerUnreachable):
        plane.open("w1", "i1", question(), Ear())
    plane.want({"w1": Address("i2", worker.url)})
    await until(lambda: plane.connected == {"w1": "i2"})
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await worker.stop()


async def test_n17_silence_with_open_streams_is_a_hang_within_a_second(road: Road) -> None:
    """A worker whose collective hangs is found by its missing frames: NCCL's own watchdog waits ten minutes (N17)."""
    quiet, other = ScriptedWorker("w1", always=Act(after=2, how="silence")), ScriptedWorker("w2")
    async with plane_to(road, quiet, other) as plane:
        ear = Ear()
        plane.open("w1", "i1", question(), ear)
        began = time.monotonic()
        await asyncio.wait_for(ear.done.wait(), 20)
        assert ear.end is not None and ear.end.startswith("stalled: no frame for")
        assert (
            0.3 < time.monotonic() - began < 5.0
        )  # loose: test_hang_watch.py and test_late_process.py have no clock
        assert plane.watch.hangs == 1
        assert not plane.reachable("w1", "i1")


async def test_workers_that_share_a_process_and_fall_silent_together_are_given_time(road: Road) -> None:
    workers = [ScriptedWorker(f"w{n}", step_s=0.02) for n in range(3)]
    async with plane_to(road, *workers) as plane:
        house = {"w0": "h:1", "w1": "h:1", "w2": "h:2"}
        plane.want({w.name: Address(w.instance, w.url, house[w.name]) for w in workers})
        await until(lambda: len(plane.connected) == 0)
        await until(lambda: len(plane.connected) == 3)
        ears = [Ear() for _ in workers]
        for worker, ear in zip(workers, ears, strict=True):
            plane.open(worker.name, worker.instance, question(10_000), ear)
        await until(lambda: all(ear.tokens for ear in ears))
        began = time.monotonic()
        for late in workers[:2]:
            late.silent = True
        await until(lambda: all(ear.end for ear in ears[:2]))
        assert time.monotonic() - began > 2 * HangPolicy().silence_s
        assert ears[2].end is None


async def test_silence_without_open_streams_is_nothing(road: Road) -> None:
    worker = ScriptedWorker()
    async with plane_to(road, worker) as plane:
        worker.silent = True
        await asyncio.sleep(0.7)
        assert plane.connected == {"w1": "i1"}


async def test_nobody_is_vouched_for_who_says_nothing(road: Road) -> None:
    worker = ScriptedWorker()
    async with plane_to(road, worker, limits=PlaneLimits(heard_s=0.3)) as plane:
        await until(lambda: plane.heard == {"w1": "i1"})
        worker.silent = True  # idle: stopped, or behind a network that swallows everything
        await until(lambda: plane.heard == {})
        assert plane.connected == {"w1": "i1"}
        worker.silent = False
        await until(lambda: plane.heard == {"w1": "i1"})


async def test_a_stuck_engine_behind_a_live_loop_is_noticed_and_comes_back(road: Road) -> None:
    worker = ScriptedWorker(always=Act(after=2, how="stall"))
    async with plane_to(road, worker, ScriptedWorker("w2")) as plane:
        ear = Ear()
        plane.open("w1", "i1", question(), ear)
        await asyncio.wait_for(ear.done.wait(), 20)
        assert ear.end is not None and "its engine's step is" in ear.end
        assert plane.connected["w1"] == "i1"  # the process lives
        assert not plane.reachable("w1", "i1")
        assert not plane.recently_heard("w1", "i1")  # nobody is who cannot be reached, whenever he spoke
        await until(lambda: bool(worker.cancelled))
        worker.phase, worker.step_age_ms = "idle", 0.0
        await until(lambda: plane.reachable("w1", "i1") and plane.recently_heard("w1", "i1"))


async def test_our_own_loop_standing_still_accuses_nobody(road: Road) -> None:
    worker = ScriptedWorker(step_s=0.02)
    async with plane_to(road, worker) as plane:
        ear = Ear()
        plane.open("w1", "i1", question(20), ear)
        await until(lambda: len(ear.tokens) >= 2)
        time.sleep(0.8)  # noqa: ASYNC251 (the frontend's loop (and here the worker's) does nothing at all)
        await asyncio.wait_for(ear.done.wait(), 20)
        assert (plane.watch.hangs, ear.end) == (0, "length")
        assert ear.tokens == undisturbed(PROMPT, 20)


async def test_while_our_own_loop_stands_still_everybody_is_as_lately_heard_as_before(road: Road) -> None:
    worker = ScriptedWorker(step_s=0.02)
    async with plane_to(road, worker) as plane:
        ear = Ear()
        plane.open("w1", "i1", question(20), ear)
        await until(lambda: len(ear.tokens) >= 2)
        assert plane.recently_heard("w1", "i1")
        time.sleep(0.5)  # noqa: ASYNC251 (twice as long as a worker may owe us a frame)
        assert plane.recently_heard("w1", "i1")
        await asyncio.wait_for(ear.done.wait(), 20)


async def test_a_request_that_is_too_large_for_a_frame_breaks_nobody_elses_stream(road: Road) -> None:
    worker = ScriptedWorker(step_s=0.01)
    async with plane_to(road, worker) as plane:
        other, big = Ear(), Ear()
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
        ear = Ear()
        stream = plane.open("w1", "i1", question(50), ear)
        await until(lambda: len(ear.tokens) >= 2)
        plane.cancel("w1", stream)
        count = len(ear.tokens)
        await until(lambda: worker.cancelled == [stream])
        assert len(ear.tokens) == count
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
            await anext(plane.ask("nobody", question()))


def test_a_long_prefill_earns_a_longer_allowance() -> None:
    detector = HangDetector(HangPolicy(), 0.0)
    detector.opened(0.0)
    detector.heard_at = 30.0
    detector.beat(Beat(phase="prefill", step_age_ms=30_000, prefill_tokens=3000))
    assert not detector.suspect(30.0)
    detector.beat(Beat(phase="decode", step_age_ms=30_000, prefill_tokens=0))
    assert "step is 30.0 s old" in detector.suspect(30.0)


def test_the_step_limit_follows_the_recent_step_time() -> None:
    detector = HangDetector(HangPolicy(), 0.0)
    detector.opened(0.0)
    for at in range(5):
        detector.stepped(float(at))
    detector.heard_at = 10.0
    detector.beat(Beat(phase="decode", step_age_ms=6_000))
    assert not detector.suspect(10.0)
    detector.beat(Beat(phase="decode", step_age_ms=11_000))
    assert detector.suspect(10.0)


def test_our_lag_is_taken_off_before_anyone_is_judged() -> None:
    detector = HangDetector(HangPolicy(), 0.0)
    detector.opened(0.0)
    assert detector.suspect(0.5)
    detector.excuse(0.45, 0.5)
    assert not detector.suspect(0.5)


async def test_the_workers_load_is_told_apart_from_our_share_of_it(road: Road) -> None:
    worker = ScriptedWorker(always=Act(after=1, how="error", hold=asyncio.Event()))
    async with plane_to(road, worker) as plane:
        for _ in range(3):
            plane.open("w1", "i1", question(), Ear())
        await until(lambda: (plane.load("w1") or Load()).running == 3)
        assert plane.external_load("w1") == Load()
        stranger = road.plane("f2")
        stranger.want({"w1": Address("i1", worker.url)})
        task = asyncio.create_task(stranger.run())
        await until(lambda: stranger.external_load("w1") == Load(running=3))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_what_others_have_at_each_rank_is_told_apart_from_ours() -> None:
    connections = Connections({"w1": Model("w1")}, lambda: None)
    connection = connections.connections["w1"]

    def others(*running: int) -> None:
        """Let its ranks have two and three requests, and see how many of these are not ours."""
        ranks = [Load(running=2, active_tokens=20), Load(running=3, active_tokens=30)]
        connections.say("w1", Beat("decode", 0.0, load=Load(running=5), ranks=ranks))
        expected = [Load(running=count, active_tokens=10 * count) for count in running]
        assert connection.load.external_by_rank == expected

    others(2, 3)
    stream, ear = connections.open("w1", "i1", question(rank=1), Ear()), Ear()
    connections.open("w1", "i1", question(), ear)
    others(1, 2)
    reserved = connections.reserve("w1", "i1", question(rank=1), 10, ear)  # type: ignore[arg-type]
    others(1, 2)
    connection.cancel(stream, "gone")
    others(1, 3)
    connections.cancel("w1", reserved, "gone")
    others(1, 3)
    assert not connection.load.ranks
    connections.cancel("w1", connections.open("w1", "i1", question(rank=1), Ear()), "gone")
    connections.say("w1", Beat("decode", 0.0))
    assert not connection.load.external_by_rank
    assert not connection.load.ranks, "remembered for ever of a worker that does not say what each rank has"


async def test_an_engine_at_work_for_others_is_told_from_one_that_is_at_work_for_us_or_stuck(
    road: Road,
) -> None:
    worker = ScriptedWorker(always=Act(after=1, how="error", hold=asyncio.Event()))
    stranger = road.plane("f2")
    async with plane_to(road, worker) as plane:
        stranger.want({"w1": Address("i1", worker.url)})
        task = asyncio.create_task(stranger.run())
        await until(lambda: stranger.reachable("w1", "i1"))
        worker.phase, worker.prefill_tokens, worker.step_age_ms = "prefill", 3_000, 20_000.0
        plane.open("w1", "i1", question(), Ear())
        await until(lambda: (plane.load("w1") or Load()).running == 1)
        await asyncio.sleep(0.2)
        assert not plane.others_work("w1", 3, begun=False)  # our own question is all that it works on
        stranger.open("w1", "i1", question(), Ear())
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
async def test_a_worker_that_registers_nonsense_as_its_address_is_unreachable_and_no_more(
    road: Road, url: str
) -> None:
    worker = ScriptedWorker()
    async with plane_to(road, worker) as plane:
        plane.want({"w1": Address("i1", worker.url), "odd": Address("i1", url)})
        await asyncio.sleep(0.1)
        assert plane.reachable("w1", "i1")
        assert not plane.reachable("odd", "i1")
        plane.want({"w1": Address("i1", worker.url)})


async def test_a_worker_that_owes_frames_for_a_quarter_of_a_second_is_asked_last_before_it_counts_as_hung(
    road: Road,
) -> None:
    busy, idle = ScriptedWorker("w1", step_s=0.01), ScriptedWorker("w2")
    async with plane_to(road, busy, idle, limits=PlaneLimits(hang=HangPolicy(silence_s=30.0))) as plane:
        plane.open("w1", busy.instance, question(1000), Ear())
        await until(lambda: busy.active)
        assert plane.recently_heard("w1", busy.instance) and plane.recently_heard("w2", idle.instance)
        busy.silent = idle.silent = True
        await until(lambda: not plane.recently_heard("w1", busy.instance))
        assert plane.reachable("w1", busy.instance)
        assert plane.recently_heard("w2", idle.instance)


async def test_a_worker_that_is_slow_to_welcome_us_is_not_asked_again_and_again() -> None:
    visits: list[asyncio.StreamWriter] = []

    async def visited(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        visits.append(writer)
        await asyncio.sleep(1.2)
        writer.write(encode(Welcome("w1", "i1", "m")))

    server = await asyncio.start_server(visited, "127.0.0.1", 0)
    plane = RequestPlaneClient("f1")
    plane.want({"w1": Address("i1", f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}")})
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
        server.close()
        await server.wait_closed()


class Jammed(TcpDialer):
    """A dialer that connects nobody for a while."""

    def __init__(self) -> None:
        self.free = asyncio.Event()

    async def ready(self) -> None:
        await self.free.wait()


async def test_a_probe_waits_for_a_connection_that_is_being_made_and_not_for_one_that_cannot_be_made() -> (
    None
):
    worker, dialer = await ScriptedWorker().start(), Jammed()
    plane = RequestPlaneClient(
        "f1", PlaneLimits(ask_connect_s=0.05, ask_connect_first_s=ENOUGH_S), {"tcp": dialer}
    )
    plane.want({"w1": Address("i1", worker.url), "gone": Address("i1", "tcp://127.0.0.1:1")})
    running = asyncio.create_task(plane.run())
    asking = asyncio.ensure_future(anext(plane.ask("w1", question())))
    try:
        await asyncio.sleep(0.2)
        assert not asking.done()
        dialer.free.set()
        first = (await asking).tokens  # of as many steps as lay in the socket when it was read
        assert first == undisturbed(PROMPT, len(first)) != []
        async with asyncio.timeout(ENOUGH_S / 2):
            with pytest.raises(WorkerUnreachable):
                await anext(plane.ask("gone", question()))
    finally:
        running.cancel()
        await asyncio.gather(running, asking, return_exceptions=True)
        await worker.stop()


async def test_a_process_that_may_have_no_more_connections_takes_another_worker_when_one_goes() -> None:
    workers = [await ScriptedWorker(f"w{n}").start() for n in range(3)]
    plane = RequestPlaneClient("f1", PlaneLimits(connections_max=2, backoff_s_max=0.05))
    plane.want({w.name: Address(w.instance, w.url) for w in workers})
    task = asyncio.create_task(plane.run())
    await until(lambda: len(plane.connected) == 2)
    await asyncio.sleep(0.2)
    gone, _ = plane.connected
    others = [w for w in workers if w.name != gone]
    plane.want({w.name: Address(w.instance, w.url) for w in others})
    await until(lambda: set(plane.connected) == {w.name for w in others})
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    for worker in workers:
        await worker.stop()


async def test_many_connections_that_break_at_once_are_one_news() -> None:
    workers = [ScriptedWorker(f"w{n}") for n in range(20)]
    told: list[int] = []
    async with plane_to(Road("tcp"), *workers) as plane:
        plane.listen(lambda: told.append(len(plane.connected)))
        plane.want({})
        await until(lambda: told)
        await asyncio.sleep(0)
    assert told[0] == 0
    assert len(told) < len(workers)


async def test_who_asks_canaries_bears_a_silence_that_frontends_do_not(road: Road) -> None:
    quiet = ScriptedWorker("w1", always=Act(after=2, how="silence"))
    async with plane_to(road, quiet, limits=PROBER) as plane:
        ear = Ear()
        plane.open("w1", "i1", question(), ear)
        await until(lambda: len(ear.tokens) == 2)
        await asyncio.sleep(3 * HangPolicy().silence_s)
        assert ear.end is None
