"""Which group gets which request: examples, the seed's scenario, and the duration of planning."""

import time
from collections import Counter
from dataclasses import replace

import pytest
from migration_kit import LLAMA_70B, leaving, target

from controller.migration.cost import KvShape, MigrationTarget, MovingPolicy
from controller.migration.placement import Placement, place

POLICY = MovingPolicy()
BLOCKS = 2048 // 16 + 1  # of a request of 2,048 tokens, with room for its next token


def groups(count: int, free: int = 100_000) -> list[MigrationTarget]:
    return [target(f"g{n}", free=free) for n in range(count)]


def methods(plan: tuple[Placement, ...]) -> dict[str, int]:
    return dict(Counter(placement.method for placement in plan))


def where(plan: tuple[Placement, ...]) -> list[str]:
    return [placement.target for placement in plan]


def test_the_order_is_by_priority_then_by_age() -> None:
    requests = [
        leaving("late", priority=0, after_s=9),
        leaving("low", priority=2, after_s=1),
        leaving("early", priority=0, after_s=2),
        leaving("middle", priority=1, after_s=5),
    ]
    plan = place(POLICY, LLAMA_70B, requests, groups(2))
    assert [placement.request_id for placement in plan] == ["early", "late", "middle", "low"]


def test_one_group_with_room_for_all_gets_all() -> None:
    requests = [leaving(f"r{n}", after_s=n) for n in range(8)]
    plan = place(
        POLICY, LLAMA_70B, requests, [target("small", free=7 * BLOCKS), target("large", free=8 * BLOCKS)]
    )
    assert where(plan) == ["large"] * 8
    assert methods(plan) == {"transfer": 8}


def test_a_group_without_batch_places_for_all_does_not_get_all() -> None:
    requests = [leaving(f"r{n}", after_s=n) for n in range(6)]
    near = target("near", "nvswitch", places=5)
    assert where(place(POLICY, LLAMA_70B, requests, [near, target("far", places=6)])) == ["far"] * 6
    plan = place(POLICY, LLAMA_70B, requests, [near, target("far", places=2)])
    assert where(plan) == ["near"] * 5 + ["far"]
    assert methods(plan) == {"transfer": 6}


def test_if_all_batches_are_full_the_target_itself_declines() -> None:
    """The last report may be old, and asking the target costs only a message."""
    plan = place(POLICY, LLAMA_70B, [leaving("r")], [target("g1", places=0)])
    assert methods(plan) == {"transfer": 1}


def test_of_several_groups_with_room_for_all_the_nearest_gets_them() -> None:
    requests = [leaving(f"r{n}", after_s=n) for n in range(4)]
    plan = place(
        POLICY, LLAMA_70B, requests, [target("far", "tcp"), target("near", "nvswitch"), target("g3")]
    )
    assert where(plan) == ["near"] * 4


def test_a_request_that_does_not_fit_goes_to_a_group_with_room() -> None:
    requests = [leaving(f"r{n}", after_s=n) for n in range(4)]
    plan = place(
        POLICY, LLAMA_70B, requests, [target("near", "nvswitch", free=3 * BLOCKS), target("far", free=BLOCKS)]
    )
    assert where(plan) == ["near", "near", "near", "far"]
    assert methods(plan) == {"transfer": 4}


def test_b17_blocks_are_reserved_before_the_next_request_is_considered() -> None:
    requests = [leaving(f"r{n}", priority=n) for n in range(3)]
    plan = place(POLICY, LLAMA_70B, requests, [target("g1", free=2 * BLOCKS + BLOCKS - 1)])
    assert [p.method for p in plan] == ["transfer", "transfer", "failed"]
    assert [p.blocks for p in plan] == [BLOCKS, BLOCKS, 0]


def test_b17_a_small_request_behind_a_large_one_still_finds_its_place() -> None:
    plan = place(
        POLICY, LLAMA_70B, [leaving("large", 4096, priority=0), leaving("small", 64)], groups(1, free=10)
    )
    assert [p.method for p in plan] == ["failed", "transfer"]


def test_room_is_reserved_for_the_next_token() -> None:
    assert methods(place(POLICY, LLAMA_70B, [leaving("r", 32)], groups(1, free=2))) == {"failed": 1}
    assert methods(place(POLICY, LLAMA_70B, [leaving("r", 32)], groups(1, free=3))) == {"transfer": 1}


def test_equal_groups_share_requests_that_no_single_one_can_take() -> None:
    requests = [leaving(f"r{n}", after_s=n) for n in range(12)]
    plan = place(POLICY, LLAMA_70B, requests, groups(4, free=5 * BLOCKS))
    assert Counter(where(plan)) == {f"g{n}": 3 for n in range(4)}
    assert methods(plan) == {"transfer": 12}


