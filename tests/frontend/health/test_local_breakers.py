"""The local breakers of a frontend: outcomes, blame, panic and slowness."""

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from frontend_kit import Kit, frontend, joined
from json_types import Json
from scripted_worker import Act, ScriptedWorker
from structlog.testing import capture_logs
from waits import until

from controller.frontend.health.local_breakers import MOVES_MAX, AnswerDraw, LocalBreakers
from controller.frontend.settings import FactSettings, LocalBreakerSettings
from controller.router.endpoints import ConnectedWorkers, Endpoint, Key
from events.decisions import BreakerClosed, HealthStatus
from events.fact import Observation
from events.observations import (
    FrontendBreakersMoved,
    PanicBegan,
    PanicEnded,
    RequestFailed,
    RequestsServed,
    WorkerSlow,
    WorkerSlowCleared,
)
from events.wire import Load, Sampling

PROMPT = [300, 301, 302]
A, B, C = ("a", "i1"), ("b", "i1"), ("c", "i1")


class Bench(ConnectedWorkers):
    """Outcomes with a clock controlled by the test."""

    def __init__(self, **facts: object) -> None:
        self.now = 100.0
        self._sent = Counter[Key]()
        self.facts: list[Observation] = []
        local = LocalBreakerSettings(failures_max=3, wait_s=5, wait_s_max=20, trial_timeout_s=2)
        self.running = {"a": 1, "b": 1, "c": 1}
        self.it = LocalBreakers("f", local, FactSettings(**facts), self.facts.append, lambda: self.now, self)

    def load(self, worker: str) -> Load:
        return Load(running=self.running[worker])

    def routed(self, key: Key) -> None:
        """Send a request: later calls of `served` and `failed` are about a request sent now."""
        self._sent[key] = self.it.routed(key)

    def served(
        self, key: Key, tokens: int, ttft_s: float, itl_s: float, routed_under: int, **more: Any
    ) -> None:
        self.it.served(key, tokens, ttft_s, itl_s, routed_under, self._sent[key], **more)

    def failed(self, key: Key, reason: str, routed_under: int, **more: Any) -> None:
        self.it.failed(key, reason, routed_under, self._sent[key], **more)

    def tick(self, seconds: float = 0.1, service: tuple[tuple[str, str], ...] = (A, B)) -> None:
        self.now += seconds
        self.it.tick(service)

    def said(self, kind: type[Observation]) -> list[Any]:
        return [fact for fact in self.facts if isinstance(fact, kind)]

    def allows(self, name: str) -> bool:
        return self.it.allowed(Endpoint(joined(ScriptedWorker(name))))


def test_three_consecutive_failures_open_the_breaker_and_one_request_is_the_trial() -> None:
    bench = Bench()
    for _ in range(3):
        bench.routed(A)
        bench.failed(A, "engine_error", 7)
    bench.tick()
    assert (bench.allows("a"), bench.allows("b")) == (False, True)
    assert [f.failures_in_a_row for f in bench.said(RequestFailed)] == [1, 2, 3]
    assert {f.routed_under for f in bench.said(RequestFailed)} == {7}
    bench.tick(5.1)
    assert bench.allows("a")
    bench.routed(A)
    assert not bench.allows("a")  # b02: one trial, not two
    bench.served(A, 4, 0.1, 0.01, 7)
    bench.tick()
    assert bench.allows("a")


def test_b01_success_resets_the_count() -> None:
    bench = Bench()
    for _ in range(10):
        bench.routed(A)
        bench.failed(A, "engine_error", 0)
        bench.failed(A, "engine_error", 0)
        bench.served(A, 4, 0.1, 0.01, 0)
        bench.tick()
        assert bench.allows("a")
    assert max(f.failures_in_a_row for f in bench.said(RequestFailed)) == 2


def test_a_straggler_is_not_a_trial() -> None:
    """A request from before the breaker opened ends while the trial is under way."""
    bench = Bench()
    early = bench.it.routed(A)
    for _ in range(3):
        bench.it.failed(A, "engine_error", 0, bench.it.routed(A))
    bench.tick(5.1)
    assert bench.allows("a")
    trial = bench.it.routed(A)
    bench.it.served(A, 4, 0.1, 0.01, 0, early)
    assert not bench.allows("a")
    bench.it.served(A, 4, 0.1, 0.01, 0, trial)
    assert bench.allows("a")


