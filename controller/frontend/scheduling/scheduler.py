"""Which worker gets a request? Filter, score, pick, and what follows from each choice for the next ones.

    what the fleet says, connections, ─▶ filter ─▶ score ─▶ pick ─▶ begin ─▶ read ─▶ end
    own breakers, room                               ▲                └───────┴──────┴── the slot tracker
          names of its blocks ─▶ where they are cached                                     │
          what each worker has to do ◀─────────────────────────────────────────────────────┘

What is cached is known from the workers' KV events; of workers that say nothing of it, it is guessed from what was sent to
them. What there is to do is counted here, in the turn of the loop in which a request is sent: the next one sees it.

Where panic has begun, what this frontend knows of failures is ignored for as long as it lasts.
"""

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from math import inf
from typing import Any, NamedTuple

import structlog

from controller.frontend.health.local_breakers import Panic
from controller.frontend.request.failures import smallest_limit
from controller.frontend.request.state import GenerationRequest
from controller.frontend.request_metrics import RequestMetrics
from controller.frontend.scheduling.pools import Pools
from controller.frontend.settings import FrontendSettings, RouterSettings
from controller.ports import RequestPlane
from controller.router.endpoints import Endpoint, EndpointGroup, EndpointTable, Key, Lineage, WorkerRank
from controller.router.index.approximate import ApproximateCache, better
from controller.router.index.index import Depths, Matches
from controller.router.index.view import KvView
from controller.router.load.active_sequences import ActiveSequences
from controller.router.load.monitor import LoadLimits, LoadMonitor
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

log = structlog.get_logger(__name__)

_KV = Mode.KV  # to look a member of an enum up takes as long as a call
HEARD_S = 3.5  # three reports may be lost


class _Heard(NamedTuple):
    """What one frontend said last."""

    at: float
    waiting: tuple[str, ...]  # models for which requests wait there


class Peers:
    """The other frontends that serve beside this one, and where requests of theirs wait for room. They say each second which
    workers they hear, and how many requests wait there."""

    def __init__(self, now: Callable[[], float], name: str = "") -> None:
        self._now = now
        self._name = name  # this one's
        self._heard: dict[str, _Heard] = {}
        self._names: Sequence[str] = ()
        self._size = 1
        self.any = False  # others were heard, and perhaps are silent since: each choice asks
        self._until = -inf  # none of them is silent for too long before
        self.contenders: dict[str, int] = {}  # by model, frontends whose requests wait for its workers

    def on_links(self, subject: str, body: Mapping[str, Any]) -> None:
        """Hear a frontend's report of its links."""
        name, waiting = str(body.get("frontend")), body.get("waiting")
        models = tuple(str(model) for model in waiting) if isinstance(waiting, Mapping) else ()
        before = self._heard.get(name)
        self._heard[name] = _Heard(self._now(), models)
        self.any = self.any or name != self._name
        if before is None:
            self._until = -inf
        if before is None or before.waiting != models:
            self._count()

    def names(self) -> Sequence[str]:
        """Return those that serve now, as far as is known, and forget the others. Each choice asks."""
        now = self._now()
        if now > self._until:
            since = now - HEARD_S
            self._heard = {name: heard for name, heard in self._heard.items() if heard.at >= since}
            self._names = sorted(self._heard)
            self._size = len({*self._names, self._name}) if self._names else 1
            self.any = self._size > 1
            self._until = min((heard.at for heard in self._heard.values()), default=now) + HEARD_S
            self._count()
        return self._names

    def _count(self) -> None:
        self.contenders.clear()
        for name, heard in self._heard.items():
            for model in heard.waiting if name != self._name else ():
                self.contenders[model] = self.contenders.get(model, 1) + 1

    def frontends(self) -> int:
        """Return how many frontends serve now, this one included. Each choice asks."""
        self.names()
        return self._size


