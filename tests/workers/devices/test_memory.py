"""A watch stores the active faults for its successor: a GPU is repaired while no process reads it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import shim
from structlog.testing import capture_logs
from waits import block_until
from watch_kit import Reports, Watching

from workers.devices.faults import FaultChange
from workers.devices.watch import DeviceWatch, Memory

XID = FaultChange(fault_class="xid", code="48", fatal=True)
Before = dict[str, int]


@contextmanager
def watch(watching: Watching, data: Path, *gpus: str) -> Iterator[Reports]:
    """One life of a watch."""
    watch, reported = watching(*gpus, memory=Memory(data, "w0"))
    assert isinstance(watch, DeviceWatch)
    yield reported
    watch.stop()
    watch.reader.join(10)


def begun(gpus: shim.State, reported: Reports) -> None:
    """Wait until GPU 0 was read: then the watch has started."""
    for temperature in (95, 50):
        gpus.gpu[0].temperature = temperature
        block_until(lambda: bool(reported) and reported[-1][1].over is (gpus.gpu[0].temperature < 90))
    reported.clear()


def kept(data: Path) -> list[Path]:
    return [path for path in data.rglob("*") if path.is_file() and path.name != "gpus"]


@pytest.mark.parametrize(
    ("fault", "repaired", "expected"),
    [
        ({"reasons": 0x20, "clock": 900}, {"reasons": 0, "clock": 1800}, ["throttle"]),
        ({"links_up": 0b01}, {"links_up": 0b11}, ["nvlink_down"]),
        ({"ecc": 3, "recovery": 1}, {"ecc": 0, "recovery": 0}, ["ecc", "recovery"]),
        ({"remap_failed": 1}, {"remap_failed": 0}, ["row_remap_failure"]),
        ({"lost": 1}, {"lost": 0}, ["lost"]),
    ],
)
def test_a_fault_repaired_between_two_watches_is_reported_as_over(
    gpus: shim.State, watching: Watching, tmp_path: Path, fault: Before, repaired: Before, expected: list[str]
) -> None:
    with watch(watching, tmp_path, "0") as reported:
        begun(gpus, reported)
        gpus.gpu[1].remap_pending = 1  # belongs to another worker
        gpus.gpu[0].set(**fault)
        block_until(lambda: len(reported) == len(expected))
    gpus.gpu[0].set(**repaired)
    with watch(watching, tmp_path, "0") as reported:
        block_until(lambda: sum(change.over for _, change in reported) == len(expected))
        assert sorted(change.fault_class for _, change in reported if change.over) == expected
    assert not kept(tmp_path)


@pytest.mark.parametrize("fault", [{"links_up": 0b01}, {"remap_failed": 1}, {"recovery": 2}])
def test_a_fault_that_is_still_active_is_reported_again_by_the_next_watch(
    gpus: shim.State, watching: Watching, tmp_path: Path, fault: Before
) -> None:
    with watch(watching, tmp_path, "0", "1") as first:
        begun(gpus, first)
        gpus.gpu[0].set(**fault)
        block_until(lambda: len(first) == 1)
    with watch(watching, tmp_path, "0", "1") as again:
        block_until(lambda: len(again) == 1)
        assert again == first
        assert again[0][1].found, "no worker has to end for it a second time"


@pytest.mark.parametrize(
    ("recovery", "expected"), [(0, [(True, "48")]), (1, [(False, "48"), (False, "gpu_reset")]), (-1, [])]
)
def test_an_xid_ends_if_the_driver_asks_for_no_reset_and_is_forgotten_if_unknown(
    gpus: shim.State, watching: Watching, tmp_path: Path, recovery: int, expected: list[tuple[bool, str]]
) -> None:
    Memory(tmp_path, "w0").keep({"GPU-0000": [XID]})
    gpus.gpu[0].recovery = recovery
    with watch(watching, tmp_path, "0") as reported:
        gpus.gpu[0].temperature = 95
        block_until(lambda: len(reported) == len(expected) + 1)
    assert sorted((c.over, c.code) for _, c in reported if c.fault_class != "temperature") == expected


def test_the_same_xid_is_reported_again_in_the_next_life(
    gpus: shim.State, watching: Watching, tmp_path: Path
) -> None:
    Memory(tmp_path, "w0").keep({"GPU-0000": [XID]})
    gpus.gpu[0].recovery = 1
    with watch(watching, tmp_path, "0") as reported:
        block_until(lambda: len(reported) == 2)
        gpus.gpu[0].raise_xid(48)
        block_until(lambda: len(reported) == 3)
    assert (reported[2][1], reported[2][1].found) == (XID, False)


def test_stored_faults_of_gpus_that_are_not_watched_yet_are_kept(
    gpus: shim.State, watching: Watching, tmp_path: Path
) -> None:
    memory = Memory(tmp_path, "w0")
    memory.keep({"GPU-0000": [XID], "GPU-0001": [XID]})
    with watch(watching, tmp_path, "0") as reported:
        block_until(lambda: len(reported) == 1)
    assert memory.recall() == {"GPU-0001": [XID]}


def test_an_invalid_or_unwritable_file_is_only_logged(tmp_path: Path) -> None:
    memory = Memory(tmp_path, "w0")
    memory.keep({"GPU-0000": [XID]})
    (file,) = kept(tmp_path)
    for content in (b"", b"[1]", b'{"GPU-0000": [{"fault_class": 7}]}'):
        file.write_bytes(content)
        with capture_logs() as logs:
            assert memory.recall() == {}
        assert [line["event"] for line in logs] == ["device_memory_unreadable"]
    file.unlink()
    file.mkdir()
    with capture_logs() as logs:
        memory.keep({"GPU-0000": [XID]})
    assert [line["event"] for line in logs] == ["device_memory_unwritable"]
