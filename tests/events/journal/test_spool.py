"""The spool: facts of a killed process are found again, and damage is never silent."""

import os
import random
import shutil
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from events.journal.spool import OutboxMessage, Spool, SpoolUnusable, read


def message(number: int, size: int = 40) -> OutboxMessage:
    headers = {"ce-id": f"id-{number}", "ce-source": "worker:w1:life", "source-number": str(number)}
    return OutboxMessage(number, "fleet.observed.worker.w1.canary_passed", headers, b"x" * size)


def killed(spool: Spool) -> None:
    """Close the files as the kernel does for a killed process."""
    spool.close(empty=False)


def numbers(messages: list[OutboxMessage]) -> list[int]:
    return [each.number for each in messages]


def content(directory: Path) -> bytes:
    (path,) = directory.glob("*.spool")
    return path.read_bytes()


def test_a_successor_finds_what_was_not_acknowledged_in_order(tmp_path: Path) -> None:
    first = Spool(tmp_path, "life-1")
    for number in range(1, 11):
        assert first.put(message(number))
    first.mark(4, empty=False)
    killed(first)
    second = Spool(tmp_path, "life-2")
    found = second.take_over()
    assert found == [message(number) for number in range(5, 11)]
    second.forget_earlier()
    killed(second)
    assert Spool(tmp_path, "life-3").take_over() == []


def test_a_successor_killed_before_it_sent_leaves_everything_to_the_next(tmp_path: Path) -> None:
    for life in ("life-1", "life-2"):
        spool = Spool(tmp_path, life)
        spool.take_over()
        spool.put(message(1))
        killed(spool)
    assert numbers(Spool(tmp_path, "life-3").take_over()) == [1, 1]


def test_a_living_process_s_spool_is_left_alone(tmp_path: Path) -> None:
    living = Spool(tmp_path, "life-1")
    living.put(message(1))
    assert Spool(tmp_path, "life-2").take_over() == []


def test_an_orderly_end_with_nothing_waiting_leaves_no_file(tmp_path: Path) -> None:
    spool = Spool(tmp_path, "life-1")
    spool.put(message(1))
    spool.mark(1, empty=True)
    spool.close(empty=True)
    assert list(tmp_path.glob("*.spool")) == []


def test_a_tail_cut_anywhere_costs_only_the_record_that_was_cut(tmp_path: Path) -> None:
    spool = Spool(tmp_path, "life-1")
    ends = []
    for number in range(1, 6):
        spool.put(message(number))
        ends.append(len(content(tmp_path)))
    data = content(tmp_path)
    for cut in range(len(data) + 1):
        left = read(data[:cut])
        assert numbers(left.messages) == [n for n, end in enumerate(ends, 1) if end <= cut]
        assert left.damaged == 0
        assert left.torn == (cut not in (0, *ends))


def test_any_flipped_bit_is_detected_and_costs_one_record_at_most(tmp_path: Path) -> None:
    spool = Spool(tmp_path, "life-1")
    for number in range(1, 6):
        spool.put(message(number))
    data = content(tmp_path)
    chance = random.Random(7)
    for place in range(len(data)):
        bent = bytearray(data)
        bent[place] ^= 1 << chance.randrange(8)
        left = read(bytes(bent))
        assert left.damaged >= 1, f"a bit flipped at {place} went unnoticed"
        assert not left.torn
        assert len(left.messages) >= 4
        assert all(each == message(each.number) for each in left.messages)


def test_damage_is_logged_and_the_file_moved_aside(tmp_path: Path) -> None:
    spool = Spool(tmp_path, "life-1")
    for number in range(1, 4):
        spool.put(message(number))
    killed(spool)
    (path,) = tmp_path.glob("*.spool")
    bent = bytearray(path.read_bytes())
    bent[len(bent) // 2] ^= 4
    path.write_bytes(bytes(bent))
    second = Spool(tmp_path, "life-2")
    with capture_logs() as logs:
        assert numbers(second.take_over()) == [1, 3]
    assert [line["places"] for line in logs if line["event"] == "spool_damaged"] == [1]
    second.forget_earlier()
    (aside,) = tmp_path.glob("*.damaged")
    assert aside.read_bytes() == bytes(bent)


def test_facts_that_do_not_fit_are_refused_and_space_is_freed_again(tmp_path: Path) -> None:
    spool = Spool(tmp_path, "life-1", bytes_max=2000)
    taken = 0
    while spool.put(message(taken + 1, 200)):
        taken += 1
    assert 0 < taken < 10
    spool.mark(taken, empty=True)
    assert spool.put(message(taken + 1, 200))


def test_a_long_spool_removes_its_acknowledged_segments(tmp_path: Path) -> None:
    spool = Spool(tmp_path, "life-1", segment_bytes=1000)
    for number in range(1, 101):
        spool.put(message(number, 100))
    before = len(list(tmp_path.glob("*.spool")))
    spool.mark(60, empty=False)
    assert 1 < len(list(tmp_path.glob("*.spool"))) < before
    killed(spool)
    assert numbers(Spool(tmp_path, "life-2").take_over()) == list(range(61, 101))


def test_a_disk_that_refuses_is_counted_and_harms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = Spool(tmp_path, "life-1")
    spool.put(message(1))

    def full(file: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        assert not spool.put(message(2))
    spool.put(message(3))
    assert spool.failures == 1
    killed(spool)
    assert numbers(Spool(tmp_path, "life-2").take_over()) == [1, 3]


def test_a_folder_without_room_for_files_does_not_stop_publishing(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "gone", "life-1", segment_bytes=100)
    assert spool.put(message(1)) and spool.put(message(2, 100))
    shutil.rmtree(tmp_path / "gone")
    assert not spool.put(message(3))
    assert spool.failures == 1


def test_a_disk_that_has_become_read_only_stops_no_acknowledgement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    spool = Spool(tmp_path, "life-1", bytes_max=2000)
    spool.put(message(1, 1000))
    for call in ("ftruncate", "fdatasync"):
        monkeypatch.setattr(os, call, read_only)
    spool.mark(1, empty=True)
    spool.sync()
    assert spool.failures == 2


def test_every_written_segment_is_synced_to_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = Spool(tmp_path, "life-1", segment_bytes=1000)
    for number in range(1, 31):
        spool.put(message(number, 100))
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    spool.sync()
    assert len(synced) == len(list(tmp_path.glob("*.spool"))) > 2
    spool.sync()
    assert len(synced) == len(set(synced)), "synced segments are not synced again"


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SpoolUnusable, match="file/spool: Not a directory"):
        Spool(tmp_path / "file" / "spool", "life-1")
