"""The canary loop: the schedule of probes, and the facts about them."""

import random
from typing import Any

import pytest
from canary_world import FakeWorker, World, joined

from controller.runtime.settings import CanarySettings, ConfiguredCanary
from events.decisions import BreakerHalfOpened, GoldenAgreed, GoldenRetired, HealthChanged
from events.observations import (
    CanaryFailed,
    CanaryPassed,
    CanaryResult,
    CanarySlow,
    DrainRequested,
    GoldenDisputed,
    GoldenProposed,
    Profile,
    ResumeRequested,
    WorkerLeft,
)


async def settled(*names: str, settings: CanarySettings | None = None) -> World:
    """Return a world with these workers, in which the loop does not run yet."""
    world = World(settings)
    for name in names:
        world.join(name)
    return world


async def test_a_worker_is_probed_at_once_when_it_joins() -> None:
    world = await settled("w1")
    async with world.running():
        took = await world.until(lambda: world.status("w1") == "HEALTHY", 2)
    assert took < 1
    first = world.facts(CanaryPassed)[0]
    assert first.check_type == "join"
    assert first.sent_under <= world.number


async def test_the_first_round_asks_every_canary_and_two_workers_agree_on_all_goldens() -> None:
    world = await settled("w1", "w2")
    async with world.running():
        await world.pass_time(5)
    assert len(world.facts(GoldenProposed)) == 4
    assert len({f.worker for f in world.facts(GoldenProposed)}) == 1
    assert len(world.facts(GoldenAgreed)) == 4
    assert {f.canary for f in world.facts(CanaryPassed, "w2")} == {
        f.canary for f in world.facts(GoldenProposed)
    }
    assert not world.facts(CanaryFailed)


async def test_goldens_of_workers_that_report_only_some_tokens_are_asked_at_full_length() -> None:
    world = await settled("w1", "w2", settings=CanarySettings(interval_s=1, unmarked_every=0))
    for worker in ("w1", "w2"):
        world.plane.workers[worker].tells = lambda token: token % 7 != 0
    async with world.running():
        await world.pass_time(30)
    assert any(len(f.tokens) < 32 for f in world.facts(GoldenProposed))
    assert {r.sampling.max_tokens for w in world.plane.workers.values() for r in w.requests} == {32}
    assert not world.facts(CanaryFailed)
    assert not world.facts(GoldenDisputed)


async def test_prompts_are_long_greedy_and_past_the_prefix_cache() -> None:
    world = await settled("w1")
    async with world.running():
        await world.pass_time(5)
    requests = world.plane.workers["w1"].requests
    assert requests
    assert all(len(r.tokens) >= 32 and r.prompt_tokens == len(r.tokens) for r in requests)
    assert all(
        r.sampling.temperature == 0 and r.sampling.top_p == 1 and r.sampling.top_k == 0 for r in requests
    )
    assert all(r.canary and r.cache_salt and r.sampling.logprobs == 5 for r in requests)
    assert len({r.cache_salt for r in requests}) == len(requests)


async def test_the_chosen_canaries_together_read_every_row_of_a_small_vocabulary() -> None:
    world = await settled("w1")
    async with world.running():
        await world.pass_time(5)
    prompts = [f.prompt for f in world.facts(GoldenProposed)]
    assert {token for prompt in prompts for token in prompt} >= set(range(3, 2048))


async def test_a_short_context_a_slow_engine_or_the_operator_gets_plain_questions() -> None:
    slow = Profile(
        kv_blocks=1000, block_tokens=16, max_batch=8, prefill_tokens_per_s=60, tpot_ms=((1, 99.0),)
    )
    for settings, more in (
        (CanarySettings(), {"context_tokens": 1_000}),
        (CanarySettings(coverage=False), {}),
        (CanarySettings(), {"profile": slow}),  # its prefill would take the whole deadline
    ):
        world = World(settings)
        about: dict[str, Any] = {"context_tokens": 4_096, **more}
        world.join("w1", **about)
        async with world.running():
            await world.pass_time(5)
        assert world.status("w1") == "HEALTHY"
        assert all(32 <= len(f.prompt) < 250 for f in world.facts(GoldenProposed))


