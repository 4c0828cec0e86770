"""The console's picture of a fleet, its models, incidents and events."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from console_kit import applied
from fleet_history import EPOCH, History

from controller.console.memory import ENDED_MAX, EVENTS_MAX, LANES_MAX, EndedIncident, FlowMemory
from controller.console.picture import FleetMoment, FleetPicture
from controller.console.rows import changes
from controller.deciders.capacity import Slo
from controller.deciders.degradation import DegradationPolicy
from controller.deciders.fleet import FleetPolicy
from events.decisions import DegradationChanged, Knobs
from events.observations import (
    RequestAbandoned,
    RequestsRejected,
    RequestsServed,
    WorkerAwaited,
    WorkerLeft,
)


class Shown:
    """A console's picture of a history, taken repeatedly."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.memory = FlowMemory()
        self.picture = FleetPicture(self.memory)
        self._passed = 0
        self.absorb()

    def absorb(self) -> None:
        """Pass the new events to the console, one at a time."""
        for n, event in enumerate(self.history.events[self._passed :], self._passed + 1):
            self.memory.take(self.history.order(n).shown, [event])
        self._passed = len(self.history.events)

    def now(self, fault: str = "", **streams: int) -> Any:
        self.absorb()
        history = self.history
        return self.picture.taken(
            FleetMoment(history.fleet, history.latest.last_seq, history.now, streams, fault)
        )


def rejected(count: int, reason: str = "queue_full") -> RequestsRejected:
    return RequestsRejected(frontend="frontend-0", model="llama", count=count, reason=reason, tier="standard")


def lost(request: str) -> RequestAbandoned:
    return RequestAbandoned(
        frontend="frontend-0", request=request, model="llama", worker="w1", instance="w1-a", reason="no_worker", tokens=3,
    )  # fmt: skip


def test_the_headline_of_a_healthy_fleet() -> None:
    found = Shown(History().start()).now(w0=2, w1=1)
    headline = found["head"]["headline"]
    assert (headline.level, headline.text) == (
        "ok",
        "No user impact in the last 5 minutes; all workers are healthy.",
    )
    assert found["head"]["streams"] == 3 and found["streams"] == {"w0": 2, "w1": 1, "w2": -1}
    assert found["head"]["states"] == {"HEALTHY": 3} and found["head"]["share"] == 1.0
    model = found["models"]["llama"]
    assert (model.serving, model.workers, model.share, model.streams) == (3, 3, 1.0, 3)
    assert model.promised_rps is None and model.capacity_rps is None


def test_an_unhealthy_worker_comes_first_with_its_reason() -> None:
    history = History().start()
    history.say(history.failed("w2", confirmed=True, reason="token_mismatch"))
    history.decide()
    found = Shown(history).now()
    order = sorted(found["workers"], key=lambda name: found["workers"][name].urgency)
    bad = found["workers"]["w2"]
    assert order[0] == "w2" and bad.state == "UNHEALTHY" and bad.canary == "token_mismatch"
    assert "token_mismatch" in bad.why and bad.incident in found["incidents"]
    assert found["incidents"][bad.incident].closed == ""
    assert "1 of 3 workers is not at full weight; 1 incident is open" in found["head"]["headline"].text
    assert found["head"]["share"] == 0.667


def test_an_ended_incident_is_kept_with_its_symptom() -> None:
    shown = Shown(History().start().corruption())
    (open_one,) = shown.now()["incidents"]
    shown.history.recovery()
    ended = shown.now()["incidents"][open_one]
    assert (ended.subject, ended.symptom, ended.outcome) == ("worker w2", "token_mismatch", "recovered")
    assert ended.opened < ended.closed


def test_an_incident_that_opened_and_closed_in_one_batch_is_kept_too() -> None:
    history, memory = History().start().corruption().recovery(), FlowMemory()
    memory.take(history.fleet, history.events)
    (one,) = memory.ended.values()
    assert one.symptom == "token_mismatch" and one.opened_at is not None


