"""The durations of simulated steps: polynomials, measured profiles, tiers, and their settings."""

import argparse
import contextlib
import io
import json
import math
import os
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from events.errors import BadSetting
from events.observations import Profile
from workers.cli import add_arguments
from workers.config.settings_check import load_settings
from workers.engines.build import build_engine
from workers.engines.simulated.build import BadConfig, BadReasoning
from workers.engines.simulated.engine import SimulatedEngine
from workers.engines.simulated.kv_cache import TierTraffic
from workers.engines.simulated.language import Reasoning
from workers.engines.simulated.sequence import EngineShape
from workers.engines.simulated.timing import (
    BYTES_MAX,
    POLYNOMIALS,
    BadProfile,
    ConstantTiming,
    Interpolated,
    ModelTiming,
    StepPlan,
    TieredTiming,
)
from workers.output import layout


def measured() -> dict[str, Any]:
    """Return a profile with values that are easy to calculate."""
    return {
        "prefill_isl": np.array([100.0, 200.0, 400.0]),
        "prefill_ttft_ms": np.array([10.0, 20.0, 60.0]),
        "decode_active_kv_tokens": np.array([0.0, 1000.0]),
        "decode_context_length": np.array([10.0, 110.0, 210.0]),
        "decode_itl": np.array([[5.0, 6.0, 8.0], [15.0, 18.0, 24.0]]),
    }


# --- performance models


def test_the_first_polynomial_sums_over_prompts_and_the_second_uses_their_total() -> None:
    plan = StepPlan(3000, 0, (1000, 2000))
    first, second = POLYNOMIALS["polynomial"], POLYNOMIALS["polynomial-v2"]
    assert first.prefill_ms(plan) == pytest.approx(1.25e-6 * 5e6 + 7.41e-2 * 3000 + 2 * 26.2)
    assert second.prefill_ms(plan) == pytest.approx(4.209989e-07 * 9e6 + 1.518344e-02 * 3000 + 16.50142)
    assert first.prefill_ms(StepPlan(0, 3)) == second.prefill_ms(StepPlan(0, 3)) == 0


@pytest.mark.parametrize(
    ("name", "free", "full"), [("polynomial", 19.44, 57.85), ("polynomial-v2", 5.74, 34.01)]
)
def test_decoding_takes_longer_with_more_blocks_in_use(name: Any, free: float, full: float) -> None:
    model = POLYNOMIALS[name]
    assert model.decode_ms(StepPlan(0, 1, (), 0, 100)) == pytest.approx(free)
    assert model.decode_ms(StepPlan(0, 1, (), 100, 100)) == pytest.approx(full)
    assert model.decode_ms(StepPlan(10, 0, (10,), 100, 100)) == 0


def test_a_later_chunk_takes_the_time_it_adds_and_never_less_than_alone() -> None:
    model = Interpolated(measured())
    chunks = [StepPlan(100, 0, (100,), starts=(start,)) for start in (0, 100, 200, 300)]
    assert [model.prefill_ms(plan) for plan in chunks] == pytest.approx([10, 10, 20, 20])
    assert model.prefill_ms(StepPlan(200, 0, (100, 100), starts=(0, 200))) == pytest.approx(30)


def test_the_rest_after_a_prefix_cache_hit_adds_the_cost_of_a_pass() -> None:
    model = Interpolated(measured() | {"pass_ms": np.array(4.0)})

    def takes(later: int) -> float:
        return model.prefill_ms(StepPlan(100, 0, (100,), starts=(200,), later=later))

    assert takes(later=1) == pytest.approx(20)
    assert takes(later=0) == pytest.approx(24)
    assert model.prefill_ms(StepPlan(200, 0, (100, 100), starts=(200, 200), later=1)) == pytest.approx(
        20 + 24 - 4
    )


def test_the_fixed_cost_of_a_pass_counts_once() -> None:
    model = Interpolated(measured() | {"pass_ms": np.array(4.0)})
    alone, two = StepPlan(100, 0, (100,)), StepPlan(300, 0, (100, 200))
    beside = StepPlan(100, 1, (100,), context_tokens=10)
    assert model.prefill_ms(alone) == pytest.approx(10)
    assert model.prefill_ms(two) == pytest.approx(10 + 20 - 4)
    assert model.prefill_ms(beside) == pytest.approx(10 - 4)
    assert (
        model.prefill_ms(StepPlan(10, 1, (10,))) == 0
    )  # it takes 1 ms alone: no less than nothing beside others
    assert model.prefill_ms(StepPlan(0, 1)) == 0