class RoutingState:
    """What is cached where, and what was sent where."""

    def __init__(
        self, router: RouterSettings, metrics: RequestMetrics, pools: Pools | None, now: Callable[[], float]
    ) -> None:
        """Begin with nothing. `pools`: measures how fast workers are; None: not measured."""
        self._router = router
        self._metrics = metrics
        self._pools = pools
        self._now = now
        self._paced = router.prefill_load_model == "profile"
        self._serial = itertools.count(1)
        self.view: KvView | None = None  # what is cached where, of the workers that say it
        self._guesses = ApproximateCache(ttl_s=router.ttl_secs)
        self.slots = ActiveSequences(track_output=router.track_output_blocks)

    # --- what was sent --------------------------------------------------------------------------------------

    def begin(self, choice: Selection, plan: GenerationRequest, output: Sequence[int]) -> int:
        """Count a request at the chosen worker. Return its slot number."""
        endpoint, holder, unread, pools = choice.endpoint, choice.holder, choice.prefill_tokens, self._pools
        prompt, now = choice.request.prompt, choice.request.now
        self._metrics.chosen(plan.model, choice.mode, choice.overlap_blocks, prompt.required_blocks)
        blocks = prompt.blocks if prompt.block_tokens == endpoint.block_tokens else None
        if pools is None:
            return self._add(endpoint, holder, plan, output, unread, now, blocks)
        ahead = self.slots.work(holder, now=self._now()).prefill_tokens
        slot = self._add(endpoint, holder, plan, output, unread, now, blocks)
        pools.sent(slot, endpoint, ahead, unread)
        return slot

    def carry(self, endpoint: Endpoint, rank: int, plan: GenerationRequest, output: Sequence[int]) -> int:
        """A request has come there with its KV cache: nothing of it has to be read. Return its number there."""
        holder = WorkerRank(endpoint.worker, endpoint.instance, rank)
        return self._add(endpoint, holder, plan, output, 0, self._now())

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
        """Count a request. `blocks`: the names of its full blocks of the worker's size, where they are known."""
        router, slot, size = plan.overrides.router or self._router, next(self._serial), endpoint.block_tokens
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
        """Its first token is here."""
        if self._pools is not None:
            self._pools.read(slot)
        self.slots.prefill_done(slot, now=now)

    def end(self, slot: int, now: float) -> None:
        """Release the slot, however the request ended."""
        if self._pools is not None:
            self._pools.end(slot)
        self.slots.free(slot, now=now)

    # --- what is cached -------------------------------------------------------------------------------------

    def cached(self, blocks: Sequence[int], now: float) -> Matches:
        """Return how many of these blocks each rank has: what they say, and what we guess."""
        if self.view is None:
            return self._guesses.find(blocks, now=now)
        found = self.view.find(blocks)
        return better(found, self._guesses.find(blocks, now=now)) if self._guesses else found

    def uncached(self, group: EndpointGroup, names: BlockNames, tokens: int) -> int:
        """Return how many of a prompt's tokens none of these workers has on its device."""
        size = group.block_sizes[0]
        found, keys = self.cached(names.of(size), self._now()).device, group.keys
        if isinstance(found, Depths):
            deepest = found.deepest(keys)
        else:
            deepest = max((depth for holder, depth in found.items() if holder[:2] in keys), default=0)
        return max(0, tokens - deepest * size)

    def claimed(self, choice: Selection) -> int:
        """Return how many prompt tokens the chosen rank itself says it has cached; 0 where it says nothing that matters."""
        prompt, size = choice.request.prompt, choice.endpoint.block_tokens
        if self.view is None or choice.overlap_blocks < 1 or prompt.block_tokens != size:
            return 0
        return self.view.find(prompt.blocks).device.get(choice.holder, 0) * size

    def compare(self, holder: WorkerRank, claimed: int, cached: int) -> None:
        """Compare what a rank claimed with what a request found there."""
        if self.view is not None:
            self.view.compare(holder, claimed, cached)

    @property
    def known(self) -> str:
        """What is known of what workers have cached, as a line for people."""
        guessed = f"{self.guessed} blocks guessed from what was sent"
        return guessed if self.view is None else f"{self.view.health}, {guessed}"

    @property
    def guessed(self) -> int:
        """How many blocks are taken to be cached where no worker says so."""
        return len(self._guesses)

    # --- what is gone ---------------------------------------------------------------------------------------

    def expire(self) -> None:
        """Forget requests whose end was not reported within an hour, and expired cache entries."""
        now = self._now()
        self._guesses.expire(now=now)
        if stale := self.slots.expire(now=now):
            log.warning("slots_expired", requests=len(stale))

    def forget(self, keys: Collection[Key]) -> None:
        """Drop the memory of endpoints that are gone; keep `keys`."""
        for holder in [holder for holder in self.slots.holders if holder[:2] not in keys]:
            self.slots.forget(holder, now=self._now())
            self._guesses.forget(holder)


