"""What-if answers: recorded observations decided again under another policy."""

import argparse
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from fleet_history import History
from memory_journal import MemoryJournal

from controller.deciders.budget import BudgetPolicy
from controller.deciders.fleet import Fleet, FleetPolicy
from controller.replay import cli
from controller.replay.flags import add_arguments
from controller.replay.whatif import sweep
from controller.replay.whatif.comparison import INFINITY, Comparison, FaultCompared, compare
from controller.replay.whatif.course import CourseTerms, take
from controller.replay.whatif.faults import fared, faults
from controller.replay.whatif.question import PolicyChange, parse_changes
from controller.replay.whatif.reading import in_one
from controller.replay.whatif.recording import Recording, recorded
from controller.replay.whatif.whatif_cli import NothingToAsk
from events.decisions import SpareActivated
from events.errors import UsageError
from events.fact import Recorded
from events.observations import (
    RequestExposed,
    RequestFailed,
    ShutdownBegan,
    WorkerHeard,
    WorkerJoined,
    WorkerLeft,
    WorkerSilent,
    WorkerSlow,
)

INTERVAL_S = 10.0
WORKERS = ("w0", "w1", "w2", "w3")
Bad = Callable[
    [str, float], str
]  # (worker, seconds after the start) -> why its canary fails; empty if it passes


def well(worker: str, at: float) -> str:
    return ""


def between(worker: str, start: float, end: float, reason: str = "timeout") -> Bad:
    return lambda name, at: reason if name == worker and start <= at < end else ""


def lived(
    bad: Bad = well,
    *,
    interval_s: float = INTERVAL_S,
    seconds: int = 240,
    policy: FleetPolicy | None = None,
    also: Callable[[History, int], None] = lambda history, at: None,
) -> History:
    """Return the history of a fleet: each worker gets a canary every `interval_s`, a half-open one at once."""
    history = History(policy=policy or brisk())
    history.start(len(WORKERS))
    began, tried, due = history.now, 0, dict.fromkeys(WORKERS, 0.0)
    for n, name in enumerate(WORKERS):
        due[name] = n + 1.0
    for at in range(1, seconds):
        history.now = began + timedelta(seconds=at)
        also(history, at)
        for name in WORKERS:
            worker = history.fleet.workers.get(name)
            if worker is None or not worker.alive:
                due[name] = at  # its next instance gets a canary at once
                continue
            trial = worker.breaker.position == "half_open" and worker.breaker.moved_by > tried
            if trial:
                tried = worker.breaker.moved_by
            if trial or at >= due[name]:
                due[name] = at + interval_s
                check = "trial" if trial else "join" if worker.health.joining else "scheduled"
                _asked(history, name, bad(name, at), check)
                history.decide()
        history.decide()
    return history


def _asked(history: History, name: str, reason: str, check: str) -> None:
    instance = history.fleet.workers[name].joined.instance
    if reason:
        wrong = reason == "token_mismatch"
        fact = history.failed(name, instance, confirmed=wrong, reason=reason)
        history.say(replace(fact, check_type=check), seconds=0.0)  # type: ignore[arg-type]
    else:
        history.say(history.passed(name, instance, check=check), seconds=0.0)


def brisk(wait_s: float = 20.0) -> FleetPolicy:
    policy = FleetPolicy()
    return replace(policy, breaker=replace(policy.breaker, wait_min=timedelta(seconds=wait_s), backoff=1.0))


async def read(history: History) -> Recording:
    async def events() -> AsyncIterator[Sequence[Recorded]]:
        yield history.events

    found = await recorded(Fleet(), in_one(events()))
    assert found is not None
    return found


async def answered(history: History, *sets: str) -> Comparison:
    return compare(await read(history), parse_changes(sets, None))


def the_one(answer: Comparison) -> FaultCompared:
    (fault,) = answer.faults
    return fault


# --- decided again --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", ["timeout", "token_mismatch", "exception"])
async def test_history_decided_again_under_the_same_policy_is_unchanged(reason: str) -> None:
    recording = await read(lived(between("w1", 40, 95, reason)))
    again = take(recording, CourseTerms())
    (fault,) = faults(recording)
    assert fault.worker == "w1"
    assert fault.what == reason
    assert fared(fault, again.weights) == fared(fault, recording.weights)
    assert fared(fault, recording.weights).recovered is not None
    assert not again.guessed, "every canary on this course was recorded"


