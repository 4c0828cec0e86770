"""One stream on its way from its worker to another, with its KV cache: the frontend's hands in a planned move.

What may happen when is `controller.migration.live`'s to say; this does it. Until the stream goes on at the target it is
the sink of what the target says already, and holds that back: the source's last tokens come first.
"""

from collections.abc import Callable
from typing import Protocol

import structlog

from controller.frontend.generations.continuation import Continuation
from controller.frontend.generations.output import GenerationOutput
from controller.frontend.generations.output_stats import OutputStats
from controller.frontend.request.failures import Failure, PlannedCause
from controller.frontend.request.generation_request import Carried, GenerationRequest, Move
from controller.migration import live as machine
from controller.migration.cost import MigrationCost
from controller.migration.live import Act, Event, Transfer
from controller.ports import LostCause, RequestPlane, WorkerUnreachable
from controller.router.endpoints import Endpoint
from controller.router.trust import SourceDistrusted, TrustedSource
from events.wire import Chunk, Committed, Reserved

HELD_MAX = 1024  # chunks of the target that wait for the source's last tokens
ROOM_TOKENS = 16  # of margin, over what it will probably say until it stops

log = structlog.get_logger(__name__)


class Migratable(Protocol):
    """What moves: a generation."""

    @property
    def request(self) -> GenerationRequest: ...
    @property
    def accepted(self) -> list[int]: ...
    @property
    def continuation(self) -> Continuation: ...
    @property
    def output(self) -> GenerationOutput: ...
    @property
    def stats(self) -> OutputStats: ...

    def switch(self, target: Endpoint, rank: int, stream: int, move: Move) -> None:
        """Go on at this rank of `target`, which has taken the KV cache over and decodes."""
        ...


class LiveMigration:
    """One planned move. Implements `controller.ports.TransferSink`."""

    def __init__(
        self,
        generation: Migratable,
        target: Endpoint,
        rank: int,
        cause: PlannedCause,
        price: Callable[[int], MigrationCost],
        plane: RequestPlane,
        trust: Callable[[Endpoint], TrustedSource],
        ended: Callable[["LiveMigration"], None],
    ) -> None:
        """Prepare to move an answer that is with a worker. `price` says what it costs if the target has so many of its tokens
        in its prefix cache."""
        attempt = generation.output.attempt
        assert attempt is not None
        self.generation = generation
        self.source = attempt.endpoint
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
        self._source_stream = attempt.stream
        self._stream = 0
        self._base = len(generation.accepted)
        self._offer: Reserved | None = None
        self._commit: Committed | None = None
        self._held: list[Chunk] = []

    def begin(self, now: float, within_s: float) -> None:
        """Ask the target. Raise WorkerUnreachable."""
        generation, joined = self.generation, self.target.joined
        request = generation.continuation.request(self.target, self.rank)
        left = request.sampling.max_tokens
        per_s = len(generation.accepted) / max(1e-3, now - (generation.stats.first_at or now))
        room = len(request.tokens) + min(left, ROOM_TOKENS + int(within_s * per_s))
        self._stream = self._plane.reserve(joined.worker, joined.instance, request, room, self)
        self.began_at = now
        self.target.admit()
        generation.output.live_migration = self

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
            self._take(machine.TargetReserved())

    def declined(self, stream: int, why: str) -> None:
        """One of the two cannot."""
        self.target_failed = stream == self._stream
        self._take(machine.MigrationDeclined("target" if self.target_failed else "source", why))

    def committed(self, frame: Committed) -> None:
        """The target decodes."""
        self._commit = frame
        self._take(machine.TargetCommitted(tuple(frame.tokens)))

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

    # --- what the source says -----------------------------------------------------------------------------

    def source_said(self) -> None:
        """The source has said more."""
        if self.transfer.state == "committed":
            self._take(machine.SourceSaid())

    def source_lost(self) -> None:
        """The source is out of reach. Where the target has committed, the stream needs it no more: the target knows the
        tokens that have not come. (Their logprobs it does not know.)"""
        generation, output = self.generation, self.generation.output
        self.source_said()
        if self.transfer.state == "committed" and not generation.request.sampling.logprobs:
            missing = self.transfer.tokens[len(generation.accepted) - self._base :]
            output.take(Chunk(self._source_stream, list(missing)))
            output.flush()

    def left(self, *, failed: bool) -> None:
        """The answer has left the source by another way."""
        self._take(machine.SourceLeft(over=not failed))

    def give_up(self, why: str) -> None:
        """It takes too long."""
        self._take(machine.GivenUp(why))

    # --- what is done -------------------------------------------------------------------------------------

    def _take(self, event: Event) -> None:
        if self.transfer.over:
            return
        output = self.generation.output
        self.transfer, acts = machine.step(self.transfer, event, output.accepted[self._base :])
        over = self.transfer.over
        if over:
            self.target.release()
            if output.live_migration is self:
                output.live_migration = None
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
        except (SourceDistrusted, WorkerUnreachable) as error:
            self._take(machine.MigrationDeclined("source", str(error)))

    def _switch(self) -> None:
        commit, generation = self._commit, self.generation
        assert commit is not None
        why = Failure(self.cause, "")
        move = Move(
            why, why, self.source, self.began_at, len(generation.accepted),
            Carried(commit.bytes, commit.blocks, commit.link), self._predicted_ms,
        )  # fmt: skip
        generation.switch(self.target, self.rank, self._stream, move)
        self._plane.adopt(self.target.worker, self._stream, generation.output)
        held, self._held = self._held, []
        for chunk in held:
            generation.output.take(chunk)
        if held:
            generation.output.flush()
