"""Detects streams that bring no token although their worker goes on, and moves them.

The request plane notices a worker that is silent or whose engine is stuck. It cannot notice one stuck stream among healthy
ones. Here each stream has its own age: the time since its last token. One sweep compares all ages with their limits, so that
a token costs nothing.

    age      now - last token (after a move: since the new attempt was sent)
    limit    pace_factor * the stream's own mean time per token, at least floor_s, at most ceiling_s
    excuses  requests wait in the worker's queue: the stream may be preempted; the limit is ceiling_s
             no stream of the worker had a token since, and its engine reads prompts: the request plane has a limit for that step
             the stream may not move: the limit is ceiling_s
             the stream's KV cache is on its way to another worker: that move has its own deadlines

The limit never depends on the age itself, so a stuck stream cannot raise its own limit.
"""

from collections.abc import Callable, Collection
from typing import Generic, Protocol, TypeVar

import structlog

from controller.frontend.generations.attempt import Attempt
from controller.frontend.generations.output import GenerationOutput
from controller.frontend.generations.output_stats import OutputStats
from controller.frontend.request.failures import Failure, MigrationBudget
from controller.frontend.request.generation_request import GenerationRequest
from controller.frontend.scheduling.running import RunningRequests
from controller.frontend.settings import AdmissionSettings, StallSettings
from controller.ports import RequestPlane
from controller.router.endpoints import Endpoint, EndpointTable
from events.wire import Why

PACE_TOKENS_MIN = 4  # from which a stream's own pace is known
LATE_S = 0.25  # a sweep that is later than this waits for the next one: tokens may lie unread in our sockets

log = structlog.get_logger(__name__)


class Stallable(Protocol):
    """What can stall: a generation."""

    @property
    def request(self) -> GenerationRequest: ...
    @property
    def accepted(self) -> list[int]: ...
    @property
    def budget(self) -> MigrationBudget: ...
    @property
    def output(self) -> GenerationOutput: ...
    @property
    def stats(self) -> OutputStats: ...

    def failed(self, failure: Failure, attempt: Attempt | None) -> None:
        """The attempt has failed: continue on another worker, or end with an error."""
        ...

    def mistaken(self) -> None:
        """An internal error was caught: end this stream only."""
        ...


S = TypeVar("S", bound=Stallable)


class StallWatch(Generic[S]):
    """Sweeps over the running streams of one frontend."""

    def __init__(
        self,
        settings: StallSettings,
        admission: AdmissionSettings,
        table: EndpointTable,
        running: RunningRequests[S],
        plane: RequestPlane,
        cancel: Callable[[Attempt | None, Why], None],
        count: Callable[[], None],
        now: Callable[[], float],
    ) -> None:
        """`cancel` tells a worker that an attempt's stream is not read any more; `count` counts a stalled stream."""
        self._settings = settings
        self._first_token_s = admission.first_token_s
        self._first_token_s_per_token = admission.first_token_s_per_1k / 1000
        self._table = table
        self._running = running
        self._plane = plane
        self._cancel = cancel
        self._now = now
        self._count = count
        self._due = now() + settings.sweep_s

    def tick(self) -> None:
        """Sweep if it is time."""
        now, due, settings = self._now(), self._due, self._settings
        if now < due:
            return
        self._due = now + settings.sweep_s
        if now - due > LATE_S:
            return
        oldest = now - settings.floor_s
        for endpoint, there in self._running.items():
            quiet = [one for one in there if one.stats.last_at < oldest]
            if quiet:
                self._look(endpoint, there, quiet, now)

    def _look(self, endpoint: Endpoint, there: Collection[S], quiet: list[S], now: float) -> None:
        """Move those of the `quiet` streams of one worker that are too old."""
        streams = [one for one in there if one.output.has_output]
        newest = max((one.stats.last_at for one in streams), default=0.0)
        paces = [pace for one in streams if (pace := pace_s(one.stats)) is not None]
        load = self._plane.load(endpoint.worker)
        queued = load is not None and load.waiting > 0
        reads = self._plane.others_work(endpoint.worker, 0, begun=True) == "before"
        for one in quiet:
            attempt, stats = one.output.attempt, one.stats
            if attempt is None or one.output.live_migration is not None or stats.first_at is None:
                continue  # a first token has a limit of its own
            latency = self._table.knobs(one.request.model).latency
            if one.output.has_output:
                age = now - stats.last_at
                patient = queued or bool(one.budget.refusal(len(one.request.prompt) + len(one.accepted)))
                if reads and newest <= stats.last_at:
                    continue
                limit = self._limit(stats, paces, patient=patient) * latency
            else:
                tokens = len(one.request.prompt) + len(one.accepted)
                age = now - stats.attempt_at
                limit = (self._first_token_s + self._first_token_s_per_token * tokens) * latency
            if age > limit:
                self._move(one, attempt, age, limit)

    def _limit(self, stats: OutputStats, paces: Collection[float], *, patient: bool) -> float:
        """Return the age in seconds at which a stream has stalled."""
        settings = self._settings
        pace = pace_s(stats)
        if pace is None:
            pace = max(paces, default=settings.ceiling_s)
        limit = settings.ceiling_s if patient else min(settings.ceiling_s, settings.pace_factor * pace)
        return max(settings.floor_s, limit)

    def _move(self, one: S, attempt: Attempt, age: float, limit: float) -> None:
        worker = attempt.endpoint.worker
        log.warning(
            "stream_stalled",
            request=one.request.id,
            worker=worker,
            age_s=round(age, 1),
            limit_s=round(limit, 1),
        )
        self._count()
        try:
            self._cancel(attempt, "elsewhere")
            one.failed(Failure("stalled", f"no token for {age:.1f} s", one_stream=True), attempt)
        except Exception:
            one.mistaken()


def pace_s(stats: OutputStats) -> float | None:
    """Return a stream's mean seconds per token; None before PACE_TOKENS_MIN tokens."""
    if stats.first_at is None or stats.counted < PACE_TOKENS_MIN:
        return None
    return (stats.last_at - stats.first_at) / (stats.counted - 1)
