"""A token that differs at a near tie convicts no worker; a difference anywhere else still does."""

import itertools
from typing import Any

import pytest
from canary_world import FakeWorker, World

from controller.runtime.canary.goldens import CanaryAnswer, HiddenTies, compare, settled_part
from controller.runtime.settings import CanarySettings
from events.observations import CanaryFailed, GoldenDisputed, GoldenProposed, TopK

LONG_S = 900.0  # some 300 canaries per worker


def seeded(number: int, **more: object) -> FakeWorker:
    worker = FakeWorker(**more)  # type: ignore[arg-type]
    worker.draw.seed(number)
    return worker


def a_fleet(settings: CanarySettings | None = None, workers: int = 2, **more: object) -> World:
    """Return a world with workers that all flip one in five near ties."""
    world = World(settings or CanarySettings(interval_s=3.0))
    for number in range(workers):
        world.join(f"w{number}", seeded(number, flips=0.2, **more))
    return world


def everything(world: World) -> set[str]:
    return {world.status(name) for name in world.fleet.workers}


# --- whole fleets -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("position", [0, 12])
async def test_one_flip_in_five_at_a_near_tie_convicts_no_worker_and_disputes_no_golden(
    position: int,
) -> None:
    world = a_fleet(ties=(position,))
    async with world.running():
        await world.pass_time(LONG_S)
    assert not world.facts(CanaryFailed)
    assert not world.facts(GoldenDisputed)
    assert everything(world) == {"HEALTHY"}
    assert all(worker.asked > 250 for worker in world.plane.workers.values())


@pytest.mark.slow
async def test_a_golden_that_was_recorded_with_a_near_tie_in_it_convicts_no_worker() -> None:
    """Goldens on the journal of an earlier version contain near ties."""
    world = a_fleet(CanarySettings(interval_s=3.0, margin_min=0.0), ties=(12, 20))
    async with world.running():
        await world.pass_time(LONG_S)
    assert any(len(fact.tokens) == 32 for fact in world.facts(GoldenProposed))
    assert not world.facts(CanaryFailed)
    assert everything(world) == {"HEALTHY"}


async def test_a_canary_is_truncated_before_its_first_near_tie() -> None:
    world = a_fleet(CanarySettings(interval_s=3.0, unmarked_every=0), ties=(12, 20))
    async with world.running():
        await world.pass_time(120)
    assert {len(fact.tokens) for fact in world.facts(GoldenProposed)} == {12}
    asked = {r.sampling.max_tokens for w in world.plane.workers.values() for r in w.requests[-5:]}
    assert asked == {12}


async def test_a_wrong_token_before_or_beside_the_tie_is_still_convicted_at_once() -> None:
    world = a_fleet(ties=(12,))
    async with world.running():
        await world.pass_time(120)
        world.plane.workers["w1"].corrupt = lambda request: True  # at position 5
        await world.until(lambda: world.status("w1") == "UNHEALTHY", 15)
    assert world.status("w0") == "HEALTHY"


@pytest.mark.slow
@pytest.mark.parametrize("position", [3, 31])
async def test_without_logprobs_one_flip_in_five_convicts_no_worker(position: int) -> None:
    for seed in range(3):
        world = World(CanarySettings(interval_s=3.0))
        for number in range(2):
            fake = seeded(10 * seed + number, flips=0.2, ties=(position,), logprobs=False)
            world.join(f"w{number}", fake)
        async with world.running():
            await world.pass_time(LONG_S)
        assert everything(world) == {"HEALTHY"}
        assert not [fact for fact in world.facts(CanaryFailed) if fact.confirmed]


@pytest.mark.slow
async def test_without_logprobs_a_worker_that_is_always_wrong_is_convicted_by_the_first_canary() -> None:
    world = World(CanarySettings(interval_s=10.0))
    for name in ("w0", "w1", "w2"):
        world.join(name, FakeWorker(logprobs=False))
    async with world.running():
        await world.pass_time(120)
        world.plane.workers["w1"].corrupt = lambda request: True
        await world.until(lambda: world.status("w1") == "UNHEALTHY", 15)
    (failed,) = [fact for fact in world.facts(CanaryFailed) if fact.worker == "w1"][:1]
    assert failed.confirmed
    assert failed.attempts == CanarySettings().blind_repeats


async def test_without_logprobs_the_only_worker_that_answers_both_ways_is_doubted() -> None:
    world = World(CanarySettings(interval_s=10.0))
    for name in ("w0", "w1", "w2"):
        world.join(name, FakeWorker(logprobs=False))
    async with world.running():
        await world.pass_time(120)
        turn = itertools.count()
        world.plane.workers["w1"].corrupt = lambda request: next(turn) % 2 == 0
        await world.pass_time(60)
    assert [fact for fact in world.facts(CanaryFailed) if fact.worker == "w1" and not fact.confirmed]
    assert world.status("w0") == world.status("w2") == "HEALTHY"


