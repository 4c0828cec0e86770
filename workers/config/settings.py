"""What a worker can be told, by flags or in the environment: `settings_check` loads it.

Read with msgspec, which the request plane needs anyway: pydantic would take a third of a simulated worker's memory.
"""

from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from msgspec import Meta

from events.broker_users import names
from workers.config.simulated_settings import MOST, SimulatedSettings

Count = Annotated[int, Meta(ge=1, le=MOST)]


class WorkerSettings(SimulatedSettings, frozen=True, kw_only=True):
    """One worker process. What is None takes the engine's own default."""

    engine: Annotated[
        Literal["simulated", "transformers", "openai"], Meta(description="what runs the model")
    ] = "simulated"
    name: Annotated[str, Meta(min_length=1, max_length=64, description="the worker's stable name")] = "w0"
    name_check_s: Annotated[
        float,
        Meta(
            ge=0,
            le=60,
            description="seconds to listen for another live worker of this name, and not start if there is one; 0: off",
        ),
    ] = 1.5  # a worker beats once a second
    instance: Annotated[str, Meta(max_length=64, description="this life of it; empty: a fresh one")] = ""
    model: Annotated[
        str,
        Meta(
            description="simulated: a model name; transformers: the model's folder; openai: the tokenizer's folder"
        ),
    ] = ""
    upstream: Annotated[
        str, Meta(description="openai: the server's URL, for example http://127.0.0.1:8000")
    ] = ""
    upstream_key: Annotated[str, Meta(description="openai: the API key of the upstream, if it wants one")] = (
        ""
    )
    upstream_key_file: Annotated[
        str,
        Meta(description="openai: the file with that key; it is read again while the upstream is waited for"),
    ] = ""
    upstream_identity_s: Annotated[
        float,
        Meta(
            gt=0,
            le=86_400,
            description="openai: seconds between reads of the upstream's identity; a change begins a new life of the worker",
        ),
    ] = 10.0
    upstream_retry_after_max_s: Annotated[
        float,
        Meta(
            ge=0,
            le=86_400,
            description="openai: longest seconds for which a 429 or 503 with Retry-After closes the worker; 0: never",
        ),
    ] = 60.0
    ready_timeout: Annotated[
        float,
        Meta(
            gt=0,
            le=86_400,
            description="openai, transformers: seconds until its server must answer, or its model be loaded",
        ),
    ] = 1800.0
    upstream_silent_s: Annotated[
        float,
        Meta(
            gt=0,
            le=86_400,
            description="openai: seconds without a token and without an answer to /health after which the upstream is dead",
        ),
    ] = 30.0
    upstream_kv_events: Annotated[
        str,
        Meta(
            description="openai: where it publishes KV events (tcp://host:5557); of several DP ranks all, with commas"
        ),
    ] = ""
    upstream_kv_replay: Annotated[
        str, Meta(description="openai: where it replays those that were lost (its replay_endpoint), as many")
    ] = ""
    count: Annotated[
        int, Meta(ge=1, le=1000, description="simulated: so many workers in this process (w0, w1 ...)")
    ] = 1
    stagger_delay: Annotated[
        float,
        Meta(ge=0, le=60, description="simulated: seconds between the starts of the workers of one process"),
    ] = 0.0
    host: Annotated[str, Meta(description="the address to listen on")] = "127.0.0.1"
    advertise: Annotated[
        str, Meta(description="the address that frontends are told; empty: the one listened on")
    ] = ""
    nvlink_domain: Annotated[
        str,
        Meta(max_length=64, description="the NVLink domain of its GPUs, by any name; on one host or several"),
    ] = ""
    rail: Annotated[
        str,
        Meta(max_length=64, description="the network rail of its GPUs' adapters, by any name; empty: none"),
    ] = ""
    kv_transport: Annotated[
        Literal["sockets", "nixl"],
        Meta(
            description="how KV caches reach other hosts; nixl: over RDMA or NVLink where both ends have it (the extra [nixl])"
        ),
    ] = "sockets"
    port: Annotated[int, Meta(ge=0, le=65535, description="the request plane's port; 0: any free one")] = 0
    request_plane: Annotated[
        Literal["tcp", "nats"],
        Meta(description="how frontends reach this worker: tcp (its port), or nats (through the broker)"),
    ] = "tcp"
    connections_max: Annotated[
        int, Meta(ge=0, le=MOST, description="connections of frontends to this worker; 0: any number")
    ] = 512
    connections_per_address_max: Annotated[
        int, Meta(ge=0, le=MOST, description="of those, how many one address may have; 0: any number")
    ] = 256
    admin_port: Annotated[
        int, Meta(ge=-1, le=65535, description="/health, /live, /metrics; 0: any free one, -1: none")
    ] = 0
    data: Annotated[Path, Meta(description="the fleet's data directory")] = Path(".holdfast")
    nats_url: Annotated[
        str, Meta(description="the broker; empty: that of the fleet in --data, or serve without a fleet")
    ] = ""
    fleet_key_file: Annotated[
        str,
        Meta(
            description="a file with the fleet's key, which frontends must know too; empty: that of --data, or none"
        ),
    ] = ""
    grace_s: Annotated[
        float, Meta(ge=0, le=86_400, description="seconds that streams may finish in after SIGTERM")
    ] = 60.0
    orchestrator_grace_s: Annotated[
        Annotated[float, Meta(ge=0, le=86_400)] | None,
        Meta(
            description="seconds from the orchestrator's wish to its SIGKILL; grace_s is cut to fit into it"
        ),
    ] = None
    pre_stop: Annotated[
        float, Meta(ge=0, le=86_400, description="seconds of it that pass in a preStop hook, before SIGTERM")
    ] = 0.0
    second_signal: Annotated[
        Literal["ignore", "hurry"], Meta(description="what another SIGTERM does; hurry: it ends the grace")
    ] = "ignore"
    graceful_shutdown: Annotated[
        bool, Meta(description="wait for streams that decode, too; no: they go on elsewhere at once")
    ] = True
    kv_events: Annotated[
        bool, Meta(description="tell frontends which KV blocks it stores and removes, over the broker")
    ] = True
    migration_limit: Annotated[
        Annotated[int, Meta(ge=0)] | None, Meta(description="how often a request of this model may move")
    ] = None
    spare: Annotated[
        bool, Meta(description="begin as a spare: serve nobody until a worker of the same kind is lost")
    ] = False
    chaos: Annotated[bool, Meta(description="obey the rehearsed faults that the controller passes on")] = True
    die_with_parent: Annotated[bool, Meta(description="end when the process that started this one ends")] = (
        False
    )
    itl_ms: Annotated[
        float, Meta(ge=0, le=60_000, description="simulated: milliseconds per step; 0: flat out")
    ] = 0.0
    prefill_tokens_per_s: Annotated[
        Annotated[float, Meta(gt=0)] | None, Meta(description="simulated: prompt tokens per second")
    ] = None
    context_tokens: Annotated[
        Annotated[int, Meta(ge=16)] | None, Meta(description="the longest sequence")
    ] = None
    kv_blocks: Annotated[Count | None, Meta(description="simulated: blocks of the KV cache")] = None
    block_tokens: Annotated[Count | None, Meta(description="tokens per KV block")] = None
    kv_block_bytes: Annotated[
        Count | None, Meta(description="simulated: bytes of a KV block that a move carries, of each rank")
    ] = None
    tp: Annotated[
        Annotated[int, Meta(ge=1, le=64)] | None,
        Meta(description="simulated: ranks that compute each step of this worker together"),
    ] = None
    batch_max: Annotated[Count | None, Meta(description="sequences that run at once")] = None
    waiting_max: Annotated[
        Annotated[int, Meta(ge=0)] | None, Meta(description="sequences that wait at most")
    ] = None
    engine_request_limit: Annotated[
        Count | None, Meta(description="requests inside the engine at once; none: as many as it takes")
    ] = None
    request_queue_limit: Annotated[
        int,
        Meta(
            ge=2,
            le=MOST,
            description="with --engine-request-limit: so many more wait, and what comes then is refused",
        ),
    ] = 16
    adaptive_batch: Annotated[
        bool,
        Meta(
            description="run fewer requests at once while steps take longer than the profile says they should"
        ),
    ] = False
    prefill_tokens_max: Annotated[Count | None, Meta(description="tokens per step")] = None
    device: Annotated[str | None, Meta(description="transformers: cpu, cuda or cuda:N")] = None
    gpus: Annotated[
        str,
        Meta(
            description="GPUs to watch for faults: indices or UUIDs (0,1); empty: transformers: those that it uses"
        ),
    ] = ""
    watch_only: Annotated[
        bool,
        Meta(
            description="serve nothing: watch the GPUs of the server behind the worker of this name, on the server's host"
        ),
    ] = False
    engine_pid: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="watch_only: watch the GPUs on which this process, and all below it, compute"),
    ] = None
    dtype: Annotated[str | None, Meta(description="transformers: float32, bfloat16 or float16")] = None
    threads: Annotated[Count | None, Meta(description="transformers: CPU threads of one step")] = None
    revision: Annotated[str, Meta(description="openai: the revision of the weights, where you know it")] = ""

    def __repr__(self) -> str:
        return f"WorkerSettings(name={self.name!r}, ...)"  # one of them is a secret

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the workers in this process: w3 and a count of 2 are w3 and w4."""
        return names(self.name, self.count)


@cache
def annotations() -> dict[str, Any]:
    """Return every setting's name and annotated type, in order."""
    return get_type_hints(WorkerSettings, include_extras=True)


def given(settings: WorkerSettings, *names: str) -> dict[str, Any]:
    """Return those of the named settings that were given."""
    return {name: value for name in names if (value := getattr(settings, name)) is not None}
