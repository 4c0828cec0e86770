"""The settings of a frontend."""

import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from controller.deciders.thresholds import BusyThresholds
from controller.migration.cost import MovingPolicy
from controller.setting_types import NotNegative, Positive, Share, Strict, setting
from events.intrusion.send_budget import TrafficLimit, traffic

Mode = Literal["kv", "round-robin", "random", "least-loaded", "power-of-two"]
OnCorruption = Literal["continue", "restart", "error"]
FairnessKey = Literal["header", "api_key", "user"]
INFLIGHT_PER_BATCH = 4.0
_PAIRS_WANTED = {
    "ttft_deadlines": "expected tier=milliseconds,... such as premium=500,standard=2000",
    "model_aliases": "expected alias=model,... such as gpt-4o=llama-70b",
    "tool_call_parsers": "expected model=format,... such as llama-70b=llama3_json",
    "reasoning_parsers": "expected model=format,... such as r1=deepseek_r1",
}
_ORIGIN = re.compile(r"\*|null|[A-Za-z][A-Za-z0-9+.-]*://[^\s/?#@]+/?")


class RouterSettings(Strict):
    """How a worker is chosen for a request.

    The names are NVIDIA Dynamo's. docs/concepts/router.md explains how each setting affects the cost, and which defaults differ
    from Dynamo's.
    """

    mode: Mode = setting("kv", "routing mode: kv, round-robin, random, least-loaded, power-of-two")
    temperature: NotNegative = setting(
        0.0,
        "randomness of the choice: 0 always chooses the worker of least cost, higher values also choose others",
    )
    kv_overlap_score_credit: NotNegative = setting(
        5.0, "cost reduction for each block of the prompt that the worker has cached"
    )
    kv_overlap_score_credit_decay: NotNegative = setting(
        0.0, "how fast that credit shrinks on workers with more prompt tokens to prefill than others"
    )
    prefill_load_scale: NotNegative = setting(
        20.0, "cost of a prompt block still to be prefilled, relative to a block in use"
    )
    decode_active_request_weight: NotNegative = setting(
        0.0, "cost of each request in flight on the worker, in blocks"
    )
    active_request_tokens: NotNegative = setting(
        512.0, "cost of each request in flight on the worker, in prompt tokens to prefill"
    )
    recent_prefill_weight: NotNegative = setting(
        0.1,
        "cost of a prompt block sent to the worker in the last 10 s, relative to one still to be prefilled",
    )
    host_cache_hit_weight: NotNegative = setting(
        0.75, "value of a block cached in host memory, relative to one on the device"
    )
    disk_cache_hit_weight: NotNegative = setting(
        0.25, "value of a block cached on disk, relative to one on the device"
    )
    kv_events: bool = setting(
        True,
        "learn from KV events what workers have cached; otherwise guess it from the requests sent to them",
        json_schema_extra={"also": ["--kv-events"]},
    )
    ttl_secs: Positive = setting(120.0, "seconds that a prompt is assumed to stay cached, without KV events")
    replica_sync: bool = setting(
        False, "share the requests in flight with the other frontends, and count theirs too"
    )
    track_active_blocks: bool = setting(True, "include the blocks in use in the cost")
    track_output_blocks: bool = setting(False, "include the blocks of growing answers in the cost")
    track_prefill_tokens: bool = setting(True, "include the prompt tokens still to be prefilled in the cost")
    prefill_load_model: Literal["none", "profile"] = setting(
        "none",
        "profile: estimate the prefill progress of a request by the worker's registered rate until its first token",
    )
    assume_kv_reuse: bool = setting(True, "count a block that several requests of a worker share only once")
    queue_prefill_s: Positive | None = setting(
        None, "seconds of queued prefill: requests wait in the frontend while every worker has more than this"
    )


