"""The tests' own vLLM servers leave no process behind, whichever is killed.

A shell with a child simulates a server.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from vllm_servers import VllmServer, sweep

WITHIN_S = 30.0


@pytest.fixture
def made(tmp_path: Path) -> Path:
    (tmp_path / "bin").mkdir()
    server = tmp_path / "bin" / "python"
    server.write_text(
        f"#!/bin/sh\nsleep 1000 &\necho $! > {tmp_path}/child.new\nmv {tmp_path}/child.new {tmp_path}/child\nwait\n"
    )
    server.chmod(0o755)
    return tmp_path


def begun(made: Path) -> VllmServer:
    server = VllmServer(made, made / "tiny", made / "log", 1)
    server.begin()
    return server


def child_of(made: Path) -> psutil.Process:
    while not (made / "child").exists():
        pass
    return psutil.Process(int((made / "child").read_text()))


def ends(process: psutil.Process) -> bool:
    _, alive = psutil.wait_procs([process], timeout=WITHIN_S)
    return not alive or process.status() == psutil.STATUS_ZOMBIE


def test_killing_a_server_kills_its_children_even_if_it_died_first(made: Path) -> None:
    server = begun(made)
    assert server.process is not None
    child = child_of(made)
    server.process.kill()
    server.process.wait()
    assert child.is_running()
    server.kill()
    assert ends(child)


def test_processes_of_killed_tests_are_removed_by_the_next_run(made: Path) -> None:
    code = f"""
import os, signal, sys
from pathlib import Path
sys.path[:0] = {sys.path!r}
from vllm_servers import VllmServer
made = Path({str(made)!r})
VllmServer(made, made / "tiny", made / "log", 1).begin()
while not (made / "child").exists(): pass
os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", code], timeout=WITHIN_S, check=False)
    assert killed.returncode == -signal.SIGKILL
    child = child_of(made)
    assert child.is_running(), "it was not signalled"
    sweep()
    assert ends(child)


def test_processes_of_running_tests_are_kept(made: Path) -> None:
    server = begun(made)
    child = child_of(made)
    sweep()
    assert child.is_running() and child.status() != psutil.STATUS_ZOMBIE
    os.killpg(server.process.pid, signal.SIGKILL)  # type: ignore[union-attr]
    server.kill()
