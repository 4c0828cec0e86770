"""The settings of a worker process, which `settings_check` loads from flags and the environment.

The settings are parsed with msgspec, which the request plane needs anyway. Pydantic would use a third of a simulated worker's
memory.
"""

import inspect
import re
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from msgspec import Meta

from events.broker_users import names
from events.fleet_key import FleetKey
from workers.config.simulated_settings import MOST, Count, CountOrZero, SimulatedSettings

DAY_S = 86_400
Seconds = Annotated[float, Meta(ge=0, le=DAY_S)]
PositiveSeconds = Annotated[float, Meta(gt=0, le=DAY_S)]
Label = Annotated[str, Meta(max_length=64)]


class WorkerSettings(SimulatedSettings, frozen=True, kw_only=True):
    """The settings of one worker process, by group. None means the engine's own default.

    Fleet
        name: the worker's stable name
        name_check_s: seconds to listen for another live worker of this name before starting; if there is one, exit; 0: off
        instance: the id of this life of the worker; empty: a new one
        count: simulated: number of workers in this process (w0, w1 ...)
        stagger_delay: simulated: seconds between the starts of two workers of this process
        data: data directory of the fleet
        nats_url: URL of the broker; empty: the broker of the fleet in --data, or serve without a fleet
        fleet_key_file: file with the fleet key, which frontends must have too; empty: the one in --data, or none
        spare: start as a spare: serve no requests until a worker of the same kind is lost
        migration_limit: how often a request of this model may migrate
        die_with_parent: end when the parent process ends
    Engine
        engine: what runs the model
        model: simulated: a model name; transformers: the model's directory; openai: the tokenizer's directory
        revision: openai: revision of the weights, if known
        ready_timeout: openai, transformers: seconds for the server to answer, or for the model to load
        tp: simulated: number of ranks that compute each step together
        device: transformers: device: cpu, cuda or cuda:N
        dtype: transformers: data type: float32, bfloat16 or float16
        threads: transformers: CPU threads per step
    Upstream
        upstream: openai: URL of the server, for example http://127.0.0.1:8000
        upstreams: openai: YAML file that lists servers, with one worker for each in this process; edits take effect at once
        upstream_key: openai: API key of the upstream, if it needs one
        upstream_key_file: openai: file with the upstream's API key; read again while the worker waits for the upstream
        upstream_identity_s: openai: seconds between reads of the upstream's identity; a change starts a new life of the worker
        upstream_retry_after_max_s: openai: maximum seconds for which a 429 or 503 with Retry-After stops new requests; 0: never
        upstream_silent_s: openai: seconds without a token and without an answer to /health until the upstream counts as dead
        upstream_kv_events: openai: endpoints where it publishes KV events (tcp://host:5557), one per DP rank, comma-separated
        upstream_kv_replay: openai: endpoints where it replays lost KV events (its replay_endpoint), one per DP rank
    Batch and limits
        context_tokens: maximum sequence length in tokens
        batch_max: maximum number of running sequences
        waiting_max: maximum number of waiting sequences
        prefill_tokens_max: maximum number of tokens per step
        engine_request_limit: maximum number of requests inside the engine; none: unlimited
        request_queue_limit: with --engine-request-limit: maximum number of waiting requests; further ones are refused
        adaptive_batch: run fewer requests at once while steps take longer than the profile predicts
    KV cache and transfer
        kv_events: publish stored and removed KV blocks to frontends, through the broker
        kv_transport: how KV caches reach other hosts; nixl: over RDMA or NVLink if both ends have it (extra [nixl])
        kv_blocks: simulated: KV cache size in blocks
        kv_block_bytes: simulated: bytes that a move transfers per KV block and rank
        block_tokens: tokens per KV block
        nvlink_domain: name of the NVLink domain of the worker's GPUs, on one host or several
        rail: name of the network rail of the GPUs' adapters; empty: none
    Request plane
        host: address to listen on
        advertise: address announced to frontends; empty: the one listened on
        port: port of the request plane; 0: any free one
        request_plane: how frontends reach this worker: tcp (on its port) or nats (through the broker)
        connections_max: maximum number of frontend connections to this worker; 0: unlimited
        connections_per_address_max: maximum number of frontend connections from one address; 0: unlimited
    GPUs
        gpus: GPUs to watch for faults, by index or UUID (0,1); empty: with transformers, those it uses
        watch_only: serve no requests; watch the GPUs of the server behind the worker of this name, on their host
        engine_pid: watch_only: watch the GPUs used by this process and its descendants
    Simulated engine
        itl_ms: simulated: milliseconds per step; 0: as fast as possible
        prefill_tokens_per_s: simulated: prefill speed in prompt tokens per second
    Shutdown
        grace_s: seconds for streams to finish after SIGTERM
        orchestrator_grace_s: seconds from the orchestrator's stop request to its SIGKILL; grace_s is reduced to fit
        pre_stop: seconds of orchestrator_grace_s that a preStop hook takes before SIGTERM
        second_signal: effect of a second SIGTERM; hurry: end the grace period
        graceful_shutdown: also wait for decoding streams at shutdown; no: they continue elsewhere at once
    Observability
        admin_port: port of /health, /live and /metrics; 0: any free one, -1: none
    Rehearsal (fault injection)
        chaos: accept rehearsed faults from the controller
    """

    # Fleet
    name: Annotated[str, Meta(min_length=1, max_length=64)] = "w0"
    name_check_s: Annotated[float, Meta(ge=0, le=60)] = 1.5  # a worker sends a heartbeat once a second
    instance: Label = ""
    count: Annotated[int, Meta(ge=1, le=1000)] = 1
    stagger_delay: Annotated[float, Meta(ge=0, le=60)] = 0.0
    data: Path = Path(".holdfast")
    nats_url: str = ""
    fleet_key_file: str = ""
    spare: bool = False
    migration_limit: Annotated[int, Meta(ge=0)] | None = None
    die_with_parent: bool = False
    # Engine
    engine: Literal["simulated", "transformers", "openai"] = "simulated"
    model: str = ""
    revision: str = ""
    ready_timeout: PositiveSeconds = 1800.0
    tp: Annotated[int, Meta(ge=1, le=64)] | None = None
    device: str | None = None
    dtype: str | None = None
    threads: Count | None = None
    # Upstream
    upstream: str = ""
    upstreams: Path | None = None
    upstream_key: str = ""
    upstream_key_file: str = ""
    upstream_identity_s: PositiveSeconds = 10.0
    upstream_retry_after_max_s: Seconds = 60.0
    upstream_silent_s: PositiveSeconds = 30.0
    upstream_kv_events: str = ""
    upstream_kv_replay: str = ""
    # Batch and limits
    context_tokens: Annotated[int, Meta(ge=16)] | None = None
    batch_max: Count | None = None
    waiting_max: Annotated[int, Meta(ge=0)] | None = None
    prefill_tokens_max: Count | None = None
    engine_request_limit: Count | None = None
    request_queue_limit: Annotated[int, Meta(ge=2, le=MOST)] = 16
    adaptive_batch: bool = False
    # KV cache and transfer
    kv_events: bool = True
    kv_transport: Literal["sockets", "nixl"] = "sockets"
    kv_blocks: Count | None = None
    kv_block_bytes: Count | None = None
    block_tokens: Count | None = None
    nvlink_domain: Label = ""
    rail: Label = ""
    # Request plane
    host: str = "127.0.0.1"
    advertise: str = ""
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    request_plane: Literal["tcp", "nats"] = "tcp"
    connections_max: CountOrZero = 512
    connections_per_address_max: CountOrZero = 256
    # GPUs
    gpus: str = ""
    watch_only: bool = False
    engine_pid: Annotated[int, Meta(ge=1)] | None = None
    # Simulated engine
    itl_ms: Annotated[float, Meta(ge=0, le=60_000)] = 0.0
    prefill_tokens_per_s: Annotated[float, Meta(gt=0)] | None = None
    # Shutdown
    grace_s: Seconds = 60.0
    orchestrator_grace_s: Seconds | None = None
    pre_stop: Seconds = 0.0
    second_signal: Literal["ignore", "hurry"] = "ignore"
    graceful_shutdown: bool = True
    # Observability
    admin_port: Annotated[int, Meta(ge=-1, le=65535)] = 0
    # Rehearsal (fault injection)
    chaos: bool = True

    def __repr__(self) -> str:
        return f"{type(self).__name__}(name={self.name!r}, ...)"  # some settings are secrets

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the workers in this process. For example, name w3 with a count of 2 gives w3 and w4."""
        return names(self.name, self.count)


@cache
def annotations() -> dict[str, Any]:
    """Return the type of every setting, with its bounds, by the setting's name."""
    return get_type_hints(WorkerSettings, include_extras=True)


