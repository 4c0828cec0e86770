"""The simulated engine: the contract of every engine, and its own guarantees."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from engine_contract import EngineContract, Rig, asked, prompt
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_kit import Listener, generate, run
from waits import turns

from benchmarks.virtual_loop import VirtualLoop
from events import blocks
from events.kv import Tier
from events.wire import Generate, Load, Sampling
from workers.admin.server import WorkerMetrics
from workers.engines.engine import CANARIES_MAX, Engine, EngineDead
from workers.engines.simulated import language
from workers.engines.simulated.engine import SimulatedEngine, stats
from workers.engines.simulated.language import Reasoning
from workers.engines.simulated.scheduler import Scheduler
from workers.engines.simulated.sequence import BadShape, EngineShape
from workers.engines.simulated.timing import ConstantTiming

SMALL = EngineShape(context_tokens=2048, kv_blocks=512)


class TestSimulated(EngineContract):
    """Flat out, as benchmarks run it."""

    @pytest.fixture
    async def engine(self) -> Engine:
        return SimulatedEngine(SMALL)


class TestSimulatedManyATurn(EngineContract):
    """Flat out, several steps per turn of the loop."""

    @pytest.fixture
    async def engine(self) -> Engine:
        return SimulatedEngine(SMALL, turn_tokens=8)


class TestSimulatedWithTiming(EngineContract):
    """With steps that take time."""

    @pytest.fixture
    async def engine(self) -> Engine:
        return SimulatedEngine(SMALL, ConstantTiming(itl_s=0.001, prefill_tokens_per_s=200_000))


class TestSimulatedRanks(EngineContract):
    """With two DP ranks."""

    @pytest.fixture
    async def engine(self) -> Engine:
        return SimulatedEngine(SMALL, dp=2)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig(SimulatedEngine(SMALL))
    await rig.start()
    yield rig
    await rig.engine.stop()


# --- the language


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(259, 2047), min_size=2, max_size=60), st.data())
def test_any_lost_doubled_or_altered_token_changes_what_follows(
    tokens: list[int], data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(tokens) - 1))
    other = data.draw(st.integers(259, 2047).filter(lambda t: t != tokens[at]))
    wrong = [
        tokens[:at] + tokens[at + 1 :],
        tokens[: at + 1] + tokens[at:],
        [*tokens[:at], other, *tokens[at + 1 :]],
    ]
    right = language.open_sequence("m", tokens).intdigest()
    assert right not in [language.open_sequence("m", w).intdigest() for w in wrong]


def test_the_models_name_is_part_of_the_function() -> None:
    digests = {language.open_sequence(model, [300, 301]).intdigest() for model in ("a", "b", "c")}
    assert len(digests) == 3


def test_hashing_tokens_one_by_one_or_all_at_once_is_the_same() -> None:
    running = language.open_sequence("m", [300])
    for token in (301, 302, 303):
        running.update(language.TOKEN_BYTES[token])
    assert running.intdigest() == language.open_sequence("m", [300, 301, 302, 303]).intdigest()


def test_the_best_candidate_is_clearly_ahead_at_most_positions() -> None:
    margins = []
    for n in range(2_000):
        ranked = language.candidates(language.open_sequence("m", [n % 2048, 300]).intdigest(), eos=True)
        assert len({token for token, _ in ranked}) == language.CANDIDATES
        assert [logit for _, logit in ranked] == sorted((logit for _, logit in ranked), reverse=True)
        margins.append(ranked[0][1] - ranked[1][1])
    assert sum(margin > 0.5 for margin in margins) > 0.75 * len(margins)


def test_some_answers_end_by_themselves() -> None:
    ends = sum(
        language.candidates(language.open_sequence("m", [n % 2048, n // 2048]).intdigest(), eos=True)[0][0]
        == 2
        for n in range(20_000)
    )
    assert 20 < ends < 100  # one in 400


# --- reasoning


@pytest.mark.parametrize(
    ("ratio", "answer", "thought"),
    [(0.5, 10, 5), (0.29, 10, 2), (0.1, 10, 2), (0.09, 10, 0), (1.0, 1, 0), (1.0, 2, 2), (0.0, 10, 0)],
)
def test_reasoning_is_a_share_of_the_answer_or_empty(ratio: float, answer: int, thought: int) -> None:
    assert Reasoning(300, 301, ratio).tokens(answer) == thought


@pytest.mark.parametrize("stops", [[], [301]])
def test_an_answer_begins_with_its_reasoning_also_if_it_is_moved(
    stops: list[int],
) -> None:
    def said(tokens: list[int], most: int, shape: EngineShape) -> list[int]:
        asked = Generate(1, "r", tokens, 20, Sampling(max_tokens=most, stop_token_ids=stops))
        scheduler = Scheduler(shape)
        assert scheduler.submit(1, asked) is None
        return run(scheduler)[1]

    thinking = EngineShape(reasoning=Reasoning(300, 301, 0.5), prefill_tokens_max=13)
    tight = EngineShape(reasoning=Reasoning(300, 301, 0.5), context_tokens=64, kv_blocks=4)
    for salt in range(40):  # some of them would end during their reasoning
        whole = said(prompt(20, salt), 40, thinking)
        assert (whole[0], whole[19]) == (300, 301) and len(whole) > 19
        assert said(prompt(20, salt), 40, tight) == whole
        for cut in (1, 19, 20):
            if len(whole) > cut:
                assert said(prompt(20, salt) + whole[:cut], 40 - cut, thinking) == whole[cut:]


# --- batching, KV blocks, bounds


def test_a_full_cache_preempts_the_newest_and_loses_nothing() -> None:
    roomy = Scheduler(EngineShape(context_tokens=256, kv_blocks=512))
    tight = Scheduler(EngineShape(context_tokens=256, kv_blocks=20))
    for scheduler in (roomy, tight):
        for key in range(6):
            assert scheduler.submit(key, generate(prompt(40, key), most=120)) is None
    assert run(tight) == run(roomy)
    assert tight.preemptions > 0
    assert roomy.preemptions == 0
    assert tight.kv.used == 0


def test_a_served_prefix_is_found_in_the_cache() -> None:
    scheduler = Scheduler(SMALL)
    scheduler.submit(1, generate(prompt(64)))
    run(scheduler)
    scheduler.submit(2, generate(prompt(64) + [777] * 10))
    assert scheduler.plan().prefill_tokens == 10


@pytest.mark.parametrize("begun", [0, 1, 2], ids=["all at once", "one after a pass", "two after passes"])
def test_an_engine_holds_exactly_its_batch_and_its_queue(begun: int) -> None:
    scheduler = Scheduler(EngineShape(waiting_max=2, batch_max=2))
    taken = 0
    for key in range(6):
        if key < begun and not scheduler.plan().idle:
            scheduler.step()
        refusal = scheduler.submit(key, generate([300 + key], most=50))
        assert refusal is None or (refusal.error or "").startswith("overloaded: ")
        taken += refusal is None
    assert taken == 4


def test_a_full_engine_accepts_a_few_canaries() -> None:
    scheduler = Scheduler(EngineShape(waiting_max=0, batch_max=1))
    assert scheduler.submit(1, generate([300], most=50)) is None
    assert scheduler.submit(2, generate([300], most=50)) is not None
    taken = [scheduler.submit(10 + n, generate([300], canary=True)) is None for n in range(CANARIES_MAX + 1)]
    assert taken == [True] * CANARIES_MAX + [False]


def test_a_canary_is_served_before_waiting_requests() -> None:
    scheduler = Scheduler(EngineShape(batch_max=1))
    for key in range(3):
        scheduler.submit(key, generate(prompt(8, key), most=2))
    scheduler.plan()
    scheduler.submit(9, generate(prompt(8), most=2, canary=True))
    first: list[int] = []
    while not scheduler.plan().idle:
        first += [key for key, _ in scheduler.step() if key not in first]
    assert first == [0, 9, 1, 2]


def test_bounds_that_contradict_one_another_are_refused() -> None:
    with pytest.raises(BadShape, match="needs more than 2 KV blocks"):
        EngineShape(context_tokens=100, kv_blocks=2, block_tokens=16)


def test_the_duration_of_a_step_follows_from_its_work() -> None:
    timing = ConstantTiming(itl_s=0.02, prefill_tokens_per_s=1000)
    scheduler = Scheduler(SMALL)
    scheduler.submit(1, generate(prompt(100)))
    assert timing.step_s(scheduler.plan()) == pytest.approx(0.1)
    scheduler.step()
    assert timing.step_s(scheduler.plan()) == pytest.approx(0.02)
    scheduler.submit(2, generate(prompt(50, 1)))
    assert timing.step_s(scheduler.plan()) == pytest.approx(0.07)


def test_the_profile_matches_the_speed() -> None:
    engine = SimulatedEngine(SMALL, ConstantTiming(itl_s=0.02, prefill_tokens_per_s=1000))
    profile = engine.identity.profile
    assert (profile.kv_blocks, profile.max_batch, profile.prefill_tokens_per_s) == (512, 256, 1000)
    assert profile.tpot_ms == ((1, 20.0), (256, 20.0))


# --- faults


async def test_an_error_fails_the_given_number_of_requests(rig: Rig) -> None:
    rig.engine.chaos("error", 2)
    answers = [await rig.answer(key) for key in [rig.submit(prompt(salt=n)) for n in range(5)]]
    assert sum((answer.error or "").startswith("engine_error: ") for answer in answers) == 2
    assert sum(answer.finish == "length" for answer in answers) == 3


async def test_an_error_lasts_until_healed(rig: Rig) -> None:
    rig.engine.chaos("error", 0)
    assert [(await rig.ask(prompt())).error is not None for _ in range(3)] == [True] * 3
    rig.engine.chaos("heal", 0)
    assert (await rig.ask(prompt())).finish == "length"
    assert rig.engine.load().kv_used == 0


async def test_corruption_alters_one_token_in_k(rig: Rig) -> None:
    right = (await rig.ask(prompt(), max_tokens=1)).tokens
    rig.engine.chaos("corrupt", 4)
    said = [(await rig.ask(prompt(), max_tokens=1)).tokens for _ in range(400)]
    assert 60 < sum(tokens != right for tokens in said) < 140
    rig.engine.chaos("heal", 0)
    assert (await rig.ask(prompt(), max_tokens=1)).tokens == right


async def test_a_default_corruption_affects_nearly_every_canary(rig: Rig) -> None:
    right = (await rig.ask(prompt(), max_tokens=32)).tokens
    rig.engine.chaos("corrupt", 0)
    said = [(await rig.ask(prompt(), max_tokens=32, canary=True)).tokens for _ in range(60)]
    assert sum(tokens != right for tokens in said) >= 50


async def test_drift_changes_logprobs_but_no_token(rig: Rig) -> None:
    healthy = await rig.ask(prompt(), logprobs=5)
    rig.engine.chaos("drift", 0.02)
    sick = await rig.ask(prompt(), logprobs=5)
    assert sick.tokens == healthy.tokens
    moved = [abs(a.chosen - b.chosen) for a, b in zip(sick.logprobs, healthy.logprobs, strict=True)]
    assert moved == pytest.approx([0.02] * len(moved))


def test_slow_multiplies_the_time_of_a_step() -> None:
    async def main() -> None:
        rig = Rig(SimulatedEngine(SMALL, ConstantTiming(itl_s=0.002)))
        await rig.start()

        async def takes() -> float:
            began = rig.loop.time()
            await rig.ask(prompt(), max_tokens=10)
            return rig.loop.time() - began

        usual = await takes()
        assert usual == pytest.approx(9 * 0.002)
        rig.engine.chaos("slow", 10)
        assert await takes() == pytest.approx(10 * usual, abs=0.03)  # the first token takes a step as well
        await rig.engine.stop()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main())


async def test_a_dead_engine_fails_its_check(rig: Rig) -> None:
    rig.engine.chaos("die", 0)
    with pytest.raises(EngineDead, match="died"):
        await rig.engine.check()


async def test_an_engine_flat_out_does_not_block_the_loop(rig: Rig) -> None:
    for n in range(4):
        rig.submit(prompt(salt=n), max_tokens=1900)
    passed = 0
    while rig.engine.load().running or rig.engine.load().waiting:
        await turns()
        passed += 1
    assert passed > 1000  # one turn of the loop per step, not one for all of them


async def test_steps_that_share_a_turn_of_the_loop_are_bounded(rig: Rig) -> None:
    several = Rig(SimulatedEngine(SMALL, turn_tokens=100))
    await several.start()
    keys = [[one.submit(prompt(salt=n), max_tokens=400) for n in range(4)] for one in (rig, several)]
    for key in keys[1]:
        await several.answer(key)
    each = [len(chunk.tokens) for key in keys[1] for chunk in several.answers[key].chunks]
    assert max(each) == 26  # their shares of a hundred, and one more
    answers = [await rig.answer(key) for key in keys[0]]
    assert [several.answers[key].tokens for key in keys[1]] == [answer.tokens for answer in answers]
    await several.engine.stop()


# --- DP ranks, and their announcements


@asynccontextmanager
async def ranked(dp: int, shape: EngineShape = SMALL) -> AsyncIterator[tuple[Rig, dict[int, Listener]]]:
    """Start an engine with `dp` ranks; yield its rig, and a listener for each rank's announcements."""
    heard = {rank: Listener() for rank in range(dp)}
    rig = Rig(SimulatedEngine(shape, dp=dp))
    await rig.engine.start(rig.deliver, lambda rank, events: heard[rank].hear(events))
    yield rig, heard
    await rig.engine.stop()


