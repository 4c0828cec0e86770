"""Bad input produces one clear sentence and the right exit code; never a traceback, never a hang."""

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import first_database
import pytest
from typed_commands import run_command

from controller import cli
from controller.adapters.embedded.free_port import free_port
from controller.commands import operator_commands
from controller.commands.status import print_status
from controller.processes import up_flags
from controller.processes.children import shell_status
from controller.processes.fleet_dir import FleetDir, NoFleet
from controller.processes.operator_client import Unreachable, find
from controller.processes.up import FleetSupervisor
from controller.processes.worker_exits import exit_fact
from workers.exits import FAILED


def holdfast(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("HOLDFAST_")} | environment
    return run_command(arguments, env)


def test_without_arguments_the_commands_are_listed() -> None:
    command = [sys.executable, "-m", "controller.cli"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "usage: holdfast" in done.stderr
    assert "replay" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["upp"], "invalid choice: 'upp'"),
        (["up", "--workers", "0"], "'0' is not a number from 1"),
        (["up", "--workers", "many"], "'many' is not a number from 1"),
        (["up", "--port", "99999"], "'99999' is not a port"),
        (["up", "--itl-ms", "-1"], "'-1' is not a number of at least 0"),
        (["up", "--canary-interval", "0"], "'0' is not a number above 0"),
        (["up", "--bogus"], "unrecognized arguments: --bogus"),
        (["up", "--cors-origins", "app.example.com"], "'app.example.com' is not an origin, such as https://"),
        (
            ["up", "--admission-control", "deadline", "--ttft-deadlines", "best=5"],
            "unknown tier 'best'; the tiers are premium, standard, best_effort",
        ),
        (["up", "--tier-default", "gold"], "--tier-default gold: tier_default is 'gold'"),
        (["up", "--tls-key", "key.pem"], "--tls-cert and --tls-key"),
        (["up", "--park"], "--park (park) needs --admission-control deadline"),
        (
            ["up", "--ttft-deadlines", "premium=500"],
            "--ttft-deadlines (ttft_deadlines) needs --admission-control deadline",
        ),
        (
            ["up", "--first-token-timeout", "0"],
            "first_token_s = '0': input should be greater than 0 (--first-token-timeout)",
        ),
        (["chaos", "explode", "w0"], "invalid choice: 'explode'"),
        (["move"], "the following arguments are required: WORKER"),
        (["drain"], "the following arguments are required: WORKER"),
        (["demo", "--seconds", "nan"], "'nan' is not a number above 0"),
        (["demo", "--seconds", "5"], "--seconds 10 or more"),
        (["demo", "--speedup", "0"], "'0' is not a number above 0"),
        (["restart"], "give either a WORKER, or --rolling"),
        (["restart", "w0", "--rolling"], "give either a WORKER, or --rolling"),
        (["chaos", "kill", "w0", "3"], "kill accepts no number"),
        (
            ["chaos", "kill", "w0", "--rank", "1"],
            "kill affects the whole worker; error, corrupt, drift, slow, xid, nvlink accept",
        ),
        (["chaos", "kill", "w0", "--for", "3"], "--for does not apply to kill"),
        (["events", "--kind", "nonsense"], "unknown kind 'nonsense'"),
    ],
)
def test_invalid_arguments_are_named(arguments: list[str], says: str, tmp_path: Path) -> None:
    done = holdfast(*arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def refused(done: subprocess.CompletedProcess[str], says: str, code: int = 1) -> None:
    assert done.returncode == code, done.stderr
    assert says in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused(
            holdfast("up", "--data", str(tmp_path), "--port", str(port)), f"127.0.0.1:{port} cannot be used"
        )


def test_an_address_of_another_host_is_named(tmp_path: Path) -> None:
    done = holdfast("up", "--data", str(tmp_path), "--host", "203.0.113.1", "--insecure", "--port", "18999")
    refused(done, "203.0.113.1:18999 cannot be used: ")
    assert "in use" not in done.stderr


@pytest.mark.slow
def test_a_data_directory_of_a_newer_version_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "version").write_text("99\n")
    refused(holdfast("up", "--data", str(tmp_path), "--port", str(free_port())), "newer version")