@pytest.mark.parametrize(("tokens", "ms"), [(100, 10), (150, 15), (300, 40), (50, 5), (500, 80)])
def test_prompts_lie_on_the_lines_between_measured_points(tokens: int, ms: float) -> None:
    assert Interpolated(measured()).prefill_ms(StepPlan(tokens, 0, (tokens,))) == pytest.approx(ms)


@pytest.mark.parametrize(
    ("decodes", "context", "ms"),
    [(1, 10, 5.1), (10, 1000, 17.7), (10, 500, (5.4 + 16.2) / 2), (5, 1000, 23.4), (5, 2000, 59)],
)
def test_decoding_lies_between_four_measured_points(decodes: int, context: int, ms: float) -> None:
    plan = StepPlan(0, decodes, (), 0, 0, context)
    assert Interpolated(measured()).decode_ms(plan) == pytest.approx(ms)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decode_itl": None}, "missing decode_itl"),
        ({"prefill_isl": np.array([100.0])}, "prefill_isl must be a list of at least two increasing numbers"),
        ({"prefill_isl": np.array([1.0, 1.0, 2.0])}, "increasing numbers"),
        ({"decode_context_length": np.ones((2, 2))}, "decode_context_length must be a list"),
        (
            {"prefill_ttft_ms": np.ones(2)},
            r"prefill_ttft_ms has the shape \(2,\), but its axes require \(3,\)",
        ),
        (
            {"decode_itl": np.ones((3, 2))},
            r"decode_itl has the shape \(3, 2\), but its axes require \(2, 3\)",
        ),
        ({"prefill_ttft_ms": np.array([1.0, np.nan, 2.0])}, "below 0"),
        ({"prefill_ttft_ms": np.array([1.0, -1.0, 2.0])}, "below 0"),
        ({"prefill_ttft_ms": np.array([1.0, np.inf, 2.0])}, "not finite"),
        ({"prefill_ttft_ms": np.array([1.0, 1e300, 2.0])}, "above 1e[+]12"),
        ({"prefill_ttft_ms": np.array(["1", "2", "3"])}, "does not hold numbers"),
        ({"prefill_ttft_ms": np.array([1j, 2j, 3j])}, "does not hold numbers"),
        ({"prefill_isl": np.array([])}, "prefill_isl must be a list of at least two increasing numbers"),
        ({"decode_itl": np.array([object()])}, "it cannot be read as NPZ: Object arrays cannot be loaded"),
        ({"pass_ms": np.array([1.0, 2.0])}, "pass_ms must be one number"),
        ({"pass_ms": np.array(-1.0)}, "pass_ms holds a number that is below 0"),
    ],
)
def test_a_malformed_profile_is_refused_with_the_reason(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    arrays = {name: array for name, array in (measured() | change).items() if array is not None}
    np.savez(tmp_path / "p.npz", **arrays)
    with pytest.raises(BadProfile, match=message):
        Interpolated.load(tmp_path / "p.npz")


@pytest.mark.parametrize("content", [b"", b"no zip", b"\x93NUMPY\x01\x00"])
def test_a_file_that_is_not_npz_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "p.npz"
    path.write_bytes(content)
    with pytest.raises(BadProfile, match=r"p.npz: it cannot be read as NPZ: File is not a zip file"):
        Interpolated.load(path)


def test_a_path_that_is_not_a_file_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, says in (
        ("none", "there is no such file"),
        ("pipe", "it is not a file"),
        (".", "it is not a file"),
    ):
        with pytest.raises(BadProfile, match=says):
            Interpolated.load(tmp_path / name)


def test_a_profile_that_would_fill_the_memory_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "p.npz", "w", zipfile.ZIP_DEFLATED) as bomb:
        bomb.writestr("decode_itl.npy", bytes(BYTES_MAX + 1))
    assert (tmp_path / "p.npz").stat().st_size < 100_000
    with pytest.raises(BadProfile, match="it has more than 16 MiB"):
        Interpolated.load(tmp_path / "p.npz")


def packed(**options: Any) -> bytes:
    file = io.BytesIO()
    options.get("save", np.savez)(file, **measured())
    return file.getvalue()


