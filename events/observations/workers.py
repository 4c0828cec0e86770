"""Observations of workers: registration, lifecycle, faults, and operators' commands."""

from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar, Literal

from events.fact import Observation


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The performance that a worker registered: the input of the capacity model.

    `tpot_ms` is a curve of (running sequences, milliseconds per output token), ascending. It is linear between its points and
    proportional to the number of sequences beyond the last one.
    """

    kv_blocks: int
    block_tokens: int
    max_batch: int
    prefill_tokens_per_s: float
    tpot_ms: tuple[tuple[int, float], ...]
    prefill_tokens_max: int | None = None  # prompt tokens per step; None: not reported


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The location of a worker's devices."""

    host: str = ""  # its name
    nvlink_domain: str = ""  # workers of the same domain are joined by NVLink; empty: none known
    rail: str = ""  # the network rail of its adapters; empty: not known
    gpus: tuple[str, ...] = ()  # UUIDs; a simulated rank has SIM-worker-rank


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """The shape of one token's KV cache over all shards, which gives its size. A block has `Profile.block_tokens` tokens."""

    layers: int
    kv_heads: int  # over all shards
    head_size: int  # elements
    element_bytes: int  # 2: fp16 and bf16, 1: fp8


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerObservation(Observation):
    """The base of every fact about one instance of one worker."""

    worker: str  # the worker's stable name
    instance: str  # id of one instance of the worker, from its start to its end


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerJoined(WorkerObservation):
    """A worker is up and reachable at `url`: tcp://host:port, or nats:SUBJECT if the request plane uses the broker."""

    url: str
    model: str
    revision: str
    tokenizer: str  # a folder, or "builtin:sim"
    engine: str  # simulated, transformers, openai
    engine_version: str
    dtype: str
    tp: int  # ranks of this group; 1: a single worker
    device: str
    profile: Profile
    canary_key: str  # the key of its goldens: see `canary_key`
    pid: int
    topology: Topology = Topology()  # of its devices: it determines the link of a KV transfer
    migration_limit: int | None = None  # None: this worker sets no limit
    context_tokens: int = 4096
    exact: bool = True  # False: continuations on this engine may differ from an undisturbed answer
    kv: KvLayout | None = None  # None: requests cannot move from or to this worker with their KV cache
    dp: int = 1  # DP ranks, 0 to dp - 1: each has its own KV cache and queue
    kv_events: bool = False  # it publishes the KV blocks that it stores and removes, and answers queries
    waiting_max: int | None = None  # requests it queues beyond `max_batch`; None: not reported
    spare: bool = False  # it starts as a spare: it gets no traffic until it replaces a failed worker
    root: str = ""  # the weights' repository or folder, as the server behind it reports; empty: not reported
    generation_config: str = ""  # digest of the model's sampling defaults; empty: none known
    server: str = ""  # host and port of the server behind this worker; empty: it runs the engine itself
    account: str = ""  # broker account of the worker's process; empty: not stated
    also_served: tuple[str, ...] = ()  # other names under which its server serves the same weights
    lineage: str = ""  # reported weights and computation of the engine, part of the canary key; empty: none


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerAwaited(WorkerObservation):
    """A worker's process is running but cannot join yet: it waits for its server, or loads its model.

    Repeated when the reason changes, and every two minutes while it lasts. Without a
    repetition the worker is no longer awaited."""

    reason: str  # readable text, such as: cannot connect to http://…
    model: str = ""  # the model it will serve; empty: not known yet
    name_taken_by: str = ""  # instance of the live worker of the same name that keeps it from starting


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLeft(WorkerObservation):
    """A worker's process ended."""

    mode: Literal["graceful", "immediate", "self_initiated"]
    exit: int | None = None  # exit status, as in a shell: 128 + n for signal n (-n in older facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSilent(WorkerObservation):
    """A worker sent no heartbeat for `silent_s` seconds, while the observer was connected all that time."""

    silent_s: float
    observer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerHeard(WorkerObservation):
    """A worker that had been reported silent sent a heartbeat again."""

    observer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLingered(WorkerObservation):
    """An instance that the fleet has declared dead still has a running process, so no successor of it can start.

    Its supervisor, or an operator, has to end the process."""

    pid: int  # of the process, on its host
    host: str = ""  # its host's name
    evidence: str = ""  # beat: it sends heartbeats; process: it exists; port: its port is open
    dead_s: float = 0.0  # seconds for which this has been observed
    observer: str = ""  # the process that observed it


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserverBlind(Observation):
    """More than half of the fleet fell silent at once: the observer suspects a fault of its own, and reports no worker."""

    entity: ClassVar[str] = "fleet"
    observer: str
    silent: int  # workers
    known: int  # workers from which it expects heartbeats


