"""Streams survive their workers' failures: each answer is compared with the undisturbed one.

The same tests run on simulated workers, and with tokens that pass through the broker, with `make test-attacks`; on a real model
with `make test-engines`.
"""

import asyncio
import contextlib
import itertools
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import pytest
import pytest_asyncio
import tiny_model
from fleet import client, running
from waits import until

from benchmarks.local_fleet import LocalFleet
from controller.demo.clients import compare
from events.decisions import HealthChanged, HealthStatus
from events.fact import Fact
from events.observations import RequestExposed, RequestMigrated

WORKERS = 3
STREAMS = 8
TOKENS = 150
FLAGS = (
    "--workers",
    str(WORKERS),
    "--chaos",
    "--canary-interval",
    "0.5",
    "--breaker-wait",
    "1",
    "--breaker-backoff",
    "1",
)

PATIENT = {
    "HOLDFAST_CONTROLLER__POLICY__HEALTH__TRIALS_MAX": "1000"
}  # in a slow test the victim would be replaced otherwise

_numbers = itertools.count()


@dataclass
class Stream:
    """One user's request, and its outcome."""

    request: str
    prompt: list[int]
    pieces: list[str] = field(default_factory=list)
    worker: str = ""
    started: asyncio.Event = field(default_factory=asyncio.Event)  # a flag: a few tokens have arrived


def prompts() -> list[list[int]]:
    """Return eight different prompts, as token ids."""
    return [[300 + (7 * i + 13 * k) % 1500 for k in range(40)] for i in range(STREAMS)]


async def run(fleet: LocalFleet, stream: Stream) -> Stream:
    """Read one stream to its end with the official client."""
    async with client(fleet) as api:
        answer = await api.completions.with_raw_response.create(
            model=(await model_of(fleet)),
            prompt=stream.prompt,
            max_tokens=TOKENS,
            temperature=0,
            stream=True,
            extra_headers={"X-Request-Id": stream.request},
            extra_body={"ignore_eos": True},
        )
        stream.worker = answer.headers.get("X-Holdfast-Worker", "")
        async for chunk in answer.parse():
            if chunk.choices and chunk.choices[0].text:
                stream.pieces.append(chunk.choices[0].text)
                if len(stream.pieces) >= 5:
                    stream.started.set()
        stream.started.set()
    return stream


ENGINES = ["simulated", pytest.param("transformers", marks=pytest.mark.engines)]
BEHIND_THE_BROKER = "simulated, behind the broker"
whatever_the_plane = pytest.mark.parametrize("fleet", ENGINES, indirect=True, scope="module")

_models: dict[int, str] = {}
_undisturbed: dict[int, list[list[str]]] = {}


async def model_of(fleet: LocalFleet) -> str:
    if fleet.port not in _models:
        async with client(fleet) as api:
            _models[fleet.port] = (await api.models.list()).data[0].id
    return _models[fleet.port]


async def answers(fleet: LocalFleet) -> list[list[str]]:
    """Return the undisturbed answers: generated once, before anything happens to the fleet."""
    if fleet.port not in _undisturbed:
        streams = [Stream(f"undisturbed-{next(_numbers)}", p) for p in prompts()]
        _undisturbed[fleet.port] = [s.pieces for s in await asyncio.gather(*(run(fleet, s) for s in streams))]
    return _undisturbed[fleet.port]


async def under_fault(
    fleet: LocalFleet, verb: str, argument: float | None = None
) -> tuple[str, list[Stream]]:
    """Start the streams, break the worker of the one with the fewest tokens, and return it with the finished streams."""
    streams = [Stream(f"{verb}-{next(_numbers)}", p) for p in prompts()]
    async with asyncio.TaskGroup() as group:
        for stream in streams:
            group.create_task(run(fleet, stream))
        await asyncio.gather(*(s.started.wait() for s in streams))
        victim = min(streams, key=lambda stream: len(stream.pieces)).worker
        await fleet.act(verb, victim, argument)
    return victim, streams


async def said(fleet: LocalFleet, holds: Callable[[list[Fact]], bool], within_s: float = 30.0) -> list[Fact]:
    """Return the journal's facts once `holds` is true of them, or the current ones at the deadline."""
    facts: list[Fact] = []

    async def look() -> bool:
        facts.extend([recorded.fact for recorded in await fleet.events(len(facts))])
        return holds(facts)

    with contextlib.suppress(pytest.fail.Exception):
        await until(look, within_s, every_s=0.1)
    return facts


async def migrated(fleet: LocalFleet, streams: Sequence[Stream]) -> list[RequestMigrated]:
    """Return the streams' migrations, once the journal has them."""
    ours = {s.request for s in streams}

    def moves(facts: Sequence[Fact]) -> list[RequestMigrated]:
        return [f for f in facts if isinstance(f, RequestMigrated) and f.request in ours]

    return moves(await said(fleet, lambda facts: bool(moves(facts))))


async def verdicts(fleet: LocalFleet, worker: str, since: int) -> list[HealthChanged]:
    """Return the decisions on a worker's health after event `since`, once there are any."""

    def of(facts: Sequence[Fact]) -> list[HealthChanged]:
        return [f for f in facts[since:] if isinstance(f, HealthChanged) and f.worker == worker]

    return of(await said(fleet, lambda facts: bool(of(facts)), within_s=60.0))


