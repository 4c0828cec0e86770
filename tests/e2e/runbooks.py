"""The commands in the runbooks, and their output on the fleet of `rehearsal`.

python tests/e2e/runbooks.py     # breaks a fleet for half a minute, and writes the commands' output into docs/operations/runbooks
"""

import asyncio
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = {page.stem: page for page in sorted((ROOT / "docs" / "operations" / "runbooks").glob("*.md"))}
BLOCK = re.compile(r"```console\n\$ (.+)\n((?:.*\n)*?)```")
WRITTEN = re.compile(r"`(holdfast [^`]+)`")  # in a sentence
LINES_MAX, COLUMNS = 12, 120
MODEL = "sim"
AT_ONCE = 4
NOT_RUN = {
    "holdfast controller",
    "holdfast journal quarantine",
    "holdfast golden approve --worker w0",
    "holdfast golden approve --worker w1",
    "holdfast webhooks resend URL",
    "holdfast webhooks test URL",
}  # it does not end; it needs an event that no reader knows; they need a worker with deviating answers, and a receiver


def shown(text: str) -> list[str]:
    """Return the commands of a page that are shown with their output."""
    return [found[1] for found in BLOCK.finditer(text)]


def named(text: str) -> list[str]:
    """Return the commands that a page's sentences name."""
    return [found[1] for found in WRITTEN.finditer(BLOCK.sub("", text))]


def all_shown() -> list[str]:
    """Return each command that some page shows with its output."""
    return sorted({command for page in PAGES.values() for command in shown(page.read_text())})


def all_named() -> list[str]:
    """Return each command in some page's sentences that ends by itself. Restarts come last: afterwards the drained worker is
    gone."""
    all = {command for page in PAGES.values() for command in named(page.read_text())} - NOT_RUN
    return sorted(all, key=lambda command: ("restart" in command, command))


def words(command: str, incident: str) -> list[str]:
    """Return a command's arguments after `holdfast`, with an incident's name in its place."""
    program, *rest = shlex.split(command)
    assert program == "holdfast", command
    return [{"INCIDENT": incident, "MODEL": MODEL, "N": "3"}.get(word, word) for word in rest]


async def printed(data: Path, commands: Iterable[str], incident: str) -> Mapping[str, tuple[int, str, str]]:
    """Run commands beside the fleet of a data directory. Return exit code, output and errors by command."""
    from fleet import holdfast

    turn = asyncio.Semaphore(AT_ONCE)

    async def one(command: str) -> tuple[int, str, str]:
        async with turn:
            environment = {"HOLDFAST_DATA": str(data)}
            ended: subprocess.CompletedProcess[str] = await asyncio.to_thread(
                lambda: holdfast(*words(command, incident), environment=environment)
            )
            return ended.returncode, ended.stdout, ended.stderr

    asked = [*commands]
    return dict(zip(asked, await asyncio.gather(*(one(command) for command in asked)), strict=True))


def cut(output: str, data: Path) -> str:
    """Return the first lines of an output, as far as a page shows them."""
    lines = [line[:COLUMNS].rstrip() for line in output.replace(str(data), "/var/lib/holdfast").splitlines()]
    more = [f"… {len(lines) - LINES_MAX} lines more"] if len(lines) > LINES_MAX + 1 else lines[LINES_MAX:]
    return "\n".join([*lines[:LINES_MAX], *more]) + "\n"


async def write() -> None:
    """Write all pages."""
    sys.path[:0] = [str(ROOT / folder) for folder in (".", "tests", "tests/fixtures", "tests/e2e")]
    from rehearsal import FLAGS, broken, users

    from benchmarks.local_fleet import LocalFleet

    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "fleet"
        fleet = LocalFleet.start(data, *FLAGS)
        try:
            await (await fleet.ready()).healthy(3)
            async with users(fleet):
                await broken(fleet)
                outputs = await printed(data, all_shown(), await first_incident(data))
        finally:
            fleet.end()
    for command, (code, said, errors) in outputs.items():
        if code or not said.strip():
            raise SystemExit(f"{command}: exit {code}, {said!r}, {errors!r}")
    for page in PAGES.values():
        text = BLOCK.sub(
            lambda found: f"```console\n$ {found[1]}\n{cut(outputs[found[1]][1], data)}```", page.read_text()
        )
        page.write_text(text)


async def first_incident(data: Path) -> str:
    """Return the incident that was opened first."""
    from controller.processes.operator_client import read_all
    from events.decisions import IncidentOpened

    (found, *_) = [one.fact for one in await read_all(data, 0) if isinstance(one.fact, IncidentOpened)]
    return str(found.incident)


if __name__ == "__main__":
    asyncio.run(write())
