"""Load limits: whether a worker may get another request, and whether a whole model is busy.

Evaluated when a request arrives, from the workers' last reports and from what this frontend has sent. A worker that has not
reported is judged by this frontend's own counts, because a silent worker is handled by health, not by load.

Dynamo's thresholds (seed 003):

    a rank is busy      KV blocks in use > active_decode_blocks x all its blocks: by the worker's report, or by our own count
                        or unread prompt tokens > active_prefill_tokens
                        or unread prompt tokens > active_prefill_tokens_frac x the tokens of one of its steps
    a worker is busy    all its DP ranks are (N25): a rank without any data is free

All comparisons are strict. A bound that cannot be computed is ignored, for example if a rank does not report its number of
blocks, or an engine its tokens per step.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import floor

from controller.deciders.thresholds import NEVER, BusyThresholds
from controller.router.endpoints import ConnectedWorkers, Endpoint, EndpointTable, Lineage
from controller.router.load.active_sequences import ActiveSequences
from controller.router.load.work import AnswerLengths
from events.blocks import BlockNames

AHEAD_S = 0.1  # with deadlines: a worker gets no new request while it has more prompt to read than this
NEARLY_FULL = BusyThresholds(0.95)  # with deadlines: nor while more of its KV blocks are in use
# share of its KV blocks including the new request: engines reserve some (vLLM's watermark is 1 %)
FILLED_MAX = 0.98
HOLDS_S = 0.0002  # cache time per worker examined: twenty times the duration of the examination


@dataclass(frozen=True, slots=True)
class LoadLimits:
    """The load that a worker may have, from a frontend's settings."""

    inflight_max: int | None = None  # requests in flight on a worker, of all frontends
    inflight_per_batch: float = 4.0  # the same as a multiple of its batch, used if inflight_max is None
    thresholds: BusyThresholds = NEVER  # load at which it is busy
    by_thresholds: bool = False  # apply these thresholds and those set by operators
    unread_s: float | None = None  # maximum unread prompt, in seconds of reading
    by_deadline: bool = False
    answers_grow: bool = False  # account for the growth of answers in flight beyond the counted blocks


@dataclass(frozen=True, slots=True)
class RequiredRoom:
    """The room that a new request needs at a worker, in tokens."""

    unread: int = 0  # of all its prompts, assuming that none is cached
    held: float = 0.0  # in a KV cache, by its longest prompt and the mean length of its answer so far
    names: BlockNames | None = None  # block hashes of that prompt


NOTHING = RequiredRoom()


@dataclass(frozen=True, slots=True)
class RankLoadSeen:
    """The known load of one DP rank, in blocks and tokens."""

    kv_used: int = 0  # as reported by the worker
    kv_total: int = 0  # 0: not reported
    decode_blocks: float = 0.0  # in use by this frontend's requests, by its own count
    prefill_tokens: float = 0.0  # unread prompt tokens of those requests
    step_tokens: int | None = None  # maximum tokens per engine step; None: not registered

    def busy(self, thresholds: BusyThresholds) -> bool:
        """Return whether it exceeds any threshold."""
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