@pytest.mark.slow
async def test_n06_a_worker_is_probed_twice_a_minute_at_thirty_seconds() -> None:
    world = await settled("w1", settings=CanarySettings(interval_s=30))
    async with world.running():
        await world.pass_time(60)  # the first round, and the calibration
        before = len(world.facts(CanaryResult, "w1"))
        await world.pass_time(600)
    scheduled = len(world.facts(CanaryResult, "w1")) - before
    assert 18 <= scheduled <= 22


async def test_the_tolerance_is_calibrated_within_half_a_minute_and_then_finds_small_drifts() -> None:
    world = await settled("w1", "w2", settings=CanarySettings(interval_s=30))
    async with world.running():
        await world.pass_time(35)
        assert len(world.facts(CanaryPassed)) >= 30
        asked = len(world.facts(CanaryPassed))
        await world.pass_time(10)
        assert len(world.facts(CanaryPassed)) <= asked + 2  # the calibration is complete
        world.plane.workers["w2"].drift = 0.002
        await world.until(lambda: world.status("w2") == "UNHEALTHY", 40)
    failed = world.facts(CanaryFailed)
    assert {(f.worker, f.reason, f.confirmed) for f in failed} == {("w2", "logit_drift", True)}
    assert 0.001 < failed[0].distance < 0.003
    assert len(failed[0].got) == 1  # reading stops at the first logprob that is off


async def test_a_worker_that_drifts_from_its_start_is_found_after_calibration() -> None:
    world = World(CanarySettings(interval_s=5))
    world.join("w1")
    world.join("w2")
    async with world.running():
        await world.pass_time(3)
        world.join("w3", FakeWorker(drift=0.02))
        await world.until(lambda: world.status("w3") == "UNHEALTHY", 60)
    assert {(f.worker, f.reason) for f in world.facts(CanaryFailed)} == {("w3", "logit_drift")}


async def test_a_lost_lease_keeps_what_was_learned() -> None:
    world = World(CanarySettings(interval_s=1))
    draw = random.Random(5)
    for n in range(2):
        world.join(f"w{n}", FakeWorker(noise=lambda: draw.uniform(-0.01, 0.01)))
    async with world.running():
        await world.pass_time(40)
        for _ in range(5):
            world.leads = False
            world.loop.kick()
            await world.pass_time(2)
            world.leads = True
            world.loop.kick()
            await world.pass_time(10)
    assert not world.facts(CanaryFailed)


@pytest.mark.slow
async def test_healthy_noise_of_an_engine_never_fails() -> None:
    world = World(CanarySettings(interval_s=1))
    draw = random.Random(5)
    for n in range(3):
        world.join(f"w{n}", FakeWorker(noise=lambda: draw.uniform(-0.01, 0.01)))
    async with world.running():
        await world.pass_time(200)
    assert len(world.facts(CanaryPassed)) > 500
    assert not world.facts(CanaryFailed)


async def test_workers_that_joined_together_are_not_probed_together() -> None:
    world = World(CanarySettings(interval_s=30, unmarked_every=0))
    for n in range(20):
        world.join(f"w{n}")
    async with world.running():
        await world.pass_time(60)
        before = len(world.facts(CanaryResult))
        counts: list[int] = []
        for _ in range(30):
            await world.pass_time(1)
            counts.append(len(world.facts(CanaryResult)) - before - sum(counts))
    assert 15 <= sum(counts) <= 25
    assert max(counts) <= 6


async def test_n07_the_cost_of_canaries_is_measured() -> None:
    world = await settled("w1")
    async with world.running():
        await world.pass_time(30)
    assert abs(world.meter.gpu_seconds - sum(s for _, _, s in world.meter.questions)) < 1e-6
    assert world.meter.gpu_seconds > 0


