"""The size and room of journal and spools, as `holdfast status` prints them."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from controller.adapters.clock import SystemClock
from controller.commands.status import print_status
from controller.runtime.storage_usage import JournalRoom, describe, room
from events.journal.port import JournalGone, JournalUnavailable
from events.journal.usage import JournalUsage

EMPTY: dict[str, Any] = {
    "workers": [], "levels": {}, "leader": None, "processes": [], "projector": {"position": None, "lag": None},
}  # fmt: skip
GIB = 1024**3
Eventually = Callable[..., Awaitable[None]]


async def told(found: JournalUsage | Exception, data: Path) -> dict[str, dict[str, Any]]:
    async def usage() -> JournalUsage:
        if isinstance(found, Exception):
            raise found
        return found

    return await describe(usage, data)


def printed(stored: dict[str, dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> str:
    print_status({**EMPTY, **stored, "journal": {"last_seq": 900, **stored["journal"]}})
    return capsys.readouterr().out


async def test_size_growth_and_the_days_until_the_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = await told(JournalUsage(1, 900, 2 * GIB, 10 * GIB, GIB / 4), tmp_path)
    assert stored["journal"]["days_left"] == 32.0 and stored["journal"]["fault"] is None
    assert "900 events, 2.0 GiB of 10.0 GiB, 256.0 MiB a day, room for 32 days" in printed(stored, capsys)


async def test_if_the_oldest_events_are_dropped_it_reports_which_remain(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full = JournalUsage(501, 900, 2 * GIB, 2 * GIB, GIB / 4, timedelta(days=30))
    stored = await told(full, tmp_path)
    assert stored["journal"]["age_max_s"] == 30 * 86_400
    assert "events 501 to 900, 2.0 GiB of 2.0 GiB, 256.0 MiB a day, full\n" in printed(stored, capsys)


async def test_without_a_limit_the_disk_is_the_limit_if_it_is_on_this_host(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = await told(JournalUsage(1, 900, 2048, None, 1.0), tmp_path)
    assert elsewhere["journal"]["days_left"] is None
    assert "900 events, 2.0 KiB, 1 B a day\n" in printed(elsewhere, capsys)
    (tmp_path / "nats").mkdir()
    here = await told(JournalUsage(1, 900, 2048, None, 1.0), tmp_path)
    assert here["journal"]["days_left"] > 1_000
    assert "1 B a day, room for years" in printed(here, capsys)
    young = await told(JournalUsage(1, 900, 2048, None, None), tmp_path)
    assert young["journal"]["days_left"] is None
    assert "2.0 KiB, growth not known yet" in printed(young, capsys)


async def test_a_lost_journal_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gone = await told(JournalGone(), tmp_path)
    assert "--accept-journal" in gone["journal"]["fault"] and gone["journal"]["bytes"] is None
    assert "journal      The broker has no stream." in printed(gone, capsys)
    away = await told(JournalUnavailable(), tmp_path)
    assert away["journal"]["fault"] is None and away["journal"]["bytes"] is None
    assert "journal      900 events\n" in printed(away, capsys)


async def test_spools_are_summed_and_their_bound_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("worker-w0", "worker-w1"):
        (tmp_path / "spool" / name).mkdir(parents=True)
        (tmp_path / "spool" / name / "life.00000000.spool").write_bytes(bytes(1024))
        (tmp_path / "spool" / name / "acknowledged.json").write_text("{}")
    stored = await told(JournalUsage(1, 900, 2048, None, None), tmp_path)
    assert stored["spool"]["bytes"] == 2048
    assert "spools       2.0 KiB on this host; at most 64.0 MiB of each process" in printed(stored, capsys)


@pytest.mark.parametrize(
    ("found", "free", "days"),
    [
        (JournalUsage(1, 900, 2 * GIB, 10 * GIB, GIB), 100 * GIB, None),  # the oldest events are dropped
        (JournalUsage(1, 900, 10 * GIB, 10 * GIB, GIB), 0, None),
        (JournalUsage(1, 900, 2 * GIB, 10 * GIB, GIB), 4 * GIB, 4),  # the disk is full first
        (JournalUsage(1, 900, 2 * GIB, None, GIB), 4 * GIB, 4),
        (JournalUsage(1, 900, 2 * GIB, 10 * GIB, GIB, refuses=True), 100 * GIB, 8),
        (JournalUsage(1, 900, 2 * GIB, 10 * GIB, GIB, refuses=True), 4 * GIB, 4),
        (JournalUsage(1, 900, 11 * GIB, 10 * GIB, GIB, refuses=True), None, 0),
        (JournalUsage(1, 900, 2 * GIB, None, GIB), None, None),  # its disk is on another host
        (JournalUsage(1, 900, 2 * GIB, None, None), 4 * GIB, None),  # too young
        (None, 4 * GIB, None),
    ],
)
def test_the_journal_is_full_when_it_accepts_nothing_more(
    found: JournalUsage | None, free: int | None, days: float | None
) -> None:
    told = room(found, free)
    assert told["journal_full_in_seconds"] == (None if days is None else days * 86_400)
    assert told["journal_free_bytes"] == free
    assert told["journal_bytes"] == (found and found.bytes)


async def test_the_values_are_of_the_last_look_and_unknown_while_the_broker_is_unavailable(
    tmp_path: Path, eventually: Eventually
) -> None:
    (tmp_path / "nats").mkdir()
    answers: list[JournalUsage | Exception] = [JournalUsage(1, 9, 2048, None, 1.0)]

    async def usage() -> JournalUsage:
        if isinstance(answers[-1], Exception):
            raise answers[-1]
        return answers[-1]

    watched = JournalRoom(usage, tmp_path, SystemClock(), look_s=0.01)
    assert set(watched.known.values()) == {None}, "no query was made yet"
    running = asyncio.create_task(watched.run())
    await eventually(lambda: watched.known["journal_bytes"] == 2048)
    assert watched.known["journal_full_in_seconds"]
    answers.append(JournalUnavailable())
    await eventually(lambda: watched.known["journal_bytes"] is None)
    assert watched.known["journal_free_bytes"], "the disk is there"
    running.cancel()
