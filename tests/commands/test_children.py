"""Child processes of `holdfast up`: their environment, their exits, and orphans."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
from memory_journal import MemoryJournal, MemoryStream
from waits import until

from controller.processes.children import Child, stop_all
from controller.processes.fleet_dir import FleetDir
from controller.processes.process_plan import GRACE, GRACE_S, accounts, frontend_grace_s, names, plan
from controller.processes.up_checks import file_conflicts
from controller.processes.worker_exits import WorkerExits, lives
from events.observations import WorkerLeft

ARGS = argparse.Namespace(
    host="127.0.0.1", port=80, frontends=1, workers=1, request_plane="tcp", canary_interval=None, breaker_wait=None,
    breaker_backoff=None, chaos=False, engine="simulated", model=None, itl_ms=None, workers_per_process=1,
    ready_timeout=None, spares=0, spare_threshold=None, spares_on_return=None, upstream=[], upstreams=None, webhook=[],
    webhook_kinds=[],
    webhook_template=[], webhook_secret_file=[],
)  # fmt: skip
STUBBORN = "import signal; signal.signal(15, signal.SIG_IGN); print(flush=True); signal.pause()"
FIRST_PROCESS = """
import ctypes, os, subprocess, sys, time
from controller.processes.children import reap_orphan
ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: this process adopts orphans, like the first process of a container
ours = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
for _ in range(3):
    subprocess.run("sleep 0.1 & exit", shell=True)
seen, until = 0, time.monotonic() + 20
while time.monotonic() < until:
    ours.poll()
    seen = reap_orphan(seen)
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # no child is left
        break
    os.sched_yield()
else:
    raise SystemExit("there are orphans left")
