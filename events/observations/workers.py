"""Observations of workers: registration, lifecycle, faults, and operators' commands."""

from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar, Literal

from events.fact import Observation


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The performance that a worker registered, from which the capacity model computes.

    `tpot_ms` is a curve of points (running sequences, milliseconds per output token), in ascending order. The curve is linear
    between its points. Beyond the last point it is proportional to the number of sequences.
    """

    kv_blocks: int
    block_tokens: int
    max_batch: int
    prefill_tokens_per_s: float
    tpot_ms: tuple[tuple[int, float], ...]
    prefill_tokens_max: int | None = None  # prompt tokens per engine step; None: not reported


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The host, NVLink domain, network rail and GPUs of a worker."""

    host: str = ""  # name of the worker's host
    nvlink_domain: str = ""  # workers of the same domain are joined by NVLink; empty: not known
    rail: str = ""  # the network rail of the host's adapters; empty: not known
    gpus: tuple[str, ...] = ()  # UUIDs; a simulated rank has SIM-worker-rank


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """The shape of one token's KV cache over all shards. It determines the size of the cache. A block has `Profile.block_tokens`
    tokens."""

    layers: int
    kv_heads: int  # number of KV heads over all shards
    head_size: int  # number of elements of one head
    element_bytes: int  # bytes of one element: 2 for fp16 and bf16, 1 for fp8


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerObservation(Observation):
    """The base of every fact about one instance of one worker."""

    worker: str  # the worker's stable name
    instance: str  # id of one instance of the worker, from its start to its end


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerJoined(WorkerObservation):
    """A worker is up and reachable at `url`, which is tcp://host:port, or nats:SUBJECT if the request plane uses the broker."""

    url: str
    model: str
    revision: str
    tokenizer: str  # a folder, or "builtin:sim"
    engine: str  # simulated, transformers, openai
    engine_version: str
    dtype: str
    tp: int  # TP ranks of this worker's group; 1: a single process
    device: str
    profile: Profile
    canary_key: str  # the key of the worker's goldens: see `canary_key`
    pid: int
    topology: Topology = Topology()  # location of its devices, which determines the link of a KV transfer
    migration_limit: int | None = None  # None: this worker sets no limit
    context_tokens: int = 4096
    exact: bool = True  # False: continuations on this engine may differ from an undisturbed answer
    kv: KvLayout | None = None  # None: requests cannot move from or to this worker with their KV cache
    dp: int = 1  # number of DP ranks, numbered 0 to dp - 1; each has its own KV cache and queue
    kv_events: bool = False  # whether it publishes the KV blocks that it stores and removes, and answers requests about them
    waiting_max: int | None = None  # number of requests that it queues beyond `max_batch`; None: not reported
    # whether it starts as a spare, which gets no traffic until it replaces a failed worker
    spare: bool = False
    root: str = ""  # the weights' repository or folder, as the server behind it reports; empty: not reported
    generation_config: str = ""  # digest of the model's sampling defaults; empty: not known
    server: str = ""  # host and port of the server behind this worker; empty: it runs the engine itself
    account: str = ""  # broker account of the worker's process; empty: not stated
    also_served: tuple[str, ...] = ()  # other names under which its server serves the same weights
    # weights and computation that the engine reports, part of the canary key; empty: not reported
    lineage: str = ""
    # HTTP paths of the server behind this worker to which clients' requests can be passed on
    paths: tuple[str, ...] = ()
    adapters: tuple[
        str, ...
    ] = ()  # names of the LoRA adapters that it has now; `AdaptersChanged` replaces them


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptersChanged(WorkerObservation):
    """A worker's server loaded or unloaded LoRA adapters. The list is complete, so only the last fact of an instance counts."""

    adapters: tuple[str, ...]  # names of the LoRA adapters that the worker has now


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerAwaited(WorkerObservation):
    """A worker's process is running but cannot join yet, because it waits for its server or loads its model.

    The event is repeated when the reason changes, and every two minutes. If it is not repeated, the worker is no longer
    awaited.
    """

    reason: str  # readable text, such as: cannot connect to http://…
    model: str = ""  # the model that the worker will serve; empty: not known yet
    name_taken_by: str = ""  # instance of the live worker of the same name that keeps it from starting


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLeft(WorkerObservation):
    """A worker's process ended. `mode` says whether it ended in order, was killed, or stopped because it could not continue."""

    mode: Literal["graceful", "immediate", "self_initiated"]
    exit: int | None = None  # exit status, as in a shell: 128 + n for signal n (-n in older facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSilent(WorkerObservation):
    """A worker sent no heartbeat for `silent_s` seconds, during which the observer was always connected."""

    silent_s: float
    observer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerHeard(WorkerObservation):
    """A worker that had been reported silent sent a heartbeat again."""

    observer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLingered(WorkerObservation):
    """An instance that the fleet has declared dead still has a running process, so no new instance of the worker can start.

    The worker's supervisor, or an operator, has to end the process.
    """

    pid: int  # id of the process on its host
    host: str = ""  # name of the process's host
    # beat: the instance sends heartbeats; process: its process exists; port: its port is open
    evidence: str = ""
    dead_s: float = 0.0  # seconds for which this has been observed
    observer: str = ""  # the process that observed the worker


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserverBlind(Observation):
    """More than half of the fleet fell silent at once. The observer suspects a fault of its own connection, and reports no
    worker as silent."""

    entity: ClassVar[str] = "fleet"
    observer: str
    silent: int  # number of silent workers
    known: int  # number of workers from which the observer expects heartbeats


