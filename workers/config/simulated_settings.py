"""The settings of the simulated engine, which are a part of `WorkerSettings`.

The setting `extra_engine_args` names a file with arguments of Dynamo's mocker. This module converts those arguments to
settings of Holdfast, which override flags.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

MOST = 2**31  # maximum value of a count; as a limit it means unlimited
CountOrZero = Annotated[int, Meta(ge=0, le=MOST)]
Count = Annotated[int, Meta(ge=1, le=MOST)]
Factor = Annotated[float, Meta(gt=0)]


class SimulatedSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The simulated engine's own settings, by group. None means the engine's own default.

    Simulated engine
        extra_engine_args: simulated: JSON file with arguments of Dynamo's mocker; wins over flags
        engine_type: simulated: start with the defaults of Dynamo's mocker of this engine
        perf_model: simulated: step time model: constant (--itl-ms), or a published polynomial
        planner_profile_data: simulated: NPZ file with step times, from `holdfast profile`
        speedup_ratio: simulated: speed factor of all steps; 0: steps take no time
        decode_speedup_ratio: simulated: additional speed factor of decoding
        dp_size: simulated: number of DP ranks, each with its own queue and KV cache
        startup_s: simulated: seconds until the engine has started
        chunked_prefill: simulated: a long prompt takes several steps, next to decoding requests
        watermark: simulated: share of the KV blocks that new requests may not use
        preemption: simulated: which request is preempted when KV blocks run out
        reasoning: simulated: reasoning before answers: start_thinking_token_id, end_thinking_token_id, thinking_ratio
        fatal_tokens: simulated: comma-separated token ids; a prompt that contains this sequence crashes the process
        adapters: simulated: comma-separated names of LoRA adapters; each changes the tokens of answers
    KV cache and transfer
        prefix_caching: keep and share full KV blocks (openai: the upstream decides)
        evictor: simulated: which unused KV block is evicted first
        host_kv_blocks: simulated: number of KV blocks in host memory
        disk_kv_blocks: simulated: number of KV blocks on disk
        kv_bytes_per_token: simulated: KV bytes per token on the tiers (default: from the model's
            config.json, or of an 8B model)
        kv_transfer_bandwidth: simulated: GB/s at which a moving request's KV cache arrives (0: as fast as possible)
        host_gb_per_s: simulated: GB/s between device and host memory
        disk_gb_per_s: simulated: GB/s to and from the disk
    """

    # Simulated engine
    extra_engine_args: Path | None = None
    engine_type: Literal["vllm", "sglang", "trtllm"] | None = None
    perf_model: Literal["constant", "polynomial", "polynomial-v2"] | None = None
    planner_profile_data: Path | None = None
    speedup_ratio: Annotated[float, Meta(ge=0)] = 1.0
    decode_speedup_ratio: Factor = 1.0
    dp_size: Annotated[int, Meta(ge=1, le=64)] = 1
    startup_s: Annotated[float, Meta(ge=0, le=3600)] = 0.0
    chunked_prefill: bool = True
    watermark: Annotated[float, Meta(ge=0, lt=1)] = 0.01
    preemption: Literal["newest", "oldest"] = "newest"
    reasoning: str = ""
    fatal_tokens: str = ""
    adapters: str = ""
    # KV cache and transfer
    prefix_caching: bool = True
    evictor: Literal["lru", "multi-lru", "lineage"] = "lru"
    host_kv_blocks: CountOrZero = 0
    disk_kv_blocks: CountOrZero = 0
    kv_bytes_per_token: Count | None = None
    kv_transfer_bandwidth: Annotated[float, Meta(ge=0)] | None = None
    host_gb_per_s: Factor = 32.0
    disk_gb_per_s: Factor = 5.0


# Arguments of Dynamo's mocker with a different name than the setting here; SAME lists those with the same name.
MOCKER_NAMES = {
    "num_gpu_blocks": "kv_blocks",
    "block_size": "block_tokens",
    "max_num_seqs": "batch_max",
    "max_num_batched_tokens": "prefill_tokens_max",
    "max_model_len": "context_tokens",
    "enable_prefix_caching": "prefix_caching",
    "enable_chunked_prefill": "chunked_prefill",
    "preemption_mode": "preemption",
    "startup_time": "startup_s",
}
SAME = ("watermark", "speedup_ratio", "decode_speedup_ratio", "dp_size", "planner_profile_data", "kv_bytes_per_token",
        "kv_transfer_bandwidth", "reasoning", "engine_type", "evictor", "host_kv_blocks", "disk_kv_blocks",
        "host_gb_per_s", "disk_gb_per_s", "perf_model")  # fmt: skip
