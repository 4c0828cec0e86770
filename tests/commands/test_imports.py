"""Processes import only what they need: rarely used libraries would take a third of every start."""

import os
import subprocess
import sys

import pytest

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
NOWHERE = ("--nats-url", "nowhere")  # a process of that role imports everything, then rejects the URL


@pytest.mark.parametrize(
    ("command", "needed", "left_out"),
    [
        (("status", "--data", "/nowhere"), "nats", ("aiohttp", "pydantic", "numpy")),
        (("up", "--help"), "nats", ("aiohttp", "numpy", "sqlalchemy")),
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
