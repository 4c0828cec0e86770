"""The cost of a request: Dynamo's published examples, each term, and the draw among the lowest."""

from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from json_types import Json

from controller.frontend.scheduling.scheduler import pricing_of
from controller.frontend.settings import RouterSettings
from controller.router.load.active_sequences import Floats
from controller.router.selection.score import USUAL, Pricing, ScoredPrompt, Terms, pick_lowest, score

BLOCK = 16
SMALL = st.floats(0, 1000)


class Scores(NamedTuple):
    """The costs of all candidates, and their terms, as columns."""

    terms: Terms
    costs: Floats


def of(values: object, size: int) -> Floats:
    return np.array(values if isinstance(values, list) else [values] * size, dtype=float)


def priced(
    pricing: Pricing | None = None, *, size: int = 1, tokens: int = 10 * BLOCK, **given: Any
) -> Scores:
    """Score a prompt of ten blocks. Arguments are one number, or one per candidate."""
    blocks = given.pop("blocks", tokens // BLOCK)
    names = (
        "to_read",
        "in_use",
        "requests",
        "lately",
        "device",
        "host",
        "disk",
        "shared",
        "sharers",
        "others",
    )
    to_read, in_use, requests, lately, device, host, disk, shared, sharers, others = (
        of(given.pop(name, 0), size) for name in names
    )
    terms = Terms(
        active_prefill_tokens=to_read, active=in_use, requests=requests, lately=lately, device=device, host=host,
        disk=disk, shared=shared, sharers=sharers, others=others, weight=of(given.pop("weights", 1), size),
    )  # fmt: skip
    assert not given
    return Scores(terms, score(pricing or Pricing(), ScoredPrompt(tokens, BLOCK, range(blocks)), terms))


def test_the_published_example() -> None:
    scores = priced(size=3, device=[2, 5, 8], in_use=[0, -5, -1])  # decode blocks 10, 5, 9
    assert scores.costs.tolist() == [18, 10, 11]
    assert pick_lowest(scores.costs, 0.0, 0.99) == 1


def cost(pricing: Pricing | None = None, **given: Any) -> float:
    return float(priced(pricing, **given).costs[0])


def test_each_term() -> None:
    assert cost() == 10 + 10  # computed, and kept
    assert cost(to_read=32) == 12 + 10
    assert cost(in_use=3) == 10 + 13
    assert cost(in_use=3, shared=2) == 10 + 11
    assert cost(others=2.5) == 10 + 12.5
    assert cost(device=4, host=2, disk=2) == 10 - 4 - 1.5 - 0.5 + 10
    assert cost(device=10, host=4) == 0 + 10  # never below zero
    assert cost(tokens=BLOCK // 2) == 0.5  # no full block
    assert cost(requests=3) == 20
    assert cost(Pricing(request_weight=2), requests=3) == 20 + 6
    assert cost(Pricing(request_tokens=32, prefill_scale=2), requests=3) == 2 * (10 + 6) + 10
    assert cost(Pricing(recent_weight=0.5, prefill_scale=2), lately=64) == 2 * (10 + 2) + 10
    assert cost(Pricing(prefill_scale=0.5), device=4) == 3 + 10
    assert cost(Pricing(overlap_credit=0.5), device=4) == 8 + 10
    assert cost(Pricing(track_blocks=False), in_use=3) == 10


def test_a_decode_only_worker_gets_credit_on_its_decode_blocks() -> None:
    only_decodes = Pricing(track_prefill=False)
    assert cost(only_decodes, to_read=99, in_use=5, device=4) == 15 - 4
    assert cost(only_decodes, device=10, in_use=-5) == 0


def test_half_the_weight_doubles_the_cost() -> None:
    usual, halved = (cost(weights=weight, to_read=32, device=4, in_use=3) for weight in (1, 0.5))
    assert halved == 2 * usual


def test_cached_blocks_count_less_on_workers_with_more_to_read() -> None:
    fades = Pricing(credit_decay=2.0)
    scores = priced(fades, size=2, to_read=[160, 320], device=10)
    assert scores.terms.decay.tolist() == [1, 1 / 3]
    assert scores.costs.tolist() == pytest.approx([20 - 10 + 10, 30 - 10 / 3 + 10])
    assert priced(fades, blocks=0, to_read=[0, 320], size=2).terms.decay == 1, "for all of them"


def test_the_terms_add_up_to_the_cost() -> None:
    terms = priced(
        size=2, to_read=[0, 32], in_use=[0, 3], shared=[0, 1], device=[0, 4], host=[0, 2], weights=0.5
    ).terms.at(1)
    assert (terms.prefill, terms.credit, terms.adjusted_prefill) == (12, 5.5, 6.5)
    assert (terms.active, terms.shared, terms.decode) == (3, 1, 12)
    assert (terms.device, terms.host, terms.disk, terms.active_prefill_tokens) == (4, 2, 0, 32)
    assert terms.cost == (6.5 + 12) / 0.5
    assert list(terms.shown().items())[-2:] == [("weight", 0.5), ("cost", terms.cost)]


def test_a_worker_without_weight_costs_infinity() -> None:
    scores = priced(size=2, weights=[0.0, 1.0])
    assert scores.terms.at(0).cost == scores.costs[0] == float("inf") > scores.terms.at(1).cost


PRICINGS = st.builds(
    Pricing,
    overlap_credit=st.floats(0, 4),
    credit_decay=st.sampled_from([0.0, 1.0]),
    prefill_scale=st.floats(0, 20),
    request_weight=st.floats(0, 3),
    request_tokens=st.floats(0, 512),
    recent_weight=st.floats(0, 1),
    track_prefill=st.booleans(),
    track_blocks=st.booleans(),
)
ROWS = st.tuples(SMALL, SMALL, SMALL, *[st.integers(0, 10)] * 6, st.floats(0.1, 1))


@given(PRICINGS, st.lists(ROWS, min_size=1, max_size=3))
def test_the_cost_can_be_recomputed_from_terms_and_pricing(pricing: Pricing, rows: list[object]) -> None:
    names = (
        "to_read",
        "in_use",
        "lately",
        "requests",
        "device",
        "host",
        "disk",
        "shared",
        "sharers",
        "weights",
    )
    columns: Json = dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))
    scores = priced(pricing, size=len(rows), others=1.5, **columns)
    for place in range(len(rows)):
        t = scores.terms.at(place)
        extra = max(pricing.overlap_credit - 1, 0) if pricing.track_prefill else 0
        each = pricing.overlap_credit - extra * (1 - 1 / (1 + t.sharers))
        slower = pricing.host_weight * t.host + pricing.disk_weight * t.disk
        assert t.credit == pytest.approx(each * t.decay * t.device + (1 + extra) * slower)
        assert t.copy == extra * 10
        assert t.prefill == (pricing.track_prefill and (t.active_prefill_tokens + 160) / BLOCK)
        assert t.adjusted_prefill == pytest.approx(max(t.prefill + t.copy - t.credit, 0))
        beside = (pricing.request_tokens * t.requests + pricing.recent_weight * t.lately) / BLOCK
        assert t.waiting == pytest.approx(pricing.prefill_scale * (t.adjusted_prefill + beside))
        assert t.decode == pytest.approx(t.active + t.others + 10 - t.shared)
        kept = t.decode if pricing.track_blocks else 0
        assert t.kept == pytest.approx(kept if pricing.track_prefill else max(kept - t.credit, 0))
        assert t.in_flight == pytest.approx(pricing.request_weight * t.requests)
        assert t.cost == pytest.approx((t.waiting + t.kept + t.in_flight) / t.weight)
        assert t.cost == scores.costs[place], "the cost shown is the cost compared"


