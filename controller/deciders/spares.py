"""Spares: who waits with its weights loaded, and in whose place does it serve?

    spare ── a worker of its kind is lost ──▶ serves in its place; the lost one is a spare from then on
    in a place ── `on_return` is release, and the one whose place it is is well again ──▶ spare; that one serves

What a reader would get wrong: who is a spare is said of a name, and outlives a life. As many serve as did before: a spare takes
a place, it adds none; whoever has lost his place comes back as a spare, and gets nothing until he is wanted. The unit is the
worker, which is a whole group of ranks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, TypeAlias

from controller.deciders.validation import STRICT
from events.decisions import SpareActivated, SpareReleased
from events.fact import Decision
from events.frozen import quickly_made

OnReturn: TypeAlias = Literal["swap", "release"]
Kind: TypeAlias = tuple[str | int, ...]  # who has the same can stand for one another: model, revision, shape


@dataclass(frozen=True, slots=True, kw_only=True)
class SparesPolicy:
    """What becomes of a spare when the worker in whose place it serves is well again."""

    on_return: OnReturn = "swap"  # it stays a spare; release: it has its place again
    __pydantic_config__ = STRICT


@dataclass(frozen=True, slots=True)
class Spare:
    """One worker's role."""

    kept: bool = False  # kept back: no traffic, no part of capacity
    place: str = ""  # the worker in whose place it serves; empty: in its own, or in none


NO_SPARE = Spare()


@quickly_made
@dataclass(frozen=True, slots=True)
class SpareView:
    """How one worker stands when places are filled."""

    worker: str
    instance: str
    spare: Spare
    kind: Kind
    host: str
    lost: str  # why it does not come back soon; empty: it is not lost
    ready: bool  # nothing is wrong with it, it has passed its canaries
    incident: str = ""  # that is open about it
    cause: str = ""  # decision that has last moved it


def activated(spare: str, lost: Spare, name: str) -> tuple[Spare, Spare]:
    """Return the roles of the `spare` that takes the place of the `lost` one of this `name`, and of the lost one."""
    place = lost.place or name
    return Spare(place="" if place == spare else place), Spare(kept=True)


def released() -> tuple[Spare, Spare]:
    """Return the roles of a spare that is kept back again, and of the one that has returned to its own place."""
    return Spare(kept=True), NO_SPARE


def decide(policy: SparesPolicy, views: Sequence[SpareView], now: datetime) -> Iterator[Decision]:
    """Say which spares are to serve from now on, and which are not any more."""
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
            # whatever has befallen a host has befallen all that runs there
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
