"""The operator's commands to workers that hang, and to workers with a dead instance."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
from canary_world import World
from test_operations import OperationsOverDoubles
from waits import until, virtual

from benchmarks.virtual_loop import VirtualLoop
from controller.runtime.command_answers import NotPossible
from controller.runtime.host_processes import CLOCKS_S, HostProcesses, began_at
from events import subjects
from events.observations import ChaosInjected, DrainRequested, Topology, WorkerSilent

LOOP = VirtualLoop
TERM, CONT, KILL, STOP = signal.SIGTERM, signal.SIGCONT, signal.SIGKILL, signal.SIGSTOP


async def dead(**more: Any) -> OperationsOverDoubles:
    """Return a fleet in which w1 was declared dead after a silence; its process, 4711, hangs."""
    doubles = OperationsOverDoubles()
    doubles.world.join("w1", pid=4711, **more)
    await doubles.die("w1")
    return doubles


@pytest.mark.parametrize("command", ["restart", "resume"])
async def test_the_process_of_a_dead_instance_is_ended_so_that_a_new_one_comes(command: str) -> None:
    doubles = await dead()
    assert (await doubles.operations.status())["workers"][0]["lingers"] is True
    said = await getattr(doubles.operations, command)("w1", "ada")
    assert said == "w1 is dead (drained: left): its process ends; its supervisor starts it again"
    assert doubles.signals == [(4711, TERM)], "it has ended at once"
    said = await getattr(doubles.operations, command)("w1", "ada")
    assert "w1 is dead" in said and "its next instance joins when its supervisor has started one" in said
    assert len(doubles.signals) == 1
    assert (await doubles.operations.status())["workers"][0]["lingers"] is False


async def test_a_process_that_does_not_end_is_killed() -> None:
    doubles = await dead()
    doubles.stubborn = True
    assert "is killed" in await doubles.operations.restart("w1", "ada")
    assert doubles.signals == [(4711, TERM), (4711, CONT), (4711, KILL)]


async def test_a_hung_worker_is_restarted_and_may_shut_down_gracefully_once_it_resumes() -> None:
    doubles = OperationsOverDoubles()
    doubles.world.join("w1", pid=4711)
    doubles.stubborn = True  # it takes its time: its streams have a grace period
    heard: list[Mapping[str, Any]] = []

    async def on_stop(subject: str, body: Mapping[str, Any]) -> Mapping[str, Any] | None:
        heard.append(body)
        if (4711, CONT) not in doubles.signals:
            await asyncio.Event().wait()
        return {"stopping": True}

    await doubles.bus.subscribe(subjects.command("stop", "w1"), on_stop)
    assert "w1 did not answer: its process ends;" in await doubles.operations.restart("w1", "ada")
    assert doubles.signals == [(4711, TERM), (4711, CONT)]
    assert [body["instance"] for body in heard] == ["w1-1", "w1-1"]


async def test_a_worker_that_its_supervisor_ends_meanwhile_counts_as_restarted() -> None:
    doubles = OperationsOverDoubles()
    doubles.world.join("w1", pid=4711)

    async def on_stop(subject: str, body: Mapping[str, Any]) -> Mapping[str, Any] | None:
        doubles.gone.add(4711)  # ended by its supervisor, which has read that the instance is dead
        await asyncio.Event().wait()
        return None

    await doubles.bus.subscribe(subjects.command("stop", "w1"), on_stop)
    said = await doubles.operations.restart("w1", "ada")
    assert said == "w1 did not answer: its process has ended; its supervisor starts it again"
    assert not doubles.signals


async def test_a_worker_connected_to_a_frontend_but_not_to_the_broker_is_not_killed() -> None:
    doubles = OperationsOverDoubles()
    doubles.world.join("w1", pid=4711)
    doubles.stubborn = True
    await doubles.beats.start(doubles.bus)
    await doubles.bus.publish(subjects.links("f"), {"frontend": "f", "workers": {"w1": "w1-1"}})
    assert "w1 did not answer: its process ends;" in await doubles.operations.restart("w1", "ada")
    assert doubles.signals == [(4711, TERM), (4711, CONT)]


async def test_a_worker_that_refuses_to_stop_is_not_killed_for_it() -> None:
    doubles = OperationsOverDoubles()
    doubles.world.join("w1", pid=4711)
    await doubles.bus.subscribe(
        subjects.command("stop", "w1"), lambda subject, body: {"error": "w1-0 is gone"}
    )
    with pytest.raises(NotPossible, match="w1 refuses: w1-0 is gone"):
        await doubles.operations.restart("w1", "ada")
    assert not doubles.signals


async def test_a_dead_worker_on_another_host_is_left_to_its_supervisor() -> None:
    doubles = await dead(topology=Topology(host="elsewhere"))
    assert "its supervisor has started one" in await doubles.operations.restart("w1", "ada")
    assert not doubles.signals


async def test_a_hung_worker_in_a_shared_process_is_told_to_end_without_harm_to_others() -> None:
    doubles = OperationsOverDoubles()
    for worker in ("w1", "w2"):
        doubles.world.join(worker, pid=4711, topology=Topology(host=HostProcesses().host))
    heard: list[str] = []

    def retire(subject: str, body: Mapping[str, Any]) -> dict[str, Any]:
        heard.append(body["instance"])
        return {}

    await doubles.bus.subscribe(subjects.command("retire", "w1"), retire)
    assert "its next instance takes its place" in await doubles.operations.restart("w1", "ada")
    assert (heard, doubles.signals) == (["w1-1"], [])


async def test_commands_that_do_not_apply_to_a_dead_worker_explain_its_state() -> None:
    doubles = await dead()
    for asked in (
        doubles.operations.drain("w1", 30, "ada"),
        doubles.operations.move("w1", "", "ada"),
        doubles.operations.chaos("w1", "slow", 3, None, "ada"),
    ):
        with pytest.raises(
            NotPossible, match=r"w1 is dead .*4711 still lives: `holdfast restart w1` ends it"
        ):
            await asked
    assert not doubles.world.facts(DrainRequested) and not doubles.world.facts(ChaosInjected)


@pytest.mark.parametrize(
    ("fault", "number"), [("kill", KILL), ("hang", STOP), ("unhang", CONT), ("heal", CONT)]
)
async def test_process_faults_apply_to_the_process_of_a_dead_instance(fault: str, number: int) -> None:
    doubles = await dead()
    assert await doubles.operations.chaos("w1", fault, None, None, "ada") == f"w1: {fault}"
    assert doubles.signals == [(4711, number)]
    doubles.gone.add(4711)
    with pytest.raises(NotPossible, match="no fault was injected"):
        await doubles.operations.chaos("w1", fault, None, None, "ada")
    assert len(doubles.world.facts(ChaosInjected)) == 1


async def test_heal_resumes_a_hung_worker_and_waits_until_it_answers() -> None:
    doubles = OperationsOverDoubles()
    doubles.world.join("w1", pid=4711)
    heard: list[str] = []

    def chaos(subject: str, body: Mapping[str, Any]) -> dict[str, Any]:
        heard.append(body["fault"])
        return {}

    async def wakes() -> None:
        await until(lambda: doubles.signals)
        await doubles.bus.subscribe(subjects.command("chaos", "w1"), chaos)

    async with asyncio.timeout(20):
        await asyncio.gather(wakes(), doubles.operations.chaos("w1", "heal", None, None, "ada"))
    assert (doubles.signals, heard) == ([(4711, CONT)], ["heal"])


# --- a hang of limited duration


async def test_a_hang_with_a_duration_ends_by_itself() -> None:
    doubles = OperationsOverDoubles()
    doubles.world.join("w1", pid=4711, topology=Topology(host=HostProcesses().host))
    await doubles.operations.chaos("w1", "hang", None, 0.05, "ada")
    assert doubles.signals == [(4711, STOP)]
    doubles.world.journal.observe(WorkerSilent(worker="w1", instance="w1-1", silent_s=3.0, observer=""))
    doubles.world.turn()  # the fold changes meanwhile
    await until(lambda: len(doubles.signals) == 2)
    assert doubles.signals[1] == (4711, CONT)


async def test_a_hang_that_was_ended_by_hand_is_not_ended_again() -> None:
    doubles = OperationsOverDoubles()
    doubles.world.join("w1", pid=4711)
    await doubles.operations.chaos("w1", "hang", None, 0.05, "ada")
    await doubles.operations.chaos("w1", "unhang", None, None, "ada")
    await doubles.operations.chaos("w1", "hang", None, None, "ada")  # until it is healed
    await doubles.operations.chaos("w1", "hang", None, 3600, "ada")
    await virtual(0.1)  # past the end of the first hang
    assert [number for _, number in doubles.signals] == [STOP, CONT, STOP, STOP]
    doubles.operations.close()
    assert doubles.signals[-1] == (4711, CONT), "a controller that ends leaves no worker stopped"
    doubles.operations.close()
    assert len(doubles.signals) == 5


# --- ownership of processes


def test_a_process_that_began_after_the_instance_had_joined_is_another_one() -> None:
    signals: list[int] = []
    world = World()
    world.join("w1", pid=4711)
    worker = world.fleet.workers["w1"]
    joined_at = worker.joined_at.timestamp()
    for began, lives in ((joined_at - 60, True), (joined_at + 1, True), (joined_at + CLOCKS_S + 1, False)):

        def began_at_that_time(pid: int, began: float = began) -> float:
            return began

        processes = HostProcesses("here", began_at_that_time, lambda pid, number: signals.append(number))
        assert processes.live(worker) is lives
        with contextlib.nullcontext() if lives else pytest.raises(NotPossible, match="another process has"):
            processes.send(worker, signal.SIGUSR1)
    assert signals == [signal.SIGUSR1, signal.SIGUSR1]


def test_a_zombie_does_not_live() -> None:
    assert began_at(os.getpid()) is not None
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert began_at(child.pid) is None
    child.wait()
    assert began_at(child.pid) is None