def test_a_data_directory_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    data = str(tmp_path / "file" / "x")
    refused(holdfast("up", "--data", data, "--port", str(free_port())), f"{data} cannot be used")


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ["status"],
        ["events"],
        ["drain", "w0"],
        ["move", "w0"],
        ["chaos", "kill", "w0"],
        ["replay", "timeline"],
    ],
)
def test_every_command_reports_a_missing_fleet(command: list[str], tmp_path: Path) -> None:
    refused(holdfast(*command, "--data", str(tmp_path)), "No fleet runs on this data directory")


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [["status"], ["events"], ["events", "--follow"], ["drain", "w0"], ["replay", "timeline"]]
)
def test_an_unreachable_broker_is_named_without_its_password(command: list[str], tmp_path: Path) -> None:
    done = holdfast(*command, "--data", str(tmp_path), HOLDFAST_NATS_URL="nats://u:secret@127.0.0.1:1")
    refused(done, "127.0.0.1:1")
    assert "secret" not in done.stderr


def test_a_file_that_is_not_a_trace_is_named(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    for content in (b"\xff\x00", b"[]", b'{"timestamp": NaN, "input_length": 1, "output_length": 1}'):
        trace.write_bytes(content)
        refused(holdfast("demo", "--trace", str(trace)), f"{trace}, line 1: ")


@pytest.mark.slow
@pytest.mark.parametrize("role", ["controller", "frontend", "worker"])
def test_a_role_names_a_data_directory_that_it_cannot_use(role: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = holdfast(role, "--data", str(tmp_path / "file"), HOLDFAST_NATS_URL="nats://127.0.0.1:1")
    assert done.returncode == 1
    assert "Choose another data directory with --data." in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unknown_flag_points_to_the_help_of_its_own_command(capsys: pytest.CaptureFixture[str]) -> None:
    for command_words, rest in (
        ("", ["up"]),
        ("up", []),
        ("replay", ["why", "5"]),
        ("replay why", ["5"]),
        ("trace replay", ["FILE", "--url", "http://localhost"]),
        ("model tiny", ["DIR"]),
    ):
        with pytest.raises(SystemExit) as ended:
            cli.main([*command_words.split(), "--nonsense", *rest])
        command = " ".join(["holdfast", *command_words.split()])
        said = f"{command}: unrecognized arguments: --nonsense. See `{command} --help`.\n"
        assert (ended.value.code, capsys.readouterr().err) == (2, said)


def test_a_closed_pipe_is_not_a_failure() -> None:
    env = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}  # as a user has it
    for command in ("settings", "--help"):
        read, write = os.pipe()
        os.close(read)
        done = subprocess.run(
            [sys.executable, "-m", "controller.cli", command],
            stdout=write, stderr=subprocess.PIPE, env=env, timeout=60, check=False,
        )  # fmt: skip
        os.close(write)
        assert (done.returncode, done.stderr) == (0, b"")


def test_output_that_cannot_be_written_is_reported_in_one_line() -> None:
    env = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    for command in ("settings", "--help"):
        with open("/dev/full", "wb") as full:
            done = subprocess.run(
                [sys.executable, "-m", "controller.cli", command],
                stdout=full, stderr=subprocess.PIPE, env=env, timeout=60, check=False,
            )  # fmt: skip
        assert done.returncode == 1
        assert done.stderr == b"holdfast: [Errno 28] No space left on device\n"


def test_the_status_of_a_large_fleet_lists_unhealthy_workers_and_counts_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    well = {
        "health": "HEALTHY",
        "weight": 1.0,
        "breaker": "closed",
        "in_flight": 2,
        "model": "sim",
        "reasons": [],
    }
    workers: list[dict[str, Any]] = [{"id": f"w{n}", **well} for n in range(1000)]
    workers[7] |= {"health": "UNHEALTHY", "weight": 0.0, "reasons": ["health UNHEALTHY: silent"]}
    status: dict[str, Any] = {"workers": workers, "processes": [], "levels": {}, "leader": None}
    print_status({**status, "journal": {"last_seq": 1}, "projector": {"position": None, "lag": None}})
    shown = capsys.readouterr().out
    assert "w7 is not at full weight: health UNHEALTHY: silent\n" in shown
    text = " ".join(shown.split())
    assert "999 more workers of sim are HEALTHY, at full weight, 1998 in flight; -o json lists" in text
    assert len(shown.splitlines()) < 15


def test_the_status_lists_missing_workers_with_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    unreachable = {"model": None, "reason": "cannot connect to http://u", "since": "T"}
    waiting = [{**unreachable, "id": f"w{n}"} for n in range(50)]
    waiting[1]["model"] = "m"
    status: dict[str, Any] = {
        "workers": [],
        "awaited": waiting,
        "processes": [],
        "levels": {},
        "leader": None,
    }
    print_status({**status, "journal": {"last_seq": 1}, "projector": {"position": 0, "lag": 1}})
    shown = capsys.readouterr().out
    assert "waiting for w0 since T: cannot connect to http://u\n" in shown
    assert "waiting for w1 with m since T: cannot connect to http://u\n" in shown
    assert "waiting for 10 more workers; -o json lists all\n" in shown


def test_a_killed_fleet_is_not_running_although_its_address_file_remains(tmp_path: Path) -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    FleetDir(tmp_path).remember(nats_url="nats://127.0.0.1:1", pid=child.pid)
    with pytest.raises(NoFleet, match="No fleet runs on this data directory"):
        find(tmp_path)


async def test_following_reports_an_unreachable_broker_until_the_fleet_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HOLDFAST_NATS_URL", raising=False)
    FleetDir(tmp_path).remember(nats_url="nats://a:1")
    answers = [True, False, False, True, False]

    def connected() -> bool:
        if len(answers) == 1:
            (tmp_path / "fleet.json").unlink(missing_ok=True)
        return answers.pop(0)

    with pytest.raises(NoFleet):
        await operator_commands.until_lost(connected, tmp_path, "nats://a:1", look_s=0.001)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition("broker ")[2] for line in lines] == [
        "cannot be reached",
        "is connected again",
        "cannot be reached",
    ]
    FleetDir(tmp_path).remember(nats_url="nats://b:2")
    with pytest.raises(Unreachable, match="restarted with another broker"):
        await operator_commands.until_lost(lambda: False, tmp_path, "nats://a:1", look_s=0.001)


