"""Traffic reports of each minute: arrived and rejected requests, and late answers."""

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

import pytest
from frontend_kit import PROFILE, Kit, frontend, joined
from hypothesis import given
from hypothesis import strategies as st
from json_types import Json
from scripted_worker import Act, ScriptedWorker
from waits import until

from controller.frontend.metrics import FrontendMetrics
from controller.frontend.request_metrics import RequestMetrics
from controller.frontend.scheduling.traffic import FORGOTTEN_AFTER, MISSED_MAX, TrafficReporter
from controller.router.endpoints import EndpointTable
from events.fact import Observation
from events.observations import RequestsRejected, TrafficReported

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)


class ReportedTraffic:
    """A frontend's reports, with time driven by the test."""

    def __init__(self, *models: str) -> None:
        self.at, self.facts = NOON, list[Observation]()
        self.table, self.metrics = EndpointTable(), RequestMetrics(FrontendMetrics())
        self.serve(*models)
        self.reporter = TrafficReporter("f0", self.facts.append, self, self.table, self.metrics)

    def serve(self, *models: str) -> None:
        workers = [joined(ScriptedWorker(f"w-{model}"), model=model, url="tcp://h:1") for model in models]
        self.table.set_static(workers)

    def now(self) -> datetime:
        return self.at

    def monotonic(self) -> float:
        return self.at.timestamp()

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("no caller waits here")

    def came(self, *prompts: int, model: str = "m") -> None:
        for prompt in prompts:
            self.metrics.of(model).began(prompt)

    def answered(
        self, tokens: int, ttft_s: float = 0.1, tpot_s: float = 0.01, by_s: float | None = None
    ) -> None:
        self.metrics.of("m").traffic.ended(10, tokens, ttft_s, tpot_s, by_s)

    def until(self, at: datetime, step: timedelta = timedelta(seconds=7)) -> None:
        """Let time pass, with the frontend's ticks."""
        while self.at < at:
            self.at = min(at, self.at + step)
            self.reporter.tick()

    def said(self, model: str = "m") -> list[TrafficReported]:
        return [fact for fact in self.facts if isinstance(fact, TrafficReported) and fact.model == model]


def counts(facts: Iterable[TrafficReported]) -> list[tuple[int, int, int]]:
    """Return for each report: number of requests, minutes after noon, and whether it is the last."""
    return [(int((f.minute - NOON) / MINUTE), f.requests, int(f.last)) for f in facts]


def test_each_minute_is_reported_even_without_traffic() -> None:
    reported = ReportedTraffic("m")
    reported.came(3, 4)
    reported.until(NOON + 3.5 * MINUTE)
    assert counts(reported.said()) == [(0, 2, 0), (1, 0, 0), (2, 0, 0)]
    first = reported.said()[0]
    assert (first.prompt_tokens, first.prompt_tokens_squared) == (7, 25)


def test_the_end_of_a_process_reports_the_current_minute() -> None:
    reported = ReportedTraffic("m", "other")
    reported.until(NOON + 1.5 * MINUTE)
    reported.came(5)
    reported.reporter.stop()
    assert counts(reported.said()) == [(0, 0, 0), (1, 1, 1)]
    assert counts(reported.said("other")) == [(0, 0, 0), (1, 0, 1)]


def test_a_process_that_was_stopped_reports_the_minutes_it_missed() -> None:
    reported = ReportedTraffic("m")
    reported.came(5)
    reported.until(NOON + 4.5 * MINUTE, step=4.5 * MINUTE)
    assert counts(reported.said()) == [(0, 1, 0), (1, 0, 0), (2, 0, 0), (3, 0, 0)]
    reported.until(NOON + 100 * MINUTE, step=timedelta(days=1))
    assert len(reported.said()) == 4 + 1 + MISSED_MAX


def test_no_minute_is_reported_twice_if_the_clock_is_set_back() -> None:
    reported = ReportedTraffic("m")
    reported.until(NOON + 5.5 * MINUTE)
    reported.at = NOON + 2 * MINUTE
    reported.came(5)
    reported.until(NOON + 7 * MINUTE)
    minutes = [minute for minute, _, _ in counts(reported.said())]
    assert minutes == sorted(set(minutes)) and sum(fact.requests for fact in reported.said()) == 1


def test_a_model_without_workers_or_requests_is_dropped_after_a_while() -> None:
    reported = ReportedTraffic("m", "other")
    reported.until(NOON + 1.5 * MINUTE)
    reported.serve("other")
    reported.until(NOON + 30.5 * MINUTE)
    assert counts(reported.said())[-1] == (FORGOTTEN_AFTER, 0, 1)
    assert len(reported.said("other")) == 30


def test_rejected_requests_count_if_one_more_worker_would_have_served_them() -> None:
    reported = ReportedTraffic("m")
    for reason, count in (("queue_full", 2), ("capacity_shed", 3), ("draining", 5)):
        reported.reporter.rejected(
            RequestsRejected(frontend="f0", model="m", count=count, reason=reason, tier="standard")
        )
    reported.until(NOON + 1.1 * MINUTE)
    assert [fact.rejected for fact in reported.said()] == [5]
    assert len([fact for fact in reported.facts if isinstance(fact, RequestsRejected)]) == 3


