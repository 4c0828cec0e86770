"""Builds simulated engines from settings."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from events.errors import UsageError
from workers.config.settings import WorkerSettings, given
from workers.config.simulated_settings import KV_TRANSFER_GB_PER_S, defaults
from workers.engines.simulated.engine import SimulatedEngine
from workers.engines.simulated.language import VOCABULARY, Reasoning
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

USUAL = 131_072  # an 8B model with 32 layers, 8 KV heads of 128 numbers, 16 bits each
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


class BadFatal(UsageError):
    """The setting does not name the tokens that end the simulated engine's process."""


def read_fatal(text: str) -> tuple[int, ...]:
    """Parse a comma-separated list of token ids. Raise BadFatal."""
    try:
        tokens = tuple(int(one) for one in text.split(","))
    except ValueError:
        raise BadFatal(
            f"fatal_tokens = {text}: expected token ids separated by commas, such as 7,7,7"
        ) from None
    if not all(0 <= token < VOCABULARY for token in tokens):
        raise BadFatal(f"fatal_tokens = {text}: token ids go from 0 to {VOCABULARY - 1}")
    return tokens


class BadReasoning(UsageError):
    """The setting does not describe how the simulated engine reasons."""


def read_reasoning(text: str) -> Reasoning:
    """Parse a JSON object. Raise BadReasoning."""
    try:
        return msgspec.json.decode(text, type=Reasoning)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadReasoning(f"reasoning = {text}: {error}") from error


class BadConfig(UsageError):
    """A model's config.json does not determine the size of its KV cache."""


def kv_bytes_per_token(folder: Path) -> int:
    """Return the bytes of one token's KV: layers x 2 x KV heads x numbers per head x bytes per number.

    Without a model's folder, return the size of an 8B model. Raise BadConfig.
    """
    path = folder / "config.json"
    if not folder.name or not path.is_file():
        return USUAL
    try:
        config = json.loads(path.read_text())
        return _size(config.get("text_config") or config)
    except KeyError as error:
        raise BadConfig(f"{path}: it has no {error}: set kv_bytes_per_token") from error
    except (OSError, ValueError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise BadConfig(f"{path}: cannot be read: {error}: set kv_bytes_per_token") from error


def _size(config: Mapping[str, Any]) -> int:
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head = config.get("head_dim") or config["hidden_size"] // heads
    number = _BYTES.get(config.get("torch_dtype") or config.get("dtype") or "bfloat16", 2)
    size = int(config["num_hidden_layers"] * 2 * kv_heads * head * number)
    if size < 1:
        raise ValueError(f"a token of {size} bytes")
    return size


def build_simulated(settings: WorkerSettings) -> SimulatedEngine:
    """Build a simulated engine, not yet started. Raise BadShape if its bounds contradict one another."""
    shape = _shape(settings)
    timing, dp = _timing(settings, shape), settings.dp_size
    return SimulatedEngine(shape, timing, dp=dp, start_s=settings.startup_s, turn_tokens=TURN_TOKENS)


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
        bounds["reasoning"] = read_reasoning(settings.reasoning)
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
        return ConstantTiming()
    if measured:
        timing = ModelTiming(measured, faster, decode)
    elif model != "constant":
        timing = ModelTiming(POLYNOMIALS[model], faster, decode)
    else:
        prefill = settings.prefill_tokens_per_s or (PREFILL_TOKENS_PER_S if settings.itl_ms else 0.0)
        timing = ConstantTiming(settings.itl_ms / 1e3 / faster / decode, prefill * faster)
    if not (settings.host_kv_blocks or settings.disk_kv_blocks):
        return timing
    return TieredTiming(
        timing=timing,
        block_bytes=_token_bytes(settings) * shape.block_tokens,
        host_bytes_per_s=settings.host_gb_per_s * 1e9 * faster,
        disk_bytes_per_s=settings.disk_gb_per_s * 1e9 * faster,
    )