def test_outcomes_of_requests_sent_before_the_fleet_cleared_a_worker_are_void() -> None:
    bench = Bench()
    early = [bench.it.routed(A) for _ in range(3)]
    bench.it.reset(A)
    for sent in early:
        bench.it.failed(A, "engine_error", 0, sent)
    assert bench.allows("a")


def test_b03_a_trial_without_an_outcome_is_reclaimed() -> None:
    bench = Bench()
    for _ in range(3):
        bench.failed(A, "engine_error", 0)
    bench.tick()
    bench.tick(5.1)
    bench.routed(A)
    bench.tick(2.1)  # no outcome by the deadline: open again, for longer
    assert not bench.allows("a")
    bench.tick(10.1)
    assert bench.allows("a")


def test_every_move_is_reported_once_a_second_in_order() -> None:
    bench = Bench()
    for key in (A, B):
        for _ in range(3):
            bench.failed(key, "engine_error", 0)
    assert not bench.said(FrontendBreakersMoved)  # at most one event a second
    bench.tick(1.0)
    (first,) = bench.said(FrontendBreakersMoved)
    assert [(m.worker, m.instance, m.position, m.reason) for m in first.moves] == [
        ("a", "i1", "open", "requests: engine_error"),
        ("b", "i1", "open", "requests: engine_error"),
    ]
    assert (first.frontend, first.dropped, first.moves[0].ago_ms) == ("f", 0, 1000.0)
    bench.tick(1.0)
    assert len(bench.said(FrontendBreakersMoved)) == 1  # no move, no event
    bench.it.reset(B)
    bench.it.reset(B)  # it is closed already
    bench.tick(5.0)
    bench.routed(A)
    bench.served(A, 4, 0.1, 0.01, 0)
    bench.it.report()  # when the process ends
    later = [move for fact in bench.said(FrontendBreakersMoved)[1:] for move in fact.moves]
    assert [(m.worker, m.position, m.reason) for m in later] == [
        ("b", "closed", "fleet_breaker_closed"),
        ("a", "half_open", ""),
        ("a", "closed", ""),
    ]


def test_moves_above_the_limit_are_counted() -> None:
    bench = Bench()
    for number in range(MOVES_MAX + 7):
        for _ in range(3):
            bench.failed((f"w{number}", "i1"), "engine_error", 0)
    bench.tick(1.0)
    (fact,) = bench.said(FrontendBreakersMoved)
    assert (len(fact.moves), fact.dropped) == (MOVES_MAX, 7)


async def test_a_frontend_publishes_the_moves_of_its_breakers() -> None:
    bad = ScriptedWorker("bad", always=Act(after=0, how="error"))
    async with frontend(bad, breaker=LocalBreakerSettings(failures_max=1), migration_limit=0) as kit:
        await kit.post("/v1/completions", model="m", prompt=PROMPT, max_tokens=4)
        await until(lambda: bool(kit.said(FrontendBreakersMoved)))
        moves = [move for fact in kit.said(FrontendBreakersMoved) for move in fact.moves]
        assert (moves[0].worker, moves[0].position) == ("bad", "open")


def test_a_worker_without_a_trial_request_does_not_fail() -> None:
    bench = Bench()
    for _ in range(3):
        bench.routed(A)
        bench.failed(A, "engine_error", 7)
    bench.tick(5.1)
    for _ in range(20):
        bench.tick(1.0)
        assert bench.it.positions()[A] == "half_open"
    bench.routed(A)
    bench.tick(1.0)  # its time starts only now
    assert bench.it.positions()[A] == "half_open"
    bench.served(A, 4, 0.1, 0.01, 7)
    assert bench.it.positions()[A] == "closed"


def test_a_broken_connection_is_one_failure_however_many_streams_it_carried() -> None:
    bench = Bench()
    for _ in range(64):
        bench.failed(A, "disconnected", 0)
    bench.tick()
    assert [f.failures_in_a_row for f in bench.said(RequestFailed)] == [1]
    assert bench.allows("a")


