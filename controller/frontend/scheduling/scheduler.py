"""Which of those that may serve a request gets it, and what do we know that speaks for one of them?

    names of its blocks ─▶ who has them cached ─┐
                          who is how busy ──────┴─▶ choose ─▶ begin ─▶ read ─▶ end
                             ▲                                   └───────┴──────┴── the slot tracker
                             └──────────────────────────────────────────────────────────┘

What is cached is known from the workers' KV events; of workers that say nothing of it, it is guessed from what was sent to
them. What there is to do is counted here, in the turn of the loop in which a request is sent: the next one sees it.
"""

import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import structlog

from controller.frontend.request.block_hashes import BlockNames
from controller.frontend.request.generation_request import GenerationRequest
from controller.frontend.request_metrics import RequestMetrics
from controller.frontend.scheduling.pools import Pools
from controller.frontend.settings import RouterSettings
from controller.ports import RequestPlane
from controller.router.endpoints import Endpoint, EndpointGroup, EndpointTable, Key, WorkerRank
from controller.router.index.approximate import ApproximateCache, better
from controller.router.index.matches import Depths, Matches
from controller.router.index.view import KvView
from controller.router.load.active_sequences import ActiveSequences, RankWork
from controller.router.selection.filter import Filter
from controller.router.selection.score import Pricing, ScoredPrompt
from controller.router.selection.selector import Chooser, Mode, Selection

log = structlog.get_logger(__name__)