@pytest_asyncio.fixture(
    loop_scope="module",
    scope="module",
    params=[*ENGINES, BEHIND_THE_BROKER],
)
async def fleet(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[LocalFleet]:
    folder = tmp_path_factory.mktemp("survival")
    if request.param == "simulated":
        engine = ["--itl-ms", "40"]
    elif request.param == BEHIND_THE_BROKER:
        engine = ["--itl-ms", "40", "--request-plane", "nats"]
    else:
        model = tiny_model.half(tmp_path_factory.getbasetemp())
        engine = ["--engine", "transformers", "--model", str(model), "--canary-interval", "1"]
    async with running(folder / "fleet", *FLAGS, *engine, environment=PATIENT, stops=True) as one:
        yield one


pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.attack]

FAULTS = [
    ("kill", None, None),
    ("hang", None, "unhang"),
    ("blackhole", None, "heal"),
    ("drain", None, "resume"),
]


@pytest.mark.parametrize(("verb", "argument", "after"), FAULTS, ids=[f[0] for f in FAULTS])
async def test_every_stream_survives_intact(
    fleet: LocalFleet, verb: str, argument: float | None, after: str | None
) -> None:
    await fleet.healthy(WORKERS)
    expected = await answers(fleet)
    for _ in range(3):  # on a busy machine streams may end before the fault is injected
        victim, streams = await under_fault(fleet, verb, argument)
        assert [s.pieces for s in streams] == expected
        if verb == "drain" or (moves := await migrated(fleet, streams)):
            break
        if after:
            await fleet.act(after, victim)
        await fleet.healthy(WORKERS)
    if verb != "drain":  # a drained worker finishes its streams
        if not moves and await model_of(fleet) != "sim":
            pytest.skip("this machine says a real model's answers before it is told to break their worker")
        assert victim in {m.source for m in moves}  # others move too if the machine itself is stalled
    if after:
        await fleet.act(after, victim)
    await fleet.healthy(WORKERS)


@whatever_the_plane
async def test_an_engine_that_raises_loses_nothing(fleet: LocalFleet) -> None:
    await fleet.healthy(WORKERS)
    expected = await answers(fleet)
    victim, streams = await under_fault(fleet, "error", 4)
    assert [s.pieces for s in streams] == expected
    more = [Stream(f"error-after-{next(_numbers)}", p) for p in prompts()]
    assert [s.pieces for s in await asyncio.gather(*(run(fleet, s) for s in more))] == expected
    await fleet.act("heal", victim)
    await fleet.healthy(WORKERS)


@whatever_the_plane
@pytest.mark.parametrize(
    ("verb", "argument", "status", "reason"),
    [("drift", 0.5, HealthStatus.UNHEALTHY, "logit_drift"), ("slow", 8, HealthStatus.SUSPICIOUS, "slow")],
)
async def test_correct_tokens_stay_correct_while_their_worker_is_convicted(
    fleet: LocalFleet, verb: str, argument: float, status: HealthStatus, reason: str
) -> None:
    await fleet.healthy(WORKERS)
    expected, before = await answers(fleet), len(await fleet.events())
    victim, streams = await under_fault(fleet, verb, argument)
    assert [s.pieces for s in streams] == expected
    first = (await verdicts(fleet, victim, before))[0]
    assert first.after is status and reason in first.reason, first
    await fleet.act("heal", victim)
    await fleet.healthy(WORKERS)


@whatever_the_plane
async def test_corruption_is_fenced_and_every_altered_stream_is_named(fleet: LocalFleet) -> None:
    await fleet.healthy(WORKERS)
    expected, before = await answers(fleet), len(await fleet.events())
    victim, streams = await under_fault(fleet, "corrupt", 8)
    await fleet.until(lambda s: all(w["health"] != "HEALTHY" for w in s["workers"] if w["id"] == victim))
    after = [Stream(f"after-{next(_numbers)}", p) for p in prompts()]
    assert [s.pieces for s in await asyncio.gather(*(run(fleet, s) for s in after))] == expected, (
        "routed to it afterwards"
    )
    altered = {s.request for s, e in zip(streams, expected, strict=True) if s.pieces != e}
    assert altered, "nothing was corrupted"

    def named(facts: Sequence[Fact]) -> set[str]:
        return {f.request for f in facts if isinstance(f, RequestExposed) and f.worker == victim}

    assert altered <= named(await said(fleet, lambda facts: altered <= named(facts)))
    # after an altered token another answer follows, in which something may seem to be lost: then it is as long
    shorter = [(s, e) for s, e in zip(streams, expected, strict=True) if len(s.pieces) < len(e)]
    assert not [s.request for s, e in shorter if compare(s.pieces, e).lost]
    found = await verdicts(fleet, victim, before)
    assert any("token_mismatch" in v.reason or "logit" in v.reason for v in found), found
    await fleet.act("heal", victim)
    await fleet.healthy(WORKERS)


async def test_streams_continue_when_the_whole_control_plane_is_dead(fleet: LocalFleet) -> None:
    status = await fleet.healthy(WORKERS)
    expected = await answers(fleet)
    pids = {p["role"]: p["pid"] for p in status["processes"]}
    workers = {w["id"]: w["pid"] for w in status["workers"]}
    streams = [Stream(f"dark-{next(_numbers)}", p) for p in prompts()]
    async with asyncio.TaskGroup() as group:
        for stream in streams:
            group.create_task(run(fleet, stream))
        await asyncio.gather(*(s.started.wait() for s in streams))
        for role in ("nats", "postgres", "controller"):
            os.kill(pids[role], signal.SIGKILL)
        victim = min(
            streams, key=lambda stream: len(stream.pieces)
        ).worker  # the one with the most tokens left
        os.kill(workers[victim], signal.SIGKILL)
    assert [s.pieces for s in streams] == expected
    await fleet.until_reachable()
    await fleet.healthy(WORKERS)
    assert await migrated(fleet, streams), "the facts arrived after the recovery"