@dataclass(frozen=True, slots=True, kw_only=True)
class IntrusionRefused(Observation):
    """An attempt at an operation without permission was refused and not carried out."""

    entity: ClassVar[str] = "fleet"
    who: str  # a broker account, or "a stranger"
    tried: str  # the first operation that was refused
    times: int  # number of refusals since the last report
    worker: str = ""  # the worker that attempted the operation; empty: not known
    instance: str = ""  # the worker's current instance; empty: not known
    eject: bool = False  # whether this instance is taken out of service until an operator resumes it


@dataclass(frozen=True, slots=True, kw_only=True)
class Commanded(WorkerObservation):
    """The base of facts that result from an operator's command."""

    command: str = ""  # the command's id
    until: datetime | None = None  # deadline, by the stream's clock; a fact appended later is ignored
    by: str = ""  # name of the operator

    def late(self, at: datetime) -> bool:
        """Return whether a fact that was appended at `at` (by the stream's clock) missed the command's deadline. Without a
        deadline, return False."""
        return self.until is not None and at > self.until


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandRefused(Observation):
    """An operator's command was refused. It had no effect, and will not have one later."""

    worker: str  # the worker that the command names; it may not exist
    verb: str  # drain, resume, move, restart, chaos
    command: str  # the command's id
    why: str
    late: bool = False  # the command's deadline passed before a controller could carry it out
    by: str = ""  # name of the operator


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRequested(Commanded):
    """An operator requested that this worker be drained. Without `deadline_s` the deadline of the policy applies."""

    deadline_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeRequested(Commanded):
    """An operator requested that this worker serve again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveRequested(Commanded):
    """An operator requested that this worker's running requests move to other workers. The worker still accepts new
    requests."""

    to: str = ""  # the only worker that may continue the requests; empty: the most suitable workers


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartRequested(Commanded):
    """An operator requested that this worker shut down gracefully and start again. The controller passes the request to the
    worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShutdownBegan(WorkerObservation):
    """A worker began to shut down, on request or because it cannot continue."""

    mode: Literal["graceful", "self_initiated"]  # graceful: on request; self_initiated: it cannot continue
    grace_s: float = 60.0  # seconds for which its streams may still run on this worker
    reason: str = ""  # with self_initiated: the cause


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainFinished(WorkerObservation):
    """A draining worker has no stream in flight any more.

    Each stream that the worker had, or still accepted, ended in one of four ways, which are counted here. The counts begin when
    the worker receives the command to drain. A frontend may move a stream away before the worker has received the command. The
    counts then begin with this stream.
    """

    completed: int  # number of streams that ended on this worker
    migrated: int  # number of streams that continued on another worker, or were to continue there
    cancelled: int = 0  # number of streams that ended because their client or their frontend is gone
    failed: int = 0  # number of streams that the engine ended with an error


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFaulted(WorkerObservation):
    """A device of this worker reported a fault, or the code or weight of a reported fault changed. devices.md lists the
    fault classes."""

    device: str  # the UUID of a GPU
    fault_class: str  # xid, ecc, nvlink_down, throttle …: devices.md lists all of them
    code: str = ""  # an Xid's number, or another code that distinguishes faults of this class
    fatal: bool = True  # the worker cannot continue with this device
    weight: float | None = None  # the highest weight that the worker may keep with a non-fatal fault, 0 to 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRecovered(WorkerObservation):
    """A fault of a device was cleared or repaired. This ends every reported fault of this device and class."""

    device: str  # the UUID of a GPU
    fault_class: str
    code: str = ""  # code of the fault as last reported


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFaulted(WorkerObservation):
    """The engine itself failed: it raised, died or stopped stepping. If `fatal` is true, it cannot continue."""

    reason: str
    fatal: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosInjected(Commanded):
    """A chaos rehearsal injected a fault into this worker, or healed an injected fault."""

    fault: str  # a verb of `holdfast chaos`
    detail: str = ""  # the fault's argument and rank; empty: it has none
    # seconds until the fault ends by itself; None: it lasts until it is healed
    duration_s: float | None = None