_OURS = {**MOCKER_NAMES, **{name: name for name in SAME}}
# Arguments that are not simulated, each with the only value that is accepted because it has no effect. For the arguments in
# MEANINGLESS any value is accepted, because they matter only between prefill and decode workers, which do not exist here.
NOT_SIMULATED: Mapping[str, object] = {
    "worker_type": "aggregated", "is_prefill": False, "is_decode": False, "aic_nextn": None, "aic_nextn_accept_rates": None,
}  # fmt: skip
SGLANG: Mapping[str, object] = {
    "schedule_policy": "fifo", "page_size": 1, "max_prefill_tokens": 16_384, "chunked_prefill_size": 8192,
    "clip_max_new_tokens": 4096, "schedule_conservativeness": 1.0,
}  # fmt: skip
MEANINGLESS = ("bootstrap_port", "handoff_session_timeout_ms", "kv_transfer_timing_mode",
               "enable_local_indexer", "aic_mtp_seed")  # fmt: skip
FLAGS = {
    "kv_blocks": ("--num-gpu-blocks-override",),
    "block_tokens": ("--block-size",),
    "batch_max": ("--max-num-seqs",),
    "prefill_tokens_max": ("--max-num-batched-tokens",),
    "context_tokens": ("--max-model-len",),
    "prefix_caching": ("--enable-prefix-caching",),
    "chunked_prefill": ("--enable-chunked-prefill",),
    "dp_size": ("--data-parallel-size",),
    "startup_s": ("--startup-time",),
    "count": ("--num-workers",),
}  # additional flags of some settings, with the names that engines use
KV_TRANSFER_GB_PER_S = 64.0  # default of Dynamo's mocker
_PREEMPTION = {"lifo": "newest", "fifo": "oldest"}
_BLOCK_TOKENS = {"vllm": 64, "sglang": 1, "trtllm": 32}


def read_extra(path: Path) -> dict[str, object]:
    """Return a file's arguments of Dynamo's mocker as settings, by name. Raise ValueError if the file is invalid."""
    found = _arguments(path)
    settings: dict[str, object] = {"engine_type": "vllm"}
    for name, value in found.items():
        if value is None and name in ("max_num_seqs", "max_num_batched_tokens"):
            settings[_OURS[name]] = MOST
        elif value is not None and name in _OURS:
            settings[_OURS[name]] = value
    if (mode := settings.get("preemption")) is not None:
        if mode not in [*_PREEMPTION]:
            raise ValueError(f"preemption_mode = {mode!r}: expected one of {', '.join(_PREEMPTION)}")
        settings["preemption"] = _PREEMPTION[str(mode)]
    if "reasoning" in settings:
        settings["reasoning"] = json.dumps(settings["reasoning"])
    return settings


def _arguments(path: Path) -> dict[str, object]:
    """Return the arguments in a JSON file.

    Raise ValueError if the file cannot be parsed, or has an argument that is unknown or not simulated.
    """
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"cannot read the file: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"invalid JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError("the file does not contain a JSON object")
    known = {*_OURS, *NOT_SIMULATED, *MEANINGLESS, "sglang"}
    if unknown := [name for name in found if name not in known]:
        raise ValueError(f"{', '.join(unknown)}: unknown arguments; valid are {', '.join(_OURS)}")
    if refused := _not_simulated(found):
        raise ValueError(f"{', '.join(refused)}: not simulated here")
    return found


def _not_simulated(found: Mapping[str, object]) -> list[str]:
    """Return the names of the arguments that request behaviour that is not simulated."""
    sglang = found.get("sglang") or {}
    if not isinstance(sglang, dict):
        raise ValueError(f"sglang = {sglang!r}: expected an object")
    arguments = [(name, found.get(name), default) for name, default in NOT_SIMULATED.items()]
    arguments += [(f"sglang.{name}", value, SGLANG.get(name)) for name, value in sglang.items()]
    return [name for name, value, default in arguments if value not in (None, default)]


def their_name(name: str) -> str:
    """Return the name that Dynamo's mocker uses for the setting `name`; `name` itself if the mocker has no such argument."""
    return next((theirs for theirs, ours in _OURS.items() if ours == name), name)


def defaults(engine_type: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that Dynamo's mocker uses by default for an engine type, overridden by those in `given`."""
    theirs: dict[str, Any] = {
        "kv_blocks": 16_384, "block_tokens": _BLOCK_TOKENS[engine_type], "batch_max": 256, "prefill_tokens_max": 8192,
        "waiting_max": MOST,
    }  # fmt: skip
    theirs |= given
    theirs["batch_max"] = min(theirs["batch_max"], theirs["kv_blocks"])  # each request has at least one block
    theirs.setdefault("context_tokens", theirs["kv_blocks"] * theirs["block_tokens"])
    return theirs
