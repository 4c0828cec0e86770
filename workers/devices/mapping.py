"""Selects a worker's GPUs: the configured ones, or those on which the worker's processes compute."""

import os
from collections.abc import Collection, Mapping, Sequence

from events.errors import HoldfastError
from workers.devices.nvml import Device


class UnknownGpus(HoldfastError):
    """Some configured GPUs do not exist on this host, or are lost. Starting again may succeed."""


def parse(gpus: str) -> tuple[str, ...]:
    """Parse a list of GPU indices or UUIDs such as "0,1" or "GPU-5d…,GPU-81…". Raise ValueError if the list is invalid."""
    names = tuple(name.strip() for name in gpus.split(",")) if gpus.strip() else ()
    for name in names:
        if not (name.isdecimal() or name.startswith("GPU-")):
            raise ValueError(f"{name!r} is neither a GPU index nor a UUID (GPU-...)")
    if len(set(names)) != len(names):
        raise ValueError("a GPU is listed twice")
    return names


def find_uuids(names: Sequence[str], devices: Sequence[Device]) -> tuple[str, ...]:
    """Return the UUIDs of the GPUs in `names`, which are indices, UUIDs or unambiguous prefixes of UUIDs.

    Raise UnknownGpus if a name matches no GPU in `devices`, or more than one.
    """
    found: list[str] = []
    missing: list[str] = []
    for name in names:
        fits = [
            d.uuid
            for d in devices
            if name == str(d.index) or (name[:4] == "GPU-" and d.uuid.startswith(name))
        ]
        (found if len(fits) == 1 else missing).append(fits[0] if len(fits) == 1 else name)
    if missing:
        here = ", ".join(f"{d.index} ({d.uuid})" for d in devices) or "none"
        raise UnknownGpus(f"gpus = {','.join(missing)}: not on this host, which has {here}")
    return tuple(dict.fromkeys(found))


def used(users: Mapping[str, Collection[int]], own: Collection[int]) -> tuple[str, ...]:
    """Return the UUIDs of the GPUs on which a process in `own` computes. `users` has the pids that compute on each GPU."""
    return tuple(uuid for uuid, pids in users.items() if set(pids) & set(own))


def own_pids() -> frozenset[int]:
    """Return the pids of this process and all its descendants."""
    return family(os.getpid())


def family(pid: int) -> frozenset[int]:
    """Return the pids of a process and all its descendants; empty if the process `pid` does not exist."""
    import psutil

    try:
        process = psutil.Process(pid)
        return frozenset((pid, *(child.pid for child in process.children(recursive=True))))
    except psutil.Error:
        return frozenset()
