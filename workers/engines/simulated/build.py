"""Builds simulated engines from settings."""

from functools import cache
from pathlib import Path

from workers.config.settings import WorkerSettings, given
from workers.config.simulated_settings import KV_TRANSFER_GB_PER_S, defaults
from workers.engines.simulated import reasoning
from workers.engines.simulated.engine import SimulatedEngine
from workers.engines.simulated.fatal import read_fatal
from workers.engines.simulated.kv_size import kv_bytes_per_token
from workers.engines.simulated.rank import TURN_TOKENS
from workers.engines.simulated.sequence import KV_BLOCK_BYTES, EngineShape
from workers.engines.simulated.timing import (
    POLYNOMIALS,
    PREFILL_TOKENS_PER_S,
    ConstantTiming,
    Interpolated,
    ModelTiming,
    TieredTiming,
    Timing,
)


def build_simulated(settings: WorkerSettings) -> SimulatedEngine:
    """Build a simulated engine, not yet started. Raise BadShape if its bounds contradict one another."""
    shape = _shape(settings)
    return SimulatedEngine(
        shape,
        _timing(settings, shape),
        dp=settings.dp_size,
        start_s=settings.startup_s,
        turn_tokens=TURN_TOKENS,
    )


@cache  # like `_timing`: a process may have a thousand engines, and only the first reads the files
def _shape(settings: WorkerSettings) -> EngineShape:
    """Return a simulated engine's bounds."""
    bounds = given(
        settings,
        "context_tokens", "block_tokens", "kv_blocks", "batch_max", "waiting_max", "prefill_tokens_max",
        "kv_block_bytes", "tp", "prefix_caching", "chunked_prefill", "watermark", "preemption", "evictor",
        "host_kv_blocks", "disk_kv_blocks",
    )  # fmt: skip
    if settings.engine_type is not None:
        bounds = defaults(settings.engine_type, bounds)
    bounds.setdefault("kv_block_bytes", max(KV_BLOCK_BYTES, bounds.get("block_tokens", 0)))
    gb_per_s = settings.kv_transfer_bandwidth
    if gb_per_s is None:
        gb_per_s = KV_TRANSFER_GB_PER_S if settings.engine_type else 0.0
    if gb_per_s and settings.speedup_ratio:
        bounds["kv_token_s"] = _token_bytes(settings) / (gb_per_s * 1e9 * settings.speedup_ratio)
    if settings.fatal_tokens:
        bounds["fatal"] = read_fatal(settings.fatal_tokens)
    if settings.reasoning:
        bounds["reasoning"] = reasoning.read(settings.reasoning)
    return EngineShape(model=Path(settings.model).name or "sim", **bounds)


def _token_bytes(settings: WorkerSettings) -> int:
    """Return the size of a token's KV in bytes."""
    return settings.kv_bytes_per_token or kv_bytes_per_token(Path(settings.model))


@cache
def _timing(settings: WorkerSettings, shape: EngineShape) -> Timing:
    """Return the timing of a simulated engine's steps."""
    timing: Timing
    faster, decode = settings.speedup_ratio, settings.decode_speedup_ratio
    model = settings.perf_model or (
        "polynomial" if settings.engine_type and not settings.itl_ms else "constant"
    )
    measured = settings.planner_profile_data and Interpolated.load(settings.planner_profile_data)
    if not faster:
        timing = ConstantTiming()
    elif measured:
        timing = ModelTiming(measured, faster, decode)
    elif model != "constant":
        timing = ModelTiming(POLYNOMIALS[model], faster, decode)
    else:
        prefill = settings.prefill_tokens_per_s or (PREFILL_TOKENS_PER_S if settings.itl_ms else 0.0)
        timing = ConstantTiming(settings.itl_ms / 1e3 / faster / decode, prefill * faster)
    if not faster or not (settings.host_kv_blocks or settings.disk_kv_blocks):
        return timing
    return TieredTiming(
        timing=timing,
        block_bytes=_token_bytes(settings) * shape.block_tokens,
        host_bytes_per_s=settings.host_gb_per_s * 1e9 * faster,
        disk_bytes_per_s=settings.disk_gb_per_s * 1e9 * faster,
    )
