"""The local circuit breakers of one frontend, and the facts about the outcomes of its requests.

A local breaker runs the controller's state machine (`deciders.breaker`) on this frontend's own outcomes. It can exclude
a worker that the controller keeps in service, but cannot return a worker to service. A breaker's move is a change of
its position: closed, open or half-open. This frontend numbers its own moves and reports them once a second. The
controller makes no decisions from these reports. The trial of a half-open breaker is one real request.

A broken connection counts as one failure, regardless of its number of streams. If the connections of all workers in
service break within one tick, the cause is more likely this frontend, so no worker is blamed.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from statistics import median

import msgspec
import structlog
from prometheus_client import Gauge

from controller.deciders import breaker
from controller.deciders.breaker import Breaker, BreakerPolicy
from controller.frontend.settings import FactSettings, LocalBreakerSettings
from controller.router.endpoints import ConnectedWorkers, Endpoint, Key
from controller.router.load.work import growth
from events import observations as facts
from events.decisions import BreakerPosition
from events.fact import Observation
from events.wire import Sampling

PARAMETERS_MAX = 32  # largest number of different sampling parameters counted per worker and window
SAMPLES_MAX = 256  # largest number of latency samples per worker and window
# largest number of moves per event: about 30 KB; breakers that all move at once must not flood the journal
MOVES_MAX = 200
# limit of a worker's stall count, as a multiple of failures_max, so that the worker can recover
STALLS_MAX = 2
SLOW_MS_MIN = 5.0  # a smaller difference in milliseconds per token is not reported as slow
TRANSPORT = frozenset({"disconnected", "stalled", "cannot_connect"})
# more than two ticks: within this time before its deadline, a trial passes if its stream runs well
TRIAL_MARGIN = timedelta(seconds=0.25)
_ZERO = datetime(2000, 1, 1, tzinfo=UTC)  # origin of the loop's clock as a datetime, which the breaker needs

log = structlog.get_logger(__name__)


class AnswerDraw(msgspec.Struct, frozen=True):
    """The sampling parameters of one answer, and how many of its tokens were unlikely.

    Only tokens with logprobs are counted. A token is unlikely if its logprob is below LOGPROB_FLOOR.
    """

    sampling: Sampling
    weighed: int = 0  # tokens with logprobs
    unlikely: int = 0  # tokens with a logprob below LOGPROB_FLOOR


@dataclass(slots=True)
class Window:
    """Measurements of the requests that one worker has completed since the last report."""

    count: int = 0
    tokens: int = 0
    ttft_ms: list[float] = field(default_factory=list)
    itl_ms: list[float] = field(default_factory=list)  # the mean of each request
    # the smallest decision number of these requests, so that a late outcome never counts as new
    routed_under: int | None = None
    weighed: int = 0  # tokens with logprobs
    unlikely: int = 0  # tokens with a logprob below LOGPROB_FLOOR
    drawn: Counter[tuple[float, float, int]] = field(default_factory=Counter)  # by sampling parameters

    def draw(self, drawn: AnswerDraw) -> None:
        """Add one answer to this window: its sampling parameters and its token counts."""
        self.weighed += drawn.weighed
        self.unlikely += drawn.unlikely
        sampling = drawn.sampling
        how = (sampling.temperature, sampling.top_p, sampling.top_k)
        if "temperature" in sampling.unset:
            return  # the temperature is the server's default, which is unknown here
        if how in self.drawn or len(self.drawn) < PARAMETERS_MAX:
            self.drawn[how] += 1

    def fact(self, frontend: str, key: Key, window_s: float, routed_under: int) -> facts.RequestsServed:
        """Return the fact that reports the measurements of this window."""
        return facts.RequestsServed(
            worker=key[0],
            instance=key[1],
            frontend=frontend,
            count=self.count,
            tokens=self.tokens,
            ttft_ms=median(self.ttft_ms) if self.ttft_ms else 0.0,
            itl_ms=median(self.itl_ms) if self.itl_ms else 0.0,
            routed_under=routed_under,
            window_s=window_s,
            weighed=self.weighed,
            unlikely=self.unlikely,
            sampling=self.drawn.most_common(1)[0][0] if self.drawn else None,
        )


@dataclass(slots=True)
class WorkerOutcomes:
    """The outcomes of this frontend's requests on one worker instance, with its local breaker."""

    breaker: Breaker
    model: str = ""
    failures: int = 0  # consecutive failures
    # A transport failure of this tick that is not judged yet: its reason, and the decision number and the breaker
    # move number under which the request was sent.
    broken: tuple[str, int, int] | None = None
    stalled: int = 0  # streams that stalled in this tick while their worker was running
    stalls: float = 0.0  # number of stalled streams, lowered by each completed request
    worked_at: float | None = None  # when the worker last produced the first token of an answer
    slow: bool = False
    window: Window = field(default_factory=Window)

    @property
    def fails_others(self) -> bool:
        """Whether more than one request has failed on the worker recently."""
        return self.failures > 1 or self.stalls + self.stalled > 1

    def take_back(self, *, one_stream: bool = False) -> None:
        """Undo the count of the last failure, because the request was at fault and not the worker.

        `one_stream` states that only this request's stream stalled, while other streams of the worker ran.
        """
        if self.broken:
            self.broken, self.stalled = None, 0  # the failure was not judged yet
            return
        self.failures = max(0, self.failures - 1)
        self.stalls = max(0.0, self.stalls - one_stream)
        if self.breaker.position == "closed":
            left = min(self.breaker.request_failures, self.failures)
            self.breaker = replace(self.breaker, request_failures=left)


