"""How `holdfast up` applies a planner's proposals: which workers it starts, and which it stops."""

import signal
from argparse import Namespace
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.processes.children import Child
from controller.processes.fleet_dir import FleetDir
from controller.processes.scaling.worker_scaling import CLEANUP_S, GRACE_S, WorkerScaling, change
from events.decisions import SpareActivated, SpareReleased
from events.errors import BadSetting
from events.fact import Fact, Recorded
from events.observations import Profile, ScaleApplied, ScaleProposed, WorkerJoined
from events.process import descriptors

AT = datetime(2026, 1, 1, tzinfo=UTC)
PROFILE = Profile(kv_blocks=1, block_tokens=16, max_batch=1, prefill_tokens_per_s=1.0, tpot_ms=((1, 1.0),))


def joined(worker: str, model: str = "sim") -> WorkerJoined:
    return WorkerJoined(
        worker=worker, instance=f"{worker}-a", url="tcp://h:1", model=model, revision="r", tokenizer="t", engine="simulated",
        engine_version="1", dtype="f32", tp=1, device="cpu", profile=PROFILE, canary_key="k", pid=1,
    )  # fmt: skip


def proposed(after: int, **changes: Any) -> ScaleProposed:
    fact = ScaleProposed(
        planner="p", model="sim", before=2, after=after, why="up", needed=after, method="", error=None, bound="", held="",
        by="supervisor", position=1,
    )  # fmt: skip
    return replace(fact, **changes)


def activated(spare: str, lost: str) -> SpareActivated:
    return SpareActivated(
        worker=spare, instance=f"{spare}-a", replaces=lost, reason="silent", decided_at=AT, number=1
    )


def released(spare: str, returned: str) -> SpareReleased:
    return SpareReleased(worker=spare, instance=f"{spare}-a", returned=returned, decided_at=AT, number=1)


class PlayedProcess:
    """A process that obeys signals only when the test lets it."""

    def __init__(self) -> None:
        self.signals: list[int] = []
        self.pid, self.returncode = 1, None

    def send_signal(self, number: int) -> None:
        self.signals.append(number)

    def poll(self) -> int | None:
        return self.returncode


class PlayedFleet:
    """The workers of a fleet, as their supervisor sees them."""

    def __init__(self, tmp_path: Path, workers: int = 2, **args: Any) -> None:
        self.said: list[ScaleApplied] = []
        self.children: list[Child] = [Child("controller", "controller", [], tmp_path / "log")]
        given = {
            "engine": "simulated",
            "workers_per_process": 1,
            "request_plane": "tcp",
            "ready_timeout": None,
        }
        given |= {
            "model": None,
            "itl_ms": None,
            "spares": 0,
            "spare_threshold": 16,
            "workers": workers,
            "upstreams": None,
        }
        self.args = Namespace(**given | args)
        self.scaling = WorkerScaling(
            self.args, FleetDir(tmp_path), self.children, self.start, self.said.append
        )
        self.seq = 0
        for n in range(workers):
            self.start(Child(f"w{n}", "worker", [], tmp_path / "log"))
            self.hear(joined(f"w{n}"))

    def start(self, child: Child) -> None:
        child.process = PlayedProcess()  # type: ignore[assignment]
        self.children.append(child)

    def hear(self, fact: Fact) -> None:
        self.seq += 1
        self.scaling.receive(Recorded(self.seq, AT, fact, f"e{self.seq}"))

    def told(self, after: int, now: float = 0.0, **changes: Any) -> ScaleApplied:
        self.hear(proposed(after, **changes))
        self.scaling.tend(now)
        return self.said[-1]

    def left(self, name: str) -> None:
        """Mark a worker's process as ended."""
        assert self.scaling.left(self.child(name), 0) == f"{name} has stopped"

    def child(self, name: str) -> Child:
        return next(child for child in self.children if child.name == name)

    def signals(self, name: str) -> list[int]:
        process: Any = self.child(name).process
        return list(process.signals)

    @property
    def names(self) -> list[str]:
        return [child.name for child in self.children if child.role == "worker"]


