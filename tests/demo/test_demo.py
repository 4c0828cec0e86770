"""The demo's accounting: lost, doubled and altered tokens all appear in its table."""

import asyncio
import io
import time
from argparse import Namespace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from waits import until

from controller.demo import cli as demo
from controller.demo import profile, report
from controller.demo.clients import Received, TokenDifference, compare
from controller.trace.rows import BadTrace
from events.decisions import SpareActivated
from events.fact import Fact, Recorded
from events.observations import RequestExposed, RequestMigrated, WorkerHeard, WorkerSilent

NOW = datetime(2026, 1, 1, tzinfo=UTC)
PIECES = st.lists(st.sampled_from([" a", " b", " c", " d", " e"]), max_size=30)


@given(PIECES)
def test_an_equal_stream_has_no_difference(pieces: list[str]) -> None:
    assert compare(pieces, pieces) == TokenDifference()


@given(PIECES, PIECES)
def test_an_unequal_stream_always_has_one(got: list[str], expected: list[str]) -> None:
    assert (compare(got, expected) == TokenDifference()) == (got == expected)


def test_lost_doubled_and_altered_tokens_are_distinguished() -> None:
    expected = [f" t{n}" for n in range(10)]
    assert compare(expected[:4] + expected[5:], expected) == TokenDifference(lost=1)
    assert compare(expected[:4] + expected[3:], expected) == TokenDifference(doubled=1)
    assert compare([*expected[:4], " x", *expected[5:]], expected) == TokenDifference(altered=1)


def received(name: str, pieces: list[str], error: str = "") -> Received:
    return Received(
        name, 0, len(pieces), 0.0, pieces, [float(n) for n in range(len(pieces))], error, not error
    )


def recorded(fact: Fact, after_s: float) -> Recorded:
    return Recorded(seq=1, at=NOW + timedelta(seconds=after_s), fact=fact, id="x")


def migration(request: str, source: str, gap_ms: float) -> RequestMigrated:
    return RequestMigrated(
        frontend="f", request=request, model="m", source=source, source_instance="i", target="w9", target_instance="j",
        cause="disconnected", method="reprefill", tokens=3, gap_ms=gap_ms, attempt=2, exact=True,
    )  # fmt: skip


def exposure(request: str, worker: str) -> RequestExposed:
    return RequestExposed(
        frontend="f",
        request=request,
        model="m",
        worker=worker,
        instance="i",
        first=0,
        last=3,
        finished=True,
        action="none",
    )


def test_a_migration_belongs_to_the_last_fault_of_its_source() -> None:
    kill, hang = (
        report.Injected("kill -9", "w1", NOW),
        report.Injected("hang", "w1", NOW + timedelta(seconds=10)),
    )
    other = report.Injected("drain", "w2", NOW)
    events = [recorded(migration("a", "w1", 12.0), 1), recorded(migration("b", "w1", 420.0), 11)]
    report.attribute(events, [kill, hang, other])
    assert (kill.hit, hang.hit, other.hit) == ({"a": 12.0}, {"b": 420.0}, {})


def test_the_time_until_a_spare_serves_belongs_to_the_fault() -> None:
    kill, drain = report.Injected("kill -9", "w1", NOW), report.Injected("drain", "w2", NOW)
    spare = SpareActivated(
        worker="s0", instance="i", replaces="w1", reason="silent", decided_at=NOW, number=3
    )
    report.attribute([recorded(spare, 0.45)], [kill, drain])
    result = report.assess([], [], [kill, drain])
    assert [row.back_ms for row in result.rows] == [450.0, None]


def test_a_migration_long_after_a_fault_does_not_belong_to_it() -> None:
    hang = report.Injected("hang", "w1", NOW, ended=NOW + timedelta(seconds=6))
    events = [recorded(migration("a", "w1", 420.0), 1), recorded(migration("b", "w1", 9000.0), 40)]
    assert report.attribute(events, [hang]) == 1
    assert hang.hit == {"a": 420.0}


def test_the_view_shows_a_worker_without_a_known_state() -> None:
    unknown = {"id": "w0", "health": None, "breaker": None, "weight": None, "in_flight": None, "pid": None}
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(demo.render({"workers": [unknown]}, ["kill w0"], 1.0, 60.0, "3 requests"))
    shown = console.export_text()
    assert "w0" in shown and "3 requests" in shown and "kill w0" in shown


