"""How a frontend chooses a worker for a request."""

from typing import Literal

from pydantic import Field

from controller.setting_types import NotNegative, Positive, Strict

Mode = Literal["kv", "round-robin", "random", "least-loaded", "power-of-two"]


class RouterSettings(Strict):
    """How a worker is chosen for a request. The names are NVIDIA Dynamo's; docs/router.md says what each does to the cost,
    and where our defaults are others."""

    mode: Mode = Field(
        default="kv",
        description="how a worker is chosen: kv, round-robin, random, least-loaded, power-of-two",
    )
    temperature: NotNegative = Field(
        default=0.0, description="above 0: dearer workers are chosen too, the more of them the higher it is"
    )
    kv_overlap_score_credit: NotNegative = Field(
        default=5.0, description="how much a cached block of the prompt takes off the cost"
    )
    kv_overlap_score_credit_decay: NotNegative = Field(
        default=0.0, description="how fast that credit shrinks on workers that have more to read than others"
    )
    prefill_load_scale: NotNegative = Field(
        default=20.0, description="what a block of prompt that is still to be read weighs against one in use"
    )
    decode_active_request_weight: NotNegative = Field(
        default=0.0, description="what each request in flight there adds to the cost, in blocks"
    )
    active_request_tokens: NotNegative = Field(
        default=512.0, description="what each adds in prompt tokens that are still to be read"
    )
    recent_prefill_weight: NotNegative = Field(
        default=0.1,
        description="what a block of prompt that was sent there in the last 10 s weighs against one still to be read",
    )
    host_cache_hit_weight: NotNegative = Field(
        default=0.75, description="what a block in the host's memory is worth of one on the device"
    )
    disk_cache_hit_weight: NotNegative = Field(
        default=0.25, description="what a block on disk is worth of one on the device"
    )
    kv_events: bool = Field(
        default=True,
        description="know what workers have cached from what they say; else guess it from what was sent there",
        json_schema_extra={"also": ["--kv-events"]},
    )
    ttl_secs: Positive = Field(
        default=120.0, description="where it is guessed: how long a prompt is taken to stay cached"
    )
    replica_sync: bool = Field(
        default=False, description="tell the other frontends of each request, and count theirs as our own"
    )
    track_active_blocks: bool = Field(default=True, description="count the blocks in use into the cost")
    track_output_blocks: bool = Field(default=False, description="count those of answers as they grow, too")
    track_prefill_tokens: bool = Field(
        default=True, description="count the prompt tokens that are still to be read into the cost"
    )
    prefill_load_model: Literal["none", "profile"] = Field(
        default="none",
        description="profile: what is still to be read shrinks at the worker's registered rate until its first token",
    )
    assume_kv_reuse: bool = Field(
        default=True, description="count blocks that several requests of a worker share once"
    )
    queue_prefill_s: Positive | None = Field(
        default=None,
        description="requests wait while every worker needs longer than this to read the prompts that it has already",
    )
