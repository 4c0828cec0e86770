"""Spare workers: loaded and idle, each ready to replace a lost worker of its kind.

    spare ── a worker of its kind is lost ──▶ serves instead; the lost worker becomes a spare
    replacement ── `on_return` is release, and the replaced worker is healthy again ──▶ spare; the replaced worker serves

The role belongs to a worker's name and is kept across its instances. A spare replaces a worker and never adds one, so the
number of serving workers stays the same. A replaced worker that recovers becomes a spare, and gets no traffic until it
replaces another worker. A spare is always a whole worker with all of its ranks.
"""

from collections.abc import Iterable, Iterator, Sequence
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
    """The role of one worker: serving, kept as a spare, or serving in place of another worker."""

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

    @property
    def needs_spare(self) -> bool:
        """Whether the worker is lost and was not a spare itself."""
        return bool(self.lost) and not self.spare.kept


def decide(policy: SparesPolicy, views: Sequence[SpareView], now: datetime) -> Iterator[Decision]:
    """Yield a SpareActivated for each lost worker with a suitable spare.

    With `on_return` "release", also yield a SpareReleased for each replacement that is no longer needed.
    """
    spares, gone = [view for view in views if view.spare.kept and view.ready], set[str]()
    if policy.on_return == "release":
        for view, back in _returned(views, spares):
            spares.remove(back)
            gone.add(view.worker)
            yield SpareReleased(
                worker=view.worker,
                instance=view.instance,
                returned=back.worker,
                decided_at=now,
                cause=back.cause,
            )
    for lost in views:
        if not lost.needs_spare or lost.worker in gone:
            continue
        if (best := _best(spares, lost)) is not None:
            spares.remove(best)
            yield SpareActivated(
                worker=best.worker,
                instance=best.instance,
                replaces=lost.worker,
                reason=lost.lost,
                incident=lost.incident,
                decided_at=now,
                cause=lost.cause,
            )


def _best(spares: Iterable[SpareView], lost: SpareView) -> SpareView | None:
    """Return the best spare for a lost worker; None if no spare is of its kind.

    A spare on another host is preferred, because a host failure affects every worker on the host.
    """
    able = (spare for spare in spares if spare.kind == lost.kind)
    return min(able, key=lambda one: (bool(lost.host) and one.host == lost.host, one.worker), default=None)


def _returned(views: Sequence[SpareView], spares: Sequence[SpareView]) -> list[tuple[SpareView, SpareView]]:
    """Return pairs of a replacement and the worker that it replaced, where the latter is a ready spare again."""
    ready = {view.worker: view for view in spares}
    return [
        (view, ready[view.spare.place]) for view in views if view.spare.place in ready and not view.spare.kept
    ]
