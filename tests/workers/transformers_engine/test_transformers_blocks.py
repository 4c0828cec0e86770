"""The transformers engine's blocks and schedule without a model: prefix sharing and its events."""

import random

import pytest

pytest.importorskip("torch", reason="torch is not installed: make test-engines")
pytestmark = pytest.mark.engines

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from events import blocks as naming  # noqa: E402
from events.kv import Cleared, KvEvent, Removed, Stored  # noqa: E402
from events.wire import Sampling  # noqa: E402
from workers.engines.transformers.blocks import Blocks  # noqa: E402
from workers.engines.transformers.schedule import Schedule  # noqa: E402
from workers.engines.transformers.sequence import TorchSequence  # noqa: E402
from workers.kv_events.ledger import KvEventLedger  # noqa: E402

SIZE = 4


def sequence(key: int, tokens: list[int], *, shares: bool = True, salt: int = naming.SEED) -> TorchSequence:
    return TorchSequence(key, list(tokens), len(tokens), Sampling(max_tokens=9), 0, shares=shares, salt=salt)


def names(tokens: list[int], salt: int = naming.SEED) -> list[int]:
    return naming.sequence_hashes(naming.local_hashes(tokens, SIZE, salt))


def step(schedule: Schedule) -> list[TorchSequence]:
    """Compute each running sequence's part. Return the sequences that are due a token."""
    works, _ = schedule.plan()
    for work in works:
        schedule.computed(work)
    return [work.sequence for work in works if work.samples]


def read(schedule: Schedule, one: TorchSequence) -> None:
    """Add a sequence, and compute its whole prompt."""
    schedule.add(one)
    while one not in step(schedule):
        pass


def made(blocks: int = 20) -> Schedule:
    return Schedule(Blocks(blocks, SIZE), batch_max=8, prefill_tokens_max=64)


def test_a_prompt_with_a_shared_prefix_is_computed_from_its_first_difference() -> None:
    schedule, prompt = made(), list(range(10))
    first, second = sequence(1, prompt), sequence(2, [*prompt[:9], 77, 78])
    read(schedule, first)
    read(schedule, second)
    assert (first.found, second.found) == (0, 8)
    assert second.blocks[:2] == first.blocks[:2] and second.blocks[2] != first.blocks[2]
    assert schedule.blocks.used == 4
    assert schedule.blocks.take_events() == [Stored(names(prompt))]
    schedule.remove(first)
    assert schedule.blocks.used == 3
    schedule.remove(second)
    assert schedule.blocks.used == 0 and schedule.blocks.take_events() == []


def test_at_least_one_token_is_computed_because_it_gives_the_logits() -> None:
    schedule, prompt = made(), list(range(8))
    for key in (1, 2):
        one = sequence(key, prompt)
        read(schedule, one)
        schedule.remove(one)
    assert one.found == 4


def test_an_answer_is_found_by_the_next_turn_of_the_conversation() -> None:
    schedule = made()
    first = sequence(1, [1, 2, 3])
    read(schedule, first)
    for token in range(100, 106):
        first.tokens.append(token)
        step(schedule)
    schedule.remove(first)
    second = sequence(2, [*first.tokens, 7, 8])
    read(schedule, second)
    assert second.found == 8


@pytest.mark.parametrize("other", [{"shares": False}, {"salt": naming.seed(namespace="tenant")}])
def test_a_canary_and_another_tenant_find_nothing(other: dict[str, int]) -> None:
    schedule, prompt = made(), list(range(10))
    read(schedule, sequence(1, prompt))
    schedule.blocks.take_events()
    one = sequence(2, prompt, **other)  # type: ignore[arg-type]
    read(schedule, one)
    assert one.found == 0
    said = schedule.blocks.take_events()
    assert said == ([] if "shares" in other else [Stored(names(prompt, other["salt"]))])


def test_a_hash_collision_is_not_taken_for_the_same_block() -> None:
    blocks, one = Blocks(4, SIZE), [1, 2, 3, 4]
    block = blocks.take()
    blocks.name(block, 99, None, one)
    assert blocks.find([99], one) == [block]
    assert blocks.find([99], [1, 2, 3, 5]) == []