@settings(max_examples=60, deadline=None)
@given(packed=st.sampled_from([packed(), packed(save=np.savez_compressed)]), data=st.data())
def test_a_profile_with_any_damage_is_read_or_refused(packed: bytes, data: st.DataObject) -> None:
    places = st.integers(0, len(packed) - 1)
    damaged = bytearray(packed[: data.draw(st.one_of(st.just(len(packed)), places))])
    for place, byte in data.draw(st.lists(st.tuples(places, st.integers(0, 255)), max_size=3)):
        damaged[place : place + 1] = bytes([byte])
    with tempfile.NamedTemporaryFile(suffix=".npz") as file:
        Path(file.name).write_bytes(damaged)
        with contextlib.suppress(BadProfile):
            model = Interpolated.load(Path(file.name))
            plan = StepPlan(100, 3, (100,), 1, 2, 1000)
            assert 0 <= model.prefill_ms(plan) < math.inf and 1 <= model.decode_ms(plan) < math.inf


def test_a_malformed_profile_is_refused_even_if_steps_take_no_time(tmp_path: Path) -> None:
    (tmp_path / "p.npz").write_bytes(b"no zip")
    with pytest.raises(BadProfile):
        built(planner_profile_data=tmp_path / "p.npz", speedup_ratio=0)


# --- timing


def test_a_speedup_divides_step_times_and_decoding_has_its_own() -> None:
    plan = StepPlan(1000, 4, (1000,), 50, 100)
    usual = ModelTiming(POLYNOMIALS["polynomial"])
    prefill = usual.step_s(StepPlan(1000, 0, (1000,)))
    decode = usual.step_s(StepPlan(0, 4, (), 50, 100))
    assert usual.step_s(plan) == pytest.approx(prefill + decode)
    faster = ModelTiming(POLYNOMIALS["polynomial"], speedup=10, decode_speedup=2)
    assert faster.step_s(plan) == pytest.approx(prefill / 10 + decode / 20)


def test_a_model_timing_registers_its_profile() -> None:
    profile = ModelTiming(POLYNOMIALS["polynomial"]).profile(EngineShape(batch_max=4))
    assert [batch for batch, _ in profile.tpot_ms] == [1, 2, 3, 4]
    assert [ms for _, ms in profile.tpot_ms] == sorted(ms for _, ms in profile.tpot_ms)
    assert profile.prefill_tokens_per_s == pytest.approx(8192 / 0.7171, rel=0.01)


def test_blocks_are_fetched_before_a_pass_and_evicted_during_it() -> None:
    timing = TieredTiming(
        timing=ConstantTiming(itl_s=0.01), block_bytes=1000, host_bytes_per_s=1e6, disk_bytes_per_s=1e5
    )

    def takes(**moved: int) -> float:
        return timing.step_s(StepPlan(0, 1, (), 1, 9, 10, TierTraffic(**moved)))

    assert takes() == takes(to_host=10) == takes(to_disk=1) == 0.01
    assert takes(to_host=15) == pytest.approx(0.015)
    assert takes(from_host=5) == pytest.approx(0.015)
    assert takes(from_disk=5) == pytest.approx(0.01 + 5 * 0.011)


# --- settings


def built(**flags: Any) -> SimulatedEngine:
    """Return the engine for these flags."""
    engine = build_engine(load_settings({name: str(value) for name, value in flags.items()}, {}))
    assert isinstance(engine, SimulatedEngine)
    return engine


ONE = StepPlan(0, 1, (), 0, 100)


def step_s(engine: SimulatedEngine, plan: StepPlan = ONE) -> float:
    """Return the duration of a step of an engine's first rank."""
    return engine.each[0].timing.step_s(plan)


def test_the_default_is_flat_out_with_the_default_bounds() -> None:
    engine = built()
    assert step_s(engine) == 0
    assert engine.shape == EngineShape()


def test_dynamos_defaults_are_one_flag() -> None:
    engine = built(engine_type="vllm")
    shape = engine.shape
    assert (shape.kv_blocks, shape.block_tokens, shape.batch_max, shape.prefill_tokens_max) == (
        16384,
        64,
        256,
        8192,
    )
    assert shape.context_tokens == 16384 * 64
    assert step_s(engine) == pytest.approx(0.01944)
    assert [built(engine_type=kind).shape.block_tokens for kind in ("sglang", "trtllm")] == [1, 32]


@pytest.mark.parametrize("block", [1, 4096, 10_000])
def test_blocks_of_any_size_can_be_described(block: int) -> None:
    engine = built(engine_type="vllm", block_tokens=block)
    found = layout(engine.kv)
    assert found is not None and found.element_bytes >= 1 and found.head_size >= 1
    assert engine.kv[0].block_bytes >= block == engine.kv[0].block_size


