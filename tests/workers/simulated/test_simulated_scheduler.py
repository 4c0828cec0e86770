"""The simulated engine's scheduler: its guarantees per request and block, and many passes at once."""

import time
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import pytest
from engine_contract import prompt
from hypothesis import example, given, settings
from hypothesis import strategies as st
from simulated_kit import Listener

from benchmarks.router.virtual.mute_scheduler import MuteScheduler
from events import blocks
from events.kv import KvEvent, Removed, Stored, Tier
from events.wire import Chunk, Generate, Sampling, join
from workers.engines.simulated.engine import stats
from workers.engines.simulated.kv_cache import EvictorKind, TierTraffic
from workers.engines.simulated.language import EOS_BELOW, as_bytes, open_sequence
from workers.engines.simulated.scheduler import Scheduler
from workers.engines.simulated.sequence import BadShape, EngineShape, Preemption, prefix_names
from workers.engines.simulated.timing import ConstantTiming, StepPlan, TieredTiming

FAULTS = ("error", "corrupt", "drift", "heal")
Asked = list[tuple[int, int, int, bool]]  # arrival pass, prompt, answer, canary


def generate(tokens: list[int], most: int = 64, **rest: object) -> Generate:
    sampling = Sampling(max_tokens=most, ignore_eos=True)
    return Generate(1, "r", tokens, len(tokens), sampling, **rest)  # type: ignore[arg-type]


def one_pass(scheduler: Scheduler) -> tuple[StepPlan, dict[int, list[int]]]:
    """Plan and step; return the plan and the tokens of each request."""
    plan = scheduler.plan()
    return plan, {} if plan.idle else {key: chunk.tokens for key, chunk in scheduler.step()}


def played(
    scheduler: Scheduler, asked: Asked, trusted: Mapping[int, bool] = MappingProxyType({})
) -> dict[int, list[int]]:
    """Run requests that arrive at their passes until no work is left; return each request's tokens, and check the rest.

    `trusted`: the passes at which the scheduler is distrusted, or trusted again.
    """
    listener, said = Listener(scheduler.kv), dict[int, list[int]]()
    scheduler.kv.heard = True
    shape, waiting = scheduler.shape, dict(enumerate(asked))
    for now in range(5_000):
        if now in trusted:
            scheduler.trust(trusted[now])
            holds(scheduler, listener)
            assert not any(listener.held.values()) and scheduler.kv.used == len(scheduler.kv.active)
        for key in [key for key, (when, *_) in waiting.items() if when <= now]:
            _, length, most, canary = waiting.pop(key)
            assert scheduler.submit(key, generate(prompt(length, key % 3), most, canary=canary)) is None
        plan, out = one_pass(scheduler)
        assert len(out) == len(set(out)) and all(len(tokens) == 1 for tokens in out.values())
        for key, tokens in out.items():
            said.setdefault(key, []).extend(tokens)
        holds(scheduler, listener)
        assert scheduler.prefill.trusted or not any(listener.held.values())
        assert plan.prefill_tokens + plan.decodes <= shape.prefill_tokens_max or not (
            shape.chunked_prefill or len(plan.prefills) > 1
        )
        if plan.idle and not waiting:
            assert scheduler.load().running == scheduler.load().waiting == scheduler.load().kv_used == 0
            return said
    raise AssertionError("the scheduler does not come to an end")


