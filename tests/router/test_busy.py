"""Busy workers: Dynamo's thresholds, strict, over all DP ranks of a worker."""

import math
from dataclasses import replace

import pytest
from filter_rules import Links
from hypothesis import given
from hypothesis import strategies as st
from router_kit import endpoint

from controller.deciders.thresholds import NEVER, BusyThresholds
from controller.router.endpoints import EndpointTable
from controller.router.load.active_sequences import ActiveSequences
from controller.router.load.monitor import LoadLimits, LoadMonitor, RankLoadSeen
from events.wire import Load

HALF = BusyThresholds(active_decode_blocks=0.5)


@pytest.mark.parametrize(
    ("thresholds", "rank", "busy"),
    [
        (BusyThresholds(0.85), RankLoadSeen(kv_used=87, kv_total=100), True),  # the seed's examples
        (BusyThresholds(None, 10_000), RankLoadSeen(prefill_tokens=12_000), True),
        (HALF, RankLoadSeen(kv_used=50, kv_total=100), False),  # strict
        (HALF, RankLoadSeen(kv_used=51, kv_total=100), True),
        (HALF, RankLoadSeen(decode_blocks=51, kv_total=100), True),  # by our own count
        (HALF, RankLoadSeen(kv_used=10**6, kv_total=0), False),  # total unknown
        (BusyThresholds(1.0), RankLoadSeen(kv_used=100, kv_total=100), False),
        (BusyThresholds(0.0), RankLoadSeen(kv_used=0, kv_total=100), False),
        (BusyThresholds(0.0), RankLoadSeen(kv_used=1, kv_total=100), True),
        (BusyThresholds(None, 10), RankLoadSeen(prefill_tokens=10), False),
        (BusyThresholds(None, 0), RankLoadSeen(prefill_tokens=1), True),
        (
            BusyThresholds(None, None, 1.5),
            RankLoadSeen(prefill_tokens=151, step_tokens=101),
            False,
        ),  # floor(151.5)
        (BusyThresholds(None, None, 1.5), RankLoadSeen(prefill_tokens=152, step_tokens=101), True),
        (BusyThresholds(None, None, 1.5), RankLoadSeen(prefill_tokens=10**9), False),  # not reported
        (
            BusyThresholds(0.5, 10),
            RankLoadSeen(kv_used=99, kv_total=100),
            True,
        ),  # one exceeded threshold is enough
        (BusyThresholds(0.5, 10), RankLoadSeen(prefill_tokens=11), True),
        (NEVER, RankLoadSeen(10**9, 1, 10**9, 10**9, 1), False),
    ],
)
def test_a_rank_is_busy_above_any_threshold(
    thresholds: BusyThresholds, rank: RankLoadSeen, busy: bool
) -> None:
    assert rank.busy(thresholds) is busy


def test_n25_a_worker_is_busy_only_if_all_of_its_dp_ranks_are() -> None:
    full, free = Load(kv_used=60, kv_total=100), Load(kv_used=10, kv_total=100)

    def busy(*reported: Load, dp: int = 2) -> bool:
        limits = LoadLimits(thresholds=HALF, by_thresholds=True)
        links = Links(ranks=lambda worker: reported)
        monitor = LoadMonitor(limits, EndpointTable(), links, ActiveSequences(), lambda: 0.0)
        return monitor.busy(endpoint("w1", dp=dp))

    assert busy(full, dp=1) and busy(full, full)
    assert not busy(full, free) and not busy(free, full)
    assert not busy(full), "a declared rank without data is free"
    assert not busy()


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ((1.01, None, None), "active_decode_blocks_threshold must be between 0.0 and 1.0, got 1.01"),
        ((-0.1, None, None), "active_decode_blocks_threshold must be"),
        ((math.nan, None, None), "active_decode_blocks_threshold must be"),
        ((None, -1, None), "active_prefill_tokens_threshold must be 0 or more, got -1"),
        ((None, None, math.inf), "active_prefill_tokens_threshold_frac must be a finite number"),
        ((None, None, -0.5), "active_prefill_tokens_threshold_frac must be"),
    ],
)
def test_an_invalid_threshold_is_rejected(
    values: tuple[float | None, int | None, float | None], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        BusyThresholds(*values)


shares = st.floats(0, 1)
ranks = st.builds(
    RankLoadSeen,
    kv_used=st.integers(0, 200),
    kv_total=st.integers(0, 100),
    decode_blocks=st.floats(0, 200),
    prefill_tokens=st.floats(0, 1e5),
    step_tokens=st.one_of(st.none(), st.integers(1, 10_000)),
)
thresholds = st.builds(
    BusyThresholds,
    st.one_of(st.none(), shares),
    st.one_of(st.none(), st.integers(0, 10**5)),
    st.one_of(st.none(), st.floats(0, 10)),
)


@given(thresholds, ranks, shares, st.integers(0, 50))
def test_neither_more_load_nor_a_lower_threshold_makes_a_rank_free(
    given_thresholds: BusyThresholds, rank: RankLoadSeen, factor: float, more: int
) -> None:
    if not rank.busy(given_thresholds):
        return
    loaded = replace(rank, kv_used=rank.kv_used + more, prefill_tokens=rank.prefill_tokens + more)
    assert loaded.busy(given_thresholds)
    share = given_thresholds.active_decode_blocks
    lower = replace(given_thresholds, active_decode_blocks=None if share is None else share * factor)
    assert rank.busy(lower)
