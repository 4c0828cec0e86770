"""The way of one answer from one worker to the next: which move is under way, since when no token can come, and what
is said about both.
"""

from typing import TYPE_CHECKING

from controller.frontend.plan import Move, Plan

if TYPE_CHECKING:
    from controller.frontend.desk import Desk
    from controller.frontend.flight import Flight


class Passage:
    """What one answer has to get over. Most answers have nothing, and no passage."""

    __slots__ = ("_desk", "_outage", "_plan", "move", "spoilt")

    def __init__(self, desk: "Desk", plan: Plan) -> None:
        self._desk = desk
        self._plan = plan  # not the flight: what is over would be freed by the collector of cycles only
        self._outage: tuple[float, str] | None = None  # since when, and by which kind of failure
        self.move: Move | None = None  # begun, and its first token has not come yet
        self.spoilt = False  # some of what was accepted may be wrong

    def interrupted(self, *, begun: bool) -> None:
        """An attempt has failed: count it, whether or not another one can be made. `begun`: it had brought tokens."""
        kind = "ongoing_request" if begun else "new_request"
        self._desk.meter.failed(self._plan.model, kind)
        if self._outage is None:
            self._outage = self._desk.now(), kind

    def restored(self, outcome: str) -> None:
        """What began with the first failure is over: another worker's token has come, or nothing will come."""
        if self._outage is not None:
            (since, kind), self._outage = self._outage, None
            self._desk.meter.restored(self._plan.model, kind, outcome, self._desk.now() - since)

    def got_over(self, flight: "Flight") -> None:
        """The answer goes on, or is complete: what had been under way is over."""
        self.arrived(flight, well=True)
        self.restored("success")

    def arrived(self, flight: "Flight", *, well: bool) -> None:
        """The move under way, if there is one, has brought its first token, or its attempt has failed too."""
        move, self.move = self.move, None
        seat = flight.seat
        if move is not None and seat is not None:
            exact = move.source.joined.exact and seat.joined.exact and not self.spoilt
            exact = exact and self._plan.deterministic and not flight.continuation.texts
            self._desk.migrated(flight, move, seat, self._desk.now(), exact=exact, well=well)
