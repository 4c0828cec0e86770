"""Six paths through the system: their files, and the pairs of files that call each other both ways.

`make call-paths` prints the table. The tests are frozen: a path must not become smaller because its test changes.

| way | from | to |
|---|---|---|
| completion | the client's request | its one token at the client |
| conviction | the frontend reads the failed canary and the decision | the stream has ended at another worker |
| drain | a controller has received `holdfast drain` | the stream has ended at the target, with its KV cache |
| canary | a wrong answer to a canary | the decision that convicts the worker has been read |
| projection | a fact is observed | its rows are in Postgres |
| what-if | a parsed `holdfast replay what-if` | its answer is printed |

All processes of a path are one process here. The journal is in memory, and a test double gives the canary's answers.
"""

import argparse
import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
from call_limits import LIMITS
from call_recorder import CallRecorder, Way
from canary_world import CountingMeter, FakePlane, FakeWorker, joined
from fleet_history import History
from fleet_in_process import FleetInProcess, fleet_in_process
from frontend_kit import keep_busy
from memory_cell import MemoryCell
from memory_journal import MemoryJournal, MemoryStream
from real_worker import RealWorker
from simulated_frontend import simulated
from virtual_clock import VirtualClock
from waits import turns, until

from controller.adapters.postgres.store import PostgresStore
from controller.deciders.fleet import FleetPolicy
from controller.replay import cli
from controller.replay.flags import add_arguments
from controller.runtime.canary.goldens import Vocabulary
from controller.runtime.canary.loop import CanaryLoop
from controller.runtime.canary.tools import ProberDependencies
from controller.runtime.lease import Lease
from controller.runtime.projection.projector import Projector
from controller.runtime.reconciler import Reconciler
from controller.runtime.settings import CanarySettings
from controller.runtime.view import FleetView
from events.observations import RequestMigrated

PROMPT = [300 + n for n in range(40)]
TOKENS = 48
MOVES_AFTER = 8  # tokens after which the first worker becomes slow
BUSY = 8  # initial load that the second worker appears to have
LEASE_S = 1000.0
CALM_S = 60.0  # virtual seconds until goldens are agreed and latencies are known
STEP_S = 0.05


@dataclass(frozen=True)
class Leaving:
    """The worker that a stream will leave."""

    fleet: FleetInProcess
    worker: RealWorker


def assert_within_limits(name: str, way: Way) -> None:
    """Assert that a path has not grown."""
    files, pairs = LIMITS[name]
    assert len(way.files) <= files, "\n".join(sorted(way.files))
    assert len(way.pairs) <= pairs, way.pairs


async def test_completion(recorder: CallRecorder) -> None:
    async with simulated() as kit:
        await kit.complete(PROMPT, 1)
        async with recorder.recording() as way:
            await kit.complete(PROMPT, 1)
    assert_within_limits("completion", way)


@asynccontextmanager
async def stream_that_leaves(recorder: CallRecorder, method: str) -> AsyncIterator[Leaving]:
    """Run a stream on the first of two workers, and record until it has ended on the other one."""
    async with fleet_in_process() as fleet:
        first, other = await fleet.add("w1"), await fleet.add("w2")
        await fleet.kit.complete(PROMPT[::-1], MOVES_AFTER)
        keep_busy(fleet.kit, "w2", other.instance, BUSY)
        recorder.hold_timers()
        first.cut(MOVES_AFTER)
        running = asyncio.create_task(
            fleet.kit.stream(model="m", prompt=PROMPT, max_tokens=TOKENS, ignore_eos=True)
        )
        await first.due.wait()
        first.cut_after = None  # it stays slow; the test no longer intervenes in its output
        for connection in (*first.server.connections.open, *other.server.connections.open):
            connection.beaten_at += (
                LEASE_S  # no beat is due: on a slow machine one would be part of the recording
            )
        async with recorder.recording():
            yield Leaving(fleet, first)
            await running
        (fact,) = fleet.kit.said(RequestMigrated)
        assert (fact.source, fact.target, fact.method) == ("w1", "w2", method)


async def test_conviction(recorder: CallRecorder) -> None:
    for each in (CallRecorder(), recorder):  # the first run warms the caches of the process
        async with stream_that_leaves(each, "reprefill") as leaving:
            leaving.fleet.convict(leaving.worker)
    assert_within_limits("conviction", recorder.way)


