"""The settings of a worker process, from flags or the environment; `settings_check` loads them.

Parsed with msgspec, which the request plane needs anyway: pydantic would use a third of a simulated worker's memory.
"""

from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from msgspec import Meta

from events.broker_users import names
from workers.config.simulated_settings import MOST, SimulatedSettings

Count = Annotated[int, Meta(ge=1, le=MOST)]


class WorkerSettings(SimulatedSettings, frozen=True, kw_only=True):
    """The settings of one worker process. None means the engine's own default."""

    engine: Annotated[
        Literal["simulated", "transformers", "openai"], Meta(description="what runs the model")
    ] = "simulated"
    name: Annotated[str, Meta(min_length=1, max_length=64, description="the worker's stable name")] = "w0"
    name_check_s: Annotated[
        float,
        Meta(
            ge=0,
            le=60,
            description="seconds to listen for another live worker of this name before starting; if there is one, exit; 0: off",
        ),
    ] = 1.5  # a worker sends a heartbeat once a second
    instance: Annotated[
        str, Meta(max_length=64, description="the id of this life of the worker; empty: a new one")
    ] = ""
    model: Annotated[
        str,
        Meta(
            description="simulated: a model name; transformers: the model's directory; openai: the tokenizer's directory"
        ),
    ] = ""
    upstream: Annotated[
        str, Meta(description="openai: URL of the server, for example http://127.0.0.1:8000")
    ] = ""
    upstream_key: Annotated[str, Meta(description="openai: API key of the upstream, if it needs one")] = ""
    upstream_key_file: Annotated[
        str,
        Meta(
            description="openai: file with the upstream's API key; read again while the worker waits for the upstream"
        ),
    ] = ""
    upstream_identity_s: Annotated[
        float,
        Meta(
            gt=0,
            le=86_400,
            description="openai: seconds between reads of the upstream's identity; a change starts a new life of the worker",
        ),
    ] = 10.0
    upstream_retry_after_max_s: Annotated[
        float,
        Meta(
            ge=0,
            le=86_400,
            description="openai: maximum seconds for which a 429 or 503 with Retry-After stops new requests; 0: never",
        ),
    ] = 60.0
    ready_timeout: Annotated[
        float,
        Meta(
            gt=0,
            le=86_400,
            description="openai, transformers: seconds for the server to answer, or for the model to load",
        ),
    ] = 1800.0
    upstream_silent_s: Annotated[
        float,
        Meta(
            gt=0,
            le=86_400,
            description="openai: seconds without a token and without an answer to /health until the upstream counts as dead",
        ),
    ] = 30.0
    upstream_kv_events: Annotated[
        str,
        Meta(
            description="openai: endpoints where it publishes KV events (tcp://host:5557), one per DP rank, comma-separated"
        ),
    ] = ""
    upstream_kv_replay: Annotated[
        str,
        Meta(
            description="openai: endpoints where it replays lost KV events (its replay_endpoint), one per DP rank"
        ),
    ] = ""
    count: Annotated[
        int, Meta(ge=1, le=1000, description="simulated: number of workers in this process (w0, w1 ...)")
    ] = 1
    stagger_delay: Annotated[
        float,
        Meta(ge=0, le=60, description="simulated: seconds between the starts of two workers of this process"),
    ] = 0.0
    host: Annotated[str, Meta(description="address to listen on")] = "127.0.0.1"
    advertise: Annotated[
        str, Meta(description="address announced to frontends; empty: the one listened on")
    ] = ""
    nvlink_domain: Annotated[
        str,
        Meta(
            max_length=64,
            description="name of the NVLink domain of the worker's GPUs, on one host or several",
        ),
    ] = ""
    rail: Annotated[
        str,
        Meta(max_length=64, description="name of the network rail of the GPUs' adapters; empty: none"),
    ] = ""
    kv_transport: Annotated[
        Literal["sockets", "nixl"],
        Meta(
            description="how KV caches reach other hosts; nixl: over RDMA or NVLink if both ends have it (extra [nixl])"
        ),
    ] = "sockets"
    port: Annotated[int, Meta(ge=0, le=65535, description="port of the request plane; 0: any free one")] = 0
    request_plane: Annotated[
        Literal["tcp", "nats"],
        Meta(description="how frontends reach this worker: tcp (on its port) or nats (through the broker)"),
    ] = "tcp"
    connections_max: Annotated[
        int,
        Meta(
            ge=0, le=MOST, description="maximum number of frontend connections to this worker; 0: unlimited"
        ),
    ] = 512
    connections_per_address_max: Annotated[
        int,
        Meta(
            ge=0, le=MOST, description="maximum number of frontend connections from one address; 0: unlimited"
        ),
    ] = 256
    admin_port: Annotated[
        int,
        Meta(ge=-1, le=65535, description="port of /health, /live and /metrics; 0: any free one, -1: none"),
    ] = 0
    data: Annotated[Path, Meta(description="data directory of the fleet")] = Path(".holdfast")
    nats_url: Annotated[
        str,
        Meta(
            description="URL of the broker; empty: the broker of the fleet in --data, or serve without a fleet"
        ),
    ] = ""
    fleet_key_file: Annotated[
        str,
        Meta(
            description="file with the fleet key, which frontends must have too; empty: the one in --data, or none"
        ),
    ] = ""
    grace_s: Annotated[
        float, Meta(ge=0, le=86_400, description="seconds for streams to finish after SIGTERM")
    ] = 60.0
    orchestrator_grace_s: Annotated[
        Annotated[float, Meta(ge=0, le=86_400)] | None,
        Meta(
            description="seconds from the orchestrator's stop request to its SIGKILL; grace_s is reduced to fit"
        ),
    ] = None
    pre_stop: Annotated[
        float,
        Meta(
            ge=0,
            le=86_400,
            description="seconds of orchestrator_grace_s that a preStop hook takes before SIGTERM",
        ),
    ] = 0.0
    second_signal: Annotated[
        Literal["ignore", "hurry"],
        Meta(description="effect of a second SIGTERM; hurry: end the grace period"),
    ] = "ignore"
    graceful_shutdown: Annotated[
        bool,
        Meta(description="also wait for decoding streams at shutdown; no: they continue elsewhere at once"),
    ] = True
    kv_events: Annotated[
        bool, Meta(description="publish stored and removed KV blocks to frontends, through the broker")
    ] = True
    migration_limit: Annotated[
        Annotated[int, Meta(ge=0)] | None, Meta(description="how often a request of this model may migrate")
    ] = None
    spare: Annotated[
        bool, Meta(description="start as a spare: serve no requests until a worker of the same kind is lost")
    ] = False
    chaos: Annotated[bool, Meta(description="accept rehearsed faults from the controller")] = True
    die_with_parent: Annotated[bool, Meta(description="end when the parent process ends")] = False
    itl_ms: Annotated[
        float, Meta(ge=0, le=60_000, description="simulated: milliseconds per step; 0: as fast as possible")
    ] = 0.0
    prefill_tokens_per_s: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="simulated: prefill speed in prompt tokens per second"),
    ] = None
    context_tokens: Annotated[
        Annotated[int, Meta(ge=16)] | None, Meta(description="maximum sequence length in tokens")
    ] = None
    kv_blocks: Annotated[Count | None, Meta(description="simulated: KV cache size in blocks")] = None
    block_tokens: Annotated[Count | None, Meta(description="tokens per KV block")] = None
    kv_block_bytes: Annotated[
        Count | None, Meta(description="simulated: bytes that a move transfers per KV block and rank")
    ] = None
    tp: Annotated[
        Annotated[int, Meta(ge=1, le=64)] | None,
        Meta(description="simulated: number of ranks that compute each step together"),
    ] = None
    batch_max: Annotated[Count | None, Meta(description="maximum number of running sequences")] = None
    waiting_max: Annotated[
        Annotated[int, Meta(ge=0)] | None, Meta(description="maximum number of waiting sequences")
    ] = None
    engine_request_limit: Annotated[
        Count | None, Meta(description="maximum number of requests inside the engine; none: unlimited")
    ] = None
    request_queue_limit: Annotated[
        int,
        Meta(
            ge=2,
            le=MOST,
            description="with --engine-request-limit: maximum number of waiting requests; further ones are refused",
        ),
    ] = 16
    adaptive_batch: Annotated[
        bool,
        Meta(description="run fewer requests at once while steps take longer than the profile predicts"),
    ] = False
    prefill_tokens_max: Annotated[Count | None, Meta(description="maximum number of tokens per step")] = None
    device: Annotated[str | None, Meta(description="transformers: device: cpu, cuda or cuda:N")] = None
    gpus: Annotated[
        str,
        Meta(
            description="GPUs to watch for faults, by index or UUID (0,1); empty: with transformers, those it uses"
        ),
    ] = ""
    watch_only: Annotated[
        bool,
        Meta(
            description="serve no requests; watch the GPUs of the server behind the worker of this name, on their host"
        ),
    ] = False
    engine_pid: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="watch_only: watch the GPUs used by this process and its descendants"),
    ] = None
    dtype: Annotated[
        str | None, Meta(description="transformers: data type: float32, bfloat16 or float16")
    ] = None
    threads: Annotated[Count | None, Meta(description="transformers: CPU threads per step")] = None
    revision: Annotated[str, Meta(description="openai: revision of the weights, if known")] = ""

    def __repr__(self) -> str:
        return f"WorkerSettings(name={self.name!r}, ...)"  # some settings are secrets

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the workers in this process: w3 with a count of 2 gives w3 and w4."""
        return names(self.name, self.count)


@cache
def annotations() -> dict[str, Any]:
    """Return every setting's name and annotated type, in order."""
    return get_type_hints(WorkerSettings, include_extras=True)


def given(settings: WorkerSettings, *names: str) -> dict[str, Any]:
    """Return the named settings that are set (not None)."""
    return {name: value for name in names if (value := getattr(settings, name)) is not None}