def holds(scheduler: Scheduler, listener: Listener) -> None:
    """Check the invariants between any two passes."""
    kv, shape = scheduler.kv, scheduler.shape
    here = [*scheduler.batch.sequences.values(), *scheduler.prefill.begun.values()]
    counts: dict[int, int] = {}
    for sequence in here:
        assert len(sequence.blocks) == -(-sequence.length // shape.block_tokens)
        for block in sequence.blocks:
            counts[block] = counts.get(block, 0) + 1
    assert kv.active == counts
    assert len(here) <= shape.batch_max
    assert scheduler.batch.tokens == sum(one.length for one in scheduler.batch.sequences.values())
    listener.hear(scheduler.take_events())
    assert listener.held[Tier.DEVICE] >= {block for block in counts if block >= 0}
    assert len(listener.held[Tier.DEVICE]) == sum(block >= 0 for block in counts) + len(kv.inactive)
    assert all(block in kv.inactive for block in listener.held[Tier.DEVICE] - counts.keys())
    assert kv.parents.keys() == listener.held[Tier.DEVICE]
    if kv.slow is not None:
        assert all(kv.slow.held[tier].keys() == listener.held[tier] for tier in (Tier.HOST, Tier.DISK))


REQUESTS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 90), st.integers(1, 60), st.booleans()),
    min_size=1,
    max_size=10,
)
SHAPES = st.builds(
    EngineShape,
    context_tokens=st.just(160),
    block_tokens=st.sampled_from([1, 16, 16]),
    kv_blocks=st.sampled_from([160, 176]),
    batch_max=st.integers(1, 6),
    prefill_tokens_max=st.integers(6, 100),
    watermark=st.sampled_from([0.0, 0.01, 0.3]),
    prefix_caching=st.booleans(),
    chunked_prefill=st.booleans(),
    preemption=st.sampled_from(["newest", "oldest"]),
    evictor=st.sampled_from(["lru", "multi-lru", "lineage"]),
    host_kv_blocks=st.sampled_from([0, 4]),
    disk_kv_blocks=st.sampled_from([0, 8]),
).map(lambda shape: shape if shape.block_tokens == 1 else smaller(shape))


def smaller(shape: EngineShape) -> EngineShape:
    """Return a shape with a cache that is soon full."""
    return EngineShape(**{name: getattr(shape, name) for name in shape.__slots__} | {"kv_blocks": 11})


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@example(  # a preemption before two one-token blocks of the request are named
    EngineShape(
        context_tokens=160, block_tokens=1, kv_blocks=160, batch_max=3, prefill_tokens_max=33, watermark=0
    ),
    [(0, 66, 26, False), (11, 72, 7, False), (17, 21, 1, True), (11, 1, 5, False)],
    {},
)
@given(SHAPES, REQUESTS, st.dictionaries(st.integers(0, 40), st.booleans(), max_size=3))
def test_every_request_gets_the_undisturbed_answer_and_every_block_is_accounted_for(
    shape: EngineShape, asked: Asked, trusted: dict[int, bool]
) -> None:
    roomy = Scheduler(EngineShape(context_tokens=160))
    assert played(Scheduler(shape), asked, trusted) == played(roomy, asked)
    assert roomy.preemptions == 0


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(SHAPES, REQUESTS)
def test_a_mute_scheduler_and_skipped_passes_give_the_same_result(shape: EngineShape, asked: Asked) -> None:
    """Three schedulers, the last of which skips passes. No two requests are equal: they would share their answers."""
    first: list[int] = []
    speaking, mute, quick = every = Scheduler(shape), MuteScheduler(shape), MuteScheduler(shape)
    for one in every:
        one.kv.heard = True
        for key, (_, length, most, _) in enumerate(asked):
            tokens = [*prompt(length - 1, key % 3), 300 + key]
            request = generate(tokens, most)
            if isinstance(one, MuteScheduler):
                names = prefix_names(tokens, request, shape.block_tokens)
                assert one.submit_silent(key, length, most, names) is None
            else:
                assert one.submit(key, request) is None
    for _ in range(2_000):
        plan = together(every)
        if plan.idle:
            break
        ahead = quick.steady()
        for count in range(ahead):
            if count:
                assert together((speaking, mute)).prefill_tokens == 0
            assert not any(chunk.finish for _, chunk in speaking.step())
            assert mute.step() == [] and mute.take_events() == []
        quick.skip(ahead)
        if ahead:
            continue
        said, *counted = [one.step() for one in every]
        assert counted[0] == counted[1]
        first += [key for key, chunk in counted[0] if chunk.cached_tokens is not None]
        assert {key for key, chunk in said if chunk.finish} == {key for key, c in counted[0] if c.finish}
        events = [one.take_events() for one in every]
        assert events[1] == events[2]
        assert [type(event) for event in events[0]] == [type(event) for event in events[1]]
    assert not any(one.busy for one in every)
    assert sorted(first) == [*range(len(asked))]  # once each, preempted or not
    assert speaking.preemptions == mute.preemptions == quick.preemptions


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(SHAPES, REQUESTS, st.integers(0, 60), st.dictionaries(st.integers(0, 40), st.sampled_from(FAULTS)))
def test_passes_run_together_equal_single_passes(
    shape: EngineShape, asked: Asked, tokens: int, faults: dict[int, str]
) -> None:
    rushing, plain = both = Scheduler(shape), Scheduler(shape)
    waiting = dict(enumerate(asked))
    for now in range(2_000):
        for key in [key for key, (when, *_) in waiting.items() if when <= now]:
            _, length, most, canary = waiting.pop(key)
            for one in both:
                one.submit(key, generate(prompt(length, key % 3), most, canary=canary))
        for one in both:
            one.faults.inject(faults.get(now, ""), 2)
            one.cancel(now - 7)
        if rushed(rushing, plain, tokens) is None and not waiting:
            break
    assert not any(one.busy for one in both)