@pytest.mark.parametrize(
    ("answer", "late"),
    [
        ({}, 0),
        ({"ttft_s": 0.6}, 1),
        ({"tpot_s": 0.04}, 1),
        ({"ttft_s": 0.6, "tpot_s": 0.04}, 1),
        ({"ttft_s": 0.6, "by_s": 0.7}, 0),
        ({"ttft_s": 0.3, "by_s": 0.2}, 1),
    ],
)
def test_an_answer_is_late_by_the_models_objective_or_its_own_deadline(answer: Json, late: int) -> None:
    reported = ReportedTraffic("m")
    reported.until(NOON + timedelta(seconds=10))
    reported.answered(20, **answer)
    reported.until(NOON + 1.1 * MINUTE)
    (fact,) = reported.said()
    assert (fact.output_tokens, fact.late) == (20, late)


def test_a_long_prompt_may_take_twice_as_long_as_reading_it_takes() -> None:
    reported = ReportedTraffic("m")
    reported.until(NOON + timedelta(seconds=10))
    prompt = int(PROFILE.prefill_tokens_per_s)  # takes a second
    reported.metrics.of("m").traffic.ended(prompt, 1, 1.9, 0.0, None)
    reported.metrics.of("m").traffic.ended(prompt, 1, 2.1, 0.0, None)
    reported.until(NOON + 1.1 * MINUTE)
    assert [fact.late for fact in reported.said()] == [1]


def test_an_objective_that_no_worker_could_meet_makes_no_answer_late() -> None:
    reported = ReportedTraffic()
    slow = PROFILE.__class__(
        kv_blocks=100, block_tokens=16, max_batch=8, prefill_tokens_per_s=1e5, tpot_ms=((1, 90.0),)
    )
    reported.table.set_static([joined(ScriptedWorker("w"), url="tcp://h:1", profile=slow)])
    reported.until(NOON + timedelta(seconds=10))
    reported.answered(20, tpot_s=0.09)
    reported.until(NOON + 1.1 * MINUTE)
    assert [fact.late for fact in reported.said()] == [0]


@given(st.lists(st.tuples(st.floats(0, 200), st.integers(1, 50)), max_size=30))
def test_no_request_is_lost_or_reported_twice(came: list[tuple[float, int]]) -> None:
    reported = ReportedTraffic("m")
    for seconds, prompt in came:
        reported.until(reported.at + timedelta(seconds=seconds))
        reported.came(prompt)
    reported.reporter.stop()
    said = reported.said()
    assert sum(fact.requests for fact in said) == len(came)
    assert sum(fact.prompt_tokens for fact in said) == sum(prompt for _, prompt in came)
    minutes = [fact.minute for fact in said]
    assert minutes == sorted(set(minutes))


# --- a whole frontend -------------------------------------------------------------------------------------------------


async def ask(kit: Kit, **more: object) -> int:
    body: Json = {
        "model": "m",
        "prompt": [300, 301, 302],
        "max_tokens": 12,
        "ignore_eos": True,
    } | more
    return (await kit.post("/v1/completions", **body))[0]


def last_report(kit: Kit) -> TrafficReported:
    """Let a frontend report the current minute."""
    kit.director.report()
    (fact,) = kit.said(TrafficReported)[-1:]
    return fact  # type: ignore[no-any-return]


async def test_a_frontend_counts_requests_and_the_tokens_of_their_answers() -> None:
    async with frontend(ScriptedWorker("w1")) as kit:
        assert await ask(kit) == 200 and await ask(kit, prompt=[300] * 5, max_tokens=3) == 200
        fact = last_report(kit)
        assert (fact.requests, fact.prompt_tokens, fact.prompt_tokens_squared) == (2, 8, 34)
        assert (fact.output_tokens, fact.rejected, fact.last) == (15, 0, True)


async def test_a_request_that_moves_counts_once() -> None:
    first, other = ScriptedWorker("w1"), ScriptedWorker("w2")
    first.acts.append(Act(after=4, how="error", error="engine_shutdown"))
    async with frontend(first, other) as kit:
        statuses = [await ask(kit) for _ in range(2)]
        fact = last_report(kit)
        assert statuses == [200, 200] and (fact.requests, fact.output_tokens) == (2, 24)


async def test_a_request_refused_for_lack_of_room_does_not_count_as_sent() -> None:
    worker = ScriptedWorker("w1", kv_used=99)
    async with frontend(worker, admission_control="token-capacity") as kit:
        await until(lambda: (load := kit.plane.load("w1")) is not None and load.kv_used == 99)
        await ask(kit)
        before = last_report(kit)
        assert before.rejected == 1
        await ask(kit)
        after = last_report(kit)
        assert (after.requests, after.rejected, after.prompt_tokens) == (0, 1, 0)
