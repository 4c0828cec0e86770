"""One stream on its way from its worker to another, with its KV cache: the frontend's hands in a planned move.

What may happen when is `controller.moving.transfer`'s to say; this does it. Until the stream goes on at the target it is
the sink of what the target says already, and holds that back: the source's last tokens come first.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import structlog

from controller.frontend.migration import Failure, PlannedCause
from controller.frontend.plan import Carried, Move
from controller.moving import transfer as machine
from controller.moving.cost import MigrationCost
from controller.moving.transfer import Act, Event, Transfer
from controller.ports import LostCause, Plane, WorkerUnreachable
from controller.router.table import Seat
from controller.router.trust import Distrusted, Trusted
from events.wire import Chunk, Committed, Reserved

if TYPE_CHECKING:
    from controller.frontend.flight import Flight

HELD_MAX = 1024  # chunks of the target that wait for the source's last tokens
ROOM_TOKENS = 16  # of margin, over what it will probably say until it stops

log = structlog.get_logger(__name__)


class Crossing:
    """One planned move. Implements `controller.ports.Carrier`."""

    def __init__(
        self,
        flight: "Flight",
        target: Seat,
        rank: int,
        cause: PlannedCause,
        price: Callable[[int], MigrationCost],
        plane: Plane,
        trust: Callable[[Seat], Trusted],
        ended: Callable[["Crossing"], None],
    ) -> None:
        """Prepare to move a flight. `price` says what it costs if the target has so many of its tokens in its prefix cache."""
        assert flight.seat is not None
        self.flight = flight
        self.source = flight.seat
        self.target = target
        self.rank = rank  # of the target's DP ranks
        self.cause = cause
        self.transfer = Transfer()
        self.began_at = 0.0
        self.target_failed = False
        self.cheaper: MigrationCost | None = None  # to compute it again there, as the target has shown
        self._price = price
        self._predicted_ms: float | None = None
        self._plane = plane
        self._trust = trust
        self._ended = ended
        self._source_stream = flight.stream
        self._stream = 0
        self._base = len(flight.accepted)
        self._offer: Reserved | None = None
        self._commit: Committed | None = None
        self._held: list[Chunk] = []

    def begin(self, now: float, within_s: float) -> None:
        """Ask the target. Raise WorkerUnreachable."""
        flight, joined = self.flight, self.target.joined
        request = flight.continuation.request(self.target, self.rank)
        left = request.sampling.max_tokens
        says = within_s * len(flight.accepted) / max(1e-3, now - (flight.first_at or now))
        room = len(request.tokens) + min(left, ROOM_TOKENS + int(says))
        self._stream = self._plane.reserve(joined.worker, joined.instance, request, room, self)
        self.began_at = now
        self.target.promised += 1
        flight.crossing = self

    # --- what the workers say -----------------------------------------------------------------------------

    def reserved(self, frame: Reserved) -> None:
        """The target keeps the room, and says what of it need be neither sent nor computed: let the source send, if that is
        still the quicker way, and the source can still be trusted."""
        if self.transfer.state != "asked":
            return
        self._offer, cost = frame, self._price(frame.cached_tokens)
        self._predicted_ms = cost.transfer_time_ms
        if frame.cached_tokens > 0 and cost.recommended == "reprefill":
            self.cheaper = cost
            self._take(machine.GivenUp(""))
        else:
            self._take(machine.Reserved())

    def declined(self, stream: int, why: str) -> None:
        """One of the two cannot."""
        self.target_failed = stream == self._stream
        self._take(machine.Declined("target" if self.target_failed else "source", why))

    def committed(self, frame: Committed) -> None:
        """The target decodes."""
        self._commit = frame
        self._take(machine.Committed(tuple(frame.tokens)))

    def take(self, chunk: Chunk) -> None:
        """Hold what the target says until its turn has come."""
        if chunk.error is not None:
            self.target_failed = True
            self._take(machine.Lost(chunk.error))
            return
        self._held.append(chunk)
        if len(self._held) > HELD_MAX:
            self._take(machine.GivenUp("the source's last tokens have not come"))

    def flush(self) -> None:
        """Nothing of it is for the client yet."""

    def lost(self, cause: LostCause, detail: str) -> None:
        """The target is out of reach."""
        self.target_failed = True
        self._take(machine.Lost(f"target {cause}: {detail}"))

    # --- what the flight says -----------------------------------------------------------------------------

    def said(self) -> None:
        """The source has said more."""
        if self.transfer.state == "committed":
            self._take(machine.Said())

    def source_lost(self) -> bool:
        """The source is out of reach. Return whether the stream needs it no more: where the target has committed, it knows
        the tokens that have not come. (Their logprobs it does not know.)"""
        flight = self.flight
        self.said()
        if self.transfer.state == "committed" and not flight.plan.sampling.logprobs:
            missing = self.transfer.tokens[len(flight.accepted) - self._base :]
            flight.take(Chunk(self._source_stream, list(missing)))
            flight.flush()
        return flight.done or flight.seat is not self.source

    def left(self, *, failed: bool) -> None:
        """The flight has left the source by another way."""
        self._take(machine.Left(over=not failed))

    def give_up(self, why: str) -> None:
        """It takes too long."""
        self._take(machine.GivenUp(why))

    # --- what is done -------------------------------------------------------------------------------------

    def _take(self, event: Event) -> None:
        if self.transfer.over:
            return
        said = self.flight.accepted[self._base :]
        self.transfer, acts = machine.step(self.transfer, event, said)
        over = self.transfer.over
        if over:
            self.target.promised -= 1
            if self.flight.crossing is self:
                self.flight.crossing = None
        for act in acts:
            self._do(act)
        if over:
            self._ended(self)

    def _do(self, act: Act) -> None:
        plane, source, target = self._plane, self.source, self.target
        match act:
            case "ship":
                self._ship()
            case "cancel":
                plane.cancel(target.worker, self._stream)
            case "stay":
                plane.stay(source.worker, self._source_stream)
            case "switch":
                self._switch()

    def _ship(self) -> None:
        """Let the source send what the target does not have. Trust is asked for at the very moment."""
        assert self._offer is not None
        try:
            self._plane.ship(self._trust(self.source), self._source_stream, self._offer, self)
        except (Distrusted, WorkerUnreachable) as error:
            self._take(machine.Declined("source", str(error)))

    def _switch(self) -> None:
        commit, flight = self._commit, self.flight
        assert commit is not None
        why = Failure(self.cause, "")
        move = Move(
            why, why, self.source, self.began_at, len(flight.accepted),
            Carried(commit.bytes, commit.blocks, commit.link), self._predicted_ms,
        )  # fmt: skip
        flight.switch(self.target, self.rank, self._stream, move)
        self._plane.adopt(self.target.worker, self._stream, flight)
        held, self._held = self._held, []
        for chunk in held:
            flight.take(chunk)
        if held:
            flight.flush()
