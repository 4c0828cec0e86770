"""The predicted cost of a move, by both methods."""

from dataclasses import replace

import pytest
from migration_kit import LLAMA_70B, profile, target

from controller.migration.cost import KvShape, MovingPolicy, estimate
from controller.migration.links import LinkName, LinkSpec, LinkTable

POLICY = MovingPolicy()
FREE = MovingPolicy(setup_s=0.0, max_migration_time_ms=1e9)  # only the wire counts
LENGTHS = (256, 1024, 4096, 16_384, 65_536, 131_072)


def plain(bytes_per_s: float) -> MovingPolicy:
    """Return the settings of the seed's tables: one rate, no latency, no setup."""
    return replace(FREE, links=LinkTable(infiniband=LinkSpec(bytes_per_s=bytes_per_s)))


# --- the seed's tables, corrected: Llama 70B, TP 8 ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("bytes_per_s", "milliseconds"),
    [
        (900e9, (0.0117, 0.0466, 0.186, 0.746, 2.98, 5.97)),  # NVLink 5
        (450e9, (0.0233, 0.0932, 0.373, 1.491, 5.97, 11.93)),  # NVLink 4
        (28e9, (0.374, 1.498, 5.99, 23.97, 95.9, 191.7)),  # PCIe Gen4
        (55e9, (0.191, 0.763, 3.05, 12.20, 48.8, 97.6)),  # PCIe Gen5
        (50e9, (0.210, 0.839, 3.36, 13.42, 53.7, 107.4)),  # InfiniBand NDR
        (10e9, (1.049, 4.194, 16.78, 67.1, 268.4, 536.9)),  # unknown
    ],
)
def test_n10_n11_the_seeds_table_at_nominal_rates(
    bytes_per_s: float, milliseconds: tuple[float, ...]
) -> None:
    found = [estimate(plain(bytes_per_s), LLAMA_70B, target(), n).transfer_time_ms for n in LENGTHS]
    assert found == pytest.approx(milliseconds, rel=5e-3)


@pytest.mark.parametrize(
    ("link", "sharers", "milliseconds"),
    [
        ("nvlink_direct", 1, (5.031, 5.114, 5.447, 6.779, 12.11, 19.21)),
        ("nvswitch", 1, (5.017, 5.059, 5.225, 5.891, 8.554, 12.10)),
        ("pcie_gen4", 1, (5.380, 6.503, 11.00, 28.97, 100.9, 196.7)),
        ("pcie_gen5", 1, (5.196, 5.768, 8.056, 17.21, 53.81, 102.6)),
        ("infiniband", 1, (5.232, 5.888, 8.509, 18.99, 60.94, 116.9)),
        ("infiniband", 8, (6.762, 12.00, 32.98, 116.9, 452.4, 899.8)),
        ("tcp", 1, (6.149, 9.294, 21.88, 72.21, 273.5, 542.0)),
        ("tcp", 8, (13.49, 38.65, 139.3, 542.0, 2152.6, 4300.1)),
    ],
)
def test_the_seeds_table_on_each_link_as_it_is_configured(
    link: LinkName, sharers: int, milliseconds: tuple[float, ...]
) -> None:
    found = [estimate(POLICY, LLAMA_70B, target(link=link, sharers=sharers), n) for n in LENGTHS]
    assert [cost.transfer_time_ms for cost in found] == pytest.approx(milliseconds, rel=1e-3)
    assert [cost.reprefill_time_ms for cost in found] == pytest.approx([n / 5 for n in LENGTHS])


def test_n13_the_ratio_is_the_same_at_every_length_and_there_is_no_crossover() -> None:
    for bytes_per_s, ratio in ((900e9, 4394), (50e9, 244), (28e9, 137)):
        for n in LENGTHS:
            cost = estimate(plain(bytes_per_s), LLAMA_70B, target(), n)
            assert cost.reprefill_time_ms / cost.transfer_time_ms == pytest.approx(ratio, rel=5e-3)
            assert (cost.recommended, cost.crossover_tokens) == ("transfer", None)


def test_n13_below_204_8_mb_per_second_re_prefill_wins_at_every_length() -> None:
    by_token = target(block_tokens=1)
    for n in LENGTHS:
        fast, slow = (estimate(plain(rate), LLAMA_70B, by_token, n) for rate in (204.9e6, 204.7e6))
        assert (fast.recommended, fast.crossover_tokens) == ("transfer", None)
        assert (slow.recommended, slow.crossover_tokens) == ("reprefill", None)


def test_near_that_rate_a_nearly_empty_block_is_not_worth_sending() -> None:
    cost = estimate(plain(300e6), LLAMA_70B, target(), 4096)
    assert cost.crossover_tokens == 22
    faster = [
        estimate(plain(300e6), LLAMA_70B, target(), n).recommended for n in (10, 11, 16, 17, 21, 22, 33)
    ]
    assert faster == ["reprefill", "transfer", "transfer", "reprefill", "reprefill", "transfer", "transfer"]


