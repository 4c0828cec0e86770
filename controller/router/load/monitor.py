"""Which workers have too much to do for a request more, and does a model have one that has not?

Looked at when a request asks, from what workers have reported last and from what this frontend has sent there. A worker that was
not heard from counts with what we know ourselves: silence is a matter of health, and not of load.

Dynamo's thresholds (seed 003):

    a rank is busy      KV blocks in use > active_decode_blocks x all its blocks: by the worker's report, or by our own count
                        or prompt tokens still to be read > active_prefill_tokens
                        or more of them than active_prefill_tokens_frac x the tokens of one of its steps
    a worker is busy    all its DP ranks are (N25): a rank of which nothing is known is free

All comparisons are strict. A bound that cannot be computed (a rank that does not say how many blocks it has, an engine that does
not say how many tokens it takes a step) is no bound.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import floor

from controller.deciders.thresholds import NEVER, BusyThresholds
from controller.router.endpoints import ConnectedWorkers, Endpoint, EndpointTable, Lineage
from controller.router.load.active_sequences import ActiveSequences
from controller.router.load.work import AnswerLengths
from events.blocks import BlockNames

AHEAD_S = 0.1  # with deadlines: a worker gets nothing new while it has more to read than that
NEARLY_FULL = BusyThresholds(0.95)  # with deadlines: nor with more of its KV blocks in use
FILLED_MAX = 0.98  # of its KV blocks, with what is sent: engines keep some that no new prompt may take (vLLM's watermark is 1 %)
HOLDS_S = 0.0002  # for each worker that was looked at: twenty times as long as the look took


@dataclass(frozen=True, slots=True)
class LoadLimits:
    """How much a worker may have to do, as a frontend's settings say it."""

    inflight_max: int | None = None  # requests in flight there, of all frontends
    inflight_per_batch: float = 4.0  # the same, times its batch, where that is None
    thresholds: BusyThresholds = NEVER  # from where on it is busy
    by_thresholds: bool = False  # these hold, and those that operators have set
    unread_s: float | None = None  # the most that it may have to read
    by_deadline: bool = False
    answers_grow: bool = False  # what is in flight, beyond what is counted


@dataclass(frozen=True, slots=True)
class WantedRoom:
    """What a request that begins takes of a worker. Tokens."""

    unread: int = 0  # of all its prompts, cached nowhere
    held: float = 0.0  # in a KV cache, by its longest prompt and the answer to it, as expected on the way
    names: BlockNames | None = None  # what the blocks of that prompt are called


NOTHING = WantedRoom()


@dataclass(frozen=True, slots=True)
class RankLoadSeen:
    """What is known of one DP rank's load. Blocks and tokens."""

    kv_used: int = 0  # by its own report
    kv_total: int = 0  # 0: it does not say
    decode_blocks: float = 0.0  # in use by requests of ours, by our own count
    prefill_tokens: float = 0.0  # of theirs, still to be read
    step_tokens: int | None = None  # that a step of its engine takes at most; None: it does not say

    def busy(self, thresholds: BusyThresholds) -> bool:
        """Say whether it is over any threshold."""
        share, frac = thresholds.active_decode_blocks, thresholds.active_prefill_tokens_frac
        used, tokens = max(self.kv_used, self.decode_blocks), thresholds.active_prefill_tokens
        return (
            (share is not None and self.kv_total > 0 and used > share * self.kv_total)
            or (tokens is not None and self.prefill_tokens > tokens)
            or (
                frac is not None
                and self.step_tokens is not None
                and self.prefill_tokens > floor(frac * self.step_tokens)
            )
        )


