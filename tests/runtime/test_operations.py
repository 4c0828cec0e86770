"""An operator's command becomes a fact, or is refused with a clear reason."""

import platform
import signal
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from canary_world import World, joined
from memory_bus import MemoryBus

from controller.ports import Command, StoreUnavailable
from controller.runtime.beats import Beats
from controller.runtime.command_answers import ChaosRefused, NotPossible, UnknownWorker
from controller.runtime.host_processes import HostProcesses
from controller.runtime.operations import ControlOperations
from events import subjects
from events.intrusion.control_message import foreign
from events.observations import (
    ChaosInjected,
    DrainRequested,
    MoveRequested,
    RestartRequested,
    ResumeRequested,
    Topology,
    WorkerAwaited,
    WorkerLeft,
    WorkerSilent,
)
from events.process.presence import Presence


class OperationsOverDoubles:
    """The operations over a fleet of doubles."""

    def __init__(self, chaos: bool = True) -> None:
        self.world = World()
        self.bus = MemoryBus()
        self.beats = Beats(self.world.clock)
        self.signals: list[tuple[int, int]] = []
        self.gone: set[int] = set()  # pids of processes that have ended
        self.stubborn = False  # processes end only on SIGKILL
        self.projected: int | Exception = 1
        self.operations = ControlOperations(
            fleet=lambda: self.world.fleet,
            leader=lambda: "controller:1",
            present=lambda: [
                Presence("worker", "w1", 17, "tcp://x:1"),
                Presence("frontend", "f0", 18, "http://x:2", "http://x:2/console"),
            ],
            projected=self._projected,
            stored=self._stored,
            journal=self.world.journal,
            bus=self.bus,
            beats=self.beats,
            injects_faults=chaos,
            processes=HostProcesses(platform.node(), self._began_at, self._signal),
        )

    async def _projected(self) -> int | None:
        if isinstance(self.projected, Exception):
            raise self.projected
        return self.projected

    async def _stored(self) -> Mapping[str, Mapping[str, object]]:
        return {}

    def _began_at(self, pid: int) -> float | None:
        return None if pid in self.gone else 0.0

    def _signal(self, pid: int, number: int) -> None:
        if number:
            self.signals.append((pid, number))
        if number == signal.SIGKILL or (number == signal.SIGTERM and not self.stubborn):
            self.gone.add(pid)

    async def die(self, worker: str) -> None:
        """Keep a worker silent until it is declared dead."""
        self.world.journal.observe(
            WorkerSilent(worker=worker, instance=f"{worker}-1", silent_s=3.0, observer="")
        )
        await self.world.until(lambda: not self.world.fleet.workers[worker].alive, 60)


async def test_a_drain_and_a_resume_become_facts_of_the_present_instance() -> None:
    doubles = OperationsOverDoubles()
    doubles.world.join("w1")
    assert "30 s" in await doubles.operations.drain("w1", 30, "ada")
    doubles.world.turn()
    await doubles.operations.resume("w1", "ada")
    (drain,), (resume,) = doubles.world.facts(DrainRequested), doubles.world.facts(ResumeRequested)
    assert (drain.instance, drain.deadline_s, drain.by) == ("w1-1", 30, "ada")
    assert (resume.instance, resume.by) == ("w1-1", "ada")


async def test_a_healthy_worker_has_nothing_to_resume() -> None:
    doubles = OperationsOverDoubles()
    doubles.world.join("w1")
    async with doubles.world.running():
        await doubles.world.until(lambda: doubles.world.status("w1") == "HEALTHY", 60)
    with pytest.raises(NotPossible, match="w1 is healthy and does not drain: there is nothing to resume"):
        await doubles.operations.resume("w1", "ada")
    assert not doubles.world.facts(ResumeRequested)


async def test_a_move_becomes_a_fact_if_another_worker_can_accept_the_requests() -> None:
    doubles = OperationsOverDoubles()
    for worker in ("w1", "w2"):
        doubles.world.join(worker)
    doubles.world.join("w3", revision="another")
    with pytest.raises(NotPossible, match="no other worker can accept them: it must serve the same model"):
        await doubles.operations.move("w1", "", "ada")  # w2 has not passed a canary yet
    async with doubles.world.running():
        await doubles.world.until(lambda: doubles.world.status("w2") == "HEALTHY", 60)
        assert await doubles.operations.move("w1", "", "ada") == "requests on w1 will move"
        assert await doubles.operations.move("w1", "w2", "ada") == "requests on w1 will move to w2"
        for to, why in (("w1", "w1 already runs them"), ("w3", "w3 cannot accept them")):
            with pytest.raises(NotPossible, match=why):
                await doubles.operations.move("w1", to, "ada")
        with pytest.raises(UnknownWorker, match="'w9'"):
            await doubles.operations.move("w1", "w9", "ada")
    moves = doubles.world.facts(MoveRequested)
    assert [(fact.worker, fact.instance, fact.to, fact.by) for fact in moves] == [
        ("w1", "w1-1", "", "ada"), ("w1", "w1-1", "w2", "ada"),
    ]  # fmt: skip