def test_a_known_incident_is_not_replaced_by_the_stores_row() -> None:
    memory = FlowMemory()
    ours = EndedIncident("incident-1", "worker:w1", "no_response", EPOCH, EPOCH, "dead")
    memory.remember(ours)
    others = [
        EndedIncident(f"incident-{n}", "worker:w2", "", None, EPOCH + timedelta(seconds=n), "recovered")
        for n in range(2, 100)
    ]
    memory.remember(EndedIncident("incident-1", "worker:w1", "", None, EPOCH, ""), *others[:3])
    assert memory.ended["incident-1"] is ours
    memory.remember(*others)
    assert len(memory.ended) == ENDED_MAX and "incident-99" in memory.ended


@pytest.mark.parametrize(
    ("facts", "level", "text"),
    [
        ([], "ok", "No user impact"),
        ([rejected(5)], "warn", "5 requests rejected"),
        ([lost("r1"), lost("r2")], "bad", "2 answers lost"),
    ],
)
def test_the_headline_states_the_user_impact(facts: list[Any], level: str, text: str) -> None:
    shown = Shown(History().start())
    shown.history.say(*facts)
    headline = shown.now()["head"]["headline"]
    assert headline.level == level and text in headline.text


def test_user_impact_is_shown_for_five_minutes() -> None:
    shown = Shown(History().start())
    shown.history.say(lost("r1"))
    shown.absorb()
    shown.history.now += timedelta(minutes=4)
    assert "1 answer lost" in shown.now()["head"]["headline"].text
    shown.history.now += timedelta(minutes=2)
    assert "No user impact" in shown.now()["head"]["headline"].text


def test_a_model_shows_its_capacity_its_objective_and_the_cost_of_its_level() -> None:
    policy = FleetPolicy(degradation=DegradationPolicy(slos={"llama": Slo(slo_throughput_rps=100.0)}))
    history = History(policy)
    history.decide()
    shown = Shown(history.start())
    model = shown.now()["models"]["llama"]
    assert model.promised_rps == 100.0 and 0 < model.capacity_rps < 100
    knobs = Knobs(batch_size=0.5, shed_tier="best_effort", latency=2.0, accept_new=False)
    change = DegradationChanged(
        number=history.latest.position.number + 1, model="llama", before=0, after=4, ratio=0.1, knobs=knobs,
        capacity_rps=1.0, predicted_rps=0.0, decided_at=history.now,
    )  # fmt: skip
    history.append([change], through=len(history.events))
    found = shown.now()
    assert found["models"]["llama"].level == 4
    assert found["models"]["llama"].given_up == (
        "batches at 50 %, best_effort is rejected, latencies may rise 2 times, no new requests are admitted"
    )
    assert found["head"]["headline"].level == "bad"


def test_a_model_without_serving_workers_is_critical() -> None:
    history = History().start(1)
    history.say(WorkerLeft(worker="w0", instance=history.joined("w0").instance, mode="immediate", exit=-9))
    history.decide()
    headline = Shown(history).now()["head"]["headline"]
    assert headline.level == "bad" and "no worker serves llama" in headline.text


def test_a_convicted_last_worker_of_a_model_is_shown_as_serving() -> None:
    found = Shown(History().start(1).corruption("w0")).now()
    assert found["models"]["llama"].serving == 1
    assert "serves as the last worker of its model" in found["workers"]["w0"].why
    assert (
        found["head"]["headline"].level == "bad" and "no worker serves" not in found["head"]["headline"].text
    )


def test_outdated_data_is_reported_first() -> None:
    headline = Shown(History().start()).now(fault="the broker cannot be reached")["head"]["headline"]
    assert headline.level == "bad"
    assert headline.text.startswith("This view may be outdated (the broker cannot be reached); ")