# --- one comparison -----------------------------------------------------------------------------------------

TIED = ((5, -0.69), (6, -0.70), (7, -6.0))
WIDE = ((8, -0.1), (9, -2.5), (7, -3.0))
GOLDEN: dict[str, Any] = {"tokens": (8, 5, 8), "top_k": (WIDE, TIED, WIDE), "tolerance": 1e-3}


def reason(said: tuple[int, ...], tops: tuple[TopK, ...], **more: Any) -> str | None:
    return compare(CanaryAnswer(said, tops), **{**GOLDEN, "tie_margin": 0.1, **more}).reason


def test_a_flip_at_a_near_tie_is_no_difference_and_what_follows_is_not_compared() -> None:
    flipped = ((5, -0.6904), (6, -0.6996), (7, -6.0))
    assert reason((8, 6, 1), (WIDE, flipped, ((1, -0.1), (2, -4.0)))) is None
    assert reason((8, 6, 1), (WIDE, flipped, WIDE), tie_margin=0.0) == "token_mismatch"


def test_a_token_that_leads_by_more_than_the_tie_margin_must_be_the_goldens() -> None:
    assert reason((9, 5, 8), (WIDE, TIED, WIDE)) == "token_mismatch"
    assert reason((9, 5, 8), (WIDE, TIED, WIDE), tie_margin=2.5) is None


def test_a_token_that_the_golden_does_not_list_was_below_its_last_entry() -> None:
    assert reason((8, 1, 8), (WIDE, TIED, WIDE)) == "token_mismatch"


def test_a_near_tie_excuses_no_drift_of_the_logprobs() -> None:
    assert reason((8, 6, 8), (WIDE, ((6, -0.2), (5, -1.7), (7, -6.0)), WIDE)) == "logit_drift"


def test_a_golden_with_a_token_far_from_the_best_is_no_near_tie() -> None:
    """An engine that does not choose its best token must not make all others agree with it."""
    strange = {"tokens": (1, 5, 8), "top_k": (WIDE, TIED, WIDE)}
    assert reason((8, 5, 8), (WIDE, TIED, WIDE), **strange) == "token_mismatch"


def test_a_configured_answer_is_excused_by_the_margin_that_the_answer_itself_shows() -> None:
    configured = {"tokens": (8, 5), "top_k": (), "tolerance": 0.0}
    assert reason((8, 6), (WIDE, TIED), **configured) is None
    assert reason((9, 5), (WIDE, TIED), **configured) == "token_mismatch"


def test_without_logprobs_a_difference_is_marked_as_blind() -> None:
    found = compare(CanaryAnswer((8, 6, 8)), tokens=(8, 5, 8), top_k=(), tolerance=0.0, tie_margin=0.1)
    assert (found.reason, found.position, found.blind) == ("token_mismatch", 1, True)
    seen = compare(CanaryAnswer((9, 5, 8), (WIDE,) * 3), **GOLDEN, tie_margin=0.1)
    assert not seen.blind


def test_an_answer_becomes_a_golden_up_to_its_first_near_tie_or_to_what_was_not_repeated() -> None:
    tokens = (8,) * 16
    tied = CanaryAnswer(tokens, (WIDE,) * 9 + (TIED,) + (WIDE,) * 6)
    wide = CanaryAnswer(tokens, (WIDE,) * 16)
    other = CanaryAnswer((*(8,) * 11, *(9,) * 5), (WIDE,) * 16)
    early = CanaryAnswer(tokens, (TIED,) + (WIDE,) * 15)
    assert settled_part(tied, tied, 0.02) == CanaryAnswer(tokens[:9], (WIDE,) * 9, shortened=True)
    assert settled_part(wide, wide, 0.02) == wide
    assert settled_part(wide, other, 0.02) == wide.begin(11)
    assert settled_part(early, early, 0.02) == early  # too little would be left
    assert settled_part(early, other, 0.02) is None


def test_a_hidden_tie_is_accepted_when_two_workers_or_the_only_one_show_it() -> None:
    ties = HiddenTies()
    assert not ties.note("c", 5, "w1", alone=False)
    assert not ties.note("c", 5, "w1", alone=False)
    assert not ties.note("c", 9, "w2", alone=False)
    assert ties.note("c", 5, "w2", alone=False)
    assert ties.first("c") == 5
    assert ties.note("c", 7, "w3", alone=False)  # behind it
    assert ties.note("d", 3, "w1", alone=True)