@pytest.mark.parametrize("ignore_eos", [True, False])
def test_an_answer_that_may_end_early_is_run_pass_by_pass_there(ignore_eos: bool) -> None:
    """Digests that mean the end occur once in 400 tokens."""
    shape = EngineShape(context_tokens=2048)
    rushing, plain = both = Scheduler(shape), Scheduler(shape)
    for one in both:
        for key in range(6):
            sampling = Sampling(max_tokens=1_900, ignore_eos=ignore_eos)
            assert one.submit(key, Generate(1, "r", prompt(20, key), 20, sampling)) is None
    turns = [said for _ in range(100) if (said := rushed(rushing, plain, 600)) is not None]
    assert not rushing.busy
    ends = [key for said in turns for key, chunk in said.items() if chunk.finish == "stop"]
    assert len(ends) == (0 if ignore_eos else 6)
    fewest = 1 + -(-1_899 // 101)  # the first token, and then a hundred and one in each turn
    assert (len(turns) == fewest) is ignore_eos


@pytest.mark.parametrize("least", [0, 500])
def test_the_fast_path_with_ignore_eos_equals_full_sampling(least: int) -> None:
    """With logprobs the fast path is never used."""
    scheduler, said = Scheduler(EngineShape(context_tokens=2048)), dict[int, list[int]]()
    for key, logprobs in enumerate((0, 1)):
        sampling = Sampling(max_tokens=1_900, min_tokens=least, ignore_eos=True, logprobs=logprobs)
        assert scheduler.submit(key, Generate(1, "r", prompt(20), 20, sampling)) is None
    while not scheduler.plan().idle:
        for key, chunk in scheduler.step():
            said.setdefault(key, []).extend(chunk.tokens)
    assert said[0] == said[1]
    running, ends = open_sequence("sim", prompt(20)), 0
    for token in said[0]:
        ends += running.intdigest() < EOS_BELOW
        running.update(as_bytes([token]))
    assert ends > 2


def rushed(rushing: Scheduler, plain: Scheduler, tokens: int) -> dict[int, Chunk] | None:
    """Run as many passes one by one as the first scheduler runs together, and compare the states.

    Return the output of the first; None: there is no work.
    """
    both = rushing, plain
    for one in both:
        one.kv.heard = True
    if together(both).idle:
        return None
    said, singly = dict(rushing.rush(tokens)), dict[int, Chunk]()
    events: list[KvEvent] = []
    while True:
        for key, chunk in plain.step():
            if key not in singly:
                singly[key] = chunk
            else:
                assert join(singly[key], chunk)
        events += plain.take_events()
        if plain.batch.passes == rushing.batch.passes:
            break
        plain.plan()
    assert said == singly and list(said) == list(singly)
    assert rushing.take_events() == events
    assert rushing.planned == plain.planned and rushing.load() == plain.load()
    assert stats(rushing) == stats(plain) and rushing.kv.active == plain.kv.active
    return said


def together(schedulers: Iterable[Scheduler]) -> StepPlan:
    """Return the common plan and check the common load."""
    plans, loads = {one.plan() for one in schedulers}, {one.load() for one in schedulers}
    assert len(plans) == len(loads) == 1
    return plans.pop()


# --- examples


def test_a_long_prompt_takes_several_passes_while_others_decode() -> None:
    scheduler = Scheduler(EngineShape(prefill_tokens_max=32))
    scheduler.submit(1, generate(prompt(20)))
    one_pass(scheduler)
    scheduler.submit(2, generate(prompt(70, 1)))
    passes = [one_pass(scheduler) for _ in range(3)]
    assert [(plan.prefills, plan.decodes, [*out]) for plan, out in passes] == [
        ((31,), 1, [1]),
        ((31,), 1, [1]),
        ((8,), 1, [1, 2]),
    ]


def test_a_request_in_prefill_has_its_place_in_the_batch() -> None:
    scheduler = Scheduler(EngineShape(prefill_tokens_max=32, batch_max=1))
    scheduler.submit(1, generate(prompt(70)))
    one_pass(scheduler)
    assert scheduler.reserve(2, generate(prompt(20, 1)), 40) == (
        "overloaded: all 1 places of the batch are taken"
    )
    assert scheduler.load().running == 1
    scheduler.cancel(1)
    assert scheduler.load().kv_used == 0 and not scheduler.busy


def test_without_chunks_a_long_prompt_has_its_own_pass() -> None:
    scheduler = Scheduler(EngineShape(prefill_tokens_max=32, chunked_prefill=False))
    for key, length in enumerate((20, 70, 20)):
        scheduler.submit(key, generate(prompt(length, key)))
    assert [one_pass(scheduler)[0].prefills for _ in range(3)] == [(20,), (70,), (20,)]


def test_blocks_are_stored_as_they_are_computed() -> None:
    scheduler = Scheduler(EngineShape(prefill_tokens_max=40))
    scheduler.kv.heard = True
    asked = generate(prompt(64), most=18)
    names = blocks.sequence_hashes(blocks.local_hashes(asked.tokens, 16))
    scheduler.submit(1, asked)
    one_pass(scheduler)
    assert scheduler.take_events() == [Stored(names[:2])]
    said = one_pass(scheduler)[1][1]
    assert scheduler.take_events() == [Stored(names[2:], names[1])]
    for _ in range(15):
        said += one_pass(scheduler)[1][1]
    assert scheduler.take_events() == []  # the block's last token was generated, and is not computed yet
    one_pass(scheduler)
    full = blocks.sequence_hashes(blocks.local_hashes(asked.tokens + said, 16))
    assert scheduler.take_events() == [Stored([full[4]], full[3])]
    assert scheduler.kv.cached(full) == 5


def test_a_request_admitted_in_the_same_pass_finds_the_prefix() -> None:
    scheduler = Scheduler(EngineShape())
    for key in (1, 2):
        scheduler.submit(key, generate(prompt(64)))
    plan, _ = one_pass(scheduler)
    assert plan.prefills == (64, 1) and plan.starts == (0, 63)
    assert (plan.active_blocks, plan.total_blocks) == (4, scheduler.kv.total)


def test_a_plan_has_the_computed_tokens_before_each_chunk() -> None:
    scheduler = Scheduler(EngineShape(prefill_tokens_max=40))
    for key, length in enumerate((70, 64)):
        scheduler.submit(key, generate(prompt(length, key)))
    plans = [one_pass(scheduler)[0] for _ in range(4)]
    scheduler.submit(2, generate([*prompt(64, 1), 7]))  # finds what the second has computed
    plans.append(one_pass(scheduler)[0])
    assert [(plan.prefills, plan.starts, plan.later) for plan in plans] == [
        ((40,), (0,), 0),
        ((30, 10), (40, 0), 1),
        ((39,), (10,), 1),
        ((15,), (49,), 1),
        ((1,), (64,), 0),
    ]


def test_salted_requests_share_nothing_with_others() -> None:
    scheduler = Scheduler(EngineShape())
    for key, salt in enumerate(("", "a", "b", "a")):
        scheduler.submit(key, generate(prompt(64), cache_salt=salt))
    assert one_pass(scheduler)[0].prefills == (64, 64, 64, 1)


def test_moving_requests_keep_their_blocks_private_after_the_cache_is_forgotten() -> None:
    scheduler, listener, tokens = Scheduler(EngineShape()), Listener(), prompt(64)
    scheduler.kv.heard = True
    scheduler.submit(1, generate(tokens, most=2))
    one_pass(scheduler)
    departure = scheduler.transit.depart(1)
    arrival = scheduler.reserve(2, generate(tokens), 100)
    assert departure is not None and not isinstance(arrival, str) and arrival.cached_tokens == 48
    one_pass(scheduler)
    assert departure.pinned, "it has ended, but its blocks may still leave"
    scheduler.trust(False)
    late = scheduler.reserve(3, generate(tokens), 100)
    assert not isinstance(late, str) and late.cached_tokens == 0
    scheduler.transit.settle(late, tokens)
    one_pass(scheduler)
    listener.hear(scheduler.take_events())
    assert not any(listener.held.values())
    scheduler.trust(True)
    scheduler.transit.close(departure)
    scheduler.transit.settle(arrival, tokens)
    while not one_pass(scheduler)[0].idle:
        pass
    listener.hear(scheduler.take_events())
    assert scheduler.kv.used == 0 and not any(listener.held.values())


def test_without_prefix_caching_nothing_is_found_kept_or_announced() -> None:
    scheduler = Scheduler(EngineShape(prefix_caching=False))
    scheduler.kv.heard = True
    for key in (1, 2):
        scheduler.submit(key, generate(prompt(64), most=40))
    assert one_pass(scheduler)[0].prefills == (64, 64)
    while not one_pass(scheduler)[0].idle:
        pass
    assert scheduler.take_events() == []
    assert len(scheduler.kv.inactive) == scheduler.kv.used == 0


def test_the_watermark_keeps_blocks_for_running_requests() -> None:
    scheduler = Scheduler(EngineShape(context_tokens=128, kv_blocks=10, watermark=0.3))
    scheduler.submit(1, generate(prompt(120), most=8))  # alone it may use them all
    one_pass(scheduler)
    assert scheduler.load().running == 1
    while not one_pass(scheduler)[0].idle:
        pass
    for key in (2, 3):
        scheduler.submit(key, generate(prompt(60, key), most=8))
    one_pass(scheduler)
    assert (scheduler.load().running, scheduler.load().waiting) == (1, 1)


@pytest.mark.parametrize(("preemption", "first"), [("newest", 0), ("oldest", 2)])
def test_the_preempted_request_is_configurable(preemption: Preemption, first: int) -> None:
    scheduler = Scheduler(EngineShape(context_tokens=128, kv_blocks=9, preemption=preemption))
    for key in range(3):
        scheduler.submit(key, generate(prompt(40, key), most=80))
    ended: list[int] = []
    while not scheduler.plan().idle:
        ended += [key for key, chunk in scheduler.step() if chunk.finish]
    assert scheduler.preemptions > 0
    assert ended[0] == first


@pytest.mark.parametrize(("preemption", "waits"), [("newest", 1), ("oldest", 0)])
def test_a_request_in_prefill_is_newer_than_decoding_ones(preemption: Preemption, waits: int) -> None:
    scheduler = Scheduler(
        EngineShape(context_tokens=96, kv_blocks=6, prefill_tokens_max=9, preemption=preemption, watermark=0)
    )
    scheduler.submit(0, generate(prompt(8, 0), most=80))
    one_pass(scheduler)
    scheduler.submit(1, generate(prompt(80, 1), most=8))
    while not scheduler.preemptions:
        one_pass(scheduler)
    assert [*scheduler.waiting] == [waits]
    assert scheduler.load().running == 1


def test_a_preempted_request_may_leave_after_its_next_token() -> None:
    scheduler = Scheduler(EngineShape(context_tokens=96, kv_blocks=6, prefill_tokens_max=24, watermark=0))
    for key in range(2):
        scheduler.submit(key, generate(prompt(40, key), most=30))
    while not scheduler.preemptions:
        one_pass(scheduler)
    scheduler.cancel(0)
    while 1 not in scheduler.batch.sequences:
        assert scheduler.transit.depart(1) is None
        scheduler.plan()
        if 1 in scheduler.batch.sequences:
            assert scheduler.transit.depart(1) is None  # its next token is yet to come
        scheduler.step()
    assert scheduler.transit.depart(1) is not None


def test_a_request_that_can_no_longer_leave_is_preempted_before_leaving_ones() -> None:
    scheduler = Scheduler(EngineShape(context_tokens=96, kv_blocks=9, watermark=0))
    for key in range(2):
        scheduler.submit(key, generate(prompt(60, key), most=30))
    one_pass(scheduler)
    departures = [scheduler.transit.depart(key) for key in range(2)]
    while not scheduler.preemptions:
        one_pass(scheduler)
    assert [one.lost for one in departures if one] == ["", "it has been preempted"]
    scheduler.cancel(0)
    scheduler.submit(2, generate(prompt(60, 2), most=30))
    while 2 not in scheduler.batch.sequences:
        one_pass(scheduler)
    departures.append(scheduler.transit.depart(2))
    assert 1 in scheduler.batch.sequences  # again; the caller has not learned yet that its departure is lost
    while scheduler.preemptions == 1:
        one_pass(scheduler)
    assert ([*scheduler.waiting], [*scheduler.batch.sequences]) == ([1], [2])
    for departure in departures:
        assert departure is not None
        scheduler.transit.close(departure)
    while not one_pass(scheduler)[0].idle:
        pass
    assert (scheduler.busy, scheduler.kv.used) == (False, 0)


def test_blocks_held_by_others_need_no_room() -> None:
    scheduler = Scheduler(EngineShape(context_tokens=96, kv_blocks=8))
    for key in range(3):
        scheduler.submit(key, generate(prompt(80), most=8))
        one_pass(scheduler)
    assert scheduler.load().running == 3


def test_a_request_that_the_pool_cannot_hold_is_refused_at_once() -> None:
    scheduler = Scheduler(EngineShape(context_tokens=128, kv_blocks=8))
    refused = scheduler.submit(1, generate(prompt(128)))
    assert refused is not None
    assert refused.error == "invalid_request: 128 tokens leave no room in a context of 128"
    assert scheduler.submit(2, generate(prompt(127))) is None
    assert one_pass(scheduler)[0].prefill_tokens == 127


def test_an_answer_ends_with_the_context() -> None:
    scheduler = MuteScheduler(EngineShape(context_tokens=128))
    assert scheduler.submit_silent(1, 120, 50, []) is None
    passes = 0
    while not one_pass(scheduler)[0].idle:
        passes += 1
    assert passes == 8
    for prompt_tokens, answer in ((0, 1), (1, 0)):
        with pytest.raises(AssertionError, match="nothing to"):
            scheduler.submit_silent(2, prompt_tokens, answer, [])


def test_a_watermark_is_a_share() -> None:
    with pytest.raises(BadShape, match="a watermark is at least 0 and below 1, not 1"):
        EngineShape(watermark=1.0)


def test_given_names_extend_into_the_answer() -> None:
    scheduler = MuteScheduler(EngineShape())
    scheduler.kv.heard = True
    assert scheduler.submit_silent(1, 40, 30, [11, 12, 13]) is None
    while not one_pass(scheduler)[0].idle:
        pass
    first, second, third = scheduler.take_events()
    assert (first, second) == (Stored([11, 12]), Stored([13], 12))
    assert isinstance(third, Stored) and third.parent == 13
    assert scheduler.submit_silent(2, 70, 1, [11, 12, 13, *third.blocks]) is None
    assert one_pass(scheduler)[0].prefills == (6,)


def test_a_block_is_named_though_its_last_token_ends_the_answer() -> None:
    scheduler = Scheduler(EngineShape())
    scheduler.kv.heard = True
    scheduler.submit(1, generate(prompt(16), most=17))
    while not one_pass(scheduler)[0].idle:
        pass
    assert [len(event.blocks) for event in scheduler.take_events() if isinstance(event, Stored)] == [1, 1]


def test_cancelling_thousands_of_waiting_requests_is_fast() -> None:
    scheduler = MuteScheduler(EngineShape(waiting_max=1 << 31))
    for key in range(30_000):
        assert scheduler.submit_silent(key, 16, 8, []) is None
    began = time.process_time()
    for key in reversed(range(1, 30_000)):
        scheduler.cancel(key)
    assert time.process_time() - began < 2  # searching in a list would take many
    assert scheduler.load().waiting == 1


def test_a_request_cancelled_before_its_first_token_gets_none() -> None:
    scheduler, mute = both = Scheduler(EngineShape()), MuteScheduler(EngineShape())
    scheduler.submit(1, generate(prompt(16)))
    mute.submit_silent(1, 16, 8, [])
    for one in both:
        assert one.plan().prefill_tokens == 16
        one.cancel(1)
        assert one.step() == []


def test_an_error_also_fails_requests_in_prefill() -> None:
    scheduler = Scheduler(EngineShape(prefill_tokens_max=16))
    scheduler.faults.inject("error", 1)
    scheduler.submit(1, generate(prompt(60)))
    scheduler.plan()
    ((key, chunk),) = scheduler.step()
    assert key == 1 and chunk.error and not scheduler.busy and scheduler.load().kv_used == 0


def test_a_request_held_for_a_move_is_part_of_the_load() -> None:
    scheduler = Scheduler(EngineShape())
    scheduler.submit(1, generate(prompt(20)))
    one_pass(scheduler)
    departure, before = scheduler.transit.depart(1), scheduler.load()
    assert departure is not None and before.running == 1
    scheduler.transit.hold(departure)
    assert scheduler.load() == before and not scheduler.busy


def test_no_pass_is_steady_after_a_request_arrived_or_left_since_the_plan() -> None:
    scheduler = MuteScheduler(EngineShape(batch_max=2))
    for key in range(2):
        scheduler.submit_silent(key, 17, 100, [])
    one_pass(scheduler)
    scheduler.plan()
    assert scheduler.steady() == 14
    scheduler.submit_silent(2, 17, 100, [])
    assert scheduler.steady() == 0
    scheduler.step()
    scheduler.plan()
    assert scheduler.steady() == 13
    scheduler.cancel(0)
    assert scheduler.steady() == 0


def test_blocks_from_a_slower_tier_are_not_computed_but_take_time() -> None:
    scheduler = Scheduler(EngineShape(context_tokens=64, kv_blocks=4, host_kv_blocks=4))
    plans = []
    for salt in (0, 1, 0):
        scheduler.submit(salt, generate(prompt(60, salt), most=1))
        plans.append(one_pass(scheduler)[0])
    assert [(plan.prefill_tokens, plan.traffic) for plan in plans] == [
        (60, TierTraffic()),
        (60, TierTraffic(to_host=3)),
        (12, TierTraffic(from_host=3, to_host=3)),
    ]
    timing = TieredTiming(
        timing=ConstantTiming(prefill_tokens_per_s=1000),
        block_bytes=10,
        host_bytes_per_s=1000,
        disk_bytes_per_s=1,
    )
    assert [timing.step_s(plan) for plan in plans] == pytest.approx([0.06, 0.06, 0.03 + 0.03])


@pytest.mark.parametrize("kind", ["lru", "multi-lru", "lineage"])
def test_evictions_are_announced(kind: EvictorKind) -> None:
    scheduler = Scheduler(EngineShape(context_tokens=64, kv_blocks=4, evictor=kind))
    scheduler.kv.heard = True
    for key in (1, 2):
        scheduler.submit(key, generate(prompt(48, key), most=1))
        one_pass(scheduler)
    removed = [
        block for event in scheduler.take_events() if isinstance(event, Removed) for block in event.blocks
    ]
    names = blocks.sequence_hashes(blocks.local_hashes(prompt(48, 1), 16))
    assert removed == [names[2], names[1]]


def test_the_hit_rate_covers_recently_admitted_requests() -> None:
    scheduler = Scheduler(EngineShape())
    assert scheduler.prefill.hit_rate == 0.0
    for key in (1, 2):
        scheduler.submit(key, generate(prompt(64), most=1))
    one_pass(scheduler)
    assert scheduler.prefill.hit_rate == pytest.approx(63 / 64 / 2)
