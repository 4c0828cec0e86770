"""The device watch against a driver that the test controls."""

import os
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import shim
from structlog.testing import capture_logs
from waits import block_until
from watch_kit import QUICK, Reports, Watching

from workers.devices.faults import DeviceReading, FaultChange
from workers.devices.mapping import UnknownGpus
from workers.devices.nvml import NoDriver, Nvml
from workers.devices.watch import DeviceWatch


def last(reported: Reports) -> FaultChange:
    return reported[-1][1]


def test_a_fatal_xid_is_reported_once_and_immediately(gpus: shim.State, watching: Watching) -> None:
    _, reported = watching("0")
    gpus.gpu[0].raise_xid(79)
    block_until(lambda: len(reported) == 1)
    gpus.gpu[0].raise_xid(79)
    gpus.gpu[0].raise_xid(119)
    block_until(lambda: len(reported) == 2)
    assert reported == [
        ("GPU-0000", FaultChange(fault_class="xid", code="79", fatal=True)),
        ("GPU-0000", FaultChange(fault_class="xid", code="119", fatal=True)),
    ]


def test_an_xid_does_not_wait_for_a_driver_that_hangs_otherwise(gpus: shim.State, watching: Watching) -> None:
    hangs, over = threading.Event(), threading.Event()

    class Hanging(Nvml):
        def read(self, uuid: str) -> DeviceReading:
            hangs.set()
            over.wait(20)
            return super().read(uuid)

    _, reported = watching("0", driver=Hanging)
    hangs.wait(10)
    gpus.gpu[0].raise_xid(79)
    block_until(lambda: len(reported) == 1)
    assert not over.is_set()
    over.set()


def test_unassigned_gpus_are_logged(gpus: shim.State, watching: Watching) -> None:
    with capture_logs() as logs:
        watching("1")
    (line,) = [line for line in logs if line["event"] == "device_watch_on"]
    assert (line["gpus"], line["unmapped"], line["xids"]) == (["GPU-0001"], ["GPU-0000"], True)


def test_another_workers_gpu_is_not_reported(gpus: shim.State, watching: Watching) -> None:
    _, reported = watching("GPU-0001")
    gpus.gpu[0].raise_xid(79)
    gpus.gpu[1].raise_xid(31)
    block_until(lambda: len(reported) == 1)
    assert reported == [("GPU-0001", FaultChange(fault_class="xid_warning", code="31"))]


def test_a_lost_gpu_that_returns_is_repaired_with_all_that_a_reset_repairs(
    gpus: shim.State, watching: Watching
) -> None:
    _, reported = watching("0")
    gpus.gpu[0].raise_xid(79)
    block_until(lambda: len(reported) == 1)
    gpus.gpu[0].lost = 1
    block_until(lambda: len(reported) == 2)
    assert last(reported) == FaultChange(fault_class="lost", fatal=True)
    gpus.gpu[0].lost = 0
    block_until(lambda: len(reported) == 4)
    assert [(c.fault_class, c.over) for _, c in reported[2:]] == [("lost", True), ("xid", True)]
    gpus.gpu[0].raise_xid(48)  # its Xids are received again
    block_until(lambda: len(reported) == 5)
    assert last(reported).code == "48"


@pytest.mark.parametrize(
    ("fault", "well", "expected"),
    [
        ({"ecc": 3}, {"ecc": 0}, FaultChange(fault_class="ecc", code="volatile", fatal=True)),
        ({"remap_failed": 1}, {"remap_failed": 0}, FaultChange(fault_class="row_remap_failure", fatal=True)),
        ({"remap_pending": 1}, {"remap_pending": 0}, FaultChange(fault_class="row_remap_pending")),
        ({"recovery": 1}, {"recovery": 0}, FaultChange(fault_class="recovery", code="gpu_reset", fatal=True)),
        ({"pcie_width": 8}, {"pcie_width": 16}, FaultChange(fault_class="pcie_width", code="x8 of x16")),
        ({"temperature": 91}, {"temperature": 60}, FaultChange(fault_class="temperature")),
        (
            {"links_up": 0b01},
            {"links_up": 0b11},
            FaultChange(fault_class="nvlink_down", code="1", weight=0.0),
        ),
    ],
)
def test_a_level_is_reported_when_it_begins_and_when_it_ends(
    gpus: shim.State, watching: Watching, fault: dict[str, int], well: dict[str, int], expected: FaultChange
) -> None:
    gpus.gpu[1].pcie_width = 8
    _, reported = watching("0", "1")
    block_until(lambda: len(reported) == 1)  # both were read once: then the watch has started
    gpus.gpu[0].set(**fault)
    block_until(lambda: len(reported) == 2)
    assert last(reported) == expected
    gpus.gpu[0].set(**well)
    block_until(lambda: len(reported) == 3)
    assert last(reported) == FaultChange(fault_class=expected.fault_class, code=expected.code, over=True)