def test_the_block_released_longest_ago_is_evicted_first_and_the_end_of_a_prompt_before_its_beginning() -> (
    None
):
    schedule = made(6)
    for key, prompt in ((1, list(range(8))), (2, list(range(50, 58)))):
        one = sequence(key, [*prompt, 0])
        read(schedule, one)
        schedule.remove(one)
    assert schedule.blocks.take_events() == [
        Stored(names(list(range(8)))),
        Stored(names(list(range(50, 58)))),
    ]
    read(schedule, sequence(3, [90, 91, 92, 93, 94, 95, 96, 97, 98, 99, 89, 88, 87]))
    first, second = names(list(range(8)))
    stored, removed = schedule.blocks.take_events()[-1], schedule.blocks.take_events()
    assert isinstance(stored, Stored) and removed == []
    again = sequence(4, [*range(8), 0])
    assert schedule.blocks.find([first, second], again.tokens) == []  # both are gone


def test_a_preempted_sequence_finds_its_computed_blocks() -> None:
    schedule = made(6)
    first, second = sequence(1, list(range(8))), sequence(2, list(range(50, 58)))
    schedule.add(first)
    schedule.add(second)
    due = step(schedule)
    while not schedule.preemptions:
        for one in due:
            one.tokens.append(100 + len(one.tokens))
        due = step(schedule)
    assert second in schedule.waiting and second.cached == 0
    schedule.remove(first)
    step(schedule)
    assert second in schedule.running and second.found >= 8


def test_after_a_change_of_the_weights_nothing_is_found() -> None:
    schedule, prompt = made(), list(range(10))
    one = sequence(1, prompt)
    read(schedule, one)
    schedule.blocks.take_events()
    one.shares = False
    schedule.blocks.forget_names()
    assert schedule.blocks.take_events() == [Cleared()]
    schedule.remove(one)
    again = sequence(2, prompt)
    read(schedule, again)
    assert again.found == 0 and schedule.blocks.free == 20 - 3


@settings(max_examples=40)
@given(seed=st.integers(0, 10_000), count=st.integers(5, 14))
def test_whatever_happens_every_block_has_as_many_holders_as_it_should(seed: int, count: int) -> None:
    draw, schedule, ledger = random.Random(seed), made(count), KvEventLedger()
    blocks, there, key = schedule.blocks, list[TorchSequence](), 0
    for _ in range(60):
        if draw.random() < 0.3 and len(there) < 5:
            key += 1
            tokens = [draw.randrange(2) for _ in range(draw.randrange(1, 17))]
            one = sequence(key, tokens, shares=draw.random() < 0.9)
            there.append(one)
            schedule.add(one)
        if there and draw.random() < 0.15:
            schedule.remove(there.pop(draw.randrange(len(there))))
        if draw.random() < 0.02:
            blocks.forget_names()
            for one in there:
                one.shares = False
        for one in step(schedule):
            one.tokens.append(draw.randrange(2))
            if len(one.tokens) > SIZE * (count - 1):
                there.remove(one)
                schedule.remove(one)
        holders = [0] * count
        for one in there:
            for block in one.blocks:
                holders[block] += 1
            known = names(one.tokens)
            for place, block in enumerate(one.blocks):
                if block in blocks.names:
                    name, _ = blocks.names[block]
                    assert name == known[place]
        assert blocks.holders == holders
        assert sorted([*blocks.empty, *blocks.idle]) == [
            block for block in range(count) if not holders[block]
        ]
        assert set(blocks.named.values()) == {block for block in range(count) if block in blocks.names}
        events: list[KvEvent] = blocks.take_events()
        ledger.record(events)
        assert ledger.refused == 0
        assert set(ledger.held) == set(blocks.named)


def test_evictions_and_new_names_are_announced_in_order() -> None:
    blocks = Blocks(1, SIZE)
    for number in range(2):
        held = [blocks.take()]
        blocks.name(held[0], number, None, [number] * SIZE)
        blocks.give_back(held)
    assert blocks.take_events() == [Stored([0]), Removed([0]), Stored([1])]