def test_simultaneous_failures_of_all_workers_are_our_own_fault() -> None:
    bench = Bench(failures_per_s_max=100)
    with capture_logs() as logs:
        for _ in range(5):
            bench.failed(A, "stalled", 0)
            bench.failed(B, "disconnected", 0)
            bench.tick()
    assert bench.facts == []
    assert bench.allows("a") and bench.allows("b")
    assert [line["event"] for line in logs] == ["every_connection_failed"] * 5


def test_reports_of_failures_are_limited_and_carry_the_count() -> None:
    bench = Bench(failures_per_s_max=2)
    for _ in range(50):
        bench.failed(A, "engine_error", 0)
    bench.tick(1.0)
    bench.failed(A, "engine_error", 0)
    assert [f.failures_in_a_row for f in bench.said(RequestFailed)] == [1, 2, 51]


def test_served_requests_are_reported_in_windows() -> None:
    bench = Bench(window_s=5.0)
    for under in (9, 7, 8):
        bench.served(A, 10, 0.1, 0.02, under)
    bench.tick(5.0)
    (fact,) = bench.said(RequestsServed)
    assert (fact.count, fact.tokens, fact.routed_under) == (3, 30, 7)
    assert (round(fact.ttft_ms), round(fact.itl_ms), fact.window_s) == (100, 20, 5.0)
    bench.tick(5.0)
    assert len(bench.said(RequestsServed)) == 1  # nothing served, nothing reported


def test_a_worker_slower_than_three_times_its_peers_is_reported() -> None:
    bench = Bench(window_s=1.0, slow_tokens_min=1)
    for speed in (0.09, 0.09, 0.02):
        bench.served(A, 10, 0.1, speed, 0)
        bench.served(B, 10, 0.1, 0.02, 0)
        bench.served(C, 10, 0.1, 0.021, 0)
        bench.tick(1.0)
    slow, cleared = bench.said(WorkerSlow), bench.said(WorkerSlowCleared)
    assert [(f.worker, round(f.latency_ms)) for f in slow] == [("a", 90), ("a", 90)]
    assert [f.worker for f in cleared] == ["a"]


def test_a_large_model_is_not_slow_compared_to_small_ones() -> None:
    bench = Bench(window_s=1.0, slow_tokens_min=1)
    for key, model, speed in ((A, "large", 0.09), (B, "small", 0.01), (C, "small", 0.01)):
        bench.served(key, 10, 0.1, speed, 0, model=model)
    bench.tick(1.0)
    assert bench.said(WorkerSlow) == []


def test_small_differences_at_full_speed_are_not_slowness() -> None:
    bench = Bench(window_s=1.0, slow_tokens_min=1)
    bench.served(A, 10, 0.1, 0.0009, 0)
    bench.served(B, 10, 0.1, 0.0001, 0)
    bench.tick(1.0)
    assert bench.said(WorkerSlow) == []


async def ask_until(kit: Kit, condition: Callable[[], object]) -> None:
    """Send one request after another. The chosen worker also depends on the workers' last reported load."""
    for _ in range(500):
        if condition():
            return
        await kit.complete(PROMPT, 4)
    pytest.fail("not within 500 requests")


async def test_a_failing_worker_is_avoided_until_the_fleet_clears_it() -> None:
    bad = ScriptedWorker("w1", always=Act(after=0, how="error"))
    good = [ScriptedWorker("w2"), ScriptedWorker("w3")]
    async with frontend(bad, *good, breaker=LocalBreakerSettings(wait_s=60)) as kit:
        await ask_until(kit, lambda: len(bad.requests) == 3)
        for _ in range(20):  # then its breaker is open
            await kit.complete(PROMPT, 4)
        assert len(bad.requests) == 3
        closed = BreakerClosed(worker="w1", instance="i1", decided_at=datetime.now(UTC), cause="test")
        kit.tell(closed)
        await ask_until(kit, lambda: len(bad.requests) > 3)


