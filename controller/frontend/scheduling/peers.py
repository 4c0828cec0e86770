"""Which other frontends serve beside this one? They say each second which workers they hear."""

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any

HEARD_S = 3.5  # three reports may be lost


class Peers:
    """The frontends that were heard lately."""

    def __init__(self, now: Callable[[], float], name: str = "") -> None:
        self._now = now
        self._name = name  # this one's
        self._heard_at: dict[str, float] = {}
        self._names: Sequence[str] = ()
        self._until = -inf  # nobody of them is silent for too long before

    def on_links(self, subject: str, body: Mapping[str, Any]) -> None:
        """Hear a frontend's report of its links."""
        name = str(body.get("frontend"))
        if name not in self._heard_at:
            self._until = -inf
        self._heard_at[name] = self._now()

    def names(self) -> Sequence[str]:
        """Return those who serve now, as far as is known, and forget the others. Each request asks twice."""
        now = self._now()
        if now > self._until:
            since = now - HEARD_S
            self._heard_at = {name: at for name, at in self._heard_at.items() if at >= since}
            self._names = sorted(self._heard_at)
            self._until = min(self._heard_at.values(), default=now) + HEARD_S
        return self._names

    def frontends(self) -> int:
        """Return how many frontends serve now, this one included."""
        names = self.names()
        return len({*names, self._name}) if names else 1
