"""The driver: owns the live requests, and applies the effects of the request state machine.

No other component owns live requests or applies effects.

    worker's frames ──▶ RequestSink ── tokens ───────────────────────────────▶ response writer
                            └── first token, failure, end ──▶ step ── effects ──▶ workers, reports, response writer
    fleet state, operator, client, clock ───────────────────▶ step

`step` is the state machine's transition function. It receives the first token of an attempt, failures, control events
and the end. All other tokens go directly from the sink to the response writer. Nothing in this module blocks or
awaits.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

import structlog

from controller.frontend.admission.admission import Admission, Reservation
from controller.frontend.admission.refusals import WaitedTooLong
from controller.frontend.dispatch.dispatcher import Dispatcher
from controller.frontend.dispatch.live_request import (
    Continuation,
    Dispatch,
    KvMove,
    LiveRequest,
    OutputStats,
    WaitingRequests,
)
from controller.frontend.dispatch.placement import Placer
from controller.frontend.dispatch.preemption import Preemption
from controller.frontend.dispatch.reports import MigrationReports
from controller.frontend.dispatch.stall_watch import StallWatch
from controller.frontend.dispatch.worker_refusal import as_api_error
from controller.frontend.errors import ApiError, internal
from controller.frontend.health.exposure import ServedSpans
from controller.frontend.metrics import FaultMetrics
from controller.frontend.openai.choice import Choice, InvalidOutput
from controller.frontend.openai.completion import Completion
from controller.frontend.openai.text.tokenizer import BUILTIN, load_tokens
from controller.frontend.openai.writers import check_logprobs, check_tokens
from controller.frontend.request import effects as do
from controller.frontend.request import events as on
from controller.frontend.request.failures import Failure, classify
from controller.frontend.request.state import RequestState, RequestTerms
from controller.frontend.request.step import step
from controller.frontend.settings import FrontendSettings
from controller.migration import planned_move as kv
from controller.ports import LostCause, WorkerUnreachable
from controller.router.endpoints import Endpoint, Key
from controller.router.selection.filter import NoWorker
from controller.router.trust import SourceDistrusted, TrustedSource
from events.refusal import REASON, read_refusal
from events.wire import Chunk, finish_reason

PROXIED_TOKENS_MAX = 2**62

log = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False, repr=False, kw_only=True)
class RequestSink(LiveRequest):
    """Receives the output of a live request's worker from the request plane. Implements `controller.ports.Sink`.

    Its methods are called synchronously, once per chunk. When a request leaves a worker, its stream is cancelled at
    the request plane, so no late output of that attempt arrives.
    """

    driver: "Driver"

    def take(self, chunk: Chunk) -> None:
        """Accept the output of one engine step for this stream. An error in the chunk ends only this stream."""
        if self.over:
            return
        try:
            try:
                if chunk.logprobs:
                    check_logprobs(chunk.logprobs, self.continuation.tokens.size)
                if self.state.has_output and chunk.tokens and chunk.finish is None and chunk.error is None:
                    if self.accept(chunk):  # the common case: the stream continues
                        self.driver.feed(self, on.Finished("stop", cancel=True))
                else:
                    self._take_edge(chunk)
            except InvalidOutput as why:
                self.driver.fail(self, Failure("invalid_output", str(why)))
        except Exception:
            self.driver.fail_internally(self)

    def _take_edge(self, chunk: Chunk) -> None:
        """Accept the first or the last chunk of an attempt. Raise InvalidOutput if its tokens are invalid."""
        driver, tokens, first = self.driver, chunk.tokens, not self.state.has_output
        if tokens:
            if first:
                check_tokens(tokens, self.continuation.tokens.size)
            if chunk.cached_tokens is not None and self.answer.cached_tokens is None:
                self.note_cached(chunk.cached_tokens)
        if first and (tokens or chunk.text is not None or chunk.proxied is not None):
            driver.feed(self, on.FirstToken())
        stopped = False
        if chunk.proxied is not None:
            # each event of a stream counts as a token, and a whole response as one token
            self.accepted += [0] * self.writer.pass_on(chunk.proxied)
        elif tokens:
            stopped = self.accept(chunk) if chunk.finish in (None, "length") else self.accept_last(chunk)
        elif chunk.text is not None:
            stopped = self.accept_text(chunk.text)
        if stopped:
            # A stop string was reached: the worker can stop generating.
            driver.feed(self, on.Finished("stop", cancel=chunk.finish is None or not tokens))
        elif chunk.error is not None:
            reason, _, detail = chunk.error.partition(":")
            if reason == REASON:
                driver.feed(self, on.RequestRejected(as_api_error(read_refusal(detail))))
            else:
                driver.fail(self, classify(chunk.error))
        elif chunk.finish is not None:
            reason = chunk.finish
            driver.feed(self, on.Finished(reason if reason in ("stop", "length") else finish_reason(reason)))

    def flush(self) -> None:
        """Count and write the output of one event-loop iteration."""
        if self.over:
            return  # the output was written when the answer ended
        self.stats.count(self, self.driver.now())
        self.writer.flush()
        if self.kv_move is not None:
            self._source_advanced()

    def lost(self, cause: LostCause, detail: str) -> None:
        """Fail the current attempt, because the connection to the worker broke or the worker hangs."""
        dispatch = self.dispatch
        if self.over or dispatch is None:
            return
        try:
            if self.kv_move is not None:
                self._source_lost(self.kv_move)
            self.driver.fail(self, Failure(cause, detail), dispatch)
        except Exception:
            self.driver.fail_internally(self)

    def _source_advanced(self) -> None:
        """If the target of a KV transfer has committed, compare the source's tokens with the target's again.

        If the source has sent the missing tokens by now, the answer switches to the target.
        """
        transfer = self.state.transfer
        if transfer is not None and transfer.state == "committed":
            self.driver.feed(self, self.advanced(kv.SourceProgressed()))

    def _source_lost(self, move: KvMove) -> None:
        """Complete a KV transfer without its source, which was lost.

        If the target has committed, it has reported the tokens that the source computed last, so these are accepted
        now. The target has no logprobs of these tokens, so a request with logprobs fails over normally.
        """
        self._source_advanced()
        transfer = self.state.transfer
        if transfer is not None and transfer.state == "committed" and not self.request.sampling.logprobs:
            missing = transfer.tokens[len(self.accepted) - move.base :]
            self.take(Chunk(move.source_stream, list(missing)))
            self.flush()


@dataclass(eq=False, repr=False)
class Driver:
    """Owns the live requests of one frontend, feeds events to the state machine and applies its effects."""

    settings: FrontendSettings
    admission: Admission
    dispatcher: Dispatcher
    preemption: Preemption
    placer: Placer
    exposures: ServedSpans
    reports: MigrationReports
    faults: FaultMetrics
    now: Callable[[], float]
    live: dict[int, LiveRequest] = field(default_factory=dict)  # by number of the live request
    waiting: WaitingRequests = field(default_factory=WaitingRequests)
    queued: dict[LiveRequest, asyncio.Future[Reservation]] = field(default_factory=dict)
    opened: int = 0  # number of requests opened so far; also the number of the latest one

    def __post_init__(self) -> None:
        self.preemption.feed, dispatcher = self.feed, self.dispatcher
        self.table, self.routing, self.poison = dispatcher.table, dispatcher.routing, dispatcher.poison
        self.request_metrics, counts_tokens = dispatcher.metrics, self.settings.router.track_output_blocks
        self.tracker = self.routing.slots if counts_tokens else None
        stall, admission, running = self.settings.stall, self.settings.admission, dispatcher.running
        self.stalls = StallWatch(stall, admission, self.table, running, dispatcher.plane, self.now())

    # --- from the client

    def launch(
        self,
        answers: Sequence[Choice],
        completion: Completion | None = None,
        room: Reservation | None = None,
        planned: Key | None = None,
    ) -> Sequence[LiveRequest]:
        """Send a request for each answer: to the worker `planned` if it has room, otherwise to the best worker.

        `room` is the request's reservation from admission, and is already released. An answer that has to wait
        reserves the same room again. `completion` is notified when each answer ends.
        """
        made = [self.open(answer, completion) for answer in answers]
        for live in made:
            live.room = room
            metrics = live.stats.metrics
            metrics.began(len(live.request.prompt))
            self.feed(live, on.Launched(planned))
        return made

    def open(self, answer: Choice, completion: Completion | None = None) -> LiveRequest:
        """Create a live request for an answer, without sending it.

        Raise TokenizerMissing if the tokenizer of the answer's model is not loaded.
        """
        request, settings, now = answer.request, self.settings, self.now()
        admission, longest, tokens = settings.admission, settings.migration_max_seq_len, len(request.prompt)
        first_token_s = admission.first_token_s + admission.first_token_s_per_1k / 1000 * tokens
        most = request.sampling.max_tokens
        if (
            request.proxied is not None
        ):  # its response ends only with the server's, however many events it has
            most, longest = PROXIED_TOKENS_MAX, None
            if not request.proxied.streamed:
                first_token_s = max(first_token_s, admission.whole_response_s)
        terms = RequestTerms(
            tokens,
            most,
            answer.migration_limit,
            longest,
            answer.forbidden,
            settings.on_corruption,
            settings.reroute_s,
            first_token_s,
        )
        metrics, arrived = self.request_metrics.of(request.model), request.arrived
        movable_max = inf if longest is None else longest - tokens
        arrived = now if arrived is None else arrived
        stats = OutputStats(metrics, self.exposures, self.tracker, movable_max, arrived, now, now)
        # the tokens of a proxied request are not used
        tokens_of = load_tokens(BUILTIN if request.proxied is not None else request.lineage[1])
        continuation = Continuation(request, answer.accepted, tokens_of)
        self.opened = answer.number = number = self.opened + 1
        live = RequestSink(answer, completion, RequestState(terms, now), stats, continuation, driver=self)
        self.live[number] = live
        return live

    def cancel(self, answers: Iterable[Choice]) -> None:
        """Cancel answers because their client has disconnected."""
        for answer in answers:
            live = self.live.get(answer.number)
            if live is not None:
                self.feed(live, on.ClientGone())

    # --- the machine

    def feed(self, live: LiveRequest, event: on.Event) -> None:
        """Apply an event to the state of one request, and apply the resulting effects.

        An effect may result in a further event, which is applied in the same way.
        """
        following: on.Event | None = event
        now = self.now()
        while following is not None:
            live.state, effects = step(live.state, following, now)
            following = None
            for effect in effects:
                following = self._apply(live, effect, now)
        if self.poison.resolved:
            self.poison.resolved = False
            self.wake()

    def fail(self, live: LiveRequest, failure: Failure, dispatch: Dispatch | None = None) -> None:
        """Fail an attempt of a request: `dispatch`, or the current attempt if `dispatch` is None.

        If `dispatch` is no longer the current attempt, the failure is counted against the worker, but does not
        affect the request.
        """
        if dispatch is not None and dispatch is not live.dispatch:
            self.dispatcher.count_failure(dispatch, failure)
        elif live.dispatch is not None:
            closed = self.dispatcher.closed_s((live.dispatch.endpoint.key,)) > 0
            self.feed(live, on.AttemptFailed(failure, live.progress, closed))

    def fail_internally(self, live: LiveRequest) -> None:
        """End one request with an internal error. Other requests are not affected.

        Must be called while the exception is being handled, so that the log contains it.
        """
        log.exception("stream_failed", request=live.request.id)
        if live.over:
            return
        if live.dispatch is not None:
            self.dispatcher.cancel(live.dispatch)
        now = self.now()
        live.state, effects = step(live.state, on.RequestRejected(internal()), now)
        for effect in effects or (do.LeaveWorker(), do.End(error=internal())):
            self._apply(live, effect, now)

    def _apply(self, live: LiveRequest, effect: do.Effect, now: float) -> on.Event | None:
        """Apply one effect to a request. Return the event that results from the effect, or None."""
        dispatcher, dispatch = self.dispatcher, live.dispatch
        # Effects of an undisturbed request come first: `match` on classes costs more than applying them.
        if type(effect) is do.SelectWorker:
            event = dispatcher.route(live, effect, now)
            if live.dispatch is not None and not live.state.begun:
                self.waiting.unbegun[live] = None
            return event
        if type(effect) is do.Started and dispatch is not None:
            dispatcher.prefill_done(live, dispatch, now)
            if effect.first:
                live.stats.first_output(now)
                self.waiting.unbegun.pop(live, None)
                self.admission.wake(live.request.model)
            return None
        if type(effect) is do.Complete and dispatch is not None:
            self._leave_worker(live, dispatch, now)
            dispatcher.served(live, dispatch, now, alone=effect.alone)
            self._end(live, now, effect.finish)
            return None
        return self._apply_rare(live, effect, now)

    def _apply_rare(self, live: LiveRequest, effect: do.Effect, now: float) -> on.Event | None:
        dispatcher, dispatch = self.dispatcher, live.dispatch
        match effect:
            case do.End(finish, error):
                self._end(live, now, finish, error)
            case do.Rewind(count):
                live.rewind(count)
                live.answer.exact |= count == 0
            case do.Park(keep_room):
                self.waiting.park(live, keep_room=keep_room)
            case do.QueueAgain():
                self._queue(live)
            case do.Reroute(planned):
                self._reroute(live, planned=planned)
            case do.CountFailure(kind):
                self.request_metrics.of(live.request.model).failed(kind)
            case do.CountRestored(kind, outcome, seconds):
                self.request_metrics.of(live.request.model).restored(kind, outcome, seconds)
            case do.ReportMigrated():
                self.reports.migrated(live, effect, now)
            case do.ReportAbandoned(reason):
                self.reports.abandoned(live, reason)
            case do.ReportExposure(action):
                live.exposure = action
            case do.Refuse(abandoned):
                request, none = live.request, dispatcher.no_worker
                error = self.admission.refusal(none, request.served, request.tier)
                if abandoned:
                    self.reports.abandoned(live, none.code)
                self._end(live, now, error=error)
            case do.LeaveWorker() if dispatch is not None:
                self._leave_worker(live, dispatch, now)
            case do.Judge(failure, begun) if dispatch is not None:
                return on.Judged(dispatcher.judge(live, dispatch, failure, begun=begun))
            case do.CancelStream(why) if dispatch is not None:
                dispatcher.cancel(dispatch, why)
            case do.NoteUnjudged(has_output) if dispatch is not None:
                dispatcher.unjudged(dispatch, has_output=has_output)
            case do.TurnedAway() if dispatch is not None:
                dispatcher.turned_away(dispatch)
                live.answer.endpoint = dispatch.before
            case _ if dispatch is not None and live.kv_move is not None:
                return self._advance_move(live, live.kv_move, effect, now)
        return None

    # --- to a worker

    def _leave_worker(self, live: LiveRequest, dispatch: Dispatch, now: float) -> None:
        stats = live.stats
        stats.count(live, now)
        live.dispatch = None
        stats.leave()
        self.dispatcher.end(live, dispatch, now)
        self._freed(live.request.model)

    def _freed(self, model: str | None = None) -> None:
        """Use capacity that has become free at the workers of a model.

        One parked answer of the model gets the capacity first, then the model's preempted answers, then its queued
        requests. If `model` is None, only preempted answers are resumed, but those of all models.
        """
        if model is not None and self.waiting.parked:
            longest = self.waiting.longest(model, self.now())
            if longest is not None:
                self.feed(longest, on.Woken())
        if self.preemption.put_off:
            for live, endpoint in self.preemption.resume(self.admission, model):
                if endpoint is not None:
                    self._resume(live, endpoint)
                else:
                    self.feed(live, on.NoneLeft())
        if model is not None:
            self.admission.wake(model)

    # --- waiting

    def wake(self) -> None:
        """Retry the parked requests, because a worker may have joined or may have a free slot."""
        for live in self.waiting.due(self.now()):
            self.feed(live, on.Woken())

    def _queue(self, live: LiveRequest) -> None:
        """Put an admitted request back into the admission queue.

        The request precedes all requests that are queued for the first time.
        """
        request, now, admission = live.request, self.now(), self.admission
        until = request.first_token_by
        if until is None:
            latency = self.table.knobs(request.model).latency
            until = live.state.began_at + self.settings.admission.queue_s * latency
        wait_s = max(0.0, until - now)
        turn = self.queued[live] = admission.again(
            request.served, request.lineage, wait_s, live.state.declined
        )

        def over(turn: "asyncio.Future[Reservation]") -> None:
            wanted = self.queued.pop(live, None) is turn
            if turn.cancelled():
                return
            if (error := turn.exception()) is None:
                # released for this request, which is sent before the next one in the queue
                turn.result().free()
                if wanted:
                    self._resume(live)
            elif wanted and isinstance(error, WaitedTooLong | NoWorker):
                self.feed(live, on.RequestRejected(admission.refusal(error, request.served, request.tier)))

        turn.add_done_callback(over)

    def _reroute(self, live: LiveRequest, *, planned: bool) -> None:
        """Send a request again after this event-loop iteration.

        If `planned` is true, the request is placed together with all requests that lost their workers in this
        iteration.
        """
        self.waiting.parked.pop(live, None)
        loop = asyncio.get_running_loop()

        def place() -> None:
            for one, endpoint in self.placer.place(self.waiting.take_rerouting()):
                self._resume(one, endpoint if endpoint is None or self.routing.takes(endpoint) else None)

        if not planned:
            loop.call_soon(self._resume, live)
        elif self.waiting.reroute(live):
            loop.call_soon(place)

    def _resume(self, live: LiveRequest, planned: Endpoint | None = None) -> None:
        live.give_back()
        try:
            self.feed(live, on.Resumed(planned.key if planned is not None else None))
        except Exception:  # the requests that were placed together with this one must still be sent
            self.fail_internally(live)

    # --- KV transfers

    def _advance_move(
        self, live: LiveRequest, move: KvMove, effect: do.Effect, now: float
    ) -> on.Event | None:
        plane, source = self.dispatcher.plane, move.wanted.source
        match effect:
            case do.TransferStep("ship"):
                assert move.offer is not None
                try:  # trust is checked immediately before the transfer
                    plane.ship(TrustedSource(self.table.worker(source)), move.source_stream, move.offer, move)
                except (SourceDistrusted, WorkerUnreachable) as error:
                    return on.TransferAdvanced(kv.MigrationDeclined("source", str(error)))
            case do.TransferStep("cancel"):
                plane.cancel(move.target.worker, move.stream)
            case do.TransferStep("stay"):
                plane.stay(source.worker, move.source_stream)
            case do.TransferStep("switch"):
                return on.Switched(move.target.server, move.move(len(live.accepted)))
            case do.TransferOver(state):
                move.target.release()
                if state == "switched":
                    self._hand_over(live, move, now)
                live.kv_move = None
                move.ended(effect)
        return None

    def _hand_over(self, live: LiveRequest, move: KvMove, now: float) -> None:
        """Switch an answer to the target's stream.

        Chunks that the target sent before the source's last token are accepted now.
        """
        source, plane = live.dispatch, self.dispatcher.plane
        assert source is not None
        live.stats.count(live, now)
        live.stats.hand_over()
        self.dispatcher.end(live, source, now)
        self._freed(live.request.model)
        self.dispatcher.adopt(live, move.target, move.rank, move.stream, now)
        plane.adopt(move.target.worker, move.stream, live)
        for chunk in move.held:
            live.take(chunk)
        if move.held:
            live.flush()

    # --- the end

    def _end(
        self, live: LiveRequest, now: float, finish: str | None = None, error: ApiError | None = None
    ) -> None:
        answer = live.answer
        if finish is not None and finish != "cancelled":
            live.writer.finish(finish)
        live.over = True
        answer.finish, answer.error = finish, error
        del self.live[answer.number]
        well = error is None and finish != "cancelled"
        live.stats.ended(live, now, well=well)
        if live.state.begun:
            self.admission.ended(live.request.model, len(live.accepted))
        else:
            self.waiting.unbegun.pop(live, None)
        if self.queued and (turn := self.queued.pop(live, None)) is not None:
            turn.cancel()
        if live.state.disturbed:  # an undisturbed request never waited for another worker
            self.waiting.forget(live)
            live.give_back()
        # break the reference cycle, so that the live request is freed without the garbage collector
        completion, live.completion = live.completion, None
        if completion is not None:
            completion.ended(answer)
            if answer.error is not None:
                self.cancel(completion.answers)
        live.writer.flush()

    def tick(self) -> None:
        """Fail stalled streams, resume preempted answers, and end requests that have waited too long.

        Called periodically.
        """
        now = self.now()
        for live, dispatch, failure in self.stalls.tick(now):
            self.faults.stalled.inc()
            try:
                self.dispatcher.cancel(dispatch, "elsewhere")
                self.fail(live, failure, dispatch)
            except Exception:
                self.fail_internally(live)
        self.preemption.comment()
        self._freed()
        for live in self.waiting.late(now, self.settings.admission.first_token_s):
            self.feed(live, on.Tick(self.table.knobs(live.request.model).latency))
