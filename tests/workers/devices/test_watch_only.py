"""A device watch next to a worker: it reports for the worker's current life, about its GPUs only."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import shim
from memory_bus import MemoryBus
from memory_journal import MemoryJournal, MemoryStream
from structlog.testing import capture_logs
from waits import block_until, until
from watch_kit import QUICK
from worker_process import START_S, Process, Spawn

from controller.adapters.embedded.server import EmbeddedServer
from events import subjects
from events.errors import BadSetting
from events.fact import Fact
from events.journal.nats import NatsJournal
from events.nats.bus import NatsBus
from events.observations import DeviceFaulted, DeviceRecovered, WorkerJoined
from events.process.presence import present
from workers.config.settings_check import load_settings
from workers.devices.faults import FaultChange
from workers.devices.watch import DeviceWatch
from workers.watch_only import WatchedWorker, WatchOff, run_watch

XID = {"device": "GPU-0000", "fault_class": "xid", "code": "79"}
Eventually = Callable[..., Awaitable[None]]
Watched = Callable[..., Awaitable[MemoryStream]]


def beat(instance: str) -> dict[str, str]:
    return {"worker": "w0", "instance": instance}


def facts_of(stream: MemoryStream) -> list[Fact]:
    return [event.fact for event in stream.events]


# --- the instance it reports for


def test_faults_wait_for_the_workers_heartbeat_and_are_reported_for_each_life() -> None:
    stream = MemoryStream()
    deputy = WatchedWorker("w0", MemoryJournal(stream, "watch:w0"))
    deputy.changed("GPU-0000", FaultChange(fault_class="xid", code="79", fatal=True))
    deputy.changed("GPU-0000", FaultChange(fault_class="throttle", code="thermal", weight=0.5))
    assert not stream.events, "the instance is not known yet"
    for instance in ("i1", "i1", "i2", "i1"):
        deputy.on_beat("", beat(instance))
    throttled = {"device": "GPU-0000", "fault_class": "throttle", "code": "thermal"}
    deputy.changed("GPU-0000", FaultChange(fault_class="throttle", code="thermal", over=True))
    deputy.on_beat("", beat("i3"))
    assert facts_of(stream) == [
        DeviceFaulted(worker="w0", instance="i1", **XID, fatal=True, weight=None),
        DeviceFaulted(worker="w0", instance="i1", **throttled, fatal=False, weight=0.5),
        DeviceFaulted(worker="w0", instance="i2", **XID, fatal=True, weight=None),
        DeviceFaulted(worker="w0", instance="i2", **throttled, fatal=False, weight=0.5),
        DeviceRecovered(worker="w0", instance="i2", **throttled),
        DeviceFaulted(worker="w0", instance="i3", **XID, fatal=True, weight=None),
        DeviceRecovered(worker="w0", instance="i3", **throttled),
    ]


# --- the GPUs it watches


@pytest.fixture
async def watched(gpus: shim.State, tmp_path: Path) -> AsyncIterator[Watched]:
    """`await watched(gpus="0")` starts a watch; returns its facts about w0, which has the instance i1."""
    stops: list[tuple[asyncio.Event, asyncio.Task[None]]] = []

    async def start(**flags: object) -> MemoryStream:
        settings = load_settings(
            {"name": "w0", "nats_url": "nats://x", "data": tmp_path, "watch_only": True, **flags}, {}
        )
        stream, bus, stop = MemoryStream(), MemoryBus(), asyncio.Event()
        running = asyncio.ensure_future(
            run_watch(settings, MemoryJournal(stream, "watch:w0"), bus, stop, QUICK)
        )
        stops.append((stop, running))
        await until(lambda: bus.entries or running.done())
        await bus.publish(subjects.beat("w0"), beat("i1"))
        if running.done():
            await running
        return stream

    yield start
    for stop, running in stops:
        stop.set()
        async with asyncio.timeout(20):
            await asyncio.gather(running, return_exceptions=True)


async def test_configured_gpus_are_watched_for_the_worker_and_shown(
    gpus: shim.State, watched: Watched, tmp_path: Path, eventually: Eventually
) -> None:
    stream = await watched(gpus="0")
    assert [(p.role, p.name) for p in present(tmp_path)] == [("watch", "w0-watch")]
    gpus.gpu[1].raise_xid(119)  # of another worker
    gpus.gpu[0].raise_xid(79)
    await eventually(lambda: stream.events)
    assert facts_of(stream) == [DeviceFaulted(worker="w0", instance="i1", **XID, fatal=True, weight=None)]


async def test_the_gpus_of_a_given_process_are_found_even_if_it_uses_them_later(
    gpus: shim.State, watched: Watched, eventually: Eventually
) -> None:
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", stdin=subprocess.PIPE)
    try:
        with capture_logs() as logs:
            stream = await watched(engine_pid=os.getpid())  # the child is its descendant
            gpus.gpu[1].pid = child.pid
            await eventually(lambda: any(line.get("gpus") == ["GPU-0001"] for line in logs))
        gpus.gpu[1].remap_failed = 1
        await eventually(lambda: stream.events)
    finally:
        await child.communicate(b"\n")
    assert [line["unmapped"] for line in logs if line["event"] == "device_watch_on"] == [
        ["GPU-0000", "GPU-0001"],
        ["GPU-0000"],
    ]
    (fact,) = facts_of(stream)
    assert isinstance(fact, DeviceFaulted) and fact.fault_class == "row_remap_failure"


def test_links_matter_once_the_process_uses_a_second_gpu(gpus: shim.State) -> None:
    changes: list[FaultChange] = []
    watch = DeviceWatch((), QUICK, users=lambda: {7})
    gpus.gpu[0].pid = 7
    watch.start(5)
    watch.begin(lambda uuid, change: changes.append(change))
    gpus.gpu[1].pid = 7
    try:
        block_until(lambda: len(watch.gpus) == 2)
        gpus.gpu[0].raise_xid(74)
        block_until(lambda: bool(changes))
    finally:
        watch.stop()
        watch.reader.join(5)
    assert changes == [FaultChange(fault_class="xid_nvlink", code="74", weight=0.0)]


async def test_a_missing_process_is_refused(gpus: shim.State, watched: Watched) -> None:
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
    await child.wait()
    with pytest.raises(BadSetting, match=f"engine_pid = {child.pid}: there is no such process"):
        await watched(engine_pid=child.pid)


async def test_the_watch_fails_without_a_driver(
    gpus: shim.State, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(shim.STATE, "")
    with pytest.raises(WatchOff, match="cannot use the NVIDIA driver"):
        await watched(gpus="0")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({}, "either gpus or engine_pid"),
        ({"gpus": "0", "engine_pid": 1}, "either gpus or engine_pid"),
        ({"gpus": "0", "nats_url": ""}, "requires nats_url"),
        ({"engine_pid": 1, "count": 2}, "of one worker"),
        ({"engine_pid": 1, "watch_only": False}, "only valid with watch_only"),
        ({"engine_pid": 0}, "engine_pid = 0"),
    ],
)
def test_incompatible_flags_are_refused(flags: dict[str, object], message: str) -> None:
    with pytest.raises(BadSetting, match=message):
        load_settings({"watch_only": True, "nats_url": "nats://x", **flags}, {})


# --- as a process, next to one that it did not start


async def wait_for_facts(url: str, holds: Callable[[list[Fact]], bool]) -> list[Fact]:
    journal = await NatsJournal.connect(url, "test:reader:1")
    found: list[Fact] = []
    try:
        async with asyncio.timeout(20):
            async for batch in journal.read(0):
                found += [event.fact for event in batch]
                if holds(found):
                    return found
    finally:
        await journal.close()
    raise AssertionError("the journal ended")


@pytest.mark.slow
@pytest.mark.servers
async def test_a_watch_process_reports_and_its_end_is_not_taken_for_the_workers_silence(
    gpus: shim.State,
    library: Path,
    spawn: Spawn,
    own_nats: EmbeddedServer,
    tmp_path: Path,
    eventually: Eventually,
) -> None:
    url, driver = own_nats.url, {"LD_LIBRARY_PATH": str(library.parent)}
    worker = await spawn("--name", "w0", nats_url=url, HOLDFAST_WORKER_INSTANCE="i1")
    await eventually(lambda: worker.ready, START_S)
    bus = await NatsBus.connect(url, "test")
    beating: list[object] = []
    await bus.subscribe(subjects.beat("w0"), lambda subject, body: beating.append(body.get("instance")))

    async def watch() -> Process:
        process = await spawn("--watch-only", "--name", "w0", "--gpus", "0", nats_url=url, **driver)
        await eventually(lambda: "watch_follows" in process.events, START_S)
        return process

    first = await watch()
    gpus.gpu[0].raise_xid(79)
    recorded = await wait_for_facts(url, lambda facts: any(isinstance(f, DeviceFaulted) for f in facts))
    assert recorded[-1] == DeviceFaulted(worker="w0", instance="i1", **XID, fatal=True, weight=None)
    await eventually(lambda: any(tmp_path.glob("devices/*.json")))  # stored after it was reported
    first.inner.kill()
    assert await first.ended() == -signal.SIGKILL
    beating.clear()
    await eventually(lambda: len(beating) >= 2)
    assert worker.inner.returncode is None and set(beating) == {"i1"}, "only the worker sends heartbeats"
    second = await watch()  # the driver asks for no reset any more
    recorded = await wait_for_facts(url, lambda facts: any(isinstance(f, DeviceRecovered) for f in facts))
    assert recorded[-1] == DeviceRecovered(worker="w0", instance="i1", **XID)
    second.inner.send_signal(signal.SIGTERM)
    assert await second.ended() == 0
    kinds = [type(fact) for fact in recorded]
    assert (kinds[0], set(kinds[1:])) == (WorkerJoined, {DeviceFaulted, DeviceRecovered}), (
        "the watch registers nothing"
    )
    assert not any("Traceback" in line for line in second.lines)
    await bus.close()
