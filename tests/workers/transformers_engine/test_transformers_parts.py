"""The engine's parts: the schedule, sampling, and weight faults."""

import random
from collections import Counter
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: make test-engines")
pytestmark = pytest.mark.engines

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from benchmarks.corruption.weight_faults import KINDS, AnyFaultInjector, draw_fault  # noqa: E402
from events.wire import Sampling  # noqa: E402
from workers.engines.transformers.blocks import Blocks  # noqa: E402
from workers.engines.transformers.faults import BitFlip, NotFloat32, WeightFaultInjector  # noqa: E402
from workers.engines.transformers.sampling import choose, uniform  # noqa: E402
from workers.engines.transformers.schedule import Schedule  # noqa: E402
from workers.engines.transformers.sequence import TorchSequence  # noqa: E402

# --- the schedule ---------------------------------------------------------------------------------------------------


def sequence(key: int, length: int) -> TorchSequence:
    return TorchSequence(key, [1] * length, length, Sampling(max_tokens=99), 0)


def run(schedule: Schedule, works: Any) -> None:
    for work in works:
        work.sequence.cached = work.start + work.count
        if work.samples:
            work.sequence.tokens.append(1)


def test_waiting_sequences_are_admitted_by_priority_after_canaries_and_started_ones() -> None:
    schedule = Schedule(Blocks(100, 16), batch_max=1, prefill_tokens_max=32)
    preempted = sequence(8, 4)
    preempted.priority, preempted.submitted = 3, 3
    schedule.add(preempted)
    for key, priority in enumerate((2, 0, 1, 0)):
        one = sequence(key, 4)
        one.priority = priority
        schedule.add(one)
    canary = sequence(9, 4)
    canary.canary = True
    schedule.add(canary, first=True)
    assert [one.key for one in schedule.waiting] == [9, 8, 1, 3, 2, 0]


def test_a_long_prompt_is_computed_in_pieces_while_others_decode() -> None:
    schedule = Schedule(Blocks(100, 16), batch_max=8, prefill_tokens_max=32)
    schedule.add(sequence(1, 10))
    run(schedule, schedule.plan()[0])
    schedule.add(sequence(2, 80))
    for expected in ([(1, 1), (2, 32)], [(1, 1), (2, 32)], [(1, 1), (2, 16)], [(1, 1), (2, 1)]):
        works, _ = schedule.plan()
        assert [(work.sequence.key, work.count) for work in works] == expected
        run(schedule, works)


def test_a_first_sequence_is_admitted_before_waiting_ones() -> None:
    schedule = Schedule(Blocks(100, 16), batch_max=1, prefill_tokens_max=32)
    for key in (1, 2):
        schedule.add(sequence(key, 10))
    schedule.plan()
    schedule.add(sequence(3, 10), first=True)
    schedule.remove(schedule.running[0])
    works, _ = schedule.plan()
    assert [work.sequence.key for work in works] == [3]


def test_the_newest_is_preempted_and_returns_with_all_its_tokens() -> None:
    schedule = Schedule(Blocks(6, 16), batch_max=8, prefill_tokens_max=512)
    for key in (1, 2):
        schedule.add(sequence(key, 30))
    for _ in range(15):
        run(schedule, schedule.plan()[0])
    assert schedule.preemptions == 0
    for _ in range(20):
        run(schedule, schedule.plan()[0])
    assert schedule.preemptions == 1
    second = schedule.waiting[0]
    assert (second.key, second.cached, second.blocks) == (2, 0, [])
    assert len(second.tokens) > 30
    schedule.remove(schedule.running[0])
    works, _ = schedule.plan()
    assert [(work.sequence.key, work.count) for work in works] == [(2, len(second.tokens))]


def test_if_all_are_about_to_leave_only_the_needy_sequence_is_preempted() -> None:
    schedule = Schedule(Blocks(7, 16), batch_max=8, prefill_tokens_max=512)
    both = [sequence(1, 40), sequence(2, 47)]
    for one in both:
        schedule.add(one)
    run(schedule, schedule.plan()[0])
    departures = [schedule.depart(one) for one in both]
    for _ in range(17):
        run(schedule, schedule.plan()[0])
    assert [one.key for one in schedule.running] == [2]
    assert [bool(departure and departure.lost) for departure in departures] == [True, False]
    assert schedule.blocks.free == 0
    assert departures[0] is not None
    schedule.transit.close(departures[0], "it is over")
    assert schedule.blocks.free == 3


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=12),
    blocks=st.integers(12, 40),
    budget=st.integers(8, 64),
)
def test_every_sequence_is_served_and_no_block_has_two_owners(
    lengths: list[int], blocks: int, budget: int
) -> None:
    schedule = Schedule(Blocks(blocks, 16), batch_max=4, prefill_tokens_max=budget)
    left = {}
    for key, length in enumerate(lengths):
        left[key] = sequence(key, length)
        schedule.add(left[key])
    for _ in range(3000):
        works, taken = schedule.plan()
        owned = Counter(block for one in schedule.running for block in one.blocks)
        assert set(taken) <= set(owned), "cleared blocks may belong to a reservation by then"
        assert not owned or max(owned.values()) == 1
        assert len(owned) + schedule.blocks.free == blocks
        assert sum(work.count for work in works if work.count > 1) <= budget
        run(schedule, works)
        for one in [one for one in left.values() if one.generated >= 20]:
            schedule.remove(left.pop(one.key))
        if not left:
            return
    raise AssertionError("a sequence is never served")


# --- sampling -------------------------------------------------------------------------------------------------------


def due(tokens: list[int], *, prompt: int = 0, seed: int = 0, **sampling: Any) -> TorchSequence:
    return TorchSequence(0, tokens, prompt, Sampling(max_tokens=9, **sampling), seed, barred=frozenset({2}))