def test_each_timing_can_be_selected(tmp_path: Path) -> None:
    np.savez(tmp_path / "p.npz", **measured())
    assert step_s(built(itl_ms=20)) == 0.02
    assert step_s(built(itl_ms=20, speedup_ratio=4, decode_speedup_ratio=2)) == pytest.approx(0.0025)
    assert step_s(built(perf_model="polynomial-v2", speedup_ratio=2)) == pytest.approx(0.00287)
    assert step_s(
        built(planner_profile_data=tmp_path / "p.npz"), StepPlan(0, 1, (), 0, 1, 10)
    ) == pytest.approx(0.0051)
    assert step_s(built(engine_type="vllm", itl_ms=20)) == 0.02
    assert step_s(built(engine_type="vllm", speedup_ratio=0)) == 0


def test_a_successor_needs_no_file_that_its_process_has_already_read(tmp_path: Path) -> None:
    profile = tmp_path / "p.npz"
    np.savez(profile, **measured())
    first = built(planner_profile_data=profile)
    profile.unlink()
    assert built(planner_profile_data=profile).each[0].timing is first.each[0].timing


def test_slower_tiers_take_the_time_of_their_bytes() -> None:
    engine = built(itl_ms=20, host_kv_blocks=10, host_gb_per_s=1, kv_bytes_per_token=1_000_000)
    assert engine.shape.host_kv_blocks == 10
    assert step_s(engine, FETCH) == pytest.approx(0.036)


def test_a_transfer_has_the_speed_of_its_link() -> None:
    assert (
        built().shape.kv_token_s == built(engine_type="vllm", kv_transfer_bandwidth=0).shape.kv_token_s == 0
    )
    assert built(engine_type="vllm").shape.kv_token_s == pytest.approx(131_072 / 64e9)
    assert built(kv_transfer_bandwidth=1, kv_bytes_per_token=1000).shape.kv_token_s == pytest.approx(1e-6)


FETCH = StepPlan(0, 1, (), 0, 1, 10, TierTraffic(from_host=1))
LLAMA = {
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "hidden_size": 8192, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "size"),
    [
        (None, 131_072),
        (LLAMA, 80 * 2 * 8 * 128 * 2),
        ({"text_config": LLAMA | {"head_dim": 64, "torch_dtype": "float32"}}, 80 * 2 * 8 * 64 * 4),
        (LLAMA | {"num_key_value_heads": None}, 80 * 2 * 64 * 128 * 2),
    ],
)
def test_the_kv_size_of_a_token_follows_from_its_model(
    config: dict[str, Any] | None, size: int, tmp_path: Path
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    engine = built(model=tmp_path, host_kv_blocks=10, host_gb_per_s=1, block_tokens=1, itl_ms=20)
    assert step_s(engine, FETCH) == pytest.approx(0.02 + size / 1e9)


@pytest.mark.parametrize("config", ["{}", "[]", "{", json.dumps(LLAMA | {"num_attention_heads": 0})])
def test_a_model_with_an_unknown_kv_size_is_refused(config: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(BadConfig, match=r"config.json: .*: set kv_bytes_per_token"):
        built(model=tmp_path, host_kv_blocks=10)
    assert built(model=tmp_path, host_kv_blocks=10, kv_bytes_per_token=5)


def test_a_file_of_dynamos_arguments_wins_over_flags(tmp_path: Path) -> None:
    path = tmp_path / "args.json"
    path.write_text(
        json.dumps(
            {"num_gpu_blocks": 100, "block_size": 32, "max_num_seqs": None, "max_num_batched_tokens": 512,
             "enable_prefix_caching": False, "enable_chunked_prefill": False, "watermark": 0.1, "preemption_mode": "fifo",
             "speedup_ratio": 2.0, "dp_size": 2, "startup_time": 0.5, "worker_type": "aggregated", "bootstrap_port": None,
             "enable_local_indexer": False, "max_model_len": 1000, "is_prefill": False, "aic_nextn": None, "aic_mtp_seed": 42,
             "handoff_session_timeout_ms": 300000, "kv_transfer_bandwidth": 32.0, "kv_transfer_timing_mode": "full_prompt",
             "sglang": {"page_size": 1, "schedule_policy": "fifo"}, "reasoning": None}
        )
    )  # fmt: skip
    settings = load_settings({"extra_engine_args": str(path), "kv_blocks": "7", "watermark": "0.5"}, {})
    assert (settings.kv_events, settings.startup_s) == (True, 0.5)
    engine = build_engine(settings)
    assert isinstance(engine, SimulatedEngine)
    assert engine.shape == EngineShape(
        kv_blocks=100, block_tokens=32, batch_max=100, waiting_max=2**31, prefill_tokens_max=512, context_tokens=1000,
        prefix_caching=False, chunked_prefill=False, watermark=0.1, preemption="oldest", kv_token_s=131_072 / 64e9,
    )  # fmt: skip
    assert (engine.identity.dp, engine.announces) == (2, False)
    assert step_s(engine) == pytest.approx(0.00972)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"num_gpu_block": 1}', "num_gpu_block: unknown arguments; valid are num_gpu_blocks, block_size"),
        ('{"aic_nextn": 1, "worker_type": "decode"}', "worker_type, aic_nextn: not simulated here"),
        (
            '{"sglang": {"schedule_policy": "lpm", "page_size": 1}}',
            "sglang.schedule_policy: not simulated here",
        ),
        ('{"sglang": 1}', "sglang = 1: expected an object"),
        ("[" * 100_000, "invalid JSON: maximum recursion depth"),
        ('{"preemption_mode": "LIFO"}', "preemption_mode = 'LIFO': expected one of lifo, fifo"),
        ("[1]", "the file does not contain a JSON object"),
        ("{", "invalid JSON"),
        ('{"num_gpu_blocks": 0}', "extra_engine_args: num_gpu_blocks = 0: expected `int` >= 1"),
        ('{"num_gpu_blocks": 1e30}', "num_gpu_blocks = 1e.30: expected `int"),
        ('{"watermark": 1.5}', "watermark = 1.5: expected `float` < 1"),
    ],
)
def test_an_unsupported_arguments_file_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "args.json"
    path.write_text(text)
    with pytest.raises(BadSetting, match=message):
        load_settings({"extra_engine_args": str(path)}, {})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"extra_engine_args": "none.json"}, "cannot read the file: No such file"),
        ({"engine": "openai", "dp_size": "2"}, "dp_size = 2: only valid for simulated engines"),
        ({"engine": "openai", "evictor": "lineage"}, "evictor = lineage: only valid for simulated engines"),
        (
            {"perf_model": "polynomial", "planner_profile_data": "x"},
            "planner_profile_data already defines the step times",
        ),
        ({"perf_model": "polynomial", "itl_ms": "5"}, "itl_ms = 5: only valid if steps take a constant time"),
        ({"perf_model": "quick"}, "expected one of constant, polynomial, polynomial-v2"),
    ],
)
def test_settings_that_contradict_one_another_are_refused(flags: dict[str, str], message: str) -> None:
    with pytest.raises(BadSetting, match=message):
        load_settings(flags, {})


