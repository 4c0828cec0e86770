"""What operators see of a broken fleet: on a terminal, and afterwards in a post-mortem."""

import asyncio
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fleet import holdfast, running
from rehearsal import FLAGS, lasts, users
from waits import until

from controller.replay import travel
from events.journal.nats import NatsJournal
from events.observations import RequestExposed

TMUX = shutil.which("tmux")
COLUMNS, LINES = 80, 24
BROKEN_S, WITHIN_S = 3.0, 30.0


class Terminal:
    """A terminal of 80 columns and 24 lines that runs a command."""

    def __init__(self, place: Path, *command: str) -> None:
        self._tmux = [str(TMUX), "-S", str(place), "-f", "/dev/null"]
        self._run("new-session", "-d", "-x", str(COLUMNS), "-y", str(LINES), *command)

    def _run(self, *words: str) -> str:
        return subprocess.run(
            [*self._tmux, *words], check=True, capture_output=True, text=True, timeout=10
        ).stdout

    def lines(self) -> list[str]:
        return self._run("capture-pane", "-p").splitlines()

    def press(self, key: str) -> None:
        self._run("send-keys", key)

    async def until(self, text: str) -> list[str]:
        """Wait until a line has this text, and return all lines."""

        def shown() -> list[str] | None:
            found = self.lines()
            assert len(found) <= LINES and max(map(len, found), default=0) <= COLUMNS
            return found if any(text in line for line in found) else None

        return await until(shown, WITHIN_S, text, every_s=0.2)

    async def end(self) -> None:
        """Wait until the command has ended."""
        await until(lambda: self.ended, WITHIN_S)

    @property
    def ended(self) -> bool:
        found = subprocess.run([*self._tmux, "list-sessions"], capture_output=True, text=True, timeout=10)
        return found.returncode != 0


@pytest.mark.attack
@pytest.mark.skipif(TMUX is None, reason="no tmux is there")
async def test_top_shows_failing_workers_on_a_small_terminal_and_ends_at_a_key(tmp_path: Path) -> None:
    async with running(tmp_path / "fleet", *FLAGS) as fleet:
        await fleet.healthy(3)
        top = Terminal(
            tmp_path / "tmux", sys.executable, "-m", "controller.cli", "top", "--data", str(fleet.data)
        )

        async with users(fleet):
            await top.until("tokens/s")
            await fleet.act("corrupt", "w0", 2.0)
            found = await top.until("w0     UNHEALTHY")
            assert next(line for line in found if line.startswith(("w0", "w1", "s0"))).startswith("w0")
            await top.until("the breaker of w0 opened")
            top.press("q")
            await top.end()


@pytest.mark.attack
async def test_the_post_mortem_of_a_real_incident_matches_the_journal(tmp_path: Path) -> None:
    async with running(tmp_path / "fleet", *FLAGS) as fleet:
        await fleet.healthy(3)
        async with users(fleet):
            await lasts(BROKEN_S)
            await fleet.act("corrupt", "w0", 2.0)
            await lasts(BROKEN_S)
        where = tmp_path / "report.json"
        done = await asyncio.to_thread(
            holdfast, "replay", "report", "--data", str(fleet.data), "-o", str(where)
        )
        assert done.returncode == 0 and not done.stderr and "token_mismatch" in done.stdout
        report = json.loads(where.read_text())
        assert report["incident"]["subject"] == "worker:w0"
        assert next(one["seconds"] for one in report["phases"] if one["phase"] == "noticed") < BROKEN_S
        exposed = {one["request"] for one in report["requests"] if one["exposed"]}
        told = {one.fact.request for one in await fleet.events() if isinstance(one.fact, RequestExposed)}
        assert exposed == told and exposed
        journal = await NatsJournal.connect(fleet.nats_url("operator"), "reader", None, make=False)
        try:
            state: dict[str, object] = {}
            for frame in report["frames"]:
                for worker, shown in frame["workers"].items():
                    state[worker] = shown and shown["health"]
                moment = travel.describe(await travel.at(journal, None, frame["seq"]))
                assert {row["worker"]: row["health"] for row in moment["workers"]} == {
                    worker: health for worker, health in state.items() if health is not None
                }
        finally:
            await journal.close()