class LoadMonitor:
    """What one frontend knows of how busy workers are."""

    def __init__(
        self,
        limits: LoadLimits,
        table: EndpointTable,
        plane: ConnectedWorkers,
        slots: ActiveSequences,
        now: Callable[[], float],
    ) -> None:
        self.limits = limits
        self._table = table
        self._plane = plane
        self._slots = slots
        self.now = now
        self._full_until: dict[str, float] = {}  # models of which all workers were busy a moment ago
        self.lengths = AnswerLengths()
        self.asked = NOTHING  # for which room is looked for now: see `asking`
        self.beyond = 0.0  # a batch, times it: places of the worker's own line, for the choice at hand
        self._unread_s = AHEAD_S if limits.by_deadline and limits.unread_s is None else limits.unread_s
        self.decides = limits.by_thresholds or self._unread_s is not None  # else it need not be asked

    @contextmanager
    def asking(self, wanted: WantedRoom, beyond: float = 0.0) -> Iterator[None]:
        """Look for room for this. `beyond`: for one that may wait at the worker, so much more than its batch, as a part of it."""
        before = self.asked, self.beyond
        self.asked, self.beyond = wanted, beyond
        try:
            yield
        finally:
            self.asked, self.beyond = before

    def wanted(
        self, model: str, prompt_tokens: int, answer_max: int, names: BlockNames, unread: int = 0
    ) -> WantedRoom:
        """Return what a request takes whose longest prompt has so many tokens, and whose answer may have so many."""
        return WantedRoom(unread, prompt_tokens + min(answer_max, self.lengths.known(model)) / 2, names)

    # --- one worker -----------------------------------------------------------------------------------------

    def cap(self, endpoint: Endpoint) -> int:
        """Return how many requests may be in flight there, however little else it may have to do."""
        limits = self.limits
        whole = limits.inflight_max or endpoint.max_batch * limits.inflight_per_batch
        cap = int(whole * self._table.knobs(endpoint.model).batch_size)
        if limits.by_deadline and (load := self._plane.load(endpoint.worker)) is not None:
            # what it runs at once now, by what it has said; canaries that are there have their places
            cap = (min(cap, load.batch) if load.batch > 0 else cap) - load.canaries
        if self.beyond:
            cap += max(1, int(endpoint.max_batch * self.beyond))
        return cap if cap > 1 else 1

    def has_enough(self, endpoint: Endpoint) -> bool:
        """Say whether a worker has so much to do that it should get no new request: it is busy, the prompts that it has take too
        long to be read, or what is asked for now does not fit into its KV cache."""
        return self.busy(endpoint) or self._reads_too_long(endpoint) or self.lacks_blocks(endpoint)

    def _reads_too_long(self, endpoint: Endpoint) -> bool:
        limit = (self._unread_s or 0.0) * endpoint.joined.profile.prefill_tokens_per_s
        if limit <= 0:
            return False
        unread = sum(self.unread_by_rank(endpoint)) + endpoint.kept.tokens
        return unread > limit * endpoint.ranks

    def lacks_blocks(self, endpoint: Endpoint) -> bool:
        """Say whether a worker does not have the KV blocks for what is asked for now, where that is known."""
        return self.asked is not NOTHING and not self.holds(endpoint, self.asked)

    def holds(self, endpoint: Endpoint, wanted: WantedRoom) -> bool:
        """Say whether some DP rank of a worker has the KV blocks for a request, beside those that it has, which grow. One that
        has none gets it in any case. Where others have requests there, or a canary is, what it reported last counts, if that is
        more."""
        need, ranks, slots = -(-wanted.held // endpoint.block_tokens), endpoint.ranks, self._slots
        reported = self._plane.load_by_rank(endpoint.worker)
        external = self._plane.external_load(endpoint.worker)
        shared = external is not None and external.running + external.waiting > 0
        answer = self.lengths.known(endpoint.model) if self.limits.answers_grow else 0.0
        growth = 1 + answer / 2 / endpoint.block_tokens  # the first: the block that is not full yet
        for rank, holder in enumerate(endpoint.holders):
            load = reported[rank] if rank < len(reported) else None
            total = load.kv_total if load is not None else endpoint.joined.profile.kv_blocks // ranks
            ours = slots.work(holder, now=self.now())
            used = ours.blocks + ours.requests * growth + endpoint.kept.blocks / ranks
            if load is not None and (shared or load.canaries):
                used = max(used, load.kv_used)
            left = FILLED_MAX * total - used
            if total <= 0 or used <= 0 or need <= left:
                return True
            if wanted.names is not None:
                depths, _ = slots.shared(wanted.names.of(endpoint.block_tokens), slots.rows((holder,)))
                if need - int(depths[0]) <= left:
                    return True
        return False

    def busy(self, endpoint: Endpoint) -> bool:
        """Say whether a worker is over a threshold with all of its DP ranks."""
        thresholds = self._in_force(endpoint.model)
        return bool(thresholds) and all(
            rank is not None and rank.busy(thresholds) for rank in self.ranks(endpoint)
        )

    def _in_force(self, model: str) -> BusyThresholds:
        if self.limits.by_deadline:
            return NEARLY_FULL
        return self.thresholds(model) if self.limits.by_thresholds else NEVER

    def ranks(self, endpoint: Endpoint) -> Iterator[RankLoadSeen | None]:
        """Yield what is known of each of the DP ranks that a worker has declared."""
        reported, profile = self._plane.load_by_rank(endpoint.worker), endpoint.joined.profile
        for rank, holder in enumerate(endpoint.holders):
            ours = self._slots.work(holder, now=self.now())
            load = reported[rank] if rank < len(reported) else None
            if load is None and not ours.requests:
                yield None
                continue
            yield RankLoadSeen(
                load.kv_used if load is not None else 0,
                load.kv_total if load is not None else profile.kv_blocks // endpoint.ranks,
                ours.blocks,
                ours.prefill_tokens,
                profile.prefill_tokens_max,
            )

    def unread_by_rank(self, endpoint: Endpoint) -> list[float]:
        """Return how many prompt tokens of requests at a worker are still to be read, on each of its DP ranks."""
        if not self._slots.paced:  # a choice among a thousand workers may ask for each
            return [load.reading_tokens for load in self._slots.rank_loads(endpoint.holders)]
        now = self.now()
        return [self._slots.work(holder, now=now).prefill_tokens for holder in endpoint.holders]

    # --- all workers of a model -----------------------------------------------------------------------------

    def thresholds(self, model: str) -> BusyThresholds:
        """Return from where on a worker of a model is busy: as operators have set it, and for what they left open by the
        settings."""
        usual = self.limits.thresholds if self.limits.by_thresholds else NEVER
        given = self._table.thresholds.get(model)
        return usual if given is None else given.over(usual)

    def overloaded(self, model: str) -> bool:
        """Say whether all of a model's workers that could take a request are busy by the thresholds that are set, of which there
        is at least one. Where a thousand are, that takes 10 ms to see, and holds for a fifth of a second: a storm of requests is
        not to wait for it."""
        if not self.decides:
            return False
        now = self.now()
        if now < self._full_until.get(model, 0.0):
            return True
        there = self.serving(self._table.models.get(model, ()))
        full = bool(there) and all(self.busy(endpoint) for endpoint in there)
        if full:
            self._full_until[model] = now + len(there) * HOLDS_S
        return full

    def serving(self, endpoints: Iterable[Endpoint]) -> list[Endpoint]:
        """Return those of these endpoints that can get requests: they are in service, and connected."""
        reachable = self._plane.reachable
        return [one for one in endpoints if one.routable and reachable(one.worker, one.instance)]

    def weight(self, model: str, lineage: Lineage) -> float:
        """Return what those of a model's workers of this lineage weigh together that can get requests."""
        group = self._table.group(model, lineage)
        return sum(one.weight for one in self.serving(group.endpoints if group is not None else ()))

    @property
    def servable(self) -> bool:
        """Whether any request could be served now."""
        return bool(self.serving(self._table.endpoints.values()))

    def roll(self) -> list[dict[str, object]]:
        """Return what /health says of each worker."""
        reachable = self._plane.reachable
        return [one.shown(reachable(one.worker, one.instance)) for one in self._table.endpoints.values()]
