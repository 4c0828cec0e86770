"""`holdfast planner` with a real broker, database and scaling command, and with invalid settings."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from fleet_history import History, publish
from typed_commands import run_command

from controller.adapters.embedded.server import EmbeddedServer
from controller.adapters.postgres.store import PostgresStore
from controller.runtime.projection.projector import Projector
from events.journal.nats import NatsJournal
from events.observations import CapacityReported, ScaleApplied, ScaleProposed, ScaleSet

Eventually = Callable[..., Awaitable[None]]
SCRIPT = """
import json, os, sys
asked = json.load(sys.stdin)
asked["secrets"] = sorted(name for name in os.environ if "DATABASE" in name or "NATS" in name)
with open(sys.argv[1], "a") as file:
    file.write(json.dumps(asked) + "\\n")
print(asked["after"], "it is")
"""


def typed(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command(arguments, {k: v for k, v in os.environ.items() if not k.startswith("HOLDFAST_")})


@pytest.mark.slow
@pytest.mark.servers
async def test_a_separate_planner_reads_the_database_and_calls_the_command(
    own_nats: EmbeddedServer, database_url: str, tmp_path: Path, eventually: Eventually
) -> None:
    script, asked = tmp_path / "scale.py", tmp_path / "asked.jsonl"
    script.write_text(SCRIPT)
    history = History().start()
    history.say(ScaleSet(model="llama", workers=5, by="op", reason="a launch"))
    journal = await NatsJournal.connect(own_nats.url, "test:planner")
    last = await publish(own_nats.url, history.events)
    store = PostgresStore(database_url)
    projecting = asyncio.create_task(Projector(journal, store).run())
    command = [sys.executable, "-m", "controller.cli", "planner", "--data", str(tmp_path / "data")]
    command += ["--nats-url", own_nats.url, "--database-url", database_url, "--mode", "act"]
    command += ["--every-s", "0.2", "--hook-command", f"{sys.executable} {script} {asked}"]
    pipe = asyncio.subprocess.PIPE
    planner = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=asyncio.subprocess.STDOUT)
    found: list[Any] = []

    async def applied() -> bool:
        end = await journal.last_seq()
        found[:] = (
            [event async for batch in journal.read(last, until=end) for event in batch] if end > last else []
        )
        return any(isinstance(event.fact, ScaleApplied) for event in found)

    try:
        await eventually(applied, 60)
        shown = await asyncio.to_thread(typed, "plan", "--data", str(tmp_path / "data"))
    finally:
        planner.send_signal(signal.SIGTERM)
        async with asyncio.timeout(30):
            said = (await planner.communicate())[0].decode()
        projecting.cancel()
        await asyncio.wait({projecting})
        await journal.close()
        await store.close()
    assert planner.returncode == 0, said
    (proposed,) = [event for event in found if isinstance(event.fact, ScaleProposed)]
    (result,) = [event for event in found if isinstance(event.fact, ScaleApplied)]
    assert (proposed.fact.before, proposed.fact.after, proposed.fact.by) == (3, 5, "command")
    assert (result.fact.ok, result.fact.says, result.causation) == (True, "5 it is", proposed.id)
    assert any(isinstance(event.fact, CapacityReported) for event in found)
    (told,) = map(json.loads, asked.read_text().splitlines())
    assert told == {
        "model": "llama", "before": 3, "after": 5, "why": "operator", "proposal": proposed.id, "planner": "planner",
        "secrets": [],
    }  # fmt: skip
    assert shown.returncode == 0 and "an operator has set 5" in shown.stdout, shown.stderr


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "the planner needs --database-url or HOLDFAST_DATABASE_URL"),
        (["--database-url", "postgresql://h/x"], "the planner needs --nats-url or HOLDFAST_NATS_URL"),
        (["--mode", "sometimes"], "'observe', 'propose' or 'act'"),
        (["--hook-command", "a", "--hook-url", "http://h/scale"], "one of them can scale a model"),
    ],
)
def test_an_invalid_setting_gives_one_sentence(flags: list[str], says: str, tmp_path: Path) -> None:
    done = typed("planner", "--data", str(tmp_path), *flags)
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("hook", "says"),
    [
        (["--hook-command", "'half"], 'hook_command "\'half" cannot be split'),
        (["--hook-url", "nonsense"], "'nonsense' is not the URL of a scale subresource"),
    ],
)
def test_an_invalid_hook_is_rejected_at_once(hook: list[str], says: str, tmp_path: Path) -> None:
    servers = ["--nats-url", "nats://127.0.0.1:1", "--database-url", "postgresql://127.0.0.1:1/x"]
    done = typed("planner", "--data", str(tmp_path), *servers, "--mode", "act", *hook)
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("flag", [["--fleet", "5"], ["--slo-ttft-ms", "9"], ["--step-max", "2"]])
def test_flags_for_a_recorded_day_are_rejected_without_one(flag: list[str], tmp_path: Path) -> None:
    done = typed("plan", "--data", str(tmp_path), *flag)
    assert done.returncode == 2 and f"{flag[0]}: needs a recorded day, given by --trace FILE" in done.stderr


@pytest.mark.parametrize("workers", ["0", "many", "10001"])
def test_a_model_is_set_to_at_least_one_worker(workers: str, tmp_path: Path) -> None:
    done = typed("scale", "llama", workers, "--data", str(tmp_path))
    assert done.returncode == 2 and f"'{workers}' is not a number of workers from 1 to 10000" in done.stderr


def test_without_a_planner_the_command_explains_how_to_start_one(tmp_path: Path) -> None:
    done = typed("plan", "--data", str(tmp_path))
    assert done.returncode == 1 and "start one with `holdfast planner`" in done.stderr