async def test_drain(recorder: CallRecorder) -> None:
    for each in (CallRecorder(), recorder):  # the first run warms the caches of the process
        async with stream_that_leaves(each, "transfer") as leaving:
            await leaving.fleet.drain(leaving.worker.name)
    assert_within_limits("drain", recorder.way)


async def vocabulary(tokenizer: str) -> Vocabulary:
    """Return the tokenizer of any worker."""
    return Vocabulary(lambda text: [1, *text.encode()], 2048)


class CanaryWorld:
    """A controller in virtual time, with a test double for the workers."""

    def __init__(self) -> None:
        self.clock = clock = VirtualClock()
        stream = MemoryStream(clock=clock.now)
        self.journal = MemoryJournal(stream, "controller:c1")
        self.view = FleetView(self.journal)
        self.plane = FakePlane(clock)
        lease = Lease(MemoryCell(), "c1", clock, ttl_s=LEASE_S)
        self.reconciler = Reconciler(self.journal, lease, FleetPolicy(), clock, force=lambda fleet: None)
        tools = ProberDependencies(
            journal=self.journal,
            prober=self.plane,
            clock=clock,
            meter=CountingMeter(),
            vocabulary=vocabulary,
            leading=lambda: self.reconciler.leading,
            draw=random.Random(1),
            secret=random.Random(2),
        )
        greedy = CanarySettings(interval_s=10.0, sampled_every=0, unmarked_every=0)
        self.parts = (lease, self.reconciler, self.view, CanaryLoop(self.view, tools, greedy))

    async def join(self, name: str) -> FakeWorker:
        """Let a worker join and become healthy."""
        worker = self.plane.workers[name] = FakeWorker()
        self.journal.observe(joined(name))
        await self.until(lambda: self.status(name) == "HEALTHY")
        return worker

    def status(self, name: str) -> str:
        """Return a worker's health."""
        worker = self.view.fleet.workers.get(name)
        return worker.health.status.value if worker is not None else ""

    async def until(self, condition: Callable[[], bool]) -> None:
        """Advance time until a condition holds."""
        end = self.clock.monotonic() + LEASE_S
        while not condition():
            assert self.clock.monotonic() < end, "not in time"
            await self.clock.advance(STEP_S)
            await turns()


@asynccontextmanager
async def canary_world() -> AsyncIterator[CanaryWorld]:
    """Run a controller that leads."""
    world = CanaryWorld()
    running = [asyncio.create_task(part.run()) for part in world.parts]
    try:
        await world.until(lambda: world.reconciler.leading)
        yield world
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


@pytest.mark.slow
async def test_canary(recorder: CallRecorder) -> None:
    async with canary_world() as world:
        first, _ = await world.join("w1"), await world.join("w2")
        calm = world.clock.monotonic() + CALM_S
        await world.until(lambda: world.clock.monotonic() >= calm)
        first.corrupt = lambda request: True
        async with recorder.recording() as way:
            await world.until(lambda: world.status("w1") == "UNHEALTHY")
    assert_within_limits("canary", way)


@pytest.mark.slow
@pytest.mark.servers
async def test_projection(recorder: CallRecorder, database_url: str) -> None:
    history, store = History().start().corruption(), PostgresStore(database_url)
    projector = Projector(MemoryJournal(history.stream, "projector"), store)
    running = asyncio.create_task(projector.run())
    await until(lambda: projector.progress.projected == len(history.events))
    history.say(history.passed("w1"))
    await until(lambda: projector.progress.projected == len(history.events))
    async with recorder.recording() as way:
        history.say(history.passed("w0"))
        await until(lambda: projector.progress.projected == len(history.events))
    running.cancel()
    await asyncio.wait({running})
    await store.close()
    assert_within_limits("projection", way)


@pytest.mark.slow
async def test_what_if(recorder: CallRecorder) -> None:
    history = History().start().corruption()
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(["what-if", "--set", "health.failures_max=1"])
    lines: list[str] = []

    async def ask() -> None:
        assert await cli.execute(args, MemoryJournal(history.stream, "replay"), None, lines.append) == 0

    await ask()
    lines.clear()
    async with recorder.recording() as way:
        await ask()
    assert lines[0] == "what if health.failures_max had been 1 instead of 3?"
    assert_within_limits("what-if", way)
