"""The scheduler: chooses each request's worker by filter, score and pick, and tracks the load.

    fleet's decisions, connections, ─▶ filter ─▶ score ─▶ pick ─▶ begin ─▶ read ─▶ end
    local breakers, room                              ▲                └───────┴──────┴── the slot tracker
          names of its blocks ─▶ where they are cached                                      │
          each worker's outstanding work ◀──────────────────────────────────────────────────┘

`begin`, `read` and `end` are the events of a request: sent, first token, left its worker. From these, the slot
tracker computes the outstanding work of each worker.

Cached blocks are known from the workers' KV events. If a worker publishes none, its cached blocks are guessed from the
requests sent to this worker. Outstanding work is counted when a request is sent, in the same event-loop iteration, so
the next choice includes it.

If too little of a model's capacity is routable (panic), this frontend's local breakers are ignored.
"""

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

import structlog

from controller.deciders.capacity import tpot_ms
from controller.frontend.health.local_breakers import LocalBreakers
from controller.frontend.request.state import GenerationRequest
from controller.frontend.request_metrics import RequestMetrics
from controller.frontend.settings import FrontendSettings, RouterSettings
from controller.ports import RequestPlane
from controller.router.endpoints import Endpoint, EndpointGroup, EndpointTable, Key, Lineage, WorkerRank
from controller.router.index.approximate import ApproximateCache, better
from controller.router.index.index import Depths, Matches
from controller.router.index.view import KvView
from controller.router.load.active_sequences import ActiveSequences
from controller.router.load.monitor import LoadLimits, LoadMonitor
from controller.router.load.work import FirstTokens, reading_s
from controller.router.selection.filter import (
    MANY,
    AllBusy,
    AllClosed,
    Filter,
    Headroom,
    NotServed,
    NoWorker,
    Picker,
    Rules,
)
from controller.router.selection.score import Pricing, ScoredPrompt
from controller.router.selection.selector import Chooser, Mode, Selection
from events.blocks import BlockNames

PoolName = tuple[str, Lineage]


def step_s(endpoint: Endpoint) -> float:
    """Return the registered duration in seconds of a worker's step with a full batch, or 0 if none was registered.

    A registered duration of 10 s or more is ignored.
    """
    found = tpot_ms(endpoint.joined.profile, max(1, endpoint.max_batch)) / 1000
    return found if found < 10.0 else 0.0


log = structlog.get_logger(__name__)

_KV = Mode.KV  # looking up an enum member takes as long as a call
# seconds after a report for which a frontend counts as serving, so that three reports may be lost
HEARD_S = 3.5


class _LinksReport(NamedTuple):
    """The last report of another frontend: its time of arrival, and the models of that frontend's waiting requests."""

    at: float
    waiting: tuple[str, ...]  # models for which requests wait at that frontend


@dataclass(eq=False, repr=False)
class Peers:
    """The other frontends that serve now, and the models of the requests that wait at each of these frontends.

    Every second, each frontend publishes the workers that it reaches, and the number of its waiting requests by model.
    """

    now: Callable[[], float]
    name: str = ""  # name of this frontend
    # whether another frontend has reported; it may be silent by now, which each choice checks
    any: bool = False
    # by model: number of frontends at which requests wait, with this one
    contenders: dict[str, int] = field(default_factory=dict)
    _heard: dict[str, _LinksReport] = field(default_factory=dict)
    _size: int = 1
    _until: float = inf  # no frontend counts as silent before this time

    def on_links(self, subject: str, body: Mapping[str, object]) -> None:
        """Process another frontend's report of its links and waiting requests."""
        waiting = body.get("waiting")
        models = tuple(str(model) for model in waiting) if isinstance(waiting, Mapping) else ()
        self._heard[str(body.get("frontend"))] = _LinksReport(self.now(), models)
        self._count()

    def names(self) -> Sequence[str]:
        """Return the names of the frontends with a recent report, and drop the others."""
        self.frontends()
        return sorted(self._heard)

    def _count(self) -> None:
        self._size = len({*self._heard, self.name})
        self._until = min((heard.at for heard in self._heard.values()), default=inf) + HEARD_S
        self.any = self._size > 1
        self.contenders.clear()
        for name, heard in self._heard.items():
            for model in heard.waiting if name != self.name else ():
                self.contenders[model] = self.contenders.get(model, 1) + 1

    def frontends(self) -> int:
        """Return the number of frontends that serve now, including this one, and drop the silent ones.

        This is called for each choice of a worker, so it usually returns a cached number.
        """
        now = self.now()
        if now > self._until:
            since = now - HEARD_S
            self._heard = {name: heard for name, heard in self._heard.items() if heard.at >= since}
            self._count()
        return self._size