@pytest.mark.parametrize(
    ("reasons", "code"), [(0x20, "thermal"), (0x40, "thermal"), (0x80, "power_brake"), (0x08, "power_brake")]
)
def test_the_weight_of_a_throttled_gpu_follows_its_peers_clocks(
    gpus: shim.State, watching: Watching, reasons: int, code: str
) -> None:
    _, reported = watching("0")
    gpus.gpu[0].set(reasons=reasons, clock=900)
    block_until(lambda: len(reported) == 1)
    assert last(reported) == FaultChange(fault_class="throttle", code=code, weight=0.5)
    gpus.gpu[0].set(reasons=0, clock=1800)
    block_until(lambda: len(reported) == 2)
    assert last(reported).over


def test_values_that_a_gpu_does_not_support_are_not_reported(gpus: shim.State, watching: Watching) -> None:
    nothing = {
        name: -1
        for name, *_ in shim.Gpu._fields_
        if name not in ("lost", "xids", "xid", "pid", "links", "mute")
    }
    gpus.gpu[0].set(**nothing, links=0)
    reads = []

    class Counting(Nvml):
        def read(self, uuid: str) -> DeviceReading:
            reads.append(uuid)
            return super().read(uuid)

    _, reported = watching("0", driver=Counting)
    gpus.gpu[0].raise_xid(48)
    block_until(lambda: len(reported) == 1)
    reads.clear()
    block_until(lambda: len(reads) > 5)  # none of which reports the Xid again
    assert [change.fault_class for _, change in reported] == ["xid"]


def test_an_old_driver_is_called_with_its_own_functions(gpus: shim.State, watching: Watching) -> None:
    gpus.old, gpus.gpu[0].pid = 1, os.getpid()
    watch, reported = watching()
    assert watch.gpus == ("GPU-0000",)
    gpus.gpu[0].set(reasons=0x20, clock=900)
    block_until(lambda: len(reported) == 1)
    assert last(reported) == FaultChange(fault_class="throttle", code="thermal", weight=0.5)


def test_a_gpu_that_does_not_answer_and_gives_no_reason_is_lost(gpus: shim.State, watching: Watching) -> None:
    _, reported = watching("0")
    gpus.gpu[0].mute = 1
    block_until(lambda: len(reported) == 1)
    assert last(reported) == FaultChange(fault_class="lost", fatal=True)
    gpus.gpu[0].mute = 0
    block_until(lambda: len(reported) == 2)
    assert last(reported) == FaultChange(fault_class="lost", over=True)


def test_a_gpu_without_a_known_limit_is_judged_by_its_margin(gpus: shim.State, watching: Watching) -> None:
    gpus.gpu[0].slowdown = -1
    _, reported = watching("0")
    gpus.gpu[0].margin = 0
    block_until(lambda: len(reported) == 1)
    gpus.gpu[0].margin = 20
    block_until(lambda: len(reported) == 2)
    assert [(c.fault_class, c.over) for _, c in reported] == [("temperature", False), ("temperature", True)]


def test_an_xid_without_a_device_counts_for_every_watched_gpu(gpus: shim.State, watching: Watching) -> None:
    gpus.anonymous = 1
    _, reported = watching("0", "1")
    gpus.gpu[1].raise_xid(48)
    block_until(lambda: len(reported) == 2)
    assert sorted(uuid for uuid, _ in reported) == ["GPU-0000", "GPU-0001"]