class KvScheduler:
    """One frontend's choices, and what follows from them for the next ones."""

    def __init__(
        self,
        settings: RouterSettings,
        table: EndpointTable,
        plane: RequestPlane,
        meter: RequestMetrics,
        now: Callable[[], float],
        dice: Callable[[], float],
        pools: Pools | None = None,
    ) -> None:
        """Choose by these settings. `pools`, if there are any, are told what is sent and read."""
        self._table = table
        self._meter = meter
        self.now = now
        self._dice = dice
        self._pools = pools
        self._external_load = (
            None if settings.replica_sync else plane.external_load
        )  # else they tell our tracker
        self._by_rank = plane.external_load_by_rank
        self._usual = pricing_of(settings)
        self._mode = Mode(settings.mode)
        self._reuse = settings.assume_kv_reuse
        self._paced = settings.prefill_load_model == "profile"
        self._serial = itertools.count(1)
        self.view: KvView | None = None  # who has what, of those who say it
        self._guesses = ApproximateCache(ttl_s=settings.ttl_secs)
        self.slots = ActiveSequences(track_output=settings.track_output_blocks)
        self._chooser = Chooser(self.slots)

    # --- the choice ---------------------------------------------------------------------------------------

    def choose(
        self, among: Filter | Sequence[Endpoint], plan: GenerationRequest, output: Sequence[int] = ()
    ) -> Selection:
        """Return where a request goes: to one of the endpoints that a filter leaves, or of these, at least one. `output`:
        accepted tokens behind its prompt. Raise NoWorker."""
        mode, pricing, now = self._mode, self._usual, self.now()
        if (overrides := plan.overrides.router) is not None:
            mode, pricing = Mode(overrides.mode), pricing_of(overrides)
        return self._chooser.choose(
            among,
            self._prompt(plan, output, mode, now),
            now=now,
            draw=self._dice(),
            mode=mode,
            pricing=pricing,
            external_load=self._external_load,
            by_rank=self._by_rank,
        )

    def _prompt(self, plan: GenerationRequest, output: Sequence[int], mode: Mode, now: float) -> ScoredPrompt:
        """Return what is to be placed. Where workers have blocks of several sizes, it is reckoned in those that most have."""
        group = self._table.group(plan.model, plan.lineage)
        sizes = group.block_sizes if group is not None else (1,)
        tokens, size = len(plan.prompt) + len(output), sizes[0]
        if mode is not Mode.KV and not plan.overrides.explain:
            return ScoredPrompt(tokens, size)
        blocks = plan.names.of(size, output)
        found = self._cached(blocks, now)
        if len(sizes) > 1:
            for other in sizes[1:]:
                found = better(found, _scaled(self._cached(plan.names.of(other, output), now), other / size))
        return ScoredPrompt(tokens, size, blocks, found)

    def _cached(self, blocks: Sequence[int], now: float) -> Matches:
        """Return how many of these blocks each rank has: what they say, and what we guess."""
        if self.view is None:
            return self._guesses.find(blocks, now=now)
        found = self.view.find(blocks)
        return better(found, self._guesses.find(blocks, now=now)) if self._guesses else found

    def uncached(self, group: EndpointGroup, names: BlockNames, tokens: int) -> int:
        """Return how many of a prompt's tokens none of these workers has on its device."""
        size = group.block_sizes[0]
        found, keys = self._cached(names.of(size), self.now()).device, group.keys
        if isinstance(found, Depths):
            deepest = found.deepest(keys)
        else:
            deepest = max((depth for holder, depth in found.items() if holder[:2] in keys), default=0)
        return max(0, tokens - deepest * size)

    # --- what there is to do --------------------------------------------------------------------------------

    def begin(self, choice: Selection, plan: GenerationRequest, output: Sequence[int]) -> int:
        """A request goes where it was chosen to. Return the number under which it is counted there."""
        request = choice.request
        prompt = request.prompt
        self._meter.chosen(plan.model, choice.mode, choice.overlap_blocks, prompt.required_blocks)
        pools, ahead = self._pools, 0.0
        if pools is not None:
            ahead = self.work(choice.holder).prefill_tokens
        slot = self._add(
            choice.endpoint, choice.holder, plan, output, choice.prefill_tokens, request.now, prompt
        )
        if pools is not None:
            pools.sent(slot, choice.endpoint, ahead, choice.prefill_tokens)
        return slot

    def carry(self, endpoint: Endpoint, rank: int, plan: GenerationRequest, output: Sequence[int]) -> int:
        """A request has come there with its KV cache: nothing of it has to be read. Return its number there."""
        return self._add(
            endpoint, WorkerRank(endpoint.worker, endpoint.instance, rank), plan, output, 0, self.now()
        )

    def _add(
        self,
        endpoint: Endpoint,
        holder: WorkerRank,
        plan: GenerationRequest,
        output: Sequence[int],
        prefill_tokens: int,
        now: float,
        prompt: ScoredPrompt | None = None,
    ) -> int:
        overrides, slot, size = plan.overrides.router, next(self._serial), endpoint.block_tokens
        tokens = len(plan.prompt) + len(output)
        blocks: Sequence[int] = ()
        if (self._mode if overrides is None else overrides.mode) == Mode.KV:
            named = prompt is not None and prompt.block_tokens == size and prompt.tokens == tokens
            blocks = prompt.blocks if prompt is not None and named else plan.names.of(size, output)
        shared = blocks if (self._reuse if overrides is None else overrides.assume_kv_reuse) else ()
        self.slots.add(
            slot,
            holder,
            shared,
            now=now,
            prefill_tokens=prefill_tokens,
            block_tokens=size,
            own_blocks=0 if shared else tokens // size,
            expected_s=self._reading_s(endpoint, prefill_tokens) if self._paced else None,
        )
        if blocks and (self.view is None or not endpoint.joined.kv_events):
            self._guesses.sent(holder, blocks, now=now)
        return slot

    def _reading_s(self, endpoint: Endpoint, tokens: int) -> float | None:
        """Return how long reading so many tokens takes there, if that is known."""
        rate = endpoint.joined.profile.prefill_tokens_per_s
        return tokens / rate if rate > 0 else None

    def work(self, holder: WorkerRank) -> RankWork:
        """Return what a DP rank has to do for requests that we know of. Of its columns only where they shrink with time: a choice
        among a thousand workers asks for each."""
        if self.slots.paced:
            return self.slots.work(holder, now=self.now())
        (load,) = self.slots.rank_loads((holder,))
        return RankWork(load.reading_tokens, load.blocks, len(load.requests))

    def in_use(self, holder: WorkerRank, blocks: Sequence[int]) -> int:
        """Return how many of these blocks, from the first on, requests at a DP rank have in use."""
        depths, _ = self.slots.shared(blocks, self.slots.rows((holder,)))
        return int(depths[0])

    def unread(self, endpoint: Endpoint) -> float:
        """Return how many prompt tokens of requests at a worker are still to be read, over all of its ranks."""
        holders = [WorkerRank(endpoint.worker, endpoint.instance, rank) for rank in range(endpoint.ranks)]
        if self.slots.paced:
            return sum(self.slots.work(holder, now=self.now()).prefill_tokens for holder in holders)
        return sum(work.reading_tokens for work in self.slots.rank_loads(holders))

    def unread_by_rank(self, endpoint: Endpoint) -> list[float]:
        """Return the same for each of its DP ranks."""
        holders = [WorkerRank(endpoint.worker, endpoint.instance, rank) for rank in range(endpoint.ranks)]
        return [self.work(holder).prefill_tokens for holder in holders]

    @property
    def known(self) -> str:
        """What is known of what workers have cached, as a line for people."""
        guessed = f"{len(self._guesses)} blocks guessed from what was sent"
        return guessed if self.view is None else f"{self.view.health}, {guessed}"

    @property
    def guessed(self) -> int:
        """How many blocks are taken to be cached where nobody says so."""
        return len(self._guesses)

    def read(self, slot: int) -> None:
        """Its first token is here."""
        if self._pools is not None:
            self._pools.read(slot)
        self.slots.prefill_done(slot, now=self.now())

    def output(self, slot: int, tokens: int) -> None:
        """So many more tokens of its answer are here."""
        self.slots.output(slot, tokens)

    def end(self, slot: int) -> None:
        """It is over there, however it ended."""
        if self._pools is not None:
            self._pools.end(slot)
        self.slots.free(slot, now=self.now())

    def expire(self) -> None:
        """Forget requests of which nobody has said for an hour that they are over, and what is cached no more."""
        self._guesses.expire(now=self.now())
        if stale := self.slots.expire(now=self.now()):
            log.warning("slots_expired", requests=len(stale))

    def claimed(self, choice: Selection) -> int:
        """Return how many prompt tokens the chosen rank itself says it has cached; 0 where it says nothing that matters."""
        prompt = choice.request.prompt
        if (
            self.view is None
            or choice.overlap_blocks < 1
            or prompt.block_tokens != choice.endpoint.block_tokens
        ):
            return 0
        return self.view.find(prompt.blocks).device.get(choice.holder, 0) * prompt.block_tokens

    def compare(self, holder: WorkerRank, claimed: int, cached: int) -> None:
        """Compare what a rank claimed with what a request found there."""
        if self.view is not None:
            self.view.compare(holder, claimed, cached)

    def follow(self, view: KvView) -> None:
        """Know from now on by KV events what is cached: they come in there."""
        self.view = view

    def forget(self, keys: Collection[Key]) -> None:
        """Drop the memory of endpoints that are gone; keep `keys`."""
        self._chooser.forget(keys)
        for holder in [holder for holder in self.slots.holders if holder[:2] not in keys]:
            self.slots.forget(holder, now=self.now())
            self._guesses.forget(holder)


def _scaled(found: Matches, factor: float) -> Matches:
    """Return matches in blocks of another size: each counts `factor` of those."""
    device, host, disk = (
        {holder: int(count * factor) for holder, count in tier.items()}
        for tier in (found.device, found.host, found.disk)
    )
    return Matches(device, host, disk)


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
            _named(one.holder, candidates.endpoint[candidates.at[one.holder]]) | one.terms.shown()
            for one in choice.explain()
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
