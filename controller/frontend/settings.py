"""The settings of a frontend."""

import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from controller.deciders.thresholds import BusyThresholds
from controller.migration.cost import MovingPolicy
from controller.setting_types import NotNegative, Positive, Share, Strict
from events.intrusion.send_budget import TrafficLimit, traffic

Mode = Literal["kv", "round-robin", "random", "least-loaded", "power-of-two"]
OnCorruption = Literal["continue", "restart", "error"]
AdmissionControl = Literal["none", "token-capacity", "deadline"]
OverloadStatus = Literal[503, 429, 529]
FairnessKey = Literal["header", "api_key", "user"]
INFLIGHT_PER_BATCH = 4.0
_PAIRS_WANTED = {
    "ttft_deadlines": "tier=milliseconds,... is wanted, such as premium=500,standard=2000",
    "model_aliases": "alias=model,... is wanted, such as gpt-4o=llama-70b",
}
_ORIGIN = re.compile(r"\*|null|[A-Za-z][A-Za-z0-9+.-]*://[^\s/?#@]+/?")


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


class AdmissionSettings(Strict):
    """Who is let in, and how long he may wait. A degradation level's knobs scale these."""

    inflight_per_batch: Positive | None = Field(
        default=None,
        description="requests in flight per worker, of all frontends, times its max_batch; none: 4, or 1 with deadlines",
    )
    inflight_max: int | None = Field(default=None, ge=1)  # the same per worker, as a plain number
    queue_max: int = Field(default=1024, ge=0)  # requests that wait for a free worker, per model
    queue_s: Positive = 10.0  # in line for a free worker; with deadlines, only for who has none
    fairness_by: tuple[FairnessKey, ...] = ("header", "api_key", "user")  # with deadlines: whose a request is
    retry_budget: Share = 0.2  # with deadlines: repeats of refused requests, of what is none
    # From then to the first token. A full server can let a request wait for minutes, and clients give up after 600 s (OpenAI's).
    first_token_s: Positive = Field(
        default=300.0,
        description="seconds that a request may wait for its first token",
        json_schema_extra={"flag": "--first-token-timeout"},
    )
    first_token_s_per_1k: NotNegative = Field(  # slow prefills read 1,000 tokens a second
        default=1.0,
        description="seconds more for each 1,000 tokens of its prompt",
        json_schema_extra={"flag": "--first-token-timeout-per-1k"},
    )
    body_mb_max: int = Field(default=45, ge=1)  # of one body, inflated
    bodies_mb_max: int = Field(default=512, ge=1)  # of all that are being read
    body_s: Positive = 60.0  # for a request's whole body to come in
    body_parse_s: Positive = 10.0  # for a large body to be parsed beside the event loop, its turn included
    # What one body may hold. 10,000 messages of a part each stay below these; each value costs up to a microsecond to parse.
    body_names_max: int = Field(default=2**16, ge=1024)  # names of all objects
    body_lists_max: int = Field(default=2**15 + 2**13, ge=1024)  # lists and objects
    body_texts_max: int = Field(default=2**17, ge=1024)  # strings, names included
    body_values_max: int = Field(default=2**21, ge=1024)  # values: 16 prompts of 100,000 token ids, and more


class TokenizingSettings(Strict):
    """How long texts are tokenised: beside the loop, a few at a time. A text of 1 MB takes a second of a core, and 100 MB while
    it lasts."""

    long_at_once: int = Field(default=2, ge=1)  # texts of more than 16,384 characters, in all
    huge_at_once: int = Field(default=1, ge=1)  # of more than a million: they do not keep the others waiting
    waiting_mb_max: int = Field(default=64, ge=1)  # millions of characters that are read or wait, in all
    wait_s: Positive = 10.0  # for its turn


class ConnectionSettings(Strict):
    """How many connections clients may have to one frontend, and how long one may say nothing. What honest clients do not meet: a
    proxy in front is one address, and has a connection for each open stream; the most that one frontend has been measured with
    are 2,000. The total leaves three quarters of the 65,536 open files for workers."""

    total_max: int = Field(default=16_384, ge=0)  # 0: any number
    per_address_max: int = Field(default=4096, ge=0)  # 0: any number
    head_bytes_max: int = Field(default=2**15, ge=2**13)  # of a request's line and headers together
    head_s: Positive = 5.0  # from the first byte of a request's head to its last
    idle_s: Positive = 75.0  # without a request; before the first, too