class AdmissionSettings(Strict):
    """Limits of admission, queueing and request bodies. The knobs of a degradation level scale the limits of load."""

    inflight_per_batch: Positive | None = setting(
        None,
        "requests in flight per worker, over all frontends, as a multiple of its max_batch; none: 4, or 1 with deadlines",
    )
    inflight_max: int | None = Field(default=None, ge=1)  # requests in flight per worker, as a plain number
    queue_max: int = Field(default=1024, ge=0)  # requests that wait for a free worker, per model
    # seconds to wait for a free worker; with deadlines, only for requests that have no deadline
    queue_s: Positive = 10.0
    # with deadlines: what identifies the client of a request for fair queueing, in order of preference
    fairness_by: tuple[FairnessKey, ...] = ("header", "api_key", "user")
    # with deadlines: largest number of retries of refused requests, as a share of first tries
    retry_budget: Share = 0.2
    # Seconds from dispatch to the first token. A full server can queue a request for minutes; OpenAI's client gives
    # up after 600 s.
    first_token_s: Positive = setting(
        300.0, "seconds that a request may wait for its first token", flag="--first-token-timeout"
    )
    first_token_s_per_1k: NotNegative = setting(  # slow prefills read 1,000 tokens a second
        1.0, "additional seconds for each 1,000 tokens of its prompt", flag="--first-token-timeout-per-1k"
    )
    # seconds until a proxied request has its whole response, which may be a long answer that is not streamed
    whole_response_s: Positive = 600.0
    body_mb_max: int = Field(default=45, ge=1)  # megabytes of one body, decompressed
    bodies_mb_max: int = Field(default=512, ge=1)  # megabytes of all bodies that are being received
    body_s: Positive = 60.0  # seconds to receive the whole body of a request
    # seconds to parse a large body outside the event loop, with the wait for a process
    body_parse_s: Positive = 10.0
    # Limits of one body. 10,000 messages of one part each stay below these; parsing a value takes up to a microsecond.
    body_names_max: int = Field(default=2**16, ge=1024)  # names of all objects
    body_lists_max: int = Field(default=2**15 + 2**13, ge=1024)  # lists and objects
    body_texts_max: int = Field(default=2**17, ge=1024)  # strings, names included
    body_values_max: int = Field(default=2**21, ge=1024)  # values: 16 prompts of 100,000 token ids, and more


class TokenizingSettings(Strict):
    """Limits of tokenizing long texts, which runs in threads outside the event loop.

    A text of 1 MB occupies one core for a second, and needs 100 MB of memory meanwhile.
    """

    long_at_once: int = Field(default=2, ge=1)  # texts of more than 16,384 characters
    # texts of more than a million characters; they do not delay the others
    huge_at_once: int = Field(default=1, ge=1)
    # millions of characters being tokenized or waiting, in total
    waiting_mb_max: int = Field(default=64, ge=1)
    wait_s: Positive = 10.0  # seconds to wait for a thread


class ConnectionSettings(Strict):
    """Limits of the client connections to one frontend: their number, the size of a request head, and waiting times.

    Normal clients do not reach these limits. A proxy in front of the frontend counts as one address, with one connection
    per open stream. A frontend has been measured with up to 2,000 connections. The limit on all connections leaves three
    quarters of the 65,536 open files for workers.
    """

    total_max: int = Field(default=16_384, ge=0)  # 0: no limit
    per_address_max: int = Field(default=4096, ge=0)  # 0: no limit
    head_bytes_max: int = Field(default=2**15, ge=2**13)  # bytes of request line and headers together
    head_s: Positive = 5.0  # seconds from the first byte of a request's head to its last byte
    idle_s: Positive = 75.0  # between requests, and before the first one


class StreamSettings(Strict):
    """Limits for clients that do not read their stream, and the time of an early response head."""

    # bytes of one answer that its client has not read
    buffer_bytes_max: int = Field(default=1024 * 1024, ge=4096)
    write_deadline_s: Positive = 30.0  # seconds in which a client must read at least some data
    # Load balancers close connections that are idle for 60 s, some after 30 s. Errors before the early head keep their HTTP
    # status.
    early_head_s: NotNegative = setting(
        15.0,
        "seconds without a token until a streaming client receives the response head, and between SSE comments; 0: "
        "never",
        flag="--early-head",
    )


class StallSettings(Strict):
    """Decides when a stream counts as stalled although its worker runs, so that it moves to another worker."""

    pace_factor: Annotated[float, Field(gt=1)] = setting(
        20.0, "a stream has stalled after this many times its own mean time per token"
    )
    floor_s: Positive = setting(10.0, "minimum seconds without a token until a stream has stalled")
    ceiling_s: Positive = setting(
        60.0, "maximum seconds without a token; also the limit while requests wait in the worker's queue"
    )
    sweep_s: Positive = setting(0.25, "seconds between two checks of all streams")

    @model_validator(mode="after")
    def _ordered(self) -> "StallSettings":
        if self.floor_s > self.ceiling_s:
            why = f"floor_s is {self.floor_s:g}: it must not be above ceiling_s, {self.ceiling_s:g}"
            raise ValueError(why)
        return self