def to_rank(rig: Rig, rank: int, tokens: list[int], **rest: Any) -> int:
    key = rig.key()
    rig.engine.submit(key, msgspec.structs.replace(asked(key, tokens, **rest), rank=rank))
    return key


async def test_each_rank_has_its_own_queue_and_cache() -> None:
    async with ranked(3) as (rig, heard):
        answers = [await rig.answer(to_rank(rig, rank, prompt(64))) for rank in (0, 2, 2)]
        assert len({tuple(answer.tokens) for answer in answers}) == 1
        assert [answer.chunks[0].cached_tokens for answer in answers] == [0, 0, 63]
        names = blocks.sequence_hashes(blocks.local_hashes(prompt(64), 16))
        assert [heard[rank].held[Tier.DEVICE] >= {*names} for rank in range(3)] == [True, False, True]
        keys = [to_rank(rig, rank, prompt(20, rank), max_tokens=1900) for rank in (1, 2, 2)]
        await rig.until(lambda: all(rig.answers[key].tokens for key in keys))
        assert [load.running for load in rig.engine.ranks()] == [0, 1, 2]
        assert rig.engine.load().running == 3
        for key in keys:
            rig.engine.cancel(key)
        assert rig.engine.load() == Load(kv_total=3 * SMALL.kv_blocks)


