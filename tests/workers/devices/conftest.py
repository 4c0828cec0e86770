"""Fixtures with GPUs for the tests of the device watch."""

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
import shim
from watch_kit import QUICK, Reports, Watching

from workers.devices.nvml import Nvml
from workers.devices.watch import DeviceWatch, Memory, WatchPolicy


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return shim.build(tmp_path_factory.mktemp("nvml"))
    except FileNotFoundError as error:
        pytest.skip(f"needs a C compiler, to build the driver's stand-in: install cc, gcc or clang ({error})")


@pytest.fixture
def gpus(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> shim.State:
    """Two healthy GPUs on this host."""
    state = shim.gpus(tmp_path / "gpus", 2)
    monkeypatch.setenv(shim.STATE, str(tmp_path / "gpus"))
    ctypes.CDLL(str(library))  # later loads by name now find this library
    return state


@pytest.fixture
def watching() -> Iterator[Watching]:
    """`watching("0")` starts a watch; returns the watch and its reports."""
    watches: list[DeviceWatch] = []

    def begin(
        *gpus: str, policy: WatchPolicy = QUICK, memory: Memory | None = None, driver: type[Nvml] = Nvml
    ) -> tuple[DeviceWatch, Reports]:
        watch, reported = DeviceWatch(gpus, policy, memory=memory, driver=driver), Reports()
        watches.append(watch)
        watch.start(5)
        watch.begin(lambda uuid, change: reported.append((uuid, change)))
        return watch, reported

    yield begin
    for watch in watches:
        watch.stop()
        watch.reader.join(5)