def test_the_address_file_of_a_fleet_is_private_to_its_owner(tmp_path: Path) -> None:
    FleetDir(tmp_path).remember(nats_url="nats://u:secret@h", database_url="postgresql://u:secret@h/x")
    assert (tmp_path / "fleet.json").stat().st_mode & 0o077 == 0


def test_up_names_a_broker_that_cannot_be_reached_instead_of_waiting_for_it(tmp_path: Path) -> None:
    began = time.monotonic()
    flags = ("--data", str(tmp_path), "--port", str(free_port()))
    refused(holdfast("up", *flags, HOLDFAST_NATS_URL="nats://127.0.0.1:1"), "127.0.0.1:1")
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("url", ["nats://localhost:abc", "nats://", "http://localhost:4222", "localhost"])
@pytest.mark.parametrize("command", ["status", "events", "up", "worker"])
def test_an_invalid_broker_url_is_named(command: str, url: str, tmp_path: Path) -> None:
    port = ["--port", str(free_port())] if command == "up" else []
    done = holdfast(command, *port, "--data", str(tmp_path), HOLDFAST_NATS_URL=url)
    refused(done, f"{url!r} is not a broker's URL")


def test_an_empty_url_in_the_environment_counts_as_unset(tmp_path: Path) -> None:
    done = holdfast("status", "--data", str(tmp_path), HOLDFAST_NATS_URL="", HOLDFAST_DATABASE_URL="")
    refused(done, "No fleet runs on this data directory")
    FleetDir(tmp_path).remember(nats_url="nats://127.0.0.1:1", database_url="postgresql://x@127.0.0.1:1/x")
    done = holdfast("status", "--data", str(tmp_path), HOLDFAST_NATS_URL="", HOLDFAST_DATABASE_URL="")
    refused(done, "nats://127.0.0.1:1")