async def test_each_rank_reports_its_load_as_real_engines_do() -> None:
    async with ranked(2, EngineShape(context_tokens=1024, kv_blocks=64)) as (rig, _):
        idle = stats(Scheduler(EngineShape(context_tokens=1024, kv_blocks=64)))
        assert [value for value in idle.values() if value] == [256, 64]
        assert rig.engine.stats() == [idle, idle]  # type: ignore[attr-defined]
        keys = [to_rank(rig, 1, prompt(64), max_tokens=900) for _ in range(2)]
        # after the second token the last pass was a decode; the first one comes with the prefill
        await rig.until(lambda: all(len(rig.answers[key].tokens) > 1 for key in keys))
        first, second = rig.engine.stats()  # type: ignore[attr-defined]
        assert first == idle
        assert (second["request_active_slots"], second["num_requests_waiting"]) == (2, 0)
        assert second["gpu_cache_usage_perc"] == second["kv_active_blocks"] / 64 > 0
        assert second["gpu_prefix_cache_hit_rate"] == pytest.approx(63 / 64 / 2)
        assert (second["scheduled_num_decode_requests"], second["scheduled_num_prefill_requests"]) == (2, 0)
        assert (
            second["scheduled_sum_decode_kv_tokens"] > 2 * 64 and second["queued_num_prefill_requests"] == 0
        )
        worker: Any = SimpleNamespace(config=SimpleNamespace(name="w"), engine=rig.engine)
        families = {family.name: family for family in WorkerMetrics([worker]).ranks()}
        assert len(families) == len(first)
        samples = families["holdfast_worker_engine_request_active_slots"].samples
        assert [(sample.labels["dp_rank"], sample.value) for sample in samples] == [("0", 0), ("1", 2)]


