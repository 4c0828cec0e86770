"""Sampled canaries find a worker with only its sampler broken, and convict no correct one by chance."""

import math
import random
from typing import TypeVar

import pytest
from canary_world import FakeWorker, World

from controller.deciders.fleet import DECIDERS_VERSION, FleetPolicy
from controller.runtime.canary.sampled import (
    SamplingParameters,
    combined,
    differ_by_chance,
    surprise,
)
from controller.runtime.canary.sampling_check import ACCUSED_S, ATTEMPTS_MAX, SEED
from controller.runtime.settings import CanarySettings
from events.observations import CanaryFailed, CanaryPassed, RequestsServed, TokensUnlikely

Canary = TypeVar("Canary", CanaryPassed, CanaryFailed)
ROUND_S = 5 * 2.0  # one canary in five is sampled, every 2 s


async def a_fleet(
    *names: str, settings: CanarySettings | None = None, policy: FleetPolicy | None = None, **more: object
) -> World:
    world = World(settings or CanarySettings(interval_s=2.0), policy)
    for number, name in enumerate(names):
        world.join(name, FakeWorker(draw=random.Random(number), **more))  # type: ignore[arg-type]
    return world


def sampled(world: World, kind: type[Canary]) -> list[Canary]:
    return [fact for fact in world.facts(kind) if fact.temperature is not None]


# --- whole fleets -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["nonsense", "nan"])
async def test_a_worker_with_only_its_sampler_broken_is_out_of_service_within_a_round(fault: str) -> None:
    world = await a_fleet("w1", "w2")
    async with world.running():
        await world.pass_time(20)
        world.plane.workers["w1"].sampler = fault  # type: ignore[assignment]
        await world.until(lambda: world.status("w1") == "UNHEALTHY", ROUND_S + 15)
    (failed, *_) = sampled(world, CanaryFailed)
    assert (failed.worker, failed.confirmed, failed.golden) == ("w1", True, "agreed")
    assert failed.temperature == 0.7
    assert "@t0.7-p0.95-k0" in failed.canary
    assert world.status("w2") == "HEALTHY"


@pytest.mark.slow
async def test_a_worker_returns_only_after_sampled_canaries_have_passed() -> None:
    world = await a_fleet("w1", "w2")
    async with world.running():
        await world.pass_time(20)
        fake = world.plane.workers["w1"]
        fake.sampler = "nonsense"
        await world.until(lambda: world.status("w1") == "UNHEALTHY", ROUND_S + 15)
        await world.pass_time(60)
        assert world.status("w1") == "UNHEALTHY"
        fake.sampler = "right"
        await world.until(lambda: world.status("w1") == "HEALTHY", 400)


@pytest.mark.slow
async def test_the_last_worker_in_service_is_reported_and_not_convicted() -> None:
    world = await a_fleet("w1", "w2")
    async with world.running():
        await world.pass_time(40)
        for worker in world.plane.workers.values():
            worker.sampler = "nonsense"
        await world.pass_time(60)
    assert sorted(world.status(name) for name in ("w1", "w2")) == ["HEALTHY", "UNHEALTHY"]
    serving = next(name for name in ("w1", "w2") if world.status(name) == "HEALTHY")
    assert {fact.worker for fact in world.facts(TokensUnlikely)} == {serving}
    assert all(fact.found_by == "canary" for fact in world.facts(TokensUnlikely))


@pytest.mark.parametrize("version", [5, DECIDERS_VERSION])
async def test_two_workers_found_within_one_fold_are_not_both_convicted(version: int) -> None:
    """Both verdicts arrive before either is folded. Version 5 does not itself keep a last worker in service."""
    world = await a_fleet("w1", "w2", policy=FleetPolicy().at(version))
    async with world.running():
        await world.pass_time(40)
        check = world.loop.sampling
        workers = [world.fleet.workers[name] for name in ("w1", "w2")]
        assert [check.may_convict(worker) for worker in workers] == [True, False]


async def test_a_worker_that_was_just_reported_wrong_is_not_counted_as_serving() -> None:
    """A greedy canary convicts w1; the sampled one of w2 is judged before that is folded."""
    world = await a_fleet("w1", "w2")
    async with world.running():
        await world.pass_time(40)
        check = world.loop.sampling
        check.note_wrong_answer("w1", "w1-1")
        assert not check.may_convict(world.fleet.workers["w2"])
        await world.pass_time(ACCUSED_S + 1)  # no decision followed
        assert check.may_convict(world.fleet.workers["w2"])


