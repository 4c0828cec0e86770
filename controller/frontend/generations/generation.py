"""One answer, from its first attempt to its end, over any number of workers.

    start ─▶ running ── tokens ──▶ finished
               │  ▲
     failure   │  │ another worker goes on from every token that was accepted
               ▼  │
             moving ── nobody there: parked, for a while ── budget ended ──▶ abandoned (the original error)

What workers say comes in at `GenerationOutput`; what a failure or a conviction leads to is decided by `migration_policy`
and `corruption_policy`, and done here. Nothing here waits.
"""

from collections.abc import Callable, Collection

import structlog

from controller.frontend.errors import ApiError, internal
from controller.frontend.generations import corruption_policy as corruption
from controller.frontend.generations import migration_policy as policy
from controller.frontend.generations.attempt import Attempt
from controller.frontend.generations.continuation import Continuation
from controller.frontend.generations.host import GenerationHost
from controller.frontend.generations.migration_progress import MigrationProgress
from controller.frontend.generations.output import GenerationOutput
from controller.frontend.generations.output_stats import OutputStats
from controller.frontend.generations.pending import GivenUp
from controller.frontend.generations.provenance import Provenance
from controller.frontend.health.poison import Suspicion
from controller.frontend.openai.text.tokenizer import load_tokens
from controller.frontend.openai.writers import ResponseWriter
from controller.frontend.request.failures import Failure, MigrationBudget
from controller.frontend.request.generation_request import GenerationRequest, Move
from controller.frontend.scheduling.admission import Reservation
from controller.ports import WorkerUnreachable
from controller.router.endpoints import Endpoint, Key
from controller.router.selection.filter import AllClosed, NoWorker

log = structlog.get_logger(__name__)


