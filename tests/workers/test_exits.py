"""How a worker's process ends, and which side records it: itself for 0 and FAILED, else `up`."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from waits import block_until
from worker_life import ABOUT, Begin

from events.observations import WorkerLeft
from workers.cli import exit_code
from workers.engines.engine import Announce, Deliver, EngineDead, discard_events
from workers.engines.simulated.engine import SimulatedEngine
from workers.engines.simulated.sequence import EngineShape
from workers.exits import BROKE, FAILED, USAGE
from workers.worker import WorkerDeadlines


@pytest.mark.parametrize(
    ("error", "code"), [(EngineDead("no such model"), FAILED), (RuntimeError("a bug"), BROKE)]
)
def test_an_unexpected_error_exits_with_a_code_that_means_no_recorded_end(
    error: Exception, code: int
) -> None:
    def fail() -> int:
        raise error

    assert exit_code(fail) == code
    assert BROKE not in (0, FAILED, USAGE)


STUCK_START = """
import asyncio, sys, time
from workers.cli import leave, main
from workers.engines.simulated.engine import SimulatedEngine

async def start(self, deliver, announce=None):
    print("starting", flush=True)
    await asyncio.to_thread(time.sleep, 60)

SimulatedEngine.start = start
leave(main(["--data", sys.argv[1]]))
"""


@pytest.mark.slow
def test_a_call_that_hangs_in_a_thread_of_the_loop_does_not_stop_a_worker_from_exiting(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", STUCK_START, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "starting\n"
            process.terminate()
            assert process.wait(30) == 0
        finally:
            process.kill()


STUCK_ROLE = """
import asyncio, threading
from controller.processes.roles import _run

hangs = threading.Event()

def hang():
    hangs.set()
    threading.Event().wait()

async def role():
    asyncio.ensure_future(asyncio.to_thread(hang))
    await asyncio.to_thread(hangs.wait)
    return 0

raise SystemExit(_run(role()))
"""


def test_a_call_that_hangs_in_a_thread_of_the_loop_does_not_stop_other_roles_from_exiting() -> None:
    ran = subprocess.run([sys.executable, "-c", STUCK_ROLE], timeout=30, check=False)
    assert ran.returncode == 0


async def test_an_engine_that_takes_too_long_to_start_gives_one_clear_error(begin: Begin) -> None:
    class Slow(SimulatedEngine):
        async def start(self, deliver: Deliver, announce: Announce = discard_events) -> None:
            await asyncio.Event().wait()

    life = await begin(engine=Slow(EngineShape()), deadlines=WorkerDeadlines(start_s=0.05))
    with pytest.raises(EngineDead, match=r"the engine did not start within 0\.05 s"):
        await life.running


@pytest.mark.parametrize("code", [0, FAILED])
def test_a_stuck_thread_does_not_stop_the_process_from_exiting(code: int) -> None:
    stuck = (
        "import sys, threading\n"
        "from workers.cli import leave\n"
        "threading.Thread(target=threading.Event().wait).start()\n"
        "print('last words', end='')\n"
        f"leave({code})\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", stuck], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ran.returncode, ran.stdout) == (code, "last words")


async def test_a_cleanup_that_hangs_exits_with_a_code_that_means_no_recorded_end(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    left: list[bool] = []

    class Hanging(SimulatedEngine):
        async def stop(self) -> None:
            block_until(lambda: codes)  # it holds the loop up
            left.append(any(isinstance(fact, WorkerLeft) for fact in life.facts))
            await super().stop()

    life = await begin(engine=Hanging(EngineShape()), deadlines=WorkerDeadlines(cleanup_s=0.05))
    life.worker.fail(EngineDead("broken"))
    assert await life.running == FAILED
    assert (codes, left) == ([BROKE], [False])
    assert life.facts[-1] == WorkerLeft(**ABOUT, mode="self_initiated", exit=FAILED)
