"""How do requests fare on each worker, as this frontend sees it? Its own breakers, and the facts that it
reports.

The local breaker is the fleet's machine (`deciders.breaker`) run on this frontend's outcomes, with its own
numbers for its own moves: it can only subtract. Its moves are reported once a second (`breaker_moves`); no
decider reads them. Its trial is one real request.

A broken connection is one failure, however many streams it carried. If every worker in service breaks within
one tick, it is more likely us: nobody is blamed.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from statistics import median

import msgspec
import structlog
from prometheus_client import Gauge

from controller.deciders import breaker
from controller.deciders.breaker import Breaker, BreakerPolicy
from controller.frontend.health.breaker_moves import BreakerMoves
from controller.frontend.settings import FactSettings, LocalBreakerSettings
from controller.router.endpoints import Endpoint, Key
from controller.router.load.batch_growth import growth
from events.fact import Observation
from events.observations import (
    PanicBegan,
    PanicEnded,
    RequestFailed,
    RequestsServed,
    WorkerSlow,
    WorkerSlowCleared,
)
from events.wire import Load, Sampling

PARAMETERS_MAX = 32  # different sampling parameters that are counted per worker and window


class AnswerDraw(msgspec.Struct, frozen=True):
    """How one answer's tokens were drawn."""

    sampling: Sampling
    weighed: int = 0  # tokens that came with logprobs
    unlikely: int = 0  # of them: below the floor


@dataclass(slots=True)
class Window:
    """What one worker has served since the last report."""

    count: int = 0
    tokens: int = 0
    ttft_ms: list[float] = field(default_factory=list)
    itl_ms: list[float] = field(default_factory=list)  # each request's mean
    routed_under: int | None = None  # the smallest, so that a straggler is never taken for news
    weighed: int = 0  # tokens with logprobs
    unlikely: int = 0  # of them
    drawn: dict[tuple[float, float, int], int] = field(
        default_factory=dict
    )  # requests by sampling parameters

    def draw(self, drawn: AnswerDraw) -> None:
        """Note how an answer's tokens were drawn, and how many of them were unlikely."""
        self.weighed += drawn.weighed
        self.unlikely += drawn.unlikely
        sampling = drawn.sampling
        how = (sampling.temperature, sampling.top_p, sampling.top_k)
        if "temperature" in sampling.unset:
            return  # it is the server's own default
        if how in self.drawn:
            self.drawn[how] += 1
        elif len(self.drawn) < PARAMETERS_MAX:
            self.drawn[how] = 1


log = structlog.get_logger(__name__)

SAMPLES_MAX = 256  # per worker and window
STALLS_MAX = 2  # times failures_max: a worker that recovers is not held to all that it ever stalled
SLOW_MS_MIN = 5.0  # a difference below this is nobody's slowness
TRANSPORT = frozenset({"disconnected", "stalled", "cannot_connect"})
TRIAL_MARGIN = timedelta(seconds=0.25)  # longer than two ticks: who streams well by then has passed
_ZERO = datetime(2000, 1, 1, tzinfo=UTC)  # the loop's clock as a datetime, for the machine that wants one


@dataclass(slots=True)
class WorkerOutcomes:
    """One life of a worker, as this frontend fares with it."""

    breaker: Breaker
    model: str = ""
    breaker_epoch: int = 0  # when the last request was sent there
    failures: int = 0  # in a row
    broken: str = ""  # a transport failure of this tick, not judged yet
    broken_routed_under: int = 0
    broken_epoch: int = 0
    stalled: int = 0  # streams that stalled in this tick, while their worker goes on
    stalls: float = 0.0  # stalled streams, less those that the served ones make up for
    worked_at: float | None = None  # when it brought the last first token of an answer
    reports: int = 0  # RequestFailed in this second
    slow: bool = False
    window: Window = field(default_factory=Window)

    def take_back(self, *, one_stream: bool = False) -> None:
        """What failed last was its request's own fault, and not the worker's. `one_stream`: it stalled while others went on."""
        if self.broken:
            self.broken, self.stalled = "", 0  # it was not judged yet
            return
        self.failures = max(0, self.failures - 1)
        self.stalls = max(0.0, self.stalls - one_stream)
        if self.breaker.position == "closed":
            left = min(self.breaker.request_failures, self.failures)
            self.breaker = replace(self.breaker, request_failures=left)


