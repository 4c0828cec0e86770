"""How the planner counts the workers in the state store."""

from dataclasses import replace

from controller.deciders.capacity import Slo
from controller.planner.model_view import PlannedWorker, capacity_of
from events.observations import Profile

PROFILE = Profile(
    kv_blocks=8192,
    block_tokens=16,
    max_batch=64,
    prefill_tokens_per_s=20_000.0,
    tpot_ms=((1, 10.0), (64, 20.0)),
)
SERVES = PlannedWorker("w0", "m", PROFILE, 1, 1.0, leaving=False)


def test_a_spare_is_neither_capacity_nor_lost_and_one_in_a_place_is_both_counted_and_healthy() -> None:
    spare = replace(SERVES, worker="s0", weight=0.0, spare=True, out_s=1000.0)
    two = [SERVES, replace(SERVES, worker="w1")]
    alone, beside = capacity_of(two, Slo(), 120), capacity_of([*two, spare], Slo(), 120)
    assert alone == beside and (alone.provisioned, alone.healthy, alone.lost) == (2, 2, 0)
    taken = [
        SERVES,
        replace(two[1], weight=0.0, spare=True, out_s=1000.0),
        replace(spare, weight=1.0, spare=False),
    ]
    assert capacity_of(taken, Slo(), 120) == alone


def test_a_lost_worker_without_a_spare_is_counted_as_lost() -> None:
    lost = replace(SERVES, worker="w1", weight=0.0, out_s=121.0)
    found = capacity_of([SERVES, lost], Slo(), 120)
    assert (found.provisioned, found.healthy, found.lost, found.ratio) == (2, 1, 1, 0.5)
