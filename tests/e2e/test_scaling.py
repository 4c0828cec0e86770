"""A planner that may act makes `holdfast up` start and stop workers, unnoticed by users."""

import asyncio
from pathlib import Path

import pytest
from fleet import holdfast, running, streamed, undisturbed

from benchmarks.local_fleet import LocalFleet
from events.observations import (
    CapacityReported,
    RequestAbandoned,
    RequestFailed,
    ScaleApplied,
    ScaleProposed,
    ShutdownBegan,
    WorkerLeft,
)

FLAGS = ("--workers", "2", "--itl-ms", "40", "--planner-mode", "act")
SOON = {"HOLDFAST_PLANNER__EVERY_S": "0.5"}
STREAMS, TOKENS = 8, 400


async def operator(fleet: LocalFleet, *command: str) -> str:
    """Run a command that must succeed; return its output."""
    done = await asyncio.to_thread(holdfast, *command, "--data", str(fleet.data))
    assert done.returncode == 0, done.stderr
    return done.stdout


async def serving(fleet: LocalFleet, names: set[str]) -> None:
    """Wait until these workers serve, and no others are alive."""
    await fleet.until(
        lambda status: (
            {w["id"] for w in status["workers"] if w["health"] != "DEAD"} == names
            and all(w["weight"] == 1.0 for w in status["workers"] if w["id"] in names)
        )
    )


@pytest.mark.attack
async def test_an_operators_number_of_workers_is_applied_and_no_stream_is_broken(tmp_path: Path) -> None:
    async with running(tmp_path / "fleet", *FLAGS, environment=SOON, stops=True) as fleet:
        await fleet.healthy(2)
        assert "sim shall have 4 workers until --release" in await operator(fleet, "scale", "sim", "4")
        await serving(fleet, {"w0", "w1", "w2", "w3"})
        answers = [asyncio.ensure_future(streamed(fleet, [300 + n] * 20, TOKENS)) for n in range(STREAMS)]
        await fleet.until(lambda status: sum(w["in_flight"] or 0 for w in status["workers"]) == STREAMS)
        await operator(fleet, "scale", "sim", "2", "--reason", "a rehearsal")
        assert [await one for one in answers] == [undisturbed([300 + n] * 20, TOKENS) for n in range(STREAMS)]
        await serving(fleet, {"w0", "w1"})
        shown = await operator(fleet, "plan")
        assert "an operator has set 2" in shown and "sim: workers 2" in shown
        await operator(fleet, "scale", "sim", "--release")
        unknown = await asyncio.to_thread(holdfast, "scale", "none", "4", "--data", str(fleet.data))
        assert unknown.returncode == 2 and "unknown model 'none'" in unknown.stderr
        facts = [event.fact for event in await fleet.events()]
    proposed = [fact for fact in facts if isinstance(fact, ScaleProposed)]
    assert [(one.before, one.after, one.why, one.by) for one in proposed] == [
        (2, 4, "operator", "supervisor"),
        (4, 2, "operator", "supervisor"),
    ]
    applied = [(one.ok, one.says) for one in facts if isinstance(one, ScaleApplied)]
    assert applied == [(True, "starts w2, w3"), (True, "stops w3, w2")]
    assert not [fact for fact in facts if isinstance(fact, RequestFailed | RequestAbandoned)]
    left = {fact.worker: fact.mode for fact in facts if isinstance(fact, WorkerLeft)}
    assert left == {"w2": "graceful", "w3": "graceful"}
    assert {fact.worker for fact in facts if isinstance(fact, ShutdownBegan)} == {"w2", "w3"}
    assert {fact.provisioned for fact in facts if isinstance(fact, CapacityReported)} >= {2, 4}
