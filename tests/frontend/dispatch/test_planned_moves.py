"""A stream moves with its KV cache although nothing has failed.

The tests cover each cause of a move, that its client notices nothing, and failures of either side at any point.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from frontend_kit import PROFILE, TOKENS, Kit, frontend, text_of
from json_types import Json
from moving_worker import MovingWorker
from scripted_worker import Act, undisturbed
from structlog.testing import capture_logs
from waits import turns, until

from controller.frontend.dispatch.live_request import HELD_MAX
from controller.frontend.errors import unavailable
from controller.frontend.request.state import RequestTerms, stays
from events.decisions import DrainStarted, HealthStatus
from events.intrusion.registration import TPOT_MS_MAX
from events.observations import (
    CanaryFailed,
    DeviceFaulted,
    DeviceRecovered,
    KvLayout,
    MoveRequested,
    RequestAbandoned,
    RequestExposed,
    RequestFailed,
    RequestMigrated,
)

PROMPT = [300 + n for n in range(40)]
COUNT = 60
EXACT = TOKENS.decode(undisturbed(PROMPT, COUNT))
LONG = TOKENS.decode(undisturbed(PROMPT, 400))
KV = KvLayout(layers=2, kv_heads=2, head_size=8, element_bytes=2)
# a transfer is faster than recomputing at any length
SLOW_PREFILL = replace(PROFILE, prefill_tokens_per_s=100.0)
NOW = datetime.now(UTC)


@dataclass
class Pair:
    """A frontend with a source, which streams, and a target."""

    kit: Kit
    source: MovingWorker
    target: MovingWorker
    asked: list[asyncio.Task[Any]] = field(default_factory=list)

    async def stream(self, count: int = COUNT, tier: str = "standard", **ask: Any) -> asyncio.Task[Any]:
        """Start one more stream on the source, and return it when it has output."""
        endpoints = self.kit.director.table.endpoints
        endpoints[("w2", "i1")].begin(requests=100)
        begun = len(self.source.requests)
        ask = {"model": "m", "prompt": PROMPT, "max_tokens": count, **ask}
        task = asyncio.create_task(self.kit.stream(headers={"X-Priority": tier}, **ask))
        self.asked.append(task)
        await until(lambda: len(self.source.requests) > begun)
        stream = self.source.requests[-1].stream
        await until(lambda: stream in self.source.running and self.length(stream) > len(PROMPT) + 3)
        endpoints[("w2", "i1")].end(requests=100)
        return task

    def length(self, stream: int) -> int:
        return len(self.source.running[stream].tokens)

    def drain(self) -> None:
        self.kit.tell(
            DrainStarted(
                worker="w1", instance="i1", number=0, deadline=NOW, reason="operator", decided_at=NOW
            )
        )
        self.kit.health(self.source, HealthStatus.DRAINING, 0.0)

    def request(self, to: str = "") -> None:
        self.kit.tell(MoveRequested(worker="w1", instance="i1", to=to, by="me"))

    def device(self, fault_class: str, weight: float) -> None:
        self.kit.tell(
            DeviceFaulted(
                worker="w1",
                instance="i1",
                device="GPU-1",
                fault_class=fault_class,
                fatal=False,
                weight=weight,
            )
        )

    def moves(self) -> list[RequestMigrated]:
        return self.kit.said(RequestMigrated)

    async def nothing_is_left(self) -> None:
        """Check that no reservation, stream or promise is left anywhere."""
        await until(lambda: not any(w.reserved or w.running for w in (self.source, self.target)))
        for endpoint in self.kit.director.table.endpoints.values():
            assert (endpoint.active, endpoint.kept.requests, endpoint.tokens) == (0, 0, 0)
            assert not self.kit.director.running.at(endpoint)
        for worker in (self.source, self.target):
            assert len(worker.cancelled) == len(set(worker.cancelled))


def text(events: list[Json]) -> str:
    """Return the text of a stream that has ended by itself; its finish reason is not compared."""
    assert events[-1] == {"done": True}, events[-1]
    return text_of(events)


@asynccontextmanager
async def pair(
    step_s: float = 0.004, more: tuple[MovingWorker, ...] = (), within_ms: float = 10_000, **settings: Any
) -> AsyncIterator[Pair]:
    """Two workers. A move has enough time for a busy machine, unless the test is about time."""
    settings["moving"] = {"max_migration_time_ms": within_ms, **settings.get("moving", {})}
    source, target = MovingWorker("w1", step_s=step_s), MovingWorker("w2", step_s=step_s)
    async with frontend(**settings) as kit:
        for worker in (source, target, *more):
            await kit.add(worker, kv=KV, profile=SLOW_PREFILL)
        yield Pair(kit, source, target)


# progress of a move: the source's action, the target's action, and how it is observed
POINTS: dict[str, tuple[Json, Json, Callable[[Pair], object]]] = {
    "reserved": ({}, {"answers": "nothing"}, lambda p: p.target.reserved),
    "shipping": ({"ships": "nothing"}, {}, lambda p: p.source.shipments),
    "stopped": ({"ships": "stops"}, {}, lambda p: not p.source.running[1].goes.is_set()),
    "committed": ({"unsaid": 9}, {}, lambda p: p.target.running),
}


async def under_way(p: Pair, point: str) -> asyncio.Task[Any]:
    """Start a long stream and its move, and return it when the move has reached this point."""
    source, target, there = POINTS[point]
    task = await p.stream(400)
    for worker, ways in ((p.source, source), (p.target, target)):
        for name, way in ways.items():
            setattr(worker, name, way)
    p.request()
    await until(lambda: there(p))
    return task


async def test_b16_a_crash_is_recovered_by_replaying_the_frontends_own_tokens() -> None:
    async with pair() as p:
        task = await p.stream()
        p.source.drop()
        events = await task
        assert (text(events), events[-1]) == (EXACT, {"done": True})
        (fact,) = p.moves()
        assert (fact.method, fact.cause, fact.target) == ("reprefill", "disconnected", "w2")
        (request,) = p.target.requests
        assert request.tokens == PROMPT + undisturbed(PROMPT, fact.tokens) and fact.tokens >= 3
        assert (p.target.reservations, p.source.shipments) == ([], []), "nothing is asked of a dead worker"


async def test_a_move_request_after_its_deadline_moves_no_stream() -> None:
    async with pair() as p:
        task = await p.stream()
        over = datetime.now(UTC) - timedelta(seconds=1)
        p.kit.tell(MoveRequested(worker="w1", instance="i1", until=over, by="me"))
        assert text(await task) == EXACT
        assert p.moves() == [] and p.target.reservations == []


async def test_a_drained_workers_stream_continues_elsewhere_with_its_kv_cache() -> None:
    async with pair() as p:
        task = await p.stream()
        p.drain()
        assert text(await task) == EXACT
        (fact,) = p.moves()
        assert (fact.method, fact.cause, fact.source, fact.target) == ("transfer", "drain", "w1", "w2")
        assert (fact.bytes, fact.blocks, fact.link, fact.refused, fact.exact) == (1000, 2, "shm", "", True)
        assert fact.predicted_ms is not None and fact.predicted_ms > 5
        assert 3 < fact.tokens < COUNT and fact.kind_of_move == "ongoing_request" and fact.attempt == 2
        (reserve,) = p.target.reservations
        assert reserve.request.tokens[: len(PROMPT)] == PROMPT and reserve.request.prompt_tokens == len(
            PROMPT
        )
        said = len(reserve.request.tokens) - len(PROMPT)
        assert reserve.request.sampling.max_tokens == COUNT - said
        assert len(reserve.request.tokens) < reserve.room_tokens <= len(PROMPT) + COUNT
        assert p.source.cancelled == [p.source.requests[0].stream] and p.target.requests == []
        assert p.source.why == ["drained"], (
            "the stream has neither failed nor been abandoned, and the worker may not know of its drain yet"
        )
        await p.nothing_is_left()
        assert p.kit.counted("dynamo_frontend_model_migration_total", "model") == {}


async def test_the_targets_prefix_cache_makes_a_transfer_cheaper() -> None:
    slow = {"links": {"tcp": {"bytes_per_s": 40_960, "efficiency": 1.0}}}  # 50 ms for a block of 2 KiB
    async with pair(moving=slow) as p:
        p.target.cached_tokens = 32
        task = await p.stream()
        p.request()
        assert text(await task) == EXACT
        (fact,) = p.moves()
        assert (fact.method, len(p.source.shipments)) == ("transfer", 1)
        assert fact.predicted_ms is not None and 50 < fact.predicted_ms < 150, "one block or two"


@pytest.mark.parametrize(
    ("tpot_ms", "step_ms"), [((), 0), (((1, 40.0), (8, 60.0)), 40), (((1, TPOT_MS_MAX),), 0)]
)
async def test_a_step_of_the_target_is_part_of_the_prediction(tpot_ms: Any, step_ms: float) -> None:
    async with frontend() as kit:
        p = Pair(kit, MovingWorker("w1", step_s=0.004), MovingWorker("w2", step_s=0.004))
        for worker in (p.source, p.target):
            await kit.add(worker, kv=KV, profile=replace(SLOW_PREFILL, tpot_ms=tpot_ms))
        task = await p.stream()
        p.request()
        assert text(await task) == EXACT
        (fact,) = p.moves()
        assert fact.predicted_ms == pytest.approx(5.1 + step_ms, abs=1), "the setup, and 100 us of latency"


async def test_a_stream_mostly_cached_at_the_target_is_recomputed_there() -> None:
    async with pair() as p:
        p.target.cached_tokens = 48
        task = await p.stream()
        p.drain()
        events = await task
        assert (text_of(events), events[-1]) == (EXACT, {"done": True})
        (fact,) = p.moves()
        assert (fact.method, fact.cause, fact.target, fact.refused) == ("reprefill", "drain", "w2", "")
        assert fact.predicted_ms is not None and fact.predicted_ms < 200, "of 44 tokens at 100 a second"
        (reserve,) = p.target.reservations
        assert p.target.cancelled == [reserve.stream] and p.source.shipments == []
        assert p.source.cancelled == [p.source.requests[0].stream]
        await p.nothing_is_left()


@pytest.mark.parametrize(
    "ask",
    [
        {"stop": ["THE STOP"]},
        {"logprobs": 2},
        {"temperature": 0.8, "seed": 7},
        {"stream_options": {"include_usage": True}},
    ],
)
async def test_the_answer_equals_the_undisturbed_one(ask: Json) -> None:
    def unnamed(events: list[Json]) -> list[Json]:
        return [{k: v for k, v in event.items() if k not in ("id", "created")} for event in events]

    async with pair() as p:
        if "stop" in ask:
            ask = {"stop": [EXACT[len(EXACT) * 3 // 4 :][:9]]}
        plain = unnamed(await p.kit.stream(model="m", prompt=PROMPT, max_tokens=COUNT, **ask))
        task = await p.stream(**ask)
        p.request()
        assert unnamed(await task) == plain
        assert [fact.method for fact in p.moves()] == ["transfer"]
        await p.nothing_is_left()


# --- causes ---------------------------------------------------------------------------------------------------


async def test_a_worker_that_announces_its_leave_is_emptied_before_the_fleet_knows() -> None:
    async with pair() as p:
        task = await p.stream()
        p.source.draining = True
        assert text(await task) == EXACT
        assert [(f.method, f.cause) for f in p.moves()] == [("transfer", "drain")]
        p.drain()  # the same incident, as seen in the fold
        await p.kit.ticks()
        assert len(p.moves()) == 1


@pytest.mark.parametrize(
    ("fault_class", "weight", "cause"),
    [("nvlink_down", 0.0, "device_fault"), ("throttle", 0.3, "throttled"), ("throttle", 0.5, None)],
)
async def test_a_device_moves_streams_once_per_incident(
    fault_class: str, weight: float, cause: str | None
) -> None:
    async with pair() as p:
        task = await p.stream()
        p.device(fault_class, weight)
        assert text(await task) == EXACT
        assert [f.cause for f in p.moves()] == ([cause] if cause else [])
        again = await p.stream()
        p.device(fault_class, max(0.0, weight - 0.1))  # the same incident
        p.kit.tell(DeviceRecovered(worker="w1", instance="i1", device="GPU-1", fault_class="other"))
        assert text(await again) == EXACT
        assert len(p.moves()) == bool(cause) + (weight == 0.5)  # 0.4 starts one
        if not cause:
            return
        p.kit.tell(DeviceRecovered(worker="w1", instance="i1", device="GPU-1", fault_class=fault_class))
        another = await p.stream()
        p.device(fault_class, weight)
        assert text(await another) == EXACT
        assert len(p.moves()) == 2


async def test_a_repaired_worker_keeps_streams_that_have_not_moved_yet() -> None:
    async with pair(step_s=0.02, moving={"transfers_at_once": 1}) as p:
        p.target.answers = "nothing"
        tasks = [await p.stream(), await p.stream()]
        p.device("throttle", 0.3)
        await until(lambda: p.target.reserved)
        p.kit.tell(DeviceRecovered(worker="w1", instance="i1", device="GPU-1", fault_class="throttle"))
        assert [text(await task) for task in tasks] == [EXACT, EXACT]
        assert len(p.target.reservations) == 1 and p.moves() == []
        await p.nothing_is_left()


async def test_a_suspicion_of_slowness_moves_nothing() -> None:
    async with pair() as p:
        task = await p.stream()
        p.kit.health(p.source, HealthStatus.SUSPICIOUS, 0.5, "slow")
        assert text(await task) == EXACT
        assert p.moves() == [] and p.target.reservations == []


async def test_an_operator_moves_running_streams_to_the_named_worker() -> None:
    third = MovingWorker("w3", step_s=0.004)
    async with pair(more=(third,)) as p:
        p.kit.director.table.endpoints[("w3", "i1")].begin(requests=100)
        task = await p.stream()
        p.kit.director.table.endpoints[("w3", "i1")].begin(requests=50)
        p.request(to="w3")
        assert text(await task) == EXACT
        assert [(f.target, f.cause, f.method) for f in p.moves()] == [("w3", "operator", "transfer")]
        assert p.target.reservations == []


async def test_requests_to_move_from_before_this_frontend_served_are_history() -> None:
    async with pair(live=False) as p:
        task = await p.stream()
        p.request()
        p.kit.director.go_live()
        assert text(await task) == EXACT
        assert p.moves() == []


async def test_a_drain_may_also_let_streams_finish() -> None:
    async with pair(moving={"on_drain": "finish"}) as p:
        task = await p.stream()
        p.drain()
        assert text(await task) == EXACT
        assert p.moves() == [] and p.target.reservations == []


@pytest.mark.parametrize(
    ("settings", "ask"), [({"migration_limit": 0}, {}), ({"migration_max_seq_len": 41}, {}), ({}, {"n": 2})]
)
async def test_streams_that_may_not_migrate_are_not_moved_on_purpose(settings: Json, ask: Json) -> None:
    async with pair(**settings) as p:
        task = await p.stream(**ask)
        p.request()
        assert text(await task) == EXACT
        assert p.moves() == [] and p.target.reservations == []


def test_a_used_up_budget_does_not_prevent_a_move_on_purpose() -> None:
    assert not stays(RequestTerms(migration_limit=3), 100)


# --- order, and how many at once --------------------------------------------------------------------------------


@pytest.mark.slow
async def test_streams_move_by_priority_and_only_a_few_at_once() -> None:
    async with pair(moving={"transfers_at_once": 1}, within_ms=1500) as p:
        for tier in ("best_effort", "standard", "premium", "standard"):
            await p.stream(900, tier)
        p.target.answers = "nothing"
        p.request()
        await until(lambda: p.target.reservations)
        await p.kit.ticks()
        assert len(p.target.reservations) == 1
        p.target.answers = "yes"
        for task in p.asked:
            assert text(await task) == TOKENS.decode(undisturbed(PROMPT, 900))
        ids = [r.request for r in p.source.requests]
        order = [ids[2], ids[1], ids[3], ids[0]]
        assert [r.request.request for r in p.target.reservations] == order
        assert sorted(f.method for f in p.moves()) == ["reprefill", "transfer", "transfer", "transfer"]
        await p.nothing_is_left()


async def test_streams_of_one_worker_are_spread_over_the_others() -> None:
    third = MovingWorker("w3", step_s=0.004)
    async with pair(more=(third,)) as p:
        endpoints = p.kit.director.table.endpoints
        endpoints[("w3", "i1")].begin(requests=100)
        tasks = [await p.stream(400) for _ in range(4)]
        endpoints[("w3", "i1")].end(requests=100)
        p.drain()
        for task in tasks:
            assert text(await task) == TOKENS.decode(undisturbed(PROMPT, 400))
        assert sorted(f.target for f in p.moves()) == ["w2", "w2", "w3", "w3"]


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "targets"), [(2, 1), (1, 3)])
async def test_a_group_moves_to_one_group_with_room_and_a_lone_worker_is_spread(
    tp: int, targets: int
) -> None:
    async with frontend() as kit:
        workers = [MovingWorker(f"w{n}", step_s=0.004) for n in range(1, 5)]
        group: Json = {"kv": KV, "profile": SLOW_PREFILL, "tp": tp}
        for worker in workers[:2]:
            await kit.add(worker, **group)
        p = Pair(kit, workers[0], workers[1])
        for _ in range(6):
            await p.stream(400)
        for worker in workers[2:]:
            await kit.add(worker, **group)
        p.device("xid_nvlink", 0.0)
        for task in p.asked:
            assert text(await task) == TOKENS.decode(undisturbed(PROMPT, 400))
        assert {move.method for move in p.moves()} == {"transfer"} and len(p.moves()) == 6
        assert len({move.target for move in p.moves()}) == targets


async def test_a_group_without_a_target_is_recomputed_spread_over_the_others() -> None:
    async with frontend() as kit:
        workers = [MovingWorker(f"w{n}", step_s=0.004) for n in range(1, 5)]
        group: Json = {"kv": KV, "profile": SLOW_PREFILL, "tp": 2}
        for worker in workers[:2]:
            await kit.add(worker, **group)
        p = Pair(kit, workers[0], workers[1])
        for _ in range(6):
            await p.stream(400)
        for worker in workers[2:]:
            await kit.add(worker, **group)
            worker.step_s = 0.3  # until its first token, a request sent there waits to be computed
        workers[0].ships, workers[1].step_s = "no", 0.3
        p.device("xid_nvlink", 0.0)
        await until(lambda: sum(len(worker.requests) for worker in workers[1:]) == 6)
        assert [len(worker.requests) for worker in workers[1:]] == [2, 2, 2]
        for task in p.asked:
            task.cancel()
        await asyncio.gather(*p.asked, return_exceptions=True)


# --- failures -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("cause", ["drain", "operator"])
@pytest.mark.parametrize(
    ("answers", "ships", "why"),
    [
        ("no", "yes", "no room"),
        ("nothing", "yes", "it took longer than 200 ms"),
        ("yes", "no", "the target cannot be reached"),
        ("yes", "nothing", "it took longer than 200 ms"),
        ("yes", "stops", "it took longer than 200 ms"),
    ],
)
async def test_a_refusal_keeps_the_stream_or_recomputes_it(
    cause: str, answers: Any, ships: Any, why: str
) -> None:
    async with pair(step_s=0.01, within_ms=200) as p:
        p.target.answers, p.source.ships = answers, ships
        task = await p.stream()
        p.drain() if cause == "drain" else p.request()
        assert text(await task) == EXACT
        if cause == "drain":
            assert p.moves() == [] and p.target.requests == []
        else:
            (fact,) = p.moves()
            assert (fact.method, fact.cause, fact.refused, fact.bytes) == ("reprefill", "operator", why, 0)
        if ships == "stops":
            assert len(p.source.stays) == 1
        await p.nothing_is_left()
        assert p.kit.said(RequestAbandoned) == []


@pytest.mark.slow
@pytest.mark.parametrize("cause", ["drain", "operator"])
async def test_a_stream_stays_until_another_worker_has_room(cause: str) -> None:
    async with pair(step_s=0.01) as p:
        p.target.answers, p.target.refusal = "no", "overloaded: 9 of 9 KV blocks are in use"
        tasks = [await p.stream(200) for _ in range(3)]
        with capture_logs() as logs:
            p.drain() if cause == "drain" else p.request()
            await until(lambda: len(p.target.reservations) > 6)
        assert [log["why"] for log in logs if log["event"] == "streams_stay"] == [p.target.refusal]
        assert p.moves() == [] and p.target.requests == []
        p.target.answers = "yes"
        for task in tasks:
            assert text_of(await task) == TOKENS.decode(undisturbed(PROMPT, 200))
        assert [(f.method, f.cause, f.refused) for f in p.moves()] == [("transfer", cause, "")] * 3
        await p.nothing_is_left()


async def test_a_refused_transfer_is_reported_when_the_drain_ends_the_stream() -> None:
    async with pair() as p:
        p.target.answers = "no"
        p.source.acts.append(Act(after=30, how="error", error="engine_shutdown: the grace is over"))
        task = await p.stream()
        p.drain()
        assert text(await task) == EXACT
        (fact,) = p.moves()
        assert (fact.method, fact.cause, fact.refused) == ("reprefill", "engine_shutdown", "no room")


@pytest.mark.parametrize("told", [lambda tokens: [*tokens[:-1], 5], lambda tokens: tokens[:-1]])
async def test_a_target_that_commits_other_tokens_is_left_at_once(told: Any) -> None:
    async with pair() as p:
        p.target.told = told
        task = await p.stream()
        p.drain()
        assert text(await task) == EXACT
        assert p.moves() == [] and len(p.source.stays) == 1 and len(p.target.cancelled) == 1
        await p.nothing_is_left()


async def test_a_target_with_more_tokens_than_the_source_has_sent_is_waited_for_and_finally_left() -> None:
    async with pair(within_ms=200) as p:
        task = await p.stream()
        p.target.told = lambda tokens: (
            tokens + undisturbed([*p.target.reservations[0].request.tokens, *tokens], 2)
        )
        p.drain()
        await until(lambda: p.source.stays)
        assert text(await task) == EXACT and p.moves() == []
        await p.nothing_is_left()


@pytest.mark.parametrize("ships", ["yes", "nothing", "stops"])
@pytest.mark.parametrize("side", ["source", "target"])
async def test_either_side_may_be_lost_during_a_transfer(side: str, ships: Any) -> None:
    third = MovingWorker("w3", step_s=0.004)
    async with pair(more=(third,)) as p:
        p.kit.director.table.endpoints[("w3", "i1")].begin(requests=100)
        p.source.ships, p.source.ship_s = ships, 0.01 if ships == "stops" else 60.0
        task = await p.stream()
        p.drain()
        await until(lambda: p.source.shipments)
        await p.kit.ticks()
        p.source.ships = "nothing"  # if it moves to another target then, it keeps decoding meanwhile
        (p.source if side == "source" else p.target).drop()
        assert text(await task) == EXACT
        assert p.kit.said(RequestAbandoned) == []
        if side == "source":
            (fact,) = p.moves()
            assert (fact.method, fact.cause, fact.refused) == (
                "reprefill", "disconnected", "its source failed meanwhile",
            )  # fmt: skip
        p.kit.director.table.endpoints[("w3", "i1")].end(requests=100)
        await p.nothing_is_left()


@pytest.mark.parametrize(
    ("ask", "exact", "methods"),
    [
        ({}, LONG, ["transfer"]),
        # the stop string is among the tokens that the source has not sent
        ({"stop": [LONG[1200:1210]]}, LONG[:1200], []),
        ({"logprobs": 1}, LONG, ["reprefill"]),  # the logprobs of missing tokens are unknown
    ],
)
async def test_missing_tokens_of_a_lost_source_are_known_from_the_target(
    ask: Json, exact: str, methods: list[str]
) -> None:
    async with pair() as p:
        p.source.unsaid = 300
        task = await p.stream(400, **ask)
        p.request()
        await until(lambda: p.target.running)
        p.source.drop()
        assert text(await task) == exact
        assert [fact.method for fact in p.moves()] == methods
        await p.nothing_is_left()
        await until(lambda: [f.reason for f in p.kit.said(RequestFailed)] == ["disconnected"])


async def test_only_a_limited_part_of_the_targets_stream_is_held() -> None:
    async with pair() as p:
        p.source.unsaid, p.target.step_s = 9, 0.0
        task = await p.stream(HELD_MAX + 200)
        p.request()
        assert text(await task) == TOKENS.decode(undisturbed(PROMPT, HELD_MAX + 200))
        (fact,) = p.moves()
        assert (fact.method, fact.refused) == ("reprefill", "the source's last tokens have not arrived")
        await p.nothing_is_left()


@pytest.mark.parametrize("side", ["client", "frontend"])
@pytest.mark.parametrize("point", POINTS)
async def test_a_side_that_leaves_during_a_move_leaks_nothing(point: str, side: str) -> None:
    async with pair() as p:
        task = await under_way(p, point)
        if side == "client":
            task.cancel()
        else:  # its grace period is over
            (exchange,) = p.kit.api.openai.completions
            exchange.finish(unavailable("this frontend is shutting down", "draining", 1))
            p.kit.director.driver.cancel(exchange.answers)
            assert "shutting down" in str((await task)[-1])
        await p.nothing_is_left()
        assert (len(p.source.cancelled), len(p.target.cancelled)) == (1, 1)
        assert p.moves() == []


@pytest.mark.parametrize("ask", [{}, {"stop": ["STOP"]}])
async def test_an_answer_that_ends_during_its_move_needs_no_move(ask: Json) -> None:
    async with pair(step_s=0.012) as p:
        p.source.ships = "nothing"
        exact = EXACT
        if ask:
            ask = {"stop": [EXACT[-12:-4]]}
            exact = EXACT[: EXACT.index(ask["stop"][0])]
        task = await p.stream(**ask)
        p.request()
        events = await task
        assert text(events) == exact and p.moves() == []
        assert len(p.target.cancelled) == 1 and p.source.stays == []
        await p.nothing_is_left()


async def test_a_target_that_fails_right_after_the_switch_leaves_the_budget_unchanged() -> None:
    async with pair(migration_limit=1) as p:
        p.target.acts.append(Act(after=0, how="error", error="overloaded: after all"))
        task = await p.stream()
        p.request()
        assert text(await task) == EXACT
        assert [(f.method, f.cause) for f in p.moves()] == [
            ("transfer", "operator"),
            ("reprefill", "overloaded"),
        ]
        assert [f.attempt for f in p.moves()] == [2, 3]


async def test_a_stream_that_is_faster_to_recompute_is_recomputed_even_on_a_drain() -> None:
    quick = replace(PROFILE, prefill_tokens_per_s=1e6)
    source, target = MovingWorker("w1", step_s=0.004), MovingWorker("w2", step_s=0.004)
    async with frontend() as kit:
        for worker in (source, target):
            await kit.add(worker, kv=KV, profile=quick)
        p = Pair(kit, source, target)
        task = await p.stream()
        p.drain()
        assert text(await task) == EXACT
        (fact,) = p.moves()
        assert (fact.method, fact.cause, fact.refused) == ("reprefill", "drain", "")
        assert fact.predicted_ms is not None and fact.predicted_ms == pytest.approx(1, abs=0.2), "a step"
        await p.nothing_is_left()


@pytest.mark.parametrize("cause", ["drain", "operator"])
async def test_without_a_kv_cache_to_send_a_drained_stream_ends_at_its_worker(cause: str) -> None:
    source, target = MovingWorker("w1", step_s=0.004), MovingWorker("w2", step_s=0.004)
    async with frontend() as kit:
        for worker in (source, target):
            await kit.add(worker)
        p = Pair(kit, source, target)
        task = await p.stream()
        p.drain() if cause == "drain" else p.request()
        assert text(await task) == EXACT
        moves = [] if cause == "drain" else [("reprefill", "its KV cache cannot be sent there")]
        assert [(f.method, f.refused) for f in p.moves()] == moves


async def test_many_streams_are_recomputed_a_few_per_turn_of_the_loop() -> None:
    quick = replace(PROFILE, prefill_tokens_per_s=1e6, max_batch=100)
    source, target = MovingWorker("w1", step_s=0.01), MovingWorker("w2", step_s=0.01)
    async with frontend(router={"mode": "least-loaded"}) as kit:
        for worker in (source, target):
            await kit.add(worker, kv=KV, profile=quick)
        p = Pair(kit, source, target)
        kit.director.table.endpoints[("w2", "i1")].begin(1_000_000, requests=0)
        asked = [asyncio.create_task(kit.complete(PROMPT, COUNT)) for _ in range(40)]
        await until(
            lambda: (
                len(source.running) == 40
                and all(one.state.has_output and one.kv_move is None for one in kit.running("w1"))
            )
        )
        kit.director.table.endpoints[("w2", "i1")].end(1_000_000, requests=0)
        p.drain()
        begun = len(kit.running("w2"))
        await turns()
        assert begun == 8 < len(kit.running("w2"))
        assert {text for text, _ in await asyncio.gather(*asked)} == {EXACT}
        assert [f.method for f in p.moves()] == ["reprefill"] * 40
        await p.nothing_is_left()


async def test_streams_wait_for_their_link_if_together_they_would_take_too_long() -> None:
    async with pair(within_ms=1000, moving={"setup_s": 0.4}) as p:  # three of them at once would take 1.2 s
        p.target.answers = "nothing"
        tasks = [await p.stream(500) for _ in range(4)]
        p.drain()
        await until(lambda: len(p.target.reservations) >= 2)
        await p.kit.ticks()
        assert len(p.target.reservations) == 2
        p.target.answers = "yes"
        for task in tasks:
            assert text(await task) == TOKENS.decode(undisturbed(PROMPT, 500))
        assert len(p.target.reservations) == 4  # the others started after those that had taken too long
        await p.nothing_is_left()


@pytest.mark.parametrize("fails", ["no room", "lost"])
async def test_if_one_target_fails_another_is_tried(fails: str) -> None:
    third = MovingWorker("w3", step_s=0.004)
    async with pair(more=(third,)) as p:
        endpoints = p.kit.director.table.endpoints
        endpoints[("w3", "i1")].begin(requests=100)
        p.target.answers = "no" if fails == "no room" else "nothing"
        task = await p.stream()
        p.drain()
        await until(lambda: p.target.reservations)
        if fails == "lost":
            p.target.drop()
        assert text(await task) == EXACT
        assert [(f.method, f.target, f.refused) for f in p.moves()] == [("transfer", "w3", "")]
        endpoints[("w3", "i1")].end(requests=100)
        await p.nothing_is_left()


# --- trust --------------------------------------------------------------------------------------------------------


def convicted(canary: str = "c") -> CanaryFailed:
    return CanaryFailed(
        worker="w1", instance="i1", canary_key="k", canary=canary, check_type="scheduled", sent_under=9,
        sent_at=datetime.now(UTC), latency_ms=1.0, reason="token_mismatch", confirmed=True, golden="agreed",
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
async def test_nothing_is_accepted_from_a_worker_convicted_during_the_move(point: str) -> None:
    async with pair() as p:
        task = await under_way(p, point)
        p.kit.tell(convicted())
        assert text(await task) == LONG
        assert len(p.source.shipments) == (point != "reserved") and len(p.target.cancelled) == 1
        assert [(f.method, f.cause) for f in p.moves()] == [("reprefill", "unhealthy")]
        await p.nothing_is_left()


async def test_a_source_convicted_after_the_switch_is_blamed_for_the_targets_tokens_too() -> None:
    async with pair() as p:
        task = await p.stream(400)
        p.request()
        await until(lambda: p.moves())
        await p.kit.ticks()
        p.kit.tell(convicted())
        assert text(await task) == TOKENS.decode(undisturbed(PROMPT, 400))
        (fact,) = p.kit.said(RequestExposed)
        assert (fact.worker, fact.first, fact.action) == ("w1", 0, "continue")
        assert fact.last > p.moves()[0].tokens  # including the target's tokens
        assert [(f.method, f.source, f.exact) for f in p.moves()] == [
            ("transfer", "w1", True), ("reprefill", "w2", False),
        ]  # fmt: skip
        assert p.target.requests[0].tokens[: len(PROMPT)] == PROMPT  # recomputed, there or elsewhere
        await p.nothing_is_left()