@dataclass(eq=False, repr=False)
class MoveReport:
    """The breaker moves of one frontend since its last report."""

    frontend: str
    observe: Callable[[Observation], object]
    now: Callable[[], float]
    _moves: list[tuple[float, facts.BreakerMove]] = field(default_factory=list)  # with their times
    _dropped: int = 0  # number of moves that did not fit

    def note(self, key: Key, position: BreakerPosition, reason: str) -> None:
        """Record a breaker move for the next report. If that report is full, only count the move as dropped."""
        move = facts.BreakerMove(worker=key[0], instance=key[1], position=position, ago_ms=0.0, reason=reason)
        if len(self._moves) < MOVES_MAX:
            self._moves.append((self.now(), move))
        else:
            self._dropped += 1

    def publish(self) -> None:
        """Publish one event with all breaker moves since the last such event, or nothing if no breaker moved."""
        if self._moves:
            now = self.now()
            moves = tuple(replace(move, ago_ms=round((now - at) * 1000, 1)) for at, move in self._moves)
            fact = facts.FrontendBreakersMoved(frontend=self.frontend, moves=moves, dropped=self._dropped)
            self._moves, self._dropped = [], 0
            self.observe(fact)


@dataclass(eq=False, repr=False)
class WindowReport:
    """Publishes what one frontend has measured of each worker in a window, and which workers are slow."""

    frontend: str
    limits: FactSettings
    observe: Callable[[Observation], object]
    links: ConnectedWorkers

    def publish(self, outcomes: Mapping[Key, WorkerOutcomes], window_s: float) -> None:
        """Publish each worker's measurements of this window, and start the next window.

        Also compare the workers' speeds, and report slow workers.
        """
        speeds = {
            key: median(found.window.itl_ms)
            for key, found in outcomes.items()
            if found.window.itl_ms and found.window.tokens >= self.limits.slow_tokens_min
        }
        for key, found in outcomes.items():
            window = found.window
            if window.count:
                self.observe(window.fact(self.frontend, key, window_s, window.routed_under or 0))
                found.window = Window()
            if key in speeds:
                self._compare(key, found, speeds, outcomes)

    def _compare(
        self,
        key: Key,
        found: WorkerOutcomes,
        speeds: Mapping[Key, float],
        outcomes: Mapping[Key, WorkerOutcomes],
    ) -> None:
        """Publish a fact if a worker is slower than the model's other workers, or has stopped being slower.

        `speeds` has the milliseconds per token of each worker. A larger batch takes longer per token. So before the
        comparison, the time of a worker with a smaller batch than `key` is scaled up to the batch size of `key`.
        """
        peers = [peer for peer in speeds if peer != key and outcomes[peer].model == found.model]
        if not peers:
            return
        own, running = speeds[key], self._running(key)
        usual = median(speeds[peer] * growth(running, self._running(peer)) for peer in peers)
        slow = own > self.limits.slow_factor * usual and own - usual > SLOW_MS_MIN
        if slow or found.slow:
            kind = facts.WorkerSlow if slow else facts.WorkerSlowCleared
            fact = kind(
                worker=key[0], instance=key[1], frontend=self.frontend, latency_ms=own, baseline_ms=usual
            )
            self.observe(fact)
        found.slow = slow

    def _running(self, key: Key) -> int:
        """Return the number of sequences in a worker's batch, or 1 if unknown."""
        load = self.links.load(key[0])
        return load.running if load is not None else 1