async def test_a_worker_with_wrong_answers_and_one_with_a_broken_sampler_leave_one_in_service() -> None:
    """Both fail at once, under a policy that does not itself keep a last worker."""
    world = await a_fleet("w1", "w2", policy=FleetPolicy().at(5))
    async with world.running():
        await world.pass_time(40)
        world.plane.workers["w1"].corrupt = lambda request: True
        world.plane.workers["w2"].sampler = "nonsense"
        await world.pass_time(60)
    assert sorted(world.status(name) for name in ("w1", "w2")) == ["HEALTHY", "UNHEALTHY"]


async def test_a_lone_worker_is_never_convicted_by_a_sampled_canary() -> None:
    world = await a_fleet("w1")
    async with world.running():
        await world.pass_time(20)
        world.plane.workers["w1"].sampler = "nonsense"
        await world.pass_time(60)
    assert world.status("w1") == "HEALTHY"


async def test_if_all_workers_draw_unlikely_tokens_from_the_start_none_is_convicted() -> None:
    """Then the comparison itself does not hold on this engine."""
    world = await a_fleet("w1", "w2", "w3", sampler="nonsense")
    async with world.running():
        await world.pass_time(60)
    assert {world.status(name) for name in ("w1", "w2", "w3")} == {"HEALTHY"}
    assert {fact.worker for fact in world.facts(TokensUnlikely)} == {"w1", "w2", "w3"}


@pytest.mark.slow
async def test_one_canary_in_five_is_sampled_and_passes_on_correct_workers() -> None:
    for seeded in (True, False):
        world = await a_fleet("w1", "w2", seeded=seeded)
        async with world.running():
            await world.pass_time(120)
        asked = [fact for fact in world.facts(CanaryPassed) if fact.check_type == "scheduled"]
        assert 0.15 < len(sampled(world, CanaryPassed)) / len(asked) < 0.25
        assert not world.facts(CanaryFailed)
        assert not world.facts(TokensUnlikely)


async def test_the_first_canary_has_one_seed_and_a_repetition_others() -> None:
    world = await a_fleet("w1", "w2")
    async with world.running():
        await world.pass_time(30)
        first = [r.sampling.seed for r in world.plane.workers["w1"].requests if r.sampling.temperature]
        world.plane.workers["w1"].sampler = "nonsense"
        await world.until(lambda: world.status("w1") == "UNHEALTHY", ROUND_S + 15)
    seeds = [r.sampling.seed for r in world.plane.workers["w1"].requests if r.sampling.temperature]
    assert first[0] == SEED
    assert len(set(seeds[-4:])) == 4


@pytest.mark.slow
async def test_no_seed_is_sent_after_the_same_seed_gave_two_ordinary_answers() -> None:
    world = await a_fleet("w1", "w2", seeded=False, flips=0.4, ties=(2, 9))
    async with world.running():
        await world.pass_time(120)
    drawn = [r for r in world.plane.workers["w1"].requests if r.sampling.temperature]
    assert drawn[0].sampling.seed == SEED
    assert drawn[-1].sampling.seed is None
    assert not sampled(world, CanaryFailed)


async def test_no_canary_is_sampled_if_disabled_or_without_logprobs() -> None:
    for settings, logprobs in ((CanarySettings(interval_s=2, sampled_every=0), True), (None, False)):
        world = await a_fleet("w1", "w2", settings=settings, logprobs=logprobs)
        async with world.running():
            await world.pass_time(30)
        assert not [r for w in world.plane.workers.values() for r in w.requests if r.sampling.temperature]


# --- users' tokens ------------------------------------------------------------------------------------------


def served(worker: str, *, weighed: int = 0, unlikely: int = 0, how: tuple[float, float, int] | None = None):  # type: ignore[no-untyped-def]
    return RequestsServed(
        worker=worker,
        instance=f"{worker}-1",
        frontend="f",
        count=30,
        tokens=600,
        ttft_ms=1.0,
        itl_ms=1.0,
        routed_under=0,
        window_s=5.0,
        weighed=weighed,
        unlikely=unlikely,
        sampling=how,
    )


@pytest.mark.slow
async def test_sampled_canaries_use_the_parameters_that_users_send_most() -> None:
    world = await a_fleet("w1", "w2")
    async with world.running():
        world.journal.observe(served("w1", how=(0.3, 0.8, 40)))
        await world.pass_time(40)
    drawn = {
        (r.sampling.temperature, r.sampling.top_p, r.sampling.top_k)
        for r in world.plane.workers["w1"].requests
        if r.sampling.temperature
    }
    assert drawn == {(0.3, 0.8, 40)}


async def test_a_worker_with_more_unlikely_user_tokens_than_its_peers_is_probed_at_once() -> None:
    world = await a_fleet("w1", "w2", settings=CanarySettings(interval_s=30.0, samples_min=1))
    async with world.running():
        await world.pass_time(200)
        world.plane.workers["w1"].sampler = "nonsense"
        world.journal.observe(served("w2", weighed=2000, unlikely=2))
        world.journal.observe(served("w1", weighed=2000, unlikely=900))
        await world.until(lambda: world.status("w1") == "UNHEALTHY", 15)
    (found,) = world.facts(TokensUnlikely)
    assert (found.worker, found.found_by) == ("w1", "users")
    assert found.probability < 1e-6