async def test_a_healthy_fleet_stays_healthy_under_any_policy() -> None:
    answer = await answered(lived(), "health.failures_max=1", "breaker.failures_max=1", "canary.interval=2s")
    assert not answer.faults
    assert not answer.decisions


# --- the breaker's threshold and wait -------------------------------------------------------------------------------


async def test_a_threshold_of_one_failure_has_an_exact_answer() -> None:
    """Three failed canaries took two intervals longer than one."""
    one = the_one(await answered(lived(between("w1", 40, 95)), "health.failures_max=1"))
    assert one.would["fenced"].exact
    assert one.recorded["fenced"] - one.would["fenced"].likely == pytest.approx(2 * INTERVAL_S, abs=0.1)


async def test_a_fault_shorter_than_five_canaries_would_not_have_been_fenced() -> None:
    answer = await answered(lived(between("w1", 40, 75)), "health.failures_max=5", "breaker.failures_max=5")
    one = the_one(answer)
    assert one.recorded["fenced"] < INFINITY
    assert one.would["fenced"].likely == INFINITY
    ejections = next(total for total in answer.totals if total.name == "ejections")
    assert (ejections.recorded, ejections.would.likely) == (1, 0)
    assert any("before the recording ends" in limit for limit in answer.limits)


@pytest.mark.parametrize("wait_s", [12.0, 45.0])
async def test_trials_after_another_wait_are_estimated_from_nearby_canaries(
    wait_s: float,
) -> None:
    bad = between("w1", 40, 95)
    told = the_one(await answered(lived(bad), f"breaker.wait_min={wait_s}s")).would["recovered"]
    truly = await read(lived(bad, policy=brisk(wait_s)))
    (fault,) = faults(truly)
    recovered = fared(fault, truly.weights).recovered
    assert recovered is not None
    assert told.low - 2 <= recovered - fault.likely <= told.high + 2


# --- the canaries' interval -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("interval_s", [2.0, 5.0, 30.0])
@pytest.mark.parametrize("begins", [41, 47])
@pytest.mark.parametrize("reason", ["timeout", "token_mismatch"])
async def test_the_true_result_of_another_interval_lies_in_the_estimated_range(
    interval_s: float, begins: int, reason: str
) -> None:
    bad = between("w2", begins, begins + 100, reason)
    told = the_one(await answered(lived(bad, seconds=400), f"canary.interval={interval_s}s"))
    truly = await read(lived(bad, seconds=400, interval_s=interval_s))
    (fault,) = faults(truly)
    for measure in ("noticed", "fenced"):
        at = getattr(fared(fault, truly.weights), measure)
        assert at is not None
        range_ = told.would[measure]
        assert range_.low + told.fault.likely - 1 <= at <= range_.high + told.fault.likely + 1


async def test_half_the_interval_sends_twice_the_canaries() -> None:
    totals = {one.name: one for one in (await answered(lived(), "canary.interval=5s")).totals}
    asked_ = totals["canaries asked"]
    assert asked_.would.likely == pytest.approx(2 * asked_.recorded)


async def test_fewer_answers_are_exposed_when_a_wrong_worker_is_noticed_earlier() -> None:
    def exposes(history: History, at: int) -> None:
        if at == 55:
            for n in range(10):
                history.say(history.exposed(f"r{n}", "w2"), source="frontend-0", seconds=0.0)

    history = lived(between("w2", 45, 140, "token_mismatch"), also=exposes)
    assert sum(isinstance(event.fact, RequestExposed) for event in history.events) == 10
    answer = await answered(history, "canary.interval=1s")
    exposed = next(total for total in answer.totals if total.name == "answers exposed")
    assert exposed.recorded == 10
    assert exposed.would.low < exposed.would.likely < 10
    assert any("estimated from the recorded rate of exposed answers" in limit for limit in answer.limits)


# --- silence, and consequences of decisions -----------------------------------------------------------------------


def silent(history: History, at: int) -> None:
    life = {"worker": "w1", "instance": "w1-a"}
    if at == 43:
        history.say(WorkerSilent(**life, silent_s=3.2, observer="controller-1"), seconds=0.0)
    if at == 51:
        history.say(WorkerHeard(**life, observer="controller-1"), seconds=0.0)


