"""Which other frontends serve beside this one, and where do requests of theirs wait for room? They say each second which workers
they hear, and how many requests wait there."""

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any, NamedTuple

HEARD_S = 3.5  # three reports may be lost


class _Heard(NamedTuple):
    """What one frontend said last."""

    at: float
    waiting: tuple[str, ...]  # models for which requests wait there


class Peers:
    """The frontends that were heard lately."""

    def __init__(self, now: Callable[[], float], name: str = "") -> None:
        self._now = now
        self._name = name  # this one's
        self._heard: dict[str, _Heard] = {}
        self._names: Sequence[str] = ()
        self._until = -inf  # nobody of them is silent for too long before
        self.contenders: dict[
            str, int
        ] = {}  # models for which others' requests wait: frontends that share its workers

    def on_links(self, subject: str, body: Mapping[str, Any]) -> None:
        """Hear a frontend's report of its links."""
        name, waiting = str(body.get("frontend")), body.get("waiting")
        models = tuple(str(model) for model in waiting) if isinstance(waiting, Mapping) else ()
        before = self._heard.get(name)
        self._heard[name] = _Heard(self._now(), models)
        if before is None:
            self._until = -inf
        if before is None or before.waiting != models:
            self._count()

    def names(self) -> Sequence[str]:
        """Return those who serve now, as far as is known, and forget the others. Each request asks twice."""
        now = self._now()
        if now > self._until:
            since = now - HEARD_S
            self._heard = {name: heard for name, heard in self._heard.items() if heard.at >= since}
            self._names = sorted(self._heard)
            self._until = min((heard.at for heard in self._heard.values()), default=now) + HEARD_S
            self._count()
        return self._names

    def _count(self) -> None:
        self.contenders.clear()
        for name, heard in self._heard.items():
            for model in heard.waiting if name != self._name else ():
                self.contenders[model] = self.contenders.get(model, 1) + 1

    def frontends(self) -> int:
        """Return how many frontends serve now, this one included."""
        names = self.names()
        return len({*names, self._name}) if names else 1