def test_re_prefill_is_used_if_nothing_can_be_sent_or_it_is_cheaper() -> None:
    unreachable = place(POLICY, LLAMA_70B, [leaving("r")], [target("g1", None)])
    assert methods(unreachable) == {"reprefill": 1}
    short = place(POLICY, LLAMA_70B, [leaving("r", 8)], groups(2))
    assert methods(short) == {"reprefill": 1}
    cached = place(POLICY, LLAMA_70B, [leaving("r", 2048, g1=2048)], groups(2))
    assert (methods(cached), where(cached)) == ({"reprefill": 1}, ["g1"])


def test_a_request_goes_where_its_prefix_is_cached() -> None:
    plan = place(POLICY, None, [leaving("r", 2048, g3=1024)], groups(5))
    assert where(plan) == ["g3"]


@pytest.mark.parametrize("kv", [LLAMA_70B, None])
def test_a_request_does_not_go_to_a_barred_group(kv: KvShape | None) -> None:
    requests = [replace(leaving(f"r{n}"), barred={"g0"}) for n in range(3)] + [leaving("free", 8000)]
    plan = place(POLICY, kv, requests, [target("g0", "nvswitch"), target("g1")])
    assert {p.target for p in plan if p.request_id != "free"} == {"g1"}
    assert methods(place(POLICY, kv, requests[:1], groups(1))) == {"failed": 1}


def test_busy_or_slow_groups_get_fewer_requests() -> None:
    requests = [leaving(f"r{n}", 1000, after_s=n) for n in range(9)]
    plan = place(POLICY, None, requests, [target("fast", rate=10_000), target("slow", rate=5000)])
    assert Counter(where(plan)) == {"fast": 6, "slow": 3}
    plan = place(POLICY, None, requests[:4], [target("busy", queued=2000), target("idle")])
    assert Counter(where(plan)) == {"idle": 3, "busy": 1}


def test_a_long_queue_of_transfers_is_no_reason_to_re_prefill() -> None:
    """The others wait on the source and continue decoding there: only some are transferred at once."""
    plan = place(POLICY, LLAMA_70B, [leaving(f"r{n}") for n in range(300)], groups(1))
    assert methods(plan) == {"transfer": 300}
    slowest = max(p.cost.transfer_time_ms for p in plan if p.cost)
    assert slowest == pytest.approx(4 * (5.014 + 1.748), rel=1e-3)


# --- the seed's scenario ------------------------------------------------------------------------------------------


def crashed(survivors: int = 15) -> tuple[Placement, ...]:
    """16 groups of 8; an Xid 48 takes one with 23 requests of 2,048 tokens."""
    return place(POLICY, None, [leaving(f"r{n}", after_s=n) for n in range(23)], groups(survivors))


def test_n15_a_crash_is_re_prefilled_and_nothing_is_sent() -> None:
    assert methods(crashed()) == {"reprefill": 23}


def test_n15_the_re_prefill_load_is_within_one_and_a_half_times_the_even_spread() -> None:
    tokens: Counter[str] = Counter()
    for placement in crashed():
        tokens[placement.target] += 2048
    even = 23 * 2048 / 15
    assert len(tokens) == 15
    assert max(tokens.values()) <= 1.5 * even
    assert max(p.cost.reprefill_time_ms for p in crashed() if p.cost) == pytest.approx(2 * 409.6)


def test_n15_on_one_group_alone_it_would_take_9_4_seconds() -> None:
    assert max(p.cost.reprefill_time_ms for p in crashed(1) if p.cost) == pytest.approx(9.4e3, rel=5e-3)


def test_n15_a_planned_move_of_the_same_requests_sends_15_4_gb() -> None:
    plan = place(POLICY, LLAMA_70B, [leaving(f"r{n}", after_s=n) for n in range(23)], groups(15))
    assert methods(plan) == {"transfer": 23}
    assert sum(p.cost.total_bytes for p in plan if p.cost) == pytest.approx(15.4e9, rel=5e-3)


@pytest.mark.parametrize("free", [200_000, 10_000])
@pytest.mark.parametrize("kv", [LLAMA_70B, None])
def test_a_thousand_requests_are_placed_quickly(kv: KvShape | None, free: int) -> None:
    requests = [leaving(f"r{n}", 100 + 37 * n % 4000, priority=n % 3, after_s=n) for n in range(1000)]
    survivors = groups(15, free)
    began = time.process_time()
    plan = place(POLICY, kv, requests, survivors)
    took_ms = (time.process_time() - began) * 1000
    assert len(plan) == 1000 and "failed" not in methods(plan)
    assert took_ms < 250


def test_two_targets_of_one_name_are_rejected() -> None:
    with pytest.raises(ValueError, match="two targets have the same name"):
        place(POLICY, None, [], [target("g1"), target("g1")])


def test_an_invalid_request_is_rejected() -> None:
    with pytest.raises(ValueError, match="tokens is -1"):
        leaving("r", -1)
    with pytest.raises(ValueError, match="cached on g1 is -5"):
        leaving("r", 10, g1=-5)
