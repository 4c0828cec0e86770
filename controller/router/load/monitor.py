"""Load limits: whether a worker may get another request, and whether a whole model is busy.

Limits are evaluated when a request arrives, from the workers' last reports and from the requests that this frontend
has sent. A worker that has not reported is judged by this frontend's counts only, because the health checks handle
silent workers.

The thresholds are those of NVIDIA Dynamo:

    a rank is busy      KV blocks in use > active_decode_blocks x all its blocks: as reported, or by this frontend's count
                  or    prompt tokens to prefill > active_prefill_tokens
                  or    prompt tokens to prefill > active_prefill_tokens_frac x the tokens of one of its steps
    a worker is busy    all its DP ranks are busy; a rank without any data is not busy

All comparisons are strict. A threshold that cannot be evaluated is ignored. For example, a rank may not report its number of
blocks, or an engine may not report its tokens per step.
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

# with deadlines: a worker gets no new request while its prompts to prefill would take longer than this many seconds
AHEAD_S = 0.1
# with deadlines: a worker gets no new request while a larger share of its KV blocks is in use
NEARLY_FULL = BusyThresholds(0.95)
# largest share of KV blocks in use, with the new request, because engines reserve some (vLLM's watermark is 1 %)
FILLED_MAX = 0.98
# seconds per examined worker for which a result is cached: twenty times the duration of the examination
HOLDS_S = 0.0002


@dataclass(frozen=True, slots=True)
class LoadLimits:
    """The limits of a worker's load, from a frontend's settings. A worker at one of the limits gets no new requests."""

    inflight_max: int | None = None  # largest number of requests in flight on a worker, from all frontends
    # the same limit as a multiple of the worker's batch size, used if inflight_max is None
    inflight_per_batch: float = 4.0
    thresholds: BusyThresholds = NEVER  # load above which a worker is busy
    by_thresholds: bool = False  # whether to apply these thresholds and those set by operators
    unread_s: float | None = None  # largest prefill time, in seconds, of the prompts that wait at a worker
    by_deadline: bool = False
    answers_grow: bool = False  # whether answers in flight will use more blocks than are counted for them


@dataclass(frozen=True, slots=True)
class RequiredRoom:
    """The room that a new request needs at a worker, in prompt tokens and KV-cache tokens."""

    unread: int = 0  # tokens to prefill in all its prompts, if none of them is cached
    held: float = 0.0  # tokens in the KV cache: its longest prompt and the mean growth of its answer
    names: BlockNames | None = None  # block hashes of the longest prompt


NOTHING = RequiredRoom()


@dataclass(frozen=True, slots=True)
class RankLoadSeen:
    """The load of one DP rank as far as it is known, in blocks and tokens."""

    kv_used: int = 0  # reported by the worker
    kv_total: int = 0  # number of its blocks; 0 if not reported
    decode_blocks: float = 0.0  # blocks used by this frontend's requests, by its own count
    prefill_tokens: float = 0.0  # tokens to prefill in the prompts of those requests
    step_tokens: int | None = None  # maximum tokens per engine step; None: not registered

    def busy(self, thresholds: BusyThresholds) -> bool:
        """Return whether the load exceeds any of the thresholds."""
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
    """Decides for one frontend which workers may get another request, from their load."""

    limits: LoadLimits
    table: EndpointTable
    plane: ConnectedWorkers
    slots: ActiveSequences
    now: Callable[[], float]
    lengths: AnswerLengths = field(default_factory=AnswerLengths)
    asked: RequiredRoom = NOTHING  # the room that the current request needs: see `asking`
    beyond: float = 0.0  # share of a worker's batch size that may queue at the worker, for the current choice
    # time until which all workers of a model are assumed to be busy
    _full_until: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        limits = self.limits
        self._unread_s = AHEAD_S if limits.by_deadline and limits.unread_s is None else limits.unread_s
        # if false, `has_enough` need not be called
        self.decides = limits.by_thresholds or self._unread_s is not None

    @contextmanager
    def asking(self, wanted: RequiredRoom, beyond: float = 0.0) -> Iterator[None]:
        """Set the room that the current request needs, for the duration of the context.

        A `beyond` above 0 raises each worker's limit of requests in flight: by the fraction `beyond` of the worker's batch
        size, but at least by 1 request. With 0, the limit is unchanged.
        """
        before = self.asked, self.beyond
        self.asked, self.beyond = wanted, beyond
        try:
            yield
        finally:
            self.asked, self.beyond = before

    def required_room(
        self, model: str, prompt_tokens: int, answer_max: int, names: BlockNames, unread: int = 0
    ) -> RequiredRoom:
        """Return the room that a request needs, from the lengths in tokens of its longest prompt and longest answer.

        `names` are the block hashes of the longest prompt, and `unread` is the number of prompt tokens to prefill.
        """
        return RequiredRoom(unread, prompt_tokens + min(answer_max, self.lengths.known(model)) / 2, names)

    # --- one worker -----------------------------------------------------------------------------------------

    def cap(self, endpoint: Endpoint) -> int:
        """Return the largest number of requests that may be in flight at a worker, regardless of their size."""
        limits = self.limits
        whole = limits.inflight_max or endpoint.max_batch * limits.inflight_per_batch
        cap = int(whole * self.table.knobs(endpoint.model).batch_size)
        if limits.by_deadline and (load := self.plane.load(endpoint.worker)) is not None:
            # its currently reported batch size; canaries occupy slots of the batch
            cap = (min(cap, load.batch) if load.batch > 0 else cap) - load.canaries
        if self.beyond:
            cap += max(1, int(endpoint.max_batch * self.beyond))
        return cap if cap > 1 else 1

    def has_enough(self, endpoint: Endpoint) -> bool:
        """Return whether a worker has too much work to get a new request.

        This is the case if the worker is busy, or if the prompts there would take too long to prefill. It is also the case
        if the current request does not fit into the worker's KV cache.
        """
        return self.busy(endpoint) or self._reads_too_long(endpoint) or self.lacks_blocks(endpoint)

    def _reads_too_long(self, endpoint: Endpoint) -> bool:
        limit = (self._unread_s or 0.0) * endpoint.joined.profile.prefill_tokens_per_s
        if limit <= 0:
            return False
        unread = sum(self.unread_by_rank(endpoint)) + endpoint.kept.tokens
        return unread > limit * endpoint.ranks

    def lacks_blocks(self, endpoint: Endpoint) -> bool:
        """Return whether a worker is known to have too few KV blocks for the current request."""
        return self.asked is not NOTHING and not self.holds(endpoint, self.asked)

    def holds(self, endpoint: Endpoint, wanted: RequiredRoom) -> bool:
        """Return whether some DP rank of a worker has enough free KV blocks for a request that needs `wanted`.

        A rank without requests always has enough. The blocks in use are this frontend's count, plus the expected growth of
        the requests in flight. If the worker has requests of other frontends, or the rank runs a canary, this sum may be
        too low. In that case, a larger number of blocks in the rank's last report is used instead.
        """
        need, ranks, slots = -(-wanted.held // endpoint.block_tokens), endpoint.ranks, self.slots
        reported = self.plane.load_by_rank(endpoint.worker)
        external = self.plane.external_load(endpoint.worker)
        shared = external is not None and external.running + external.waiting > 0
        answer = self.lengths.known(endpoint.model) if self.limits.answers_grow else 0.0
        growth = 1 + answer / 2 / endpoint.block_tokens  # plus 1 for the block that is not full yet
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
        """Return whether each DP rank of a worker exceeds at least one threshold; False if no threshold applies."""
        thresholds = self._in_force(endpoint.model)
        return bool(thresholds) and all(
            rank is not None and rank.busy(thresholds) for rank in self.ranks(endpoint)
        )

    def _in_force(self, model: str) -> BusyThresholds:
        if self.limits.by_deadline:
            return NEARLY_FULL
        return self.thresholds(model) if self.limits.by_thresholds else NEVER

    def ranks(self, endpoint: Endpoint) -> Iterator[RankLoadSeen | None]:
        """Yield the known load of each DP rank of a worker, or None for a rank without any data."""
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
        """Return this frontend's count of prompt tokens to prefill, for each DP rank of a worker."""
        if not self.slots.paced:  # a choice may need this for a thousand workers
            return [load.reading_tokens for load in self.slots.rank_loads(endpoint.holders)]
        now = self.now()
        return [self.slots.work(holder, now=now).prefill_tokens for holder in endpoint.holders]

    # --- all workers of a model -----------------------------------------------------------------------------

    def thresholds(self, model: str) -> BusyThresholds:
        """Return the busy thresholds of a model. A threshold that operators have not set comes from the settings."""
        default = self.limits.thresholds if self.limits.by_thresholds else NEVER
        given = self.table.thresholds.get(model)
        return default if given is None else given.over(default)

    def overloaded(self, served: str) -> bool:
        """Return whether all usable workers of a model or adapter are busy by the thresholds; False if no worker is usable.

        With a thousand workers the check takes 10 ms. A positive result is cached for 0.2 ms per worker, so that a burst
        of requests does not repeat the check.
        """
        if not self.decides:
            return False
        now = self.now()
        if now < self._full_until.get(served, 0.0):
            return True
        workers = self.serving(self.table.serving(served))
        full = bool(workers) and all(self.busy(endpoint) for endpoint in workers)
        if full:
            self._full_until[served] = now + len(workers) * HOLDS_S
        return full

    def serving(self, endpoints: Iterable[Endpoint]) -> list[Endpoint]:
        """Return the endpoints that can get requests, because they are in service and connected."""
        reachable = self.plane.reachable
        return [one for one in endpoints if one.routable and reachable(one.worker, one.instance)]

    def weight(self, served: str, lineage: Lineage) -> float:
        """Return the total weight of the usable workers of a model or adapter with this lineage (revision, tokenizer)."""
        group = self.table.group(served, lineage)
        return sum(one.weight for one in self.serving(group.endpoints if group is not None else ()))

    @property
    def servable(self) -> bool:
        """Whether some worker could serve a request now."""
        return bool(self.serving(self.table.endpoints.values()))

    def roll(self) -> list[dict[str, object]]:
        """Return the state of each worker, for /health."""
        reachable = self.plane.reachable
        return [one.shown(reachable(one.worker, one.instance)) for one in self.table.endpoints.values()]
