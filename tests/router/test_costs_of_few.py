"""The costs of a few candidates, computed one by one, equal those of the columns."""

import pytest
from filter_rules import Links
from hypothesis import given, settings
from hypothesis import strategies as st
from router_kit import BLOCK, endpoint

from controller.router.endpoints import WorkerRank
from controller.router.index.index import Matches
from controller.router.load.active_sequences import ActiveSequences
from controller.router.selection.score import USUAL, Pricing, ScoredPrompt
from controller.router.selection.selector import FEW, Candidates, ScoringRequest
from events.wire import Load

PRICINGS = st.sampled_from(
    [
        USUAL,
        Pricing(),
        Pricing(overlap_credit=0.5, request_weight=2.0, request_tokens=64.0, recent_weight=3.0),
        Pricing(track_prefill=False, overlap_credit=3.0),
        Pricing(track_blocks=False),
    ]
)
COUNT = st.integers(0, 4)


@settings(max_examples=60)
@given(
    PRICINGS,
    st.lists(
        st.tuples(COUNT, COUNT, COUNT, st.sampled_from([0.0, 0.25, 1.0]), st.booleans(), st.integers(1, 3)),
        min_size=1, max_size=4,
    ),
    st.integers(1, 5),
    st.sampled_from([None, 1.0, 0.25]),
)  # fmt: skip
def test_the_costs_are_those_of_the_columns(
    pricing: Pricing,
    workers: list[tuple[int, int, int, float, bool, int]],
    blocks: int,
    reported: float | None,
) -> None:
    endpoints = [endpoint(f"w{n}", one[3], kv_events=one[4], dp=one[5]) for n, one in enumerate(workers)]
    names, slots, serial = list(range(1, blocks + 1)), ActiveSequences(), iter(range(100))
    found = {}
    for n, (cached, used, alone, _, _, _) in enumerate(workers):
        holder = WorkerRank(f"w{n}", "i1")
        if cached:
            found[holder] = min(cached, blocks)
        for _ in range(used):
            slots.add(next(serial), holder, names[:used], now=0.0, prefill_tokens=7 * used)
        if alone:
            slots.add(next(serial), holder, [100 + n], now=0.0, own_blocks=alone)
    prompt = ScoredPrompt(blocks * BLOCK + 3, BLOCK, names, Matches(found, found, found))
    others = Links(external=lambda worker: Load(active_tokens=40, weight=reported)) if reported else None
    candidates = Candidates.of(tuple(endpoints), slots)
    request = ScoringRequest(candidates, prompt, pricing, slots, others, 4.0, 0.5)
    request.plane = others or Links(external=lambda worker: Load(weight=0.5))
    costs = request.costs_of_few()
    assert costs == pytest.approx(request.costs.tolist(), rel=1e-12)
    assert request.device == request.terms.device.tolist()


def test_complex_cases_are_left_to_the_columns() -> None:
    slots = ActiveSequences()
    candidates = Candidates.of((endpoint("w1"),), slots)
    none = dict[WorkerRank, int]()
    prompt = ScoredPrompt(BLOCK, BLOCK, [1], Matches(none, none, none))

    def simple(prompt: ScoredPrompt = prompt, pricing: Pricing = USUAL) -> bool:
        return ScoringRequest(candidates, prompt, pricing, slots, None, 0.0, 0.5).costs_of_few() is not None

    assert simple()
    assert not simple(pricing=Pricing(credit_decay=1.0))
    assert not simple(ScoredPrompt(BLOCK, BLOCK, [1], Matches({}, {}, {})))
    many = Candidates.of(tuple(endpoint(f"w{n}") for n in range(FEW + 1)), slots)
    assert ScoringRequest(many, prompt, USUAL, slots, None, 0.0, 0.5).costs_of_few() is None
    slots.add("r", WorkerRank("w1", "i1"), [1], now=0.0, prefill_tokens=16, expected_s=1.0)
    assert not simple()
