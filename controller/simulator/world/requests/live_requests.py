"""Simulates requests token by token (`holdfast simulate --live-requests`).

In addition to failures, this module simulates waiting requests, moves with and without the KV cache, and clients that
disconnect. It also simulates answers with tokens of convicted workers.

The token at position n has the value n if its worker is correct. It has the value -1 - n if the worker is corrupt or continues
wrong tokens. A lost, repeated or altered token is therefore visible in the answer. The random numbers for these requests come
from a separate generator.
"""

from collections.abc import Sequence

from controller.frontend.request import effects as do
from controller.frontend.request import events as on
from controller.frontend.request.effects import Effects
from controller.frontend.request.failures import PREEMPTED, Failure, PlannedCause, Suspicion
from controller.frontend.request.state import (
    AnswerProgress,
    Move,
    OnCorruption,
    RequestState,
    RequestTerms,
    stays,
)
from controller.migration import planned_move as kv
from controller.router.endpoints import Endpoint, Key, Server
from controller.router.selection.filter import AllTried, Headroom, NoWorker
from controller.simulator.world.kernel import MS, SECOND
from controller.simulator.world.machines import Machine
from controller.simulator.world.requests.frontends import TOO_LATE, SimulatedFrontend
from controller.simulator.world.surroundings import Surroundings
from controller.simulator.world.traffic import LONGER, SimulatedRequest, SimulatedStream
from events.wire import Committed

ANSWER_MAX, CHUNK_MAX = 40, 8  # tokens
STALLED = 10  # seconds without a token
POLICIES: Sequence[OnCorruption] = ("continue", "restart", "error")


