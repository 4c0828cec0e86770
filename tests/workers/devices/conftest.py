"""GPUs for the tests of the device watch."""

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
import shim
from watch_kit import QUICK, Said, Watching

from workers.devices.memory import Memory
from workers.devices.nvml import Nvml
from workers.devices.watch import DeviceWatch, WatchPolicy


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return shim.build(tmp_path_factory.mktemp("nvml"))
    except FileNotFoundError as error:
        pytest.skip(f"needs a C compiler, to build the driver's stand-in: install cc, gcc or clang ({error})")


@pytest.fixture
def gpus(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> shim.State:
    """Two well GPUs on this host."""
    state = shim.gpus(tmp_path / "gpus", 2)
    monkeypatch.setenv(shim.STATE, str(tmp_path / "gpus"))
    ctypes.CDLL(str(library))  # by its name it is found from now on
    return state


@pytest.fixture
def watching() -> Iterator[Watching]:
    """`watching("0")` begins to watch; returns the watch and what it says."""
    watches: list[DeviceWatch] = []

    def begin(
        *gpus: str, policy: WatchPolicy = QUICK, memory: Memory | None = None, driver: type[Nvml] = Nvml
    ) -> tuple[DeviceWatch, Said]:
        watch, said = DeviceWatch(gpus, policy, memory=memory, driver=driver), Said()
        watches.append(watch)
        watch.start(5)
        watch.begin(lambda uuid, change: said.append((uuid, change)))
        return watch, said

    yield begin
    for watch in watches:
        watch.stop()
        watch.join(5)
