"""Block names of a request equal those of engines, however it is split into prompt and answer."""

from hypothesis import given, settings
from hypothesis import strategies as st

from events.blocks import BlockNames, local_hashes, seed, sequence_hashes

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@settings(max_examples=40)
@given(TOKENS, TOKENS, st.integers(1, 9), st.sampled_from([seed(), seed(namespace="a"), seed(lora="a")]))
def test_names_equal_those_of_the_whole_sequence(
    prompt: list[int], said: list[int], size: int, salt: int
) -> None:
    expected = sequence_hashes(local_hashes(prompt + said, size, salt))
    blocks = BlockNames(prompt, salt)
    assert blocks.of(size) == expected[: len(prompt) // size]
    assert blocks.of(size, said) == expected
    assert blocks.of(size) == expected[: len(prompt) // size], "names of answer blocks are not kept"


def test_a_prompt_is_hashed_once_per_block_size() -> None:
    blocks = BlockNames([1] * 33)
    assert blocks.of(16) is blocks.of(16)
    assert blocks.of(16) is blocks.of(16, [7] * 14)
    assert (len(blocks.of(16)), len(blocks.of(8))) == (2, 4)
