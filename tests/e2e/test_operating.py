"""Drained and moved streams continue elsewhere with their KV cache, unnoticed by users.

The fleet, one worker short, then answers a recorded trace.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from fleet import holdfast, running, streamed, undisturbed

from benchmarks.local_fleet import LocalFleet
from events.observations import DrainFinished, RequestAbandoned, RequestMigrated

WORKERS = ("w0", "w1", "w2")
# 60 s of answers: two commands start meanwhile, on a machine that may be busy
FLAGS = ("--workers", str(len(WORKERS)), "--itl-ms", "40")
STREAMS = 12
TOKENS = 1500
SPEEDS = {
    "HOLDFAST_WORKER_PREFILL_TOKENS_PER_S": "5000",  # prefill is slow, so that a transfer is worthwhile
    "HOLDFAST_FRONTEND__MOVING__MAX_MIGRATION_TIME_MS": "10000",  # this machine may be busy
}
CONVERSATIONS, TURNS, BLOCK = 8, 5, 64

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.attack]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalFleet]:
    async with running(tmp_path_factory.mktemp("moves") / "fleet", *FLAGS, environment=SPEEDS) as made:
        yield made


def prompt_of(number: int) -> list[int]:
    """Return one stream's prompt."""
    return [300 + number] * 300


async def test_streams_leave_a_drained_and_a_moved_worker_with_their_kv_cache(fleet: LocalFleet) -> None:
    await fleet.healthy(len(WORKERS))
    answers = [asyncio.ensure_future(streamed(fleet, prompt_of(n), TOKENS)) for n in range(STREAMS)]
    status = await fleet.until(
        lambda s: sum(at(s, w) for w in WORKERS) == STREAMS and all(at(s, w) > 1 for w in WORKERS)
    )
    said = await asyncio.gather(operator(fleet, "drain", "w0"), operator(fleet, "move", "w1", "--to", "w2"))
    assert "w0 will drain" in said[0] and "requests on w1 will move to w2" in said[1]
    assert await asyncio.gather(*answers) == [undisturbed(prompt_of(n), TOKENS) for n in range(STREAMS)]
    moves = await facts(fleet, RequestMigrated)
    assert {(m.cause, m.source, m.method, m.exact, m.refused) for m in moves} == {
        ("drain", "w0", "transfer", True, ""), ("operator", "w1", "transfer", True, ""),
    }  # fmt: skip
    assert {m.target for m in moves if m.source == "w1"} == {"w2"}
    assert all(m.bytes > 0 and m.blocks > 0 and m.link for m in moves)
    assert len(moves) >= at(status, "w0") + at(status, "w1")
    assert await facts(fleet, RequestAbandoned) == []
    await fleet.until(lambda s: not any(w["in_flight"] for w in s["workers"]))
    (drained,) = await facts(fleet, DrainFinished)
    assert astuple(drained)[-4:] == (0, sum(m.cause == "drain" for m in moves), 0, 0)
    with pytest.raises(AssertionError, match="w0 cannot accept them: it must serve the same model"):
        await operator(fleet, "move", "w1", "--to", "w0")


def at(status: dict[str, Any], worker: str) -> int:
    """Return a worker's requests, as it reports them."""
    return sum(w["in_flight"] or 0 for w in status["workers"] if w["id"] == worker)


async def operator(fleet: LocalFleet, *command: str) -> str:
    """Run a command that must succeed; return its output."""
    done = await asyncio.to_thread(holdfast, *command, "--data", str(fleet.data))
    assert done.returncode == 0, done.stderr
    return done.stdout


async def facts(fleet: LocalFleet, kind: type) -> list[Any]:
    """Return all facts of this kind on the journal."""
    return [event.fact for event in await fleet.events() if isinstance(event.fact, kind)]


def trace() -> bytes:
    """Return conversations in which every prompt continues the one before."""
    lines = []
    for turn in range(TURNS):
        for one in range(CONVERSATIONS):
            ids = [1000 * one + n for n in range(turn + 1)]
            row = {"timestamp": 250 * turn + 10 * one, "input_length": BLOCK * len(ids), "output_length": 8}
            lines.append(json.dumps({**row, "hash_ids": ids}))
    return "\n".join(lines).encode()


async def test_a_fleet_answers_a_trace_and_finds_its_shared_prefixes(
    fleet: LocalFleet, tmp_path: Path
) -> None:
    path, report = tmp_path / "trace.jsonl", tmp_path / "report.json"
    path.write_bytes(trace())
    replay = ("trace", "replay", str(path), "--url", fleet.url, "--report", str(report))
    flags = ("--block-size", str(BLOCK), "--slo-ttft-ms", "30000")
    ended = await asyncio.to_thread(holdfast, *replay, *flags)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(report.read_text())
    wrong = await asyncio.to_thread(holdfast, *replay, *flags, "--model", "none")
    assert wrong.returncode == 1 and "not none" in wrong.stderr
    count = CONVERSATIONS * TURNS
    assert found["prompts"] == "token ids" and not found["errors"]
    assert found["requests"] == {"sent": count, "whole": count, "failed": 0, "cut": 0, "shorter": 0}
    assert found["tokens"]["output"] == 8 * count == found["goodput"]["requests"] * 8
    assert found["tokens"]["input"] == sum(BLOCK * (1 + n // CONVERSATIONS) for n in range(count))
    assert found["prefix_cache"]["tokens"] > 0
