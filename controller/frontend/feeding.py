"""To whom does one answer owe its tokens? The worker that said them, and those whose KV cache that worker took over.

What a reader would get wrong: after a transfer the answer still hangs on its source. What was computed there wrongly goes
on being wrong at the target, so a conviction of the source names all that came since, whoever has said it.
"""

from typing import TYPE_CHECKING

import msgspec

from controller.frontend.exposure import Exposures, Stint
from controller.frontend.plan import Plan
from controller.router.table import Key

if TYPE_CHECKING:
    from controller.frontend.flight import Flight


class Feeding(msgspec.Struct, eq=False):
    """The stints of one answer."""

    _exposures: Exposures
    _plan: Plan
    _flight: "Flight | None"
    own: Stint | None = None  # the present worker's, from its first token on
    sources: tuple[Stint, ...] = ()  # of those whose KV cache it has taken over
    _left: tuple[Stint, ...] = ()  # a conviction may come when the request has moved on

    def begin(self, key: Key, rank: int | None, first: int) -> Stint:
        """The first tokens come from this worker (of several DP ranks from this one), and the first of them has this index."""
        plan = self._plan
        stint = Stint(plan.request, plan.model, first, self._flight, plan.traceparent, rank, key)
        self.own = stint
        self._exposures.note(stint)
        return stint

    def carried(self) -> None:
        """Another worker goes on, with the KV cache of this one."""
        self.sources, self.own = self._open, None

    def hangs_on(self, key: Key) -> bool:
        """Say whether what comes now is computed from what this worker computed."""
        return any(stint.key == key for stint in self._open)

    def leave(self) -> None:
        """What comes from now on is computed anew."""
        over = self._open
        for stint in over:
            self._exposures.close(stint)
        self._left += over
        self.sources, self.own = (), None

    def end(self) -> None:
        """The answer is over."""
        self._flight = None
        for stint in self._left + self._open:
            stint.flight = None

    @property
    def _open(self) -> tuple[Stint, ...]:
        """Those that the present attempt hangs on, its own last."""
        return (*self.sources, self.own) if self.own is not None else self.sources
