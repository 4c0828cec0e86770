"""Builds simulated engines from worker settings."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from events.errors import UsageError
from events.intrusion.registration import NAME_MAX, NAMES_MAX
from workers.config.settings import WorkerSettings, non_null
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

USUAL = 131_072  # bytes of one token's KV in an 8B model: 32 layers, 8 KV heads of 128 numbers, 16 bits each
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


class BadFatal(UsageError):
    """The setting `fatal_tokens` is not a list of the simulated model's token ids."""


def read_fatal(text: str) -> tuple[int, ...]:
    """Parse the setting `fatal_tokens`, a comma-separated list of token ids. Raise BadFatal if it is invalid.

    A prompt that contains these tokens in a row ends the simulated engine's process.
    """
    try:
        tokens = tuple(int(one) for one in text.split(","))
    except ValueError:
        raise BadFatal(
            f"fatal_tokens = {text}: expected token ids separated by commas, such as 7,7,7"
        ) from None
    if not all(0 <= token < VOCABULARY for token in tokens):
        raise BadFatal(f"fatal_tokens = {text}: token ids go from 0 to {VOCABULARY - 1}")
    return tokens


class BadAdapters(UsageError):
    """The setting `adapters` is not a list of names of LoRA adapters."""


def read_adapters(text: str) -> tuple[str, ...]:
    """Parse the setting `adapters`, a comma-separated list of names. Raise BadAdapters if it is invalid."""
    names = tuple(name.strip() for name in text.split(","))
    if not all(names) or len(set(names)) < len(names):
        raise BadAdapters(
            f"adapters = {text}: expected different names separated by commas, such as sql,legal"
        )
    if len(names) > NAMES_MAX or any(len(name) > NAME_MAX for name in names):
        raise BadAdapters(f"adapters: at most {NAMES_MAX} names of at most {NAME_MAX} characters are allowed")
    return names


class BadReasoning(UsageError):
    """The setting `reasoning` is not a valid configuration of the simulated model's reasoning."""


def read_reasoning(text: str) -> Reasoning:
    """Parse the setting `reasoning`, a JSON object. Raise BadReasoning if it is invalid."""
    try:
        return msgspec.json.decode(text, type=Reasoning)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadReasoning(f"reasoning = {text}: {error}") from error


class BadConfig(UsageError):
    """A model's config.json does not determine the size of its KV cache."""


def kv_bytes_per_token(folder: Path) -> int:
    """Return the size in bytes of one token's KV: layers × 2 × KV heads × numbers per head × bytes per number.

    If `folder` has no config.json, return the size of an 8B model. Raise BadConfig if the config.json lacks a value or cannot be
    read.
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
    """Return a simulated engine for these settings. The engine is not started yet.

    Raise BadShape if the engine's limits are invalid, or contradict one another.
    """
    shape = _shape(settings)
    timing, dp = _timing(settings, shape), settings.dp_size
    return SimulatedEngine(shape, timing, dp=dp, start_s=settings.startup_s, turn_tokens=TURN_TOKENS)


@cache  # here and for `_timing`: a process may have a thousand engines, and only the first must read the files
def _shape(settings: WorkerSettings) -> EngineShape:
    """Return the limits and policies of a simulated engine with these settings."""
    bounds = non_null(
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
    if settings.adapters:
        bounds["adapters"] = read_adapters(settings.adapters)
    if settings.reasoning:
        bounds["reasoning"] = read_reasoning(settings.reasoning)
    return EngineShape(model=Path(settings.model).name or "sim", **bounds)


def _token_bytes(settings: WorkerSettings) -> int:
    """Return the size in bytes of one token's KV, from the settings or from the model's config.json."""
    return settings.kv_bytes_per_token or kv_bytes_per_token(Path(settings.model))


@cache
def _timing(settings: WorkerSettings, shape: EngineShape) -> Timing:
    """Return the timing of a simulated engine with these settings and limits."""
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
