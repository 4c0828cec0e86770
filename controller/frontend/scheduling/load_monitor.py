"""Which workers have too much to do for a request more, and is there one of a model that has not?

Looked at when a request asks, from what workers have reported last and from what this frontend has sent there. A worker that was
not heard from counts with what we know ourselves: silence is a matter of health, and not of load.
"""

from collections.abc import Iterator, Sequence

from controller.deciders.thresholds import NEVER, BusyThresholds
from controller.frontend.scheduling.scheduler import KvScheduler
from controller.frontend.settings import FrontendSettings
from controller.ports import RequestPlane
from controller.router.endpoints import Endpoint, EndpointTable, Lineage, WorkerRank
from controller.router.load.busy import RankLoadSeen, worker_is_busy

AHEAD_S = 0.1  # with deadlines: a worker gets nothing new while it has more to read than that
NEARLY_FULL = BusyThresholds(0.95)  # with deadlines: nor with more of its KV blocks in use
HOLDS_S = 0.0002  # for each worker that was looked at: twenty times as long as the look took


class LoadMonitor:
    """What one frontend knows of how busy workers are."""

    def __init__(
        self,
        settings: FrontendSettings,
        table: EndpointTable,
        plane: RequestPlane,
        scheduler: KvScheduler,
    ) -> None:
        self._table = table
        self._plane = plane
        self._scheduler = scheduler
        self._unread_s = settings.router.queue_prefill_s  # the most that a worker may have to read
        self._full_until: dict[str, float] = {}  # models of which all workers were busy a moment ago
        self._by_thresholds = settings.admission_control == "token-capacity"
        self._by_deadline = settings.by_deadline
        self._usual = settings.thresholds
        if settings.by_deadline and self._unread_s is None:
            self._unread_s = AHEAD_S
        self.decides = self._by_thresholds or self._unread_s is not None  # else nobody need ask

    def thresholds(self, model: str) -> BusyThresholds:
        """Return from where on a worker of a model is busy: as operators have set it, and for what they left open by the
        settings."""
        usual = self._usual if self._by_thresholds else NEVER
        given = self._table.thresholds.get(model)
        return usual if given is None else given.over(usual)

    def has_enough(self, endpoint: Endpoint) -> bool:
        """Say whether a worker has so much to do that it should get no new request: it is busy, or the prompts that it has take
        too long to be read."""
        return self.busy(endpoint) or (
            self._unread_s is not None and self._reads_too_long(endpoint, self._unread_s)
        )

    def busy(self, endpoint: Endpoint) -> bool:
        """Say whether a worker is over a threshold with all of its DP ranks."""
        thresholds = self._in_force(endpoint.model)
        return bool(thresholds) and worker_is_busy(thresholds, self.ranks(endpoint))

    def batch(self, endpoint: Endpoint) -> int | None:
        """Return how many requests a worker runs at once now, where it has said so and that is heeded: with deadlines."""
        load = self._plane.load(endpoint.worker) if self._by_deadline else None
        return load.batch if load is not None and load.batch > 0 else None

    def _in_force(self, model: str) -> BusyThresholds:
        if self._by_deadline:
            return NEARLY_FULL
        return self.thresholds(model) if self._by_thresholds else NEVER

    def overloaded(self, model: str, endpoints: Sequence[Endpoint]) -> bool:
        """Say whether all of a model's workers that could take a request are busy, of which there is at least one. Where a
        thousand are, that takes 10 ms to see, and holds for a fifth of a second: a storm of requests is not to wait for it."""
        now, reachable = self._scheduler.now(), self._plane.reachable
        if now < self._full_until.get(model, 0.0):
            return True
        there = [e for e in endpoints if e.routable and reachable(e.worker, e.instance)]
        full = bool(there) and all(self.busy(endpoint) for endpoint in there)
        if full:
            self._full_until[model] = now + len(there) * HOLDS_S
        return full

    def weight(self, model: str, lineage: Lineage) -> float:
        """Return what those of a model's workers of this lineage weigh together that can get requests."""
        group, reachable = self._table.group(model, lineage), self._plane.reachable
        endpoints = group.endpoints if group is not None else ()
        return sum(e.weight for e in endpoints if e.routable and reachable(e.worker, e.instance))

    def ranks(self, endpoint: Endpoint) -> Iterator[RankLoadSeen | None]:
        """Yield what is known of each of the DP ranks that a worker has declared."""
        reported, profile = self._plane.load_by_rank(endpoint.worker), endpoint.joined.profile
        for rank in range(endpoint.ranks):
            ours = self._scheduler.work(WorkerRank(endpoint.worker, endpoint.instance, rank))
            load = reported[rank] if rank < len(reported) else None
            if load is None and not ours.requests:
                yield None
                continue
            yield RankLoadSeen(
                kv_used=load.kv_used if load is not None else 0,
                kv_total=load.kv_total if load is not None else profile.kv_blocks // endpoint.ranks,
                decode_blocks=ours.blocks,
                prefill_tokens=ours.prefill_tokens,
                step_tokens=profile.prefill_tokens_max,
            )

    def _reads_too_long(self, endpoint: Endpoint, limit_s: float) -> bool:
        limit = limit_s * endpoint.joined.profile.prefill_tokens_per_s
        unread = self._scheduler.unread(endpoint) + endpoint.promised_tokens
        return limit > 0 and unread > limit * endpoint.ranks