@pytest.mark.parametrize(("setup_s", "tokens"), [(0.005, 25), (0.030, 150)])
def test_n13_with_a_setup_re_prefill_wins_below_the_crossover(setup_s: float, tokens: int) -> None:
    policy = replace(plain(50e9), setup_s=setup_s)
    crossover = estimate(policy, LLAMA_70B, target(), 4096).crossover_tokens
    assert crossover == pytest.approx(tokens, abs=2)
    assert estimate(policy, LLAMA_70B, target(), tokens - 2).recommended == "reprefill"
    assert estimate(policy, LLAMA_70B, target(), tokens + 2).recommended == "transfer"


def test_n14_kv_bytes_follow_from_the_models_configuration() -> None:
    assert LLAMA_70B.shard_bytes_per_token == 40 * 1024
    assert LLAMA_70B.shard_bytes_per_token * LLAMA_70B.tp == 327_680 == 320 * 1024
    assert LLAMA_70B.shard_bytes_per_block(16) == 640 * 1024
    assert replace(LLAMA_70B, tp=1).shard_bytes_per_block(16) == 5_242_880 == 5 * 1024 * 1024
    assert replace(LLAMA_70B, bytes_per_element=1).shard_bytes_per_token * LLAMA_70B.tp == 163_840, (
        "FP8 halves it"
    )


def test_n14_with_more_shards_than_kv_heads_heads_are_stored_more_than_once() -> None:
    assert replace(LLAMA_70B, tp=16).shard_bytes_per_token == LLAMA_70B.shard_bytes_per_token


def test_n15_the_kv_of_a_dead_source_is_gone() -> None:
    cost = estimate(POLICY, None, target(), 2048)
    assert cost.transfer_time_ms == float("inf")
    assert (cost.recommended, cost.total_bytes, cost.crossover_tokens) == ("reprefill", 0, None)
    assert 23 * cost.reprefill_time_ms == pytest.approx(9.4e3, rel=5e-3), "on one group, one after the other"


def test_n15_23_requests_of_2048_tokens_between_hosts() -> None:
    cost = estimate(plain(50e9), LLAMA_70B, target(), 2048, at_once=23)
    assert 23 * cost.total_bytes == pytest.approx(15.4e9, rel=5e-3)
    assert cost.transfer_time_ms == pytest.approx(38.6, rel=5e-3)


# --- other terms ---------------------------------------------------------------------------------------------


def test_b16_the_estimate_has_both_times_and_recommends_the_smaller() -> None:
    long, short = (estimate(POLICY, LLAMA_70B, target(), n) for n in (2048, 8))
    assert long.recommended == "transfer" and long.transfer_time_ms < long.reprefill_time_ms
    assert short.recommended == "reprefill" and short.reprefill_time_ms < short.transfer_time_ms


def test_b16_a_transfer_over_the_time_budget_is_a_re_prefill() -> None:
    slow = target(link="tcp", sharers=8)
    assert estimate(POLICY, LLAMA_70B, slow, 15_000).recommended == "transfer"
    over = estimate(POLICY, LLAMA_70B, slow, 16_384)
    assert 500 < over.transfer_time_ms < over.reprefill_time_ms
    assert over.recommended == "reprefill"
    waits = estimate(POLICY, LLAMA_70B, target(queue_s=1.0), 2048)
    assert waits.recommended == "transfer", "the wait for a place in the batch is not part of the move"


def test_b18_shards_that_share_an_adapter_divide_its_rate() -> None:
    own, shared = (estimate(plain(50e9), LLAMA_70B, target(sharers=n), 4096) for n in (1, 8))
    assert shared.transfer_time_ms == pytest.approx(8 * own.transfer_time_ms)


@pytest.mark.parametrize("link", ["nvlink_direct", "nvswitch", "pcie_gen4", "pcie_gen5", "infiniband", "tcp"])
@pytest.mark.parametrize("tokens", [1, 2048, 131_072])
def test_transfers_on_one_link_divide_it(link: LinkName, tokens: int) -> None:
    alone = estimate(POLICY, LLAMA_70B, target(link=link), tokens).transfer_time_ms
    two = estimate(POLICY, LLAMA_70B, target(link=link), tokens, at_once=2).transfer_time_ms
    assert two >= 1.9 * alone
    for n in (3, 10):
        crowded = estimate(POLICY, LLAMA_70B, target(link=link), tokens, at_once=n)
        assert crowded.transfer_time_ms == pytest.approx(n * alone)
    others = estimate(POLICY, LLAMA_70B, target(link=link, transfers=1), tokens)
    assert others.transfer_time_ms == two


