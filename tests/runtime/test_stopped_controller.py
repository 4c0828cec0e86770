"""A controller that is paused while operators send commands, and resumes after these have failed."""

import asyncio
import contextlib
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from test_controller_process import Processes, fleet

from controller.runtime.command_sender import NotCarriedOut, command
from events.decisions import DrainStarted
from events.nats.bus import BusUnavailable, NoAnswer
from events.observations import CommandRefused, DrainRequested

pytestmark = pytest.mark.servers
WORKERS = 4
WITHIN_S = 0.5


@contextlib.asynccontextmanager
async def two_controllers(url: str, data: Path, eventually: Any) -> AsyncIterator[Processes]:
    async with fleet(url, data) as processes:
        processes.start("one", "controller")
        processes.start("w", "worker", "--count", str(WORKERS))
        await eventually(lambda: processes.healthy(WORKERS), 30)
        processes.start("two", "controller")

        async def both() -> bool:
            return [p["role"] for p in (await processes.status())["processes"]].count("controller") == 2

        await eventually(both, 30)
        try:
            yield processes
        finally:
            for child in processes.children.values():
                child.send_signal(signal.SIGCONT)


async def drained(processes: Processes, within_s: float) -> list[str]:
    """Request a drain of every worker at once; return the outcomes."""

    async def ask(name: str) -> str:
        try:
            answer = await command(
                processes.bus, processes.url, "drain", {"worker": name, "by": "ada"}, within_s
            )
        except (NoAnswer, BusUnavailable) as error:
            assert isinstance(error, NotCarriedOut), error
            return "not carried out"
        return str(answer.get("says", answer.get("error")))

    names = sorted(f"w{n}" for n in range(WORKERS))
    return await asyncio.gather(*(ask(name) for name in names))


async def refused(processes: Processes) -> dict[str, str]:
    """Return the commands that the journal shows as refused for being late, each with its worker."""
    return {f.command: f.worker for f in await processes.facts(CommandRefused) if f.late}


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [["one"], ["one", "two"]])
async def test_a_command_reported_as_failed_is_never_carried_out(
    own_nats: Any, tmp_path: Path, eventually: Any, stopped: list[str]
) -> None:
    data = tmp_path / "fleet"
    data.mkdir()
    async with two_controllers(own_nats.url, data, eventually) as processes:
        assert ":one:" in (await processes.status())["leader"]
        halted: list[subprocess.Popen[bytes]] = [processes.children[name] for name in stopped]
        for child in halted:
            child.send_signal(signal.SIGSTOP)
        assert await drained(processes, WITHIN_S) == ["not carried out"] * WORKERS
        for child in halted:
            child.send_signal(signal.SIGCONT)

        async def all_refused() -> bool:
            return len(await refused(processes)) == WORKERS

        await eventually(all_refused, 20)
        answers = await drained(processes, 20)  # the present leader carries out new commands
        assert answers == [f"w{n} will drain" for n in range(WORKERS)]
        asked = await processes.facts(DrainRequested)
        assert sorted(fact.worker for fact in asked) == sorted((await refused(processes)).values())
        assert not {fact.command for fact in asked} & set(await refused(processes))
        started = [fact.worker for fact in await processes.facts(DrainStarted)]
        assert len(started) == len(set(started)), "none was carried out twice"


@pytest.mark.slow
async def test_a_stopped_standby_blocks_no_command_and_does_nothing_later(
    own_nats: Any, tmp_path: Path, eventually: Any
) -> None:
    data = tmp_path / "fleet"
    data.mkdir()
    async with two_controllers(own_nats.url, data, eventually) as processes:
        processes.children["two"].send_signal(signal.SIGSTOP)
        assert await drained(processes, 20) == [f"w{n} will drain" for n in range(WORKERS)]
        processes.children["two"].send_signal(signal.SIGCONT)
        processes.children["one"].send_signal(signal.SIGKILL)

        async def taken_over() -> bool:
            return ":two:" in str((await processes.status())["leader"])

        await eventually(taken_over, 20)
        assert await drained(processes, 20) == [f"w{n} will drain" for n in range(WORKERS)]
        assert len(await processes.facts(DrainRequested)) == 2 * WORKERS
        assert not await refused(processes)