def test_a_pass_is_reported_like_dynamos_snapshot() -> None:
    scheduler = Scheduler(EngineShape(context_tokens=96, kv_blocks=6, prefill_tokens_max=24, watermark=0))
    for key, length in enumerate((8, 40, 60)):
        scheduler.submit(key, generate(prompt(length, key), most=80))
    scheduler.plan()
    scheduler.step()
    scheduler.plan()
    said = stats(scheduler, 0.5)
    assert (said["request_active_slots"], said["num_requests_waiting"]) == (2, 1)
    assert [*said.values()][8:15] == pytest.approx([1, 23, 0.0, 16, 1, 9, 0.0])
    assert [*said.values()][15:] == [1, 60, 0.0, 0, 0, 0.0, 0.5]
    while not scheduler.preemptions:
        scheduler.step()
        scheduler.plan()
    said = stats(scheduler)
    assert (said["queued_num_prefill_requests"], said["queued_num_decode_requests"]) == (1, 1)
    assert said["queued_sum_decode_kv_tokens"] > 40
    scheduler.drop_all()
    assert {*[*stats(scheduler, 0.5).values()][8:]} == {0}


async def test_a_missing_rank_serves_nothing() -> None:
    async with ranked(2) as (rig, _):
        answer = await rig.answer(to_rank(rig, 2, prompt()))
        assert answer.error == "not_serving: there is no DP rank 2 here, only 0 to 1"
        request = msgspec.structs.replace(asked(9, prompt()), rank=-1)
        assert rig.engine.reserve(9, request, 60) == "there is no DP rank -1 here, only 0 to 1"