def test_new_workers_are_started_like_the_others(tmp_path: Path) -> None:
    fleet = PlayedFleet(tmp_path, itl_ms=12.0)
    applied = fleet.told(4)
    assert (applied.ok, applied.says, applied.by, applied.proposal) == (
        True,
        "starts w2, w3",
        "supervisor",
        "e3",
    )
    assert fleet.names == ["w0", "w1", "w2", "w3"]
    started = fleet.child("w3")
    assert (
        started.command[-2:] == ["--name", "w3"] and started.environment["HOLDFAST_WORKER_ITL_MS"] == "12.0"
    )


def test_a_proposal_before_the_first_join_waits_for_it(tmp_path: Path) -> None:
    """An operator may ask for more as soon as the fleet serves: that `up` has not seen it yet is no rejection."""
    fleet = PlayedFleet(tmp_path, workers=0)
    for name in ("w0", "w1"):
        fleet.start(Child(name, "worker", [], tmp_path / "log"))
    fleet.hear(proposed(4))
    fleet.scaling.tend(0.0)
    assert fleet.said == []
    fleet.hear(joined("w0"))
    fleet.scaling.tend(1.0)
    (applied,) = fleet.said
    assert (applied.ok, applied.says) == (True, "starts w2, w3")


def test_the_newest_workers_are_stopped_and_not_restarted(tmp_path: Path) -> None:
    fleet = PlayedFleet(tmp_path, workers=4)
    assert fleet.told(2).says == "stops w3, w2"
    for name in ("w2", "w3"):
        assert fleet.signals(name) == [signal.SIGTERM, signal.SIGCONT] and not fleet.child(name).restart
    assert fleet.signals("w1") == [] and fleet.child("w1").restart


def test_a_name_is_never_reused(tmp_path: Path) -> None:
    fleet = PlayedFleet(tmp_path, workers=3)
    fleet.told(2)
    assert fleet.told(3).says == "starts w3", "w2 is still leaving"
    fleet.left("w2")
    fleet.told(2)
    fleet.left("w3")
    assert fleet.told(3).says == "starts w4"


def test_the_name_of_a_worker_started_elsewhere_is_not_used(tmp_path: Path) -> None:
    fleet = PlayedFleet(tmp_path)
    fleet.hear(joined("w5", model="another"))
    fleet.hear(joined("gpu-7"))
    assert fleet.told(3).says == "starts w6"


def test_proposals_for_two_models_are_both_applied(tmp_path: Path) -> None:
    fleet = PlayedFleet(tmp_path)
    fleet.hear(proposed(3))
    fleet.hear(proposed(4, model="other"))
    fleet.scaling.tend(0.0)
    assert [(one.model, one.ok) for one in fleet.said] == [("sim", True), ("other", False)]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), BadSetting("a seed is damaged")])
def test_a_worker_that_cannot_be_admitted_is_reported_and_the_fleet_continues(
    tmp_path: Path, error: Exception
) -> None:
    fleet = PlayedFleet(tmp_path)

    def refuse(child: Child) -> None:
        raise error

    fleet.scaling = WorkerScaling(fleet.args, FleetDir(tmp_path), fleet.children, refuse, fleet.said.append)
    fleet.hear(joined("w0"))
    applied = fleet.told(3)
    assert not applied.ok and str(error) in applied.says and fleet.names == ["w0", "w1"]


def test_no_more_workers_are_started_than_open_files_allow(
    tmp_path: Path,
) -> None:
    fleet = PlayedFleet(tmp_path)
    hard = descriptors.require(0, "") - descriptors.SPARE
    applied = fleet.told(hard + 1)
    assert not applied.ok and "open files are needed" in applied.says and fleet.names == ["w0", "w1"]


def test_one_worker_stays_whatever_is_proposed(tmp_path: Path) -> None:
    fleet = PlayedFleet(tmp_path, workers=2)
    assert fleet.told(0).says == "stops w1" and fleet.told(0).says == "no change needed"


