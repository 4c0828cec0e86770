"""Detects streams that get no new tokens although their worker runs. The driver then moves them.

The request plane detects a silent worker and a stuck engine. It cannot detect one stuck stream among healthy streams.
So here each stream has an age: the time since its last token. One periodic sweep compares all ages with their limits,
so there is no cost per token.

    age         now - last token; or now - start of the attempt, if the attempt has no token yet
    limit       pace_factor * the stream's own mean time per token, at least floor_s, at most ceiling_s
    exceptions  requests wait in the worker's queue, so the worker may have preempted the stream: the limit is ceiling_s
                the stream may not move: the limit is ceiling_s
                the engine runs a prefill, and this stream got a token in the latest step with tokens: no limit
                here, because the request plane limits the duration of the prefill
                the stream's KV cache is being sent to another worker: no limit here, because that move has deadlines

All times are in seconds. The limit never depends on the age, so a stuck stream cannot raise its own limit.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from math import inf

import structlog

from controller.frontend.dispatch.live_request import Dispatch, LiveRequest, OutputStats, RunningRequests
from controller.frontend.request.failures import Failure
from controller.frontend.request.state import AnswerProgress, refusal
from controller.frontend.settings import AdmissionSettings, StallSettings
from controller.ports import RequestPlane
from controller.router.endpoints import Endpoint, EndpointTable

PACE_TOKENS_MIN = 4  # minimum number of tokens from which a stream's own pace is computed
# a sweep that is late by more seconds than this is skipped, because tokens may still be unread in our sockets
LATE_S = 0.25

log = structlog.get_logger(__name__)


@dataclass(eq=False, repr=False)
class StallWatch:
    """Finds the stalled streams among all running streams of one frontend."""

    settings: StallSettings
    admission: AdmissionSettings
    table: EndpointTable
    running: RunningRequests
    plane: RequestPlane
    swept_at: float

    def tick(self, now: float) -> Iterator[tuple[LiveRequest, Dispatch, Failure]]:
        """Yield the stalled attempts, each with its failure, if a sweep is due. Yield nothing otherwise."""
        settings = self.settings
        due = self.swept_at + settings.sweep_s
        if now < due:
            return
        self.swept_at = now
        if now - due > LATE_S:
            return
        oldest = now - settings.floor_s
        for endpoint, there in self.running.items():
            quiet = [one for one in there if one.stats.last_at < oldest]
            if quiet:
                yield from self._look(endpoint, there, quiet, now)

    def _look(
        self, endpoint: Endpoint, there: Collection[LiveRequest], quiet: list[LiveRequest], now: float
    ) -> Iterator[tuple[LiveRequest, Dispatch, Failure]]:
        """Yield the stalled streams of one worker.

        Only the streams in `quiet` are checked. `there` contains all streams of the worker.
        """
        streams, load = [one.stats for one in there if one.state.has_output], self.plane.load(endpoint.worker)
        paces = [pace for one in streams if (pace := pace_s(one)) is not None]
        slowest = max(paces, default=self.settings.ceiling_s)
        queued = load is not None and load.waiting > 0
        # no stream had a later token than this one, while the engine runs a prefill: the request plane limits that step
        reads = self.plane.others_work(endpoint.worker, 0, begun=True) == "before"
        newest = max((one.last_at for one in streams), default=0.0) if reads else inf
        for one in quiet:
            dispatch, stats, state = one.dispatch, one.stats, one.state
            if dispatch is None or state.transfer is not None or not state.begun:
                continue  # the wait for the first token has a separate limit
            if state.has_output and newest <= stats.last_at:
                continue
            age = now - (stats.last_at if state.has_output else stats.attempt_at)
            limit = self._limit(one, slowest, queued=queued) * self.table.knobs(one.request.model).latency
            if age > limit:
                log.warning(
                    "stream_stalled",
                    request=one.request.id,
                    worker=dispatch.endpoint.worker,
                    age_s=round(age, 1),
                    limit_s=round(limit, 1),
                )
                yield one, dispatch, Failure("stalled", f"no token for {age:.1f} s", one_stream=True)

    def _limit(self, one: LiveRequest, slowest: float, *, queued: bool) -> float:
        """Return the age in seconds above which a stream counts as stalled.

        `slowest` is the pace in seconds per token that is assumed for a stream with too few tokens to measure. `queued`
        states that requests wait in the worker's queue.
        """
        settings, admission = self.settings, self.admission
        if not one.state.has_output:
            return admission.first_token_s + admission.first_token_s_per_1k / 1000 * one.length
        limit = settings.ceiling_s
        if not queued and not refusal(one.state, AnswerProgress(len(one.accepted), reached=1)):
            pace = pace_s(one.stats)
            limit = min(limit, settings.pace_factor * (slowest if pace is None else pace))
        return max(settings.floor_s, limit)


def pace_s(stats: OutputStats) -> float | None:
    """Return a stream's mean seconds per token, or None before it has PACE_TOKENS_MIN tokens."""
    if stats.first_at is None or stats.counted < PACE_TOKENS_MIN:
        return None
    return (stats.last_at - stats.first_at) / (stats.counted - 1)