class Generation:
    """One answer that is being made."""

    __slots__ = (
        "_dispatcher", "_ended", "_host", "_metrics", "_pending", "_provenance", "_reports", "accepted", "budget",
        "continuation", "done", "error", "finish", "first_attempt", "last_attempt", "output", "progress", "request",
        "stats", "writer",
    )  # fmt: skip

    def __init__(
        self,
        host: "GenerationHost[Generation]",
        request: GenerationRequest,
        writer: ResponseWriter,
        budget: MigrationBudget,
        ended: Callable[["Generation"], None],
    ) -> None:
        """Prepare an answer, of which nobody has been asked anything yet. Raise TokenizerMissing."""
        metrics, now = host.request_metrics.of(request.model), host.now
        self._host, self._dispatcher = host, host.dispatcher
        self._pending, self._reports = host.pending, host.reports
        self._metrics = metrics
        self._ended: Callable[[Generation], None] | None = ended
        self.request, self.writer, self.budget = request, writer, budget
        self.accepted: list[int] = []
        self.continuation = Continuation(request, self.accepted, load_tokens(request.lineage[1]))
        self._provenance = Provenance(host.exposures, request, self)
        tracker = self._dispatcher.scheduler if host.settings.router.track_output_blocks else None
        self.stats = OutputStats(now, metrics, self._provenance, tracker, budget, request)
        self.output = GenerationOutput(self, request, writer, self.continuation, self.stats)
        self.progress = MigrationProgress(metrics, now)
        self.first_attempt: Attempt | None = None
        self.last_attempt: Attempt | None = None
        self.finish: str | None = None
        self.error: ApiError | None = None
        self.done = False

    # --- sending it off -----------------------------------------------------------------------------------

    def start(self, planned: Endpoint | None = None, *, room: Reservation | None = None) -> None:
        """Send the request to the best worker, or where it is planned to go. If it must wait, it keeps the `room` that was given
        back for it."""
        self._metrics.began(len(self.request.prompt))
        self._send(planned, room=room)

    def _send(
        self, planned: Endpoint | None = None, *, free: bool = False, room: Reservation | None = None
    ) -> None:
        """Send the request to the best worker, or where it is planned to go (for a `free` move of ours: without cost); a
        connection that cannot be made costs no budget. A new one that must wait keeps `room`."""
        missed: set[Key] = set()
        while not self.done:
            try:
                choice, planned = self._dispatcher.choose(self, missed, planned), None
            except NoWorker as error:
                self._no_worker(error, room)
                return
            try:
                attempt = self._dispatcher.send(self, choice, paid=not free)
            except WorkerUnreachable:
                missed.add(choice.endpoint.key)
                self.budget.tried |= {choice.endpoint.key}
                self.progress.interrupted(begun=False)
                free = False
                continue
            self._begin(attempt)
            return

    def _begin(self, attempt: Attempt) -> None:
        """Hear this attempt from now on."""
        self.budget.spent += attempt.paid
        if self.progress.disturbed:
            self.progress.refused = ""
        self.last_attempt = attempt
        self.first_attempt = self.first_attempt or attempt
        if self.stats.first_at is None:
            self._pending.begin(self)
        self.output.begin(attempt)

    def _no_worker(self, error: NoWorker, room: Reservation | None) -> None:
        """Nobody can take it now. A request that had begun waits for a worker; a new one is told."""
        move = self.progress.move
        stands_in = self._host.stands_in(self.request, self.budget.failed)
        waited_s = self._host.now() - move.since if move is not None else 0.0
        decision = policy.without_worker(
            error.code,
            move,
            may_return=self.budget.may_return,
            stands_in=stands_in,
            begun=self.stats.first_at is not None,
            reopens_s=error.reopens_s if isinstance(error, AllClosed) else 0.0,
            patience_s=self._host.settings.reroute_s - waited_s,
        )
        match decision:
            case policy.Park() | policy.Hold():
                self.progress.disturbed = True
                if move is not None:
                    self._pending.park(self, move.since)
                else:
                    self._pending.hold(self, self.stats.began_at, room)
            case policy.LineUp():
                self._pending.line_up(self)
            case policy.Abandon(reason, failure):
                self._abandon(reason, failure.error)
            case _:
                refusal = self._host.no_worker(error, self.request)
                if move is not None:
                    self._abandon(error.code, refusal)
                else:
                    self.refused(refusal)

    @property
    def endpoint(self) -> Endpoint | None:
        """The worker that it is with."""
        attempt = self.output.attempt
        return attempt.endpoint if attempt is not None else None

    @property
    def has_output(self) -> bool:
        """Whether the worker that it is with has given it tokens."""
        return self.output.has_output

    # --- what its output says -----------------------------------------------------------------------------

    def first_output(self) -> None:
        """The first came from this attempt: perhaps the first of the answer, or the first after a move."""
        attempt = self.output.attempt
        if attempt is not None:
            self._dispatcher.prompt_read(self, attempt)
        if self.stats.first_at is None:
            self.stats.first_output()
            self._pending.first_token(self)
        if self.progress.disturbed:
            self._arrived(well=True)

    def finished(self, reason: str, *, cancel: bool = False) -> None:
        """The answer is complete; `cancel`: its worker does not know it."""
        if cancel:
            self._dispatcher.cancel(self.output.attempt, "complete")
        attempt, first = self.output.attempt, self.first_attempt
        if self.progress.disturbed:
            self._arrived(well=True)
        self._leave()
        if attempt is not None:
            self._dispatcher.served(self.request, attempt, self.stats, alone=attempt is first)
        self.finish = reason
        self.writer.finish(reason)
        self._end()

    def refused(self, error: ApiError) -> None:
        """Nobody can answer this, as its worker says, or takes it."""
        self._dispatcher.unjudged(self.output.attempt, has_output=self.has_output)
        self._leave()
        self._end(error=error)

    def mistaken(self) -> None:
        """A mistake of ours was just caught: this client is told, and nobody else is touched."""
        log.exception("stream_failed", request=self.request.id)
        self._dispatcher.cancel(self.output.attempt)
        self._leave()
        self._end(error=internal())

    # --- moving on purpose: nothing has failed, it costs no budget, and nobody is excluded by it -----------------

    def switch(self, target: Endpoint, rank: int, stream: int, move: Move) -> None:
        """Go on at this rank of `target`, which has taken the KV cache over and decodes."""
        source = self._part()
        self._provenance.carried()
        if source is not None:
            self._dispatcher.end(self, source)
        self.progress.began(move)
        self._begin(self._dispatcher.adopt(self, target, rank, stream))

    def compute_again(self, target: Endpoint | None, move: Move) -> None:
        """Leave a worker that has not failed, and go on by the tokens alone, at `target`; None: when it is told to."""
        self._part()
        self._leave()
        self.progress.began(move)
        if target is not None:
            self._send(target, free=True)

    def _part(self) -> Attempt | None:
        """Take all that this worker has said, and cancel the stream there."""
        output = self.output
        output.live_migration = None
        output.count()
        self._dispatcher.cancel(output.attempt, "elsewhere")
        self._dispatcher.unjudged(output.attempt, has_output=output.has_output)
        return output.attempt

    # --- moving -------------------------------------------------------------------------------------------

    def evict(self, others: Collection[Key], *, corrupt: bool) -> None:
        """The fleet took this worker out of service: go on elsewhere, at once if any of `others` can still be tried."""
        attempt, budget = self.output.attempt, self.budget
        refusal = budget.refusal(self.continuation.length, begun=self.writer.reached > 0)
        if attempt is not None and policy.leaves_unhealthy(
            corrupt=corrupt, refusal=refusal, others=others, tried=budget.tried
        ):
            self._dispatcher.cancel(attempt, "elsewhere")
            self.failed(Failure("unhealthy", ""), attempt, spoilt=corrupt)

    def expose(self, first: int, key: Key) -> str:
        """Tokens from index `first` on may be wrong, because this worker was. Do what `on_corruption` says, and return what
        was done."""
        attempt = self.output.attempt
        on_source = attempt is not None and attempt.endpoint.key == key
        response = corruption.respond(
            self._host.settings.on_corruption,
            first=first,
            seen=self.writer.reached,
            on_source=on_source,
            carried=self._provenance.hangs_on(key),
            text=bool(self.continuation.texts),
            stays=on_source and attempt is not None and bool(attempt.endpoint.suspect),
        )
        match response:
            case corruption.EndInError():
                self._dispatcher.cancel(attempt)
                if attempt is not None:
                    self.progress.interrupted(begun=self.has_output)
                self._leave()
                message = "the worker that answered was found to compute wrong results; ask again"
                self._abandon("corrupt_output", ApiError(502, message, code="corrupt_output"))
                return "error"
            case corruption.StartOver(keep):
                self._dispatcher.cancel(attempt, "elsewhere")
                self.output.rewind(keep)
                self.failed(Failure("unhealthy", "corrupt output"), attempt, on_source=on_source)
                return "error" if self.error is not None else "restart"
            case corruption.ComputeAgain():
                self.progress.spoilt = True
                self._dispatcher.cancel(attempt, "elsewhere")
                self.failed(Failure("unhealthy", "corrupt KV cache"), attempt, on_source=False)
            case corruption.Keep():
                self.progress.spoilt = True
        return "continue"

    def retry(self, planned: Endpoint | None = None) -> None:
        """Go on elsewhere, after a failure or after having been parked: where it was planned, else where there is room."""
        if self.done or self.output.attempt is not None:
            return
        move = self.progress.move
        free = move is not None and move.failure.planned
        try:
            self._send(planned, free=free, room=self._pending.give_back(self))
        except Exception:  # it must not keep those that were planned with it from going on
            self.mistaken()

    def failed(
        self, failure: Failure, attempt: Attempt | None, *, spoilt: bool = False, on_source: bool = True
    ) -> None:
        """This attempt has failed (None: it had none, and what it has is of no use), by a fault of its own worker or, not
        `on_source`, of one before. Go on elsewhere, or tell the client why not."""
        progress, budget, now = self.progress, self.budget, self._host.now()
        if attempt is not None and attempt is not self.output.attempt:  # it was left in time
            return self._dispatcher.blame(attempt, failure)
        if attempt is not None and policy.is_turned_away(failure, progress.move, has_output=self.has_output):
            self._dispatcher.turned_away(self, attempt)
            self._leave()
            self.last_attempt = attempt.before
            self.first_attempt = None if attempt.before is None else self.first_attempt
            return self._send(free=not attempt.paid)
        replaced = progress.move
        self._arrived(well=False)
        not_carried = policy.why_not_carried(
            failure, progress.refused, under_way=self.output.live_migration is not None
        )
        suspicion = Suspicion.NONE
        if attempt is not None:
            suspicion = self._attempt_failed(attempt, failure, on_source=on_source)
        decision = policy.after_failure(
            failure,
            replaced=replaced.original if replaced is not None else None,
            missing_tokens=self.request.sampling.max_tokens - len(self.accepted),
            refusal=budget.refusal(self.continuation.length, begun=self.writer.reached > 0),
            suspicion=suspicion,
        )
        match decision:
            case policy.Finish(reason):
                self.finished(reason)
            case policy.Abandon(reason, original):
                self._abandon(reason, original.error)
            case policy.Park(original) | policy.GoOn(original):
                source = attempt or self.first_attempt
                assert source is not None
                if (
                    budget.forbidden and self.accepted
                ):  # it cannot be continued, and its client has seen none of it
                    self.output.rewind(0)
                progress.spoilt = progress.spoilt or spoilt
                move = Move(failure, original, source.endpoint, now, len(self.accepted), refused=not_carried)
                progress.began(move)
                if isinstance(decision, policy.Park):
                    progress.not_before = now + decision.pause_s
                    self._pending.park(self, now)
                else:
                    self._pending.reschedule(self)

    def _attempt_failed(self, attempt: Attempt, failure: Failure, *, on_source: bool) -> Suspicion:
        """Count a failed attempt where it ran, and leave. Return what it says of the request."""
        begun, kind = self.has_output, failure.kind
        self.progress.interrupted(begun=begun)
        if on_source:
            self.budget.note(attempt.endpoint.key, kind, begun=begun or not attempt.paid)
        else:
            self.budget.spent -= 1  # a well worker only begins anew
        suspicion = self._dispatcher.judge(self, attempt, failure, begun=begun)
        self._leave(failed=True)
        return suspicion

    def _arrived(self, *, well: bool) -> None:
        """The move under way, if there is one, has brought its first token, or its attempt has failed too."""
        move, attempt, stats = self.progress.arrived(), self.output.attempt, self.stats
        if move is not None and attempt is not None:
            exact = policy.same_answers(move.source, attempt.endpoint, self.request.sampling.unset)
            exact = (
                exact
                and not self.progress.spoilt
                and self.request.deterministic
                and not self.continuation.texts
            )
            gap_s = self._host.now() - (stats.last_at if stats.first_at is not None else move.since)
            self._reports.migrated(self.request, move, attempt, gap_s, exact=exact, well=well)
        if well:
            self.progress.restored("success")

    # --- ending -------------------------------------------------------------------------------------------

    def give_up(self, why: GivenUp) -> None:
        """It has waited too long: for a worker that goes on with it, or for its first token."""
        move = self.progress.move
        if self.done:
            return
        if why == "no_worker" and move is not None:
            self._abandon(why, move.original.error)
        elif self.stats.first_at is None:
            # Also of one that was never sent, because its like may bring workers down.
            self._dispatcher.cancel(self.output.attempt)
            self._leave()
            error = ApiError(503, "no token came in time", code=why, retry_after_s=1)
            if move is not None:
                self._abandon(why, error)
            else:
                self._end(error=error)

    def cancel(self) -> None:
        """The client has gone: nobody reads this any more."""
        if self.done:
            return
        moving = self.progress.move is not None
        self._dispatcher.cancel(self.output.attempt)
        self._dispatcher.unjudged(self.output.attempt, has_output=self.has_output)
        self._leave()
        if moving:
            self._reports.abandoned(self.request, self.last_attempt, len(self.accepted), "cancelled")
        self.finish = "cancelled"
        self._end()

    def _abandon(self, reason: str, error: ApiError) -> None:
        """It could not be continued."""
        self._reports.abandoned(self.request, self.last_attempt, len(self.accepted), reason)
        self._end(error=error)

    def _end(self, *, error: ApiError | None = None) -> None:
        self.error, self.done = error, True
        self.output.close()
        self._provenance.end()
        if self.progress.disturbed:
            self.progress.ended("cancelled" if self.finish == "cancelled" else "failure")
        well = error is None and self.finish != "cancelled"
        self.stats.ended(self.request, len(self.accepted), well=well)
        self._pending.end(self)
        ended, self._ended = self._ended, None  # no cycle: what is over is freed at once
        if ended is not None:
            ended(self)
        self.writer.flush()

    def _leave(self, *, failed: bool = False) -> None:
        """Get off the worker, where the answer has ended, or failed."""
        attempt = self.output.leave(failed=failed)
        if attempt is not None:
            self._provenance.leave()
            self._dispatcher.end(self, attempt)