@pytest.mark.slow
@pytest.mark.parametrize("url", ["mysql://u:secret@h/x", "postgresql://u:secret@localhost:abc/x"])
def test_an_invalid_database_url_is_named_without_its_password(url: str, tmp_path: Path) -> None:
    done = holdfast("up", "--data", str(tmp_path), "--port", str(free_port()), HOLDFAST_DATABASE_URL=url)
    refused(done, "A database URL has the form postgresql://")
    assert "secret" not in done.stderr


UPSTREAM = ("--upstream", "http://127.0.0.1:1")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--engine", "transformers"], "needs --model DIR"),
        (["--engine", "openai"], "needs --upstreams FILE, or --upstream URL"),
        (["--model", "/nonexistent"], "does not exist"),
        (["--model", "."], "--model requires --engine transformers"),
        (["--upstream", "http://127.0.0.1:1"], "--upstream requires --engine openai"),
        (["--engine", "openai", "--upstream", "http://127.0.0.1:1"], "tokenizer.json"),
        (
            ["--engine", "openai", "--model", ".", "--upstream", "127.0.0.1"],
            "'127.0.0.1' is not a server's URL",
        ),
        (
            ["--engine", "openai", "--model", ".", *UPSTREAM, *UPSTREAM, "--upstream-kv-events", "tcp://h:1"],
            "--upstream-kv-events is given 1 times, --upstream 2 times",
        ),
        (["--engine", "openai", "--upstreams", "/nonexistent"], "--upstreams: /nonexistent cannot be read"),
        (
            ["--upstreams", "/dev/null"],
            "--upstreams: /dev/null:1: expected a mapping with the keys upstreams",
        ),
        (["--upstream-key-file", "k"], "--upstream-key-file requires --engine openai"),
        (
            ["--engine", "openai", "--model", ".", *UPSTREAM, "--upstream-key-file", "/nonexistent"],
            "--upstream-key-file /nonexistent cannot be read: No such file or directory",
        ),
        (
            ["--engine", "openai", "--model", ".", *UPSTREAM, *("--upstream-key-file", "k") * 2],
            "--upstream-key-file is given 2 times, --upstream 1 times: give it once for all, or once for each",
        ),
    ],
)
def test_flags_that_require_others_are_reported(flags: list[str], says: str, tmp_path: Path) -> None:
    refused(holdfast("up", "--data", str(tmp_path), *flags), says, code=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("HOLDFAST_WORKER_PORT", "99999", "w0 does not start: port = '99999': expected `int` <= 65535"),
        ("HOLDFAST_WORKER_SPEED", "9", "w0 does not start: HOLDFAST_WORKER_SPEED is not a setting"),
        ("HOLDFAST_CONTROLLER__CANARY__INTERVAL_S", "-1", "controller does not start: controller.canary"),
    ],
)
def test_an_impossible_setting_ends_the_fleet_at_once(
    variable: str, value: str, says: str, tmp_path: Path, databases: None
) -> None:
    first_database.lay_in_fleet(tmp_path)
    flags = ("--data", str(tmp_path), "--workers", "1", "--port", str(free_port()))
    refused(holdfast("up", *flags, **{variable: value}), says, code=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [["status"], ["events"], ["resume", "w0"], ["replay", "verify"], ["up"], ["worker"]]
)
def test_every_command_rejects_a_misspelt_setting(command: list[str], tmp_path: Path) -> None:
    done = holdfast(*command, "--data", str(tmp_path), HOLDFAST_CONTROLER__CHAOS="1")
    refused(done, "HOLDFAST_CONTROLER__CHAOS is not a setting", code=2)


@pytest.mark.parametrize(("status", "mode"), [(-9, "immediate"), (70, "self_initiated")])
def test_the_supervisor_records_the_exit_of_a_worker_that_could_not(status: int, mode: str) -> None:
    fact = exit_fact("w0", "life-1", status)
    assert fact is not None
    assert (fact.worker, fact.instance, fact.mode, fact.exit) == ("w0", "life-1", mode, shell_status(status))