class StreamSettings(Strict):
    """What a client may cost that does not read."""

    buffer_bytes_max: int = Field(default=1024 * 1024, ge=4096)  # of one answer that its client has not read
    write_deadline_s: Positive = 30.0  # for a client to read anything at all
    # Load balancers cut connections that are idle for 60 s, some for 30 s. Errors before it keep their HTTP status.
    early_head_s: NotNegative = Field(
        default=15.0,
        description="seconds without a token until a streaming client gets the head, and between SSE comments; 0: never",
        json_schema_extra={"flag": "--early-head"},
    )


class StallSettings(Strict):
    """When a stream counts as stalled although its worker goes on: it moves to another worker."""

    pace_factor: Annotated[float, Field(gt=1)] = Field(
        default=20.0, description="a stream stalls after this many times its own mean time per token"
    )
    floor_s: Positive = Field(
        default=10.0, description="seconds without a token, below which no stream has stalled"
    )
    ceiling_s: Positive = Field(
        default=60.0,
        description="seconds without a token, above which each has; also the limit while requests wait in the worker's queue",
    )
    sweep_s: Positive = Field(default=0.25, description="seconds between two looks at all streams")

    @model_validator(mode="after")
    def _ordered(self) -> "StallSettings":
        if self.floor_s > self.ceiling_s:
            raise ValueError(
                f"floor_s is {self.floor_s:g}: it must not be above ceiling_s, {self.ceiling_s:g}"
            )
        return self


class LocalBreakerSettings(Strict):
    """This frontend's own breakers: shorter than the fleet's, because they know less and can only subtract."""

    failures_max: int = Field(default=3, ge=1)  # requests in a row: it opens
    wait_s: Positive = 5.0  # from its opening to the first trial
    wait_s_max: Positive = 60.0  # the most that this grows to
    trial_timeout_s: Positive = 30.0  # until a trial that says nothing has failed
    panic_share: Share = 0.5  # less routable weight than this: local breakers are ignored
    stalled_share: Share = 0.05  # share of a worker's streams that may stall: more count as failures


class PoisonSettings(Strict):
    """What is done about requests that bring workers down, or fail in the same way wherever they are sent."""

    refused_s: Positive = 600.0  # the like of one that brings workers down; twice as long each next time
    failed_s: Positive = 10.0  # the like of one that only fails; the same
    refused_s_max: Positive = 86_400.0  # the most that either grows to
    remembered_s: Positive = 600.0  # that a worker fell with it
    alone_s: Positive = 2.0  # a suspect waits so long for a worker that has no other suspect
    records_max: int = Field(default=4096, ge=1)  # requests that are remembered


class FactSettings(Strict):
    """How often a frontend reports, and how much it remembers."""

    window_s: Positive = 5.0  # of RequestsServed and WorkerSlow
    rejected_window_s: Positive = 1.0  # of RequestsRejected
    failures_per_s_max: int = Field(default=20, ge=1)  # RequestFailed of a worker; more go into the next
    slow_factor: Annotated[float, Field(gt=1)] = 3.0  # times the median of the model's other workers
    slow_tokens_min: int = Field(default=32, ge=1)  # tokens in a window, below which nobody is called slow
    exposure_entries_max: int = Field(default=20_000, ge=1)  # per worker


class FrontendBudgets(Strict):
    """What one worker may send a frontend, far above what any engine does. Beyond it the worker is cut off, reported, ejected."""

    frames_per_s: Positive = 20_000.0  # frames on one connection; an engine's step is one
    frames_burst: Positive = 100_000.0  # frames at once
    frame_mb_per_s: Positive = 64.0  # MiB of frames; 256 answers with 20 logprobs have 6
    frame_mb_burst: Positive = 512.0  # MiB of frames at once
    flood_pause_s: Positive = 30.0  # until a worker is connected to again that sent more
    kv_batches_per_s: Positive = 2_000.0  # messages of KV events; an engine's step makes one
    kv_batches_burst: Positive = 20_000.0  # messages of KV events at once
    kv_mb_per_s: Positive = 8.0  # MiB of KV events
    kv_mb_burst: Positive = 64.0  # MiB of KV events at once

    @property
    def frames(self) -> TrafficLimit:
        """The limit of frames."""
        return traffic(self.frames_per_s, self.frames_burst, self.frame_mb_per_s, self.frame_mb_burst)

    @property
    def kv_events(self) -> TrafficLimit:
        """The limit of KV events."""
        return traffic(self.kv_batches_per_s, self.kv_batches_burst, self.kv_mb_per_s, self.kv_mb_burst)