class LiveFrontend(SimulatedFrontend):
    """A host of frontend processes, with requests that are simulated token by token."""

    def __init__(self, name: str, surroundings: Surroundings) -> None:
        super().__init__(name, surroundings)
        self.crowded, self._request_chance = True, surroundings.kernel.chance(f"{name} requests")

    def _begin_requests(self) -> None:
        super()._begin_requests()
        self.live: dict[SimulatedRequest, None] = {}  # those that have not ended
        self._convicted: set[Key] = set()
        self._later(SECOND, self._check_requests)

    def unanswered(self) -> int:
        return len(self.live)

    def _new(self, id: str, model: str, tier: str) -> SimulatedRequest:
        chance, now = self._request_chance, self._kernel.now
        terms = RequestTerms(
            prompt_tokens=chance.randint(1, 100),
            max_tokens=chance.randint(1, ANSWER_MAX),
            migration_limit=chance.choice((0, 1, 3, 3)),
            max_seq_len=chance.choice((None, None, None, 110)),
            forbidden=chance.choice(("",) * 7 + ("guided_decoding",)),
            on_corruption=chance.choice(POLICIES),
            first_token_s=60.0,
        )
        request = SimulatedRequest(
            id, model, RequestState(terms, now / SECOND), tier, self.table.urgency(tier), now,
            holds_back=chance.choice((0, 0, 2, ANSWER_MAX)), poisonous=chance.random() < 0.01,
        )  # fmt: skip
        self.live[request] = None
        if chance.random() < 0.1:
            self._later(int(20 * SECOND * chance.random()), self.feed, request, on.ClientGone())
        return request

    # --- the machine ------------------------------------------------------------------------------------------------

    def _step(self, request: SimulatedRequest, event: on.Event) -> Effects:
        effects = super()._step(request, event)
        self.surroundings.stepped(request, event, effects)
        return effects

    def _apply(self, request: SimulatedRequest, effect: do.Effect) -> on.Event | None:
        if request not in self.live:
            return super()._apply(request, effect)
        match effect:
            case do.CancelStream() | do.TurnedAway():
                request.stream.open = False
                return super()._apply(request, effect)
            case do.NoteUnjudged(has_output):
                self._unjudged(request, has_output=has_output)
            case do.Judge(failure, begun):
                return on.Judged(self._judge(request, failure, begun=begun))
            case do.Rewind(count):
                del request.accepted[count:], request.givers[count:]
            case do.Park():
                pass  # parked requests are retried every second
            case do.Reroute():
                self._kernel.after(0, self._resume, request, self.life)
            case do.ReportMigrated(move):
                self._migrated(request, move, (self._kernel.now / SECOND - move.since) * 1000)
            case do.ReportAbandoned(reason):
                self._abandoned(request, reason)
            case do.Refuse() | do.Complete() | do.End():
                self._finish(request, effect)
            case _:
                return self._transfer(request, effect) or super()._apply(request, effect)
        return None

    def _finish(self, live: SimulatedRequest, effect: do.Refuse | do.Complete | do.End) -> None:
        tally = self._tally
        match effect:
            case do.Refuse(abandoned):
                if abandoned:
                    self._abandoned(live, "no_worker")
                tally.unserved += 1
            case do.Complete():
                super()._apply(live, effect)
                live.finish()
            case do.End(finish="stop" | "length"):
                live.finish()
                tally.served += 1
            case do.End(error=error) if error is not TOO_LATE:
                tally.lost += 1
        del self.live[live]
        self._remove(live, served=False)
        self.surroundings.notify("ended", live, self)

    def _judge(self, request: SimulatedRequest, failure: Failure, *, begun: bool) -> Suspicion:
        if failure.kind.blames:
            self._blame(request, failure.reason)
        else:
            self._unjudged(request, has_output=begun)
        if failure.reason == "engine_error" and request.poisonous:
            request.failed_at.add(request.endpoint.key)
            return Suspicion.POISONOUS if len(request.failed_at) > 1 else Suspicion.NONE
        fell = not begun and failure.reason == "disconnected"
        return Suspicion.SUSPECT if fell else Suspicion.NONE

    def _unjudged(self, request: SimulatedRequest, *, has_output: bool) -> None:
        self.breakers.unjudged(request.endpoint.key, request.sent, has_output=has_output)

    # --- sending ------------------------------------------------------------------------------------------------

    def _pick(self, request: SimulatedRequest, effect: do.SelectWorker) -> Endpoint:
        endpoints, rules = self._look(request.model), self._rules
        room = Headroom.FRESH if request.queued is not None else Headroom.HELD
        planned = [one for one in endpoints if one.key == effect.planned]
        try:
            return self._picker.pick(planned or endpoints, rules, effect.avoid, room)
        except AllTried:
            return self._picker.pick(endpoints, rules, effect.fallback, room)
        except NoWorker:
            if not planned:
                raise
            return self._picker.pick(endpoints, rules, effect.avoid, room)

    def _no_worker(self, request: SimulatedRequest, none: NoWorker) -> on.NoWorkerFound:
        return on.NoWorkerFound(none.code, self.table.stands_in(request.model, None, request.state.failed))

    def _connects(self, request: SimulatedRequest, endpoint: Endpoint) -> bool:
        machine = self._machines[endpoint.worker]
        return machine.runs(endpoint.instance) or self._request_chance.random() < 0.5

    def _occupy(self, request: SimulatedRequest, endpoint: Endpoint) -> None:
        request.reported = request.state.move  # the request machine decides when to report
        super()._occupy(request, endpoint)

    def _send(self, request: SimulatedRequest) -> None:
        accepted = request.accepted
        wrong = any(token < 0 for token in accepted)
        machine, key = self.machine(request), request.endpoint.key
        request.streams.append(SimulatedStream(machine, key, len(accepted), wrong))
        super()._send(request)

    def _serve(self, request: SimulatedRequest, machine: Machine) -> None:
        self._emit_later(request, request.stream)

    def _emit_later(self, request: SimulatedRequest, stream: SimulatedStream) -> None:
        longer = LONGER if stream.machine.waiting is not None else 1.0
        duration = (0.1 + 1.5 * self._request_chance.random()) * stream.machine.condition.slow * longer
        self._later(int(duration * SECOND), self._emit, request, stream)

    def _emit(self, request: SimulatedRequest, stream: SimulatedStream) -> None:
        """Generate the next tokens of a stream, or fail the attempt if the worker cannot compute them."""
        if not (stream.open and stream.decodes):
            return
        machine, chance = stream.machine, self._request_chance
        if machine.instance != stream.key[1] or not machine.reachable(self.name):
            stream.silent_s += 1
            if stream.silent_s > STALLED:
                self.failed(request, "stalled")
            else:
                self._later(SECOND, self._emit, request, stream)
            return
        stream.silent_s = 0
        if machine.condition.erring or request.poisonous or chance.random() < machine.condition.flaky / 4:
            self.failed(request, "engine_error")
            return
        left = request.state.terms.max_tokens - stream.position
        self._take(request, stream, stream.tokens(min(left, chance.randint(1, CHUNK_MAX))))
        if stream.position < request.state.terms.max_tokens:
            self._emit_later(request, stream)
        elif stream.open and chance.random() < 0.03:
            self.failed(request, "disconnected")
        elif stream.open:
            stream.open = False
            self.feed(request, on.Finished("length"))

    def _take(self, request: SimulatedRequest, stream: SimulatedStream, tokens: Sequence[int]) -> None:
        """Accept tokens of a stream for a request. The stream must not be cancelled."""
        if not request.state.has_output:
            self.feed(request, on.FirstToken())
        request.accepted += tokens
        request.givers += [stream.key] * len(tokens)
        request.show(request.holds_back)
        self.surroundings.notify("said", request, stream)
        if request.target is not None and request.state.transfer is not None:
            self._advance(request, kv.SourceProgressed())

    # --- failures and moves -----------------------------------------------------------------------------------------

    def _progress(self, request: SimulatedRequest) -> AnswerProgress:
        return AnswerProgress(len(request.accepted), len(request.shown))

    def _cut(self, request: SimulatedRequest) -> None:
        request.stream.open = False

    def unhealthy(self, endpoint: Endpoint | None, request: SimulatedRequest) -> None:
        """Notify a request's state machine that the request's worker was taken out of service.

        `endpoint` is that worker, or None if the worker is no longer known. No notification is sent about a convicted worker
        that stays in service as the last worker of its model.
        """
        if endpoint is None or not endpoint.suspect:
            others = {one.key for one in self._look(request.model) if one.routable} - {request.endpoint.key}
            corrupt = endpoint is not None and endpoint.corrupt
            self.feed(request, on.WorkerUnhealthy(corrupt, others, self._progress(request)))

    def _leave_unhealthy(self) -> None:
        """Handle the requests at workers that new events convict, drain or take out of service.

        If a worker was newly convicted, each request with tokens of this worker is handled as the request's corruption policy
        requires. Requests leave workers that were taken out of service, and requests at a draining worker are moved.
        """
        for key, endpoint in self.table.endpoints.items():
            if not endpoint.corrupt:
                self._convicted.discard(key)
            elif key not in self._convicted:
                self._convicted.add(key)
                for request in [one for one in self.live if key in one.givers]:
                    self._expose(request, endpoint)
        super()._leave_unhealthy()
        for request in [one for one in self.requests if one in self.live]:
            if self.table.drains(request.endpoint):
                self._move(request, "drain")

    def _expose(self, request: SimulatedRequest, endpoint: Endpoint) -> None:
        key, at = endpoint.key, request.state.attempt
        carried = at is not None and key in request.stream.sources
        here = at is not None and at.server.key == key and bool(endpoint.suspect)
        first = request.givers.index(key)
        self.feed(request, on.Exposed(first, key, carried, here, self._progress(request)))

    def _move(self, request: SimulatedRequest, cause: PlannedCause) -> None:
        """Start a planned move of a request.

        A preempted request continues after a pause. Any other request moves with its KV cache or by re-prefill.
        """
        state, chance = request.state, self._request_chance
        if not state.has_output or state.transfer is not None or stays(state.terms, len(request.accepted)):
            return
        if cause == PREEMPTED:
            self.feed(request, on.MovedOnPurpose(self._planned(request, cause), None))
            self._kernel.after(chance.randint(1, 5) * SECOND, self._resume, request, self.life)
            return
        try:
            tried = state.tried | {request.endpoint.key}
            target = self._picker.pick(self._look(request.model), self._rules, tried, Headroom.HELD)
        except NoWorker:
            self.feed(request, on.TransferDeclined("no worker has room"))
            return
        if chance.random() < 0.4:
            self.feed(request, on.MovedOnPurpose(self._planned(request, cause), target.key))
        else:
            self._ask(request, target)

    def _planned(
        self, request: SimulatedRequest, cause: PlannedCause, carried: Committed | None = None
    ) -> Move:
        why, source, now = Failure(cause, ""), Server(request.endpoint.key), self._kernel.now / SECOND
        return Move(why, why, source, now, len(request.accepted), carried)

    # --- waiting ----------------------------------------------------------------------------------------------------

    def _resume(self, request: SimulatedRequest, life: int) -> None:
        """Resume a preempted request. In 30 % of cases, chosen at random, give the request up instead.

        `life` is the number of the frontend process that preempted the request. If that process has ended, do nothing.
        """
        gives_up = request.state.phase == "preempted" and self._request_chance.random() < 0.3
        if self.up and self.life == life:
            self.feed(request, on.NoneLeft() if gives_up else on.Resumed())

    def _check_requests(self) -> None:
        """Run the checks that every request needs once a second.

        Requests without a worker are retried, and requests that have waited too long are ended. A few requests are moved at
        random.
        """
        self._later(SECOND, self._check_requests)
        for request in [*self.live]:
            if request.state.phase != "new":
                self.feed(request, on.Tick())
            if request.state.phase == "parked":
                self.feed(request, on.Woken())
            if self._request_chance.random() < 0.01:
                self._move(request, self._request_chance.choice((PREEMPTED, "operator")))

    # --- KV transfers -----------------------------------------------------------------------------------------------

    def _ask(self, request: SimulatedRequest, target: Endpoint) -> None:
        """Ask a target worker to take over a request together with the request's KV cache."""
        source, machine = request.stream, self._machines[target.worker]
        request.target = SimulatedStream(machine, target.key, 0, False, source, decodes=False)
        request.target_at, request.asked_at = target, len(request.accepted)
        self.feed(request, on.TransferBegun())
        self._later(20 * MS, self._reserved, request, request.target)

    def _advance(self, request: SimulatedRequest, event: kv.Event) -> None:
        tokens = tuple(request.accepted[request.asked_at :])
        self.feed(request, on.TransferAdvanced(event, tokens))

    def _reserved(self, request: SimulatedRequest, target: SimulatedStream) -> None:
        if request.target is target:
            reachable = target.machine.reachable(self.name) and target.machine.instance == target.key[1]
            declined = kv.MigrationDeclined("target", "no room")
            taken = reachable and self._request_chance.random() < 0.9
            self._advance(request, kv.TargetReserved() if taken else declined)

    def _committed(self, request: SimulatedRequest, target: SimulatedStream) -> None:
        """Notify the request's state machine that the target has received the KV cache and decodes.

        The source's last tokens may still be in transit. In some cases the transfer is given up instead.
        """
        source = target.after
        if request.target is not target or source is None:
            return
        if not target.machine.reachable(self.name) or self._request_chance.random() < 0.1:
            self._advance(request, kv.GivenUp("it takes too long"))
            return
        left = request.state.terms.max_tokens - 1 - source.position
        late = source.tokens(max(0, min(left, 2)))
        target.position, target.wrong, target.decodes = source.position, source.wrong, True
        tokens = (*request.accepted[request.asked_at :], *late)
        self._advance(request, kv.TargetCommitted(tokens))
        if late and source.open:
            self._take(request, source, late)

    def _transfer(self, request: SimulatedRequest, effect: do.Effect) -> on.Event | None:
        target = request.target
        if target is None:
            return None
        match effect:
            case do.TransferStep("ship"):
                request.stream.decodes = False
                self._later(self._request_chance.randint(20, 2000) * MS, self._committed, request, target)
            case do.TransferStep("stay"):
                request.stream.decodes = True
                self._emit_later(request, request.stream)
            case do.TransferStep("cancel"):
                target.open = False
            case do.TransferStep("switch"):
                carried = Committed(0, [], 1 << 20, 1, "tcp")
                move = self._planned(request, "drain", carried)
                return on.Switched(Server(target.key), move)
            case do.TransferOver(state):
                if state == "switched":
                    self._leave(request)
                    self._adopt(request, target)
                request.target = None
        return None

    def _adopt(self, request: SimulatedRequest, target: SimulatedStream) -> None:
        """Continue the request at the target worker, with the stream `target`."""
        endpoint, state = request.target_at, request.state
        assert state.last is not None
        self._count_at(request, endpoint)
        request.attempt, request.reported = state.last.number, state.move
        request.sent_times += 1
        request.streams.append(target)
        target.machine.accept(request)
        self._emit_later(request, target)
