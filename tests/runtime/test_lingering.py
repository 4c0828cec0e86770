"""Processes that outlive their dead instance are reported once, and counted as long as they last."""

import asyncio
from typing import Any

from canary_world import World, joined
from memory_bus import MemoryBus

from controller.adapters.request_plane.dialers import port_open
from controller.runtime.beats import Beats
from controller.runtime.host_processes import LINGERS_AFTER_S, LOOK_S, HostProcesses, Lingering
from events import subjects
from events.observations import Topology, WorkerLeft, WorkerLingered, WorkerSilent


class DyingFleet:
    """A fleet of w1 on this host and w2 on another, with the watch for lingering processes."""

    def __init__(self) -> None:
        self.world = World()
        self.bus = MemoryBus(connected_since=0.0)
        self.beats = Beats(self.world.clock)
        self.pids: set[int] = {17}
        self.ports: set[str] = {"tcp://far:1"}
        self.tried: list[str] = []
        processes = HostProcesses("here", lambda pid: 0.0 if pid in self.pids else None)
        self.watch = Lingering(
            self.world,
            self.beats,
            self.world.journal,
            processes,
            self._port_open,
            self.world.clock,
            lambda: self.world.leads,
        )
        self.world.join("w1", pid=17, topology=Topology(host="here"))
        self.world.join("w2", pid=17, topology=Topology(host="far"), url="tcp://far:1")

    async def _port_open(self, url: str) -> bool:
        self.tried.append(url)
        return url in self.ports

    async def die(self, *workers: str) -> None:
        for worker in workers:
            said = WorkerSilent(worker=worker, instance=f"{worker}-1", silent_s=3.0, observer="")
            self.world.journal.observe(said)
        await self.world.until(lambda: not any(self.world.fleet.workers[w].alive for w in workers), 60)

    async def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds / LOOK_S)):
            await self.watch.look()
            await self.world.pass_time(LOOK_S)

    def said(self) -> list[tuple[str, str, int, str]]:
        return [(f.worker, f.evidence, f.pid, f.host) for f in self.world.facts(WorkerLingered)]


async def test_a_process_that_outlives_its_instance_is_reported_once_and_counted_until_it_is_gone() -> None:
    dying = DyingFleet()
    await dying.pass_time(2 * LINGERS_AFTER_S)
    assert (dying.said(), dying.watch.count, dying.tried) == ([], 0, []), "no worker is dead"
    await dying.die("w1", "w2")
    await dying.pass_time(LINGERS_AFTER_S - LOOK_S)
    assert dying.said() == [], "its supervisor may be ending it"
    await dying.pass_time(LINGERS_AFTER_S)
    assert dying.said() == [("w1", "process", 17, "here"), ("w2", "port", 17, "far")]
    await dying.pass_time(LINGERS_AFTER_S)
    assert (len(dying.said()), dying.watch.count) == (2, 2)
    (fact, _) = dying.world.facts(WorkerLingered)
    assert fact.instance == "w1-1" and fact.dead_s >= LINGERS_AFTER_S
    dying.pids.clear()
    await dying.watch.look()
    assert dying.watch.count == 1
    dying.world.journal.observe(joined("w2", "w2-2", topology=Topology(host="far"), url="tcp://far:2"))
    dying.world.turn()
    await dying.watch.look()
    assert dying.watch.count == 0


async def test_a_dead_instance_that_still_beats_lingers_on_any_host() -> None:
    dying = DyingFleet()
    dying.ports.clear()
    await dying.beats.start(dying.bus)
    await dying.die("w2")
    for _ in range(5):
        at = dying.world.clock.now().isoformat()
        body: dict[str, Any] = {"worker": "w2", "instance": "w2-1", "load": {}, "at": at}
        await dying.bus.publish(subjects.beat("w2"), body)
        await dying.pass_time(LOOK_S)
    assert dying.said() == [("w2", "beat", 17, "far")]


async def test_a_worker_that_left_or_lost_its_port_to_another_does_not_linger() -> None:
    dying = DyingFleet()
    dying.world.journal.observe(WorkerLeft(worker="w1", instance="w1-1", mode="graceful", exit=0))
    dying.world.join("w3", topology=Topology(host="far"), url="tcp://far:1")
    await dying.die("w2")
    await dying.pass_time(2 * LINGERS_AFTER_S)
    assert (dying.said(), dying.tried) == ([], [])


async def test_only_the_holder_of_the_lease_watches() -> None:
    dying = DyingFleet()
    dying.world.leads = False
    await dying.die("w1")
    await dying.pass_time(2 * LINGERS_AFTER_S)
    assert (dying.said(), dying.watch.count) == ([], 0)


async def test_an_open_port_can_be_detected_remotely() -> None:
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    assert await port_open(f"tcp://127.0.0.1:{port}")
    server.close()
    await server.wait_closed()
    assert not await port_open(f"tcp://127.0.0.1:{port}")
    assert not await port_open("nats:plane.w1.i1")