async def test_n08_corruption_of_one_canary_is_convicted_within_one_round_of_them() -> None:
    world = await settled("w1", "w2", "w3")
    async with world.running():
        await world.pass_time(10)
        golden = world.facts(GoldenProposed)[2]
        world.plane.workers["w2"].corrupt = lambda request: tuple(request.tokens) == golden.prompt
        took = await world.until(lambda: world.status("w2") == "UNHEALTHY", 60)
    assert took <= 4 * 10 * 1.1 + 1.5
    failed = world.facts(CanaryFailed, "w2")
    assert [(f.reason, f.confirmed, f.golden, f.attempts) for f in failed] == [
        ("token_mismatch", True, "agreed", 2)
    ]
    assert failed[0].expected == golden.tokens
    assert failed[0].got[:5] == golden.tokens[:5]
    assert len(failed[0].got) == 6  # reading stops at the first wrong token
    assert ("w2", "confirm") in {(w, c) for w, c, _ in world.meter.questions}


async def test_b11_a_hanging_worker_delays_no_other_worker() -> None:
    world = await settled("w1", "w2", "w3", settings=CanarySettings(interval_s=5, timeout_s=20))
    async with world.running():
        await world.pass_time(5)
        world.plane.workers["w1"].hangs = True
        before = len(world.facts(CanaryResult, "w2"))
        await world.pass_time(50)
        late = max(world.meter.lateness)
    assert len(world.facts(CanaryResult, "w2")) - before >= 9
    assert late < 1


async def test_b11_workers_may_come_and_go_while_probes_are_in_the_air() -> None:
    world = await settled("w1")
    async with world.running():
        await world.pass_time(1)
        for n in range(2, 30):
            world.join(f"w{n}")
            world.journal.observe(
                WorkerLeft(worker=f"w{n - 1}", instance=f"w{n - 1}-1", mode="graceful", exit=0)
            )
            await world.pass_time(0.2)
        await world.pass_time(3)
    assert world.status("w29") == "HEALTHY"
    assert not world.facts(CanaryFailed)


async def test_b12_a_probe_that_never_ends_is_a_timeout_with_its_latency() -> None:
    world = await settled("w1", settings=CanarySettings(interval_s=10, timeout_s=3))
    async with world.running():
        await world.pass_time(5)
        world.plane.workers["w1"].hangs = True
        await world.until(lambda: bool(world.facts(CanaryFailed)), 20)
    failed = world.facts(CanaryFailed)[0]
    assert (failed.reason, failed.confirmed, failed.attempts) == ("timeout", False, 1)
    assert 2_900 <= failed.latency_ms <= 3_300


async def test_a_busy_worker_raises_no_alarm_for_half_a_minute_but_a_hang_then_does() -> None:
    world = await settled("w1", settings=CanarySettings(interval_s=1))
    async with world.running():
        await world.pass_time(10)
        world.plane.workers["w1"].busy_until = world.clock.monotonic() + 30
        passed = len(world.facts(CanaryPassed))
        await world.pass_time(40)
        assert world.status("w1") == "HEALTHY"
        assert not world.facts(CanaryFailed) and not world.facts(CanarySlow)
        assert len(world.facts(CanaryPassed)) >= passed + 5
        world.plane.workers["w1"].hangs = True  # and its engine is not known to make progress
        assert await world.until(lambda: bool(world.facts(CanaryFailed)), 15) < 12
    assert world.facts(CanaryFailed)[0].reason == "timeout"


async def test_a_timed_out_canary_reports_whether_the_engine_made_progress() -> None:
    world = await settled("w1", settings=CanarySettings(interval_s=5, timeout_s=3))
    async with world.running():
        await world.pass_time(5)
        world.plane.workers["w1"].hangs = True
        await world.until(lambda: bool(world.facts(CanaryFailed)), 20)
        world.plane.workers["w1"].goes_on = True
        await world.until(lambda: world.facts(CanaryFailed)[-1].engine_went_on, 20)
    assert not world.facts(CanaryFailed)[0].engine_went_on
    assert {failed.reason for failed in world.facts(CanaryFailed)} == {"timeout"}