class FrontendSettings(Strict):
    """One frontend process.

    `migration_limit` is 3 where the seed's default is 0 (no migration at all), which surprises everyone.
    `on_corruption` says what becomes of a stream that a convicted worker has fed: `continue` goes on from
    what was accepted, and starts over where nothing of it has reached the client; `restart` starts over, and
    ends with an error where the client has already seen some; `error` always ends with an error.
    """

    host: str = Field(default="127.0.0.1", description="the address that the API listens on")
    port: int = Field(
        default=8000, ge=0, le=65_535, description="its port, which frontends share; 0: any free one"
    )
    api_key_file: str = Field(
        default="",
        description="file of the API keys that clients need, `key` or `name:key` on each line; read again when it changes; "
        "empty: none is needed",
    )
    insecure: bool = Field(
        default=False, description="listen on other addresses than loopback without API keys"
    )
    tls_cert: str = Field(
        default="",
        description="file of the certificate chain (PEM) for TLS on both ports; read again when it changes; empty: no TLS",
    )
    tls_key: str = Field(default="", description="file of its private key (PEM), without a password")
    admin_host: str = Field(default="127.0.0.1", description="the address of metrics and readiness")
    admin_port: int = Field(default=0, ge=0, le=65_535, description="their port; 0: any free one")
    admin_key_file: str = Field(
        default="",
        description="file of the keys with which other hosts may change settings on the admin port, as --api-key-file has them; "
        "empty: only this host may",
    )
    admin_api: bool = Field(
        default=False, description="answer /busy_threshold on the port of the API as well, for its clients"
    )
    console: bool = Field(
        default=True,
        description="show the fleet to operators at /console on the admin port (docs/console.md)",
    )
    console_actions: bool = Field(
        default=False,
        description="let the console drain, resume, empty and restart workers, too; else it only shows them",
    )
    cors_origins: tuple[str, ...] = Field(
        default=(),
        description="origins whose pages may use the API from a browser, such as https://app.example.com; *: all; empty: none",
    )
    model_aliases: dict[str, str] = Field(
        default={},
        description="alias=model,...: further names under which clients may ask for a model",
    )
    migration_limit: int = Field(
        default=3, ge=0, le=2**32 - 1, description="how often a request may move to another worker; 0: never"
    )
    migration_max_seq_len: int | None = Field(
        default=None, ge=1, description="requests of more tokens than this do not move"
    )
    on_corruption: OnCorruption = Field(
        default="continue",
        description="what becomes of a stream that a convicted worker fed: continue, restart, error",
    )
    reroute_s: Positive = Field(default=10.0, description="how long a stream without a worker waits for one")
    grace_s: Positive = Field(default=30.0, description="how long streams may go on after SIGTERM")
    retry_after_s: int = Field(default=30, ge=1, description="what a rejected client is told to wait")
    admission_control: AdmissionControl = Field(
        default="none",
        description="token-capacity: a request is refused while every worker is over a threshold; deadline: while its first "
        "token would come too late; none: none is for load alone",
    )
    ttft_deadlines: dict[str, Positive] = Field(
        default={},
        description="with deadline: tier=milliseconds,...: to the first token, of requests that say none; else the model's "
        "objective",
    )
    park: bool = Field(
        default=False,
        description="with deadline: running answers of the last tier are put off where the best tier would wait too long",
    )
    park_s: Positive = Field(default=30.0, description="the longest that one answer is put off, in all")
    active_decode_blocks_threshold: Annotated[float, Field(ge=0, le=1)] | None = Field(
        default=0.85, description="share of its KV blocks in use, above which a worker is busy; none: never"
    )
    active_prefill_tokens_threshold: Annotated[int, Field(ge=0)] | None = Field(
        default=10_000, description="prompt tokens still to be read, above which it is; none: never"
    )
    active_prefill_tokens_threshold_frac: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = Field(
        default=None,
        description="the same as a multiple of the tokens of one step of its engine; none: never",
    )
    overload_status_code: OverloadStatus | None = Field(
        default=None,
        description="HTTP status for rejected requests: 503, 429 or 529; none: 503, or 429 with --admission-control deadline",
    )
    request_plane: Literal["tcp", "nats"] = Field(
        default="tcp", description="nats: also reach workers that are behind the broker"
    )
    static: str = Field(default="", description="host:port,...: workers given directly, without a broker")
    static_tokenizer: str = Field(default="builtin:sim", description="their tokenizer")
    model_folders: str = Field(
        default="",
        description="comma-separated folders, with what is below them, of which a worker's tokenizer and chat template may be "
        "read; others are refused",
    )
    router: RouterSettings = Field(default=RouterSettings(), json_schema_extra={"flags": "--router-"})
    admission: AdmissionSettings = AdmissionSettings()
    connections: ConnectionSettings = ConnectionSettings()
    tokenizing: TokenizingSettings = TokenizingSettings()
    stream: StreamSettings = StreamSettings()
    breaker: LocalBreakerSettings = LocalBreakerSettings()
    stall: StallSettings = Field(default=StallSettings(), json_schema_extra={"flags": "--stall-"})
    poison: PoisonSettings = PoisonSettings()
    facts: FactSettings = FactSettings()
    worker_budgets: FrontendBudgets = FrontendBudgets()
    moving: MovingPolicy = MovingPolicy()

    @property
    def by_deadline(self) -> bool:
        """Whether requests are let in by their deadlines."""
        return self.admission_control == "deadline"

    @property
    def parks_s(self) -> float | None:
        """The longest that one running answer is put off; None: none ever is."""
        return self.park_s if self.park else None

    @property
    def folders(self) -> list[str]:
        """The folders of which tokenizers and chat templates may be read."""
        return [folder.strip() for folder in self.model_folders.split(",") if folder.strip()]

    @property
    def overload_status(self) -> int:
        """The status of a refusal for want of room."""
        return self.overload_status_code or (429 if self.by_deadline else 503)

    @property
    def inflight_per_batch(self) -> float:
        """Requests in flight at a worker, of all frontends, times its batch. Who goes by deadlines lets nobody wait there."""
        return self.admission.inflight_per_batch or (1.0 if self.by_deadline else INFLIGHT_PER_BATCH)

    @property
    def thresholds(self) -> BusyThresholds:
        """From where on a worker is busy, with `admission_control` on."""
        return BusyThresholds(
            self.active_decode_blocks_threshold,
            self.active_prefill_tokens_threshold,
            self.active_prefill_tokens_threshold_frac,
        )

    @field_validator(
        "active_decode_blocks_threshold",
        "active_prefill_tokens_threshold",
        "active_prefill_tokens_threshold_frac",
        "overload_status_code",
        mode="before",
    )
    @classmethod
    def _number_or_none(cls, value: Any) -> Any:
        """Parse a number, `None` (as Dynamo writes it) or an empty text."""
        if not isinstance(value, str):
            return value
        if value.strip().lower() in ("", "none"):
            return None
        return int(value) if value.isascii() and value.isdigit() else value

    @field_validator("cors_origins")
    @classmethod
    def _origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        """Refuse what no browser sends as an Origin, and would therefore never match."""
        for origin in origins:
            if not _ORIGIN.fullmatch(origin):
                raise ValueError(f"{origin!r} is not an origin, such as https://app.example.com, or *")
        return origins

    @field_validator("ttft_deadlines", "model_aliases", mode="before")
    @classmethod
    def _pairs(cls, value: Any, info: ValidationInfo) -> Any:
        """Parse `premium=500,standard=2000` or `gpt-4o=llama-70b`."""
        if not isinstance(value, str):
            return value
        pairs = [part.partition("=") for part in value.split(",") if part.strip()]
        if not all(name.strip() and equals and one.strip() for name, equals, one in pairs):
            raise ValueError(_PAIRS_WANTED[info.field_name or ""])
        return {name.strip(): one.strip() for name, _, one in pairs}

    @model_validator(mode="after")
    def _check_combinations(self) -> "FrontendSettings":
        if self.static and self.request_plane == "nats":
            raise ValueError(
                "static names workers that are reached without a broker: request_plane must be tcp"
            )
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ValueError("--tls-cert and --tls-key (tls_cert, tls_key) are needed together")
        if self.console_actions and not self.console:
            raise ValueError("console_actions are taken at the console: console must not be false")
        for flag in ("park", "ttft_deadlines"):
            if getattr(self, flag) and not self.by_deadline:
                named = f"--{flag.replace('_', '-')} ({flag})"
                raise ValueError(f"{named} needs --admission-control deadline (admission_control)")
        return self

    @field_validator("moving", mode="before")
    @classmethod
    def _what_is_not_set_keeps_its_default(cls, value: Any) -> Any:
        """Let one number of one link be set alone: each link has defaults of its own."""
        return laid_over(asdict(MovingPolicy()), value) if isinstance(value, Mapping) else value


def laid_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return `below` with what `above` says differently, at every depth."""
    found = {**below, **above}
    for name, value in above.items():
        if isinstance(value, Mapping) and isinstance(below.get(name), Mapping):
            found[name] = laid_over(below[name], value)
    return found
