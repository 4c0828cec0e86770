"""The memory that sources write into, and what is left of it when its owner dies.

    /dev/shm/holdfast-kv-INSTANCE/     held with flock by the instance, for as long as it lives
        socket                         where sources on this host connect
        0, 1, 2, …                     one file a region; a name is never used twice

A new file costs the kernel a page fault for every 4 KiB on either side (measured: 2 to 4 GB/s, against 15 GB/s), so
that regions are used again, up to `spare_bytes_max`. Only those whose source has said that it writes no more: a slow
source of a reservation that ended must write into nobody's memory, and so its file is unlinked and forgotten.

Where there is no such folder, or no room in it, a region is plain memory and its bytes come over the socket.
"""

import contextlib
import fcntl
import itertools
import mmap
import os
import re
import shutil
import sys
from pathlib import Path

from workers.kv_transfer.messages import RegionTaken

ROOT = Path("/dev/shm")
PREFIX = "holdfast-kv-"
NAME = re.compile(
    r"[A-Za-z0-9._-]{1,64}"
)  # with the prefix and `socket` it stays below a Unix socket's 108 bytes
TRIALS = 5
SPARE_BYTES_MAX = 256 << 20  # kept for the next transfer
SPARES_MAX = 16  # each has a file descriptor


class Region:
    """Memory of one reservation. `path` is empty where only this process can write to it."""

    def __init__(self, mapped: mmap.mmap, path: str = "") -> None:
        """Own this mapping."""
        self.path = path
        self.size = len(mapped)
        self.memory = memoryview(mapped)
        self._mapped = mapped

    def empty(self) -> None:
        """Give the memory back to the kernel, wherever it is still mapped. A gigabyte takes 0.1 to 0.3 s, which would else
        be spent by whoever lets go of it last."""
        if sys.platform == "linux":
            with contextlib.suppress(OSError):  # not every file system can
                self._mapped.madvise(mmap.MADV_REMOVE)


class Regions:
    """The regions of one instance. Not thread-safe but for `take` and `give_back`, which any thread may call."""

    def __init__(
        self, instance: str, root: Path | None = ROOT, spare_bytes_max: int = SPARE_BYTES_MAX
    ) -> None:
        """Claim the instance's folder below `root`. Raise RegionTaken if a live process has it, OSError without access."""
        if not NAME.fullmatch(instance):
            raise ValueError(f"an instance's name has 1 to 64 letters, digits, dots, dashes: {instance!r}")
        self._spare_bytes_max = spare_bytes_max
        self._spares: list[Region] = []
        self._numbers = itertools.count()
        self._held: int | None = None
        self.folder: Path | None = None
        if root is not None and root.is_dir():
            self.folder = root / f"{PREFIX}{instance}"
            self._held = _claim(self.folder)

    @property
    def socket(self) -> str:
        """Where to listen for sources of this host; empty without a folder."""
        return str(self.folder / "socket") if self.folder else ""

    @property
    def kept(self) -> list[str]:
        """The paths of the regions that are kept for the next transfer."""
        return [spare.path for spare in self._spares]

    def take(self, size: int) -> Region:
        """Return a region of at least this many bytes. Raise OSError if there is no memory."""
        for spare in sorted(self._spares, key=lambda one: one.size):
            if size <= spare.size <= 2 * size:
                with contextlib.suppress(ValueError):  # another thread was faster
                    self._spares.remove(spare)
                    return spare
        if self.folder is not None and self._held is not None:
            with contextlib.suppress(
                OSError
            ):  # full, or as small as containers have it: plain memory does too
                return self._made(self.folder / str(next(self._numbers)), size)
        return Region(mmap.mmap(-1, size))

    def _made(self, path: Path, size: int) -> Region:
        held = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(held, 0, size)  # else a full /dev/shm is a SIGBUS at the first write
            return Region(mmap.mmap(held, size), str(path))
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(held)
            if self._held is None:  # closed meanwhile: the folder was not empty then
                shutil.rmtree(path.parent, ignore_errors=True)

    def give_back(self, region: Region, quiet: bool) -> Region | None:
        """Free a region. `quiet`: its source writes no more, and nobody here reads it. Return one that is not kept, for
        the caller to empty."""
        kept = sum(one.size for one in self._spares)
        if quiet and region.path and kept + region.size <= self._spare_bytes_max and self._held is not None:
            self._spares.append(region)
            if len(self._spares) <= SPARES_MAX:
                return None
            region = self._spares.pop(0)
        if region.path:
            Path(region.path).unlink(missing_ok=True)
        return region

    def close(self) -> None:
        """Unlink everything. Regions that are mapped somewhere live on as memory until they are not."""
        self._spares.clear()
        held, self._held = self._held, None  # first: another thread may close at the same time
        if self.folder is not None and held is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            os.close(held)


def _claim(folder: Path) -> int:
    """Make the folder and hold it. A sweep may remove it between the two: then try again."""
    for _ in range(TRIALS):
        _sweep(folder)
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            break
        held = _hold(folder)
        if held is not None:
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(held), folder.stat()):
                    return held
            os.close(held)
    raise RegionTaken(
        f"another live process serves the KV regions in {folder}: every instance needs its own name"
    )


def _hold(folder: Path) -> int | None:
    """Lock a folder without waiting; None if a live process has it."""
    try:
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(held)
        return None
    return held


def _sweep(folder: Path) -> bool:
    if (held := _hold(folder)) is None:
        return False
    try:
        shutil.rmtree(folder, ignore_errors=True)
        return not folder.exists()
    finally:
        os.close(held)


def sweep(root: Path = ROOT) -> list[str]:
    """Remove what dead instances left behind, and return their names. The kernel drops a dead owner's lock."""
    found = sorted(root.glob(f"{PREFIX}*")) if root.is_dir() else []
    return [folder.name.removeprefix(PREFIX) for folder in found if _sweep(folder)]