async def test_a_busy_worker_must_answer_within_the_extra_time() -> None:
    world = await settled("w1", settings=CanarySettings(interval_s=1, timeout_s=3, busy_s=20))
    async with world.running():
        await world.pass_time(10)
        world.plane.workers["w1"].busy_until = float("inf")
        took = await world.until(lambda: bool(world.facts(CanaryFailed)), 40)
    assert 20 < took < 26
    assert world.facts(CanaryFailed)[0].reason == "timeout"


async def test_every_way_to_fail_has_its_own_reason() -> None:
    for change, reason in (
        ({"unreachable": True}, "no_response"),
        ({"says_nothing": True}, "no_response"),
        ({"error": "engine_error: CUDA error"}, "exception"),
        ({"error": "invalid_request: Out of range float values"}, "exception"),
        ({"error": "non_finite: NaN in the logits"}, "non_finite"),
        ({"drift": float("nan")}, "non_finite"),
        ({"drift": 0.5}, "logit_drift"),
        ({"corrupt": lambda request: True}, "token_mismatch"),
    ):
        world = await settled("w1", "w2")
        async with world.running():
            await world.pass_time(5)
            for name, value in change.items():
                setattr(world.plane.workers["w1"], name, value)
            await world.until(lambda world=world: bool(world.facts(CanaryFailed)), 20)  # type: ignore[misc]
        assert world.facts(CanaryFailed)[0].reason == reason, change


async def test_every_dp_rank_is_asked_every_canary_and_one_that_fails_until_it_passes() -> None:
    world = World(CanarySettings(interval_s=1, coverage=False, unmarked_every=0))
    one = world.join("w1", dp=4)
    async with world.running():
        await world.pass_time(30)
        asked = {(request.rank, tuple(request.tokens)) for request in one.requests}
        kinds = {tokens for _, tokens in asked if len([1 for rank, own in asked if own == tokens]) > 1}
        assert len(kinds) >= 4 and all((rank, own) in asked for rank in range(4) for own in kinds)
        assert not world.facts(CanaryFailed)
        assert {fact.rank for fact in world.facts(CanaryPassed)} == {0, 1, 2, 3}
        one.corrupt = lambda request: request.rank == 2
        await world.until(lambda: bool(world.facts(CanaryFailed)), 10)
        failed = world.facts(CanaryFailed)[0]
        assert (failed.confirmed, failed.rank) == (True, 2) and world.status("w1") == "UNHEALTHY"
        since = len(one.requests)
        await world.pass_time(10)
        assert {request.rank for request in one.requests[since:]} == {2}
        one.corrupt = lambda request: False
        await world.pass_time(5)
        assert {request.rank for request in one.requests[-3:]} != {2}


async def test_a_mismatch_that_does_not_repeat_is_not_confirmed() -> None:
    world = await settled("w1", "w2", settings=CanarySettings(interval_s=10, sampled_every=0))
    async with world.running():
        await world.pass_time(5)
        fake = world.plane.workers["w1"]
        before = fake.asked
        fake.corrupt = lambda request: fake.asked == before + 1
        await world.until(lambda: bool(world.facts(CanaryFailed)), 20)
        await world.pass_time(1)
    failed = world.facts(CanaryFailed)
    assert [(f.reason, f.confirmed, f.attempts, f.rank) for f in failed] == [
        ("token_mismatch", False, 3, None)
    ]
    assert world.facts(HealthChanged, "w1")[1].after.value == "SUSPICIOUS"


async def test_probes_of_one_worker_never_overlap_and_the_fleet_has_a_cap() -> None:
    world = World(CanarySettings(interval_s=1, concurrency=2, unmarked_every=0))
    for n in range(6):
        world.join(f"w{n}")
    open_at_once = []
    async with world.running():
        await world.pass_time(10)  # the ranking asks its worker everything at once; after that, one by one
        for fake in world.plane.workers.values():
            fake.overlapped = 0
        for _ in range(100):
            await world.pass_time(0.05)
            open_at_once.append(sum(fake.open for fake in world.plane.workers.values()))
    assert all(fake.overlapped <= 1 for fake in world.plane.workers.values())
    assert max(open_at_once) == 2


