"""`holdfast` commands as a user types them, each in a process of its own, but without half a second of imports each.

The processes are forked from one that has imported what commands need and has done nothing else.
"""

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

WITHIN_S = 60.0
IMPORTS = (
    "controller.cli",
    "controller.demo.cli",
    "controller.commands.operator_commands",
    "controller.commands.replay",
    "controller.processes.roles",
    "controller.processes.up",
    "controller.processes.up_flags",
    "controller.replay.cli",
    "events.journal.nats",
    "workers.cli",
    "workers.runtime",
)

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(list(IMPORTS))


def run_command(arguments: Sequence[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run one command to its end. Raise TimeoutExpired."""
    with tempfile.TemporaryDirectory() as folder:
        said = [Path(folder) / name for name in ("stdout", "stderr")]
        process = _forks.Process(target=_run, args=(list(arguments), dict(environment), said))
        process.start()
        try:
            process.join(WITHIN_S)
            if process.exitcode is None:
                raise subprocess.TimeoutExpired(["holdfast", *arguments], WITHIN_S)
            return subprocess.CompletedProcess(
                ["holdfast", *arguments], process.exitcode, *(path.read_text() for path in said)
            )
        finally:
            process.kill()
            process.join()
            process.close()


def _run(arguments: list[str], environment: dict[str, str], said: list[Path]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for descriptor, path in enumerate(said, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    from controller import cli

    sys.argv = ["holdfast", *arguments]
    sys.exit(cli.main(arguments))