class StoredResponseSettings(Strict):
    """Limits of the responses that one frontend keeps for later requests (`store` of the Responses API)."""

    number_max: int = Field(default=1000, ge=0)  # responses; 0: none is kept
    mb_max: int = Field(default=64, ge=1)  # MiB of all responses with their conversations
    keep_s: Positive = 3600.0  # seconds for which a response is kept


class LocalBreakerSettings(Strict):
    """The local breakers of one frontend.

    They open sooner than the fleet's breakers, because they can only exclude workers.
    """

    failures_max: int = Field(default=3, ge=1)  # consecutive failed requests until it opens
    wait_s: Positive = 5.0  # seconds from the opening of a breaker to its first trial
    wait_s_max: Positive = 60.0  # upper limit of that wait, which grows
    trial_timeout_s: Positive = 30.0  # a trial without a result has failed after this
    # routable share below which local breakers are ignored, as they are without usable workers; 0: never ignored
    panic_share: Share = 0.5
    stalled_share: Share = 0.05  # stalled streams of a worker, as a share; more count as failures


class PoisonSettings(Strict):
    """Limits for the detection of requests that crash workers, or that fail in the same way on every worker."""

    # seconds for which requests like one that crashes workers are refused; doubles each time
    refused_s: Positive = 600.0
    # seconds for which requests like one that only fails are refused; doubles each time
    failed_s: Positive = 10.0
    refused_s_max: Positive = 86_400.0  # upper limit of both
    remembered_s: Positive = 600.0  # seconds for which the crash of a worker is associated with the request
    alone_s: Positive = 2.0  # seconds for which a suspect waits for a worker without another suspect
    records_max: int = Field(default=4096, ge=1)  # requests that are remembered


class FactSettings(Strict):
    """How often a frontend reports facts, the limits for slow workers, and how many served spans it remembers."""

    window_s: Positive = 5.0  # seconds between two reports RequestsServed and WorkerSlow
    rejected_window_s: Positive = 1.0  # seconds between two reports RequestsRejected
    # RequestFailed facts per worker; further failures go into the next one
    failures_per_s_max: int = Field(default=20, ge=1)
    slow_factor: Annotated[float, Field(gt=1)] = 3.0  # times the median of the model's other workers
    slow_tokens_min: int = Field(default=32, ge=1)  # tokens per window that a worker needs to be judged slow
    exposure_entries_max: int = Field(default=20_000, ge=1)  # per worker


class FrontendBudgets(Strict):
    """Limits of what one worker may send to a frontend, far above the output of any engine.

    A worker that exceeds a limit is disconnected and ejected.
    """

    frames_per_s: Positive = 20_000.0  # frames on one connection; an engine's step is one
    frames_burst: Positive = 100_000.0  # frames at once
    frame_mb_per_s: Positive = 64.0  # MiB of frames; 256 answers with 20 logprobs need 6
    frame_mb_burst: Positive = 512.0  # MiB of frames at once
    flood_pause_s: Positive = 30.0  # seconds until a worker that exceeded a limit is connected again
    kv_batches_per_s: Positive = 2_000.0  # KV event messages; an engine's step makes one
    kv_batches_burst: Positive = 20_000.0  # KV event messages at once
    kv_mb_per_s: Positive = 8.0  # MiB of KV events
    kv_mb_burst: Positive = 64.0  # MiB of KV events at once

    @property
    def frames(self) -> TrafficLimit:
        """The limits of frames."""
        return traffic(self.frames_per_s, self.frames_burst, self.frame_mb_per_s, self.frame_mb_burst)

    @property
    def kv_events(self) -> TrafficLimit:
        """The limits of KV events."""
        return traffic(self.kv_batches_per_s, self.kv_batches_burst, self.kv_mb_per_s, self.kv_mb_burst)


