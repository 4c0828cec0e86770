"""Creates expensive files once, by one xdist worker, for all workers of this run."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path


def made_once(own: Path, name: str, make: Callable[[Path], object]) -> Path:
    """Return the folder of this name, created unless another xdist worker has. `own`: this one's folder, in that of all."""
    base = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (base / name).exists():
            make(base / f"{name}.partial")
            (base / f"{name}.partial").rename(base / name)
    return base / name
