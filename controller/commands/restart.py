"""`holdfast restart`: stops workers gracefully, one after another; their supervisor starts them again.

    others routable? ──▶ stop (drains first) ──▶ a new instance has joined ──▶ it is routable ──▶ the next worker
                                                                             (a spare: healthy)

Workers that serve no requests (hung, dead, drained) are restarted first, without waiting for another worker to be routable. The
next worker is stopped only when the new instance of the previous one serves requests, so a fleet of two always has one that
serves. `holdfast up`, systemd or the orchestrator starts the workers again; this command only waits for that.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from controller.commands.flags.operating import RESTART_S
from controller.processes.console import say
from controller.processes.operator_client import Operator, operator_name
from events.errors import HoldfastError
from events.nats.bus import NoAnswer

LOOK_S = 0.1

Status = dict[str, Any]


class NotRestarted(HoldfastError):
    """A worker did not return, or the fleet cannot spare it."""


async def restart(operator: Operator, names: Sequence[str], within_s: float = RESTART_S) -> None:
    """Restart workers one after another. Raise NotRestarted, Refused or NoAnswer, which leaves later workers untouched."""
    for name in names:
        old = await _spared(operator, name, within_s)
        answer = await operator.ask("restart", {"worker": name, "by": operator_name()})
        say(str(answer["says"]))
        new = await _until(operator, partial(_successor, name, old), within_s, f"{name} is not back")
        say(f"{name} is back (pid {new['pid']})")


async def all_of(operator: Operator) -> list[str]:
    """Return the names of all running workers, those that serve no requests first."""
    workers = (await operator.ask("status", {}))["workers"]
    there = [w for w in workers if w["health"] != "DEAD" or w.get("lingers")]
    return [w["id"] for w in sorted(there, key=_routable)]


async def _spared(operator: Operator, name: str, within_s: float) -> str:
    """Wait until another worker of the same model serves requests, unless this worker serves none itself. Return this worker's
    instance. Raise NotRestarted."""

    def found(status: Status) -> Status | None:
        worker = _found(status, name)
        model = [w for w in status["workers"] if w["model"] == worker["model"] and w["id"] != name]
        return worker if worker["weight"] == 0 or any(_routable(w) for w in model) else None

    why = f"{name} cannot be spared: no other worker of its model serves requests"
    return str((await _until(operator, found, within_s, why))["instance"])


def _found(status: Status, name: str) -> Status:
    for worker in status["workers"]:
        if worker["id"] == name:
            return dict(worker)
    raise NotRestarted(f"unknown worker {name!r}; `holdfast status` lists all workers")


def _successor(name: str, old: str, status: Status) -> Status | None:
    worker = _found(status, name)
    back = _routable(worker) or (worker.get("spare") and _healthy(worker))
    return worker if worker["instance"] != old and back else None


def _routable(worker: Status) -> bool:
    """Return whether a worker serves requests, or would as the last of its model. A worker of a new lineage is held back until
    another one of that lineage has joined."""
    held = worker.get("held") and worker["breaker"] == "closed"
    return bool((_healthy(worker) and worker["weight"] > 0) or held)


def _healthy(worker: Status) -> bool:
    return bool(worker["health"] == "HEALTHY" and worker["breaker"] == "closed")


async def _until(
    operator: Operator, found: Callable[[Status], Status | None], within_s: float, why: str
) -> Status:
    """Poll the status until `found` returns a value. Raise NotRestarted with `why`."""
    try:
        async with asyncio.timeout(within_s):
            while True:
                with contextlib.suppress(NoAnswer):  # a starting controller answers a moment later
                    if seen := found(await operator.ask("status", {})):
                        return seen
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        raise NotRestarted(f"{why} after {within_s:g} s") from None
