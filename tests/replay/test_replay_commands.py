"""timeline, at and why: their output for a history made by the real deciders."""

import argparse
import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from fleet_history import EPOCH, History
from memory_journal import MemoryJournal
from memory_store import MemoryStore
from store_databases import AnyStore, OpenStore

from controller.replay import cli, moment_parser, sentences, timeline, travel
from controller.replay.event_lookup import NoSuchEvent
from controller.replay.flags import add_arguments
from controller.replay.moment_parser import BadMoment
from controller.replay.travel import NotYet
from controller.runtime.projection.projector import Projector
from events import codec
from events.decisions import IncidentClosed, IncidentOpened
from events.fact import Decision, Fact, Recorded, Skipped
from events.observations import (
    BreakerMove,
    CanaryFailed,
    CanaryPassed,
    CanarySlow,
    ChaosInjected,
    CommandRefused,
    DeviceFaulted,
    DeviceRecovered,
    DrainFinished,
    DrainRequested,
    FrontendBreakersMoved,
    RequestMigrated,
    ScaleSet,
    ShutdownBegan,
    WorkerLeft,
    WorkerSilent,
)


@pytest.fixture
def history() -> History:
    return History().start().corruption()


@pytest.fixture
async def store(history: History, open_store: OpenStore) -> AnyStore:
    """The history, projected, with snapshots on the way."""
    store = open_store(snapshot_every=4)
    for until in range(1, len(history.events) + 1):
        await Projector(journal(history), store).catch_up(until)
    return store


def journal(history: History) -> MemoryJournal:
    return MemoryJournal(history.stream, "replay-1")