def test_the_last_proposal_applies_and_one_addressed_elsewhere_is_ignored(tmp_path: Path) -> None:
    fleet = PlayedFleet(tmp_path)
    fleet.hear(proposed(9))
    fleet.hear(proposed(5, by="command"))
    fleet.told(3)
    assert [applied.after for applied in fleet.said] == [3] and fleet.names == ["w0", "w1", "w2"]
    fleet.hear(proposed(7, by=""))
    fleet.scaling.tend(1.0)
    assert len(fleet.said) == 1


def test_a_worker_that_does_not_leave_is_killed_in_the_end(tmp_path: Path) -> None:
    fleet = PlayedFleet(tmp_path)
    fleet.told(1, now=100.0)
    fleet.scaling.tend(100.0 + GRACE_S + CLEANUP_S)
    assert signal.SIGKILL not in fleet.signals("w1")
    fleet.scaling.tend(100.1 + GRACE_S + CLEANUP_S)
    assert fleet.signals("w1")[-1] == signal.SIGKILL


def test_a_crashed_worker_is_removed_at_once(tmp_path: Path) -> None:
    fleet = PlayedFleet(tmp_path)
    fleet.child("w1").process = None
    fleet.told(1)
    assert fleet.names == ["w0"]


@pytest.mark.parametrize(
    ("args", "changes", "why"),
    [
        ({}, {"model": "other"}, "the workers of this `holdfast up` serve sim"),
        ({"engine": "openai"}, {}, "configure a hook for the planner"),
        ({"workers_per_process": 4}, {}, "configure a hook for the planner"),
    ],
)
def test_a_proposal_that_cannot_be_applied_is_reported(
    tmp_path: Path, args: dict[str, Any], changes: dict[str, Any], why: str
) -> None:
    fleet = PlayedFleet(tmp_path, **args)
    applied = fleet.told(4, **changes)
    assert not applied.ok and why in applied.says and fleet.names == ["w0", "w1"]


@given(st.sets(st.integers(0, 30), min_size=1), st.integers(0, 10), st.integers(0, 60))
def test_the_proposed_number_serves_and_no_name_is_reused(serving: set[int], beyond: int, after: int) -> None:
    used = max(serving) + beyond
    more, fewer = change([f"w{number}" for number in sorted(serving)], used, after)
    gone = {int(name[1:]) for name in fewer}
    assert len(serving) + len(more) - len(fewer) == after
    assert not (more and fewer) and gone <= serving and len(gone) == len(fewer)
    assert len(set(more)) == len(more) and all(number > used for number in more)
    assert all(number > left for number in gone for left in serving - gone)


def test_spares_are_not_counted_and_a_replaced_worker_becomes_one(tmp_path: Path) -> None:
    fleet = PlayedFleet(tmp_path, workers=3)
    fleet.start(Child("s0", "worker", [], tmp_path / "log"))
    fleet.hear(replace(joined("s0"), spare=True))
    assert fleet.told(3).says == "no change needed"
    fleet.hear(activated("s0", "w2"))
    assert fleet.told(3).says == "no change needed"
    assert fleet.told(1).says == "stops w1, w0" and fleet.signals("w2") == [] == fleet.signals("s0")


def test_a_spare_from_before_this_up_stays_one(tmp_path: Path) -> None:
    fleet = PlayedFleet(tmp_path, workers=2)
    fleet.start(Child("s0", "worker", [], tmp_path / "log"))
    fleet.hear(replace(joined("s0"), spare=True))
    fleet.hear(released("w1", "s0"))
    fleet.scaling.begin(["w1"])
    assert fleet.told(2).says == "no change needed"
    assert fleet.told(1).says == "stops w0"


def test_with_auto_the_number_of_spares_follows_the_workers(tmp_path: Path) -> None:
    fleet = PlayedFleet(tmp_path, workers=2, spares="auto", spare_threshold=4)
    assert fleet.told(40).says.endswith("w39, starts s0, s1, s2, s3")
    assert fleet.child("s1").environment["HOLDFAST_WORKER_SPARE"] == "true"
    for name in ("s0", "s1", "s2", "s3"):
        fleet.hear(replace(joined(name), spare=True))
    assert fleet.told(3).says.endswith("stops s3, s2, s1, s0")