async def test_a_silence_shorter_than_the_timeout_is_not_noticed() -> None:
    answer = await answered(lived(also=silent), "liveness.silent_after=15s")
    one = the_one(answer)
    assert one.recorded["fenced"] < INFINITY
    assert one.would["noticed"].likely == INFINITY


async def test_a_longer_silence_timeout_delays_detection_by_the_difference() -> None:
    one = the_one(await answered(lived(also=silent), "liveness.silent_after=6s"))
    assert one.would["fenced"].exact
    assert one.would["fenced"].likely - one.again["fenced"] == pytest.approx(3.0, abs=0.01)


async def test_unrecorded_silences_are_reported_as_unknown() -> None:
    answer = await answered(lived(also=silent), "liveness.silent_after=1s")
    assert any("silences shorter than 3 s were not recorded" in limit for limit in answer.limits)


async def test_a_process_ended_after_its_dead_decision_ends_after_the_new_decision() -> None:
    def dies(history: History, at: int) -> None:
        worker = history.fleet.workers["w1"]
        if at == 43:
            history.say(
                WorkerSilent(worker="w1", instance="w1-a", silent_s=3.2, observer="controller-1"), seconds=0.0
            )
        if not worker.alive and worker.joined.instance == "w1-a" and not ended:
            ended.append(at)
        if ended and at == ended[0] + 1:
            begun = ShutdownBegan(worker="w1", instance="w1-a", mode="self_initiated", grace_s=0.0)
            history.say(begun, seconds=0.0)
        if ended and at == ended[0] + 2:
            history.say(WorkerLeft(worker="w1", instance="w1-a", mode="immediate"), seconds=0.0)
        if ended and at == ended[0] + 4:
            history.say(history.joined("w1", "w1-b"), seconds=0.0)

    ended: list[int] = []
    history = lived(between("w1", 43, 70), also=dies)
    assert ended
    assert any(isinstance(e.fact, WorkerJoined) and e.fact.instance == "w1-b" for e in history.events)
    one = the_one(await answered(history, "health.dead_after=50s"))
    sooner = one.would["recovered"].likely - one.again["recovered"]
    assert sooner == pytest.approx(20.0, abs=2.0), "it was decided DEAD after 30 s"


def a_spare_joins(after: int) -> Callable[[History, int], None]:
    def joins(history: History, at: int) -> None:
        if at == after:
            history.say(replace(history.joined("s0"), spare=True), seconds=0.0)
            history.decide()
            history.say(history.passed("s0", check="join"), seconds=0.0)

    return joins


def budgeted(share: float) -> FleetPolicy:
    return replace(brisk(), budget=BudgetPolicy(max_ejection_share=share))


def two_in_turn(worker: str, at: float) -> str:
    """While w1 is out of service w2 must be kept; when w1 recovers w2 may leave service, without a new event about it."""
    return "timeout" if (worker == "w1" and 40 <= at < 83) or (worker == "w2" and 52 <= at < 160) else ""


@pytest.mark.parametrize(
    "history",
    [
        lived(between("w1", 40, 95, "token_mismatch"), also=a_spare_joins(1)),
        lived(between("w1", 40, 95, "token_mismatch"), also=a_spare_joins(60)),
        lived(two_in_turn, policy=budgeted(0.25)),
    ],
    ids=["spare", "late spare", "budget"],
)
async def test_under_the_same_policy_every_worker_has_the_same_weights(history: History) -> None:
    recording = await read(history)
    again = take(recording, CourseTerms())
    for name in recording.weights.steps:
        now, then = (
            list({step.at: step for step in taken.since(name, recording.start + 20)}.values())
            for taken in (again.weights, recording.weights)
        )  # the last of several decisions at the same time
        assert [step[1:] for step in now] == [step[1:] for step in then], name
        assert [step.at for step in now[1:]] == pytest.approx([step.at for step in then[1:]], abs=1.5), name


async def test_a_worker_replaced_by_a_spare_counts_as_fenced() -> None:
    history = lived(between("w1", 40, 95, "token_mismatch"), also=a_spare_joins(1))
    assert any(isinstance(event.fact, SpareActivated) for event in history.events)
    recording = await read(history)
    (fault,) = faults(recording)
    again = take(recording, CourseTerms())
    assert fared(fault, again.weights) == fared(fault, recording.weights)
    assert fared(fault, recording.weights).fenced is not None
    assert [step[1:] for step in again.weights.steps["s0"]] == [
        step[1:] for step in recording.weights.steps["s0"]
    ]


