"""Unmarked canaries convict a worker that answers marked canaries well and users wrongly."""

import random
from collections.abc import Callable

import pytest
from canary_world import FakeWorker, World

from controller.deciders.breaker import BreakerPolicy
from controller.deciders.fleet import FleetPolicy
from controller.runtime.canary.goldens import Vocabulary
from controller.runtime.canary.unmarked import fresh_question
from controller.runtime.settings import CanarySettings
from events.decisions import GoldenRetired
from events.observations import UNMARKED, CanaryFailed, CanaryPassed
from events.wire import Generate

INTERVAL_S = 2.0


def a_fleet(workers: int = 3, **settings: object) -> World:
    told = {"interval_s": INTERVAL_S, "unmarked_every": 5, "sampled_every": 0, **settings}
    world = World(CanarySettings.model_validate(told), FleetPolicy(breaker=BreakerPolicy()))
    for n in range(1, workers + 1):
        world.join(f"w{n}", FakeWorker())
    return world


def of_users(request: Generate) -> bool:
    return not request.canary


class Remembers:
    """Lies to users, but only for prompts that it has not seen."""

    def __init__(self) -> None:
        self.seen: set[tuple[int, ...]] = set()

    def __call__(self, request: Generate) -> bool:
        known = tuple(request.tokens) in self.seen
        self.seen.add(tuple(request.tokens))
        return not request.canary and not known


class RepeatsItsLies:
    """Lies to users, and repeats the same lie when the prompt arrives with a mark."""

    def __init__(self) -> None:
        self.lied: set[tuple[int, ...]] = set()

    def __call__(self, request: Generate) -> bool:
        if not request.canary:
            self.lied.add(tuple(request.tokens))
        return tuple(request.tokens) in self.lied


class LiesNowAndThen:
    """Lies to users, but pauses after each lie: three consecutive requests show at most one."""

    def __init__(self) -> None:
        self.careful = 0

    def __call__(self, request: Generate) -> bool:
        if request.canary:
            return False
        self.careful = (self.careful + 1) % 3
        return self.careful == 1


def statuses(world: World) -> list[str]:
    return [world.status(name) for name in sorted(world.plane.workers)]


@pytest.mark.slow
@pytest.mark.parametrize("lies", [lambda: of_users, Remembers, RepeatsItsLies, LiesNowAndThen])
async def test_a_worker_that_lies_to_users_alone_is_convicted(
    lies: Callable[[], Callable[[Generate], bool]],
) -> None:
    world = a_fleet()
    async with world.running():
        await world.pass_time(60)
        world.plane.workers["w1"].corrupt = lies()
        await world.until(lambda: world.status("w1") == "UNHEALTHY", 120)
        await world.pass_time(60)
    assert statuses(world)[1:] == ["HEALTHY", "HEALTHY"]
    failed = next(fact for fact in world.facts(CanaryFailed, "w1") if fact.confirmed)
    assert failed.canary.endswith(UNMARKED) and failed.golden == "agreed"


@pytest.mark.slow
async def test_a_lying_worker_stays_healthy_if_every_canary_is_marked() -> None:
    world = a_fleet(unmarked_every=0)
    async with world.running():
        await world.pass_time(60)
        world.plane.workers["w1"].corrupt = of_users
        await world.pass_time(200)
    assert statuses(world) == ["HEALTHY", "HEALTHY", "HEALTHY"]
    assert all(request.canary for fake in world.plane.workers.values() for request in fake.requests)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
async def test_a_worker_without_two_peers_is_compared_with_its_own_marked_answers(workers: int) -> None:
    world = a_fleet(workers)
    async with world.running():
        await world.pass_time(60)
        world.plane.workers["w1"].corrupt = of_users
        await world.until(lambda: bool(world.facts(CanaryFailed)), 120)
    (failed,) = world.facts(CanaryFailed)
    assert (failed.worker, failed.confirmed) == ("w1", True)
    assert statuses(world)[1:] == ["HEALTHY"] * (workers - 1)


@pytest.mark.slow
async def test_two_workers_that_contradict_each_other_in_everything_are_left_to_the_canaries() -> None:
    """Which of them lies cannot be determined: the one that remembers its lies contradicts only the other."""
    world = a_fleet(2)
    async with world.running():
        await world.pass_time(60)
        world.plane.workers["w1"].corrupt = RepeatsItsLies()
        await world.pass_time(200)
    assert not world.facts(CanaryFailed)
    assert statuses(world) == ["HEALTHY", "HEALTHY"]


@pytest.mark.slow
async def test_near_ties_and_marked_lies_of_a_peer_convict_no_correct_worker() -> None:
    world = a_fleet(4, samples_min=10**6)
    for number, fake in enumerate(world.plane.workers.values()):
        fake.ties, fake.flips, fake.draw = range(12, 40, 3), 0.3, random.Random(number)
    async with world.running():
        await world.pass_time(60)
        goldens = {tuple(golden.prompt) for golden in world.fleet.goldens.values()}
        world.plane.workers["w4"].corrupt = lambda request: (
            request.canary and tuple(request.tokens) not in goldens
        )
        await world.pass_time(600)
    assert not world.facts(CanaryFailed)
    asked = [f for f in world.facts(CanaryPassed) if f.canary.endswith(UNMARKED)]
    assert len(asked) > 100 and {fact.worker for fact in asked} == {"w1", "w2", "w3", "w4"}


