"""A command as a scale hook: its input, its output, and its end."""

import json
import os
import signal
from pathlib import Path

import pytest
from scale_world import WANTED, command
from waits import until

from controller.adapters.scaling.command_hook import OUTPUT_KEPT, CommandScaleHook, without_secrets
from controller.ports import HookResult
from events.errors import BadSetting


async def test_the_request_is_one_json_object_on_stdin(tmp_path: Path) -> None:
    file = tmp_path / "asked"
    result = await command(f"import sys; open({str(file)!r}, 'w').write(sys.stdin.read())").scale(WANTED)
    assert result == HookResult(True, "exit status 0")
    assert file.read_text().count("\n") == 1
    assert json.loads(file.read_text()) == {
        "model": "sim", "before": 2, "after": 4, "why": "up", "proposal": "p-1", "planner": "planner-0",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("program", "ok", "says"),
    [
        ("print('starting'); print('  two   more  '); print()", True, "two more"),
        ("import sys; print('why not', file=sys.stderr)", True, "exit status 0"),
        ("import sys; print('done?'); sys.exit('no room')", False, "no room"),
        ("import sys; print('done?'); sys.exit(4)", False, "exit status 4"),
        ("import os; os.kill(os.getpid(), 9)", False, "exit status -9"),
        ("import os; os.close(0); print('heard nothing')", True, "heard nothing"),
        ("import os; os.write(1, b'\\xff\\xfe caf\\xc3\\xa9')", True, "\ufffd\ufffd café"),
    ],
)
async def test_the_last_line_and_the_status_count(program: str, ok: bool, says: str) -> None:
    assert await command(program).scale(WANTED) == HookResult(ok, says)


async def test_only_the_end_of_a_long_output_is_kept() -> None:
    program = (
        f"import sys; sys.stdout.write('y' * {OUTPUT_KEPT * 20} + '\\n'); print('last'); sys.stdout.flush()"
    )
    assert await command(program).scale(WANTED) == HookResult(True, "last")


async def test_a_command_is_killed_at_its_deadline_with_all_that_it_has_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    program = (
        "import os, signal, subprocess, sys, time\n"
        "signal.signal(15, signal.SIG_IGN)\n"
        "other = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{other.pid}}')\n"
        "time.sleep(60)"
    )
    result = await command(program, 3.0).scale(WANTED)
    assert result == HookResult(False, "it did not end within 3 s")
    started = [int(pid) for pid in pids.read_text().split()]
    await until(lambda: not any(map(lives, started)))


async def test_a_command_has_ended_even_if_another_process_holds_its_output(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    program = (
        "import subprocess, sys\n"
        "other = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)\n"
        f"open({str(pid)!r}, 'w').write(str(other.pid)); print('it goes on')"
    )
    try:
        assert await command(program, 20.0).scale(WANTED) == HookResult(True, "it goes on")
        assert lives(int(pid.read_text()))
    finally:
        os.kill(int(pid.read_text()), signal.SIGKILL)


async def test_no_file_descriptor_is_left_open() -> None:
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        await command("print(1)").scale(WANTED)
        await CommandScaleHook(["/nowhere"]).scale(WANTED)
    assert len(os.listdir("/proc/self/fd")) <= len(before) + 2  # the loop's own, opened for the first process


async def test_a_command_that_cannot_be_started_is_reported(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no program")
    for name, why in (
        ("/nowhere", "No such file or directory"),
        (str(tmp_path / "text"), "Permission denied"),
    ):
        result = await CommandScaleHook([name]).scale(WANTED)
        assert result == HookResult(False, f"{name} cannot be started: {why}")


async def test_a_command_gets_no_secrets_of_the_fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "HOLDFAST_DATABASE_URL",
        "HOLDFAST_NATS_URL",
        "HOLDFAST_FLEET_KEY_FILE",
        "HOLDFAST_DATA",
        "KUBECONFIG",
    ):
        monkeypatch.setenv(name, "x")
    names = "*(n for n in os.environ if n.startswith('HOLDFAST') or n == 'KUBECONFIG')"
    result = await command(f"import os; print({names})").scale(WANTED)
    assert set(result.says.split()) == {"HOLDFAST_DATA", "KUBECONFIG"}
    assert without_secrets(
        {"HOLDFAST_PLANNER__HTTP__TOKEN_FILE": "x", "HOLDFAST_X_PASSWORD": "x", "TOKEN": "mine"}
    ) == {"TOKEN": "mine"}


@pytest.mark.parametrize(("argv", "timeout_s"), [([], 1.0), ([""], 1.0), (["a\0b"], 1.0), (["true"], 0.0)])
def test_an_invalid_command_is_refused(argv: list[str], timeout_s: float) -> None:
    with pytest.raises(BadSetting):
        CommandScaleHook(argv, timeout_s)


def lives(pid: int) -> bool:
    """Return whether a process runs: a zombie does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
