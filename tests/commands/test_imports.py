"""Processes import only what they need: rarely used libraries would take a third of every start."""

import os
import subprocess
import sys

import pytest

from controller.cli import COMMANDS

SCRIPT = """
import contextlib, sys, threading
from pathlib import Path
from controller import cli

with contextlib.redirect_stdout(None), contextlib.suppress(SystemExit):
    cli.main(sys.argv[1:])
tasks = Path("/proc/self/task")
assert not tasks.exists() or len(list(tasks.iterdir())) == threading.active_count(), "a library has started threads"
print(*sys.modules)
"""
HEAVY = {
    *(
        "aiohttp",
        "asyncpg",
        "faststream",
        "nats",
        "numpy",
        "plotly",
        "rich",
        "sqlalchemy",
        "structlog",
        "uvloop",
    ),
    *(
        "controller.commands.status",
        "controller.processes.up",
        "events.journal.nats",
    ),
}
WITH_MODELS = {"up", "demo", "route", "frontend", "controller", "projector", "planner", "notifier"}
NOWHERE = ("--nats-url", "nowhere")  # a process of that role imports everything, then rejects the URL


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "needed", "left_out"),
    [
        (("status", "--data", "/nowhere"), "nats", ("aiohttp", "pydantic", "numpy")),
        (("up", "--upstream", "nowhere"), "nats", ("aiohttp", "numpy", "sqlalchemy")),
        (
            ("controller", *NOWHERE),
            "aiohttp",
            ("jinja2", "tokenizers", "numpy", "sqlalchemy", "controller.frontend.settings"),
        ),
        (("frontend", *NOWHERE), "aiohttp", ("sqlalchemy", "faststream", "controller.runtime.settings")),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else value,
)
def test_a_process_imports_only_what_it_needs(
    command: tuple[str, ...], needed: str, left_out: tuple[str, ...]
) -> None:
    code = [sys.executable, "-c", SCRIPT, *command]
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    ran = subprocess.run(code, capture_output=True, text=True, timeout=60, check=True, env=environment)
    loaded = set(ran.stdout.split())
    assert needed in loaded, ran.stderr
    assert not loaded & {*left_out, "rich", "pygments", "greenlet"}


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_help_imports_nothing_heavy(command: str) -> None:
    code = [sys.executable, "-X", "importtime", "-m", "controller.cli", command, "--help"]
    ran = subprocess.run(code, capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.startswith(f"usage: holdfast {command} ")
    loaded = {line.rpartition("|")[2].strip() for line in ran.stderr.splitlines()}
    assert "controller.config.variables" in loaded
    assert not loaded & (HEAVY if command in WITH_MODELS else HEAVY | {"pydantic"})