async def on_trial(kit: Kit, worker: ScriptedWorker) -> tuple[str, str]:
    """Bring a worker's breaker to half-open; the next request is its trial."""
    key = (worker.name, worker.instance)
    kit.director.table.endpoints[("w2", "i1")].begin(requests=50)
    for _ in range(3):
        worker.acts.append(Act(after=1, how="error"))
        await kit.complete(PROMPT, 3)
    await until(lambda: kit.director.breakers.positions()[key] == "half_open")
    return key


QUICK = LocalBreakerSettings(wait_s=0.1, trial_timeout_s=0.4, panic_share=0.0)


async def test_an_answer_may_be_longer_than_a_trial() -> None:
    worker = ScriptedWorker("w1", step_s=0.05)
    async with frontend(worker, ScriptedWorker("w2"), breaker=QUICK) as kit:
        key = await on_trial(kit, worker)
        asking = asyncio.create_task(kit.complete(PROMPT, 400))
        await until(lambda: kit.director.breakers.positions()[key] == "closed", 15)  # of 20 s
        await kit.ticks(17)  # twice the time limit of a trial
        assert not asking.done()
        worker.step_s = 0.0
        await asking
        assert (len(worker.requests), kit.director.breakers.positions()[key]) == (4, "closed")


@pytest.mark.parametrize(("tokens", "position"), [(3, "closed"), (0, "half_open")])
async def test_a_trial_without_a_client_is_no_failure(tokens: int, position: str) -> None:
    worker = ScriptedWorker("w1", step_s=0.01)
    breaker = LocalBreakerSettings(wait_s=0.1, trial_timeout_s=30, panic_share=0.0)
    async with frontend(worker, ScriptedWorker("w2"), breaker=breaker) as kit:
        key = await on_trial(kit, worker)
        worker.acts.append(Act(after=tokens, how="hold", hold=asyncio.Event()))
        endpoint = kit.director.table.endpoints[key]
        asking = asyncio.create_task(kit.complete(PROMPT, 40))
        await until(
            lambda: any(
                len(generation.accepted) == tokens for generation in kit.director.running.at(endpoint)
            )
        )
        assert not kit.director.breakers.allowed(endpoint)
        asking.cancel()
        await until(lambda: not kit.director.running.at(endpoint))
        assert kit.director.breakers.positions()[key] == position
        assert kit.director.breakers.allowed(endpoint)


@pytest.mark.parametrize("error", ["invalid_request: top_k", "overloaded", "engine_shutdown", "not_serving"])
async def test_a_trial_that_ends_through_no_fault_of_the_worker_is_no_failure(error: str) -> None:
    worker = ScriptedWorker("w1")
    breaker = LocalBreakerSettings(wait_s=0.1, trial_timeout_s=0.4, panic_share=0.0)
    async with frontend(worker, ScriptedWorker("w2"), breaker=breaker) as kit:
        key = await on_trial(kit, worker)
        worker.acts.append(Act(after=0, how="error", error=error))
        await kit.post("/v1/completions", model="m", prompt=PROMPT, max_tokens=4)
        assert len(worker.requests) == 4
        assert kit.director.breakers.allowed(
            kit.director.table.endpoints[key]
        )  # the next request is the trial
        await kit.ticks(13)  # longer than the time limit of a trial
        assert kit.director.breakers.positions()[key] == "half_open"
        await kit.complete(PROMPT, 4)
        assert (len(worker.requests), kit.director.breakers.positions()[key]) == (5, "closed")


async def test_panic_ignores_local_breakers_and_is_reported() -> None:
    errors = deque([Act(after=0, how="error")] * 12)
    workers = [ScriptedWorker(n, acts=errors.copy()) for n in ("w1", "w2", "w3")]
    breakers = LocalBreakerSettings(wait_s=60)
    async with frontend(*workers, breaker=breakers, migration_limit=0, router={"mode": "round-robin"}) as kit:
        for n in range(12):
            await kit.post("/v1/completions", model="m", prompt=[*PROMPT, 300 + n], max_tokens=4)
            kit.director.tick()
        (fact,) = kit.said(PanicBegan)
        assert (fact.model, fact.routable_share < 0.5) == ("m", True)
        assert list(kit.director.breakers.positions().values()).count("open") >= 2
        before = [len(worker.requests) for worker in workers]
        for n in range(6):
            await kit.post("/v1/completions", model="m", prompt=[*PROMPT, 400 + n], max_tokens=4)
        assert [len(w.requests) - n for w, n in zip(workers, before, strict=True)] == [2, 2, 2]
        for worker in workers:
            worker.acts.clear()
        for worker in workers:
            kit.tell(
                BreakerClosed(
                    worker=worker.name,
                    instance="i1",
                    decided_at=datetime.now(UTC),
                    cause="test",
                )
            )
        await until(lambda: kit.said(PanicEnded))


