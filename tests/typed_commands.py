"""Runs `holdfast` commands as a user types them, each in its own process, with imports preloaded.

The processes are forked from one that has imported the commands' modules and has done nothing else. That saves half a second
of imports per command.
"""

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

WITHIN_S = 60.0
LOST = 255  # multiprocessing's exit code if its fork server could not report a process's status
IMPORTS = (
    "controller.cli",
    "controller.demo.cli",
    "controller.commands.operator_commands",
    "controller.commands.replay",
    "controller.processes.roles",
    "controller.processes.up",
    "controller.processes.up_checks",
    "controller.replay.cli",
    "controller.replay.flags",
    "events.journal.nats",
    "workers.cli",
    "workers.runtime",
)

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(list(IMPORTS))


def run_command(arguments: Sequence[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run one command to its end. Raise TimeoutExpired."""
    with tempfile.TemporaryDirectory() as folder:
        *said, ended = (Path(folder) / name for name in ("stdout", "stderr", "exit code"))
        process = _forks.Process(target=_run, args=(list(arguments), dict(environment), said, ended))
        process.start()
        try:
            process.join(WITHIN_S)
            if process.exitcode is None:
                raise subprocess.TimeoutExpired(["holdfast", *arguments], WITHIN_S)
            code = process.exitcode
            if code == LOST and ended.exists():
                code = int(ended.read_text())
            return subprocess.CompletedProcess(
                ["holdfast", *arguments], code, *(path.read_text() for path in said)
            )
        finally:
            process.kill()
            process.join()
            process.close()


def _run(arguments: list[str], environment: dict[str, str], said: list[Path], ended: Path) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for descriptor, path in enumerate(said, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    from controller import cli

    sys.argv = ["holdfast", *arguments]
    code: object = 1
    try:
        code = cli.main(arguments)
    except SystemExit as error:
        code = error.code
        raise
    finally:
        ended.write_text(str(code if isinstance(code, int) else int(code is not None)))
    sys.exit(code)