@cache
def groups() -> dict[str, dict[str, str]]:
    """Return every setting's description by group and name, parsed from the docstrings of the settings' classes."""
    found: dict[str, dict[str, str]] = {}
    for kind in (WorkerSettings, SimulatedSettings):
        for group in re.split(r"\n(?=\S)", inspect.getdoc(kind) or "")[1:]:
            title, *settings = re.split(r"\n {4}(?=\S)", group.rstrip())
            for setting in settings:
                name, _, text = setting.partition(": ")
                found.setdefault(title, {})[name] = " ".join(text.split())
    return found


def non_null(settings: WorkerSettings, *names: str) -> dict[str, Any]:
    """Return the values of the settings `names`, without those that are None."""
    return {name: value for name in names if (value := getattr(settings, name)) is not None}


class WorkerConfig(WorkerSettings, frozen=True, kw_only=True):
    """The configuration of one worker of a process: the process's settings, and fields that the process adds.

    `name`, `instance` and `port` are those of this worker alone. `grace_s` is reduced to what an orchestrator allows.
    """

    name_check_s: float = 0.0  # only the first instance of a worker listens for another worker of its name
    account: str = ""  # broker account of this process; empty: the broker has no accounts
    # whether other workers run in this process, which must survive this worker's end
    shares_process: bool = False
    # the fleet key; clients that do not know it are refused. None: all are accepted
    key: FleetKey | None = None
    # whether the engine computes in this process, so that the worker ends if its GPU fails
    computes_on_gpus: bool = True
