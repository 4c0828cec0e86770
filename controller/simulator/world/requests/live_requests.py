"""Simulates requests token by token (`holdfast simulate --live-requests`).

In addition to failures, requests wait for workers, are moved with or without their KV cache, contain tokens of convicted
workers, and lose their clients.

The token at position n has the value n if its worker is correct. It has the value -1 - n if the worker is corrupt or
continues wrong tokens. A lost, repeated or altered token is therefore visible in the answer. These requests draw from a
random stream of their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from controller.frontend.request import effects as do
from controller.frontend.request import events as on
from controller.frontend.request.effects import Effects
from controller.frontend.request.failures import PREEMPTED, Failure, PlannedCause, Suspicion
from controller.frontend.request.state import (
    AnswerProgress,
    Carried,
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
from controller.simulator.world.requests.frontends import TOO_LATE, RequestsUnderWay, SimulatedFrontend
from controller.simulator.world.traffic import LONGER, SimulatedRequest

ANSWER_MAX, CHUNK_MAX = 40, 8  # tokens
STALLED = 10  # seconds without a token
POLICIES: Sequence[OnCorruption] = ("continue", "restart", "error")


@dataclass(slots=True, eq=False)
class SimulatedStream:
    """The tokens that one worker generates for one request."""

    machine: Machine
    key: Key
    position: int  # index of the stream's next token
    wrong: bool  # the worker computes from wrong tokens, or from the KV cache of a corrupt worker
    after: "SimulatedStream | None" = None  # the stream that this one took over, with the KV cache
    open: bool = True  # the frontend reads the tokens of this stream
    decodes: bool = True
    silent_s: int = 0

    @property
    def sources(self) -> set[Key]:
        """The workers on which the stream's tokens depend: its own, and those that computed its KV cache."""
        return {self.key} | (self.after.sources if self.after is not None else set())

    def tokens(self, count: int) -> list[int]:
        """Generate and return the stream's next `count` tokens."""
        self.wrong = self.wrong or bool(self.machine.condition.corrupt)
        first, self.position = self.position, self.position + count
        return [-1 - n if self.wrong else n for n in range(first, self.position)]


@dataclass(slots=True, eq=False)
class LiveSimulatedRequest(SimulatedRequest):
    """A request with the tokens that the frontend has accepted and those that its client has received."""

    holds_back: int = 0  # number of newest tokens that are held back from the client
    finished: bool = False  # the answer is complete
    poisonous: bool = False  # every engine fails on this request
    accepted: list[int] = field(default_factory=list)
    givers: list[Key] = field(default_factory=list)  # the worker of each accepted token
    shown: list[int] = field(default_factory=list)  # the tokens that the client has received
    # The last stream belongs to the current attempt.
    streams: list[SimulatedStream] = field(default_factory=list)
    target: SimulatedStream | None = None  # the target's stream during a KV transfer
    target_at: Endpoint = field(init=False)
    asked_at: int = 0  # tokens accepted when the transfer was requested
    failed_at: set[Key] = field(default_factory=set)  # workers on which the prompt made the engine fail

    @property
    def stream(self) -> SimulatedStream:
        """The stream of the current or last attempt."""
        return self.streams[-1]

    def finish(self) -> None:
        """Complete the answer, and send the client all accepted tokens."""
        self.finished = True
        self.show(0)

    def show(self, holds_back: int) -> None:
        """Send the client the accepted tokens except the last `holds_back`."""
        self.shown += self.accepted[len(self.shown) : max(0, len(self.accepted) - holds_back)]


