"""`holdfast restart`: workers end in good order, one after another, and their supervisor starts them again.

    others routable? ──▶ stop (drains by itself) ──▶ a new instance has joined ──▶ it is routable ──▶ the next one
                                                                                 (a spare: healthy)

Whoever takes no requests as it is (hung, dead, drained) is first, and needs no other to stand in for it. The next worker is
not touched before the successor of the last takes requests, so that a fleet of two never stands without one. What starts a
worker again is `holdfast up`, systemd or the orchestrator; we only wait for it.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from controller.processes.console import say
from controller.processes.operator_client import Operator, who
from events.errors import HoldfastError
from events.nats.bus import NoAnswer

WITHIN_S = 180.0  # of one worker: its grace, and its successor's start
LOOK_S = 0.1

Status = dict[str, Any]


class NotRestarted(HoldfastError):
    """A worker did not come back, or the fleet cannot spare it."""


async def restart(operator: Operator, names: Sequence[str], within_s: float = WITHIN_S) -> None:
    """Restart workers one after another. Raise NotRestarted, Refused or NoAnswer; later ones are left alone then."""
    for name in names:
        old = await _spared(operator, name, within_s)
        said = await operator.ask("restart", {"worker": name, "by": who()})
        say(str(said["says"]))
        new = await _until(operator, partial(_successor, name, old), within_s, f"{name} is not back")
        say(f"{name} is back (pid {new['pid']})")


async def all_of(operator: Operator) -> list[str]:
    """Return the names of all workers that live, or whose process does: first those that take no requests as it is."""
    workers = (await operator.ask("status", {}))["workers"]
    there = [w for w in workers if w["health"] != "DEAD" or w.get("lingers")]
    return [w["id"] for w in sorted(there, key=_routable)]


async def _spared(operator: Operator, name: str, within_s: float) -> str:
    """Wait until another worker of its model takes requests, unless this one takes none itself; return its instance. Raise
    NotRestarted."""

    def found(status: Status) -> Status | None:
        worker = _found(status, name)
        model = [w for w in status["workers"] if w["model"] == worker["model"] and w["id"] != name]
        return worker if worker["weight"] == 0 or any(_routable(w) for w in model) else None

    why = f"{name} cannot be spared: no other worker of its model takes requests"
    return str((await _until(operator, found, within_s, why))["instance"])


def _found(status: Status, name: str) -> Status:
    for worker in status["workers"]:
        if worker["id"] == name:
            return dict(worker)
    raise NotRestarted(f"there is no worker {name!r}; `holdfast status` lists them")


def _successor(name: str, old: str, status: Status) -> Status | None:
    worker = _found(status, name)
    back = _routable(worker) or (worker.get("spare") and _healthy(worker))
    return worker if worker["instance"] != old and back else None


def _routable(worker: Status) -> bool:
    """Return whether a worker takes requests, or would as the last of its model: one of a new lineage is held back until
    another worker of that lineage is there."""
    held = worker.get("held") and worker["breaker"] == "closed"
    return bool((_healthy(worker) and worker["weight"] > 0) or held)


def _healthy(worker: Status) -> bool:
    return bool(worker["health"] == "HEALTHY" and worker["breaker"] == "closed")


async def _until(
    operator: Operator, found: Callable[[Status], Status | None], within_s: float, why: str
) -> Status:
    """Look at the status until something is found in it. Raise NotRestarted with `why`."""
    try:
        async with asyncio.timeout(within_s):
            while True:
                with contextlib.suppress(NoAnswer):  # a controller that only starts answers a moment later
                    if seen := found(await operator.ask("status", {})):
                        return seen
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        raise NotRestarted(f"{why} after {within_s:g} s") from None