@dataclass(eq=False, repr=False)
class RoutingState:
    """What this frontend knows of cached KV blocks, and of its requests at each DP rank of a worker.

    If `timed` is true, the times to first token of each worker pool are also measured. Admission by deadlines needs
    them for its predictions. A pool is the workers of one model and lineage (model revision and tokenizer).
    """

    router: RouterSettings
    metrics: RequestMetrics
    timed: bool
    now: Callable[[], float]
    view: KvView | None = None  # cached blocks reported by workers with KV events
    _pools: dict[PoolName, FirstTokens] = field(default_factory=dict)
    # by slot number: pool, worker, time of sending, and in seconds the prefill of the prompts ahead, its own prefill,
    # one step
    _sent: dict[int, tuple[PoolName, str, float, float, float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        router, self._serial = self.router, itertools.count(1)
        self._paced = router.prefill_load_model == "profile"
        self._guesses = ApproximateCache(ttl_s=router.ttl_secs)
        self.slots = ActiveSequences(track_output=router.track_output_blocks)

    # --- sent requests --------------------------------------------------------------------------------------

    def begin(self, choice: Selection, plan: GenerationRequest, output: Sequence[int]) -> int:
        """Count a request at its chosen worker, before it is sent. Return the request's slot number."""
        endpoint, holder, unread = choice.endpoint, choice.holder, choice.prefill_tokens
        prompt, now = choice.request.prompt, choice.request.now
        self.metrics.chosen(plan.model, choice.mode, choice.overlap_blocks, prompt.required_blocks)
        blocks = prompt.blocks if prompt.block_tokens == endpoint.block_tokens else None
        ahead = self.slots.work(holder, now=self.now()).prefill_tokens if self.timed else 0.0
        slot = self._add(endpoint, holder, plan, output, unread, now, blocks)
        if self.timed:
            self.sent(slot, endpoint, ahead, unread)
        return slot

    def add_arrived(
        self, endpoint: Endpoint, rank: int, plan: GenerationRequest, output: Sequence[int]
    ) -> int:
        """Count a request that arrived with its KV cache, so nothing has to be prefilled.

        Return the request's number in the slot tracker.
        """
        holder = WorkerRank(endpoint.worker, endpoint.instance, rank)
        return self._add(endpoint, holder, plan, output, 0, self.now())

    def _add(
        self,
        endpoint: Endpoint,
        holder: WorkerRank,
        plan: GenerationRequest,
        output: Sequence[int],
        unread: int,
        now: float,
        blocks: Sequence[int] | None = None,
    ) -> int:
        """Count a request and return its slot number. `unread` is the number of prompt tokens to prefill.

        `blocks` are the names of the prompt's full blocks in the worker's block size, or None if they must be computed.
        """
        router, slot, size = plan.overrides.router or self.router, next(self._serial), endpoint.block_tokens
        if router.mode != "kv":
            blocks = ()
        elif blocks is None:
            blocks = plan.names.of(size, output)
        shared = blocks if router.assume_kv_reuse else ()
        rate = endpoint.joined.profile.prefill_tokens_per_s if self._paced else 0.0
        self.slots.add(
            slot,
            holder,
            shared,
            now=now,
            prefill_tokens=unread,
            block_tokens=size,
            own_blocks=0 if shared else (len(plan.prompt) + len(output)) // size,
            expected_s=unread / rate if rate > 0 else None,
        )
        if blocks and (self.view is None or not endpoint.joined.kv_events):
            self._guesses.sent(holder, blocks, now=now)
        return slot

    def read(self, slot: int, now: float) -> None:
        """Record that the first token of the request in this slot has arrived."""
        if (sent := self._sent.pop(slot, None)) is not None:
            name, worker, at, ahead_s, own_s, steps_s = sent
            self.first_tokens(*name).came(worker, ahead_s, own_s, steps_s, now - at)
        self.slots.prefill_done(slot, now=now)

    def end(self, slot: int, now: float) -> None:
        """Release the slot, whatever the outcome of its request."""
        self._sent.pop(slot, None)
        self.slots.free(slot, now=now)

    # --- times to first token -------------------------------------------------------------------------------

    def first_tokens(self, model: str, lineage: Lineage) -> FirstTokens:
        """Return the measured times to first token of a model's workers of this lineage (model revision and tokenizer)."""
        if (pool := self._pools.get((model, lineage))) is None:
            pool = self._pools[model, lineage] = FirstTokens()
        return pool

    def sent(self, slot: int, endpoint: Endpoint, ahead_tokens: float, own_tokens: float) -> None:
        """Record that a request was sent to a DP rank of a worker.

        The rank first prefills `ahead_tokens` tokens of other prompts, then `own_tokens` tokens of this one.
        """
        profile = endpoint.joined.profile
        ahead_s, own_s = reading_s(ahead_tokens, profile), reading_s(own_tokens, profile)
        name = (endpoint.model, endpoint.lineage)
        self._sent[slot] = name, endpoint.worker, self.now(), ahead_s, own_s, step_s(endpoint)
        self.first_tokens(*name).sent(ahead_s)

    def keep(self, names: Collection[PoolName], workers: set[str]) -> None:
        """Keep only the measurements of the pools in `names`, and in each pool only those of `workers`."""
        self._pools = {name: pool for name, pool in self._pools.items() if name in names}
        for pool in self._pools.values():
            pool.retain(workers)

    # --- cached blocks --------------------------------------------------------------------------------------

    def cached(self, blocks: Sequence[int], now: float) -> Matches:
        """Return how many leading blocks of a prompt each rank has cached.

        The numbers come from KV events, or from this frontend's guesses.
        """
        if self.view is None:
            return self._guesses.find(blocks, now=now)
        found = self.view.find(blocks)
        return better(found, self._guesses.find(blocks, now=now)) if self._guesses else found

    def uncached(self, group: EndpointGroup, names: BlockNames, tokens: int) -> int:
        """Return how many of a prompt's tokens the group's best worker would have to prefill.

        The best worker is the one with the most leading blocks of the prompt in its device cache.
        """
        size = group.block_sizes[0]
        found, keys = self.cached(names.of(size), self.now()).device, group.keys
        if isinstance(found, Depths):
            deepest = found.deepest(keys)
        else:
            deepest = max((depth for holder, depth in found.items() if holder[:2] in keys), default=0)
        return max(0, tokens - deepest * size)

    def claimed(self, choice: Selection) -> int:
        """Return how many prompt tokens the chosen rank has cached according to its own KV events.

        Return 0 if the rank publishes no KV events.
        """
        prompt, size = choice.request.prompt, choice.endpoint.block_tokens
        if self.view is None or choice.overlap_blocks < 1 or prompt.block_tokens != size:
            return 0
        return self.view.find(prompt.blocks).device.get(choice.holder, 0) * size

    def compare(self, holder: WorkerRank, claimed: int, cached: int) -> None:
        """Compare two numbers of cached tokens at a rank, to detect false claims.

        `claimed` is the number that the rank's KV events claim. `cached` is the number that a request found.
        """
        if self.view is not None:
            self.view.compare(holder, claimed, cached)

    @property
    def known(self) -> str:
        """A summary of the reported and the guessed cached blocks, for display."""
        guessed = f"{self.guessed} blocks guessed from what was sent"
        return guessed if self.view is None else f"{self.view.health}, {guessed}"

    @property
    def guessed(self) -> int:
        """Number of blocks assumed to be cached at workers that do not report them."""
        return len(self._guesses)

    # --- cleanup --------------------------------------------------------------------------------------------

    def expire(self) -> None:
        """Drop requests that have not ended within an hour: the notice of their end must have been lost.

        Also drop expired guesses of cached blocks.
        """
        now = self.now()
        self._guesses.expire(now=now)
        if stale := self.slots.expire(now=now):
            log.warning("slots_expired", requests=len(stale))

    def forget(self, keys: Collection[Key]) -> None:
        """Forget the requests and cached blocks of endpoints that are not in `keys`, because they have left."""
        for holder in [holder for holder in self.slots.holders if holder[:2] not in keys]:
            self.slots.forget(holder, now=self.now())
            self._guesses.forget(holder)


@dataclass(eq=False, repr=False)
class Scheduler:
    """Chooses the worker of each request of one frontend."""

    settings: FrontendSettings
    table: EndpointTable
    plane: RequestPlane
    metrics: RequestMetrics
    peers: Peers
    breakers: LocalBreakers
    now: Callable[[], float]
    dice: Callable[[], float]
    # whether the fold has caught up; before that it shows past states, which must not cause panic
    live: bool = False
    _ignoring: bool = False  # whether local breakers are ignored for the current choice

    def __post_init__(self) -> None:
        settings, plane, now = self.settings, self.plane, self.now
        router, self._by_deadline = settings.router, settings.by_deadline
        self._open = self.breakers.open
        self._default_pricing, self._mode = pricing_of(router), Mode(router.mode)
        self.state = RoutingState(router, self.metrics, self._by_deadline, now)
        self.slots = slots = self.state.slots
        self.monitor = LoadMonitor(limits_of(settings), self.table, plane, slots, now)
        self._chooser, self._picker = Chooser(slots, plane), Picker()
        # source of other frontends' load; None if the slot tracker counts their requests
        self._others = None if router.replica_sync else plane
        self._rules = Rules(plane, self.monitor, contenders=self.peers.contenders)
        # number of frontends that share the workers, including this one
        self.frontends = self.peers.frontends

    # --- the filter -----------------------------------------------------------------------------------------

    def _look(self, served: str) -> Sequence[Endpoint]:
        """Update the panic state and the filter's rules, then return the endpoints of a model or adapter."""
        self._ignoring = False  # no panic, the common case
        if self._open or self.breakers.panicked:
            model = self.table.model_of(served)
            self._ignoring = self.live and self.breakers.ignored(model, self.table.models.get(model, ()))
        self._refresh()
        return self.table.serving(served)

    def _group_for(self, plan: GenerationRequest) -> EndpointGroup | None:
        """Return the workers with a request's model, lineage and adapter, or None if there are none.

        An adapter's name can pass to another model while the request runs.
        """
        group = self.table.group(plan.served, plan.lineage)
        return group if group is None or group.endpoints[0].model == plan.model else None

    def _refresh(self) -> None:
        rules, peers = self._rules, self.peers
        frontends = peers.frontends() if peers.any else 1
        # With deadlines, each frontend may have only one request at a worker beyond its free batch slots, whatever
        # the other frontends send. A request that waits at a worker thus waits only for the worker's next slot.
        rules.frontends = MANY if frontends > 1 and self._by_deadline else frontends
        rules.barred = self.breakers.barred() if self._open and not self._ignoring else ()

    def _filter(
        self, plan: GenerationRequest, room: Headroom = Headroom.FRESH, tried: Collection[Key] = ()
    ) -> Filter:
        """Return a filter for a request, over the endpoints that the request may be sent to.

        These endpoints have the request's lineage (model revision and tokenizer) and adapter, and are not in `tried`.
        """
        self._look(plan.served)
        group = self._group_for(plan)
        endpoints = group.endpoints if group is not None else ()
        return Filter(endpoints, self._rules, tried, room, plan.tokens_max)

    def look_for_panic(self) -> None:
        """Check for all models whether panic has begun or ended.

        In panic, a model's local breakers are ignored. Called after a change of the fleet state or of a breaker.
        """
        if self.live:
            for model in self.table.known:
                self.breakers.look_for_panic(model, self.table.models.get(model, ()))

    def room(self, served: str, lineage: Lineage | None = None, without: Collection[Key] = ()) -> Endpoint:
        """Return an endpoint with room for a new request to a model or adapter.

        `lineage` restricts the endpoints to one model revision and tokenizer, unless it is None. Endpoints in `without`
        are excluded. Raise NoWorker if no endpoint has room.
        """
        endpoints = self._look(served)
        if lineage is not None:
            group = self.table.group(served, lineage)
            endpoints = group.endpoints if group is not None else ()
        if without:
            endpoints = [endpoint for endpoint in endpoints if endpoint.key not in without]
        return self._picker.room(endpoints, self._rules)

    def lineage(self, served: str) -> Lineage:
        """Return the lineage (model revision and tokenizer) to which a new request to a model or adapter would be bound.

        Raise NoWorker if no worker can serve it.
        """
        try:
            return self.room(served).lineage
        except AllBusy:
            return self._picker.pick(self._look(served), self._rules, room=Headroom.NONE).lineage

    def shortlist(self, plan: GenerationRequest) -> list[Endpoint]:
        """Return the endpoints that could serve a new request: those with room, or all if none has room.

        Raise NoWorker if no endpoint can serve the request.
        """
        try:
            return self._filter(plan).left()
        except (AllBusy, AllClosed):
            return self._filter(plan, Headroom.NONE).left()

    def room_at(self, endpoint: Endpoint, lineage: Lineage, tokens: int = 0, adapter: str = "") -> None:
        """Raise NoWorker if this endpoint could not serve a request of this lineage, length and adapter."""
        self._refresh()
        fits = endpoint.lineage == lineage and endpoint.has(adapter)
        Filter([endpoint] if fits else [], self._rules, tokens=tokens).left()

    def targets(self, plan: GenerationRequest) -> list[Endpoint]:
        """Return all endpoints that could continue a request like this one, or [] if there are none."""
        try:
            return self._filter(plan, Headroom.HELD).left()
        except NoWorker:
            return []

    def has_room(self, endpoint: Endpoint, room: Headroom) -> bool:
        """Return whether an endpoint may get one more request. `room` states which limits of the endpoint apply."""
        self._refresh()
        return Filter((endpoint,), self._rules, room=room).has_room(endpoint)

    def takes(self, endpoint: Endpoint) -> bool:
        """Return whether an endpoint still accepts a request.

        A half-open breaker admits only one request, so the result can change after a request was sent.
        """
        allowed = self._ignoring or self.breakers.allowed(endpoint)
        return allowed and self.plane.reachable(endpoint.worker, endpoint.instance)

    # --- score and pick -------------------------------------------------------------------------------------

    def route(
        self,
        plan: GenerationRequest,
        tried: Collection[Key],
        output: Sequence[int] = (),
        *,
        room: Headroom = Headroom.HELD,
    ) -> Selection:
        """Return a worker for a request's next attempt. Workers in `tried` are excluded.

        `room` states which load limits apply to the worker. `output` contains the accepted tokens of the answer. Raise
        NoWorker if no worker can serve the request.
        """
        among = self._filter(plan, room, tried)
        if room is not Headroom.FRESH or not self._by_deadline:
            return self.choose(among, plan, output)
        tokens, answer_max = len(plan.prompt) + len(output), plan.sampling.max_tokens
        monitor = self.monitor
        with monitor.asking(
            monitor.required_room(plan.model, tokens, answer_max, plan.names), monitor.beyond
        ):
            return self.choose(among, plan, output)

    def choose(
        self, among: Filter | Sequence[Endpoint], plan: GenerationRequest, output: Sequence[int] = ()
    ) -> Selection:
        """Return the worker for a request, chosen among `among`: a list of endpoints, or a filter.

        The list must not be empty. With a filter, the endpoints are those that the filter permits; raise NoWorker if
        there are none. `output` contains the accepted tokens after the prompt.
        """
        mode, pricing, now, overrides = self._mode, self._default_pricing, self.now(), plan.overrides
        if overrides.router is not None:
            mode, pricing = Mode(overrides.router.mode), pricing_of(overrides.router)
        if overrides.explain and isinstance(among, Filter):
            among = among.left()
        prompt = self._prompt(plan, output, mode, now)
        return self._chooser.choose(
            among, prompt, now=now, draw=self.dice(), mode=mode, pricing=pricing, others=self._others
        )

    def _prompt(self, plan: GenerationRequest, output: Sequence[int], mode: Mode, now: float) -> ScoredPrompt:
        """Return the prompt with the data from which the cost of each worker is computed.

        If the model's workers of the request's lineage (model revision and tokenizer) have different block sizes, the
        number of blocks is counted in the most common size.
        """
        group = self._group_for(plan)
        sizes = group.block_sizes if group is not None else (1,)
        tokens, size = len(plan.prompt) + len(output), sizes[0]
        if mode is not _KV and not plan.overrides.explain:
            return ScoredPrompt(tokens, size)
        cached, names = self.state.cached, plan.names
        blocks = names.of(size, output)
        found = cached(blocks, now)
        for other in sizes[1:]:
            found = better(found, cached(names.of(other, output), now).scaled(other / size))
        return ScoredPrompt(tokens, size, blocks, found)

    # --- common values of a model's workers -----------------------------------------------------------------

    def limit(self, model: str) -> int:
        """Return the migration limit of a model: how many more attempts a request may make after its first."""
        own, registered = self.settings.migration_limit, self.table.migration_limit(model)
        return own if registered is None else min(own, registered)

    def group(self, served: str, lineage: Lineage) -> EndpointGroup:
        """Return the workers of a model or adapter, and of a lineage (revision and tokenizer), with their common limits.

        Raise NotServed if there are none.
        """
        group = self.table.group(served, lineage)
        if group is None:
            raise NotServed
        return group

    def forget(self, keys: Collection[Key]) -> None:
        """Forget all endpoints except those in `keys`, because the others have left."""
        self._picker.forget(keys)
        self._chooser.forget(keys)
        self.state.forget(keys)


def explained(choice: Selection) -> dict[str, object]:
    """Return the cost of each candidate by term, to explain the choice of a worker.

    Must be called before the request is counted at the chosen worker, because counting changes the costs.
    """
    prompt, candidates = choice.request.prompt, choice.request.candidates
    return {
        "mode": choice.mode,
        "chosen": _named(choice.holder, choice.endpoint),
        "prompt_tokens": prompt.tokens,
        "block_tokens": prompt.block_tokens,
        "required_blocks": prompt.required_blocks,
        "candidates": [
            {**_named(holder, candidates.endpoint[candidates.at[holder]]), **terms.shown()}
            for holder, terms in choice.explain()
        ],
    }


def _named(holder: WorkerRank, endpoint: Endpoint) -> dict[str, object]:
    return {**holder._asdict(), "ranks": endpoint.ranks}


def pricing_of(settings: RouterSettings) -> Pricing:
    """Return the weights of the cost terms from these settings."""
    return Pricing(
        overlap_credit=settings.kv_overlap_score_credit,
        credit_decay=settings.kv_overlap_score_credit_decay,
        prefill_scale=settings.prefill_load_scale,
        request_weight=settings.decode_active_request_weight,
        request_tokens=settings.active_request_tokens,
        recent_weight=settings.recent_prefill_weight,
        host_weight=settings.host_cache_hit_weight,
        disk_weight=settings.disk_cache_hit_weight,
        track_prefill=settings.track_prefill_tokens,
        track_blocks=settings.track_active_blocks,
        temperature=settings.temperature,
    )


def limits_of(settings: FrontendSettings) -> LoadLimits:
    """Return the load limits of a worker from these settings."""
    return LoadLimits(
        settings.admission.inflight_max,
        settings.inflight_per_batch,
        settings.thresholds,
        settings.admission_control == "token-capacity",
        settings.router.queue_prefill_s,
        settings.by_deadline,
        not settings.router.track_output_blocks,
    )