async def test_breakers_are_ignored_if_they_leave_no_reachable_worker() -> None:
    """Unreachable workers keep their weight: half of it seemed routable, and each new request was refused."""
    errors = deque([Act(after=0, how="error")] * 3)
    broken = [ScriptedWorker(name, acts=errors.copy()) for name in ("w1", "w2")]
    away = [ScriptedWorker(name) for name in ("w3", "w4")]
    breakers = LocalBreakerSettings(wait_s=60)
    routed: Json = {"migration_limit": 0, "router": {"mode": "round-robin"}}
    async with frontend(*broken, *away, breaker=breakers, **routed) as kit:
        for worker in away:
            await worker.stop()
        await until(lambda: not any(kit.plane.reachable(w.name, w.instance) for w in away))
        for n in range(6):
            await kit.post("/v1/completions", model="m", prompt=[*PROMPT, 300 + n], max_tokens=4)
        assert [*kit.director.breakers.positions().values()].count("open") == 2
        await kit.complete([*PROMPT, 400], 4)
        (fact,) = kit.said(PanicBegan)
        assert (fact.model, fact.routable_share) == ("m", 0.0)


async def test_panic_is_reported_whatever_removed_the_weight_and_returns_no_worker_to_service() -> None:
    workers = [ScriptedWorker(name) for name in ("w1", "w2", "w3")]
    async with frontend(*workers) as kit:
        assert not kit.said(PanicBegan)  # a starting fleet is not in panic
        kit.health(workers[0], HealthStatus.UNHEALTHY, 0.0)
        assert not kit.said(PanicBegan)
        kit.health(workers[1], HealthStatus.UNHEALTHY, 0.0, "token_mismatch")
        (began,) = kit.said(PanicBegan)
        assert (began.model, began.routable_share) == ("m", pytest.approx(1 / 3))
        for _ in range(6):
            await kit.complete(PROMPT, 2)
        assert [len(worker.requests) for worker in workers] == [0, 0, 6]
        kit.health(workers[1], HealthStatus.HEALTHY, 0.25)
        assert not kit.said(PanicEnded)
        kit.health(workers[1], HealthStatus.HEALTHY, 0.5)
        (ended,) = kit.said(PanicEnded)
        assert (ended.model, ended.routable_share) == ("m", 0.5)


async def test_a_worker_that_leaves_on_purpose_or_is_dead_is_no_reason_for_panic() -> None:
    workers = [ScriptedWorker(name) for name in ("w1", "w2", "w3")]
    async with frontend(*workers) as kit:
        kit.health(workers[0], HealthStatus.DRAINING, 0.0)
        kit.health(workers[1], HealthStatus.DEAD, 0.0)
        kit.health(workers[2], HealthStatus.DEAD, 0.0)
        assert not kit.said(PanicBegan)


async def test_a_trial_does_not_end_and_restart_the_panic() -> None:
    worker = ScriptedWorker("w1", acts=deque([Act(after=0, how="error")] * 40))
    breaker = LocalBreakerSettings(wait_s=0.05, wait_s_max=0.05)
    async with frontend(worker, breaker=breaker, migration_limit=0) as kit:
        key = (worker.name, worker.instance)
        for n in range(3):
            await kit.post("/v1/completions", model="m", prompt=[*PROMPT, 300 + n], max_tokens=4)
        for n in range(3):
            await until(lambda: kit.director.breakers.positions()[key] == "half_open")
            await kit.post("/v1/completions", model="m", prompt=[*PROMPT, 400 + n], max_tokens=4)
        assert (len(kit.said(PanicBegan)), kit.said(PanicEnded)) == (1, [])
        worker.acts.clear()
        await until(lambda: kit.director.breakers.positions()[key] == "half_open")
        await kit.complete(PROMPT, 4)
        await until(lambda: kit.said(PanicEnded))
        assert (len(kit.said(PanicBegan)), len(kit.said(PanicEnded))) == (1, 1)