class FrontendSettings(Strict):
    """The settings of one frontend process.

    `migration_limit` defaults to 3, because a limit of 0, which forbids all migration, would surprise users.

    `on_corruption` is the policy for a stream that received tokens from a convicted worker. If none of these tokens has
    reached the client, `continue` and `restart` generate them again. If one has reached the client, `continue` keeps
    the accepted tokens, and `restart` ends the answer with an error. `error` always ends the answer with an error.
    """

    host: str = setting("127.0.0.1", "address that the API listens on")
    port: int = setting(
        8000, "port of the API, shared by the frontends of a host; 0: any free port", ge=0, le=65_535
    )
    api_key_file: str = setting(
        "",
        "file of the API keys for clients, `key` or `name:key` on each line; reloaded when it changes; "
        "empty: no key is required",
    )
    insecure: bool = setting(False, "allow addresses other than loopback without API keys")
    tls_cert: str = setting(
        "",
        "file of the certificate chain (PEM) for TLS on both ports; reloaded when it changes; empty: no TLS",
    )
    tls_key: str = setting("", "file of the certificate's private key (PEM), without a password")
    admin_host: str = setting("127.0.0.1", "address of the admin port: metrics, readiness, console")
    admin_port: int = setting(0, "admin port; 0: any free port", ge=0, le=65_535)
    admin_key_file: str = setting(
        "",
        "file of the keys with which other hosts may change settings on the admin port, in the format of "
        "--api-key-file; empty: only this host may change them",
    )
    admin_api: bool = setting(False, "serve /busy_threshold on the API port too")
    console: bool = setting(
        True, "serve the operators' console at /console on the admin port (docs/guides/console.md)"
    )
    console_actions: bool = setting(
        False, "allow the console to drain, resume, empty and restart workers; otherwise it is read-only"
    )
    cors_origins: tuple[str, ...] = setting(
        (), "origins of web pages that may use the API, such as https://app.example.com; *: all; empty: none"
    )
    model_aliases: dict[str, str] = setting(
        {}, "alias=model,...: additional names of a model in client requests"
    )
    tool_call_parsers: dict[str, str] = setting(
        {},
        "model=format,...: formats of tool calls, by vLLM's names (docs/reference/api.md), such as hermes; none: no tool "
        "calls; by default they are recognised",
    )
    reasoning_parsers: dict[str, str] = setting(
        {},
        "model=format,...: formats of reasoning, by vLLM's names, such as deepseek_r1; none: reasoning is part of the "
        "content; by default they are recognised",
    )
    migration_limit: int = setting(
        3, "maximum moves of a request to another worker; 0: never", ge=0, le=2**32 - 1
    )
    migration_max_seq_len: int | None = setting(None, "requests with more tokens than this do not move", ge=1)
    on_corruption: OnCorruption = setting(
        "continue",
        "policy for streams that received tokens from a convicted worker: continue, restart, error",
    )
    reroute_s: Positive = setting(10.0, "seconds that a stream without a worker waits for one")
    grace_s: Positive = setting(30.0, "seconds that streams may continue after SIGTERM")
    retry_after_s: int = setting(30, "seconds in the Retry-After of a rejected request", ge=1)
    admission_control: Literal["none", "token-capacity", "deadline"] = setting(
        "none",
        "refuse requests for load: token-capacity: while every worker exceeds a threshold; deadline: if the first "
        "token would be late; none: never",
    )
    ttft_deadlines: dict[str, Positive] = setting(
        {},
        "with deadline: tier=milliseconds,...: time to first token for requests that state none; otherwise the "
        "model's objective applies",
    )
    park: bool = setting(
        False,
        "with deadline: preempt running answers of the lowest tier when the highest tier would wait too long",
    )
    park_s: Positive = setting(30.0, "maximum total seconds that one answer is preempted")
    active_decode_blocks_threshold: Share | None = setting(
        0.85, "share of KV blocks in use above which a worker is busy; none: no limit"
    )
    active_prefill_tokens_threshold: Annotated[int, Field(ge=0)] | None = setting(
        10_000, "prompt tokens still to be prefilled above which a worker is busy; none: no limit"
    )
    active_prefill_tokens_threshold_frac: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = setting(
        None, "the same limit as a multiple of the tokens of one engine step; none: no limit"
    )
    overload_status_code: Literal[503, 429, 529] | None = setting(
        None,
        "HTTP status for rejected requests: 503, 429 or 529; none: 503, or 429 with --admission-control deadline",
    )
    request_plane: Literal["tcp", "nats"] = setting("tcp", "nats: also reach workers through the broker")
    static: str = setting("", "host:port,...: workers to use directly, without a broker")
    static_tokenizer: str = setting("builtin:sim", "tokenizer of the workers given by --static")
    model_folders: str = setting(
        "",
        "comma-separated folders from which, with their subfolders, workers' tokenizers and chat templates may be "
        "loaded; others are refused",
    )
    router: RouterSettings = Field(default=RouterSettings(), json_schema_extra={"flags": "--router-"})
    admission: AdmissionSettings = AdmissionSettings()
    connections: ConnectionSettings = ConnectionSettings()
    tokenizing: TokenizingSettings = TokenizingSettings()
    stream: StreamSettings = StreamSettings()
    responses: StoredResponseSettings = StoredResponseSettings()
    breaker: LocalBreakerSettings = LocalBreakerSettings()
    stall: StallSettings = Field(default=StallSettings(), json_schema_extra={"flags": "--stall-"})
    poison: PoisonSettings = PoisonSettings()
    facts: FactSettings = FactSettings()
    worker_budgets: FrontendBudgets = FrontendBudgets()
    moving: MovingPolicy = MovingPolicy()

    @property
    def by_deadline(self) -> bool:
        """Whether requests are admitted by their deadlines."""
        return self.admission_control == "deadline"

    @property
    def folders(self) -> list[str]:
        """The folders from which tokenizers and chat templates may be loaded."""
        return [folder.strip() for folder in self.model_folders.split(",") if folder.strip()]

    @property
    def overload_status(self) -> int:
        """The HTTP status of requests that are rejected for overload."""
        return self.overload_status_code or (429 if self.by_deadline else 503)

    @property
    def inflight_per_batch(self) -> float:
        """Largest number of requests in flight at a worker, over all frontends, as a multiple of its batch size.

        If requests are admitted by their deadlines, the multiple is 1, so that no request waits at a worker.
        """
        return self.admission.inflight_per_batch or (1.0 if self.by_deadline else INFLIGHT_PER_BATCH)

    @property
    def thresholds(self) -> BusyThresholds:
        """The thresholds above which a worker counts as busy. They apply if `admission_control` is token-capacity."""
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
    def _number_or_none(cls, value: object) -> object:
        """Parse a number. `None` (as Dynamo writes it) and an empty text become None."""
        if not isinstance(value, str):
            return value
        if value.strip().lower() in ("", "none"):
            return None
        return int(value) if value.isascii() and value.isdigit() else value

    @field_validator("cors_origins")
    @classmethod
    def _origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        """Reject values that no browser sends as an Origin, because they would never match."""
        for origin in origins:
            if not _ORIGIN.fullmatch(origin):
                raise ValueError(f"{origin!r} is not an origin, such as https://app.example.com, or *")
        return origins

    @field_validator(
        "ttft_deadlines", "tool_call_parsers", "reasoning_parsers", "model_aliases", mode="before"
    )
    @classmethod
    def _pairs(cls, value: object, info: ValidationInfo) -> object:
        """Parse text like `premium=500,standard=2000` or `gpt-4o=llama-70b` to a mapping."""
        if not isinstance(value, str):
            return value
        pairs = [part.partition("=") for part in value.split(",") if part.strip()]
        if not all(name.strip() and equals and one.strip() for name, equals, one in pairs):
            raise ValueError(_PAIRS_WANTED[info.field_name or ""])
        return {name.strip(): one.strip() for name, _, one in pairs}

    @model_validator(mode="after")
    def _check_combinations(self) -> "FrontendSettings":
        if self.static and self.request_plane == "nats":
            raise ValueError("static workers are reached without a broker: request_plane must be tcp")
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ValueError("--tls-cert and --tls-key (tls_cert, tls_key) are needed together")
        if self.console_actions and not self.console:
            raise ValueError("console_actions needs the console: console must not be false")
        for flag in ("park", "ttft_deadlines"):
            if getattr(self, flag) and not self.by_deadline:
                named = f"--{flag.replace('_', '-')} ({flag})"
                raise ValueError(f"{named} needs --admission-control deadline (admission_control)")
        return self

    @field_validator("moving", mode="before")
    @classmethod
    def _merge_defaults(cls, value: object) -> object:
        """Merge the given settings into the defaults, so that a single nested value can be set alone."""
        return laid_over(asdict(MovingPolicy()), value) if isinstance(value, Mapping) else value


def laid_over(below: Mapping[str, object], above: Mapping[str, object]) -> dict[str, object]:
    """Return `below` with the values of `above`, merged at every depth."""
    found = {**below, **above}
    for name, value in above.items():
        if isinstance(value, Mapping) and isinstance(before := below.get(name), Mapping):
            found[name] = laid_over(before, value)
    return found
