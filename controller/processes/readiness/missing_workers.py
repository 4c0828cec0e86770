"""Finds which of a fleet's workers are missing, and why, from the status of the controller."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from controller.deciders.worker import SPARE

NAMED_MAX = 3  # workers named per line; the others with the same reason are counted


def absent(names: Sequence[str], status: Mapping[str, Any], *, outside: bool) -> dict[str, str]:
    """Return those of these workers that neither serve requests nor are ready spares, each with the reason. `outside`: only
    workers that wait for something outside of the fleet, because the fleet handles all other causes itself."""
    known = {worker["id"]: worker for worker in status["workers"]}
    waiting = {one["id"]: str(one["reason"]) for one in status.get("awaited", ())}
    found: dict[str, str] = {}
    for name in names:
        if name in waiting:
            found[name] = waiting[name]
        elif not outside and (why := _why_not(known.get(name))):
            found[name] = why
    return found


def _why_not(worker: Mapping[str, Any] | None) -> str:
    """Return why a worker serves no requests, or "" if it does."""
    if worker is None:
        return "its process has not reported yet"
    why = [reason for reason in worker.get("reasons") or () if reason != SPARE]
    if worker["weight"] or (worker.get("spare") and not why):
        return ""
    return "; ".join(why) or "it serves no requests yet"


def lines(missing: Mapping[str, str]) -> Iterator[str]:
    """Yield one line per reason, with the workers to which it applies."""
    alike: dict[str, list[str]] = {}
    for name, why in missing.items():
        alike.setdefault(why, []).append(name)
    for why, names in alike.items():
        named = ", ".join(names[:NAMED_MAX])
        more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
        yield f"waiting for {named}{more}: {why}"
