"""Logs of a fleet's processes stay within their limit; an unread pipe does not block the supervisor."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from controller.processes.children import trim
from controller.processes.console import print_line


def test_a_log_within_its_limit_is_unchanged(tmp_path: Path) -> None:
    log = tmp_path / "w0.log"
    log.write_bytes(b"x" * 100)
    trim(log, most=100)
    trim(tmp_path / "absent.log", most=100)
    assert log.read_bytes() == b"x" * 100
    assert list(tmp_path.iterdir()) == [log]


def test_a_log_above_its_limit_is_truncated_while_its_writer_continues(tmp_path: Path) -> None:
    log = tmp_path / "w0.log"
    with log.open("ab", buffering=0) as writer:
        writer.write(b"old\n" * 100)
        trim(log, most=100)
        writer.write(b"new\n")
    assert log.read_bytes() == b"new\n"
    assert (tmp_path / "w0.log.1").read_bytes() == b"old\n" * 100


def test_an_unread_pipe_does_not_block_the_writer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read, write = os.pipe()
    with os.fdopen(read, "r"), os.fdopen(write, "w") as stream:
        monkeypatch.setattr("sys.stdout", stream)

        def print_much() -> None:
            for _ in range(1000):
                print_line("x" * 1000)

        printing = threading.Thread(target=print_much, daemon=True)
        printing.start()
        printing.join(10)
        assert not printing.is_alive()


@pytest.mark.parametrize(
    "script",
    [
        "from events.process.logs import Stderr; Stderr().write('lost\\n')",
        "from controller.processes.console import warn; warn('lost')",
    ],
)
def test_output_that_could_not_be_written_does_not_change_the_exit_code(script: str) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        ended = subprocess.run(
            [sys.executable, "-c", script], stderr=write, timeout=30, check=False, env={"PYTHONPATH": "."}
        )
    finally:
        os.close(write)
    assert ended.returncode == 0