def test_a_draw_follows_the_distribution() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    drawn = Counter(choose(logits, [due([0] * n, temperature=1.0, seed=3)])[0].token for n in range(4000))
    assert [drawn[n] / 4000 for n in range(4)] == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.03)


@pytest.mark.parametrize(
    ("limits", "possible"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.7}, {0, 1}),
        ({"top_p": 0.01}, {0}),
        ({"top_k": 3, "top_p": 0.6}, {0, 1}),
    ],
)
def test_limits_cut_the_tail(limits: dict[str, Any], possible: set[int]) -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    drawn = {choose(logits, [due([0] * n, temperature=1.0, seed=3, **limits)])[0].token for n in range(300)}
    assert drawn == possible


def test_random_numbers_are_the_same_for_ever() -> None:
    assert uniform(7, 41) == pytest.approx(
        0.0281354009, abs=1e-9
    )  # a change would break streams across versions
    assert 0.0 <= min(uniform(1, n) for n in range(1000)) < max(uniform(1, n) for n in range(1000)) < 1.0


def test_min_tokens_bar_tokens_that_end_the_answer() -> None:
    logits = torch.tensor([[0.0, 1.0, 9.0, 2.0]])
    assert choose(logits, [due([0], min_tokens=1)])[0].token == 3
    assert choose(logits, [due([0])])[0].token == 2


def test_min_p_cuts_tokens_far_from_the_best() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    for least, possible in ((0.05, {0, 1, 2, 3}), (0.2, {0, 1, 2}), (0.55, {0, 1}), (1.0, {0})):
        asked: dict[str, Any] = {"temperature": 1.0, "seed": 3, "min_p": least}
        assert {choose(logits, [due([0] * n, **asked)])[0].token for n in range(300)} == possible
    # the distance to the best is measured after the temperature
    flat: dict[str, Any] = {"temperature": 4.0, "seed": 3, "min_p": 0.5}
    assert {choose(logits, [due([0] * n, **flat)])[0].token for n in range(300)} == {0, 1, 2, 3}


def test_a_bias_is_added_to_a_logit_and_to_no_logprob() -> None:
    logits = torch.tensor([[1.0, 1.2, 1.1, 0.0]])
    biased = choose(logits, [due([0], logit_bias={3: 1.3, 1: -0.5}, logprobs=4)])[0]
    assert biased.token == 3
    assert biased.logprob == choose(logits, [due([0], logit_bias={3: 100.0}, logprobs=4)])[0].logprob
    assert biased.logprob is not None and biased.logprob.top[0][0] == 1
    assert choose(logits, [due([0])])[0].token == 1  # it changes no logits


def test_penalties_suppress_generated_tokens() -> None:
    logits = torch.tensor([[1.0, 1.2, 1.1, 0.0]])
    assert choose(logits, [due([1], presence_penalty=0.15)])[0].token == 2
    assert choose(logits, [due([1, 1, 2], frequency_penalty=0.12)])[0].token == 0
    assert (
        choose(logits, [due([1], prompt=1, presence_penalty=0.15)])[0].token == 1
    )  # the prompt is not counted
    assert choose(logits, [due([1], prompt=1, repetition_penalty=1.5)])[0].token == 2  # but it is here


def test_nan_and_infinity_give_no_token() -> None:
    logits = torch.tensor([[0.0, 1.0], [0.0, torch.nan], [torch.inf, 0.0]])
    assert [choice.token for choice in choose(logits, [due([0])] * 3)] == [1, None, None]


def test_each_row_gets_the_requested_number_of_logprobs() -> None:
    logits = torch.randn(3, 50)
    choices = choose(logits, [due([0], logprobs=2), due([0]), due([0], logprobs=80)])
    assert [len(choice.logprob.top) if choice.logprob else None for choice in choices] == [2, None, 50]


# --- faults of weights ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_is_determined_by_its_seed_and_heals_completely(kind: str) -> None:
    weights = {"a": torch.randn(40, 24), "b": torch.randn(64, 64), "norm": torch.ones(64)}
    before = {name: weight.clone() for name, weight in weights.items()}
    surgeon = AnyFaultInjector(weights)
    fault = draw_fault(weights, kind, random.Random(4))
    assert fault == draw_fault(weights, kind, random.Random(4))
    surgeon.inflict(fault)
    surgeon.inflict(draw_fault(weights, kind, random.Random(5)))
    changed = sum(int((weights[name] != before[name]).sum()) for name in weights)
    expected = {"one row zeroed": range(24, 129), "16×16 tile zeroed": range(256, 513)}
    assert changed in expected.get(kind, range(1, 3))
    surgeon.heal()
    assert all(torch.equal(weights[name], before[name]) for name in weights)


@pytest.mark.parametrize(
    ("bit", "value"), [(31, -1.5), (30, float("nan")), (22, 1.0), (0, 1.5000001192092896)]
)
def test_bits_are_numbered_as_in_float32(bit: int, value: float) -> None:
    weights = {"a": torch.full((2, 2), 1.5)}
    WeightFaultInjector(weights).inflict(BitFlip("a", 1, 0, bit))
    if bit == 30:  # the exponent of 1.5 is 127: its top bit makes it 255, which is not a number
        assert not torch.isfinite(weights["a"][1, 0])
    else:
        assert float(weights["a"][1, 0]) == value


def test_bits_of_other_types_are_left_alone() -> None:
    with pytest.raises(NotFloat32):
        WeightFaultInjector({"a": torch.ones(2, 2, dtype=torch.bfloat16)}).inflict(BitFlip("a", 0, 0, 31))
