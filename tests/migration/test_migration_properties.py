"""Invariants of every cost and every placement."""

from collections import Counter

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from migration_kit import leaving, target

from controller.migration.cost import KvShape, MigrationTarget, MovingPolicy, estimate
from controller.migration.links import LinkSpec, LinkTable
from controller.migration.placement import Leaving, place

SHAPE = KvShape(layers=4, kv_heads=4, head_size=64, bytes_per_element=2, tp=2)
LINK = st.sampled_from(["nvlink_direct", "nvswitch", "pcie_gen4", "pcie_gen5", "infiniband", "tcp"])
TOKENS = st.integers(0, 20_000)


@st.composite
def policies(draw: st.DrawFn) -> MovingPolicy:
    spec = LinkSpec(
        bytes_per_s=draw(st.floats(1e5, 1e12)),
        latency_s=draw(st.floats(0, 0.1)),
        efficiency=draw(st.floats(0.01, 1)),
    )
    return MovingPolicy(
        links=LinkTable(tcp=spec, infiniband=spec, pcie_gen4=spec),
        setup_s=draw(st.floats(0, 0.2)),
        max_migration_time_ms=draw(st.sampled_from([50.0, 500.0, 1e9])),
        transfers_at_once=draw(st.integers(1, 8)),
    )


@st.composite
def targets(draw: st.DrawFn, name: str = "g1", block_tokens: int | None = None) -> MigrationTarget:
    return target(
        name,
        draw(st.one_of(st.none(), LINK)),
        tp=2,
        free=draw(st.integers(0, 2000)),
        sharers=draw(st.sampled_from([1, 2])),
        rate=draw(st.floats(10, 1e5)),
        block_tokens=block_tokens or draw(st.sampled_from([1, 16, 128])),
        queued=draw(st.integers(0, 5000)),
        queue_s=draw(st.sampled_from([0.0, 0.3])),
        transfers=draw(st.integers(0, 3)),
    )


@given(policies(), targets(), TOKENS, TOKENS, TOKENS, st.integers(1, 4))
@settings(deadline=None)
def test_costs_rise_with_the_tokens_and_are_never_negative(
    policy: MovingPolicy, to: MigrationTarget, tokens: int, more: int, cached: int, at_once: int
) -> None:
    few = estimate(policy, SHAPE, to, tokens, cached_tokens=cached, at_once=at_once)
    many = estimate(policy, SHAPE, to, tokens + more, cached_tokens=cached, at_once=at_once)
    assert 0 <= few.transfer_time_ms <= many.transfer_time_ms
    assert 0 <= few.reprefill_time_ms <= many.reprefill_time_ms
    assert 0 <= few.total_bytes <= many.total_bytes
    less = estimate(policy, SHAPE, to, tokens, at_once=at_once)
    assert few.transfer_time_ms <= less.transfer_time_ms and few.reprefill_time_ms <= less.reprefill_time_ms


@pytest.mark.slow
@given(policies(), targets(), st.integers(0, 64), st.integers(1, 4), st.data())
@settings(max_examples=300, deadline=None)
def test_the_crossover_agrees_with_the_comparison_on_either_side(
    policy: MovingPolicy, to: MigrationTarget, cached_blocks: int, at_once: int, data: st.DataObject
) -> None:
    cached = cached_blocks * to.profile.block_tokens

    def transfer_is_faster(missing: int) -> bool:
        cost = estimate(policy, SHAPE, to, cached + missing, cached_tokens=cached, at_once=at_once)
        assume(abs(cost.transfer_time_ms - cost.reprefill_time_ms) > 1e-9 * cost.reprefill_time_ms)  # no tie
        return cost.transfer_time_ms < cost.reprefill_time_ms

    any_length = estimate(policy, SHAPE, to, cached + 1, cached_tokens=cached, at_once=at_once)
    crossover = any_length.crossover_tokens
    beyond = data.draw(st.integers(1, 10**7))
    if crossover is None:
        if transfer_is_faster(1):
            assert transfer_is_faster(beyond)
        elif not transfer_is_faster(to.profile.block_tokens):
            assert not transfer_is_faster(beyond)
        return
    first = crossover - cached
    assert first > 1
    assert transfer_is_faster(first) != transfer_is_faster(first - 1)
    assert transfer_is_faster(first) == transfer_is_faster(first + beyond)


@st.composite
def crowds(draw: st.DrawFn) -> tuple[list[Leaving], list[MigrationTarget]]:
    names = [f"g{n}" for n in range(draw(st.integers(0, 5)))]
    block_tokens = draw(st.sampled_from([1, 16, 128]))
    requests = [
        leaving(
            f"r{n}",
            draw(TOKENS),
            priority=draw(st.integers(0, 2)),
            after_s=draw(st.integers(0, 3)),
            **{
                name: draw(TOKENS)
                for name in draw(st.sets(st.sampled_from(names)) if names else st.just(set()))
            },
        )
        for n in range(draw(st.integers(0, 25)))
    ]
    return requests, [draw(targets(name, block_tokens)) for name in names]


@pytest.mark.slow
@given(policies(), st.sampled_from([SHAPE, None]), crowds())
@settings(max_examples=200, deadline=None)
def test_every_placement_fits_its_group(
    policy: MovingPolicy, kv: KvShape | None, crowd: tuple[list[Leaving], list[MigrationTarget]]
) -> None:
    requests, groups = crowd
    plan = place(policy, kv, requests, groups)
    assert plan == place(policy, kv, list(reversed(requests)), groups), "the same requests, the same plan"
    by_id = {request.request_id: request for request in requests}
    order = [by_id[placement.request_id] for placement in plan]
    assert Counter(placement.request_id for placement in plan) == Counter(list(by_id)), "each exactly once"
    assert order == sorted(order, key=lambda r: (r.priority, r.arrived, r.request_id))
    free = {group.name: group.free_blocks for group in groups}
    block_tokens = groups[0].profile.block_tokens if groups else 1
    for placement, request in zip(plan, order, strict=True):
        needed = request.tokens // block_tokens + 1
        if placement.method == "failed":
            assert placement.cost is None and not placement.target and not placement.blocks
            assert all(left < needed for left in free.values()), "it fails only if no group has room for it"
            continue
        free[placement.target] -= placement.blocks
        assert placement.blocks == needed and free[placement.target] >= 0
        assert placement.cost is not None and placement.cost.recommended == placement.method
        assert placement.method == "reprefill" or kv is not None


@pytest.mark.parametrize("kv", [SHAPE, None])
def test_no_requests_and_no_targets(kv: KvShape | None) -> None:
    assert place(MovingPolicy(), kv, [], [target(tp=2)]) == ()
    (placement,) = place(MovingPolicy(), kv, [leaving("r1")], [])
    assert placement.method == "failed"
