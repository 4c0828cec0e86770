"""The device watch against a driver that says what the test wants."""

import os
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
import shim
from structlog.testing import capture_logs
from watch_kit import QUICK, Said, Watching, until

from workers.devices.faults import DeviceReading, FaultChange
from workers.devices.mapping import UnknownGpus
from workers.devices.nvml import NoDriver, Nvml
from workers.devices.watch import DeviceWatch


def last(said: Said) -> FaultChange:
    return said[-1][1]


def test_a_fatal_xid_is_said_once_and_at_once(gpus: shim.State, watching: Watching) -> None:
    _, said = watching("0")
    gpus.gpu[0].raise_xid(79)
    until(lambda: len(said) == 1)
    gpus.gpu[0].raise_xid(79)
    gpus.gpu[0].raise_xid(119)
    until(lambda: len(said) == 2)
    assert said == [
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

    _, said = watching("0", driver=Hanging)
    hangs.wait(10)
    gpus.gpu[0].raise_xid(79)
    until(lambda: len(said) == 1)
    assert not over.is_set()
    over.set()


def test_gpus_that_are_nobodys_are_said(gpus: shim.State, watching: Watching) -> None:
    with capture_logs() as logs:
        watching("1")
    (line,) = [line for line in logs if line["event"] == "device_watch_on"]
    assert (line["gpus"], line["unmapped"], line["xids"]) == (["GPU-0001"], ["GPU-0000"], True)


def test_another_workers_gpu_is_none_of_our_business(gpus: shim.State, watching: Watching) -> None:
    _, said = watching("GPU-0001")
    gpus.gpu[0].raise_xid(79)
    gpus.gpu[1].raise_xid(31)
    until(lambda: len(said) == 1)
    assert said == [("GPU-0001", FaultChange(fault_class="xid_warning", code="31"))]


def test_a_lost_gpu_that_comes_back_is_repaired_with_all_that_a_reset_mends(
    gpus: shim.State, watching: Watching
) -> None:
    _, said = watching("0")
    gpus.gpu[0].raise_xid(79)
    until(lambda: len(said) == 1)
    gpus.gpu[0].lost = 1
    until(lambda: len(said) == 2)
    assert last(said) == FaultChange(fault_class="lost", fatal=True)
    gpus.gpu[0].lost = 0
    until(lambda: len(said) == 4)
    assert [(c.fault_class, c.over) for _, c in said[2:]] == [("lost", True), ("xid", True)]
    gpus.gpu[0].raise_xid(48)  # it is heard again
    until(lambda: len(said) == 5)
    assert last(said).code == "48"


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
def test_a_level_is_said_when_it_begins_and_when_it_ends(
    gpus: shim.State, watching: Watching, fault: dict[str, int], well: dict[str, int], expected: FaultChange
) -> None:
    gpus.gpu[1].pcie_width = 8
    _, said = watching("0", "1")
    until(lambda: len(said) == 1)  # both were read once: there the watch began
    gpus.gpu[0].set(**fault)
    until(lambda: len(said) == 2)
    assert last(said) == expected
    gpus.gpu[0].set(**well)
    until(lambda: len(said) == 3)
    assert last(said) == FaultChange(fault_class=expected.fault_class, code=expected.code, over=True)


@pytest.mark.parametrize(
    ("reasons", "code"), [(0x20, "thermal"), (0x40, "thermal"), (0x80, "power_brake"), (0x08, "power_brake")]
)
def test_a_throttled_gpu_is_weighed_by_its_peers_clock(
    gpus: shim.State, watching: Watching, reasons: int, code: str
) -> None:
    _, said = watching("0")
    gpus.gpu[0].set(reasons=reasons, clock=900)
    until(lambda: len(said) == 1)
    assert last(said) == FaultChange(fault_class="throttle", code=code, weight=0.5)
    gpus.gpu[0].set(reasons=0, clock=1800)
    until(lambda: len(said) == 2)
    assert last(said).over


def test_what_a_gpu_does_not_support_is_silence(gpus: shim.State, watching: Watching) -> None:
    nothing = {
        name: -1
        for name, *_ in shim.Gpu._fields_
        if name not in ("lost", "xids", "xid", "pid", "links", "mute")
    }
    gpus.gpu[0].set(**nothing, links=0)
    _, said = watching("0")
    gpus.gpu[0].raise_xid(48)
    until(lambda: len(said) == 1)
    time.sleep(5 * QUICK.read_s)
    assert [change.fault_class for _, change in said] == ["xid"]


def test_an_old_driver_is_asked_in_its_own_words(gpus: shim.State, watching: Watching) -> None:
    gpus.old, gpus.gpu[0].pid = 1, os.getpid()
    watch, said = watching()
    assert watch.gpus == ("GPU-0000",)
    gpus.gpu[0].set(reasons=0x20, clock=900)
    until(lambda: len(said) == 1)
    assert last(said) == FaultChange(fault_class="throttle", code="thermal", weight=0.5)


def test_a_gpu_that_answers_nothing_and_does_not_say_why_is_lost(
    gpus: shim.State, watching: Watching
) -> None:
    _, said = watching("0")
    gpus.gpu[0].mute = 1
    until(lambda: len(said) == 1)
    assert last(said) == FaultChange(fault_class="lost", fatal=True)
    gpus.gpu[0].mute = 0
    until(lambda: len(said) == 2)
    assert last(said) == FaultChange(fault_class="lost", over=True)


def test_a_gpu_that_does_not_say_its_limit_says_how_far_off_it_is(
    gpus: shim.State, watching: Watching
) -> None:
    gpus.gpu[0].slowdown = -1
    _, said = watching("0")
    gpus.gpu[0].margin = 0
    until(lambda: len(said) == 1)
    gpus.gpu[0].margin = 20
    until(lambda: len(said) == 2)
    assert [(c.fault_class, c.over) for _, c in said] == [("temperature", False), ("temperature", True)]


def test_an_xid_that_does_not_say_whose_it_is_is_every_watched_gpus(
    gpus: shim.State, watching: Watching
) -> None:
    gpus.anonymous = 1
    _, said = watching("0", "1")
    gpus.gpu[1].raise_xid(48)
    until(lambda: len(said) == 2)
    assert sorted(uuid for uuid, _ in said) == ["GPU-0000", "GPU-0001"]


SELDOM = replace(QUICK, reopen_s=600, read_s=600)


def test_a_lost_gpu_is_said_at_once_and_the_others_are_still_heard(
    gpus: shim.State, watching: Watching
) -> None:
    watch, said = watching("0", "1", policy=replace(SELDOM, wait_ms=50))
    until(lambda: watch.hears == {"GPU-0000", "GPU-0001"})
    opened = gpus.opened
    gpus.gpu[0].lost = 1  # whoever waits for its Xids hears of no others, either
    gpus.ring()
    until(lambda: len(said) == 1)
    assert said == [("GPU-0000", FaultChange(fault_class="lost", fatal=True))]
    until(lambda: watch.hears == {"GPU-0001"})
    gpus.gpu[1].raise_xid(119)
    until(lambda: len(said) == 2)
    assert said[1] == ("GPU-0001", FaultChange(fault_class="xid", code="119", fatal=True))
    assert gpus.opened == opened  # an Xid that comes while the driver is opened again is heard by nobody


def test_an_xid_that_comes_while_nobody_waits_is_not_lost(gpus: shim.State) -> None:
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


def test_faults_from_before_the_watch_are_said_when_it_begins(gpus: shim.State, watching: Watching) -> None:
    gpus.gpu[0].set(remap_failed=1, ecc=7)
    _, said = watching("0")
    until(lambda: len(said) == 1)
    gpus.gpu[0].ecc = 8
    until(lambda: len(said) == 2)  # the seven were before our time; the eighth is ours
    assert [change.fault_class for _, change in said] == ["row_remap_failure", "ecc"]


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


def test_gpus_that_are_not_there_are_refused(gpus: shim.State) -> None:
    with pytest.raises(UnknownGpus, match=r"gpus = 7: not on this host, which has 0 .GPU-0000., 1"):
        DeviceWatch(("0", "7")).start(5)


def test_without_a_driver_the_watch_says_so_once_and_is_off() -> None:
    code = (
        "import sys, threading\n"
        "from workers.devices.watch import DeviceWatch\n"
        "watch = DeviceWatch(())\n"
        "watch.start(10)\n"
        "watch.join(10)\n"
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
    watch.join(5)
    until(lambda: not any(thread.name.startswith("device-") for thread in threading.enumerate()))