async def test_an_unlikely_share_alone_takes_no_worker_out_of_service() -> None:
    world = await a_fleet("w1", "w2")
    async with world.running():
        await world.pass_time(20)
        world.journal.observe(served("w2", weighed=2000, unlikely=2))
        world.journal.observe(served("w1", weighed=2000, unlikely=900))
        await world.pass_time(20)
    assert len(world.facts(TokensUnlikely)) == 1
    assert world.status("w1") == "HEALTHY"


# --- statistics ---------------------------------------------------------------------------------------------

HOW = SamplingParameters(0.7, 0.95)
PEAKED = ((1, math.log(0.98)), (2, math.log(0.012)), (3, math.log(0.005)))


def test_an_answer_that_follows_the_golden_is_no_surprise() -> None:
    assert surprise((PEAKED,) * 3, (1, 1, 1), (1, 1, 1), HOW, 0.0) == 1.0
    assert surprise((PEAKED,) * 3, (1, 1, 1), (1,), HOW, 0.0) == 1.0


def test_an_unlisted_token_is_less_likely_than_a_listed_one_and_later_positions_count_less() -> None:
    def at(place: int, token: int, how: SamplingParameters = HOW) -> float:
        return surprise((PEAKED,) * 3, (1, 1, 1), (*(1,) * place, token), how, 0.0)

    assert at(0, 9) < at(0, 3) < at(0, 2) < 0.1
    assert at(2, 9) == pytest.approx(6 * at(0, 9))
    assert at(0, 9, SamplingParameters(0.3)) < at(0, 9)
    assert at(0, 9, SamplingParameters(1.0)) == pytest.approx(2 * 0.003, rel=0.01)


def test_a_position_without_logprobs_is_not_judged() -> None:
    assert surprise((), (1,), (9,), HOW, 0.0) == 1.0
    assert surprise((((1, -0.1),),), (1,), (9,), HOW, 0.0) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0])
def test_the_p_values_of_a_correct_sampler_are_no_smaller_than_chance(temperature: float) -> None:
    """With noisy logprobs, at most a share p of 20,000 answers of a correct sampler has a p-value of at most p."""
    draw = random.Random(5)
    vocabulary = 50
    how = SamplingParameters(temperature, 0.95)
    rounds, small = 20_000, {0.1: 0, 0.01: 0, 0.001: 0}
    worlds = []
    for _ in range(40):
        logits = [sorted((draw.gauss(0, 3) for _ in range(vocabulary)), reverse=True) for _ in range(8)]
        seen_tops = []
        for row in logits:
            row[0] += 3
            seen = [value + draw.uniform(-0.02, 0.02) for value in row]  # on another day
            total = math.log(sum(map(math.exp, seen)))
            seen_tops.append(tuple((t, seen[t] - total) for t in range(5)))
        worlds.append((logits, tuple(seen_tops)))
    for _ in range(rounds):
        logits, tops = draw.choice(worlds)
        got = [draw.choices(range(vocabulary), [math.exp(v / temperature) for v in row])[0] for row in logits]
        found = surprise(tops, (0,) * 8, got, how, 0.02)
        for p in small:
            small[p] += found <= p
    for p, count in small.items():
        assert count <= rounds * p + 4 * math.sqrt(rounds * p)


def test_fishers_method_combines_p_values() -> None:
    assert combined([0.2]) == pytest.approx(0.2)
    assert combined([0.05, 0.05]) == pytest.approx(0.0025 * (1 - math.log(0.0025)))
    assert combined([1.0, 1.0, 1.0]) == pytest.approx(1.0)
    assert combined([1e-3] * 5) < 1e-10 / ATTEMPTS_MAX * 100


def test_combined_p_values_of_chance_are_no_smaller_than_chance() -> None:
    draw = random.Random(3)
    rounds = 20_000
    small = sum(combined([draw.random() for _ in range(4)]) <= 0.01 for _ in range(rounds))
    assert small <= rounds * 0.01 + 4 * math.sqrt(rounds * 0.01)


def test_a_share_of_unlikely_tokens_is_compared_with_the_usual_share() -> None:
    assert differ_by_chance(2, 2000, 2, 2000) == 1.0
    assert differ_by_chance(0, 0, 0, 2000) == 1.0
    assert differ_by_chance(40, 2000, 4, 2000) > 1e-6  # one odd answer
    assert differ_by_chance(900, 2000, 2, 2000) < 1e-20
