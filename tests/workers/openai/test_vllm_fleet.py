"""Opt-in (make test-vllm): a fleet in front of two real vLLM servers, one of which fails.

Every answer is compared with the undisturbed one. Waiting times of users are printed, and recorded in docs/guides/engines.md.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Any

import openai
import pytest
import pytest_asyncio
from vllm_servers import VllmServer, folder

from benchmarks.local_fleet import LocalFleet
from controller.demo.clients import Received, Users
from events.decisions import GoldenAgreed
from events.observations import (
    CanaryFailed,
    CanaryPassed,
    GoldenDisputed,
    RequestMigrated,
    RequestPoisonous,
    WorkerJoined,
)

PLANTED = b"1007,1008,1009"  # no known request crashes vLLM, so a proxy kills it when these pass
POISON = [300, 301, 1007, 1008, 1009, 302]
ASKED_AGAIN = 5
STREAMS = 6
TOKENS = 300
SPOKEN = 10  # pieces of every stream before the fault
ROUNDS_MAX = 5  # on a busy machine a stream may be over, or all may have moved, before another has begun
RECOVERS_WITHIN_S = 120.0
FLAGS = ("--canary-interval", "1", "--breaker-wait", "1", "--breaker-backoff", "1")
PROMPTS = [[300 + (7 * i + 13 * k) % 1500 for k in range(40)] for i in range(STREAMS)]

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]

Eventually = Callable[..., Awaitable[None]]

_numbers = itertools.count()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def fleet(
    vllms: list[VllmServer], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[LocalFleet]:
    """One worker for each server."""
    made = folder()
    assert made is not None
    upstreams = itertools.chain.from_iterable(("--upstream", server.url) for server in vllms)
    flags = ("--engine", "openai", "--model", str(made / "tiny"), *upstreams, *FLAGS)
    one = await LocalFleet.start(tmp_path_factory.mktemp("fleet"), *flags).ready()
    yield one
    assert one.stop() == 0, one.log.read_text()


def all_serve(status: dict[str, Any]) -> bool:
    """Whether both workers are in full service."""
    workers = status["workers"]
    return len(workers) == 2 and all(
        w["health"] == "HEALTHY" and w["weight"] == 1 and w["breaker"] == "closed" for w in workers
    )


async def struck(
    fleet: LocalFleet, worker: str, users: Users, strike: Callable[[], None], eventually: Eventually
) -> tuple[list[Received], float, datetime]:
    """Start the streams, inject a fault once all have begun and some of them run on this worker.

    Return the finished streams, and the time of the fault by both clocks.
    """
    for _ in range(ROUNDS_MAX):
        users.streams.clear()
        name, struck_at = f"struck-{next(_numbers)}", None
        async with users.session() as session, asyncio.TaskGroup() as group:
            asked = [group.create_task(users.ask(session, n, TOKENS, f"{name}-{n}")) for n in range(STREAMS)]
            await eventually(lambda: [len(s.pieces) >= SPOKEN for s in users.streams] == [True] * STREAMS, 60)
            busy = {w["id"] for w in (await fleet.status())["workers"] if w["in_flight"]}
            if worker in busy and not any(s.done for s in users.streams):
                struck_at = time.monotonic(), datetime.now(UTC)
                strike()
        if struck_at is not None:
            return [one.result() for one in asked], *struck_at
    pytest.fail("no streams could be struck in the middle")


async def moves(
    fleet: LocalFleet, streams: Sequence[Received], since: datetime, eventually: Eventually
) -> list[RequestMigrated]:
    """Return the journal's migration events of the streams, once they are recorded; earlier moves are excluded."""
    ours, found = {stream.request for stream in streams}, []

    async def told() -> bool:
        nonlocal found
        said = [(event.at, event.fact) for event in await fleet.events()]
        moved = [
            (at, fact) for at, fact in said if isinstance(fact, RequestMigrated) and fact.request in ours
        ]
        found = [fact for at, fact in moved if at > since]
        return bool(found)

    await eventually(told)
    return found