def test_a_block_on_a_slower_tier_is_worth_its_share_of_a_device_block_at_any_credit() -> None:
    for credit in (1.0, 3.0):
        free = Pricing(overlap_credit=credit, track_blocks=False)
        gains = [cost(free) - cost(free, **{tier: 4}) for tier in ("device", "host", "disk")]
        assert gains == pytest.approx([4 * credit, 3 * credit, credit])


def test_an_empty_prompt_has_no_cost() -> None:
    with pytest.raises(ValueError, match="empty prompt"):
        priced(tokens=0)


def test_a_credit_above_one_is_the_extra_cost_of_a_missing_block() -> None:
    dear = Pricing(overlap_credit=3, track_blocks=False)
    assert cost(dear) == 10 + 20
    assert cost(dear, device=10) == 0
    assert cost(dear, device=4) == 6 + 12
    assert cost(dear, device=10, to_read=5 * BLOCK) == 5  # the unread prompts of others still count


def test_the_usual_pricing_is_the_frontends_default() -> None:
    assert pricing_of(RouterSettings()) == USUAL


def test_requests_that_share_a_prefix_share_the_cost_of_a_copy() -> None:
    dear = Pricing(overlap_credit=3, track_blocks=False)
    assert [cost(dear, device=10, sharers=n) for n in (0, 1, 3)] == [0, 10, 15]
    assert cost(Pricing(track_blocks=False), device=10, sharers=3) == 0


@given(st.lists(st.tuples(SMALL, SMALL, st.integers(0, 10), st.integers(0, 10)), min_size=1, max_size=5))
def test_cost_rises_with_load_and_falls_with_cached_blocks(rows: list[object]) -> None:
    to_read, in_use, device, shared = (list(column) for column in zip(*rows, strict=True))
    given: Json = {"size": len(rows), "in_use": in_use, "shared": shared}
    costs = priced(to_read=to_read, device=device, **given).costs
    assert (costs >= 0).all()
    assert (priced(to_read=[one + 16 for one in to_read], device=device, **given).costs >= costs).all()
    assert (priced(to_read=to_read, device=[one + 1 for one in device], **given).costs <= costs).all()


def drawn(costs: list[float], temperature: float, draws: int = 1000) -> Counter[int]:
    """Pick with evenly spaced draws."""
    return Counter(pick_lowest(np.array(costs), temperature, n / draws) for n in range(draws))


def test_exact_ties_are_drawn_evenly() -> None:
    assert drawn([3, 1, 2, 1, 1], 0.0) == {1: 334, 3: 333, 4: 333}
    assert drawn([2, 2], 0.7) == {0: 500, 1: 500}


@pytest.mark.slow
def test_a_temperature_lets_higher_costs_win_by_their_relative_distance() -> None:
    counts = drawn([10, 20, 30], 0.5, 10_000)
    chances = np.exp([0, -1, -2])
    assert [counts[n] for n in range(3)] == pytest.approx((chances / chances.sum() * 10_000).tolist(), abs=2)
    assert drawn([10, 20, 30], 0.5) == drawn([1, 2, 3], 0.5)
    assert drawn([10, 20, 30], 1e-9) == {0: 1000}


@example([0.0, 1.0], 2.2e-311, 0.0)  # so small that dividing by it overflows
@given(st.lists(SMALL, min_size=1, max_size=6), st.floats(0, 5), st.floats(0, 1, exclude_max=True))
def test_a_draw_always_picks_a_candidate(costs: list[float], temperature: float, draw: float) -> None:
    place = pick_lowest(np.array(costs), temperature, draw)
    assert 0 <= place < len(costs)
    assert temperature > 0 or costs[place] == min(costs)
