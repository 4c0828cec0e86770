"""`holdfast top` fits the terminal, shows unhealthy workers first, and shows the current load."""

import io
import re
from datetime import timedelta
from typing import Any

import pytest
from fleet_history import EPOCH, History
from rich.console import Console

from controller.commands.top import FleetSeen, picture
from events.fact import Recorded, Skipped
from events.observations import RequestsRejected, RequestsServed


def worker(name: str, health: str = "HEALTHY", **more: Any) -> dict[str, Any]:
    return {
        "id": name,
        "health": health,
        "weight": 1.0,
        "breaker": "closed",
        "in_flight": 2,
        "model": "llama",
        **more,
    }


def status(*workers: dict[str, Any]) -> dict[str, Any]:
    return {
        "workers": workers, "levels": {"llama": 0}, "leader": "controller:c-1:0190a", "journal": {"last_seq": 1234},
        "projector": {"lag": 3},
    }  # fmt: skip


def drawn(seen: FleetSeen, columns: int = 80, lines: int = 23) -> list[str]:
    to = io.StringIO()
    Console(file=to, width=columns, highlight=False).print(picture(seen, lines))
    return to.getvalue().splitlines()


def served(at: float, count: int, tokens: int, ttft_ms: float = 30.0) -> Recorded:
    fact = RequestsServed(
        worker="w0", instance="a", frontend="f", count=count, tokens=tokens, ttft_ms=ttft_ms, itl_ms=5.0, routed_under=1,
        window_s=1.0,
    )  # fmt: skip
    return Recorded(1, EPOCH + timedelta(seconds=at), fact, "id")


@pytest.mark.parametrize("columns", [80, 200])
@pytest.mark.parametrize("lines", [12, 23, 60])
def test_the_picture_fits_with_many_workers_and_long_names(columns: int, lines: int) -> None:
    seen = FleetSeen(
        status=status(
            *(worker(f"a-worker-with-a-very-long-name-{n}", reasons=["x" * 90]) for n in range(500))
        )
    )
    seen.take(History().start().corruption().recovery().events)
    found = drawn(seen, columns, lines)
    assert len(found) <= lines
    assert max(map(len, found)) <= columns
    assert any(line.strip().endswith("more workers") for line in found)


def test_unhealthy_workers_come_first() -> None:
    bad = worker("w9", "UNHEALTHY", weight=0.0, breaker="open", reasons=["health UNHEALTHY: token_mismatch"])
    capped = worker("w5", weight=0.5, reasons=["gpu: leaves 0.5"])
    seen = FleetSeen(
        status=status(worker("w1"), worker("w2", spare=True, weight=0.0, reasons=["spare"]), capped, bad)
    )
    rows = [line.split() for line in drawn(seen) if re.match(r"w\d", line)]
    assert [row[0] for row in rows] == ["w9", "w5", "w1", "w2"]
    assert rows[0][1:5] == ["UNHEALTHY", "0", "open", "2"] and "token_mismatch" in drawn(seen)[6]
    head = drawn(seen)
    assert head[0].split() == ["Holdfast", "3", "HEALTHY", "1", "UNHEALTHY"]
    assert head[1].startswith("serving with 1.5 of 3, 1 spare   8 in flight")
    assert head[3].startswith("leader c-1   1,234 events   store 3 behind   no degradation")


def test_names_are_not_parsed_as_markup() -> None:
    seen = FleetSeen(status=status(worker("gpu[/0]", breaker="[red]", reasons=["cannot load [/models/x]"])))
    assert any(
        "gpu[/0]" in line and "[red]" in line and "cannot load [/models/x]" in line
        for line in drawn(seen, 120)
    )


def test_rates_cover_the_last_ten_seconds() -> None:
    seen = FleetSeen(status=status(worker("w0")))
    seen.take([served(0, 1000, 50_000), served(20, 10, 400, 20.0), served(25, 30, 1600, 40.0)])
    refused = RequestsRejected(frontend="f", model="llama", count=5, reason="queue_full", tier="standard")
    seen.take([Recorded(4, EPOCH + timedelta(seconds=26), refused, "id")])
    assert seen.rates() == "4.0 answers/s   200 tokens/s   first token 35 ms   0.5 refused/s"


def test_the_latest_events_are_shown_without_routine_ones() -> None:
    history, seen = History().start().corruption(), FleetSeen(status=status(worker("w0")))
    seen.take(history.events)
    lines = drawn(seen)
    assert any("w2 failed a canary: token_mismatch" in line for line in lines)
    assert not any("passed a canary in" in line for line in lines)


def test_similar_events_about_many_requests_are_one_line() -> None:
    history, seen = History().start(), FleetSeen(status=status(worker("w0")))
    history.say(
        *(history.exposed(f"r{n}", "w2") for n in range(40)), history.exposed("r", "w1"), source="frontend-0"
    )
    seen.take(history.events)
    lines = [line for line in drawn(seen) if "holds tokens" in line]
    assert (
        len(lines) == 2
        and lines[0].startswith("[40 times] ")
        and "r0 holds" in lines[0]
        and "from w1" in lines[1]
    )


def test_a_missing_fleet_is_reported_and_the_last_picture_stays() -> None:
    assert drawn(FleetSeen())[0] == "waiting for the fleet"
    found = drawn(FleetSeen(status=status(worker("w0")), fault="no controller answers"))
    assert found[0] == "no controller answers" and any(line.startswith("w0") for line in found)


def test_events_of_unknown_kinds_are_counted_and_not_shown() -> None:
    seen = FleetSeen(status=status(worker("w0")))
    newer = Skipped(
        why="'worker_dreamt' is unknown",
        subject="fleet.observed.worker.w0.worker_dreamt",
        bytes=2,
        unknown=True,
    )
    seen.take([Recorded(n, EPOCH, newer, f"e{n}") for n in (1, 2)])
    assert (seen.unknown, seen.last, [*seen.told]) == (2, 2, [])
    assert any("2 events of unknown kinds skipped" in line for line in drawn(seen))
