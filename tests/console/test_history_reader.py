"""Commands that read the journal run as child processes: few at a time, with a deadline, cancellable."""

import asyncio
import os
import sys
from pathlib import Path

import pytest
from console_kit import reader
from waits import turns, until

from controller.console.history import AT_ONCE, WAITING_MAX, HistoryBusy, HistoryUnavailable

SLEEPS = "import os, signal, sys; open(sys.argv[1], 'w').write(str(os.getpid())); signal.pause()"


async def pid(place: Path) -> int:
    return int(await until(lambda: place.exists() and place.read_text()))


async def ended(process: int) -> None:
    await until(lambda: not Path(f"/proc/{process}/stat").exists())


async def test_a_command_that_takes_too_long_is_killed(tmp_path: Path) -> None:
    short = reader(sys.executable, "-c", SLEEPS, str(tmp_path / "pid"), within_s=0.5)
    asked = asyncio.create_task(short.story("r"))
    with pytest.raises(HistoryUnavailable, match=r"longer than 0\.5 s"):
        await asked
    if (tmp_path / "pid").exists():
        await ended(await pid(tmp_path / "pid"))


async def test_a_command_without_a_waiting_client_is_killed(tmp_path: Path) -> None:
    asked = asyncio.create_task(reader(sys.executable, "-c", SLEEPS, str(tmp_path / "pid")).story("r"))
    process = await pid(tmp_path / "pid")
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    await ended(process)


async def test_a_command_runs_at_lower_priority_than_the_frontend(tmp_path: Path) -> None:
    asked = asyncio.create_task(reader(sys.executable, "-c", SLEEPS, str(tmp_path / "pid")).story("r"))
    process = await pid(tmp_path / "pid")
    assert os.getpriority(os.PRIO_PROCESS, process) > os.getpriority(os.PRIO_PROCESS, os.getpid())
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)


async def test_the_number_of_running_and_waiting_commands_is_limited(tmp_path: Path) -> None:
    shared = reader(sys.executable, "-c", "import signal; signal.pause()")
    asked = [asyncio.create_task(shared.story(f"r{n}")) for n in range(AT_ONCE + WAITING_MAX)]
    await turns(2)
    with pytest.raises(HistoryBusy, match="in a moment"):
        await shared.story("one more")
    for one in asked:
        one.cancel()
    results = await asyncio.gather(*asked, return_exceptions=True)
    assert all(isinstance(one, asyncio.CancelledError) for one in results)


async def test_a_command_that_fails_silently_is_reported(tmp_path: Path) -> None:
    with pytest.raises(HistoryUnavailable, match="does not have this information"):
        await reader("false").story("r")
