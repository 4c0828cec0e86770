"""Which workers have too much to do for a request more, and is there one of a model that has not?

Looked at when a request asks, from what workers have reported last and from what this frontend has sent there. A worker that was
not heard from counts with what we know ourselves: silence is a matter of health, and not of load.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from controller.deciders.thresholds import NEVER, BusyThresholds
from controller.frontend.request.block_hashes import BlockNames
from controller.frontend.scheduling.scheduler import KvScheduler
from controller.frontend.settings import FrontendSettings
from controller.ports import RequestPlane
from controller.router.admission.work import AnswerLengths
from controller.router.endpoints import Endpoint, EndpointTable, Lineage, WorkerRank
from controller.router.load.busy import RankLoadSeen, worker_is_busy

AHEAD_S = 0.1  # with deadlines: a worker gets nothing new while it has more to read than that
NEARLY_FULL = BusyThresholds(0.95)  # with deadlines: nor with more of its KV blocks in use
FILLED_MAX = 0.98  # of its KV blocks, with what is sent: engines keep some that no new prompt may take (vLLM's watermark is 1 %)
HOLDS_S = 0.0002  # for each worker that was looked at: twenty times as long as the look took


@dataclass(frozen=True, slots=True)
class WantedRoom:
    """What a request that begins takes of a worker. Tokens."""

    unread: int = 0  # of all its prompts, cached nowhere
    held: float = 0.0  # in a KV cache, by its longest prompt and the answer to it, as expected on the way
    names: BlockNames | None = None  # what the blocks of that prompt are called


NOTHING = WantedRoom()


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
        self._grows = not settings.router.track_output_blocks  # what is in flight, beyond what is counted
        self.lengths = AnswerLengths()
        self.asked = NOTHING  # for which room is looked for now: see `RequestRouter.asking`
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
        """Say whether a worker has so much to do that it should get no new request: it is busy, the prompts that it has take too
        long to be read, or what is asked for now does not fit into its KV cache."""
        return (
            self.busy(endpoint)
            or (self._unread_s is not None and self._reads_too_long(endpoint, self._unread_s))
            or self.lacks_blocks(endpoint)
        )

    def lacks_blocks(self, endpoint: Endpoint) -> bool:
        """Say whether a worker has not the KV blocks for what is asked for now, where that is known."""
        return self.asked is not NOTHING and not self.holds(endpoint, self.asked)

    def wanted(
        self, model: str, prompt_tokens: int, answer_max: int, names: BlockNames, unread: int = 0
    ) -> WantedRoom:
        """Return what a request takes whose longest prompt has so many tokens, and whose answer may have so many."""
        return WantedRoom(unread, prompt_tokens + min(answer_max, self.lengths.known(model)) / 2, names)

    def holds(self, endpoint: Endpoint, wanted: WantedRoom) -> bool:
        """Say whether some DP rank of a worker has the KV blocks for a request, beside those that it has, which grow. One that
        has none gets it in any case. Where others have requests there, or a canary is, what it reported last counts, if that is
        more."""
        need, ranks = -(-wanted.held // endpoint.block_tokens), endpoint.ranks
        reported, external = (
            self._plane.load_by_rank(endpoint.worker),
            self._plane.external_load(endpoint.worker),
        )
        shared = external is not None and external.running + external.waiting > 0
        answer = self.lengths.known(endpoint.model) if self._grows else 0.0
        growth = 1 + answer / 2 / endpoint.block_tokens  # the first: the block that is not full yet
        for rank in range(ranks):
            load = reported[rank] if rank < len(reported) else None
            total = load.kv_total if load is not None else endpoint.joined.profile.kv_blocks // ranks
            holder = WorkerRank(endpoint.worker, endpoint.instance, rank)
            ours = self._scheduler.work(holder)
            used = ours.blocks + ours.requests * growth + endpoint.kept.blocks / ranks
            if load is not None and (shared or load.canaries):
                used = max(used, load.kv_used)
            left = FILLED_MAX * total - used
            if total <= 0 or used <= 0 or need <= left:
                return True
            if wanted.names is not None:
                names = wanted.names.of(endpoint.block_tokens)
                if need - self._scheduler.in_use(holder, names) <= left:
                    return True
        return False

    def busy(self, endpoint: Endpoint) -> bool:
        """Say whether a worker is over a threshold with all of its DP ranks."""
        thresholds = self._in_force(endpoint.model)
        return bool(thresholds) and worker_is_busy(thresholds, self.ranks(endpoint))

    def places(self, endpoint: Endpoint, batch: int) -> int:
        """Return how many of `batch` requests a worker runs at once now: with deadlines what it has said counts, and canaries
        that are there have their places."""
        load = self._plane.load(endpoint.worker) if self._by_deadline else None
        if load is None:
            return batch
        return (min(batch, load.batch) if load.batch > 0 else batch) - load.canaries

    def _in_force(self, model: str) -> BusyThresholds:
        if self._by_deadline:
            return NEARLY_FULL
        return self.thresholds(model) if self._by_thresholds else NEVER

    def overloaded(self, model: str) -> bool:
        """Say whether all of a model's workers that could take a request are busy by the thresholds that are set, of which there
        is at least one. Where a thousand are, that takes 10 ms to see, and holds for a fifth of a second: a storm of requests is
        not to wait for it."""
        if not self.decides:
            return False
        now, reachable, endpoints = (
            self._scheduler.now(),
            self._plane.reachable,
            self._table.models.get(model, ()),
        )
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
        unread = self._scheduler.unread(endpoint) + endpoint.kept.tokens
        return limit > 0 and unread > limit * endpoint.ranks