@pytest.mark.parametrize("share", [0.25, 1.0])
async def test_another_ejection_budget_keeps_the_true_number_in_service(share: float) -> None:
    def bad(worker: str, at: float) -> str:
        return "timeout" if worker in ("w1", "w2", "w3") and 40 <= at < 120 else ""

    recording = await read(lived(bad, policy=budgeted(0.5)))
    told = take(recording, PolicyChange({"budget.max_ejection_share": share}).terms())
    truly = await read(lived(bad, policy=budgeted(share)))
    for at in (75, 90, 105):
        out = [
            sum(
                (step := weights.was(name, recording.start + at)) is not None and step.weight == 0
                for name in WORKERS
            )
            for weights in (told.weights, truly.weights, recording.weights)
        ]
        assert out == [int(share * 4) if share < 1 else 3, int(share * 4) if share < 1 else 3, 2]


async def test_events_after_the_end_of_a_fault_do_not_change_its_recovery() -> None:
    """Minutes later the same worker is slow for a while: that does not belong to the fault."""

    def slows(history: History, at: int) -> None:
        if at == 222:
            slow = WorkerSlow(worker="w1", instance="w1-a", frontend="f0", latency_ms=90.0, baseline_ms=20.0)
            history.say(slow, slow, slow, source="frontend-0", seconds=0.0)

    recording = await read(lived(between("w1", 40, 75), also=slows))
    (fault,) = faults(recording)
    recovered = fared(fault, recording.weights).recovered
    assert recovered is not None
    assert recovered < recording.start + 200
    assert any(not step.in_service for step in recording.weights.since("w1", recording.start + 215)), (
        "it was suspected then"
    )


async def test_requests_that_would_not_have_been_sent_do_not_fail() -> None:
    """Requests to a worker that canaries would have fenced at once do not open its breaker later."""

    def fails(history: History, at: int) -> None:
        if 55 <= at <= 57:  # before it answers again, because then its trial is due at once
            history.say(
                RequestFailed(
                    worker="w1", instance="w1-a", frontend="frontend-0", failures_in_a_row=at - 54, reason="engine_error",
                    routed_under=history.latest.position.number,
                ),
                source="frontend-0",
                seconds=0.0,
            )  # fmt: skip

    history = lived(between("w1", 42, 55), also=fails)
    answer = await answered(history, "health.failures_max=1", "breaker.wait_min=30s")
    opened = [one for one in answer.decisions if one.kind == "breaker_opened"]
    assert [(one.what, one.again, one.would) for one in opened] == [
        ("requests: engine_error", 1, 0),
        ("unhealthy: timeout", 0, 1),
    ]


# --- the command ---------------------------------------------------------------------------------------------------