@dataclass(eq=False, repr=False)
class LoadMonitor:
    """One frontend's view of how busy workers are."""

    limits: LoadLimits
    table: EndpointTable
    plane: ConnectedWorkers
    slots: ActiveSequences
    now: Callable[[], float]
    lengths: AnswerLengths = field(default_factory=AnswerLengths)
    asked: RequiredRoom = NOTHING  # the room needed by the current request: see `asking`
    beyond: float = 0.0  # share of a batch that may queue at the worker, for the current choice
    # until when a model's workers are assumed to be busy
    _full_until: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        limits = self.limits
        self._unread_s = AHEAD_S if limits.by_deadline and limits.unread_s is None else limits.unread_s
        # otherwise `has_enough` need not be called
        self.decides = limits.by_thresholds or self._unread_s is not None

    @contextmanager
    def asking(self, wanted: RequiredRoom, beyond: float = 0.0) -> Iterator[None]:
        """Set the room that the current request needs. `beyond`: share of a batch that may queue at the worker in addition."""
        before = self.asked, self.beyond
        self.asked, self.beyond = wanted, beyond
        try:
            yield
        finally:
            self.asked, self.beyond = before

    def wanted(
        self, model: str, prompt_tokens: int, answer_max: int, names: BlockNames, unread: int = 0
    ) -> RequiredRoom:
        """Return the room that a request with this longest prompt and this maximum answer length needs."""
        return RequiredRoom(unread, prompt_tokens + min(answer_max, self.lengths.known(model)) / 2, names)

    # --- one worker -----------------------------------------------------------------------------------------

    def cap(self, endpoint: Endpoint) -> int:
        """Return how many requests may be in flight there, regardless of their size."""
        limits = self.limits
        whole = limits.inflight_max or endpoint.max_batch * limits.inflight_per_batch
        cap = int(whole * self.table.knobs(endpoint.model).batch_size)
        if limits.by_deadline and (load := self.plane.load(endpoint.worker)) is not None:
            # its currently reported batch; canaries occupy places of it
            cap = (min(cap, load.batch) if load.batch > 0 else cap) - load.canaries
        if self.beyond:
            cap += max(1, int(endpoint.max_batch * self.beyond))
        return cap if cap > 1 else 1

    def has_enough(self, endpoint: Endpoint) -> bool:
        """Return whether a worker has too much work for a new request.

        It is busy, its unread prompts would take too long, or the current request does not fit into its KV cache.
        """
        return self.busy(endpoint) or self._reads_too_long(endpoint) or self.lacks_blocks(endpoint)

    def _reads_too_long(self, endpoint: Endpoint) -> bool:
        limit = (self._unread_s or 0.0) * endpoint.joined.profile.prefill_tokens_per_s
        if limit <= 0:
            return False
        unread = sum(self.unread_by_rank(endpoint)) + endpoint.kept.tokens
        return unread > limit * endpoint.ranks

    def lacks_blocks(self, endpoint: Endpoint) -> bool:
        """Return whether a worker is known to lack the KV blocks for the current request."""
        return self.asked is not NOTHING and not self.holds(endpoint, self.asked)

    def holds(self, endpoint: Endpoint, wanted: RequiredRoom) -> bool:
        """Return whether a DP rank of a worker has the KV blocks for a request, beside its present requests, which grow.

        A rank without requests always accepts. If other frontends have requests there, or a canary runs, its last reported usage
        counts when that is larger.
        """
        need, ranks, slots = -(-wanted.held // endpoint.block_tokens), endpoint.ranks, self.slots
        reported = self.plane.load_by_rank(endpoint.worker)
        external = self.plane.external_load(endpoint.worker)
        shared = external is not None and external.running + external.waiting > 0
        answer = self.lengths.known(endpoint.model) if self.limits.answers_grow else 0.0
        growth = 1 + answer / 2 / endpoint.block_tokens  # 1: the block that is not full yet
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
        """Return whether all DP ranks of a worker exceed a threshold."""
        thresholds = self._in_force(endpoint.model)
        return bool(thresholds) and all(
            rank is not None and rank.busy(thresholds) for rank in self.ranks(endpoint)
        )

    def _in_force(self, model: str) -> BusyThresholds:
        if self.limits.by_deadline:
            return NEARLY_FULL
        return self.thresholds(model) if self.limits.by_thresholds else NEVER

    def ranks(self, endpoint: Endpoint) -> Iterator[RankLoadSeen | None]:
        """Yield the known load of each of a worker's DP ranks; None if nothing is known."""
        reported, profile = self.plane.load_by_rank(endpoint.worker), endpoint.joined.profile
        for rank, holder in enumerate(endpoint.holders):
            ours = self.slots.work(holder, now=self.now())
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
        """Return the unread prompt tokens of requests at a worker, per DP rank."""
        if not self.slots.paced:  # a choice may need this for a thousand workers
            return [load.reading_tokens for load in self.slots.rank_loads(endpoint.holders)]
        now = self.now()
        return [self.slots.work(holder, now=now).prefill_tokens for holder in endpoint.holders]

    # --- all workers of a model -----------------------------------------------------------------------------

    def thresholds(self, model: str) -> BusyThresholds:
        """Return the busy thresholds of a model: those set by operators, and the settings where these are unset."""
        default = self.limits.thresholds if self.limits.by_thresholds else NEVER
        given = self.table.thresholds.get(model)
        return default if given is None else given.over(default)

    def overloaded(self, model: str) -> bool:
        """Return whether all of a model's usable workers (at least one) are busy by the thresholds.

        With a thousand workers the check takes 10 ms, and a positive result is cached for a fifth of a second, so that a burst
        of requests does not wait for it.
        """
        if not self.decides:
            return False
        now = self.now()
        if now < self._full_until.get(model, 0.0):
            return True
        workers = self.serving(self.table.models.get(model, ()))
        full = bool(workers) and all(self.busy(endpoint) for endpoint in workers)
        if full:
            self._full_until[model] = now + len(workers) * HOLDS_S
        return full

    def serving(self, endpoints: Iterable[Endpoint]) -> list[Endpoint]:
        """Return the endpoints that can get requests: in service and connected."""
        reachable = self.plane.reachable
        return [one for one in endpoints if one.routable and reachable(one.worker, one.instance)]

    def weight(self, model: str, lineage: Lineage) -> float:
        """Return the total weight of a model's workers of this lineage that can get requests."""
        group = self.table.group(model, lineage)
        return sum(one.weight for one in self.serving(group.endpoints if group is not None else ()))

    @property
    def servable(self) -> bool:
        """Whether any request could be served now."""
        return bool(self.serving(self.table.endpoints.values()))

    def roll(self) -> list[dict[str, object]]:
        """Return the state of each worker for /health."""
        reachable = self.plane.reachable
        return [one.shown(reachable(one.worker, one.instance)) for one in self.table.endpoints.values()]
