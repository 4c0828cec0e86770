"""What is done when a canary convicts a worker: everyone whom it has fed since is named, and those that run act.

Since when a life could be wrong is the fold's to say (`Worker.convictions`). A conviction is answered for once, whatever
has become of the worker meanwhile: acquitted, or a new life of it begun, all in one batch.

A frontend answers for the one before it of the same name as well. That one has left behind until when it served, and
how far it had read; whoever was convicted after that, for a span in which it served, has served nobody knows whom.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

import structlog

from controller.deciders.fleet import Conviction, Worker
from controller.frontend.dispatch.live_request import LiveRequest
from controller.frontend.driver import Driver
from controller.frontend.health.exposure import MARGIN, Traced
from controller.frontend.request.events import Exposed
from controller.frontend.request_metrics import RequestMetrics
from controller.ports import Clock, Observe
from controller.router.endpoints import Key
from events.observations import ExposureUnknown

log = structlog.get_logger(__name__)
EXPOSE_EVERY_S = 1.0  # how often the answers of a convicted worker that serves are reported
SERVED_EVERY_S = 1.0  # how often a frontend leaves behind until when it served


@dataclass(frozen=True, slots=True)
class Served:
    """Until when a frontend served, and how far it had read the journal then."""

    until: datetime
    seq: int

    def answers(self, conviction: Conviction) -> bool:
        """Whether that frontend has answered for it, or had nothing to answer for."""
        margin = MARGIN + timedelta(seconds=2 * SERVED_EVERY_S)
        return conviction.seq <= self.seq or conviction.since >= self.until + margin


class Convictions:
    """Which convictions this frontend has answered for."""

    def __init__(
        self, frontend: str, clock: Clock, observe: Observe, driver: Driver, metrics: RequestMetrics
    ) -> None:
        self._frontend = frontend
        self._clock = clock
        self._observe = observe
        self._driver = driver
        self._exposures = driver.exposures
        self._metrics = metrics
        self._began = clock.now()
        self._exposed_at: dict[str, float] = {}  # by worker that serves although it is convicted
        self._answered: dict[str, tuple[Conviction, ...]] = {}  # by worker

    def answer(self, worker: Worker) -> None:
        """Name everyone whom this worker has fed since, and deal with those that run."""
        for conviction in self._news(worker):
            self._say(self._convict(worker.joined.worker, conviction, self._clock.now()))

    def expose(self, worker: Worker, now: float) -> None:
        """Name every request that a worker feeds which serves although it is convicted, once a second. Nothing is done about
        them: a header marks the answers."""
        if now < self._exposed_at.get(worker.joined.worker, 0.0) + EXPOSE_EVERY_S:
            return
        self._exposed_at[worker.joined.worker] = now
        life = worker.joined.worker, worker.joined.instance
        since = [conviction.since for conviction in worker.convictions if conviction.instance == life[1]]
        if since:
            exposures = self._exposures
            self._say((fact, "") for fact in exposures.unknown(life, since[-1], self._clock.now()))
            fed = exposures.fed(life, since[-1])
            live = self._driver.live
            self._say(exposures.fact(one, "continue" if one.span.live in live else "none") for one in fed)

    def answer_for_before(self, workers: Iterable[Worker], before: Served | None) -> None:
        """Say what is to be said of workers that were convicted before this frontend could act: whom the one before it
        served is not known any more. Where nothing is known of that one, only what stands now is answered for."""
        for worker in workers:
            self._say(self._missed(worker, before))

    def _say(self, facts: Iterable[Traced]) -> None:
        for fact, trace in facts:
            self._observe(fact, traceparent=trace)
            self._metrics.exposed(fact)

    def _news(self, worker: Worker) -> list[Conviction]:
        """Return the convictions of this worker that have not been answered for yet, and take them as answered for."""
        name = worker.joined.worker
        answered = self._answered.get(name, ())
        if worker.convictions == answered:
            return []
        known = {conviction.seq for conviction in answered}
        self._answered[name] = worker.convictions
        return [conviction for conviction in worker.convictions if conviction.seq not in known]

    def _convict(self, worker: str, conviction: Conviction, now: datetime) -> list[Traced]:
        """Return the facts about everyone exposed since the canary that failed was last sent and passed."""
        key: Key = (worker, conviction.instance)
        log.warning("worker_convicted", worker=worker, canary=conviction.canary)

        exposures, since = self._exposures, conviction.since
        facts: list[Traced] = [(fact, "") for fact in exposures.unknown(key, since, now)]
        # What is done about one choice of an answer may end the others: see first which have ended already.
        fed = [(one, self._driver.live.get(one.span.live)) for one in exposures.fed(key, since)]
        for one, live in fed:
            action = "none" if live is None else "error" if live.over else self._expose(live, one.first, key)
            facts.append(exposures.fact(one, action))
        return facts

    def _expose(self, live: LiveRequest, first: int, key: Key) -> str:
        """Let a request act on it that its tokens from index `first` on may be wrong. Return what was done."""
        endpoint = live.endpoint
        stays = endpoint is not None and endpoint.key == key and bool(endpoint.suspect)
        exposed = Exposed(first, key, live.stats.depends_on(key), stays, live.progress)
        self._driver.feed(live, exposed)
        failed = live.exposure == "restart" and live.answer.error is not None
        return "error" if failed else live.exposure

    def _missed(self, worker: Worker, before: Served | None) -> list[Traced]:
        out: list[Traced] = []
        for conviction in self._news(worker):
            if (
                conviction.at > self._began
            ):  # this frontend served already, while it still read what had been before
                out += self._convict(worker.joined.worker, conviction, conviction.at)
                continue
            stands = worker.alive and worker.health.corrupt and conviction.instance == worker.joined.instance
            if before.answers(conviction) if before is not None else not stands:
                continue
            fact = ExposureUnknown(
                frontend=self._frontend,
                worker=worker.joined.worker,
                instance=conviction.instance,
                since=conviction.since,
                until=max(conviction.since, min(conviction.at, self._began)),
                why="it was convicted before this frontend had read the journal",
            )
            out.append((fact, ""))
        return out