@dataclass(frozen=True, slots=True, kw_only=True)
class IntrusionRefused(Observation):
    """An attempt at an operation without permission was refused and not carried out."""

    entity: ClassVar[str] = "fleet"
    who: str  # a broker account, or "a stranger"
    tried: str  # the first operation that was refused
    times: int  # refusals since the last report
    worker: str = ""  # the worker that did it; empty: not known
    instance: str = ""  # its current instance, if it has one
    eject: bool = False  # this instance is to be taken out of service until an operator resumes it


@dataclass(frozen=True, slots=True, kw_only=True)
class Commanded(WorkerObservation):
    """The base of facts that result from an operator's command."""

    command: str = ""  # the command's id
    until: datetime | None = None  # deadline, by the stream's clock; a fact appended later is ignored
    by: str = ""  # the operator

    def late(self, at: datetime) -> bool:
        """Return whether a fact that was appended at this time of the stream missed its deadline."""
        return self.until is not None and at > self.until


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandRefused(Observation):
    """An operator's command was refused: it had no effect, and will have none."""

    worker: str  # the worker that the command names; it may not exist
    verb: str  # drain, resume, move, restart, chaos
    command: str  # the command's id
    why: str
    late: bool = False  # its deadline passed before a controller could carry it out
    by: str = ""  # the operator


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRequested(Commanded):
    """An operator requested that this worker be drained. Without `deadline_s` the policy's deadline applies."""

    deadline_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeRequested(Commanded):
    """An operator requested that this worker serve again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveRequested(Commanded):
    """An operator requested that this worker's running requests move away; the worker still accepts new ones."""

    to: str = ""  # the only worker that may take them; empty: the most suitable ones


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartRequested(Commanded):
    """An operator requested that this worker shut down gracefully and start again. The worker receives the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShutdownBegan(WorkerObservation):
    """A worker began to shut down."""

    mode: Literal["graceful", "self_initiated"]  # graceful: on request; self_initiated: it cannot continue
    grace_s: float = 60.0  # seconds its streams may still run here
    reason: str = ""  # self_initiated: the cause


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainFinished(WorkerObservation):
    """A draining worker has no stream in flight any more. Each stream that it had, or still accepted, ended in one of four ways.

    The drain begins when the worker receives it, or earlier: with the first stream that a frontend moved away because of it."""

    completed: int  # streams that ended here
    migrated: int  # streams that continued on another worker, or were requested to
    cancelled: int = 0  # streams without a reader: their client, or their frontend, is gone
    failed: int = 0  # streams that the engine ended with an error


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFaulted(WorkerObservation):
    """A device of this worker reported a fault, or its code or weight changed. devices.md lists the fault classes."""

    device: str  # the UUID of a GPU
    fault_class: str  # xid, ecc, nvlink_down, throttle …: devices.md lists all of them
    code: str = ""  # an Xid's number, or what distinguishes faults of this class
    fatal: bool = True  # the worker cannot continue with this device
    weight: float | None = None  # of a non-fatal fault: the highest weight the worker may keep, 0 to 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRecovered(WorkerObservation):
    """A device's fault was cleared or repaired: this ends every reported fault of this device and class."""

    device: str  # the UUID of a GPU
    fault_class: str
    code: str = ""  # of the fault as last reported


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFaulted(WorkerObservation):
    """The engine itself failed: it raised, died or stopped stepping. `fatal` means that it cannot continue."""

    reason: str
    fatal: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosInjected(Commanded):
    """A chaos rehearsal: a fault was injected into this worker, or an injected fault was healed."""

    fault: str  # a verb of `holdfast chaos`
    detail: str = ""  # its argument and its rank, if it has them
    duration_s: float | None = None  # seconds until it ends by itself; None: it lasts until it is healed
