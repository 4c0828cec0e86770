"""`holdfast up` ends a worker process that was declared dead, hung or not, and starts another."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from memory_journal import MemoryJournal, MemoryStream
from waits import until

from controller.processes.children import Child
from controller.processes.worker_exits import GRACE_S, WorkerExits
from events.decisions import HealthChanged, HealthStatus
from events.observations import Profile, WorkerJoined, WorkerLeft

OBEYS = "import signal; print(flush=True)\nwhile True: signal.pause()"
STUBBORN = "import signal; signal.signal(15, signal.SIG_IGN); print(flush=True)\nwhile True: signal.pause()"


class Supervised:
    """One worker process with the part of its supervisor that tracks its exit."""

    def __init__(self, folder: Path, program: str, workers: int = 1) -> None:
        self.stream = MemoryStream()
        self.exits = WorkerExits(MemoryJournal(self.stream, "supervisor").observe)
        self.child = Child("w0", "worker", [sys.executable, "-c", program], folder / "w0.log", {}, workers)
        self.instance = ""

    def start(self) -> None:
        environment = self.exits.begins(self.child)
        self.instance = environment["HOLDFAST_WORKER_INSTANCE"]
        self.child.start(environment)

    def decide(self, worker: str, instance: str, reason: str = "drained: left") -> None:
        after = HealthStatus.DEAD
        about: dict[str, Any] = {"worker": worker, "instance": instance, "reason": reason, "weight": 0.0}
        now = MemoryStream().clock()
        self.hear(HealthChanged(**about, before=HealthStatus.DRAINING, after=after, decided_at=now, cause=""))

    def hear(self, fact: HealthChanged | WorkerJoined | WorkerLeft) -> None:
        assert self.child.pid is not None
        self.exits.receive(fact, {self.child.pid: self.child.name})

    async def ended(self) -> int:
        status: list[int] = []

        def poll() -> bool:
            found = self.child.ended()
            status.extend([] if found is None else [found])
            return bool(status)

        await until(poll)
        self.exits.ended(self.child, status[0])
        return status[0]


async def running(folder: Path, program: str, workers: int = 1) -> Supervised:
    one = Supervised(folder, program, workers)
    one.start()
    await until(lambda: bool(one.child.log.read_text()))
    return one


async def test_a_stopped_process_with_a_dead_instance_is_ended_and_replaced(tmp_path: Path) -> None:
    one = await running(tmp_path, OBEYS)
    assert one.child.pid is not None
    os.kill(one.child.pid, signal.SIGSTOP)
    assert one.exits.carry_out(one.child, 0.0) == ""
    one.decide("w0", "a former instance")
    one.decide("w1", one.instance)
    assert one.exits.carry_out(one.child, 0.0) == ""
    one.decide("w0", one.instance)
    action = one.exits.carry_out(one.child, 0.0)
    assert action == "w0 was declared dead (drained: left), but its process is running: ending it"
    assert await one.ended() == -signal.SIGTERM
    assert [event.fact for event in one.stream.events] == [
        WorkerLeft(worker="w0", instance=one.instance, mode="immediate", exit=143)
    ]
    await until(one.child.due)
    one.start()
    assert one.exits.carry_out(one.child, 1e9) == "", "the decision was about its former instance"
    one.child.signal(signal.SIGKILL)
    await one.ended()


async def test_a_process_that_does_not_end_is_killed_after_its_grace(tmp_path: Path) -> None:
    one = await running(tmp_path, STUBBORN)
    one.decide("w0", one.instance)
    assert one.exits.carry_out(one.child, 100.0)
    assert one.exits.carry_out(one.child, 100.0 + GRACE_S - 0.01) == ""
    assert one.exits.carry_out(one.child, 100.0 + GRACE_S) == "w0 did not end: killing it"
    assert await one.ended() == -signal.SIGKILL
    assert one.exits.carry_out(one.child, 200.0) == ""


async def test_a_worker_that_announced_its_exit_gets_no_signal_within_the_grace_period(
    tmp_path: Path,
) -> None:
    one = await running(tmp_path, OBEYS)
    one.decide("w0", one.instance, "left: graceful")
    assert one.exits.carry_out(one.child, 100.0) == ""
    assert one.exits.carry_out(one.child, 100.0 + GRACE_S) == "w0 did not end: killing it"
    assert await one.ended() == -signal.SIGKILL


def joined(worker: str, instance: str, pid: int) -> WorkerJoined:
    names = (
        "url",
        "model",
        "revision",
        "tokenizer",
        "engine",
        "engine_version",
        "dtype",
        "device",
        "canary_key",
    )
    profile = Profile(kv_blocks=1, block_tokens=1, max_batch=1, prefill_tokens_per_s=1.0, tpot_ms=())
    unnamed: dict[str, Any] = dict.fromkeys(names, "")
    return WorkerJoined(worker=worker, instance=instance, pid=pid, profile=profile, tp=1, **unnamed)


async def test_a_process_with_several_workers_is_ended_only_when_all_of_them_are_dead(tmp_path: Path) -> None:
    one = await running(tmp_path, OBEYS, workers=2)
    assert one.child.pid is not None
    one.decide("w0", f"{one.instance}-0")
    assert one.exits.carry_out(one.child, 0.0) == ""
    one.hear(joined("w0", "next", one.child.pid))  # a successor in the same process
    one.hear(joined("w1", "of another process", one.child.pid + 1))
    one.decide("w1", f"{one.instance}-1")
    assert one.exits.carry_out(one.child, 0.0) == ""
    one.decide("w0", "next", "silent")
    action = one.exits.carry_out(one.child, 0.0)
    assert action == "w0 was declared dead (drained: left, silent), but its process is running: ending it"
    await one.ended()
    assert [event.fact.instance for event in one.stream.events if isinstance(event.fact, WorkerLeft)] == [
        "next", f"{one.instance}-1",
    ]  # fmt: skip


@pytest.mark.parametrize("role", ["frontend", "controller"])
def test_processes_other_than_workers_are_never_ended_as_dead(role: str, tmp_path: Path) -> None:
    exits = WorkerExits(MemoryJournal(MemoryStream(), "supervisor").observe)
    child = Child(role, role, [], tmp_path / "log")
    assert exits.begins(child) == {}
    assert exits.carry_out(child, time.monotonic()) == ""


async def test_the_workers_of_a_file_of_upstreams_are_known_when_they_join(tmp_path: Path) -> None:
    one = await running(tmp_path, OBEYS, workers=0)
    for worker, instance in (
        ("gpu1", f"{one.instance}-0"),
        ("gpu2", f"{one.instance}-1"),
        ("spy", "other-0"),
    ):
        assert one.child.pid is not None
        one.hear(joined(worker, instance, one.child.pid))
    one.decide("gpu1", f"{one.instance}-0", "silent")
    assert one.exits.carry_out(one.child, 0.0) == "", "gpu2 lives"
    one.hear(WorkerLeft(worker="gpu1", instance=f"{one.instance}-0", mode="graceful", exit=0))
    assert one.child.pid is not None
    one.hear(joined("gpu1", f"{one.instance}-2", one.child.pid))
    one.child.signal(signal.SIGKILL)
    await one.ended()
    facts = [event.fact for event in one.stream.events]
    assert facts == [
        WorkerLeft(worker=worker, instance=f"{one.instance}-{number}", mode="immediate", exit=137)
        for worker, number in (("gpu2", 1), ("gpu1", 2))
    ]


async def test_an_upstream_that_has_left_is_not_reported_again(tmp_path: Path) -> None:
    one = await running(tmp_path, OBEYS, workers=0)
    assert one.child.pid is not None
    one.hear(joined("gpu1", f"{one.instance}-0", one.child.pid))
    one.hear(WorkerLeft(worker="gpu1", instance=f"{one.instance}-0", mode="graceful", exit=0))
    assert one.exits.carry_out(one.child, 0.0) == ""
    one.child.signal(signal.SIGKILL)
    await one.ended()
    assert one.stream.events == []
