"""A test driver: a replacement libnvidia-ml.so.1, and the state file that defines its answers."""

import ctypes
import mmap
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("shim.c")
NAME = "libnvidia-ml.so.1"
STATE = "NVML_SHIM_STATE"
DEVICES_MAX = 4
FUTEX, FUTEX_WAKE = {"x86_64": 202, "aarch64": 98}, 1
WELL = {
    "reasons": 0, "clock": 1800, "clock_max": 1980, "temperature": 50, "slowdown": 90,
    "pcie_width": 16, "pcie_width_max": 16, "links": 2, "links_up": 0b11, "margin": 40,
}  # fmt: skip


class Gpu(ctypes.Structure):
    """One GPU; every field can be changed while it is watched. Negative: not supported. `mute`: errors give no reason."""

    _fields_ = tuple(
        (name, ctypes.c_int)
        for name in (
            "lost", "xids", "xid", "ecc", "remap_pending", "remap_failed", "recovery", "reasons", "clock", "clock_max",
            "temperature", "slowdown", "pcie_width", "pcie_width_max", "links", "links_up", "link_errors", "pid",
            "margin", "mute",
        )
    )  # fmt: skip

    def raise_xid(self, code: int) -> None:
        self.xid = code
        self.xids += 1
        gpus: Any = self._b_base_
        gpus._b_base_.ring()

    def set(self, **fields: int) -> None:
        for name, value in fields.items():
            setattr(self, name, value)


class State(ctypes.Structure):
    """The host. `old`: its driver lacks some functions. `anonymous`: its Xids name no GPU. `opened`: number of sessions."""

    _fields_ = (
        ("devices", ctypes.c_int), ("gpu", Gpu * DEVICES_MAX),
        ("bell", ctypes.c_int), ("old", ctypes.c_int), ("anonymous", ctypes.c_int), ("opened", ctypes.c_int),
    )  # fmt: skip

    def ring(self) -> None:
        """Wake every waiter for an Xid, in any process."""
        self.bell += 1
        address = ctypes.c_void_p(ctypes.addressof(self) + State.bell.offset)
        ctypes.CDLL(None).syscall(FUTEX[platform.machine()], address, FUTEX_WAKE, DEVICES_MAX, None, None, 0)


def build(folder: Path) -> Path:
    """Compile the library; return its path. Raise FileNotFoundError without a C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise FileNotFoundError("no C compiler (cc, gcc or clang)")
    library = folder / NAME
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), f"-Wl,-soname,{NAME}", str(SOURCE)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return library


def gpus(path: Path, count: int) -> State:
    """Write healthy GPUs into a state file; return them for modification."""
    path.write_bytes(bytes(ctypes.sizeof(State)))
    with path.open("r+b") as file:
        state = State.from_buffer(mmap.mmap(file.fileno(), ctypes.sizeof(State)))
    state.devices = count
    for gpu in state.gpu:
        gpu.set(**WELL)
    return state
