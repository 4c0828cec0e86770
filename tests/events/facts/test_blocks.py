"""Blocks of tokens have the same names as in NVIDIA Dynamo's router."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from events.blocks import SEED, follow, local_hashes, seed, sequence_hashes

LOCAL = [14643705804678351452, 16777012769546811212, 483935686894639516]  # of tokens 1 to 12, in blocks of 4
SEQUENCE = [14643705804678351452, 4945711292740353085, 12583592247330656132]
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def test_the_published_hashes() -> None:
    assert local_hashes(range(1, 13), 4) == LOCAL
    assert [sequence_hashes(LOCAL[:count]) for count in range(4)] == [SEQUENCE[:count] for count in range(4)]
    assert follow(SEQUENCE[1], LOCAL[2]) == SEQUENCE[2]


def test_a_block_that_is_not_full_has_no_name() -> None:
    assert local_hashes(range(1, 16), 4) == LOCAL
    assert local_hashes([], 4) == sequence_hashes([]) == []
    assert local_hashes([1, 2, 3], 2**62) == [], "whatever size a worker registers"


def test_adapters_and_namespaces_share_nothing() -> None:
    seeds = [seed(), seed(lora="a"), seed(namespace="a"), seed(lora="a", namespace="a"), seed(lora="aa")]
    assert seeds[0] == SEED
    assert len({local_hashes(range(4), 4, one)[0] for one in seeds}) == len(seeds)


@given(TOKENS, TOKENS, st.integers(1, 8))
def test_a_sequence_hash_names_the_whole_prefix(one: list[int], other: list[int], block: int) -> None:
    ours, theirs = (sequence_hashes(local_hashes(tokens, block)) for tokens in (one, other))
    for place, (our, their) in enumerate(zip(ours, theirs, strict=False)):
        assert (our == their) == (one[: (place + 1) * block] == other[: (place + 1) * block])


@pytest.mark.parametrize("count", [4095, 4096, 4097, 9000])
def test_a_prompt_of_any_length_is_hashed_the_same_way(count: int) -> None:
    tokens = [n * 7919 % 2**32 for n in range(count)]
    parts = [local_hashes(tokens[at : at + 1024], 16) for at in range(0, count, 1024)]
    assert local_hashes(tokens, 16) == [one for part in parts for one in part]
    tokens[-1] = -1
    for block in (1, 16, 10_000):  # in a block that is not full, too
        with pytest.raises(OverflowError):
            local_hashes(tokens, block)


@pytest.mark.parametrize(
    ("tokens", "block", "error"),
    [([1], 0, ValueError), ([-1], 1, OverflowError), ([2**32], 1, OverflowError), ([1.5], 1, OverflowError)],
)
def test_values_that_are_no_tokens_and_block_sizes_below_one_are_refused(
    tokens: list[int], block: int, error: type[Exception]
) -> None:
    with pytest.raises(error):
        local_hashes(tokens, block)