print(ours.returncode, reap_orphan(0))
"""


def test_orphans_are_reaped_without_taking_the_exit_status_of_other_children() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", FIRST_PROCESS], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "3 0\n", "")


@pytest.mark.parametrize(
    ("variable", "given", "waited_s"),
    [("", str(GRACE_S), GRACE_S), ("45", "45", 45.0), ("soon", "soon", GRACE_S)],
)
def test_frontends_get_the_grace_period_for_which_up_waits_before_killing_them(
    variable: str, given: str, waited_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(GRACE, variable)
    (frontend,) = (child for child in plan(ARGS, FleetDir(tmp_path)) if child.role == "frontend")
    assert (frontend.environment[GRACE], frontend_grace_s()) == (given, waited_s)


async def test_a_worker_killed_at_shutdown_is_recorded_as_left(tmp_path: Path) -> None:
    stream = MemoryStream()
    exits = WorkerExits(MemoryJournal(stream, "supervisor").observe)
    child = Child("w0", "worker", [sys.executable, "-c", STUBBORN], tmp_path / "w0.log")
    environment = exits.begins(child)
    child.start(environment)
    await until(child.log.read_text)
    await stop_all([child], 0.2, exits.ended)
    assert [event.fact for event in stream.events] == [
        WorkerLeft(worker="w0", instance=environment["HOLDFAST_WORKER_INSTANCE"], mode="immediate", exit=137)
    ]


def test_a_fleet_without_webhooks_has_no_notifier(tmp_path: Path) -> None:
    def notifiers(*webhooks: str) -> list[Child]:
        args = argparse.Namespace(**vars(ARGS) | {"webhook": list(webhooks)})
        return [child for child in plan(args, FleetDir(tmp_path)) if child.role == "notifier"]

    assert notifiers() == []
    (notifier,) = notifiers("ops=https://host/a", "@/etc/url")
    webhooks_given = json.loads(notifier.environment["HOLDFAST_NOTIFIER__WEBHOOKS"])
    assert [(one["name"], one["url"]) for one in webhooks_given] == [
        ("ops", "https://host/a"),
        ("", "@/etc/url"),
    ]
    assert not any("host" in word for word in notifier.command), "`ps` shows arguments to all users"


def test_workers_are_distributed_over_processes(tmp_path: Path) -> None:
    args = argparse.Namespace(**{**vars(ARGS), "workers": 10, "workers_per_process": 4})
    processes = [child for child in plan(args, FleetDir(tmp_path)) if child.role == "worker"]
    assert [(child.name, child.environment["HOLDFAST_WORKER_COUNT"]) for child in processes] == [
        ("w0", "4"),
        ("w4", "4"),
        ("w8", "2"),
    ]
    assert lives(processes[2], "i1") == [("w8", "i1-0"), ("w9", "i1-1")]
    assert lives(Child("w3", "worker", [], tmp_path), "i1") == [("w3", "i1")]


def test_each_worker_gets_its_upstream_its_key_and_its_ready_timeout(tmp_path: Path) -> None:
    upstreams, keys = ["http://a", "http://b"], [tmp_path / "a.key", tmp_path / "b.key"]
    given = {"engine": "openai", "upstream": upstreams, "ready_timeout": 90.0, "upstream_kv_events": []}
    for files, revisions in ((keys, ["r1", "r2"]), (keys[:1], ["r1"])):
        more = {"upstream_key_file": files, "upstream_kv_replay": [], "revision": revisions}
        args = argparse.Namespace(**{**vars(ARGS), **given, **more})
        environments = [
            child.environment for child in plan(args, FleetDir(tmp_path)) if child.role == "worker"
        ]
        assert [one["HOLDFAST_WORKER_UPSTREAM"] for one in environments] == upstreams
        assert {one["HOLDFAST_WORKER_READY_TIMEOUT"] for one in environments} == {"90.0"}
        assert [one["HOLDFAST_WORKER_REVISION"] for one in environments] == (revisions * 2)[:2]
        expected = [str(file) for file in (files * 2)[:2]]
        assert [one["HOLDFAST_WORKER_UPSTREAM_KEY_FILE"] for one in environments] == expected


def test_one_process_has_all_upstreams_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "up.yaml"
    file.write_text("upstreams: [{name: a, url: 'http://a'}, {name: b, url: 'http://b', pause: true}]")
    args = argparse.Namespace(**{**vars(ARGS), "engine": "openai", "upstreams": file, "ready_timeout": 90.0})
    (process,) = (child for child in plan(args, FleetDir(tmp_path)) if child.role == "worker")
    assert (process.name, process.environment["HOLDFAST_WORKER_UPSTREAMS"]) == ("upstreams", str(file))
    assert process.environment["HOLDFAST_WORKER_READY_TIMEOUT"] == "90.0"
    assert names(args) == ["a"]
    assert accounts(args, process) == ["worker-a"]
    assert lives(process, "i1") == []


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"engine": "simulated"}, "--upstreams requires --engine openai, not --engine simulated"),
        ({"spares": 1}, "--spares 1: upstreams of a file cannot be spares"),
        ({"upstream": ["http://b"]}, "--upstream cannot be used with --upstreams; set it in"),
        ({"revision": ["r1"]}, "--revision cannot be used with --upstreams; set it in"),
    ],
)
def test_a_file_of_upstreams_replaces_other_flags(given: dict[str, object], why: str, tmp_path: Path) -> None:
    file = tmp_path / "up.yaml"
    file.write_text("upstreams: []")
    without = ("upstream_key_file", "revision", "upstream_kv_events", "upstream_kv_replay")
    none: dict[str, object] = {name: [] for name in without}
    args = argparse.Namespace(**{**vars(ARGS), **none, "engine": "openai", "upstreams": file, **given})
    assert next(file_conflicts(args)).startswith(why)


def test_the_last_words_of_a_child_are_the_last_line_of_its_error(tmp_path: Path) -> None:
    log = tmp_path / "controller.log"
    child = Child("controller", "controller", [], log)
    assert child.last_words() == ""
    log.write_text("  | OSError: earlier\n    | AttributeError: no '_x'\n    +--------------\n\n")
    assert child.last_words() == "AttributeError: no '_x'"