def test_rates_are_per_model() -> None:
    shown = Shown(History().start())
    fact = RequestsServed(
        worker="w0", instance="w0-a", frontend="f", count=20, tokens=900, ttft_ms=30.0, itl_ms=5.0, routed_under=1,
        window_s=1.0,
    )  # fmt: skip
    shown.history.say(fact, rejected(10))
    found = shown.now()
    model = found["models"]["llama"]
    assert (model.answers, model.tokens, model.refused, model.ttft_ms) == (2.0, 90, 1.0, 30)
    shown.history.now += timedelta(seconds=20)
    assert shown.now()["models"]["llama"].answers == 0, "requests served long ago do not count"


def test_an_awaited_worker_is_shown_before_it_has_joined() -> None:
    shown = Shown(History().start())
    reason = "the model is loaded"
    shown.history.say(WorkerAwaited(worker="w7", instance="w7-a", model="llama", reason=reason))
    row = shown.now()["workers"]["w7"]
    assert row.state == "AWAITED" and reason in row.why


def test_events_are_shown_in_words_and_similar_ones_are_merged() -> None:
    shown = Shown(History().start())
    shown.history.say(*(lost(f"r{n}") for n in range(40)), source="frontend-0")
    found = [row for row in shown.now()["events"].values() if row.kind == "request_abandoned"]
    assert [row.times for row in found] == [40] and "r0" in found[0].text
    assert not any("CanaryPassed" in row.text for row in shown.now()["events"].values())


def test_rows_of_unchanged_workers_are_reused() -> None:
    shown = Shown(History().start())
    before = shown.now()
    shown.history.say(shown.history.passed("w1"))
    after = shown.now()
    assert after["workers"]["w0"] is before["workers"]["w0"]
    assert set(changes(before, after)["workers"]) == {"w1"}


def test_a_page_that_applies_changes_equals_a_new_page() -> None:
    shown = Shown(History().start())
    page = shown.now()
    steps: tuple[Callable[[History], object], ...] = (
        lambda history: history.corruption(),
        lambda history: history.say(lost("r1"), lost("r2")),
        lambda history: history.recovery(),
        lambda history: history.say(rejected(3)),
    )
    for step in steps:
        before = shown.now()
        page = applied(page, changes(page, before))
        step(shown.history)
    last = shown.now()
    assert applied(page, changes(page, last)) == {name: dict(rows) for name, rows in last.items()}


def test_lanes_are_kept_without_viewers() -> None:
    shown = Shown(History().start().corruption().recovery())
    lane = [state for _, state in shown.now()["lanes"]["w2"]]
    assert lane[0] == "SUSPICIOUS" and "UNHEALTHY" in lane and lane[-1] == "HEALTHY"
    steps = [share for _, share in shown.now()["share"]["steps"]]
    assert 0.6667 in steps and steps[-1] == 1.0


def test_lanes_of_workers_that_were_healthy_for_ten_minutes_are_not_shown() -> None:
    shown = Shown(History().start().corruption().recovery())
    shown.absorb()
    shown.history.now += timedelta(minutes=11)
    assert shown.now()["lanes"] == {} and len(shown.now()["share"]["steps"]) == 1


def test_the_memory_is_bounded() -> None:
    history, memory = History().start(60), FlowMemory()
    memory.take(history.fleet, history.events)
    for _ in range(EVENTS_MAX // 60 + 2):
        history.say(*(history.passed(f"w{n}") for n in range(60)))
    memory.take(history.fleet, history.events)
    assert len(memory.events) == EVENTS_MAX
    assert len(memory.lanes.lanes(history.now)) <= LANES_MAX
    assert [event.seq for event in memory.since(memory.events[-3].seq)] == [
        event.seq for event in [*memory.events][-2:]
    ]


def test_earlier_events_are_prepended() -> None:
    history = History().start()
    memory = FlowMemory()
    memory.take(history.fleet, history.events[5:])
    memory.precede(history.events[:8])
    assert [event.seq for event in memory.events] == [event.seq for event in history.events]