def test_a_demo_writes_only_below_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fresh = demo.fresh_folder()
    assert fresh.resolve().is_relative_to(tmp_path) and fresh != demo.fresh_folder()


def test_an_altered_stream_that_is_not_named_fails_the_demo() -> None:
    answers = [[" a", " b", " c"]]
    streams = [received("good", [" a", " b", " c"]), received("bad", [" a", " x", " y"])]
    corrupt = report.Injected("corruption", "w3", NOW)
    assert report.assess(streams, answers, [corrupt]).unnamed == ["bad"]
    report.attribute([recorded(exposure("bad", "w3"), 1)], [corrupt])
    named = report.assess(streams, answers, [corrupt])
    assert named.unnamed == [] and named.clean and named.altered_streams == 1
    assert named.rows[0].difference.altered == 2


def test_a_lost_stream_fails_the_demo() -> None:
    assert not report.assess([received("gone", [" a"], "cut")], [[" a"]], []).clean


async def test_a_demo_stops_sending_and_injecting_when_its_fleet_has_ended() -> None:
    load = profile.DemoLoad(((1, 2),), (profile.DemoRequest(0.0, 0, 8), profile.DemoRequest(3600.0, 0, 8)))
    running = demo.Demo(Namespace(seconds=0.01, data=None, keep=False), SimpleNamespace(ended=True), load)  # type: ignore[arg-type]
    async with asyncio.timeout(20):
        await running.send(None, None, time.monotonic())  # type: ignore[arg-type]
        await running.play(None, ["w0"], time.monotonic())  # type: ignore[arg-type]
    assert running.lines == []


def test_a_long_incident_is_shortened_but_keeps_its_end() -> None:
    silent = WorkerSilent(worker="w2", instance="i", silent_s=3.0, observer="controller:c:1")
    heard = WorkerHeard(worker="w2", instance="i", observer="controller:c:1")
    steps = report.steps([Recorded(seq=n, at=NOW, fact=silent, id=str(n)) for n in range(20)]
                             + [Recorded(seq=20, at=NOW, fact=heard, id="20")])  # fmt: skip
    assert len(steps) == report.STEPS_MAX + 1
    assert steps[-2] == "… 9 more …" and steps[-1].endswith("w2 sends heartbeats again (observer c)")


def test_the_profile_gives_the_same_load_for_the_same_seed() -> None:
    assert profile.from_profile(10, 8, seed=3) == profile.from_profile(10, 8, seed=3)
    load = profile.from_profile(60, 8)
    assert 300 < len(load.requests) < 700
    assert all(0 <= r.at_s < 60 and 8 <= r.output_tokens <= profile.OUTPUT_MAX for r in load.requests)


def test_a_trace_is_scaled_in_time_and_length(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        "".join(
            f'{{"timestamp": {n * 1000}, "input_length": 9000, "output_length": {n}}}\n' for n in range(90)
        )
    )
    load = profile.from_trace(trace, 10, speedup=3)
    assert len(load.requests) == 30
    assert load.requests[-1].at_s == pytest.approx(29 / 3)


@pytest.mark.parametrize(
    ("text", "says"), [("{}\n", "line 1"), ("not json\n", "line 1"), ("", "holds no request")]
)
def test_a_bad_trace_is_named(text: str, says: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(text)
    with pytest.raises(BadTrace, match=says):
        profile.from_trace(trace, 10, 1)


class Calm:
    """An operator with a fleet of four workers, and users without requests."""

    streams: tuple[()] = ()
    in_flight = tokens = 0

    async def ask(self, verb: str, body: object, deadline_s: float) -> dict[str, object]:
        return {"workers": [{"id": f"w{n}"} for n in range(4)]}


async def test_the_view_leaves_nothing_behind_on_a_small_terminal() -> None:
    """Output above the top of the terminal cannot be erased, so the whole frame must never be drawn."""
    shown, calm = io.StringIO(), Calm()
    console = Console(file=shown, force_terminal=True, width=60, height=6)
    args = Namespace(seconds=10.0, data=None, keep=False)
    running = demo.Demo(args, None, profile.DemoLoad((), ()), console)  # type: ignore[arg-type]
    watching = asyncio.create_task(running.watch(calm, calm, time.monotonic()))  # type: ignore[arg-type]
    await until(lambda: "Holdfast demo" in shown.getvalue())
    watching.cancel()
    await asyncio.wait([watching])
    assert "╭" in shown.getvalue() and "╰" not in shown.getvalue()