async def test_a_restart_is_on_the_journal_before_the_worker_is_told() -> None:
    doubles = OperationsOverDoubles()
    doubles.world.join("w1")
    heard: list[tuple[str, int]] = []

    def stop(subject: str, body: Mapping[str, Any]) -> dict[str, Any]:
        heard.append((body["instance"], len(doubles.world.facts(RestartRequested))))
        return {}

    await doubles.bus.subscribe(subjects.command("stop", "w1"), stop)
    assert await doubles.operations.restart("w1", "ada") == "w1 shuts down; its supervisor starts it again"
    assert heard == [("w1-1", 1)]


async def test_the_facts_of_a_command_carry_its_id_and_its_deadline() -> None:
    doubles, deadline = OperationsOverDoubles(), datetime(2026, 1, 1, 0, 0, 5, tzinfo=UTC)
    command = Command("command-1", deadline, "drain", "w1", "ada")
    for worker in ("w1", "w2"):
        doubles.world.join(worker)
    await doubles.bus.subscribe("live.*.w1", lambda *_: {})
    async with doubles.world.running():
        await doubles.world.until(lambda: doubles.world.status("w2") == "HEALTHY", 60)
        await doubles.operations.move("w1", "", "ada", command)
        await doubles.operations.drain("w1", 30, "ada", command)
        doubles.world.turn()
        await doubles.operations.resume("w1", "ada", command)
        await doubles.operations.restart("w1", "ada", command)
        await doubles.operations.chaos("w1", "kill", None, None, "ada", None, command)
    for kind in (MoveRequested, DrainRequested, ResumeRequested, RestartRequested, ChaosInjected):
        (fact,) = doubles.world.facts(kind)
        until = None if kind is ChaosInjected else deadline  # a ChaosInjected reports what has happened
        assert (fact.command, fact.until, fact.by) == ("command-1", until, "ada"), kind


async def test_a_misspelt_worker_is_refused() -> None:
    doubles = OperationsOverDoubles()
    with pytest.raises(UnknownWorker, match="'w9'"):
        await doubles.operations.drain("w9", None, "")
    assert not doubles.world.facts(DrainRequested)


async def test_chaos_is_refused_unless_the_fleet_was_started_for_it() -> None:
    doubles = OperationsOverDoubles(chaos=False)
    doubles.world.join("w1")
    with pytest.raises(ChaosRefused, match="--chaos"):
        await doubles.operations.chaos("w1", "kill", None, None, "ada")
    assert not doubles.signals
    assert not doubles.world.facts(ChaosInjected)


@pytest.mark.parametrize(
    ("fault", "number"), [("kill", signal.SIGKILL), ("hang", signal.SIGSTOP), ("unhang", signal.SIGCONT)]
)
async def test_a_process_is_killed_or_hung_by_signal(fault: str, number: int) -> None:
    doubles = OperationsOverDoubles()
    doubles.world.join("w1", pid=4711)
    await doubles.operations.chaos("w1", fault, None, None, "ada")
    assert doubles.signals == [(4711, number)]
    assert [(f.fault, f.by) for f in doubles.world.facts(ChaosInjected)] == [(fault, "ada")]


@pytest.mark.parametrize("fault", ["kill", "hang", "unhang"])
async def test_a_fault_hits_only_one_worker_of_a_shared_process(fault: str) -> None:
    doubles = OperationsOverDoubles()
    topology = Topology(host=platform.node())
    for worker in ("w1", "w2"):
        doubles.world.join(worker, pid=4711, topology=topology)
    heard: list[Any] = []

    def chaos(subject: str, body: Mapping[str, Any]) -> dict[str, Any]:
        heard.append(body["fault"])
        return {}

    await doubles.bus.subscribe(subjects.command("chaos", "w1"), chaos)
    await doubles.operations.chaos("w1", fault, None, None, "ada")
    assert (heard, doubles.signals) == ([fault], [])
    assert [f.worker for f in doubles.world.facts(ChaosInjected)] == ["w1"]


async def test_a_process_that_is_gone_or_on_another_host_gets_no_signal() -> None:
    doubles = OperationsOverDoubles()
    doubles.world.join("w1", topology=Topology(host=f"not-{platform.node()}"))
    with pytest.raises(NotPossible, match="runs on"):
        await doubles.operations.chaos("w1", "kill", None, None, "")
    doubles.world.join("w2", pid=99)
    doubles.gone.add(99)
    with pytest.raises(NotPossible, match="No such process"):
        await doubles.operations.chaos("w2", "kill", None, None, "")
    assert not doubles.signals
    assert not doubles.world.facts(ChaosInjected)


