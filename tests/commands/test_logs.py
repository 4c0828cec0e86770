"""Logs of a fleet's processes stay within their bound, and nobody who does not read holds the supervisor up."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from controller.processes.console import say
from controller.processes.logs import trim


def test_a_log_within_its_bound_is_left_alone(tmp_path: Path) -> None:
    log = tmp_path / "w0.log"
    log.write_bytes(b"x" * 100)
    trim(log, most=100)
    trim(tmp_path / "absent.log", most=100)
    assert log.read_bytes() == b"x" * 100
    assert list(tmp_path.iterdir()) == [log]


def test_a_log_that_has_grown_too_large_begins_anew_under_its_writer(tmp_path: Path) -> None:
    log = tmp_path / "w0.log"
    with log.open("ab", buffering=0) as writer:
        writer.write(b"old\n" * 100)
        trim(log, most=100)
        writer.write(b"new\n")
    assert log.read_bytes() == b"new\n"
    assert (tmp_path / "w0.log.1").read_bytes() == b"old\n" * 100


def test_a_pipe_that_nobody_reads_does_not_hold_up_who_says_something(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read, write = os.pipe()
    with os.fdopen(read, "r"), os.fdopen(write, "w") as stream:
        monkeypatch.setattr("sys.stdout", stream)

        def say_much() -> None:
            for _ in range(1000):
                say("x" * 1000)

        saying = threading.Thread(target=say_much, daemon=True)
        saying.start()
        saying.join(10)
        assert not saying.is_alive()


@pytest.mark.parametrize(
    "said",
    [
        "from events.process.stderr import Stderr; Stderr().write('lost\\n')",
        "from controller.processes.console import warn; warn('lost')",
    ],
)
def test_what_could_not_be_said_is_not_the_exit_code(said: str) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        ended = subprocess.run(
            [sys.executable, "-c", said], stderr=write, timeout=30, check=False, env={"PYTHONPATH": "."}
        )
    finally:
        os.close(write)
    assert ended.returncode == 0