def test_reports_carry_the_most_common_sampling_parameters_and_the_share_of_unlikely_tokens() -> None:
    bench = Bench(window_s=5.0)
    for temperature in (0.7, 0.7, 0.2):
        drawn = AnswerDraw(Sampling(max_tokens=10, temperature=temperature, top_p=0.9), 5, 1)
        bench.served(A, 10, 0.1, 0.02, 1, drawn=drawn)
    bench.tick(5.0)
    (fact,) = bench.said(RequestsServed)
    assert (fact.weighed, fact.unlikely, fact.sampling) == (15, 3, (0.7, 0.9, 0))


async def test_only_tokens_with_logprobs_are_counted() -> None:
    async with frontend(ScriptedWorker("a"), facts=FactSettings(window_s=0.2)) as kit:
        await kit.complete(PROMPT, 4)
        await kit.complete(PROMPT, 4, logprobs=1)
        await until(lambda: sum(fact.count for fact in kit.said(RequestsServed)) == 2)
        assert sum(fact.weighed for fact in kit.said(RequestsServed)) == 4


def stalls(bench: Bench, count: int = 1, key: tuple[str, str] = A) -> None:
    """Let this many streams of a worker stall in one tick while the worker runs."""
    for _ in range(count):
        bench.routed(key)
        bench.failed(key, "stalled", 7, one_stream=True)
    bench.tick()


def served(bench: Bench, count: int, key: tuple[str, str] = A) -> None:
    for _ in range(count):
        bench.routed(key)
        bench.served(key, 4, 0.1, 0.01, 7)
    bench.tick()


def test_a_worker_with_many_stalling_streams_is_taken_out_although_others_are_served() -> None:
    bench = Bench()
    for _ in range(2):
        stalls(bench)
        served(bench, 5)
        assert bench.allows("a")
    stalls(bench)
    served(bench, 5)
    stalls(bench)
    assert not bench.allows("a") and bench.allows("b")
    assert [f.failures_in_a_row for f in bench.said(RequestFailed)] == [1, 1, 2, 3], (
        "other failures open it at the same count"
    )


def test_an_occasional_stall_counts_against_no_worker() -> None:
    bench = Bench()
    for _ in range(200):
        served(bench, 25)
        stalls(bench)
        assert bench.allows("a")


def test_simultaneous_stalls_at_every_worker_count_against_none() -> None:
    bench = Bench()
    for _ in range(10):
        for key in (A, B):
            bench.routed(key)
            bench.failed(key, "stalled", 7, one_stream=True)
        bench.tick()
    assert bench.allows("a") and bench.allows("b")
    assert not bench.said(RequestFailed)


def slow_windows(bench: Bench, itl_ms: dict[tuple[str, str], float]) -> list[str]:
    """Serve two windows at these speeds. Return the workers that were reported as slow."""
    for _ in range(2):
        for key, itl in itl_ms.items():
            for _ in range(8):
                bench.routed(key)
                bench.served(key, 10, 0.1, itl / 1000, 7, model="m")
        bench.tick(6, (A, B, C))
    return sorted({fact.worker for fact in bench.said(WorkerSlow)})


def test_a_worker_with_a_larger_batch_is_not_slow_compared_to_idle_peers() -> None:
    times = {A: 70.0, B: 20.0, C: 20.0}
    bench = Bench(slow_tokens_min=8)
    bench.running["a"] = 32
    assert slow_windows(bench, times) == []
    bench = Bench(slow_tokens_min=8)
    assert slow_windows(bench, times) == ["a"], "with the same batch it is slow"
    bench = Bench(slow_tokens_min=8)
    bench.running["a"] = 4
    assert slow_windows(bench, {A: 200.0, B: 20.0, C: 20.0}) == ["a"], (
        "a batch of four does not take ten times as long"
    )