@dataclass(eq=False, repr=False)
class LocalBreakers:
    """Runs the local breaker of each worker in one frontend, on the outcomes of this frontend's requests.

    If too little of a model's capacity is routable (panic), the local breakers of its workers are ignored. Also
    publishes facts: requests served per window, slow workers, and breaker moves.
    """

    frontend: str
    local: LocalBreakerSettings
    limits: FactSettings
    observe: Callable[[Observation], object]
    now: Callable[[], float]
    links: ConnectedWorkers
    panic_gauge: Gauge | None = None  # the metric of models in panic
    # models for which these breakers are ignored, at the last check
    panicked: set[str] = field(default_factory=set)
    _epoch: int = 0  # number of this frontend's last breaker move
    _outcomes_by: dict[Key, WorkerOutcomes] = field(default_factory=dict)
    _open: dict[Key, None] = field(default_factory=dict)  # workers with a breaker that is not closed
    _reports: Counter[Key] = field(default_factory=Counter)  # RequestFailed facts published in this second

    def __post_init__(self) -> None:
        local = self.local
        self._moves = MoveReport(self.frontend, self.observe, self.now)
        self._measured = WindowReport(self.frontend, self.limits, self.observe, self.links)
        self._window_at = self._second_at = self.now()  # when the current window and second began
        self.open: Collection[Key] = self._open.keys()  # a live view, in order of opening
        self._policy = BreakerPolicy(
            failures_max=local.failures_max,
            wait_min=timedelta(seconds=local.wait_s),
            wait_max=timedelta(seconds=local.wait_s_max),
            trial_timeout=timedelta(seconds=local.trial_timeout_s),
        )

    def outcomes(self, key: Key) -> WorkerOutcomes:
        """Return the record of one worker instance's outcomes, creating an empty one if there is none."""
        if (found := self._outcomes_by.get(key)) is None:
            found = self._outcomes_by[key] = WorkerOutcomes(Breaker(*key, trial_by="request"))
        return found

    def keep(self, keys: Collection[Key]) -> None:
        """Drop the outcomes of all worker instances except `keys`."""
        for key in [key for key in self._outcomes_by if key not in keys]:
            del self._outcomes_by[key]
            self._open.pop(key, None)

    def reset(self, key: Key) -> None:
        """Reset a worker's local breaker and its failure counts, because the controller's breaker has closed."""
        found = self._outcomes_by.get(key)
        if found is not None:
            self._epoch += 1  # counts as a move, so that outcomes of earlier requests are ignored
            if key in self._open:
                del self._open[key]
                self._moves.note(key, "closed", "fleet_breaker_closed")
            found.breaker = Breaker(*key, trial_by="request", moved_by=self._epoch)
            found.failures, found.stalls = 0, 0.0

    # --- the breaker --------------------------------------------------------------------------------------

    def allowed(self, endpoint: Endpoint) -> bool:
        """Return whether the local breaker admits a request to this worker."""
        key = endpoint.key
        return key not in self._open or breaker.admit(self._outcomes_by[key].breaker) is not None

    def barred(self) -> Collection[Key]:
        """Return the workers to which the local breakers admit no request now."""
        return {key for key in self._open if breaker.admit(self._outcomes_by[key].breaker) is None}

    def routed(self, key: Key) -> int:
        """Record that a request was sent to a worker. Return the number of this frontend's last breaker move.

        If the worker's breaker is half-open, the request becomes the breaker's trial. The caller must pass the returned
        number with the outcome of the request, so that the outcome is ignored if the worker's breaker has moved since.
        """
        found = self._outcomes_by.get(key) or self.outcomes(key)
        if key in self._open:
            admitted = breaker.admit(found.breaker)
            if admitted is not None and admitted.position == "half_open":  # the trial's time limit starts now
                deadline = _instant(self.now()) + self._policy.trial_timeout
                found.breaker = replace(admitted, deadline=deadline)
        return self._epoch

    def positions(self) -> Mapping[Key, str]:
        """Return the position of every breaker: "closed", "open" or "half_open"."""
        return {key: outcomes.breaker.position for key, outcomes in self._outcomes_by.items()}

    def trials_ending(self) -> list[Key]:
        """Return the workers with a trial request that reaches its time limit within TRIAL_MARGIN."""
        soon = _instant(self.now()) + TRIAL_MARGIN
        trials = {key: self._outcomes_by[key].breaker for key in self._open}
        under_way = {key: one for key, one in trials.items() if one.position == "half_open" and one.admitted}
        return [key for key, one in under_way.items() if one.deadline and soon >= one.deadline]

    # --- panic --------------------------------------------------------------------------------------------

    def ignored(self, model: str, endpoints: Sequence[Endpoint]) -> bool:
        """Return whether a model's local breakers are ignored now, because too little of its capacity is routable.

        If any breaker is not closed, the share of routable capacity is computed again first, because breakers may have
        moved.
        """
        if self._open:
            self.look_for_panic(model, endpoints)
        return model in self.panicked

    def look_for_panic(self, model: str, endpoints: Sequence[Endpoint]) -> None:
        """Update whether a model is in panic, a state in which its local breakers are ignored. Report a change."""
        share = routable_share(endpoints, self.open, self.links)
        panic = share < self.local.panic_share
        if panic != (model in self.panicked):
            (self.panicked.add if panic else self.panicked.discard)(model)
            kind = facts.PanicBegan if panic else facts.PanicEnded
            self.observe(kind(frontend=self.frontend, model=model, routable_share=share))
            if self.panic_gauge is not None:
                self.panic_gauge.labels(model).set(panic)

    # --- outcomes -----------------------------------------------------------------------------------------

    def served(
        self,
        key: Key,
        tokens: int,
        ttft_s: float | None,
        itl_s: float | None,
        routed_under: int,
        breaker_epoch: int,
        *,
        model: str = "",
        drawn: AnswerDraw | None = None,
    ) -> None:
        """Record a request that a worker completed.

        `breaker_epoch` is the number that `routed` returned for the request. `drawn` has the answer's sampling
        parameters and its number of unlikely tokens; None if other attempts produced a part of the answer.
        """
        found = self._outcomes_by.get(key) or self.outcomes(key)
        window = found.window
        found.model = model
        found.failures = 0
        if found.stalls:
            found.stalls = max(0.0, found.stalls - self.local.stalled_share)
        if found.breaker.request_failures or found.breaker.position != "closed":
            self._passed(key, found, breaker_epoch)
        window.count += 1
        window.tokens += tokens
        if drawn is not None:
            window.draw(drawn)
        if window.routed_under is None or routed_under < window.routed_under:
            window.routed_under = routed_under
        if len(window.ttft_ms) < SAMPLES_MAX:
            if ttft_s is not None:
                window.ttft_ms.append(ttft_s * 1000)
            if itl_s is not None:
                window.itl_ms.append(itl_s * 1000)

    def unjudged(self, key: Key, breaker_epoch: int, *, has_output: bool) -> None:
        """Record an attempt that the worker has neither completed nor failed.

        For example, the client has disconnected, or the request continues elsewhere. If the request was the trial of
        the worker's breaker and has produced tokens, the trial passes. Without tokens, another request may become the
        trial.
        """
        found = self.outcomes(key)
        if found.breaker.position != "half_open":
            return
        if has_output:
            self._passed(key, found, breaker_epoch)
        elif breaker_epoch >= found.breaker.moved_by:
            found.breaker = replace(found.breaker, admitted=False)

    def _passed(self, key: Key, found: WorkerOutcomes, breaker_epoch: int) -> None:
        """Apply a success to the worker's breaker, if the breaker has not moved since the request was sent."""
        fact = found.window.fact(self.frontend, key, 0.0, breaker_epoch)
        found.breaker = breaker.evolve(found.breaker, fact)
        self._settle(key, found)

    def failed(
        self, key: Key, reason: str, routed_under: int, breaker_epoch: int, *, one_stream: bool = False
    ) -> None:
        """Record a request that failed through the worker's fault.

        `breaker_epoch` is the number that `routed` returned for the request. `one_stream` states that only this
        request's stream stalled, while other streams of the worker ran.
        """
        found = self.outcomes(key)
        if reason in TRANSPORT:
            found.stalled += one_stream
            first = found.broken[0] if found.broken is not None else reason
            found.broken = (first, routed_under, breaker_epoch)
        else:
            self._count(key, found, reason, routed_under, breaker_epoch)

    def _count(
        self, key: Key, found: WorkerOutcomes, reason: str, routed_under: int, breaker_epoch: int
    ) -> None:
        found.stalls = min(found.stalls + found.stalled, STALLS_MAX * self._policy.failures_max)
        found.failures = max(found.failures + 1, int(found.stalls) if found.stalled else 0)
        found.stalled = 0
        fact = facts.RequestFailed(
            worker=key[0],
            instance=key[1],
            frontend=self.frontend,
            failures_in_a_row=found.failures,
            reason=reason,
            routed_under=routed_under,
        )
        found.breaker = breaker.evolve(found.breaker, replace(fact, routed_under=breaker_epoch))
        self._settle(key, found)
        # the next report includes the number of failures that were not reported
        if self._reports[key] < self.limits.failures_per_s_max:
            self._reports[key] += 1
            self.observe(fact)

    # --- time ---------------------------------------------------------------------------------------------

    def tick(self, in_service: Collection[Key]) -> None:
        """Judge the connections that broke in this tick, apply the breaker moves that are due, and publish reports.

        A broken connection counts as a failure. But if at least two workers are in service and all their connections
        broke, no failure is counted. Moves are reported once a second, and measurements once per window.
        """
        broken = {key: found for key, found in self._outcomes_by.items() if found.broken is not None}
        ours = len(in_service) > 1 and broken.keys() >= set(in_service)
        if ours:
            log.warning("every_connection_failed", workers=len(broken))
        for key, found in broken.items():
            failure, found.broken = found.broken, None
            if ours:
                found.stalled = 0
            elif failure is not None:
                self._count(key, found, *failure)
        # closed breakers are not checked, because only an outcome moves them, and at once
        for key in list(self._open):
            self._settle(key, self._outcomes_by[key])
        now = self.now()
        if now - self._second_at >= 1.0:
            self._second_at = now
            self._reports.clear()
            self._moves.publish()
        if now - self._window_at >= self.limits.window_s:
            self._measured.publish(self._outcomes_by, now - self._window_at)
            self._window_at = now

    def report(self) -> None:
        """Publish the pending breaker moves and the measurements of the incomplete window, before the process exits."""
        self._moves.publish()
        self._measured.publish(self._outcomes_by, max(1e-3, self.now() - self._window_at))

    def _settle(self, key: Key, found: WorkerOutcomes) -> None:
        """Apply the moves of one breaker that are due.

        A move is due after an outcome of a request, or when the breaker's wait or trial has timed out.
        """
        state, now = found.breaker, self.now()
        if state.position == "half_open" and not state.admitted and not state.trial:
            return  # no trial request was sent yet, and that does not count as a failure
        for decision in breaker.decide(self._policy, state, _instant(now)):
            self._epoch += 1
            found.breaker = breaker.evolve(state, replace(decision, number=self._epoch))
            position = found.breaker.position
            if position == "closed":
                self._open.pop(key, None)
            else:
                # a dict keeps the order, so that the breakers of a simulated fleet move in the same order each time
                self._open[key] = None
            self._moves.note(key, position, getattr(decision, "reason", ""))
            log.info("local_breaker", worker=key[0], instance=key[1], position=position)


def _instant(now: float) -> datetime:
    return _ZERO + timedelta(seconds=now)


def routable_share(
    endpoints: Collection[Endpoint], opened: Collection[Key], links: ConnectedWorkers
) -> float:
    """Return which fraction of a model's full capacity this frontend can use, from 0 to 1.

    In the full capacity, each worker that is expected to serve counts as 1. In the usable capacity, it counts as its
    weight, or as 0 if it is in `opened` (its local breaker is not closed). Return 1 if no worker is expected to serve.
    Unreachable workers count in both capacities. But if some workers are reachable, and the local breakers exclude all
    of these, return 0.
    """
    expected = [endpoint for endpoint in endpoints if endpoint.expected]
    if not expected:
        return 1.0
    if opened:
        usable = (one for one in endpoints if one.weight > 0.0 and links.reachable(one.worker, one.instance))
        if (opens := [one.key in opened for one in usable]) and all(opens):
            return 0.0
    return sum(endpoint.weight for endpoint in expected if endpoint.key not in opened) / len(expected)