class LocalBreakers:
    """The outcomes of one frontend's requests at each worker, and its own breakers."""

    def __init__(
        self,
        frontend: str,
        local: LocalBreakerSettings,
        facts: FactSettings,
        observe: Callable[[Observation], object],
        now: Callable[[], float],
        load: Callable[[str], Load | None] = lambda worker: None,
    ) -> None:
        """`load`: what a worker reported last."""
        self._load = load
        self._frontend = frontend
        self._facts = facts
        self._observe = observe
        self._now = now
        self._stalled_share = local.stalled_share
        self._epoch = 0  # of this frontend's own breaker moves
        self._outcomes_by: dict[Key, WorkerOutcomes] = {}
        self._open: dict[Key, None] = {}  # those whose breaker is not closed
        self._moves = BreakerMoves(frontend, observe, now)
        self._window_at = now()
        self._second_at = now()
        self._policy = BreakerPolicy(
            failures_max=local.failures_max,
            wait_min=timedelta(seconds=local.wait_s),
            wait_max=timedelta(seconds=local.wait_s_max),
            trial_timeout=timedelta(seconds=local.trial_timeout_s),
        )

    def outcomes(self, key: Key) -> WorkerOutcomes:
        """Return the outcomes of one life of a worker."""
        found = self._outcomes_by.get(key)
        if found is None:
            state = Breaker(key[0], key[1], trial_by="request")
            found = self._outcomes_by[key] = WorkerOutcomes(state)
        return found

    def keep(self, keys: Collection[Key]) -> None:
        """Forget lives of workers that are gone."""
        for key in [key for key in self._outcomes_by if key not in keys]:
            del self._outcomes_by[key]
            self._open.pop(key, None)

    def reset(self, key: Key) -> None:
        """The fleet's breaker closed: whatever this frontend held against the worker is void."""
        if key in self._outcomes_by:
            self._epoch += 1  # a move of its own: what was sent before it is void
            fresh = Breaker(key[0], key[1], trial_by="request", moved_by=self._epoch)
            if self._outcomes_by[key].breaker.position != "closed":
                self._moves.add(key, "closed", "fleet_breaker_closed")
            self._move(key, self._outcomes_by[key], fresh)
            self._outcomes_by[key].failures = 0
            self._outcomes_by[key].stalls = 0.0

    # --- the breaker --------------------------------------------------------------------------------------

    def allowed(self, endpoint: Endpoint) -> bool:
        """Say whether this frontend's own breaker lets a request go there."""
        if endpoint.key not in self._open:
            return True
        return breaker.admit(self._outcomes_by[endpoint.key].breaker) is not None

    def barred(self) -> Collection[Key]:
        """Return those to which our own breakers let nothing go now."""
        return {key for key in self._open if breaker.admit(self._outcomes_by[key].breaker) is None}

    def routed(self, key: Key) -> int:
        """A request went there; half-open, it is the trial. Return the number of our own last move: its outcome
        counts only if the breaker has not moved since."""
        found = self._outcomes_by.get(key) or self.outcomes(key)
        found.breaker_epoch = self._epoch
        if key in self._open:
            admitted = breaker.admit(found.breaker)
            if admitted is not None and admitted.position == "half_open":  # its time begins with the trial
                found.breaker = replace(admitted, deadline=self._moment() + self._policy.trial_timeout)
        return self._epoch

    def positions(self) -> Mapping[Key, str]:
        """Return where every breaker stands."""
        return {key: outcomes.breaker.position for key, outcomes in self._outcomes_by.items()}

    @property
    def open(self) -> Collection[Key]:
        """Those whose breaker is not closed, in the order in which they opened: a view, to be kept and looked into for each
        request."""
        return self._open.keys()

    @property
    def any_open(self) -> bool:
        """Whether any of our own breakers is not closed."""
        return bool(self._open)

    def routable_share(self, endpoints: Iterable[Endpoint]) -> float:
        """Return which share of the weight that a model's workers should have is routable: by the fleet's verdict, and
        by our own breakers that are closed. 1 if no worker is expected to serve."""
        expected = [endpoint for endpoint in endpoints if endpoint.expected]
        if not expected:
            return 1.0
        return sum(endpoint.weight for endpoint in expected if endpoint.key not in self._open) / len(expected)

    # --- outcomes -----------------------------------------------------------------------------------------

    def served(
        self,
        key: Key,
        tokens: int,
        ttft_s: float | None,
        itl_s: float | None,
        routed_under: int,
        breaker_epoch: int | None = None,
        *,
        model: str = "",
        drawn: AnswerDraw | None = None,
    ) -> None:
        """A request ended well on this worker. `breaker_epoch` is what `routed` returned for it; None: it was the last."""
        found = self._outcomes_by.get(key) or self.outcomes(key)
        window = found.window
        found.model = model
        found.failures = 0
        if found.stalls:
            found.stalls = max(0.0, found.stalls - self._stalled_share)
        if found.breaker.request_failures or found.breaker.position != "closed":
            fact = self._served(
                key, window, 0.0, routed_under=found.breaker_epoch if breaker_epoch is None else breaker_epoch
            )
            found.breaker = breaker.evolve(found.breaker, fact)
            self._settle(key, found, self._moment())
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

    def trial_ends(self, key: Key) -> bool:
        """Say whether this worker is on trial and has hardly any time left for it."""
        found = self._outcomes_by.get(key)
        if found is None or found.breaker.position != "half_open" or not found.breaker.admitted:
            return False
        deadline = found.breaker.deadline
        return deadline is not None and self._moment() + TRIAL_MARGIN >= deadline

    def had_output(self, key: Key, breaker_epoch: int) -> None:
        """A request has its tokens, and goes on or ends by no fault of the worker: as a trial it has passed."""
        found = self.outcomes(key)
        if found.breaker.position == "half_open":
            fact = self._served(key, found.window, 0.0, routed_under=breaker_epoch)
            found.breaker = breaker.evolve(found.breaker, fact)
            self._settle(key, found, self._moment())

    def had_no_output(self, key: Key, breaker_epoch: int) -> None:
        """A request ended before it said anything of the worker: if it was the trial, another one may be."""
        found = self.outcomes(key)
        if found.breaker.position == "half_open" and breaker_epoch >= found.breaker.moved_by:
            found.breaker = replace(found.breaker, admitted=False)

    def failed(
        self,
        key: Key,
        reason: str,
        routed_under: int,
        breaker_epoch: int | None = None,
        *,
        one_stream: bool = False,
    ) -> None:
        """A request failed on this worker, and it was the worker's fault. `breaker_epoch` as in `served`; `one_stream`: it
        stalled while others of the worker go on."""
        found = self.outcomes(key)
        breaker_epoch = found.breaker_epoch if breaker_epoch is None else breaker_epoch
        if reason in TRANSPORT:
            found.stalled += one_stream
            found.broken = found.broken or reason
            found.broken_routed_under, found.broken_epoch = routed_under, breaker_epoch
        else:
            self._count(key, found, reason, routed_under, breaker_epoch)

    def _count(
        self, key: Key, found: WorkerOutcomes, reason: str, routed_under: int, breaker_epoch: int
    ) -> None:
        found.stalls = min(found.stalls + found.stalled, STALLS_MAX * self._policy.failures_max)
        found.failures = max(found.failures + 1, int(found.stalls) if found.stalled else 0)
        found.stalled = 0
        fact = RequestFailed(
            worker=key[0],
            instance=key[1],
            frontend=self._frontend,
            failures_in_a_row=found.failures,
            reason=reason,
            routed_under=routed_under,
        )
        found.breaker = breaker.evolve(found.breaker, replace(fact, routed_under=breaker_epoch))
        self._settle(key, found, self._moment())
        if (
            found.reports < self._facts.failures_per_s_max
        ):  # the next report carries the count of those left out
            found.reports += 1
            self._observe(fact)

    # --- time ---------------------------------------------------------------------------------------------

    def tick(self, in_service: Collection[Key]) -> None:
        """Judge what broke, move the breakers that are due, and report the windows that are full."""
        self._judge(in_service)
        now, moment = self._now(), self._moment()
        for key in list(self._open):  # a closed one moves at once, by an outcome
            self._settle(key, self._outcomes_by[key], moment)
        if now - self._second_at >= 1.0:
            self._second_at = now
            for found in self._outcomes_by.values():
                found.reports = 0
            self._moves.report()
        if now - self._window_at >= self._facts.window_s:
            self._report(now - self._window_at)
            self._window_at = now

    def _judge(self, in_service: Collection[Key]) -> None:
        broken = [(key, found) for key, found in self._outcomes_by.items() if found.broken]
        ours = len(in_service) > 1 and {key for key, _ in broken} >= set(in_service)
        if ours:
            log.warning("every_connection_failed", workers=len(broken))
        for key, found in broken:
            reason, found.broken = found.broken, ""
            if ours:
                found.stalled = 0
            else:
                self._count(key, found, reason, found.broken_routed_under, found.broken_epoch)

    def _settle(self, key: Key, found: WorkerOutcomes, moment: datetime) -> None:
        """Move one breaker if it is due: at once after an outcome, and when its time has come."""
        state = found.breaker
        if state.position == "half_open" and not state.admitted and not state.trial:
            return  # nobody has tried it yet: that is no failure
        for decision in breaker.decide(self._policy, found.breaker, moment):
            self._epoch += 1
            self._move(key, found, breaker.evolve(found.breaker, replace(decision, number=self._epoch)))
            self._moves.add(key, found.breaker.position, getattr(decision, "reason", ""))
            log.info("local_breaker", worker=key[0], instance=key[1], position=found.breaker.position)

    def _move(self, key: Key, found: WorkerOutcomes, after: Breaker) -> None:
        """Move one breaker to another position."""
        found.breaker = after
        if after.position == "closed":
            self._open.pop(key, None)
        else:
            self._open[key] = None  # in order: a simulated fleet's breakers move alike each time

    def _moment(self) -> datetime:
        return _ZERO + timedelta(seconds=self._now())

    # --- reports ------------------------------------------------------------------------------------------

    def report(self) -> None:
        """Report what the current window and second hold, at the process's end."""
        self._moves.report()
        self._report(max(1e-3, self._now() - self._window_at))

    def _report(self, window_s: float) -> None:
        speeds = {
            key: median(found.window.itl_ms)
            for key, found in self._outcomes_by.items()
            if found.window.itl_ms and found.window.tokens >= self._facts.slow_tokens_min
        }
        for key, found in self._outcomes_by.items():
            if found.window.count:
                self._observe(
                    self._served(key, found.window, window_s, routed_under=found.window.routed_under or 0)
                )
                found.window = Window()
            if key in speeds:
                self._compare(key, found, speeds)

    def _compare(self, key: Key, found: WorkerOutcomes, speeds: Mapping[Key, float]) -> None:
        """Report a worker that is slower than its peers would be with as many sequences, and the end of that."""
        outcomes_by = self._outcomes_by
        running = _running(self._load(key[0]))
        peers = [
            speed * growth(running, _running(self._load(other[0])))
            for other, speed in speeds.items()
            if other != key and outcomes_by[other].model == found.model
        ]
        if not peers:
            return
        own, usual = speeds[key], median(peers)
        slow = own > self._facts.slow_factor * usual and own - usual > SLOW_MS_MIN
        kind = WorkerSlow if slow else WorkerSlowCleared
        if slow or found.slow:
            self._observe(
                kind(
                    worker=key[0],
                    instance=key[1],
                    frontend=self._frontend,
                    latency_ms=own,
                    baseline_ms=usual,
                )
            )
        found.slow = slow

    def _served(self, key: Key, window: Window, window_s: float, *, routed_under: int) -> RequestsServed:
        return RequestsServed(
            worker=key[0],
            instance=key[1],
            frontend=self._frontend,
            count=window.count,
            tokens=window.tokens,
            ttft_ms=median(window.ttft_ms) if window.ttft_ms else 0.0,
            itl_ms=median(window.itl_ms) if window.itl_ms else 0.0,
            routed_under=routed_under,
            window_s=window_s,
            weighed=window.weighed,
            unlikely=window.unlikely,
            sampling=max(window.drawn, key=window.drawn.__getitem__) if window.drawn else None,
        )