async def typed(history: History, store: AnyStore | None, *words: str) -> tuple[int, list[str]]:
    """Run a command line; return its exit code and what it printed."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    said: list[str] = []
    code = await cli.execute(parser.parse_args(words), journal(history), store, said.append)
    return code, said


def seq_of(history: History, kind: str, nth: int = 0) -> int:
    return [e.seq for e in history.events if e.fact.kind() == kind][nth]


def test_every_kind_has_its_sentence() -> None:
    assert set(sentences.SENTENCES) == {*codec.KINDS.values(), Skipped}


def test_moves_of_a_frontends_own_breakers_are_one_sentence() -> None:
    moves = [
        BreakerMove(worker=f"w{n}", instance="i", position="open", ago_ms=1.0, reason="requests: stalled")
        for n in range(8)
    ]
    fact = FrontendBreakersMoved(frontend="f0", moves=tuple(moves), dropped=3)
    said = sentences.sentence(fact)
    assert said.startswith("own breakers of f0 moved: w0 opened (requests: stalled), w1 opened")
    assert said.endswith("w5 opened (requests: stalled) and 5 more")


def test_a_sentence_says_what_happened(history: History) -> None:
    said = [sentences.line(event) for event in history.events]
    expected = "w2 failed a canary: token_mismatch, confirmed (expected 300 301 302, got 300 999 302)"
    assert any(line.endswith(expected) for line in said)
    assert any(
        "req-1 migrated from w2 to w0 (unhealthy, after 17 tokens, gap 32 ms)" in line for line in said
    )
    assert all(line.startswith("12:0") for line in said)
    assert " 12:00:0" in sentences.line(history.events[0], date=True).partition(" UTC ")[0]


def test_a_long_answer_is_shown_where_it_differs() -> None:
    expected, got = tuple(range(300, 332)), (*range(300, 320), 7, *range(321, 332))
    failed = replace(History().failed("w2", reason="token_mismatch"), expected=expected, got=got)
    said = sentences.line(Recorded(1, EPOCH, failed, "id-1"))
    assert "(at token 20: expected 320 321 322, got 7 321 322)" in said


@pytest.mark.parametrize(
    ("fact", "sentence"),
    [
        (
            CommandRefused(worker="", verb="allow", command="c", why="no", by="bob"),
            "bob's allow was refused: no",
        ),
        (
            CommandRefused(worker="w9", verb="move", command="c", why="no"),
            "an operator's move of w9 was refused: no",
        ),
        (ScaleSet(model="m", workers=3, by="bob", reason=""), "bob set m to 3 workers"),
        (ScaleSet(model="m", workers=3, by="bob", reason="a rush"), "bob set m to 3 workers (a rush)"),
        (
            ScaleSet(model="m", workers=None, by="bob", reason=""),
            "bob released the number of m workers to the planner",
        ),
    ],
)
def test_a_command_without_a_worker_or_a_reason_leaves_no_gap_in_its_sentence(
    fact: Fact, sentence: str
) -> None:
    assert sentences.sentence(fact) == sentence


async def test_the_timeline_leaves_out_what_is_routine(history: History, store: AnyStore) -> None:
    _, said = await typed(history, store, "timeline")
    assert not any("passed a canary" in line for line in said)
    assert any("passed its trial canary" in line for line in said)
    _, everything = await typed(history, store, "timeline", "--all")
    assert len(everything) == len(history.events)
    _, machine = await typed(history, store, "timeline", "--all", "-o", "json")
    assert [json.loads(line)["seq"] for line in machine] == [e.seq for e in history.events]


async def test_the_timeline_of_one_worker_and_since(history: History, store: AnyStore) -> None:
    _, said = await typed(history, store, "timeline", "--worker", "w2")
    assert said and all("w2" in line for line in said)
    failed = seq_of(history, "canary_failed")
    _, late = await typed(history, store, "timeline", "--since", str(failed))
    assert "w2 failed a canary" in late[0]


async def test_the_timeline_of_one_request(history: History, store: AnyStore) -> None:
    (request, *_) = [e.fact.request for e in history.events if hasattr(e.fact, "request")]
    _, said = await typed(history, store, "timeline", "--request", request)
    told = [e for e in history.events if getattr(e.fact, "request", None) == request]
    assert len(said) == len(told) > 0 and all(request in line for line in said)
    _, nothing = await typed(history, store, "timeline", "--request", "unknown")
    assert nothing == ["the journal holds nothing to show about request unknown"]


async def test_the_timeline_of_a_worker_has_the_opening_and_the_closing_of_its_incidents(
    history: History, store: AnyStore
) -> None:
    history.recovery().corruption("w1").recovery("w1")
    await Projector(journal(history), store).catch_up(len(history.events))
    for kept in (store, None):
        _, said = await typed(history, kept, "timeline", "--worker", "w2")
        assert [line.split(maxsplit=1)[1] for line in said if "incident" in line] == [
            "incident-5 opened for worker w2: token_mismatch",
            "incident-5 closed for worker w2: recovered",
        ]
        _, machine = await typed(history, kept, "timeline", "--worker", "w2", "-o", "json")
        kinds = [json.loads(line)["kind"] for line in machine]
        assert [kind for kind in kinds if "incident" in kind] == ["incident_opened", "incident_closed"]
        assert len(said) == len(machine)


async def test_a_request_that_migrated_to_a_worker_is_not_part_of_the_workers_incident(
    open_store: OpenStore,
) -> None:
    history = History().start()
    history.say(history.migrated("req-9", "w1", "w2"), source="frontend-9")
    history.corruption("w2")
    (incident,) = [e.fact.incident for e in history.events if isinstance(e.fact, IncidentOpened)]
    store = open_store()
    await Projector(journal(history), store).catch_up(len(history.events))
    told = await timeline.story(journal(history), store, incident)
    moved = [e.fact for e in told.events if isinstance(e.fact, RequestMigrated)]
    assert moved and all(fact.source == "w2" for fact in moved)


async def test_an_incident_that_closed_when_the_next_one_opened_is_not_part_of_its_story(
    open_store: OpenStore,
) -> None:
    history = History().start()
    given: dict[str, Any] = {"decided_at": EPOCH, "subject": "worker:w2"}
    number = history.latest.position.number
    first = IncidentOpened(**given, number=number + 1, incident="incident-a", symptom="timeout")
    history.append([first], through=len(history.events))
    (cause,) = history.say(history.failed("w2"))
    history.append(
        [
            IncidentClosed(**given, number=number + 2, incident="incident-a", outcome="recovered"),
            IncidentOpened(**given, number=number + 3, incident="incident-b", symptom="timeout", cause=cause),
        ],
        through=len(history.events),
    )
    store = open_store()
    await Projector(journal(history), store).catch_up(len(history.events))
    story = await timeline.story(journal(history), store, "incident-b")
    assert [e.fact.kind() for e in story.events] == ["canary_failed", "incident_opened"]


async def test_one_incident_from_first_symptom_to_recovery(history: History, store: AnyStore) -> None:
    opened = next(e.fact for e in history.events if e.fact.kind() == "incident_opened")
    for name in (opened.incident, f"decision:{opened.number}"):  # type: ignore[attr-defined]
        code, said = await typed(history, store, "timeline", "--incident", name)
        assert code == 0
        assert (
            "worker w2, token_mismatch" in said[0]
            and "1 request migrated" in said[0]
            and "1 exposed" in said[0]
        )
        assert "w2 failed a canary" in said[1]
        assert any("the breaker of w2 closed" in line for line in said)
        assert not any("w0 passed" in line for line in said)


async def test_a_rehearsed_fault_begins_the_story(open_store: OpenStore) -> None:
    history = History().start()
    history.say(ChaosInjected(worker="w2", instance="w2-a", fault="corrupt", by="operator"))
    history.say(history.passed("w2"))
    history.corruption()
    store = open_store()
    await Projector(journal(history), store).catch_up(len(history.events))
    opened = next(e.fact for e in history.events if e.fact.kind() == "incident_opened")
    story = await timeline.story(journal(history), store, opened.incident)  # type: ignore[attr-defined]
    assert sentences.sentence(story.events[0].fact) == "operator injected a fault into w2: corrupt"


async def test_user_impact_before_the_first_symptom_belongs_to_the_story(open_store: OpenStore) -> None:
    history = History().start()
    history.say(ChaosInjected(worker="w2", instance="w2-a", fault="kill", by="yesterday"))
    history.say(ChaosInjected(worker="w2", instance="w2-a", fault="corrupt", by="operator"))
    felt = RequestMigrated(
        frontend="f1", request="early", model="llama", source="w2", source_instance="w2-a", target="w0",
        target_instance="w0-a", cause="stalled", method="reprefill", tokens=3, gap_ms=480.0, attempt=2, exact=True,
    )  # fmt: skip
    history.say(felt)
    history.corruption()
    store = open_store()
    await Projector(journal(history), store).catch_up(len(history.events))
    opened = next(e.fact for e in history.events if e.fact.kind() == "incident_opened")
    story = await timeline.story(journal(history), store, opened.incident)  # type: ignore[attr-defined]
    assert felt in [e.fact for e in story.events]
    assert sum(isinstance(e.fact, ChaosInjected) for e in story.events) == 1, "the last injected fault"
    assert "longest gap 480 ms" in story.headline()


def test_a_sentence_names_the_dp_rank() -> None:
    asked: dict[str, Any] = {
        "worker": "w1", "instance": "i1", "canary_key": "k", "canary": "c1", "check_type": "scheduled",
        "sent_under": 1, "sent_at": EPOCH, "latency_ms": 9.0,
    }  # fmt: skip
    for rank, subject in ((3, "DP rank 3 of w1"), (None, "w1")):
        passed = sentences.sentence(CanaryPassed(**asked, rank=rank))
        failed = sentences.sentence(CanaryFailed(**asked, rank=rank, reason="non_finite", confirmed=False))
        slow = sentences.sentence(CanarySlow(**asked, rank=rank, baseline_ms=2.0))
        assert (
            passed == f"{subject} passed a canary in 9 ms"
            and failed == f"{subject} failed a canary: non_finite"
        )
        assert slow == f"{subject} passed a canary slowly: 9 ms, baseline 2 ms"


def test_a_sentence_names_the_kv_cache_that_moved_with_a_request() -> None:
    moved = RequestMigrated(
        frontend="f1", request="early", model="llama", source="w2", source_instance="w2-a", target="w0",
        target_instance="w0-a", cause="drain", method="transfer", tokens=30, gap_ms=8.0, attempt=2, exact=True,
        bytes=4096, blocks=3, link="shm",
    )  # fmt: skip
    said = sentences.sentence(moved)
    assert said == (
        "early migrated from w2 to w0 (drain, after 30 tokens, gap 8 ms, with its KV cache: 3 blocks over shm)"
    )
    stayed = replace(moved, method="reprefill", exact=False, refused="no room")
    assert sentences.sentence(stayed).endswith("gap 8 ms, approximate, recomputed: no room)")


def fault(fault_class: str, code: str = "", **more: Any) -> DeviceFaulted:
    return DeviceFaulted(
        worker="w2", instance="w2-a", device="GPU-7", fault_class=fault_class, code=code, **more
    )


@pytest.mark.parametrize(
    ("fact", "said"),
    [
        (fault("xid", "48"), "GPU-7 of w2 reported Xid 48 (fatal: w2 cannot continue)"),
        (
            fault("xid_nvlink", "74", fatal=False, weight=0.0),
            "GPU-7 of w2 reported Xid 74 (w2 may receive no new requests)",
        ),
        (
            fault("throttle", "thermal", fatal=False, weight=0.4),
            "GPU-7 of w2 reported throttle (thermal) (w2 may receive 40% of its share of the traffic)",
        ),
        (
            fault("pcie_width", "x8 of x16", fatal=False),
            "GPU-7 of w2 reported pcie_width (x8 of x16) (a warning)",
        ),
        (
            DeviceRecovered(
                worker="w2", instance="w2-a", device="GPU-7", fault_class="xid_nvlink", code="74"
            ),
            "GPU-7 of w2 recovered from Xid 74",
        ),
        (
            ShutdownBegan(worker="w2", instance="w2-a", mode="graceful", grace_s=60.0),
            "w2 began to shut down (grace period 60 s)",
        ),
        (
            ShutdownBegan(
                worker="w2", instance="w2-a", mode="self_initiated", grace_s=0.0, reason="GPU GPU-7: Xid 48"
            ),
            "w2 is shutting itself down: GPU GPU-7: Xid 48",
        ),
        (
            WorkerSilent(worker="w2", instance="w2-a", silent_s=3.1, observer="controller:standby:01a2-7bf1"),
            "w2 has been silent for 3.1 s (observer standby)",
        ),
        (DrainFinished(worker="w2", instance="w2-a", completed=0, migrated=2), "w2 has drained: 2 migrated"),
        (
            ChaosInjected(worker="w2", instance="w2-a", fault="unhang", by="uid 0"),
            "uid 0 ended the hang of w2",
        ),
    ],
)
def test_a_sentence_says_what_a_fact_means_to_the_fleet(fact: Fact, said: str) -> None:
    assert sentences.sentence(fact) == said


async def test_a_story_does_not_begin_with_a_fault_healed_long_before(open_store: OpenStore) -> None:
    history = History().start()
    history.say(ChaosInjected(worker="w2", instance="w2-a", fault="hang", by="operator"))
    history.say(ChaosInjected(worker="w2", instance="w2-a", fault="unhang", by="operator"))
    history.say(*(history.passed("w2") for _ in range(9)))
    history.corruption()
    story = await told(history, open_store())
    assert sentences.sentence(story.events[0].fact).startswith("w2 failed a canary")


async def test_streams_that_continue_after_a_death_belong_to_its_incident(open_store: OpenStore) -> None:
    history = History().start()
    history.say(WorkerLeft(worker="w2", instance="w2-a", mode="immediate", exit=-9))
    history.decide()
    history.say(history.migrated("req-1", "w2", "w0"), source="frontend-0", seconds=0.1)
    history.say(history.joined("w2", "w2-b"), source="w2-b")
    history.say(history.migrated("req-2", "w2", "w0"), source="frontend-0", seconds=60)
    story = await told(history, open_store())
    assert story.outcome == "dead" and "; 1 request migrated" in story.headline()
    assert story.recovered_s is not None and story.recovered_s < 0.1, (
        "the incident's time, not its aftermath's"
    )


async def test_streams_that_a_drain_moves_after_a_death_do_not_belong_to_its_incident(
    open_store: OpenStore,
) -> None:
    history = History().start()
    history.say(WorkerLeft(worker="w2", instance="w2-a", mode="immediate", exit=-9))
    history.decide()
    history.say(history.joined("w2", "w2-b"), source="w2-b")
    history.say(DrainRequested(worker="w2", instance="w2-b", by="operator"))
    history.say(history.migrated("req-1", "w2", "w0"), source="frontend-0", seconds=0.1)
    assert "migrated" not in (await told(history, open_store())).headline()


async def test_streams_that_the_next_incident_moves_do_not_belong_to_the_last(open_store: OpenStore) -> None:
    history = History().start()
    history.say(WorkerLeft(worker="w2", instance="w2-a", mode="immediate", exit=-9))
    history.decide()
    history.say(history.joined("w2", "w2-b"), source="w2-b", seconds=0.1)
    history.decide()
    history.say(history.failed("w2", "w2-b", confirmed=True, reason="token_mismatch"), seconds=0.1)
    history.decide()
    history.say(history.migrated("req-1", "w2", "w0"), source="frontend-0", seconds=0.1)
    assert sum(e.fact.kind() == "incident_opened" for e in history.events) == 2
    assert "migrated" not in (await told(history, open_store())).headline()


async def told(history: History, store: AnyStore) -> timeline.Story:
    await Projector(journal(history), store).catch_up(len(history.events))
    opened = next(e.fact for e in history.events if e.fact.kind() == "incident_opened")
    return await timeline.story(journal(history), store, opened.incident)  # type: ignore[attr-defined]


async def test_an_unknown_incident_is_an_error(history: History, store: AnyStore) -> None:
    with pytest.raises(NoSuchEvent, match="no incident 'i99'"):
        await typed(history, store, "timeline", "--incident", "i99")


async def test_a_decision_without_an_incident_is_named_in_the_error(
    history: History, store: AnyStore
) -> None:
    joined = next(e.fact for e in history.events if isinstance(e.fact, Decision) and not e.fact.incident)
    with pytest.raises(
        NoSuchEvent, match=rf"decision:{joined.number} \({joined.kind()}\) belongs to no incident"
    ):
        await typed(history, store, "timeline", "--incident", f"decision:{joined.number}")


async def test_an_empty_timeline_is_reported(history: History, store: AnyStore) -> None:
    assert await typed(history, store, "timeline", "--worker", "w77") == (
        0,
        ["the journal holds nothing to show about worker w77"],
    )
    assert await typed(history, store, "timeline", "--worker", "w77", "-o", "json") == (0, [])


async def test_at_returns_the_fleet_as_it_was_shown_at_every_sequence(
    history: History, store: AnyStore
) -> None:
    for seq in range(1, len(history.events) + 1):
        found = await travel.at(journal(history), store, seq)
        order = history.order(seq)
        assert (found.fleet, found.seq, found.number) == (order.shown, seq, order.position.number)
        assert found.folded <= 12  # from a snapshot, not from the start


async def test_at_a_time_and_without_a_store(history: History, store: AnyStore) -> None:
    failed = seq_of(history, "canary_failed")
    when = history.events[failed - 1].at
    for kept in (store, None):
        before = await travel.at(journal(history), kept, when - timedelta(milliseconds=1))
        assert before.seq == failed - 1
        after = await travel.at(journal(history), kept, when + timedelta(milliseconds=1))
        assert after.fleet.workers["w2"].weight == 0 and after.seq > failed


async def test_at_prints_a_table_and_json(history: History, store: AnyStore) -> None:
    seq = seq_of(history, "breaker_opened")
    _, said = await typed(history, store, "at", str(seq))
    assert said[0].startswith(f"at {seq}, 2026-03-01 12:00:07.000")
    assert any("w2" in line and "UNHEALTHY" in line and "breaker open" in line for line in said)
    _, (machine,) = await typed(history, store, "at", str(seq), "-o", "json")
    fleet = json.loads(machine)
    assert {w["worker"]: w["health"] for w in fleet["workers"]}["w2"] == "UNHEALTHY"
    assert fleet["incidents"][0]["subject"] == "worker:w2"


async def test_at_beyond_the_end_is_an_error(history: History, store: AnyStore) -> None:
    with pytest.raises(NotYet, match=f"the journal ends at {len(history.events)}, before 99999"):
        await typed(history, store, "at", "99999")


async def test_why_leads_back_to_the_observation(history: History, store: AnyStore) -> None:
    opened = seq_of(history, "breaker_opened")
    event = history.events[opened - 1]
    for name in (str(opened), event.id, f"decision:{event.fact.number}"):  # type: ignore[attr-defined]
        for kept in (store, None):
            _, said = await typed(history, kept, "why", name)
            assert "the breaker of w2 opened" in said[0]
            assert "because" in said[-1] and "w2 failed a canary: token_mismatch" in said[-1]
    _, (machine,) = await typed(history, store, "why", str(opened), "-o", "json")
    assert json.loads(machine)[-1]["kind"] == "canary_failed"


async def test_why_of_an_unknown_event_is_an_error(history: History, store: AnyStore) -> None:
    for name in ("99999", "0", "decision:999", "no-such-id"):
        with pytest.raises(NoSuchEvent, match=r"(?i)the journal holds no such event"):
            await typed(history, store, "why", name)


async def test_why_finds_what_the_projector_has_not_seen_yet(history: History) -> None:
    _, said = await typed(history, MemoryStore(), "why", history.events[-1].id)
    assert len(said) == 1


@pytest.mark.parametrize("text", ["yesterday", "12:99", "8x", "", "-5"])
def test_an_invalid_moment_is_an_error(text: str) -> None:
    with pytest.raises(BadMoment, match="A place in the journal is"):
        moment_parser.parse(text, EPOCH)


def test_moments_are_parsed() -> None:
    now = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
    assert moment_parser.parse("8812", now) == 8812
    assert moment_parser.parse("90s", now) == now - timedelta(seconds=90)
    assert moment_parser.parse("11:59:03.5", now) == datetime(2026, 3, 1, 11, 59, 3, 500_000, tzinfo=UTC)
    assert moment_parser.parse("12:30", now) == datetime(2026, 2, 28, 12, 30, tzinfo=UTC)
    assert moment_parser.parse("2026-03-01T10:00:00", now) == datetime(2026, 3, 1, 10, 0, tzinfo=UTC)
