"""A post-mortem shows causes, user impact, times and cost; as HTML, Markdown and JSON, and redacted."""

import argparse
import json
import re
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from fleet_history import EPOCH, History
from memory_journal import MemoryJournal

from controller.replay import cli, pages, timeline, travel
from controller.replay.atomic_file import CannotWrite
from controller.replay.event_lookup import FleetHistory, JournalArchive, NoSuchEvent
from controller.replay.flags import add_arguments
from controller.replay.pages import NoPlotly, plotly
from controller.replay.report import window
from controller.replay.report.window import NothingToTell
from controller.replay.sentences import span
from controller.replay.travel import NotYet
from events.decisions import DegradationChanged, HealthChanged, IncidentOpened, Knobs
from events.errors import HoldfastError, UsageError
from events.observations import (
    ChaosInjected,
    CommandRefused,
    DrainRequested,
    EngineFaulted,
    ExposureUnknown,
    GoldenRequested,
    IntrusionRefused,
    RequestAbandoned,
    RequestsRejected,
    ScaleApplied,
    ScaleSet,
    SnapshotKept,
    Topology,
    WorkerLeft,
)


def journal(history: History) -> MemoryJournal:
    return MemoryJournal(history.stream, "replay-1")


async def reported(history: History, *words: str) -> list[str]:
    """Run the command line, and return what it printed."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    said: list[str] = []
    args = parser.parse_args(["report", *words])
    assert await cli.execute(args, journal(history), None, said.append) == 0
    return said


async def told(history: History, *words: str) -> dict[str, Any]:
    (text,) = await reported(history, *words, "-o", "json")
    document: dict[str, Any] = json.loads(text)
    return document


@pytest.fixture
def history() -> History:
    """Three workers; w2 is convicted, a request leaves it with altered tokens, and it recovers."""
    return History().start().corruption().recovery()


async def test_three_sentences_summarize_the_failure_its_impact_and_the_response(history: History) -> None:
    what, impact, how = (await told(history))["summary"]
    assert what == (
        "At 2026-03-01 12:00:07 UTC worker w2 failed (token_mismatch); "
        "it recovered 0:03:43 after its incident was opened."
    )
    assert impact == (
        "1 request migrated (longest gap 32 ms); "
        "1 request was exposed to 17 tokens from a convicted worker; none was lost."
    )
    assert how == (
        "It was noticed after 0 ms, fenced after 0 ms, recovered after 0:03:43; "
        "199.8 GPU-seconds were missing, and at least 67 % of the fleet served throughout."
    )


async def test_the_summary_of_a_killed_worker_does_not_say_that_it_recovered() -> None:
    history = History().start()
    history.say(WorkerLeft(worker="w2", instance="w2-a", mode="immediate", exit=-9))
    history.decide()
    what, *_ = (await told(history))["summary"]
    assert re.search(r"; it was recorded as dead \S+ ?\w* after its incident was opened\.$", what)


async def test_an_incident_has_one_recovery_time(history: History) -> None:
    """The headline, the sentences, the phases and the JSON give the same number, even with a fault injected long before."""
    again = History().start()
    again.say(ChaosInjected(worker="w2", instance="w2-a", fault="corrupt", by="ada"))
    again.corruption().recovery()
    document = await told(again)
    phases = {one["phase"]: one["seconds"] for one in document["phases"]}
    assert phases["noticed"] >= 1
    assert document["incident"]["recovered_s"] == document["incident"]["lasted_s"] == phases["recovered"]
    assert (
        span(phases["recovered"]) in document["summary"][0]
        and span(phases["recovered"]) in document["summary"][2]
    )
    archive = JournalArchive(journal(again))
    story = await timeline.story(journal(again), archive, document["incident"]["incident"])
    assert (
        story.recovered_s == phases["recovered"] and f"after {span(phases['recovered'])}" in story.headline()
    )


async def test_operator_commands_and_rehearsals_are_shown(history: History, tmp_path: Path) -> None:
    """Commands, refused commands, quarantines, numbers of workers and rehearsals are listed, each with its operator."""
    history.say(
        ChaosInjected(worker="w1", instance="w1-a", fault="hang", by="ada"),
        DrainRequested(worker="w0", instance="w0-a", deadline_s=None, by="ada"),
        CommandRefused(worker="w9", verb="move", command="command-1", why="no such worker", by="bob"),
        ScaleSet(model="llama", workers=4, by="bob", reason="a rush"),
        ScaleApplied(model="llama", after=4, by="supervisor", ok=True, says="started", proposal="p"),
        GoldenRequested(act="retire", canary_key="k", canaries=("c1",), by="cyd"),
    )
    document = await told(history, "--since", "1")
    found = [(one["by"], one["rehearsal"], one["refused"]) for one in document["acts"]]
    assert found == [
        ("ada", True, False),
        ("ada", False, False),
        ("bob", False, True),
        ("bob", False, False),
        ("cyd", False, False),
    ]
    assert "w0" in document["acts"][1]["text"]
    text = "\n".join(await reported(history, "--since", "1", "-o", "md"))
    assert "## Operator commands" in text and "| rehearsal |" in text and "| ada |" in text
    hidden = "\n".join(await reported(history, "--since", "1", "-o", "md", "--redact"))
    assert "| ada |" not in hidden and "| person-1 |" in hidden
    assert (await told(History().start(), "--since", "1"))["acts"] == []


@pytest.mark.slow
async def test_the_last_incident_is_the_default_and_any_event_of_another_selects_it(history: History) -> None:
    first = (await told(history))["incident"]["incident"]
    history.corruption("w1").recovery("w1")
    last = (await told(history))["incident"]
    assert last["subject"] == "worker:w1" and last["incident"] != first
    opened = next(e for e in history.events if e.fact.kind() == "incident_opened")
    for name in (first, str(opened.seq), opened.id):
        assert (await told(history, "--incident", name))["incident"]["incident"] == first
    with pytest.raises(NoSuchEvent):
        await told(history, "--incident", "incident-4711")


async def test_user_impact_and_cost(history: History) -> None:
    document = await told(history)
    (request,) = document["requests"]
    assert request["workers"] == ["w2", "w0"] and request["gaps_ms"] == [31.5] and request["exact"]
    assert request["exposed"] == [{"worker": "w2", "first": 3, "last": 19}]
    cost = document["cost"]
    assert (cost["tokens_read_again"], cost["tokens_exposed"]) == (17, 17)
    # out of service from the conviction to the ramp after the trial: a quarter, a half and full weight, 31 s apart
    steps = [
        (e.at, e.fact.weight)
        for e in history.events
        if isinstance(e.fact, HealthChanged) and e.fact.worker == "w2"
    ]
    steps = [one for one in steps if one[0] >= EPOCH + timedelta(seconds=7)]
    lacked = sum((1 - weight) * (until - at).total_seconds() for (at, weight), (until, _) in pairwise(steps))
    assert cost["gpu_seconds_missing"] == pytest.approx(lacked)
    assert cost["least_capacity"] == pytest.approx(2 / 3)


async def test_a_starting_fleet_lacks_no_capacity_before_its_first_worker_serves(history: History) -> None:
    cost = (await told(History().start(), "--since", "1"))["cost"]
    assert (cost["gpu_seconds_missing"], cost["least_capacity"]) == (0.0, 1 / 3), (
        "its workers become ready one after another"
    )
    whole = (await told(history, "--since", "1"))["cost"]["gpu_seconds_missing"]
    assert whole == pytest.approx((await told(history))["cost"]["gpu_seconds_missing"])


async def test_a_spare_that_waits_is_not_missing(history: History) -> None:
    history.say(replace(history.joined("s0"), spare=True))
    history.say(history.passed("s0", check="join"))
    history.decide()
    since = str(len(history.events) + 1)
    history.say(history.passed("s0"), history.passed("w0"), history.passed("w1"))
    document = await told(history, "--since", since)
    assert document["frames"][0]["workers"]["s0"]["state"] == "SPARE"
    assert (document["cost"]["gpu_seconds_missing"], document["cost"]["least_capacity"]) == (0.0, 1.0)


async def test_lost_and_rejected_requests_are_reported(history: History) -> None:
    history.say(
        RequestAbandoned(
            frontend="frontend-0", request="req-9", model="llama", worker="w0", instance="w0-a", reason="no_worker", tokens=4
        ),
        RequestsRejected(frontend="frontend-0", model="llama", count=7, reason="queue_full", tier="standard"),
        source="frontend-0",
    )  # fmt: skip
    document = await told(history, "--since", "1")
    assert "1 request was lost; 7 requests were rejected." in document["summary"][1]
    assert document["cost"]["rejected"] == {"queue_full": 7}
    assert [
        (one["lost"], one["lost_tokens"]) for one in document["requests"] if one["request"] == "req-9"
    ] == [("no_worker", 4)]


async def test_each_frame_is_the_fleet_as_replay_at_shows_it(history: History) -> None:
    document = await told(history, "--since", "1")
    state: dict[str, Any] = {}
    frames = {frame["seq"]: frame for frame in document["frames"]}
    assert len(frames) > 10
    for seq in range(len(history.events) + 1):
        for worker, shown in frames.get(seq, {"workers": {}})["workers"].items():
            state[worker] = shown
            if shown is None:
                del state[worker]
        moment = travel.describe(await travel.at(journal(history), None, seq))
        breakers = {row["worker"]: row["position"] for row in moment["breakers"]}
        wanted = {
            row["worker"]: (row["health"], row["weight"], row["reason"], breakers[row["worker"]])
            for row in moment["workers"]
        }
        assert {
            w: (s["health"], s["weight"], s["reason"], s["breaker"]) for w, s in state.items()
        } == wanted, seq


async def test_each_cause_precedes_its_effects_in_the_tree(history: History) -> None:
    nodes = (await told(history))["causes"]
    texts = [(node["depth"], node["text"].split(" (")[0]) for node in nodes[:4]]
    assert texts == [
        (0, "w2 failed a canary: token_mismatch, confirmed"),
        (1, "incident-5 opened for worker w2: token_mismatch"),
        (1, "w2 went from HEALTHY to UNHEALTHY, weight 0"),
        (2, "the breaker of w2 opened for 60 s"),
    ]


async def test_phases_begin_with_an_injected_fault_and_are_compared_with_other_incidents(
    history: History,
) -> None:
    history.now += timedelta(minutes=5)
    history.say(
        ChaosInjected(worker="w1", instance="w1-a", fault="corrupt", by="ann", command="c1"), seconds=10.0
    )
    history.now += timedelta(seconds=2.5)
    history.corruption("w1").recovery("w1")
    phases = {one["phase"]: one for one in (await told(history))["phases"]}
    assert phases["noticed"]["seconds"] == pytest.approx(3.5), "from the fault to the opening"
    assert phases["noticed"]["of"] == 1 and phases["noticed"]["median_s"] == 0
    assert phases["recovered"]["median_s"] == phases["recovered"]["mean_s"] == 223


async def test_redaction_replaces_names(history: History) -> None:
    history.say(
        ChaosInjected(worker="w1", instance="w1-a", fault="hang", by="ann@example.org", command="c1"),
    )
    text = json.dumps(await told(history, "--since", "1", "--redact"))
    plain = json.dumps(await told(history, "--since", "1"))
    for name in (
        "w0",
        "w1",
        "w2",
        "w2-a",
        "req-1",
        "frontend-0",
        "ann@example.org",
        "tcp://127.0.0.1:1",
        "4242",
    ):
        word = re.compile(rf"(?<![\w.-]){re.escape(name)}(?![\w-])")
        assert word.search(plain), name
        assert not word.search(text), name
    one, other = json.loads(text), json.loads(plain)
    assert [frame["at"] for frame in one["frames"]] == [frame["at"] for frame in other["frames"]]
    assert len(one["events"]) == len(other["events"]) and one["cost"] == other["cost"]


async def test_redaction_covers_all_fields(history: History) -> None:
    """Names known only from earlier, packed data, names within a subject, and names that are everyday words."""
    history.say(
        replace(history.joined("12", "12-a"), topology=Topology(host="rack-7.example", gpus=("GPU-secret",))),
        replace(history.joined("gpu/odd"), url="tcp://10.1.2.3:4000", tokenizer="/home/ann/models/llama"),
    )
    since = str(len(history.events) + 1)
    history.say(
        EngineFaulted(worker="w0", instance="w0-a", reason="lost 10.1.2.3:4000, see /home/ann/log.txt", fatal=False),
        IntrusionRefused(who="worker-w1", tried="publish to fleet.observed.worker.w1.worker_left", times=1),
        SnapshotKept(snapshot="s", part=1, parts=1, shape=1, through=1, decided=1, number=1, since=EPOCH, data="cGFja2Vk"),
        ExposureUnknown(frontend="frontend", worker="w2", instance="w2-a", since=EPOCH, until=EPOCH, why="restarted"),
    )  # fmt: skip
    document = await told(history, "--since", since, "--redact")
    text = json.dumps(document)
    for name in (
        "w0",
        "w1",
        "w2",
        "gpu/odd",
        "rack-7",
        "GPU-secret",
        "10.1.2.3",
        "/home/ann",
        "worker.w1.",
        "cGFja2Vk",
    ):
        assert name not in re.sub(r"worker-\w+", "", text), name
    assert len(document["frames"][0]["workers"]) == 5 and "12" not in document["frames"][0]["workers"]
    assert document["unknown_exposure"][0]["frontend"] == "frontend", "a generic name"
    assert document["from"].startswith("2026-03-01T12:") and document["frames"][0]["at"].startswith(
        "2026-03-01T12:"
    )
    for form in ("md", "json"):
        await reported(history, "--since", since, "--redact", "-o", form)


async def test_a_page_is_one_self_contained_file(history: History, tmp_path: Path) -> None:
    where = tmp_path / "it.html"
    said = await reported(history, "-o", str(where))
    assert re.fullmatch(rf"{re.escape(str(where))}: 32 events, 4\.\d MB, in .+", said[0])
    assert len(said) == 4 and said[1].startswith("  At 2026-03-01")
    text = where.read_text()
    ours = text.replace(plotly(), "")
    assert not re.findall(r"(?:src|href)\s*=\s*[\"']?(?!#)[^\"' >]+", ours)
    assert not re.findall(r"@import|url\(", ours)
    assert [one.name for one in tmp_path.iterdir()] == ["it.html"]


async def test_names_and_messages_are_escaped_in_html_and_markdown(tmp_path: Path) -> None:
    history, where = History().start(), tmp_path / "it.html"
    history.say(history.migrated("<script>alert(1)</script>|", "w2", "w0"), source="frontend-0")
    await reported(history, "--since", "1", "-o", str(where))
    assert "<script>alert" not in where.read_text()
    assert "&lt;script&gt;alert(1)&lt;/script&gt;|" in where.read_text()
    history.say(EngineFaulted(worker="w0", instance="w0-a", reason="<img src=x>\n# Hi", fatal=True))
    history.decide()
    (text,) = await reported(history, "--since", "1", "-o", "md")
    assert "| &lt;script>alert(1)&lt;/script>\\| |" in text
    assert "<img" not in text and "\n# Hi" not in text and "&lt;img src=x> \\# Hi" in text


async def test_markdown_has_what_the_page_has(history: History, tmp_path: Path) -> None:
    (text,) = await reported(history, "-o", "md")
    headings = [line.removeprefix("## ") for line in text.splitlines() if line.startswith("#")]
    assert headings == [
        "# Incident incident-5: worker w2, token_mismatch",
        "How long it took", "User impact", "Operator commands", "Cost", "Causes", "Policy in force",
            "Under another policy",
    ]  # fmt: skip
    await reported(history, "-o", str(tmp_path / "it.md"))
    assert (tmp_path / "it.md").read_text().strip() == text.strip()
    assert "| req-1 | llama | w2, then w0 | 32 ms | 3–19 from w2 |  |" in text


async def test_invalid_arguments_empty_windows_and_unwritable_files_are_errors(
    history: History, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for words in (["-o", "it.pdf"], ["-o", "html"], ["--incident", "1", "--since", "1"], ["--until", "3"]):
        with pytest.raises(UsageError):
            await reported(history, *words)
    with pytest.raises(NothingToTell):
        await reported(history, "--since", "2026-03-02", "-o", "md")
    with pytest.raises(NothingToTell):
        await reported(history, "--since", "4711", "-o", "md")
    with pytest.raises(NothingToTell):
        await reported(History(), "-o", "md")
    with pytest.raises(CannotWrite, match="No such file"):
        await reported(history, "-o", str(tmp_path / "nowhere" / "it.md"))
    monkeypatch.setattr(pages, "PLOTLY", "no_such_package_as_this")
    with pytest.raises(NoPlotly, match="pip install"):
        await reported(history, "-o", str(tmp_path / "it.html"))
    for words in (["--since", "999999999d"], ["--since", "²"], ["--incident", "²"]):
        with pytest.raises(HoldfastError):
            await reported(history, *words, "-o", "md")


async def test_a_report_of_too_many_events_is_truncated_and_says_so(
    history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not (await told(history, "--since", "1"))["cut"]
    monkeypatch.setattr(window, "EVENTS_MAX", 10)
    document = await told(history, "--since", "1")
    assert document["cut"] and [event["seq"] for event in document["events"]] == list(range(1, 11))
    (text,) = await reported(history, "-o", "md")
    assert ", 10 events (truncated: the window has more)." in text


async def test_repeated_events_count_once(history: History) -> None:
    before = await told(history, "--since", "1")
    for kind in ("request_exposed", "request_migrated", "canary_failed"):
        history.repeat(next(event for event in history.events if event.fact.kind() == kind))
    document = await told(history, "--since", "1")
    assert (document["cost"], document["causes"]) == (before["cost"], before["causes"])
    assert document["requests"] == before["requests"]


async def test_the_report_of_a_models_incident_includes_its_user_impact(history: History) -> None:
    knobs = Knobs(accept_new=False)
    number = history.latest.position.number
    shared = {"decided_at": history.now, "incident": "incident-9"}
    opened = IncidentOpened(number=number + 1, subject="model:llama", symptom="level 4", **shared)  # type: ignore[arg-type]
    level = DegradationChanged(
        number=number + 2, model="llama", before=0, after=4, ratio=0.1, knobs=knobs, capacity_rps=1.0, **shared  # type: ignore[arg-type]
    )  # fmt: skip
    history.append([opened, level], through=len(history.events))
    history.say(
        RequestAbandoned(
            frontend="frontend-0", request="req-9", model="llama", worker="w0", instance="w0-a", reason="no_worker", tokens=4
        ),
        source="frontend-0",
    )  # fmt: skip
    document = await told(history, "--incident", "incident-9")
    assert document["summary"][1] == "1 request was lost."
    assert [one["request"] for one in document["requests"] if one["lost"]] == ["req-9"]


async def test_since_and_until_bound_the_window(history: History) -> None:
    document = await told(history, "--since", "8", "--until", "20")
    assert [event["seq"] for event in document["events"]] == list(range(8, 21))
    assert document["title"].startswith("The fleet from 2026-03-01 12:00:06 to 12:01:12 UTC")
    assert set(document["frames"][0]["workers"]) == {"w0", "w1", "w2"}, (
        "workers from before the window are included"
    )
    late = await told(history, "--since", "2026-03-01T12:02:00Z")
    assert {event["at"] >= "2026-03-01T12:02:00" for event in late["events"]} == {True}
    with pytest.raises(NotYet):
        await travel.order_at(journal(history), None, 4711)
    assert (await window.between(FleetHistory(journal(history), None), 0, 3)).events[0].seq == 1