@pytest.mark.slow
async def test_an_unmarked_canary_looks_like_a_users_request_and_is_sent_once() -> None:
    world = a_fleet()
    async with world.running():
        await world.pass_time(200)
    for fake in world.plane.workers.values():
        plain = [request for request in fake.requests if not request.canary]
        assert len({tuple(request.tokens) for request in plain}) == len(plain) > 5
        marked = {tuple(request.tokens) for request in fake.requests if request.canary}
        assert not marked & {tuple(request.tokens) for request in plain}
        for request in plain:
            assert not request.cache_salt and len(request.request) == 32 and not request.prompt_text
            assert not request.sampling.logprobs and not request.sampling.ignore_eos


@pytest.mark.slow
async def test_canaries_keep_their_slots() -> None:
    """An unmarked canary neither takes a canary's slot nor delays it, even while it waits behind users' requests."""
    marked = []
    for every in (0, 1):
        world = a_fleet(1, unmarked_every=every, jitter=0.0, samples_min=1, busy_s=60.0)
        async with world.running():
            await world.pass_time(30)
            before = len([f for f in world.facts(CanaryPassed) if not f.canary.endswith(UNMARKED)])
            await world.pass_time(40 * INTERVAL_S)
            passed = [f for f in world.facts(CanaryPassed) if not f.canary.endswith(UNMARKED)]
            marked.append(len(passed) - before)
    assert marked[0] == marked[1] == pytest.approx(40, abs=1)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["hangs", "declines"])
async def test_an_unmarked_canary_without_an_answer_is_no_evidence(how: str) -> None:
    world = a_fleet(unmarked_every=1, timeout_s=3.0)
    async with world.running():
        await world.pass_time(60)
        before = len(world.facts(CanaryFailed))
        fake = world.plane.workers["w1"]
        fake.unmarked_error = "overloaded: full" if how == "declines" else ""
        fake.unmarked_hangs = how == "hangs"
        await world.pass_time(120)
    assert len(world.facts(CanaryFailed)) == before == 0
    assert world.status("w1") == "HEALTHY"


async def test_inexact_and_joining_workers_get_no_unmarked_canaries() -> None:
    world = a_fleet(0, unmarked_every=1)
    world.join("w1", FakeWorker(), exact=False)
    async with world.running():
        await world.pass_time(60)
    assert all(request.canary for request in world.plane.workers["w1"].requests)


@pytest.mark.slow
async def test_an_outvoted_golden_also_acquits_of_convictions_by_unmarked_canaries() -> None:
    """New weights on one worker after another: the first one is convicted by an unmarked canary as well."""
    world = a_fleet(unmarked_every=1, interval_s=20.0)
    async with world.running():
        await world.pass_time(120)
        world.plane.workers["w1"].weights = 1
        await world.until(lambda: charged(world, "w1"), 300)
        world.plane.workers["w2"].weights = 1
        await world.until(lambda: bool(world.facts(GoldenRetired)), 60)
        await world.pass_time(20)
        assert not charged(world, "w1") and not world.fleet.workers["w1"].health.corrupt
        world.plane.workers["w3"].weights = 1
        await world.until(lambda: statuses(world) == ["HEALTHY"] * 3, 300)


def charged(world: World, worker: str) -> bool:
    """Return whether an unmarked canary has convicted a worker, and the conviction stands."""
    found = [f for f in world.facts(CanaryFailed, worker) if f.confirmed and f.canary.endswith(UNMARKED)]
    goldens = world.fleet.workers[worker].health.charges.goldens
    return any(fact.golden_canary in goldens or fact.canary in goldens for fact in found)


@pytest.mark.slow
async def test_an_engine_without_logprobs_is_not_convicted_for_near_ties() -> None:
    world = a_fleet(unmarked_every=1)
    for number, fake in enumerate(world.plane.workers.values()):
        fake.logprobs, fake.ties, fake.flips, fake.draw = False, (20,), 0.2, random.Random(number)
    async with world.running():
        await world.pass_time(300)
    assert statuses(world) == ["HEALTHY"] * 3
    assert not [fact for fact in world.facts(CanaryFailed) if fact.canary.endswith(UNMARKED)]


def test_canary_prompts_are_many_and_fit_any_model() -> None:
    draw, vocabulary = random.Random(3), Vocabulary(lambda text: list(text.encode()), 256)
    texts = {fresh_question(draw, vocabulary, 32).text for _ in range(2_000)}
    assert len(texts) > 1_990
    ids = fresh_question(draw, None, 32)
    assert ids.prompt and not ids.text and 16 <= ids.max_tokens <= 64
