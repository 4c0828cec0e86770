"""Who waits for a worker before one frontend: production's lines by tier, and before them who was let in before."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from controller.router.admission.line import Line, PlaceInLine
from controller.simulator.world.kernel import SECOND
from controller.simulator.world.requests.traffic import WaitingRequest


class WaitingLines:
    """One frontend's."""

    def __init__(self, make: Callable[[], Line[Any]]) -> None:
        """`make` makes a line."""
        self._make = make
        self._lines: dict[str, Line[WaitingRequest]] = {}  # by model
        self._places: dict[WaitingRequest, PlaceInLine[WaitingRequest]] = {}
        self._back: dict[str, deque[WaitingRequest]] = {}  # those who were let in before, by model

    def __iter__(self) -> Iterator[WaitingRequest]:
        """Yield all who wait."""
        for back in self._back.values():
            yield from back
        yield from self._places

    def push(self, waiting: WaitingRequest, client: str) -> None:
        """Let one stand in line."""
        since, latest = waiting.since / SECOND, waiting.latest / SECOND
        place = PlaceInLine(waiting, waiting.rank, client, 1.0, since, latest)
        self._lines.setdefault(waiting.model, self._make()).push(place)
        self._places[waiting] = place

    def push_back(self, waiting: WaitingRequest) -> None:
        """Let one wait before all in line: its worker had no room."""
        self._back.setdefault(waiting.model, deque()).append(waiting)

    def best(self, model: str) -> int | None:
        """Return the best tier of which anybody stands in line; None: nobody does."""
        return min((one.rank for one in self._places if one.model == model), default=None)

    def let_in(self, model: str, now_s: float, goes: Callable[[WaitingRequest], bool]) -> None:
        """Ask `goes` of those who were let in before whether they go now, then of each who is next, until one does not."""
        for waiting in [*self._back.get(model, ())]:
            if goes(waiting):
                self._back[model].remove(waiting)
        line = self._lines.get(model)
        while line is not None and (place := line.head(now_s)) is not None:
            if not goes(place.who):
                return
            del self._places[place.who]
            line.served(place)

    def leave(self, waiting: WaitingRequest) -> bool:
        """Take one out. False: it does not wait."""
        if (place := self._places.pop(waiting, None)) is not None:
            return self._lines[waiting.model].remove(place)
        back = self._back.get(waiting.model, deque())
        if waiting not in back:
            return False
        back.remove(waiting)
        return True
