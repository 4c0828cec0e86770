"""The statistics of a trace."""

import pytest

from controller.trace import analysis
from controller.trace.analysis import analyze, measure
from controller.trace.rows import BadTrace, TraceRow

ROWS = [
    TraceRow(0, 1000, 10, [0, 1]),
    TraceRow(0, 1500, 20, [0, 2, 3]),
    TraceRow(2000, 1024, 30, [0, 2]),
    TraceRow(4000, 100, 40, [9]),
]


def test_a_small_trace_by_hand() -> None:
    found = measure(ROWS)
    assert list(found.context_length) == [512, 1024, 1024, 0]
    assert list(found.unique_length) == [488, 476, 0, 100]
    assert list(found.hit_rate) == [0, 1 / 3, 1, 0]
    analysis = found.analysis()
    assert (analysis.requests, analysis.seconds, analysis.rate) == (4, 4.0, 1.0)
    assert (analysis.blocks, analysis.shared_blocks) == (5, 2)
    assert analysis.output_length.mean == 25 and analysis.output_length.max == 40
    assert analysis.hit_rate is not None and analysis.hit_rate.mean == pytest.approx(1 / 3)


def test_a_prompt_repeated_in_full_is_all_context() -> None:
    found = measure([TraceRow(0, 700, 1, [0, 1]), TraceRow(0, 700, 1, [0, 1])])
    assert list(found.context_length) == [700, 700] and list(found.unique_length) == [0, 0]


def test_without_hash_ids_sharing_is_unknown_not_zero() -> None:
    found = analyze([TraceRow(0, 10, 1), TraceRow(0, 20, 1)])
    assert found.hit_rate is found.context_length is found.unique_length is None
    assert found.rate is None
    told = analysis.lines("t", found)
    assert told[0] == "t: 2 requests in 0 s, all at once" and "unknown" in told[1]
    assert told[-1].split() == ["Theoretical", "hit", "rate", *"-" * 8]


def test_requests_without_hash_ids_count_only_where_ids_are_not_needed() -> None:
    found = measure([*ROWS, TraceRow(5000, 77, 1)])
    assert len(found.input_length) == 5 and len(found.hit_rate) == len(found.context_length) == 4


def test_the_table_shows_every_column() -> None:
    told = analysis.lines("t", analyze(ROWS))
    assert told[0] == "t: 4 requests in 4 s, 1.00 a second"
    assert told[1] == "5 distinct blocks of 512 tokens; 2 of them occur in more than one prompt"
    table = {line[:22].strip(): line[22:].split() for line in told[4:]}
    assert table["Input length"] == ["906", "506", "100", "775", "1,012", "1,143", "1,429", "1,500"]
    assert table["Theoretical hit rate"][0] == "0.333" and len(told) == 9


def test_a_trace_that_is_not_a_tree_or_is_empty_is_refused() -> None:
    with pytest.raises(BadTrace, match="hash id 1 comes after 0"):
        analyze([*ROWS[:1], TraceRow(0, 1000, 1, [5, 1])])
    with pytest.raises(BadTrace, match="no request"):
        analyze([])
