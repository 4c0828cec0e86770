"""Spare workers: loaded and idle, each ready to replace a lost worker of its kind.

    spare ── a worker of its kind is lost ──▶ serves instead; the lost worker becomes a spare
    replacement ── `on_return` is release, and the replaced worker is healthy again ──▶ spare; the replaced worker serves

The role belongs to a worker's name and is kept across its instances. The number of serving workers stays the same: a spare
replaces a worker and adds none. A replaced worker returns as a spare, and gets no traffic until it is needed. The unit is
the worker, which is a whole group of ranks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, TypeAlias

from controller.deciders.validation import STRICT
from events.decisions import SpareActivated, SpareReleased
from events.fact import Decision
from events.frozen import fast_constructor

OnReturn: TypeAlias = Literal["swap", "release"]
# Workers of equal kind can replace one another: model, revision, shape.
Kind: TypeAlias = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SparesPolicy:
    """What happens to a spare when the worker that it replaces is healthy again."""

    on_return: OnReturn = (
        "swap"  # swap: the returning worker becomes the spare; release: it gets its place back
    )
    __pydantic_config__ = STRICT


@dataclass(frozen=True, slots=True)
class Spare:
    """The role of one worker."""

    kept: bool = False  # kept back: gets no traffic, and is not counted in capacity
    place: str = ""  # the worker that it replaces; empty: none


NO_SPARE = Spare()


@fast_constructor
@dataclass(frozen=True, slots=True)
class SpareView:
    """The properties of one worker that decide how spares are assigned."""

    worker: str
    instance: str
    spare: Spare
    kind: Kind
    host: str
    lost: str  # why it will not return soon; empty: it is not lost
    ready: bool  # it is healthy and has passed its canaries
    incident: str = ""  # its open incident
    cause: str = ""  # the decision that last moved it


def activated(spare: str, lost: Spare, name: str) -> tuple[Spare, Spare]:
    """Return the new roles of the `spare` that replaces the `lost` worker of this `name`, and of that worker."""
    place = lost.place or name
    return Spare(place="" if place == spare else place), Spare(kept=True)


def released() -> tuple[Spare, Spare]:
    """Return the new roles of a spare that is kept back again, and of the worker that it had replaced."""
    return Spare(kept=True), NO_SPARE


def decide(policy: SparesPolicy, views: Sequence[SpareView], now: datetime) -> Iterator[Decision]:
    """Yield a decision for each spare that starts to serve or stops."""
    spares, gone = [view for view in views if view.spare.kept and view.ready], set[str]()
    if policy.on_return == "release":
        returned = {view.worker: view for view in spares}
        for view in views:
            back = returned.get(view.spare.place)
            if back is not None and not view.spare.kept:
                spares.remove(back)
                gone.add(view.worker)
                yield _released(view, back, now)
    for lost in views:
        if not lost.lost or lost.spare.kept or lost.worker in gone:
            continue
        able = [spare for spare in spares if spare.kind == lost.kind]
        if able:
            # prefer another host: a host failure affects every worker on it
            best = min(able, key=lambda spare: (bool(lost.host) and spare.host == lost.host, spare.worker))
            spares.remove(best)
            yield _activated(best, lost, now)


def _activated(spare: SpareView, lost: SpareView, now: datetime) -> SpareActivated:
    return SpareActivated(
        worker=spare.worker,
        instance=spare.instance,
        replaces=lost.worker,
        reason=lost.lost,
        incident=lost.incident,
        decided_at=now,
        cause=lost.cause,
    )


def _released(spare: SpareView, back: SpareView, now: datetime) -> SpareReleased:
    return SpareReleased(
        worker=spare.worker, instance=spare.instance, returned=back.worker, decided_at=now, cause=back.cause
    )
