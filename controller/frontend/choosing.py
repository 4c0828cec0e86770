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
from dataclasses import asdict
from typing import Any

import structlog

from controller.frontend.meter import Meter
from controller.frontend.plan import Plan
from controller.frontend.settings import RouterSettings
from controller.ports import Plane
from controller.router.approximate import ApproximateCache, better
from controller.router.kv_index import Matches
from controller.router.kv_view import KvView
from controller.router.modes import Choice, Chooser, Mode
from controller.router.pick import Filter
from controller.router.score import Pricing, Prompt
from controller.router.slots import SlotTracker
from controller.router.table import Holder, Key, Seat, Table

log = structlog.get_logger(__name__)


class Choosing:
    """One frontend's choices, and what follows from them for the next ones."""

    def __init__(
        self,
        settings: RouterSettings,
        table: Table,
        plane: Plane,
        meter: Meter,
        now: Callable[[], float],
        dice: Callable[[], float],
    ) -> None:
        self._table = table
        self._meter = meter
        self._now = now
        self._dice = dice
        self._others = None if settings.replica_sync else plane.others  # else they tell our tracker
        self._by_rank = plane.others_by_rank
        self._usual = pricing_of(settings)
        self._mode = Mode(settings.mode)
        self._reuse = settings.assume_kv_reuse
        self._paced = settings.prefill_load_model == "profile"
        self._serial = itertools.count(1)
        self.view: KvView | None = None  # who has what, of those who say it
        self._guesses: ApproximateCache[Holder] = ApproximateCache(ttl_s=settings.ttl_secs)
        self.slots: SlotTracker[Holder] = SlotTracker(track_output=settings.track_output_blocks)
        self._chooser = Chooser(self.slots)

    # --- the choice ---------------------------------------------------------------------------------------

    def choose(self, among: Filter | Sequence[Seat], plan: Plan, said: Sequence[int] = ()) -> Choice:
        """Return where a request goes: to one of the seats that a filter leaves, or of these, at least one. `said`: accepted
        tokens behind its prompt. Raise NoWorker."""
        mode, pricing, now = self._mode, self._usual, self._now()
        if (wished := plan.wishes.router) is not None:
            mode, pricing = Mode(wished.mode), pricing_of(wished)
        return self._chooser.choose(
            among,
            self._prompt(plan, said, mode, now),
            now=now,
            draw=self._dice(),
            mode=mode,
            pricing=pricing,
            others=self._others,
            by_rank=self._by_rank,
        )

    def _prompt(self, plan: Plan, said: Sequence[int], mode: Mode, now: float) -> Prompt[Holder]:
        """Return what is to be placed. Where workers have blocks of several sizes, it is reckoned in those that most have."""
        kin = self._table.kin(plan.model, plan.lineage)
        sizes = kin.block_sizes if kin is not None else (1,)
        tokens, size = len(plan.prompt) + len(said), sizes[0]
        if mode is not Mode.KV and not plan.wishes.explain:
            return Prompt(tokens, size)
        blocks = plan.names.of(size, said)
        found = self._cached(blocks, now)
        if len(sizes) > 1:
            for other in sizes[1:]:
                found = better(found, _scaled(self._cached(plan.names.of(other, said), now), other / size))
        return Prompt(tokens, size, blocks, found)

    def _cached(self, blocks: Sequence[int], now: float) -> Matches[Holder]:
        """Return how many of these blocks each rank has: what they say, and what we guess."""
        if self.view is None:
            return self._guesses.find(blocks, now=now)
        said = self.view.index.find(blocks)
        return better(said, self._guesses.find(blocks, now=now)) if self._guesses else said

    # --- what there is to do --------------------------------------------------------------------------------

    def begin(self, choice: Choice, plan: Plan, said: Sequence[int]) -> int:
        """A request goes where it was chosen to. Return the number under which it is counted there."""
        question = choice.question
        prompt = question.prompt
        self._meter.chosen(plan.model, choice.mode, choice.overlap_blocks, prompt.required_blocks)
        return self._add(choice.seat, choice.holder, plan, said, choice.prefill_tokens, question.now, prompt)

    def carry(self, seat: Seat, rank: int, plan: Plan, said: Sequence[int]) -> int:
        """A request has come there with its KV cache: nothing of it has to be read. Return its number there."""
        return self._add(seat, Holder(seat.worker, seat.instance, rank), plan, said, 0, self._now())

    def _add(
        self,
        seat: Seat,
        holder: Holder,
        plan: Plan,
        said: Sequence[int],
        prefill_tokens: int,
        now: float,
        prompt: Prompt[Holder] | None = None,
    ) -> int:
        wished, slot, size = plan.wishes.router, next(self._serial), seat.block_tokens
        tokens = len(plan.prompt) + len(said)
        blocks: Sequence[int] = ()
        if (self._mode if wished is None else wished.mode) == Mode.KV:
            named = prompt is not None and prompt.block_tokens == size and prompt.tokens == tokens
            blocks = prompt.blocks if prompt is not None and named else plan.names.of(size, said)
        shared = blocks if (self._reuse if wished is None else wished.assume_kv_reuse) else ()
        self.slots.add(
            slot,
            holder,
            shared,
            now=now,
            prefill_tokens=prefill_tokens,
            block_tokens=size,
            own_blocks=0 if shared else tokens // size,
            expected_s=self._reading_s(seat, prefill_tokens) if self._paced else None,
        )
        if blocks and (self.view is None or not seat.joined.kv_events):
            self._guesses.sent(holder, blocks, now=now)
        return slot

    def _reading_s(self, seat: Seat, tokens: int) -> float | None:
        """Return how long reading so many tokens takes there, if that is known."""
        rate = seat.joined.profile.prefill_tokens_per_s
        return tokens / rate if rate > 0 else None

    def unread(self, seat: Seat) -> float:
        """Return how many prompt tokens of requests at a worker are still to be read, over all of its ranks."""
        holders = [Holder(seat.worker, seat.instance, rank) for rank in range(seat.ranks)]
        if self.slots.paced:
            return sum(self.slots.work(holder, now=self._now()).prefill_tokens for holder in holders)
        return sum(work.reading_tokens for work in self.slots.standing(holders))

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
        self.slots.prefill_done(slot, now=self._now())

    def said(self, slot: int, tokens: int) -> None:
        """So many more tokens of its answer are here."""
        self.slots.said(slot, tokens)

    def end(self, slot: int) -> None:
        """It is over there, however it ended."""
        self.slots.free(slot, now=self._now())

    def expire(self) -> None:
        """Forget requests of which nobody has said for an hour that they are over, and what is cached no more."""
        self._guesses.expire(now=self._now())
        if stale := self.slots.expire(now=self._now()):
            log.warning("slots_expired", requests=len(stale))

    def follow(self, view: KvView) -> None:
        """Know from now on by KV events what is cached: they come in there."""
        self.view = view

    def forget(self, keys: Collection[Key]) -> None:
        """Drop the memory of seats that are gone; keep `keys`."""
        self._chooser.forget(keys)
        for holder in [holder for holder in self.slots.holders if holder[:2] not in keys]:
            self.slots.forget(holder, now=self._now())
            self._guesses.forget(holder)


def _scaled(found: Matches[Holder], factor: float) -> Matches[Holder]:
    """Return matches in blocks of another size: each counts `factor` of those."""
    device, host, disk = (
        {holder: int(count * factor) for holder, count in tier.items()}
        for tier in (found.device, found.host, found.disk)
    )
    return Matches(device, host, disk)


def explained(choice: Choice) -> dict[str, Any]:
    """Return why a worker was chosen, for people: each candidate's cost, term by term. To be asked before it is begun."""
    prompt, places = choice.question.prompt, choice.question.places
    return {
        "mode": choice.mode,
        "chosen": _named(choice.holder, choice.seat),
        "prompt_tokens": prompt.tokens,
        "block_tokens": prompt.block_tokens,
        "required_blocks": prompt.required_blocks,
        "candidates": [
            _named(one.holder, places.seat[places.at[one.holder]]) | asdict(one.terms)
            for one in choice.explain()
        ],
    }


def _named(holder: Holder, seat: Seat) -> dict[str, Any]:
    return {**holder._asdict(), "ranks": seat.ranks}


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
