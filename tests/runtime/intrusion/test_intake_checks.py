"""The intake passes only workers' facts from their own account and within their budget."""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from frontend_kit import joined
from scripted_worker import ScriptedWorker
from waits import until

from controller.journal_settings import JournalSettings
from controller.runtime.intake import FactIntake, FactRefused, NotNow, accepted, written
from controller.runtime.settings import ControllerBudgets
from events import codec, subjects
from events.fact import Fact
from events.intrusion.send_budget import MIB
from events.journal.messages import as_sent
from events.observations import AdaptersChanged, WorkerHeard, WorkerLeft

NOW = datetime(2026, 1, 1, tzinfo=UTC)
LEFT = WorkerLeft(worker="w0", instance="w0-1", mode="graceful", exit=0)
USER = "worker-w0"


def headers(fact: Fact, source: str = "worker:w0:life", number: int = 1, **more: Any) -> bytes:
    made = codec.encode_headers(fact, id=codec.new_id(), source=source, source_number=number, said_at=NOW)
    return as_sent({**made, **more})


def take(fact: Fact, *, user: str = USER, worker: str = "w0", said: bytes | None = None) -> Any:
    head = headers(fact) if said is None else said
    return accepted(user, worker, fact.kind(), head, codec.encode_body(fact))


def test_an_honest_fact_is_accepted_with_its_own_source_and_number() -> None:
    event = take(LEFT)
    assert (event.fact, event.source, event.source_number) == (LEFT, "worker:w0:life", 1)
    many = replace(LEFT, worker="w2")
    assert accepted("worker-w0+3", "w2", many.kind(), headers(many), codec.encode_body(many)).fact == many


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"worker": "w1"}, "publish facts of w1"),
        ({"fact": replace(LEFT, worker="w1")}, "belongs on"),
        ({"source": "worker:w1:life"}, "another source"),
        ({"source": "frontend:f0:life"}, "another source"),
        ({"source": "controller:c0:life"}, "another source"),
        ({"number": 0}, "another source"),
        ({"fact": WorkerHeard(worker="w0", instance="w0-1", observer="c")}, "no worker observes"),
        ({"body": b"x" * 70_000}, "70000 bytes"),
        ({"body": b"{}"}, "no fact"),
        ({"fact": joined(ScriptedWorker("w0"), context_tokens=0)}, "impossible value: context_tokens = 0"),
        (
            {"fact": AdaptersChanged(worker="w0", instance="w0-1", adapters=("a",) * 65)},
            "impossible value: number of adapters = 65",
        ),
        (
            {"fact": joined(ScriptedWorker("w0"), account="worker-w1")},
            "account worker-w1, which is not its own",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_an_invalid_fact_is_refused_permanently(said: dict[str, Any], why: str) -> None:
    fact = said.get("fact", LEFT)
    head = headers(fact, said.get("source", "worker:w0:life"), said.get("number", 1))
    with pytest.raises(FactRefused, match=why):
        accepted(USER, said.get("worker", "w0"), fact.kind(), head, said.get("body", codec.encode_body(fact)))


def test_a_newer_workers_fact_waits_for_a_newer_controller() -> None:
    dreamt: dict[str, Any] = {"ce-type": "holdfast.worker_dreamt"}
    head = headers(LEFT, **dreamt)
    with pytest.raises(NotNow):
        accepted(USER, "w0", "worker_dreamt", head, b"{}")


def test_headers_that_jetstream_obeys_are_not_taken_from_a_worker() -> None:
    obeyed: dict[str, Any] = {
        "Nats-Batch-Id": "b",
        "Nats-Batch-Sequence": "1",
        "Nats-Rollup": "all",
        "Nats-TTL": "1s",
    }
    obeyed |= {"Nats-Expected-Last-Sequence": "0"}
    event = take(LEFT, said=headers(LEFT, **obeyed))
    rewritten = written(event, {"traceparent": "t", **obeyed})
    assert not rewritten.keys() & obeyed.keys() and rewritten["traceparent"] == "t"
    assert rewritten["Nats-Msg-Id"] == event.id


class Reports:
    def __init__(self) -> None:
        self.said: list[tuple[str, str, str, str, bool]] = []

    def report(
        self, account: str, tried: str, *, worker: str = "", instance: str = "", eject: bool = False
    ) -> None:
        self.said.append((account, tried, worker, instance, eject))


async def test_a_flood_is_dropped_before_the_journal_reported_and_its_sender_ejected() -> None:
    reports, now = Reports(), [0.0]
    intake = FactIntake(None, reports.report, lambda worker: f"{worker}-1", lambda: now[0])  # type: ignore[arg-type]
    subject, size = subjects.fact_of_worker(USER, subjects.subject(LEFT)).encode(), 3 * 1024 * 1024
    intake.receive(subject, b"", bytes(size), None)  # no reply address: refused, and counted
    assert "have an answer sent to" in reports.said[0][1]
    for _ in range(int(ControllerBudgets().facts_burst) + 2):
        intake.receive(subject, b"_INBOX.worker-w0.x.1", bytes(size), None)
    assert not intake.unanswered, "none of them is on the way to the journal"
    assert reports.said[1][:2] == (USER, f"publish facts beyond its budget: {size} bytes")
    assert reports.said[1][4] is False and reports.said[-1][2:] == ("w0", "w0-1", True)


async def test_a_worker_that_floods_slowly_is_ejected_before_it_fills_the_journal() -> None:
    """It stays within the budget per second, and in a day publishes less than a hundredth of the journal's capacity."""
    reports, now = Reports(), [0.0]
    intake = FactIntake(None, reports.report, lambda worker: f"{worker}-1", lambda: now[0])  # type: ignore[arg-type]
    subject, size = subjects.fact_of_worker(USER, subjects.subject(LEFT)).encode(), 60_000
    taken = 0
    while now[0] < 86_400.0 and not any(eject for *_, eject in reports.said):
        intake.receive(subject, b"", bytes(size), None)  # without a reply address: counted, and not published
        taken, now[0] = taken + size, now[0] + 0.25
    assert reports.said[-1] == (
        USER,
        f"publish facts beyond its budget of a day: {size} bytes",
        "w0",
        "w0-1",
        True,
    )
    assert 64 * MIB <= taken < 65 * MIB and JournalSettings().max_bytes > 100 * taken


@pytest.mark.parametrize(
    ("said", "tried", "eject"),
    [
        ({"source": "worker:w1:life"}, "publish as another source: worker:w1:life, number 1", True),
        ({"number": 0}, "publish as another source: worker:w0:life, number 0", True),
        ({"ce_type": "holdfast.worker_heard"}, "publish what is no fact", False),  # harms no other source
    ],
)
async def test_a_sender_that_names_another_source_is_reported_and_ejected(
    said: dict[str, Any], tried: str, eject: bool
) -> None:
    reports = Reports()
    intake = FactIntake(None, reports.report, lambda worker: f"{worker}-1", lambda: 0.0)  # type: ignore[arg-type]
    more = {"ce-type": said["ce_type"]} if "ce_type" in said else {}
    head = headers(LEFT, said.get("source", "worker:w0:life"), said.get("number", 1), **more)
    subject = subjects.fact_of_worker(USER, subjects.subject(LEFT)).encode()
    intake.receive(subject, b"_INBOX.worker-w0.x.1", codec.encode_body(LEFT), head)
    await until(lambda: not intake.unanswered, 10)
    ((account, reason, *life),) = reports.said
    assert account == USER and reason.startswith(tried) and life == ["w0", "w0-1", eject]


def test_an_answer_goes_only_to_the_sender() -> None:
    reports = Reports()
    intake = FactIntake(None, reports.report, lambda worker: "", lambda: 0.0)  # type: ignore[arg-type]
    for elsewhere in (
        b"live.retire.w1",
        b"$KV.HOLDFAST.controller",
        b"_INBOX.worker-w1.x.1",
        b"_INBOX.worker-w0x.1",
    ):
        intake.receive(subjects.fact_of_worker(USER, subjects.subject(LEFT)).encode(), elsewhere, b"{}", None)
    assert len(reports.said) == 4 and not intake.unanswered