async def test_only_the_holder_of_the_lease_probes() -> None:
    world = await settled("w1")
    world.leads = False
    async with world.running():
        await world.pass_time(30)
        assert world.plane.workers["w1"].asked == 0
        world.leads = True
        world.loop.kick()
        await world.until(lambda: world.status("w1") == "HEALTHY", 5)


async def test_a_flickering_lease_loses_no_worker() -> None:
    world = await settled("w1", "w2", settings=CanarySettings(interval_s=2))
    async with world.running():
        await world.pass_time(5)
        world.leads = False  # without a notification
        await world.pass_time(2.5)
        world.leads = True
        said = len(world.facts(CanaryResult))
        await world.pass_time(6)
    assert {f.worker for f in world.facts(CanaryResult)[said:]} == {"w1", "w2"}


async def test_a_probe_cut_by_a_lost_lease_or_shutdown_records_nothing() -> None:
    world = await settled("w1", settings=CanarySettings(interval_s=5))
    async with world.running():
        await world.pass_time(5)
        fake = world.plane.workers["w1"]
        fake.hangs = True
        await world.until(lambda: fake.open == 1, 10)
        said = len(world.facts(CanaryResult))
        world.leads = False
        world.loop.kick()
        await world.pass_time(15)
        assert fake.open == 0
        assert len(world.facts(CanaryResult)) == said
        fake.hangs, world.leads = False, True
        world.loop.kick()
        await world.pass_time(10)
        assert len(world.facts(CanaryResult)) > said
        said = len(world.facts(CanaryResult))
    assert len(world.facts(CanaryResult)) == said


async def test_a_worker_that_is_leaving_has_not_failed() -> None:
    world = await settled("w1", settings=CanarySettings(interval_s=5))
    async with world.running():
        await world.pass_time(5)
        world.plane.workers["w1"].error = "engine_shutdown"
        await world.pass_time(20)
    assert not world.facts(CanaryFailed)


async def test_an_overloaded_worker_is_asked_again_within_the_deadline() -> None:
    world = await settled("w1", settings=CanarySettings(interval_s=5))
    async with world.running():
        await world.pass_time(5)
        fake = world.plane.workers["w1"]
        fake.error = "overloaded"
        await world.until(lambda: fake.open > 0, 10)
        await world.pass_time(2)
        fake.error = None
        await world.pass_time(2)
    assert not world.facts(CanaryFailed)


async def test_a_worker_that_stays_full_is_asked_again_and_not_blamed() -> None:
    world = await settled("w1", "w2", settings=CanarySettings(interval_s=5, timeout_s=2))
    async with world.running():
        await world.pass_time(5)
        fake = world.plane.workers["w1"]
        fake.error = "overloaded: 256 requests are waiting already"
        await world.pass_time(60)
        assert not world.facts(CanaryFailed)
        assert world.status("w1") == "HEALTHY"
        fake.error = None
        passed = len(world.facts(CanaryPassed, "w1"))
        await world.until(lambda: len(world.facts(CanaryPassed, "w1")) > passed, 4)


async def test_the_trial_is_a_canary_sent_under_the_half_opening_decision() -> None:
    world = await settled("w1", "w2", settings=CanarySettings(interval_s=30))
    async with world.running():
        await world.pass_time(5)
        world.plane.workers["w1"].corrupt = lambda request: True
        await world.until(lambda: world.status("w1") == "UNHEALTHY", 60)
        world.plane.workers["w1"].corrupt = lambda request: False
        await world.until(lambda: bool(world.facts(BreakerHalfOpened)), 60)
        half = world.facts(BreakerHalfOpened)[0]
        await world.until(lambda: any(f.check_type == "trial" for f in world.facts(CanaryPassed, "w1")), 2)
    trials = [f for f in world.facts(CanaryResult, "w1") if f.check_type == "trial"]
    assert len(trials) == 1
    assert trials[0].sent_under >= half.number
    assert world.fleet.workers["w1"].breaker.position == "closed"