async def test_a_fault_affects_only_its_rank() -> None:
    async with ranked(2) as (rig, _):
        rig.engine.chaos("error", 0, 1)
        assert (await rig.answer(to_rank(rig, 0, prompt()))).error is None
        assert (await rig.answer(to_rank(rig, 1, prompt()))).error is not None
        rig.engine.chaos("heal", 0)
        assert (await rig.answer(to_rank(rig, 1, prompt()))).error is None
        rig.engine.chaos("corrupt", 1, 1)
        first, second = [await rig.answer(to_rank(rig, rank, prompt())) for rank in (0, 1)]
        rig.engine.chaos("heal", 0)
        assert first.tokens == (await rig.answer(to_rank(rig, 1, prompt()))).tokens != second.tokens
        rig.engine.chaos("die", 0)
        with pytest.raises(EngineDead):
            await rig.engine.check()


def test_devices_are_numbered_across_all_dp_ranks() -> None:
    engine = SimulatedEngine(EngineShape(tp=2), dp=2)
    engine.chaos("slow", 3, 3)
    engine.chaos("error", 0, 2)
    first, second = (rank.scheduler.faults for rank in engine.each)
    assert (first.slow, first.error) == (1.0, False)
    assert (second.slowness, second.error, second.raising_rank) == ({1: 3.0}, True, 0)


async def test_announcements_match_the_cache_and_omit_canaries() -> None:
    async with ranked(1, EngineShape(context_tokens=256, kv_blocks=20)) as (rig, heard):
        await rig.ask(prompt(90), canary=True)
        assert not heard[0].held[Tier.DEVICE]
        for salt in range(9):
            await rig.ask(prompt(60 + 20 * salt, salt), max_tokens=40)
        kv = rig.engine.each[0].scheduler.kv  # type: ignore[attr-defined]
        assert len(heard[0].held[Tier.DEVICE]) == len(kv.inactive) > 10
        assert all(block in kv.inactive for block in heard[0].held[Tier.DEVICE])


async def test_an_engine_without_a_prefix_cache_announces_nothing() -> None:
    async with ranked(1, EngineShape(prefix_caching=False)) as (rig, heard):
        assert not rig.engine.announces
        await rig.ask(prompt(90))
        assert not heard[0].held[Tier.DEVICE]


async def test_a_start_takes_the_configured_time() -> None:
    loop = asyncio.get_running_loop()
    began, rig = loop.time(), Rig(SimulatedEngine(SMALL, start_s=0.05))
    await rig.start()
    assert loop.time() - began > 0.04
    await rig.engine.stop()
