"""The way of one answer from one worker to the next: which move is under way, and since when no token can come.

interrupted ── attempts ──▶ restored      counted once, however many attempts it took
began(move) ── its first token, or its attempt failed too ──▶ arrived
"""

from collections.abc import Callable

import msgspec

from controller.frontend.request.generation_request import Move
from controller.frontend.request_metrics import ModelMetrics


class MigrationProgress(msgspec.Struct, eq=False):  # made for each answer, and hardly ever written to
    """What one answer has to get over. Most answers have nothing."""

    _metrics: ModelMetrics
    _now: Callable[[], float]
    _outage: tuple[float, str] | None = None  # since when, and by which kind of failure
    disturbed: bool = False  # there was a failure or a move: hardly ever
    move: Move | None = None  # begun, and its first token has not come yet
    spoilt: bool = False  # some of what was accepted may be wrong
    not_before: float = 0.0  # when it may be sent again, while it is parked
    put_off_s: float = 0.0  # so long, in all, more urgent ones went before it
    refused: str = ""  # why the last transfer that was wanted of this attempt did not come off

    def interrupted(self, *, begun: bool) -> None:
        """An attempt has failed: count it, whether or not another one can be made. `begun`: it had brought tokens."""
        self.disturbed = True
        kind = "ongoing_request" if begun else "new_request"
        self._metrics.failed(kind)
        if self._outage is None:
            self._outage = self._now(), kind

    def restored(self, outcome: str) -> None:
        """What began with the first failure is over: another worker's token has come, or nothing will come."""
        if self._outage is not None:
            (since, kind), self._outage = self._outage, None
            self._metrics.restored(kind, outcome, self._now() - since)

    def began(self, move: Move) -> None:
        """The answer is to go on elsewhere."""
        self.disturbed = True
        self.move = move

    def transfer_refused(self, why: str) -> None:
        """A transfer that was wanted of the present attempt did not come off."""
        self.refused = why

    def arrived(self) -> Move | None:
        """The move under way has brought its first token, or its attempt has failed too. Return it; None if there is none."""
        move, self.move = self.move, None
        return move

    def ended(self, outcome: str) -> None:
        """The answer is over: nothing is under way any more."""
        self.move = None
        self.restored(outcome)