SELDOM = replace(QUICK, reopen_s=600, read_s=600)


def test_a_lost_gpu_is_reported_immediately_and_the_others_stay_subscribed(
    gpus: shim.State, watching: Watching
) -> None:
    watch, reported = watching("0", "1", policy=replace(SELDOM, wait_ms=50))
    block_until(lambda: watch.xids.gpus == {"GPU-0000", "GPU-0001"})
    opened = gpus.opened
    gpus.gpu[0].lost = 1  # a wait that includes its Xids receives no others either
    gpus.ring()
    block_until(lambda: len(reported) == 1)
    assert reported == [("GPU-0000", FaultChange(fault_class="lost", fatal=True))]
    block_until(lambda: watch.xids.gpus == {"GPU-0001"})
    gpus.gpu[1].raise_xid(119)
    block_until(lambda: len(reported) == 2)
    assert reported[1] == ("GPU-0001", FaultChange(fault_class="xid", code="119", fatal=True))
    assert gpus.opened == opened  # Xids that occur while the driver is reopened would be missed


def test_an_xid_that_arrives_while_no_call_waits_is_not_lost(gpus: shim.State) -> None:
    nvml = Nvml()
    nvml.listen(["GPU-0000"])
    gpus.gpu[0].raise_xid(79)
    nvml.listen(["GPU-0000", "GPU-0001"])
    assert nvml.wait(0) == ("GPU-0000", 79)
    gpus.gpu[1].raise_xid(48)
    gpus.gpu[1].lost = 1
    nvml.listen([])
    assert nvml.wait(0) == ("GPU-0001", 48)
    with pytest.raises(NoDriver):
        nvml.wait(0)
    nvml.close()


def test_faults_from_before_the_watch_are_reported_when_it_begins(
    gpus: shim.State, watching: Watching
) -> None:
    gpus.gpu[0].set(remap_failed=1, ecc=7)
    _, reported = watching("0")
    block_until(lambda: len(reported) == 1)
    gpus.gpu[0].ecc = 8
    block_until(lambda: len(reported) == 2)  # the first seven occurred before the watch; the eighth counts
    assert [change.fault_class for _, change in reported] == ["row_remap_failure", "ecc"]


def test_a_gpu_is_found_by_the_process_that_computes_on_it(gpus: shim.State, watching: Watching) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        gpus.gpu[1].pid = child.pid
        watch, _ = watching()
        assert watch.gpus == ("GPU-0001",)
    finally:
        child.communicate(b"\n", timeout=10)
    gpus.gpu[0].pid = os.getppid()
    assert watch.gpus == ("GPU-0001",)


def test_missing_gpus_are_refused(gpus: shim.State) -> None:
    with pytest.raises(UnknownGpus, match=r"gpus = 7: not on this host, which has 0 .GPU-0000., 1"):
        DeviceWatch(("0", "7")).start(5)


def test_without_a_driver_the_watch_is_off_and_logs_it_once() -> None:
    code = (
        "import sys, threading\n"
        "from workers.devices.watch import DeviceWatch\n"
        "watch = DeviceWatch(())\n"
        "watch.start(10)\n"
        "watch.reader.join(10)\n"
        "print(threading.active_count(), 'pynvml' in sys.modules)\n"
    )
    environment = {**os.environ, "LD_LIBRARY_PATH": "", shim.STATE: ""}
    if subprocess.run(
        [sys.executable, "-c", "import ctypes; ctypes.CDLL('libnvidia-ml.so.1')"], env=environment,
        capture_output=True, timeout=60,
    ).returncode == 0:  # fmt: skip
        pytest.skip("needs a machine without NVIDIA's driver")
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert ran.stdout.count("device_watch_off") == 1
    assert ran.stdout.endswith("1 False\n")


def test_a_stopped_watch_ends_its_threads(gpus: shim.State, watching: Watching) -> None:
    watch, _ = watching("0")
    watch.stop()
    watch.reader.join(5)
    block_until(lambda: not any(thread.name.startswith("device-") for thread in threading.enumerate()))