def _running(load: Load | None) -> int:
    """Return the sequences in a worker's batch; 1 if that is not known."""
    return load.running if load is not None else 1


class Panic:
    """In which models this frontend ignores its own breakers."""

    def __init__(
        self,
        frontend: str,
        share_min: float,
        breakers: LocalBreakers,
        observe: Callable[[Observation], object],
        gauge: Gauge,
    ) -> None:
        self._frontend = frontend
        self._share_min = share_min
        self.breakers = breakers
        self._observe = observe
        self._gauge = gauge
        self.models: set[str] = set()  # where there was panic when it was looked at last

    def ignores(self, model: str, endpoints: Sequence[Endpoint]) -> bool:
        """Say whether our own breakers are ignored for this model now; they may have moved since the last look."""
        if self.breakers.any_open:
            self.look(model, endpoints)
        return model in self.models

    def look(self, model: str, endpoints: Sequence[Endpoint]) -> None:
        """See whether there is panic over a model, and say so when that changes."""
        share = self.breakers.routable_share(endpoints)
        panic = share < self._share_min
        if panic != (model in self.models):
            (self.models.add if panic else self.models.discard)(model)
            kind = PanicBegan if panic else PanicEnded
            self._observe(kind(frontend=self._frontend, model=model, routable_share=share))
            self._gauge.labels(model).set(panic)
