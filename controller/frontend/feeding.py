"""To whom does one answer owe its tokens? The worker that said them, and those whose KV cache that worker took over.

What a reader would get wrong: after a transfer the answer still hangs on its source. What was computed there wrongly goes
on being wrong at the target, so a conviction of the source names all that came since, whoever has said it.
"""

from typing import TYPE_CHECKING

from controller.frontend.exposure import Exposures, Stint
from controller.frontend.plan import Plan
from controller.router.table import Key

if TYPE_CHECKING:
    from controller.frontend.flight import Flight


class Feeding:
    """The stints of one answer."""

    __slots__ = ("_all", "_exposures", "_flight", "_open", "_plan", "_speaks")

    def __init__(self, exposures: Exposures, plan: Plan, flight: "Flight") -> None:
        self._exposures = exposures
        self._plan = plan
        self._flight: Flight | None = flight
        self._all: list[Stint] = []  # a conviction may come when the request has moved on
        self._open: list[tuple[Key, Stint]] = []  # those that the present attempt hangs on
        self._speaks = False  # the last of them is the present worker's own

    def feed(self, key: Key, first: int, now: float, tokens: int, rank: int | None = None) -> None:
        """So many tokens came from this worker (of several DP ranks from this one) now, the first of them with this index."""
        if not self._speaks:
            plan = self._plan
            stint = Stint(plan.request, plan.model, first, self._flight, plan.traceparent, rank)
            self._exposures.note(key, stint)
            self._all.append(stint)
            self._open.append((key, stint))
            self._speaks = True
        for _, stint in self._open:
            stint.add(now, tokens)

    def carried(self) -> None:
        """Another worker goes on, with the KV cache of this one."""
        self._speaks = False

    def hangs_on(self, key: Key) -> bool:
        """Say whether what comes now is computed from what this worker computed."""
        return any(one == key for one, _ in self._open)

    def leave(self) -> None:
        """What comes from now on is computed anew."""
        for key, stint in self._open:
            self._exposures.close(key, stint)
        self._open.clear()
        self._speaks = False

    def end(self) -> None:
        """The answer is over."""
        self._flight = None
        for stint in self._all:
            stint.flight = None