@pytest.mark.parametrize("status", [0, FAILED])
def test_an_exit_that_a_worker_recorded_is_not_recorded_again(status: int) -> None:
    assert exit_fact("w0", "life-1", status) is None


def test_ctrl_c_ends_a_command_that_still_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(parser: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(up_flags, "add_arguments", interrupted)
    assert cli.main(["up"]) == 130


@pytest.mark.slow
def test_ctrl_c_ends_a_start_that_waits_for_a_database(tmp_path: Path) -> None:
    with socket.socket() as silent:  # accepts connections and never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"postgresql://x@127.0.0.1:{silent.getsockname()[1]}/x"
        command = [sys.executable, "-m", "controller.cli", "up", "--data", str(tmp_path), "--workers", "1"]
        up = subprocess.Popen(
            [*command, "--port", str(free_port())],
            env={**os.environ, "HOLDFAST_DATABASE_URL": url},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        silent.settimeout(30)
        caller, _ = silent.accept()
        with caller:
            began = time.monotonic()
            up.send_signal(signal.SIGINT)
            output, _ = up.communicate(timeout=30)
        assert time.monotonic() - began < 15
        assert (up.returncode, output) == (0, "")


def test_a_data_directory_adds_to_the_environment_only_if_the_broker_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOLDFAST_DATABASE_URL", raising=False)
    monkeypatch.setenv("HOLDFAST_NATS_URL", "nats://a:1")
    assert find(tmp_path)["database_url"] == ""
    FleetDir(tmp_path).remember(nats_url="nats://a:1", database_url="postgresql://x")
    assert find(tmp_path)["database_url"] == find(tmp_path)["database_owner_url"] == "postgresql://x"
    FleetDir(tmp_path).remember(
        nats_url="nats://a:1", database_url="postgresql://x", database_owner_url="postgresql://o"
    )
    assert [find(tmp_path)[name] for name in ("database_url", "database_owner_url")] == [
        "postgresql://x",
        "postgresql://o",
    ]
    monkeypatch.setenv("HOLDFAST_NATS_URL", "nats://b:1")
    assert find(tmp_path) == {"nats_url": "nats://b:1", "database_url": "", "database_owner_url": ""}
    monkeypatch.delenv("HOLDFAST_NATS_URL")
    assert find(tmp_path)["nats_url"] == "nats://a:1"


@pytest.mark.parametrize(("host", "url"), [("127.0.0.1", "http://127.0.0.1:80"), ("::1", "http://[::1]:80")])
def test_the_address_that_up_prints_can_be_typed(host: str, url: str, tmp_path: Path) -> None:
    more = {"engine": "simulated", "workers": 1, "spares": 0, "ready_timeout": None, "nats_monitor": None}
    args = argparse.Namespace(host=host, port=80, data=tmp_path, upstreams=None, **more)
    assert FleetSupervisor(args).url == url


@pytest.mark.slow
def test_a_log_that_cannot_be_written_stops_no_role(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")  # blocks the file in which a process announces itself
    command = [sys.executable, "-m", "controller.cli", "worker", "--data", str(tmp_path), "--admin-port", "0"]
    with open("/dev/full", "wb") as full:
        worker = subprocess.Popen(command, stdout=full, stderr=full)
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            worker.wait(5)
    finally:
        worker.terminate()
        worker.wait(30)


def test_a_readers_url_needs_a_fleet_with_a_database_but_grants_do_not(tmp_path: Path) -> None:
    refused(
        holdfast("database", "reader", "--data", str(tmp_path)),
        "No fleet runs on this data directory",
        code=1,
    )
    FleetDir(tmp_path).remember(nats_url="nats://a:1", database_url="", pid=os.getpid())
    refused(holdfast("database", "reader", "--data", str(tmp_path)), "is not known yet", code=1)
    refused(holdfast("database", "grants", "--reader", 'x"; DROP'), "is not a valid account name", code=2)
    output = holdfast("database", "grants", "--reader", "grafana").stdout
    assert 'GRANT SELECT ON ALL TABLES IN SCHEMA "holdfast" TO "grafana";' in output
    assert "PASSWORD" not in output and "SUPERUSER" not in output
