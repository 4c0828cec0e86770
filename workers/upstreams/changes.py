"""Compares two versions of the file of upstreams: what each changed entry means for its worker.

added ──▶ start        removed, paused ──▶ stop        resumed ──▶ start
a field of ADJUSTABLE ──▶ adjust, while the worker runs
any other field, or a higher limit ──▶ rejoin: drain, leave and join again
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from workers.config.upstreams import ADJUSTABLE, UpstreamEntry

Action = Literal["add", "remove", "pause", "resume", "adjust", "rejoin"]
_PHRASES: dict[Action, str] = {
    "add": "added; it joins after its probes",
    "remove": "removed; it drains and leaves",
    "pause": "paused; it drains and leaves",
    "resume": "resumed; it joins after its probes",
    "adjust": "{} changed",
    "rejoin": "{} changed; it drains and joins again",
}


@dataclass(frozen=True, slots=True)
class UpstreamChange:
    """One changed entry: its name, what happens to its worker, and the fields that changed."""

    name: str
    action: Action
    fields: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}: {_PHRASES[self.action].format(', '.join(self.fields))}"


def changes(before: Iterable[UpstreamEntry], after: Sequence[UpstreamEntry]) -> list[UpstreamChange]:
    """Return the changes from one version of the file to the next, removals first."""
    old, new = ({entry.name: entry for entry in entries} for entries in (before, after))
    found = [UpstreamChange(name, "remove") for name in old if name not in new]
    for name, entry in new.items():
        if name not in old:
            found.append(UpstreamChange(name, "add"))
        elif (change := change_of(old[name], entry)) is not None:
            found.append(change)
    return found


def change_of(old: UpstreamEntry, new: UpstreamEntry) -> UpstreamChange | None:
    """Return what the change of one entry means; None if the entries are equal."""
    fields = tuple(name for name in old.__struct_fields__ if getattr(old, name) != getattr(new, name))
    if not fields:
        return None
    if old.pause or new.pause:
        # without a worker, any other field takes effect when the upstream is resumed
        action: Action = "adjust" if old.pause and new.pause else "pause" if new.pause else "resume"
        return UpstreamChange(new.name, action, fields)
    return UpstreamChange(new.name, "rejoin" if needs_rejoin(old, new) else "adjust", fields)


def needs_rejoin(running: UpstreamEntry, wanted: UpstreamEntry) -> bool:
    """Return whether a worker that was started with `running` must join again to run with `wanted`.

    Routers never exceed the limits that a worker has registered, so higher limits need a new registration.
    """
    for name in running.__struct_fields__:
        if name not in ADJUSTABLE and getattr(running, name) != getattr(wanted, name):
            return True
    before, after = running.limits, wanted.limits
    return before.waiting_max != after.waiting_max or after.requests_max > before.requests_max