class LiveRequests(RequestsUnderWay):
    """The requests of one frontend process, simulated token by token."""

    def __init__(self, frontend: SimulatedFrontend, chance: Random) -> None:
        super().__init__(frontend, chance, crowded=True)
        self.live: dict[SimulatedRequest, LiveSimulatedRequest] = {}
        self._convicted: set[Key] = set()
        self._kernel.after(SECOND, self._tick)

    def unanswered(self) -> int:
        """Return the number of requests without an outcome; 0 after the process has ended."""
        return len(self.live) if self.open else 0

    def _new(self, id: str, model: str, tier: str) -> LiveSimulatedRequest:
        chance, now = self._chance, self._kernel.now
        terms = RequestTerms(
            prompt_tokens=chance.randint(1, 100),
            max_tokens=chance.randint(1, ANSWER_MAX),
            migration_limit=chance.choice((0, 1, 3, 3)),
            max_seq_len=chance.choice((None, None, None, 110)),
            forbidden=chance.choice(("",) * 7 + ("guided_decoding",)),
            on_corruption=chance.choice(POLICIES),
            first_token_s=60.0,
        )
        request = LiveSimulatedRequest(
            id, model, RequestState(terms, now / SECOND), tier, self._table.urgency(tier), now,
            holds_back=chance.choice((0, 0, 2, ANSWER_MAX)), poisonous=chance.random() < 0.01,
        )  # fmt: skip
        self.live[request] = request
        if chance.random() < 0.1:
            self._kernel.after(int(20 * SECOND * chance.random()), self.feed, request, on.ClientGone())
        return request

    # --- the machine ------------------------------------------------------------------------------------------------

    def _step(self, request: SimulatedRequest, event: on.Event) -> Effects:
        effects = super()._step(request, event)
        self._surroundings.stepped(request, event, effects)
        return effects

    def _apply(self, request: SimulatedRequest, effect: do.Effect) -> on.Event | None:
        live = self.live.get(request)
        if live is None:  # the request has ended
            return super()._apply(request, effect)
        match effect:
            case do.CancelStream() | do.TurnedAway():
                live.stream.open = False
                return super()._apply(live, effect)
            case do.NoteUnjudged(has_output):
                self._unjudged(live, has_output=has_output)
            case do.Judge(failure, begun):
                return on.Judged(self._judge(live, failure, begun=begun))
            case do.Rewind(count):
                del live.accepted[count:], live.givers[count:]
            case do.Park():
                pass  # parked requests are retried every second
            case do.Reroute():
                self._kernel.after(0, self._resume, live)
            case do.ReportMigrated(move):
                self._migrated(live, move, (self._kernel.now / SECOND - move.since) * 1000)
            case do.ReportAbandoned(reason):
                self._abandoned(live, reason)
            case do.Refuse() | do.Complete() | do.End():
                self._end(live, effect)
            case _:
                return self._transfer(live, effect) or super()._apply(live, effect)
        return None

    def _end(self, live: LiveSimulatedRequest, effect: do.Refuse | do.Complete | do.End) -> None:
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
        if (queued := self._queued.get(live)) is not None:
            self._remove(queued, served=False)
        self._surroundings.notify("ended", live, self)

    def _judge(self, request: LiveSimulatedRequest, failure: Failure, *, begun: bool) -> Suspicion:
        if failure.kind.blames:
            self._blame(request, failure.reason)
        else:
            self._unjudged(request, has_output=begun)
        if failure.reason == "engine_error" and request.poisonous:
            request.failed_at.add(request.endpoint.key)
            return Suspicion.POISONOUS if len(request.failed_at) > 1 else Suspicion.NONE
        fell = not begun and failure.reason == "disconnected"
        return Suspicion.SUSPECT if fell else Suspicion.NONE

    def _unjudged(self, request: LiveSimulatedRequest, *, has_output: bool) -> None:
        self._breakers.unjudged(request.endpoint.key, request.sent, has_output=has_output)

    # --- sending ------------------------------------------------------------------------------------------------

    def _pick(self, request: SimulatedRequest, effect: do.SelectWorker) -> Endpoint:
        endpoints, rules = self._look(request.model), self._rules
        room = Headroom.FRESH if request in self._queued else Headroom.HELD
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
        return on.NoWorkerFound(none.code, self._table.stands_in(request.model, None, request.state.failed))

    def _connects(self, request: SimulatedRequest, endpoint: Endpoint) -> bool:
        machine = self._machines[endpoint.worker]
        return machine.runs(endpoint.instance) or self._chance.random() < 0.5

    def _begin(self, request: SimulatedRequest, endpoint: Endpoint) -> None:
        request.reported = request.state.move  # the request machine decides when to report
        super()._begin(request, endpoint)

    def _send(self, request: SimulatedRequest) -> None:
        assert isinstance(request, LiveSimulatedRequest)
        accepted = request.accepted
        wrong = any(token < 0 for token in accepted)
        machine, key = self.machine(request), request.endpoint.key
        request.streams.append(SimulatedStream(machine, key, len(accepted), wrong))
        super()._send(request)

    def _serve(self, request: SimulatedRequest, machine: Machine) -> None:
        assert isinstance(request, LiveSimulatedRequest)
        self._emit_later(request, request.stream)

    def _emit_later(self, request: LiveSimulatedRequest, stream: SimulatedStream) -> None:
        longer = LONGER if stream.machine.waiting is not None else 1.0
        duration = (0.1 + 1.5 * self._chance.random()) * stream.machine.condition.slow * longer
        self._kernel.after(int(duration * SECOND), self._emit, request, stream)

    def _emit(self, request: LiveSimulatedRequest, stream: SimulatedStream) -> None:
        """Generate the next tokens of a stream, or fail the attempt if the worker cannot compute them."""
        if not self.open or not stream.open or not stream.decodes:
            return
        machine, chance = stream.machine, self._chance
        if machine.instance != stream.key[1] or not machine.reachable(self._name):
            stream.silent_s += 1
            if stream.silent_s > STALLED:
                self.failed(request, "stalled")
            else:
                self._kernel.after(SECOND, self._emit, request, stream)
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

    def _take(self, request: LiveSimulatedRequest, stream: SimulatedStream, tokens: Sequence[int]) -> None:
        """Accept tokens of a stream, which must not be cancelled."""
        if not request.state.has_output:
            self.feed(request, on.FirstToken())
        request.accepted += tokens
        request.givers += [stream.key] * len(tokens)
        request.show(request.holds_back)
        self._surroundings.notify("said", request, stream)
        if request.target is not None and request.state.transfer is not None:
            self._advance(request, kv.SourceProgressed())

    # --- failures and moves -----------------------------------------------------------------------------------------

    def _progress(self, request: SimulatedRequest) -> AnswerProgress:
        assert isinstance(request, LiveSimulatedRequest)
        return AnswerProgress(len(request.accepted), len(request.shown))

    def _cut(self, request: SimulatedRequest) -> None:
        self.live[request].stream.open = False

    def unhealthy(self, endpoint: Endpoint | None, request: SimulatedRequest) -> None:
        """Handle that the worker of a request was taken out of service.

        `endpoint` is None if the worker is no longer known.
        """
        if endpoint is None or not endpoint.suspect:
            others = {one.key for one in self._look(request.model) if one.routable} - {request.endpoint.key}
            corrupt = endpoint is not None and endpoint.corrupt
            self.feed(request, on.WorkerUnhealthy(corrupt, others, self._progress(request)))

    def absorbed(self) -> None:
        """Handle a batch of events.

        Requests with tokens of newly convicted workers are treated by their corruption policy, and requests leave draining
        workers.
        """
        for key, endpoint in self._table.endpoints.items():
            if not endpoint.corrupt:
                self._convicted.discard(key)
            elif key not in self._convicted:
                self._convicted.add(key)
                for request in [one for one in self.live.values() if key in one.givers]:
                    self._expose(request, endpoint)
        super().absorbed()
        for request in [self.live[one] for one in self.requests if one in self.live]:
            if self._table.drains(request.endpoint):
                self._move(request, "drain")

    def _expose(self, request: LiveSimulatedRequest, endpoint: Endpoint) -> None:
        key, at = endpoint.key, request.state.attempt
        carried = at is not None and key in request.stream.sources
        here = at is not None and at.server.key == key and bool(endpoint.suspect)
        first = request.givers.index(key)
        self.feed(request, on.Exposed(first, key, carried, here, self._progress(request)))

    def _move(self, request: LiveSimulatedRequest, cause: PlannedCause) -> None:
        """Start a planned move of a request.

        The request moves with its KV cache or by re-prefill. A preempted request continues after a pause.
        """
        state, chance = request.state, self._chance
        if not state.has_output or state.transfer is not None or stays(state.terms, len(request.accepted)):
            return
        if cause == PREEMPTED:
            self._leave_on_purpose(request, cause, None)
            self._kernel.after(chance.randint(1, 5) * SECOND, self._resume, request)
            return
        try:
            tried = state.tried | {request.endpoint.key}
            target = self._picker.pick(self._look(request.model), self._rules, tried, Headroom.HELD)
        except NoWorker:
            self.feed(request, on.TransferDeclined("no worker has room"))
            return
        if chance.random() < 0.4:
            self._leave_on_purpose(request, cause, target.key)
        else:
            self._ask(request, target)

    def _leave_on_purpose(
        self, request: LiveSimulatedRequest, cause: PlannedCause, target: Key | None
    ) -> None:
        move = self._planned(request, Failure(cause, ""))
        self.feed(request, on.MovedOnPurpose(move, target))

    def _planned(self, request: LiveSimulatedRequest, why: Failure, carried: Carried | None = None) -> Move:
        source, now = Server(request.endpoint.key), self._kernel.now / SECOND
        return Move(why, why, source, now, len(request.accepted), carried)

    # --- waiting ----------------------------------------------------------------------------------------------------

    def _resume(self, request: LiveSimulatedRequest) -> None:
        if request.state.phase == "preempted" and self._chance.random() < 0.3:
            self.feed(request, on.NoneLeft())
        else:
            self.feed(request, on.Resumed())

    def _tick(self) -> None:
        """Advance all requests by one second.

        Parked requests are retried, requests that have waited too long end, and a few are moved at random.
        """
        if not self.open:
            return
        self._kernel.after(SECOND, self._tick)
        for request in [*self.live.values()]:
            if request.state.phase != "new":
                self.feed(request, on.Tick())
            if request.state.phase == "parked":
                self.feed(request, on.Woken())
            if self._chance.random() < 0.01:
                self._move(request, self._chance.choice((PREEMPTED, "operator")))

    # --- KV transfers -----------------------------------------------------------------------------------------------

    def _ask(self, request: LiveSimulatedRequest, target: Endpoint) -> None:
        """Ask a worker to continue a request with its KV cache."""
        source, machine = request.stream, self._machines[target.worker]
        request.target = SimulatedStream(machine, target.key, 0, False, source, decodes=False)
        request.target_at, request.asked_at = target, len(request.accepted)
        self.feed(request, on.TransferBegun())
        self._kernel.after(20 * MS, self._reserved, request, request.target)

    def _advance(self, request: LiveSimulatedRequest, event: kv.Event) -> None:
        tokens = tuple(request.accepted[request.asked_at :])
        self.feed(request, on.TransferAdvanced(event, tokens))

    def _reserved(self, request: LiveSimulatedRequest, target: SimulatedStream) -> None:
        if self.open and request.target is target:
            reachable = target.machine.reachable(self._name) and target.machine.instance == target.key[1]
            declined = kv.MigrationDeclined("target", "no room")
            taken = reachable and self._chance.random() < 0.9
            self._advance(request, kv.TargetReserved() if taken else declined)

    def _committed(self, request: LiveSimulatedRequest, target: SimulatedStream) -> None:
        """Report that the target has received the KV cache and decodes.

        The source's last tokens may still be in transit.
        """
        source = target.after
        if not self.open or request.target is not target or source is None:
            return
        if not target.machine.reachable(self._name) or self._chance.random() < 0.1:
            self._advance(request, kv.GivenUp("it takes too long"))
            return
        left = request.state.terms.max_tokens - 1 - source.position
        late = source.tokens(max(0, min(left, 2)))
        target.position, target.wrong, target.decodes = source.position, source.wrong, True
        tokens = (*request.accepted[request.asked_at :], *late)
        self._advance(request, kv.TargetCommitted(tokens))
        if late and source.open:
            self._take(request, source, late)

    def _transfer(self, request: LiveSimulatedRequest, effect: do.Effect) -> on.Event | None:
        target = request.target
        if target is None:
            return None
        match effect:
            case do.ShipCache():
                request.stream.decodes = False
                self._kernel.after(self._chance.randint(20, 2000) * MS, self._committed, request, target)
            case do.StayAtSource():
                request.stream.decodes = True
                self._emit_later(request, request.stream)
            case do.CancelTarget():
                target.open = False
            case do.SwitchToTarget():
                carried = Carried(1 << 20, 1, "tcp")
                move = self._planned(request, Failure("drain", ""), carried)
                return on.Switched(Server(target.key), move)
            case do.HandOver():
                self._leave(request)
                self._adopt(request, target)
            case do.TransferOver():
                request.target = None
        return None

    def _adopt(self, request: LiveSimulatedRequest, target: SimulatedStream) -> None:
        """Continue the request with the target's stream."""
        endpoint, state = request.target_at, request.state
        assert state.last is not None
        request.sent, request.routed_under = self._breakers.routed(endpoint.key), self._table.number
        request.endpoint, request.attempt, request.reported = endpoint, state.last.number, state.move
        endpoint.begin()
        self.requests[request] = None
        request.sent_times += 1
        request.streams.append(target)
        target.machine.accept(request)
        self._emit_later(request, target)