def test_flags_also_have_dynamos_names() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_arguments(parser)
    args = parser.parse_args(
        ["--num-gpu-blocks-override", "100", "--block-size", "64", "--max-num-seqs", "8", "--max-num-batched-tokens", "512",
         "--data-parallel-size", "2", "--no-enable-prefix-caching", "--max-model-len", "1000"]
    )  # fmt: skip
    settings = load_settings(vars(args), {})
    assert (settings.kv_blocks, settings.block_tokens, settings.batch_max, settings.prefill_tokens_max) == (
        100,
        64,
        8,
        512,
    )
    assert (settings.dp_size, settings.prefix_caching, settings.context_tokens) == (2, False, 1000)


def test_reasoning_is_read_from_flags_and_dynamos_arguments(tmp_path: Path) -> None:
    path, asked = (
        tmp_path / "a.json",
        {"start_thinking_token_id": 300, "end_thinking_token_id": 301, "thinking_ratio": 0.5},
    )
    path.write_text(json.dumps({"reasoning": asked}))
    assert built(extra_engine_args=path).shape.reasoning == Reasoning(300, 301, 0.5)
    assert built(reasoning=json.dumps(asked)).shape.reasoning == Reasoning(300, 301, 0.5)
    for wrong in (
        "1",
        "{",
        json.dumps(asked | {"end_thinking_token_id": 151_668}),
        json.dumps(asked | {"x": 1}),
    ):
        with pytest.raises(BadReasoning, match=r"^reasoning = "):
            built(reasoning=wrong)


# --- ranks


def test_the_profile_of_several_ranks_is_multiplied() -> None:
    one = SimulatedEngine(EngineShape(), ConstantTiming(itl_s=0.02)).identity.profile
    assert SimulatedEngine(EngineShape(), ConstantTiming(itl_s=0.02), dp=3).identity.profile == Profile(
        kv_blocks=3 * one.kv_blocks,
        block_tokens=one.block_tokens,
        max_batch=3 * one.max_batch,
        prefill_tokens_per_s=3 * one.prefill_tokens_per_s,
        tpot_ms=tuple((3 * batch, ms) for batch, ms in one.tpot_ms),
        prefill_tokens_max=one.prefill_tokens_max,  # per step; each rank has its own
    )