def test_the_prefix_cached_on_the_target_is_neither_sent_nor_computed() -> None:
    whole, part, none = (estimate(FREE, LLAMA_70B, target(), 2048, cached_tokens=n) for n in (0, 1024, 2048))
    assert part.total_bytes == whole.total_bytes / 2
    assert part.reprefill_time_ms == pytest.approx(whole.reprefill_time_ms / 2)
    assert (none.total_bytes, none.reprefill_time_ms) == (0, 0.0)
    assert none.recommended == "reprefill", "there is nothing to send"


def test_prefixes_are_cached_in_whole_blocks() -> None:
    assert estimate(POLICY, LLAMA_70B, target(), 100, cached_tokens=47) == estimate(
        POLICY, LLAMA_70B, target(), 100, cached_tokens=32
    )


def test_more_may_be_cached_than_the_request_is_long() -> None:
    assert estimate(POLICY, LLAMA_70B, target(), 10, cached_tokens=64).total_bytes == 0


def test_the_last_block_is_sent_whole() -> None:
    assert estimate(POLICY, LLAMA_70B, target(), 1).total_bytes == 16 * 327_680
    assert estimate(POLICY, LLAMA_70B, target(), 17).total_bytes == 32 * 327_680


def test_prompts_queued_on_the_target_make_re_prefill_more_expensive() -> None:
    cost = estimate(POLICY, LLAMA_70B, target(queued=5000), 100)
    assert cost.reprefill_time_ms == pytest.approx(1000 + 20)
    assert (cost.recommended, cost.crossover_tokens) == ("transfer", None)


def test_the_wait_for_a_place_in_the_batch_counts_for_both() -> None:
    now, later = (estimate(POLICY, LLAMA_70B, target(queue_s=s), 100) for s in (0.0, 0.25))
    assert later.transfer_time_ms == pytest.approx(now.transfer_time_ms + 250)
    assert later.reprefill_time_ms == pytest.approx(now.reprefill_time_ms + 250)
    assert later.crossover_tokens == now.crossover_tokens


def test_a_step_of_the_targets_batch_counts_for_both() -> None:
    idle, busy = (estimate(POLICY, LLAMA_70B, replace(target(), step_s=s), 100) for s in (0.0, 0.02))
    assert busy.transfer_time_ms == pytest.approx(idle.transfer_time_ms + 20)
    assert busy.reprefill_time_ms == pytest.approx(idle.reprefill_time_ms + 20)
    assert (busy.recommended, busy.crossover_tokens) == (idle.recommended, idle.crossover_tokens)
    two = estimate(POLICY, LLAMA_70B, replace(target(), step_s=0.02), 100, at_once=2)
    assert two.transfer_time_ms == pytest.approx(2 * idle.transfer_time_ms + 20), "they share the step"
    with pytest.raises(ValueError, match="step_s is -1"):
        replace(target(), step_s=-1.0)


@pytest.mark.parametrize(
    ("rate", "milliseconds"), [(20_000.0, 100), (0.0, 400), (-1.0, 400), (float("nan"), 400)]
)
def test_the_target_prefills_as_fast_as_its_profile_says_or_5000_per_second(
    rate: float, milliseconds: float
) -> None:
    assert estimate(POLICY, LLAMA_70B, target(rate=rate), 2000).reprefill_time_ms == pytest.approx(
        milliseconds
    )


def test_without_a_link_nothing_is_sent() -> None:
    cost = estimate(POLICY, LLAMA_70B, target(link=None), 2048)
    assert (cost.transfer_time_ms, cost.recommended) == (float("inf"), "reprefill")
    assert cost.total_bytes == 2048 * 327_680, "the bytes of a transfer"


# --- invalid values ------------------------------------------------------------------------------------------


def test_a_target_with_another_number_of_shards_is_rejected() -> None:
    with pytest.raises(ValueError, match="g1 has 4 lanes: it must be 8, one per shard"):
        estimate(POLICY, LLAMA_70B, target(tp=4), 10)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"layers": 0}, "layers is 0"),
        ({"kv_heads": -8}, "kv_heads is -8"),
        ({"bytes_per_element": 0}, "bytes_per_element is 0"),
        ({"tp": 3}, "tp 3 and 8 KV heads"),
    ],
)
def test_an_invalid_shape_is_rejected(change: dict[str, int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        replace(LLAMA_70B, **change)


def test_an_invalid_target_is_rejected() -> None:
    with pytest.raises(ValueError, match="free_blocks is -1"):
        target(free=-1)
    with pytest.raises(ValueError, match="block_tokens is 0"):
        replace(target(), profile=profile(block_tokens=0))
    with pytest.raises(ValueError, match="tokens is -1"):
        estimate(POLICY, LLAMA_70B, target(), -1)
    with pytest.raises(ValueError, match="at_once is 0"):
        estimate(POLICY, LLAMA_70B, target(), 1, at_once=0)


def test_a_group_may_have_one_shard() -> None:
    tiny = KvShape(layers=2, kv_heads=2, head_size=32, bytes_per_element=4)
    assert estimate(POLICY, tiny, target(tp=1), 64).total_bytes == 64 * 2 * 2 * 2 * 32 * 4
