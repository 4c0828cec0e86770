"""The conversion of measured points to the arrays that simulated engines read."""

from itertools import product

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from controller.profiler.profile_arrays import (
    BesidePoint,
    DecodePoint,
    PrefillPoint,
    TooFewPoints,
    arrays,
)
from workers.engines.simulated.timing import Interpolated, StepPlan

PREFILL = [PrefillPoint(n, 2.0 + n / 10) for n in (64, 512, 2048)]


def law(batch: float, context: float) -> float:
    return 4.0 + 0.5 * batch + 0.002 * batch * context


def measured(batches: list[int], contexts: list[int]) -> list[DecodePoint]:
    return [DecodePoint(b, c, c + 10.0, law(b, c + 10.0)) for b, c in product(batches, contexts)]


def read(made: dict[str, np.ndarray], active: float, context: float) -> float:
    """Read a profile as a mocker does: bilinear."""
    columns = [
        np.interp(active, made["decode_active_kv_tokens"], made["decode_itl"][:, column])
        for column in range(len(made["decode_context_length"]))
    ]
    return float(np.interp(context, made["decode_context_length"], columns))


def test_the_keys_and_shapes_are_dynamos() -> None:
    made = arrays(PREFILL, measured([1, 4, 16], [100, 1000]))
    assert list(made) == [
        "prefill_isl", "prefill_ttft_ms", "decode_active_kv_tokens", "decode_context_length", "decode_itl",
    ]  # fmt: skip
    assert all(array.dtype == np.float64 and np.isfinite(array).all() for array in made.values())
    assert made["decode_itl"].flags["C_CONTIGUOUS"]  # some readers require C order
    assert made["decode_itl"].shape == (
        len(made["decode_active_kv_tokens"]),
        len(made["decode_context_length"]),
    )
    for axis in ("prefill_isl", "decode_active_kv_tokens", "decode_context_length"):
        assert (np.diff(made[axis]) > 0).all()
    assert made["prefill_ttft_ms"].tolist() == [point.ttft_ms for point in PREFILL]


def test_measured_points_and_values_between_them_are_reproduced() -> None:
    made = arrays(PREFILL, measured([1, 2, 4, 8, 16, 32], [64, 256, 1024, 4096]))
    for batch, context in product(
        [1, 2, 3, 5, 8, 13, 16, 20, 32], [74, 100, 150, 266, 500, 900, 1034, 2000, 4106]
    ):
        assert read(made, batch * context, context) == pytest.approx(law(batch, context), rel=0.05)


def test_a_context_below_the_shortest_has_the_time_of_the_shortest() -> None:
    model = Interpolated(arrays(PREFILL, measured([1, 2, 4, 8, 16, 32], [64, 256, 1024])))
    for batch, context in ((1, 5), (1, 60), (2, 5), (4, 20), (16, 40)):
        plan = StepPlan(decodes=batch, context_tokens=batch * context)
        assert model.decode_ms(plan) == pytest.approx(law(batch, 74), rel=0.05)


def test_the_median_of_repeats_counts() -> None:
    points = [DecodePoint(1, c, c, itl) for c in (100, 200) for itl in (5.0, 5.0, 90.0)]
    assert arrays(PREFILL, points)["decode_itl"] == pytest.approx(5.0)


def test_a_batch_that_was_left_out_at_one_context_is_continued_from_smaller_ones() -> None:
    points = [p for p in measured([1, 2, 4, 8], [100, 1000]) if p.asked == 100 or p.batch <= 4]
    made = arrays(PREFILL, points)
    assert read(made, 4 * 1010, 1010) == pytest.approx(law(4, 1010), rel=0.05)
    assert (np.diff(made["decode_itl"], axis=0) >= -1e-9).all()


def test_a_disturbed_prompt_is_no_slower_than_a_longer_one() -> None:
    made = arrays([PrefillPoint(16, 113.0), *PREFILL], measured([1, 2], [100, 1000]))
    assert made["prefill_ttft_ms"].tolist() == pytest.approx([8.4, *(point.ttft_ms for point in PREFILL)])


@pytest.mark.parametrize(
    ("step_ms", "pass_ms"),
    [
        (10.0, 3.4),
        (13.4, 0.0),
        (20.0, 0.0),
        (5.0, 5.0),
    ],  # 8.4 ms for the prompt alone, and 5 ms for the token
)
def test_the_time_shared_by_a_prompt_and_a_token_is_the_cost_of_a_pass(
    step_ms: float, pass_ms: float
) -> None:
    beside = [BesidePoint(64, ms, 5.0) for ms in (step_ms - 1, step_ms, step_ms + 100)]
    made = arrays(PREFILL, measured([1, 2], [100, 1000]), beside)
    assert float(made["pass_ms"]) == pytest.approx(pass_ms)


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ([], measured([1], [1, 2])),
        (PREFILL[:1], measured([1], [1, 2])),
        (PREFILL, []),
        (PREFILL, measured([1], [9])),
    ],
)
def test_too_few_points_are_reported(prefill: list[PrefillPoint], decode: list[DecodePoint]) -> None:
    with pytest.raises(TooFewPoints):
        arrays(prefill, decode)


@settings(max_examples=12, deadline=None)
@example(points=[(1, 10, 1.0), (1, 10, 1.75), (1, 10, 0.25), (1, 10, 0.25), (1, 11, 1866.0)])
@given(
    points=st.lists(
        st.tuples(st.integers(1, 64), st.sampled_from([10, 11, 500, 4000]), st.floats(0.01, 1e4)),
        min_size=1,
        max_size=12,
    )
)
def test_any_measurement_gives_a_readable_profile_or_an_error(
    points: list[tuple[int, int, float]],
) -> None:
    decode = [DecodePoint(batch, context, context + itl % 5, itl) for batch, context, itl in points]
    try:
        made = arrays(PREFILL, decode)
    except TooFewPoints:
        return
    for axis in ("decode_active_kv_tokens", "decode_context_length"):
        assert len(made[axis]) >= 2 and (np.diff(made[axis]) > 0).all()
    assert np.isfinite(made["decode_itl"]).all() and (made["decode_itl"] >= 0).all()
