"""What one frontend's choices of workers depend on, and what each choice changes for the next ones.

    choose ─▶ begin ─▶ read ─▶ end      what each worker has to do: the slot tracker (`ActiveSequences`)
                └── names of its blocks ─▶ what is cached where

What is cached is known from the workers' KV events; of workers that say nothing of it, it is guessed from what was sent to
them. What there is to do is counted here, in the turn of the loop in which a request is sent: the next one sees it.
"""

import itertools
from collections.abc import Callable, Collection, Sequence

import structlog

from controller.frontend.request.state import GenerationRequest
from controller.frontend.request_metrics import RequestMetrics
from controller.frontend.scheduling.pools import Pools
from controller.frontend.settings import RouterSettings
from controller.router.endpoints import Endpoint, EndpointGroup, Key, WorkerRank
from controller.router.index.approximate import ApproximateCache, better
from controller.router.index.index import Depths, Matches
from controller.router.index.view import KvView
from controller.router.load.active_sequences import ActiveSequences
from controller.router.selection.selector import Selection
from events.blocks import BlockNames

log = structlog.get_logger(__name__)


class RoutingState:
    """What is cached where, and what was sent where."""

    def __init__(
        self, router: RouterSettings, metrics: RequestMetrics, pools: Pools | None, now: Callable[[], float]
    ) -> None:
        """Begin with nothing. `pools`: measures how fast workers are; None: no one needs it."""
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
        """A request goes where it was chosen to. Return the number under which it is counted there."""
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
        """It is over there, however it ended."""
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
        """Forget requests of which it was not said for an hour that they are over, and what is cached no more."""
        now = self._now()
        self._guesses.expire(now=now)
        if stale := self.slots.expire(now=now):
            log.warning("slots_expired", requests=len(stale))

    def forget(self, keys: Collection[Key]) -> None:
        """Drop the memory of endpoints that are gone; keep `keys`."""
        for holder in [holder for holder in self.slots.holders if holder[:2] not in keys]:
            self.slots.forget(holder, now=self._now())
            self._guesses.forget(holder)