async def test_a_convicted_worker_returns_by_the_ramp() -> None:
    world = await settled("w1", "w2", settings=CanarySettings(interval_s=5))
    async with world.running():
        await world.pass_time(5)
        world.plane.workers["w1"].corrupt = lambda request: True
        await world.until(lambda: world.status("w1") == "UNHEALTHY", 30)
        world.plane.workers["w1"].corrupt = lambda request: False
        await world.until(lambda: world.fleet.workers["w1"].weight == 1.0, 200)
    weights = [f.weight for f in world.facts(HealthChanged, "w1")]
    assert weights[-3:] == [0.25, 0.5, 1.0]


async def test_b15_one_worker_alone_convicts_no_other_worker() -> None:
    world = World()
    world.join("w1")
    async with world.running():
        await world.pass_time(5)
        world.join("w2", FakeWorker(corrupt=lambda request: True))
        await world.pass_time(8)
        assert world.facts(GoldenDisputed, "w2")
        assert world.facts(GoldenRetired)
        assert world.status("w1") == "SUSPICIOUS"
        assert world.status("w2") == "SUSPICIOUS"
        assert not world.facts(CanaryFailed)
        world.join("w3")  # its vote decides
        await world.until(lambda: world.status("w2") == "UNHEALTHY", 120)
        await world.until(lambda: world.status("w1") == "HEALTHY", 120)
    assert world.status("w3") == "HEALTHY"


async def test_a_provisional_golden_convicts_the_worker_that_it_came_from() -> None:
    world = await settled("w1")
    async with world.running():
        await world.pass_time(5)
        world.plane.workers["w1"].corrupt = lambda request: True
        await world.until(lambda: world.status("w1") == "UNHEALTHY", 60)
    assert world.facts(CanaryFailed)[-1].golden == "provisional"


async def test_goldens_recorded_from_a_corrupt_lone_worker_need_an_operator() -> None:
    world = World(CanarySettings(interval_s=2))
    world.join("w1", FakeWorker(corrupt=lambda request: True))
    async with world.running():
        await world.pass_time(5)
        assert world.status("w1") == "HEALTHY"  # no evidence against it exists
        world.journal.observe(WorkerLeft(worker="w1", instance="w1-1", mode="graceful", exit=0))
        world.join("w1", FakeWorker(), instance="w1-2")
        await world.until(lambda: world.status("w1") == "UNHEALTHY", 10)
        world.journal.observe(ResumeRequested(worker="w1", instance="w1-2", by="operator"))
        await world.until(lambda: world.fleet.workers["w1"].natural_weight == 1.0, 120)
        tokens = {f.canary: f.tokens for f in world.facts(GoldenProposed)}
        assert all(world.fleet.goldens[key].tokens == tokens[key[1]] for key in world.fleet.goldens)
        assert len(world.facts(GoldenRetired)) == 4
        world.plane.workers["w1"].corrupt = lambda request: True  # and the new goldens convict
        await world.until(lambda: world.status("w1") == "UNHEALTHY", 20)
    assert world.facts(CanaryFailed)[-1].golden == "provisional"


async def test_an_engine_upgrade_makes_a_new_canary_key_and_convicts_no_worker() -> None:
    world = await settled("w1", "w2", "w3")
    async with world.running():
        await world.pass_time(10)
        for name in ("w1", "w2", "w3"):
            fake = FakeWorker(
                corrupt=lambda request: True
            )  # the new engine answers differently, but always alike
            world.journal.observe(WorkerLeft(worker=name, instance=f"{name}-1", mode="graceful", exit=0))
            world.join(name, fake, instance=f"{name}-2", engine_version="2")
            await world.pass_time(10)
    assert not world.facts(CanaryFailed)
    assert not world.facts(GoldenDisputed)
    assert [world.status(name) for name in ("w1", "w2", "w3")] == ["HEALTHY"] * 3
    assert len({f.canary_key for f in world.facts(GoldenAgreed)}) == 2