async def test_other_faults_are_forwarded_to_the_worker() -> None:
    doubles = OperationsOverDoubles()
    doubles.world.join("w1")
    heard: list[Mapping[str, Any]] = []

    async def on_chaos(subject: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        assert foreign("chaos", "w1", body) == ""
        heard.append({k: v for k, v in body.items() if k not in ("control", "instance")})
        return {"error": "cannot drift"} if body["fault"] == "drift" else {"fault": body["fault"]}

    with pytest.raises(NotPossible, match="does not answer"):
        await doubles.operations.chaos("w1", "corrupt", 8, None, "")
    await doubles.bus.subscribe(subjects.command("chaos", "w1"), on_chaos)
    await doubles.operations.chaos("w1", "corrupt", 8, 5, "ada")
    until = (
        doubles.world.clock.now() + timedelta(seconds=1)
    ).isoformat()  # the worker obeys before that, or never
    assert heard == [{"fault": "corrupt", "argument": 8, "rank": None, "duration": 5, "until": until}]
    await doubles.operations.chaos("w1", "xid", 79, None, "ada", 3)
    assert heard[1] == {"fault": "xid", "argument": 79, "rank": 3, "duration": None, "until": until}
    with pytest.raises(NotPossible, match="cannot drift"):
        await doubles.operations.chaos("w1", "drift", None, None, "")
    assert [(f.fault, f.detail, f.duration_s) for f in doubles.world.facts(ChaosInjected)] == [
        ("corrupt", "argument=8", 5),
        ("xid", "argument=79, rank=3", None),
    ]


async def test_the_status_has_the_documented_keys() -> None:
    doubles = OperationsOverDoubles()
    await doubles.beats.start(doubles.bus)
    doubles.world.join("w1", pid=17)
    async with doubles.world.running():
        await doubles.world.pass_time(3)
    body = {"worker": "w1", "instance": "w1-1", "load": {"running": 2, "waiting": 1}, "draining": False}
    await doubles.bus.publish(subjects.beat("w1"), {**body, "at": doubles.world.clock.now().isoformat()})
    status = await doubles.operations.status()
    keys = {"workers", "awaited", "processes", "levels", "journal", "spool", "projector", "leader"}
    assert set(status) == keys
    (worker,) = status["workers"]
    assert list(worker) == [
        "id", "instance", "pid", "engine", "model", "health", "breaker", "weight", "reasons", "held", "spare", "place",
        "lingers", "in_flight", "last_canary", "adapters",
    ]  # fmt: skip
    assert (worker["health"], worker["breaker"], worker["weight"]) == ("HEALTHY", "closed", 1.0)
    assert worker["in_flight"] == 3
    assert worker["last_canary"]["outcome"] == "passed"
    assert status["processes"] == [
        {"role": "worker", "name": "w1", "pid": 17, "url": "tcp://x:1"},
        {"role": "frontend", "name": "f0", "pid": 18, "url": "http://x:2", "console": "http://x:2/console"},
    ]
    assert status["levels"] == {"m": 0}
    last = len(doubles.world.stream.events)
    assert status["journal"] == {"last_seq": last}
    assert status["projector"] == {"position": 1, "lag": last - 1}
    assert status["leader"] == "controller:1"


async def test_status_lists_awaited_workers_but_none_that_have_left_for_good() -> None:
    doubles = OperationsOverDoubles()
    for name in ("w1", "w2"):
        doubles.world.join(name)
    say = doubles.world.journal.observe
    say(WorkerLeft(worker="w1", instance="w1-1", mode="immediate", exit=137))
    say(WorkerAwaited(worker="w1", instance="w1-2", reason="cannot connect to http://u"))
    say(WorkerAwaited(worker="w3", instance="w3-1", reason="it is loading"))
    doubles.world.turn()
    since = doubles.world.clock.now().isoformat(timespec="milliseconds")
    assert (await doubles.operations.status())["awaited"] == [
        {"id": "w1", "model": "m", "reason": "cannot connect to http://u", "since": since},
        {"id": "w3", "model": None, "reason": "it is loading", "since": since},
    ]
    say(WorkerLeft(worker="w2", instance="w2-1", mode="graceful", exit=0))
    doubles.world.turn()
    await doubles.world.pass_time(601)
    doubles.world.turn()
    status = await doubles.operations.status()
    assert [worker["id"] for worker in status["workers"]] == ["w1"], "its next instance is awaited"
    with pytest.raises(UnknownWorker, match="'w2'"):
        await doubles.operations.drain("w2", None, "")


async def test_unknown_values_are_null() -> None:
    doubles = OperationsOverDoubles()
    doubles.world.join("w1")
    doubles.world.stream.reachable = False
    doubles.projected = StoreUnavailable()
    status = await doubles.operations.status()
    assert status["journal"] == {"last_seq": None}
    assert status["projector"] == {"position": None, "lag": None}
    assert status["workers"][0]["in_flight"] is None
    assert status["workers"][0]["last_canary"] is None


def test_a_registration_of_the_double_can_be_changed() -> None:
    assert joined("w", pid=5).pid == 5
