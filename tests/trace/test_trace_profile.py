"""A profile contains only statistics, and a damaged profile is refused."""

import gzip
import json
from contextlib import suppress
from pathlib import Path
from random import Random
from tempfile import NamedTemporaryFile
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.trace.profile import is_profile, learn, load, save
from controller.trace.rows import BadTrace, TraceRow
from controller.trace.synthesis import synthesize
from events.errors import UsageError

ROWS = [
    TraceRow(0, 1500, 77_001, [900_001, 900_002, 900_003]),
    TraceRow(70_000, 1024, 77_002, [900_001, 900_002]),
    TraceRow(123_456, 700, 77_003, [900_001, 900_004]),
    TraceRow(123_456, 300, 77_003, [900_005]),
]


def content() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(gzip.decompress(save(learn(ROWS, says="test"))))
    return loaded


def test_a_profile_contains_no_request() -> None:
    """Not its hash ids, its time, or a combination of its lengths."""
    text = json.dumps(content())
    assert "9000" not in text and "123456" not in text and "1500" not in text
    assert content()["outputs"] == {"77001": 1, "77002": 1, "77003": 2}
    assert content()["gaps"] == [[53456.0, 1], [70000.0, 1]] and content()["groups"] == {"1": 2, "2": 1}


def test_a_profile_has_the_number_and_rate_of_its_requests() -> None:
    learned = learn(ROWS)
    assert learned.requests == 4 and learned.rate == pytest.approx(4 / 123.456)
    assert learn(ROWS[:1]).rate == float("inf")


conversations = st.lists(
    st.integers(2, 6), min_size=2, max_size=6
)  # number of blocks that the prompts of each share


@settings(max_examples=30)
@given(conversations, st.randoms(use_true_random=False))
def test_a_profile_does_not_contain_the_order_of_conversations(shared: list[int], chance: Random) -> None:
    def saved(order: list[int]) -> bytes:
        """Return the profile of a trace in which each conversation asks twice in a row, after a common greeting."""
        rows = []
        for number, blocks in enumerate(order):
            ids = [0, *range(1000 * number + 1, 1000 * number + blocks)]
            rows += [
                TraceRow(number, 512 * blocks + blocks, 1, [*ids, 1000 * number + 900 + n]) for n in range(2)
            ]
        return save(learn(rows))

    shuffled = chance.sample(shared, len(shared))
    # What follows the greeting first reveals which conversation came first
    begin = shuffled.index(shared[0])
    shuffled.insert(0, shuffled.pop(begin))
    assert saved(shuffled) == saved(shared)


def test_an_empty_trace_has_no_profile() -> None:
    with pytest.raises(BadTrace, match="no request to learn from"):
        learn([])


def damaged(tmp_path: Path, value: dict[str, Any]) -> Path:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(value))
    return path


def test_a_profile_is_detected_by_its_beginning_even_if_uncompressed(tmp_path: Path) -> None:
    path = damaged(tmp_path, content())
    assert is_profile(path) and load(path) == learn(ROWS, says="test")
    path.write_text('{"timestamp": 0, "input_length": 1, "output_length": 1}')
    assert not is_profile(path) and not is_profile(tmp_path / "none")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda p: p.pop("outputs"), "missing required field `outputs`"),
        (
            lambda p: p.update(holdfast_profile=99),
            "has format 99, but this release reads format 1: fit the trace again",
        ),
        (lambda p: p.update(block_tokens=0), "it has no blocks"),
        (lambda p: p["core"].update(nodes=[]), "it has no blocks"),
        (lambda p: p["core"]["nodes"][1].__setitem__(0, 5), "node 1 has no parent before it"),
        (lambda p: p["core"]["nodes"][1].__setitem__(2, 0), "node 1 has no visits"),
        (lambda p: p["core"]["nodes"][1].__setitem__(2, 9), "the outcomes at node 0 do not add up"),
        (
            lambda p: p["core"]["nodes"][0].__setitem__(4, -1),
            "the first prompt at node 0 continues to a node without visits",
        ),
        (lambda p: p["core"].update(first_leaves={}), "the number of own-part lengths differs"),
        (lambda p: p["core"].update(leaf_rests={}), "the number of last blocks of own parts differs"),
        (lambda p: p["core"].update(leaf_rests={"513": 3}), "a last block has no tokens, or more than 512"),
        (lambda p: p["core"].update(returns={}), "the return gaps do not match the visits"),
        (lambda p: p["core"]["nodes"][0].__setitem__(2, 10**9), "it has 1,000,000,000 requests, more than"),
        (
            lambda p: p["outputs"].update({"5": 10**30}),
            "the numbers of outputs, arrivals and requests differ",
        ),
        (lambda p: p["gaps"].append([1, 1]), "the numbers of outputs, arrivals and requests differ"),
        (lambda p: p["outputs"].update({"-5": 1}), "a length, a gap or a count is below 0"),
        (lambda p: p.update(gaps=[[1e300, 3]]), "a length, a gap or a count is below 0, or too large"),
        (lambda p: p.update(groups={}), "the numbers of outputs, arrivals and requests differ"),
    ],
)
def test_a_damaged_profile_is_refused_with_the_reason(change: Any, says: str, tmp_path: Path) -> None:
    value = content()
    change(value)
    with pytest.raises(BadTrace, match=says):
        load(damaged(tmp_path, value))


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return the places of a value's parts: container, and key or index."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    below = [found for key in keys if isinstance(value[key], dict | list) for found in places(value[key])]
    return [(value, key) for key in keys] + below


odd: st.SearchStrategy[Any] = st.sampled_from(
    [-1, 0, 1, 2, 600, 10**6, 2**63, 10**30, 1.5, 1e300, None, "x", True, [], {}]
)


@settings(max_examples=60)
@given(st.data(), odd)
def test_any_damaged_profile_is_refused_or_valid(data: st.DataObject, wrong: Any) -> None:
    value = content()
    holder, key = data.draw(st.sampled_from(places(value)))
    holder[key] = wrong
    with NamedTemporaryFile() as file:
        Path(file.name).write_text(json.dumps(value))
        with suppress(BadTrace, UsageError):
            assert len(list(synthesize(load(Path(file.name)), 9))) == 9


@pytest.mark.parametrize(("kept", "rest"), [(200, b""), (12, b"\0" * 20)])
def test_a_truncated_or_overwritten_profile_is_refused(kept: int, rest: bytes, tmp_path: Path) -> None:
    path = tmp_path / "cut.json.gz"
    path.write_bytes(save(learn(ROWS))[:kept] + rest)
    assert not (rest and is_profile(path))  # the beginning of a truncated profile may still be readable
    with pytest.raises(BadTrace, match=r"cut\.json\.gz cannot be read: "):
        load(path)