async def test_canaries_pass_on_both_servers_with_agreed_goldens(
    fleet: LocalFleet, eventually: Eventually
) -> None:
    await fleet.until(all_serve, RECOVERS_WITHIN_S)

    async def passed_often() -> bool:
        facts = [event.fact for event in await fleet.events()]
        agreed = {fact.canary for fact in facts if isinstance(fact, GoldenAgreed)}
        passed = [(f.worker, f.canary) for f in facts if isinstance(f, CanaryPassed)]
        return len(agreed) >= 4 and all(passed.count((w, c)) >= 2 for w in ("w0", "w1") for c in agreed)

    await eventually(passed_often, 60.0)
    facts = [event.fact for event in await fleet.events()]
    assert not [fact for fact in facts if isinstance(fact, CanaryFailed | GoldenDisputed)]
    joined = [fact for fact in facts if isinstance(fact, WorkerJoined)]
    assert len({fact.canary_key for fact in joined}) == 1
    assert all(set(fact.by) == {"w0", "w1"} for fact in facts if isinstance(fact, GoldenAgreed))


async def test_canaries_bypass_the_prefix_cache(
    fleet: LocalFleet, vllms: list[VllmServer], eventually: Eventually
) -> None:
    await fleet.until(all_serve, RECOVERS_WITHIN_S)

    async def cached() -> list[tuple[float, float]]:
        names = ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total")
        return [tuple([await asyncio.to_thread(s.metric, name) for name in names]) for s in vllms]  # type: ignore[misc]

    before = await cached()

    async def asked_often() -> bool:
        return all(now[0] > then[0] + 200 for now, then in zip(await cached(), before, strict=True))

    await eventually(asked_often, 60.0)  # five canaries, of about 40 tokens
    assert [now[1] - then[1] for now, then in zip(await cached(), before, strict=True)] == [0, 0]


STRIKES: list[tuple[str, int, Callable[[VllmServer], None]]] = [
    ("kill_9", 0, VllmServer.kill),
    ("kill_9_of_the_engine_alone", 1, lambda server: server.core().kill()),
    ("sigterm", 0, VllmServer.end),
    ("sigstop", 1, VllmServer.freeze),
    ("sigstop_of_the_engine_alone", 0, VllmServer.freeze_core),
]


@pytest.mark.parametrize(("place", "strike"), [s[1:] for s in STRIKES], ids=[s[0] for s in STRIKES])
async def test_a_stream_continues_on_the_other_server(
    fleet: LocalFleet,
    vllms: list[VllmServer],
    place: int,
    strike: Callable[[VllmServer], None],
    eventually: Eventually,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
) -> None:
    await fleet.until(all_serve, RECOVERS_WITHIN_S)
    users = Users(fleet.url, "tiny", PROMPTS)
    async with users.session() as session:
        expected = await users.answers(session, TOKENS)
    try:
        blow = partial(strike, vllms[place])
        streams, at, since = await struck(fleet, f"w{place}", users, blow, eventually)
    finally:
        vllms[place].revive()
    assert [stream.error for stream in streams] == [""] * STREAMS
    assert ["".join(s.pieces) for s in streams] == ["".join(pieces) for pieces in expected]
    moved = await moves(fleet, streams, since, eventually)
    assert f"w{place}" in {move.source for move in moved}
    ended_at = {
        move.request: move.target for move in moved
    }  # on a busy machine one may have moved more than once
    assert set(ended_at.values()) == {f"w{1 - place}"}
    assert not [m for m in moved if m.source == m.target and m.source_instance != m.target_instance]
    assert {move.exact for move in moved} == {True}
    names = {move.request for move in moved}
    pauses = sorted(pause(stream, at) for stream in streams if stream.request in names)
    with capsys.disabled():
        causes = ", ".join(sorted({move.cause for move in moved}))
        print(f"\n{request.node.callspec.id}: {len(names)} of {STREAMS} streams moved ({causes}), ", end="")
        print(f"silent for {pauses[0]:.2f} to {pauses[-1]:.2f} s", end=" ", flush=True)
    await fleet.until(all_serve, RECOVERS_WITHIN_S)


