"""Only the process of the worker that registered a pid is signalled under that pid."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from frontend_kit import joined
from scripted_worker import ScriptedWorker
from waits import block_until

from controller.deciders.fold import Fleet, evolve
from controller.deciders.worker import Worker
from controller.runtime.command_answers import NotPossible
from controller.runtime.host_processes import DEFAULT_NAME, HostProcesses
from events.fact import Recorded
from events.observations import Topology
from workers.config.settings import WorkerSettings

UNPRIVILEGED = 65534
SLEEPS = "import signal; signal.pause()"


@contextmanager
def process(*words: str, **environment: str) -> Iterator[int]:
    started = subprocess.Popen([sys.executable, "-c", SLEEPS, *words], env={**os.environ, **environment})
    command_line = Path(f"/proc/{started.pid}/cmdline")
    block_until(lambda: SLEEPS in command_line.read_text())  # set a moment after the process has begun
    try:
        yield started.pid
    finally:
        started.kill()
        started.wait()


def worker(pid: int, instance: str = "w1-1") -> Worker:
    fact = joined(
        ScriptedWorker("w1", instance=instance), pid=pid, topology=Topology(host=HostProcesses().host)
    )
    at = datetime.now(UTC)
    return evolve(Fleet(), Recorded(1, at, fact, "e1")).workers["w1"]


def signalled(known: Worker) -> tuple[list[int], list[Any]]:
    sent, reported = list[int](), list[Any]()
    processes = HostProcesses(
        signal=lambda pid, number: sent.append(pid),
        report=lambda *report, **more: reported.append(report),
    )
    try:
        processes.send(known, signal.SIGTERM)
    except NotPossible as error:
        assert "not its own" in str(error)
    return sent, reported


def test_a_process_that_is_no_worker_is_not_signalled() -> None:
    with process() as pid:
        sent, reported = signalled(worker(pid))
    assert not sent and reported[0][0] == "worker-w1" and "command line" in reported[0][1]


def test_another_workers_process_is_not_signalled() -> None:
    with process(HOLDFAST_WORKER_INSTANCE="w2-1") as pid:
        sent, reported = signalled(worker(pid))
    assert not sent and "another worker's" in reported[0][1]


def test_a_workers_own_process_is_signalled() -> None:
    with process(HOLDFAST_WORKER_INSTANCE="w1-1") as pid:
        assert signalled(worker(pid)) == ([pid], [])
    with process(HOLDFAST_WORKER_INSTANCE="many") as pid:
        assert signalled(worker(pid, "many-3")) == ([pid], [])
    with process("holdfast", "worker", "--name", "w1") as pid:
        assert signalled(worker(pid)) == ([pid], [])


@pytest.mark.parametrize(
    ("words", "environment", "own"),
    [
        (("--name", "w2"), {}, False),
        (("--name=w2",), {}, False),
        (("--name=w1",), {}, True),
        ((), {"HOLDFAST_WORKER_NAME": "w2"}, False),
        ((), {"HOLDFAST_WORKER_NAME": "w1"}, True),
        (("--name", "w2"), {"HOLDFAST_WORKER_NAME": "w1"}, False),  # a flag overrides the environment
        ((), {}, False),  # the default name
        (("--count", "2"), {}, True),  # w0 and w1
        (("--name", "w2", "--num-workers=2"), {}, False),  # w2 and w3
    ],
)
def test_a_standalone_workers_process_is_signalled_for_its_own_name_only(
    words: tuple[str, ...], environment: dict[str, str], own: bool
) -> None:
    """A worker that registers the pid of another standalone worker is reported, and the other one is not signalled."""
    with process("holdfast", "worker", *words, **environment) as pid:
        sent, reported = signalled(worker(pid))
    assert sent == ([pid] if own else [])
    assert own or (reported[0][0] == "worker-w1" and "another worker's, by the name" in reported[0][1])


def test_the_default_name_is_the_workers() -> None:
    assert WorkerSettings().name == DEFAULT_NAME


@contextmanager
def another_users_process() -> Iterator[int]:
    """Yield the pid of another user's process: one started under an unprivileged user as root, else the first process."""
    if os.geteuid() != 0:
        yield 1
        return
    started = subprocess.Popen(["sleep", "60"], user=UNPRIVILEGED, group=UNPRIVILEGED, extra_groups=[])
    try:
        yield started.pid
    finally:
        started.kill()
        started.wait()


def test_another_users_process_is_not_signalled() -> None:
    with another_users_process() as pid:
        sent, reported = signalled(worker(pid))
    assert not sent and "it runs as another user" in reported[0][1]