async def said(history: History, *words: str) -> list[str]:
    """Run the command line, and return what it printed."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    lines: list[str] = []
    args = parser.parse_args(["what-if", *words])
    assert await cli.execute(args, MemoryJournal(history.stream, "replay-1"), None, lines.append) == 0
    return lines


@pytest.fixture
def history() -> History:
    return lived(between("w1", 40, 95))


async def test_the_answer_names_question_faults_and_limits_in_eighty_columns(
    history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = await said(history, "--set", "health.failures_max=1")
    assert lines[0] == "what if health.failures_max had been 1 instead of 3?"
    assert lines[1].startswith("1 fault, ")
    text = "\n".join(lines)
    assert "w1, 12:0" in text
    assert "fenced after" in text
    assert all(len(line) <= 80 for one in lines for line in one.splitlines())


async def test_durations_are_printed_with_a_unit_and_shares_without(history: History) -> None:
    lines = await said(history, "--set", "degradation.margin=0.1", "--set", "drain.margin=10s")
    assert lines[0] == "what if degradation.margin had been 0.1 instead of 0.05?"
    assert lines[1] == "what if drain.margin had been 10 s instead of 5 s?"


async def test_an_incident_selects_its_part_of_history(history: History) -> None:
    (text,) = await said(history, "--set", "health.failures_max=1", "--incident", "incident-6", "-o", "json")
    document = json.loads(text)
    assert [one["incident"] for one in document["faults"]] == ["incident-6"]
    assert document["asked"] == [{"setting": "health.failures_max", "was": 3, "asked": 1}]


async def test_a_policy_may_come_from_a_file_and_set_takes_precedence(
    history: History, tmp_path: Path
) -> None:
    for name, text in (
        ("p.json", '{"health": {"failures_max": 2}, "breaker": {"wait_min": "7s"}, "golden": {}}'),
        ("p.toml", '[health]\nfailures_max = 2\n[breaker]\nwait_min = "7s"\n'),
    ):
        (tmp_path / name).write_text(text)
        what = parse_changes(["health.failures_max=1"], str(tmp_path / name))
        assert what.values == {"health.failures_max": 1, "breaker.wait_min": 7.0}
    lines = await said(history, "--policy", str(tmp_path / "p.toml"))
    assert lines[0] == "what if health.failures_max had been 2 instead of 3?"


async def test_a_sweep_is_a_table_json_or_a_page(history: History, tmp_path: Path) -> None:
    lines = await said(history, "--sweep", "canary.interval=1s..60s", "--points", "3")
    assert [line.split()[0] for line in lines if line.strip() and line.split()[0] in ("1", "7.746", "60")] == [
        "1", "7.746", "60",
    ]  # fmt: skip
    (text,) = await said(history, "--sweep", "health.failures_max=1..4", "--points", "12", "-o", "json")
    document = json.loads(text)
    assert [point["value"] for point in document["points"]] == [1, 2, 3, 4]
    fenced = [point["fenced after, s"]["likely"] for point in document["points"]]
    assert fenced == sorted(fenced)
    page = tmp_path / "sweep.html"
    await said(history, "--sweep", "canary.interval=1s..60s", "--points", "3", "-o", str(page))
    html = page.read_text()
    assert "What if canary.interval had another value?" in html
    assert "http://" not in html.split("<script>")[0]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "nothing to compare: give --set"),
        (
            ["--set", "breaker.wait=3"],
            "no such setting. Did you mean one of breaker.wait_min, breaker.wait_max",
        ),
        (["--set", "breaker.wait_min"], "must be NAME=VALUE"),
        (["--set", "breaker.wait_min=soon"], "breaker.wait_min: "),
        (["--set", "health.failures_max=2.5"], "health.failures_max: "),
        (["--set", "health.suspicious_weight=3"], "suspicious_weight is 3.0: it must be between 0 and 1"),
        (["--set", "golden.votes=3"], "are used as recorded"),
        (["--set", "canary.interval=0s"], "it must be a duration above 0"),
        (
            ["--set", "canary.interval=1s", "-o", "page.html"],
            "-o page.html: must be text, json, a file name ending in .json",
        ),
        (
            ["--set", "canary.interval=1s", "--incident", "incident-6", "--since", "1"],
            "omit --since and --until",
        ),
        (
            ["--set", "canary.interval=1s", "--recorded", "health.failures_max=1"],
            "canary.interval or liveness",
        ),
        (["--policy", "/nowhere.json"], "/nowhere.json: No such file"),
        (["--sweep", "canary.interval=1s"], "must be NAME=A..B"),
        (["--sweep", "canary.interval=9s..1s"], "to a larger one"),
        (["--sweep", "canary.interval=1s..9s", "--points", "1"], "must be from 2 to 60"),
        (["--sweep", "health.failures_max=none..3"], "from a number or duration above 0"),
    ],
)
async def test_an_invalid_question_is_an_error(history: History, words: list[str], why: str) -> None:
    with pytest.raises(UsageError) as refused:
        await said(history, *words)
    assert why in str(refused.value)


@pytest.mark.parametrize("text", ["[1]", "{", '{"breaker": 3}', '{"breaker": {"wait": 3}}'])
async def test_an_invalid_policy_file_is_named_in_the_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(UsageError, match=r"p\.json"):
        parse_changes([], str(tmp_path / "p.json"))


async def test_a_period_without_events_is_an_error(history: History) -> None:
    with pytest.raises(NothingToAsk):
        await said(history, "--set", "canary.interval=1s", "--since", "1s")


def test_a_sweep_has_each_value_once_and_both_ends() -> None:
    assert sweep.swept("health.failures_max=1..3", 30, PolicyChange()).values == [1, 2, 3]
    values = sweep.swept("breaker.wait_min=1s..100s", 3, PolicyChange()).values
    assert values == [1.0, 10.0, 100.0]