async def test_an_answer_that_does_not_repeat_itself_never_becomes_a_golden() -> None:
    world = World()
    world.join("w1", FakeWorker(scramble=1))
    async with world.running():
        await world.pass_time(30)
    assert not world.facts(GoldenProposed)
    assert not world.facts(CanaryPassed)
    assert {(f.reason, f.golden) for f in world.facts(CanaryFailed)} == {("token_mismatch", "none")}


async def test_a_drained_worker_is_left_alone_until_it_is_resumed() -> None:
    world = await settled("w1", settings=CanarySettings(interval_s=5))
    async with world.running():
        await world.pass_time(5)
        world.journal.observe(DrainRequested(worker="w1", instance="w1-1", deadline_s=600))
        await world.pass_time(1)
        asked = world.plane.workers["w1"].asked
        await world.pass_time(30)
        assert world.plane.workers["w1"].asked == asked
        world.journal.observe(ResumeRequested(worker="w1", instance="w1-1"))
        took = await world.until(lambda: world.status("w1") == "HEALTHY", 5)
    assert took < 1


async def test_a_slow_worker_passes_slowly_and_is_never_convicted() -> None:
    world = await settled("w1", "w2", "w3", settings=CanarySettings(interval_s=2))
    async with world.running():
        await world.pass_time(30)
        world.plane.workers["w1"].latency_s = 1.0
        await world.until(lambda: world.status("w1") == "SUSPICIOUS", 20)
        await world.pass_time(60)
    assert world.status("w1") == "SUSPICIOUS"
    slow = world.facts(CanarySlow, "w1")
    assert slow[0].latency_ms > 3 * slow[0].baseline_ms
    assert not world.facts(CanaryFailed)


async def test_a_configured_canary_convicts_at_once() -> None:
    own = ConfiguredCanary(prompt="The capital of France is", expected_tokens=(42,), max_tokens=1)
    world = World(CanarySettings(interval_s=5, canary_prompts=(own,)))
    world.join("w1")
    async with world.running():
        await world.until(lambda: world.status("w1") == "UNHEALTHY", 10)
    assert world.facts(GoldenProposed)[0].configured
    failed = world.facts(CanaryFailed)[0]
    assert (failed.reason, failed.expected, failed.golden) == ("token_mismatch", (42,), "agreed")


async def test_without_a_tokenizer_the_questions_are_token_ids() -> None:
    world = World()
    world.tokenizer_missing = True
    world.join("w1")
    async with world.running():
        await world.pass_time(5)
    assert world.status("w1") == "HEALTHY"
    assert all(len(r.tokens) >= 32 for r in world.plane.workers["w1"].requests)


async def test_a_new_leader_spreads_its_first_probes() -> None:
    world = await settled("w1", "w2", "w3", settings=CanarySettings(interval_s=20))
    async with world.running():
        await world.pass_time(5)
        said = len(world.facts(CanaryResult))
        world.leads = False
        world.loop.kick()
        await world.pass_time(1)
        world.leads = True
        world.loop.kick()
        await world.pass_time(1)
        assert len(world.facts(CanaryResult)) <= said + 1
        await world.pass_time(22)
    assert len(world.facts(CanaryResult)) >= said + 3


def test_joined_workers_of_the_double_share_a_key() -> None:
    assert joined("a").canary_key == joined("b").canary_key != joined("a", engine_version="2").canary_key


@pytest.mark.slow
async def test_a_crowd_of_joining_workers_is_admitted_before_first_rounds_continue() -> None:
    names = [f"w{n}" for n in range(30)]
    world = await settled(*names, settings=CanarySettings(interval_s=100, concurrency=4, unmarked_every=0))
    async with world.running():
        await world.until(lambda: all(world.status(name) == "HEALTHY" for name in names), 60)
        asked = world.facts(CanaryPassed)
        assert len(asked) < 2 * len(names)
        await world.pass_time(250)
    greedy = [fact for fact in world.facts(CanaryPassed) if fact.temperature is None]
    rounds = {name: {fact.canary for fact in greedy if fact.worker == name} for name in names}
    assert {len(round) for round in rounds.values()} == {4}
    assert not world.facts(CanaryFailed)
