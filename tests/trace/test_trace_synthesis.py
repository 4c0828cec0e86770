"""Synthetic requests resemble the learned ones; each knob changes its own quantity, and nothing else."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import islice
from math import isclose
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulation import chat_traffic
from controller.trace.analysis import Analysis, analyze, measure
from controller.trace.profile import TraceProfile, learn, load, save
from controller.trace.rows import BadTrace, TraceReader, TraceRow
from controller.trace.synthesis import SynthesisKnobs, synthesize
from events.errors import UsageError

MOONCAKE = Path(__file__).parents[3] / "shared" / "data" / "mooncake_conversation.jsonl"
CLOSE = 0.03
BLOCK = chat_traffic.BLOCK_TOKENS


@pytest.fixture(scope="module")
def recorded() -> list[TraceRow]:
    return list(chat_traffic.requests(seed=7, seconds=2400))


@pytest.fixture(scope="module")
def learned(recorded: list[TraceRow]) -> TraceProfile:
    return learn(recorded, BLOCK)


@pytest.fixture(scope="module")
def again(learned: TraceProfile) -> list[TraceRow]:
    return made(learned)


@pytest.fixture(scope="module")
def profile(recorded: list[TraceRow]) -> TraceProfile:
    """Of a small part: enough for tests that do not compare figures."""
    return learn(recorded[:600], BLOCK)


@pytest.fixture(scope="module")
def plain(profile: TraceProfile) -> list[TraceRow]:
    return made(profile)


def made(profile: TraceProfile, seed: int = 3, **knobs: float) -> list[TraceRow]:
    """Return as many requests as were learned."""
    return list(synthesize(profile, profile.requests, SynthesisKnobs(**knobs), seed=seed))  # type: ignore[arg-type]


def off(found: Analysis, expected: Analysis) -> dict[str, float]:
    """Return the relative error of each validated figure."""
    figures = {}
    for name in ("input_length", "output_length", "context_length", "hit_rate"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        for statistic in ("mean", "p95"):
            figures[f"{name} {statistic}"] = getattr(ours, statistic) / getattr(theirs, statistic) - 1
    return figures


def test_it_is_within_three_percent_of_a_small_trace(recorded: list[TraceRow], again: list[TraceRow]) -> None:
    figures = off(analyze(again, BLOCK), analyze(recorded, BLOCK))
    assert max(map(abs, figures.values())) < CLOSE, figures


@pytest.mark.slow
@pytest.mark.skipif(
    not MOONCAKE.exists(), reason="needs ../shared/data/mooncake_conversation.jsonl beside this clone"
)
def test_it_is_within_three_percent_of_the_real_conversation_trace() -> None:
    recorded = list(TraceReader(MOONCAKE))
    figures = off(analyze(synthesize(learn(recorded), len(recorded))), analyze(recorded))
    assert max(map(abs, figures.values())) < CLOSE, figures


def test_as_many_as_were_learned_arrive_in_the_same_time_and_share_the_same_prefixes(
    recorded: list[TraceRow], again: list[TraceRow]
) -> None:
    ours, theirs = analyze(again, BLOCK), analyze(recorded, BLOCK)
    assert (ours.blocks, ours.shared_blocks) == (theirs.blocks, theirs.shared_blocks)
    assert ours.rate == pytest.approx(theirs.rate)
    assert asdict(ours.output_length) == pytest.approx(asdict(theirs.output_length))
    assert ours.context_length.mean == pytest.approx(theirs.context_length.mean)  # type: ignore[union-attr]


@pytest.mark.slow
@pytest.mark.parametrize("times", [0.5, 2])
def test_fewer_or_more_than_were_learned_share_as_much(
    times: float, learned: TraceProfile, recorded: list[TraceRow]
) -> None:
    requests = int(times * len(recorded))
    figures = off(analyze(synthesize(learned, requests), BLOCK), analyze(recorded[:requests], BLOCK))
    assert abs(figures["output_length mean"]) < CLOSE
    assert abs(figures["input_length mean"]) < 2 * CLOSE
    assert abs(figures["hit_rate mean"]) < 2 * CLOSE


def soon(rows: list[TraceRow]) -> float:
    """Return the median number of requests until a block recurs."""
    last: dict[int, int] = {}
    gaps = []
    for number, row in enumerate(rows):
        gaps += [number - last[block] for block in row.hash_ids if block in last]
        last |= dict.fromkeys(row.hash_ids, number)
    return float(np.median(gaps))


def test_blocks_recur_as_soon_as_in_the_trace(recorded: list[TraceRow], again: list[TraceRow]) -> None:
    """Otherwise a bounded cache would find far fewer: independent draws are ten times as far apart."""
    assert soon(again) == pytest.approx(soon(recorded), rel=0.35)


def test_over_several_rounds_only_lasting_prefixes_keep_their_ids(profile: TraceProfile) -> None:
    again = list(synthesize(profile, 2 * profile.requests))
    halves = [
        Counter(b for row in part for b in row.hash_ids)
        for part in (again[: profile.requests], again[profile.requests :])
    ]
    both = halves[0].keys() & halves[1].keys()
    assert len(both) == sum(node.blocks for node in profile.core.nodes if node.lasting)
    assert sorted(halves[0].values()) == sorted(halves[1].values())


def test_every_synthetic_trace_is_a_valid_trace(plain: list[TraceRow]) -> None:
    last = 0.0
    for row in plain:
        assert row.timestamp >= last
        assert len(row.hash_ids) == -(-row.input_length // BLOCK)
        last = row.timestamp
    analyze(plain, BLOCK)  # raises if its prefixes are not a tree


def test_the_seed_decides(profile: TraceProfile, plain: list[TraceRow]) -> None:
    assert made(profile) == plain
    assert made(profile, seed=4) != plain


def test_a_saved_profile_generates_the_same_requests(
    profile: TraceProfile, plain: list[TraceRow], tmp_path: Path
) -> None:
    path = tmp_path / "profile.json.gz"
    path.write_bytes(save(profile))
    assert load(path) == profile
    assert made(load(path)) == plain


def test_a_billion_requests_start_immediately(profile: TraceProfile, plain: list[TraceRow]) -> None:
    assert list(islice(synthesize(profile, 10**9, seed=3), 5)) == plain[:5]


# --- the knobs --------------------------------------------------------------------------------------------


def column(rows: Sequence[TraceRow], field: str) -> list[object]:
    return [getattr(row, field) for row in rows]


def same(ours: Sequence[TraceRow], plain: Sequence[TraceRow], *fields: str) -> bool:
    return all(column(ours, field) == column(plain, field) for field in fields)


def shapes(rows: Sequence[TraceRow]) -> list[list[int]]:
    """Return for each prompt the number of the first prompt with each of its blocks: equal if they share alike."""
    seen: dict[int, int] = {}
    return [[seen.setdefault(block, number) for block in row.hash_ids] for number, row in enumerate(rows)]


def test_the_output_multiplier_makes_outputs_longer(profile: TraceProfile, plain: list[TraceRow]) -> None:
    ours = made(profile, osl_multiplier=2.5)
    assert same(ours, plain, "timestamp", "input_length", "hash_ids")
    assert [row.output_length for row in ours] == [round(row.output_length * 2.5) for row in plain]
    assert min(row.output_length for row in made(profile, osl_multiplier=0.0001)) == 1


def test_max_osl_cuts_outputs(profile: TraceProfile, plain: list[TraceRow]) -> None:
    ours = made(profile, max_osl=300)
    assert same(ours, plain, "timestamp", "input_length", "hash_ids")
    assert [row.output_length for row in ours] == [min(300, row.output_length) for row in plain]


def test_the_speedup_divides_times(profile: TraceProfile, plain: list[TraceRow]) -> None:
    ours = made(profile, speedup_ratio=4)
    assert same(ours, plain, "input_length", "output_length", "hash_ids")
    assert all(isclose(a.timestamp, b.timestamp / 4) for a, b in zip(ours, plain, strict=True))


def test_the_prompt_multiplier_makes_own_parts_longer(profile: TraceProfile, plain: list[TraceRow]) -> None:
    ours = made(profile, prompt_len_multiplier=1.5)
    assert same(ours, plain, "timestamp", "output_length")
    before, after = analyze(plain, BLOCK), analyze(ours, BLOCK)
    assert after.context_length == before.context_length and after.shared_blocks == before.shared_blocks
    assert after.unique_length.mean == pytest.approx(1.5 * before.unique_length.mean, rel=0.01)  # type: ignore[union-attr]


def test_the_prefix_multiplier_makes_shared_prefixes_longer(
    profile: TraceProfile, plain: list[TraceRow]
) -> None:
    ours = made(profile, prefix_len_multiplier=2)
    assert same(ours, plain, "timestamp", "output_length")
    before, after = analyze(plain, BLOCK), analyze(ours, BLOCK)
    assert after.unique_length == before.unique_length
    assert after.shared_blocks == 2 * before.shared_blocks
    assert after.context_length.mean == pytest.approx(2 * before.context_length.mean, rel=0.01)  # type: ignore[union-attr]
    shorter = analyze(made(profile, prefix_len_multiplier=0.5), BLOCK)
    assert shorter.unique_length == before.unique_length
    assert shorter.context_length.mean == pytest.approx(before.context_length.mean / 2, rel=0.1)  # type: ignore[union-attr]


def test_the_root_multiplier_makes_disjoint_trees(profile: TraceProfile, plain: list[TraceRow]) -> None:
    ours = made(profile, prefix_root_multiplier=4)
    assert same(ours, plain, "timestamp", "input_length", "output_length")
    before, after = analyze(plain, BLOCK), analyze(ours, BLOCK)
    assert after.hit_rate.mean < 0.8 * before.hit_rate.mean  # type: ignore[union-attr]
    assert after.shared_blocks < before.shared_blocks < before.blocks < after.blocks
    firsts = {row.hash_ids[0] for row in plain if row.hash_ids}
    popular = max(firsts, key=column_of_firsts(plain).count)
    copies = {b.hash_ids[0] for a, b in zip(plain, ours, strict=True) if a.hash_ids[:1] == [popular]}
    assert len(copies) == 4


def column_of_firsts(rows: Sequence[TraceRow]) -> list[int]:
    return [row.hash_ids[0] for row in rows if row.hash_ids]


def test_max_isl_draws_long_prompts_again(profile: TraceProfile, plain: list[TraceRow]) -> None:
    ours = made(profile, max_isl=1000)
    assert same(ours, plain, "timestamp", "output_length")
    assert max(row.input_length for row in ours) <= 1000
    kept = [row.input_length for row in plain if row.input_length <= 1000]
    assert np.mean([row.input_length for row in ours]) == pytest.approx(np.mean(kept), rel=0.1)


def test_knobs_at_one_change_nothing(profile: TraceProfile, plain: list[TraceRow]) -> None:
    ones = SynthesisKnobs(
        prefix_len_multiplier=1.0, prefix_root_multiplier=1, prompt_len_multiplier=1.0, osl_multiplier=1.0
    )
    assert list(synthesize(profile, profile.requests, ones, seed=3)) == plain
    assert shapes(made(profile, max_isl=10**7)) == shapes(plain)


def test_prompts_that_are_all_too_long_are_an_error(profile: TraceProfile) -> None:
    with pytest.raises(BadTrace, match=r"10000 consecutive prompts were longer than --max-isl 1$"):
        made(profile, max_isl=1)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        (
            "prefix_len_multiplier",
            0.0,
            "--prefix-len-multiplier must be a number from 1e-06 to 1e.06, not 0",
        ),
        ("osl_multiplier", float("nan"), "--osl-multiplier must be a number from .* not nan"),
        ("speedup_ratio", -1.0, "--speedup-ratio must be a number from .* not -1"),
        ("prompt_len_multiplier", float("inf"), "--prompt-len-multiplier must be a number from .* not inf"),
        ("prefix_root_multiplier", 0, "--prefix-root-multiplier must be a number from 1 to 16777216, not 0"),
        ("max_isl", 0, "--max-isl must be a number from 1 to 16777216, not 0"),
    ],
)
def test_invalid_knobs_are_named(name: str, value: float, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        replace(SynthesisKnobs(), **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["prefix_len_multiplier", "prompt_len_multiplier", "osl_multiplier"])
def test_lengths_beyond_memory_are_an_error(name: str, profile: TraceProfile) -> None:
    much: dict[str, Any] = {name: 1e6}
    with pytest.raises(
        UsageError, match=r"a prompt or an answer would have .* tokens, more than .*: use a smaller factor"
    ):
        made(profile, **much)


# --- small and odd traces ---------------------------------------------------------------------------------


def test_the_example_of_the_seeds_readme_doubles_every_prefix() -> None:
    """Paths 0,1,2,(3) | 0,1 | 0,1,2 | 0,(4),(5) with prefixes twice as long: 6 + 1, 4, 6 and 2 + 2 blocks."""
    prompts = [[0, 1, 2, 3], [0, 1], [0, 1, 2], [0, 4, 5]]
    learned = learn([TraceRow(0, len(ids) * 512, 1, ids) for ids in prompts])
    ours = list(synthesize(learned, 4, SynthesisKnobs(prefix_len_multiplier=2)))
    assert sorted(len(row.hash_ids) for row in ours) == [4, 4, 6, 7]
    assert sorted(row.input_length for row in ours) == [2048, 2048, 3072, 3584]
    assert {tuple(row.hash_ids[:2]) for row in ours} == {(0, 1)}
    assert sorted(sum(block < 6 for block in row.hash_ids) for row in ours) == [2, 4, 6, 6]


def test_a_trace_without_anything_shared_stays_so() -> None:
    recorded = [TraceRow(n, 600, 7, [2 * n, 2 * n + 1]) for n in range(20)]
    ours = analyze(synthesize(learn(recorded), 50))
    assert ours.shared_blocks == 0 and ours.hit_rate is not None and ours.hit_rate.max == 0
    assert ours.input_length.mean == 600 and ours.output_length.mean == 7


def test_a_single_request_is_repeated_without_gaps() -> None:
    ours = list(synthesize(learn([TraceRow(5, 600, 7, [0, 1])]), 3))
    assert [(row.timestamp, row.input_length, row.output_length) for row in ours] == [(0, 600, 7)] * 3


def test_a_trace_without_prefixes_keeps_its_lengths_and_obeys_the_prompt_multiplier() -> None:
    learned = learn([TraceRow(n, 10 * n, n, []) for n in range(30)])
    ours = list(synthesize(learned, 30))
    assert sorted(row.input_length for row in ours) == [10 * n for n in range(30)]
    assert all(row.hash_ids == [] for row in ours)
    longer = list(synthesize(learned, 30, SynthesisKnobs(prompt_len_multiplier=3)))
    assert [row.input_length for row in longer] == [3 * row.input_length for row in ours]


def test_simultaneous_requests_stay_simultaneous() -> None:
    recorded = [TraceRow(1000 * (n // 3), 10, 1, []) for n in range(12)]
    ours = list(synthesize(learn(recorded), 12))
    assert [row.timestamp for row in ours] == [row.timestamp for row in recorded]


words = st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=10)


@settings(max_examples=60)
@given(words, st.integers(0, 9))
def test_any_tree_is_saved_and_regenerated_with_the_same_numbers_of_blocks(
    texts: list[str], seed: int
) -> None:
    names = {text[:n]: 0 for text in texts for n in range(1, len(text) + 1)}
    ids = {prefix: number for number, prefix in enumerate(names)}
    recorded = [
        TraceRow(n, 16 * len(text), 1, [ids[text[:m]] for m in range(1, len(text) + 1)])
        for n, text in enumerate(texts)
    ]
    learned = learn(recorded, 16)
    with NamedTemporaryFile() as file:
        Path(file.name).write_bytes(save(learned))
        loaded = load(Path(file.name))
    assert loaded == learned
    again = list(synthesize(loaded, len(recorded), seed=seed))
    assert again == list(synthesize(learned, len(recorded), seed=seed))
    ours = measure(again, 16)
    theirs = measure(recorded, 16)
    assert sorted(ours.context_length) == sorted(theirs.context_length)
    assert ours.shared_blocks == theirs.shared_blocks