class Scheduler:
    """One frontend's choices of workers."""

    def __init__(
        self,
        settings: FrontendSettings,
        table: EndpointTable,
        plane: RequestPlane,
        metrics: RequestMetrics,
        peers: Peers,
        panic: Panic,
        now: Callable[[], float],
        dice: Callable[[], float],
    ) -> None:
        self._settings = settings
        self.table = table
        self._plane = plane
        self._peers = peers
        self._panic = panic
        self._breakers, self._open = panic.breakers, panic.breakers.open
        self._now = now
        self._dice = dice
        router, self._by_deadline = settings.router, settings.by_deadline
        self._usual, self._mode = pricing_of(router), Mode(router.mode)
        self.pools = Pools(now)
        self.state = RoutingState(router, metrics, self.pools if self._by_deadline else None, now)
        self.slots = self.state.slots
        self.monitor = LoadMonitor(limits_of(settings), table, plane, self.slots, now)
        self._chooser, self._picker = Chooser(self.slots), Picker()
        self._others = None if router.replica_sync else plane  # else they tell our tracker
        self._rules = Rules(plane, self.monitor, contenders=peers.contenders)
        self._ignoring = False  # own breakers, for the choice that is made now
        self.live = False  # before the fold has caught up, it is history, and no reason for panic
        self.frontends = peers.frontends  # how many share the workers, this one included

    # --- the filter -----------------------------------------------------------------------------------------

    def _look(self, model: str) -> Sequence[Endpoint]:
        """Return a model's endpoints. See whether there is panic, and bring the filter's rules up to date."""
        endpoints = self.table.models.get(model, ())
        self._ignoring = False  # nearly always, all is calm
        if self._open or self._panic.models:
            self._ignoring = self.live and self._panic.ignores(model, endpoints)
        self._refresh()
        return endpoints

    def _refresh(self) -> None:
        rules, peers = self._rules, self._peers
        frontends = peers.frontends() if peers.any else 1
        # With deadlines each frontend may have one request at a worker beyond what is free of its batch, whatever the others have
        # there, and no more: what waits at a worker waits for its next place alone.
        rules.frontends = MANY if frontends > 1 and self._by_deadline else frontends
        rules.barred = self._breakers.barred() if self._open and not self._ignoring else ()

    def _filter(
        self, plan: GenerationRequest, room: Headroom = Headroom.FRESH, tried: Collection[Key] = ()
    ) -> Filter:
        """Return the filter among the endpoints of a request's lineage."""
        self._look(plan.model)
        group = self.table.group(plan.model, plan.lineage)
        endpoints = group.endpoints if group is not None else ()
        return Filter(endpoints, self._rules, tried, room, plan.tokens_max)

    def look_for_panic(self) -> None:
        """The fold or a breaker may have moved: see whether panic has begun or ended anywhere."""
        if self.live:
            for model in self.table.known:
                self._panic.look(model, self.table.models.get(model, ()))

    def room(self, model: str, lineage: Lineage | None = None, without: Collection[Key] = ()) -> Endpoint:
        """Return an endpoint, none of `without`, with room for a new request of any lineage or of this one. Raise NoWorker."""
        endpoints = self._look(model)
        if lineage is not None:
            group = self.table.group(model, lineage)
            endpoints = group.endpoints if group is not None else ()
        if without:
            endpoints = [endpoint for endpoint in endpoints if endpoint.key not in without]
        return self._picker.room(endpoints, self._rules)

    def lineage(self, model: str) -> Lineage:
        """Return the lineage that a new request of a model would be bound to. Raise NoWorker."""
        try:
            return self.room(model).lineage
        except AllBusy:
            return self._picker.pick(self._look(model), self._rules, room=Headroom.NONE).lineage

    def shortlist(self, plan: GenerationRequest) -> list[Endpoint]:
        """Return the endpoints that could take a new request: those with room, or all, if none has any. Raise NoWorker."""
        try:
            return self._filter(plan).left()
        except (AllBusy, AllClosed):
            return self._filter(plan, Headroom.NONE).left()

    def room_at(self, endpoint: Endpoint, lineage: Lineage, tokens: int = 0) -> None:
        """See whether this endpoint could take a request of so many tokens. Raise NoWorker."""
        self._refresh()
        Filter([endpoint] if endpoint.lineage == lineage else [], self._rules, tokens=tokens).left()

    def targets(self, plan: GenerationRequest) -> list[Endpoint]:
        """Return all endpoints that could take requests like this one that have begun, none if there is none."""
        try:
            return self._filter(plan, Headroom.HELD).left()
        except NoWorker:
            return []

    def has_room(self, endpoint: Endpoint, room: Headroom) -> bool:
        """Say whether an endpoint has so much room for one request more."""
        self._refresh()
        return Filter((endpoint,), self._rules, room=room).has_room(endpoint)

    def takes(self, endpoint: Endpoint) -> bool:
        """Say whether an endpoint that could take a request a moment ago still can: one on trial takes a single one."""
        allowed = self._ignoring or self._breakers.allowed(endpoint)
        return allowed and self._plane.reachable(endpoint.worker, endpoint.instance)

    # --- score and pick -------------------------------------------------------------------------------------

    def route(
        self,
        plan: GenerationRequest,
        tried: Collection[Key],
        output: Sequence[int] = (),
        *,
        room: Headroom = Headroom.HELD,
    ) -> Selection:
        """Return where a request's next attempt goes, none of `tried`, with so much room. `output` was accepted of its answer.
        Raise NoWorker."""
        among = self._filter(plan, room, tried)
        if room is not Headroom.FRESH or not self._by_deadline:
            return self.choose(among, plan, output)
        tokens, answer_max = len(plan.prompt) + len(output), plan.sampling.max_tokens
        monitor = self.monitor
        with monitor.asking(monitor.wanted(plan.model, tokens, answer_max, plan.names), monitor.beyond):
            return self.choose(among, plan, output)

    def choose(
        self, among: Filter | Sequence[Endpoint], plan: GenerationRequest, output: Sequence[int] = ()
    ) -> Selection:
        """Return where a request goes: to one of the endpoints that a filter leaves, or of these, at least one. `output`:
        accepted tokens behind its prompt. Raise NoWorker."""
        mode, pricing, now, overrides = self._mode, self._usual, self._now(), plan.overrides
        if overrides.router is not None:
            mode, pricing = Mode(overrides.router.mode), pricing_of(overrides.router)
        if overrides.explain and isinstance(among, Filter):
            among = among.left()
        prompt = self._prompt(plan, output, mode, now)
        return self._chooser.choose(
            among, prompt, now=now, draw=self._dice(), mode=mode, pricing=pricing, others=self._others
        )

    def _prompt(self, plan: GenerationRequest, output: Sequence[int], mode: Mode, now: float) -> ScoredPrompt:
        """Return what is to be placed. Where workers have blocks of several sizes, it is measured in those that most have."""
        group = self.table.group(plan.model, plan.lineage)
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

    # --- what a model's workers have in common --------------------------------------------------------------

    def limit(self, model: str) -> int:
        """Return how many migrations a request of this model may have."""
        own, registered = self._settings.migration_limit, self.table.migration_limit(model)
        return own if registered is None else smallest_limit(own, (registered,))

    def group(self, model: str, lineage: Lineage) -> EndpointGroup:
        """Return the workers of a model and lineage, and what they have in common. Raise NotServed."""
        group = self.table.group(model, lineage)
        if group is None:
            raise NotServed
        return group

    def forget(self, keys: Collection[Key]) -> None:
        """Drop the memory of endpoints that are gone; keep `keys`."""
        self._picker.forget(keys)
        self._chooser.forget(keys)
        self.state.forget(keys)


def explained(choice: Selection) -> dict[str, Any]:
    """Return why a worker was chosen, for people: each candidate's cost, term by term. To be asked before it is begun."""
    prompt, candidates = choice.request.prompt, choice.request.candidates
    return {
        "mode": choice.mode,
        "chosen": _named(choice.holder, choice.endpoint),
        "prompt_tokens": prompt.tokens,
        "block_tokens": prompt.block_tokens,
        "required_blocks": prompt.required_blocks,
        "candidates": [
            _named(holder, candidates.endpoint[candidates.at[holder]]) | terms.shown()
            for holder, terms in choice.explain()
        ],
    }


def _named(holder: WorkerRank, endpoint: Endpoint) -> dict[str, Any]:
    return {**holder._asdict(), "ranks": endpoint.ranks}


def pricing_of(settings: RouterSettings) -> Pricing:
    """Return what each term of the cost weighs by these settings."""
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
    """Return how much a worker may have to do by these settings."""
    return LoadLimits(
        settings.admission.inflight_max,
        settings.inflight_per_batch,
        settings.thresholds,
        settings.admission_control == "token-capacity",
        settings.router.queue_prefill_s,
        settings.by_deadline,
        not settings.router.track_output_blocks,
    )
