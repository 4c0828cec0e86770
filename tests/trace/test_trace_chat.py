"""The synthetic chat traffic has the published lengths and sharing."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from benchmarks.simulation import chat_traffic
from controller.demo import profile as demo
from controller.trace import synthesis
from controller.trace.profile import learn
from controller.trace.rows import TraceRow
from controller.trace.tree import Tree

CLOSE = 0.1


@pytest.fixture(scope="module")
def recorded() -> list[TraceRow]:
    return list(chat_traffic.requests())


def figures(rows: list[TraceRow]) -> dict[str, float]:
    """Return the published figures, computed of these requests."""
    systems = sum(tokens // chat_traffic.BLOCK_TOKENS for _, tokens in chat_traffic.SYSTEM_PROMPTS)
    tree, hits, others, times = Tree(chat_traffic.BLOCK_TOKENS), 0, 0, dict[int, list[float]]()
    for row in rows:
        known = tree.add(row)
        own = [block for block in row.hash_ids if block >= systems]
        hits += known
        others += min(known, len(row.hash_ids) - len(own))
        times.setdefault(own[0] if own else -1 - len(times), []).append(row.timestamp / 1e3)
    inputs, outputs = [row.input_length for row in rows], [row.output_length for row in rows]
    gaps = [later - earlier for told in times.values() for earlier, later in pairwise(told)]
    found = {
        "conversations of one request": Counter(map(len, times.values()))[1] / len(times),
        "requests that follow another": 1 - len(times) / len(rows),
        "hit rate of all blocks": hits / sum(len(row.hash_ids) for row in rows),
        "hits on other conversations' blocks": others / hits,
        "gap median s": float(np.median(gaps)),
        "gap p90 s": float(np.percentile(gaps, 90)),
    }
    for name, values in (("input", inputs), ("output", outputs)):
        found[f"{name} mean"] = float(np.mean(values))
        found[f"{name} median"] = float(np.median(values))
        found[f"{name} p99"] = float(np.percentile(values, 99))
    return found


@pytest.mark.slow
def test_it_has_the_published_lengths_and_sharing(recorded: list[TraceRow]) -> None:
    off = {name: value / chat_traffic.PUBLISHED[name] - 1 for name, value in figures(recorded).items()}
    assert set(off) == set(chat_traffic.PUBLISHED)
    assert max(map(abs, off.values())) < CLOSE, off
    assert len(recorded) / (recorded[-1].timestamp / 1e3) == pytest.approx(chat_traffic.RATE, rel=CLOSE)


@pytest.mark.slow
def test_the_demos_profile_is_learned_from_it(recorded: list[TraceRow]) -> None:
    again = "run `python -m benchmarks.simulation.chat_traffic controller/demo/profile.json.gz`"
    assert demo.built_in() == learn(recorded, chat_traffic.BLOCK_TOKENS, says=chat_traffic.PUBLISHES), again


def test_equal_hash_ids_are_equal_tokens() -> None:
    vocabulary = range(100, 200)
    one = synthesis.tokens(TraceRow(0, 40, 1, [7, 8, 9]), 16, vocabulary)
    two = synthesis.tokens(TraceRow(0, 48, 1, [7, 8, 5]), 16, vocabulary)
    assert len(one) == 40 and len(two) == 48
    assert one[:32] == two[:32] and one[32:] != two[32:40]
    assert set(one) <= set(vocabulary)