def pause(stream: Received, at: float) -> float:
    """Return the longest silence of this stream after an instant, in seconds."""
    times = [at, *(t for t in stream.times if t > at)]
    return max(after - before for before, after in itertools.pairwise(times))


class Killer:
    """A proxy in front of one server: the planted tokens kill it."""

    def __init__(self, server: VllmServer) -> None:
        self.kills = 0
        self.url = ""
        self._passing: set[asyncio.Task[None]] = set()
        self._server = server

    @asynccontextmanager
    async def listening(self) -> AsyncIterator["Killer"]:
        """Forward connections."""
        async with await asyncio.start_server(self._pass_on, "127.0.0.1", 0) as server:
            self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            yield self
            for task in self._passing:
                task.cancel()
            await asyncio.gather(*self._passing, return_exceptions=True)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        this = asyncio.current_task()
        assert this is not None
        self._passing.add(this)
        this.add_done_callback(self._passing.discard)
        outer: asyncio.StreamWriter | None = None
        with contextlib.suppress(OSError, asyncio.CancelledError):
            inner, outer = await asyncio.open_connection("127.0.0.1", self._server.port)
            await asyncio.gather(
                self._copy(reader, outer, kills=True), self._copy(inner, writer), return_exceptions=True
            )
        for end in (outer, writer):
            if end is not None:
                end.close()

    async def _copy(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, *, kills: bool = False
    ) -> None:
        said = b""
        while data := await source.read(65536):
            said = (said + data.replace(b" ", b""))[-100_000:]
            if kills and PLANTED in said:  # before it is read: so small a model answers immediately
                said = b""
                self.kills += 1
                self._server.kill()
            target.write(data)
            await target.drain()
        target.close()


async def test_a_request_that_kills_its_server_is_refused_after_at_most_two(
    vllms: list[VllmServer], tmp_path_factory: pytest.TempPathFactory
) -> None:
    made = folder()
    assert made is not None
    for server in vllms:
        server.revive()
    async with AsyncExitStack() as stack:
        killers = [await stack.enter_async_context(Killer(server).listening()) for server in vllms]
        upstreams = itertools.chain.from_iterable(("--upstream", killer.url) for killer in killers)
        flags = ("--engine", "openai", "--model", str(made / "tiny"), *upstreams, *FLAGS)
        fleet = await LocalFleet.start(tmp_path_factory.mktemp("poisoned"), *flags).ready()
        try:
            await fleet.until(all_serve, RECOVERS_WITHIN_S)
            api = openai.AsyncOpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0, timeout=120)
            stack.push_async_callback(api.close)
            with pytest.raises(openai.APIStatusError):
                await api.completions.create(model="tiny", prompt=POISON, max_tokens=8)
            fallen = [killer.kills for killer in killers]
            assert fallen == [1, 1]
            for server in vllms:
                server.revive()  # from this thread: processes started by another one die with it
            await fleet.until(all_serve, RECOVERS_WITHIN_S)
            for _ in range(ASKED_AGAIN):
                with pytest.raises(openai.APIStatusError) as refused:
                    await api.completions.create(model="tiny", prompt=POISON, max_tokens=8)
                assert refused.value.status_code == 422 and refused.value.code == "request_poisonous"
            assert [killer.kills for killer in killers] == fallen
            assert (
                (await api.completions.create(model="tiny", prompt=[300, 301], max_tokens=8)).choices[0].text
            )
            told = [event.fact for event in await fleet.events() if isinstance(event.fact, RequestPoisonous)]
            assert len({fact.worker for fact in told}) == 2
        finally:
            assert fleet.stop() == 0, fleet.log.read_text()
