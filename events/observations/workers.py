"""What is observed of a worker: what it is, that it came and went, and what breaks in it."""

from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar, Literal

from events.fact import Observation


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What a worker can do, as it registered it: the input of the capacity model.

    `tpot_ms` is a curve of (running sequences, milliseconds per output token), ascending; between its points it is
    linear, beyond the last it grows in proportion.
    """

    kv_blocks: int
    block_tokens: int
    max_batch: int
    prefill_tokens_per_s: float
    tpot_ms: tuple[tuple[int, float], ...]
    prefill_tokens_max: int | None = None  # prompt tokens that one step takes; None: it does not say


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Where a worker's devices are."""

    host: str = ""  # its name
    nvlink_domain: str = ""  # who has the same is joined by NVLink; empty: nobody that is known
    rail: str = ""  # the network rail of its adapters; empty: not known
    gpus: tuple[str, ...] = ()  # UUIDs; a simulated rank's is SIM-worker-rank


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """What one token's KV cache consists of, over all shards: its size follows. Blocks have `Profile.block_tokens`."""

    layers: int
    kv_heads: int  # over all shards
    head_size: int  # elements
    element_bytes: int  # 2: fp16 and bf16, 1: fp8


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerObservation(Observation):
    """The base of every fact about one instance of one worker."""

    worker: str  # the stable name of a place that runs an engine
    instance: str  # one life of it


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerJoined(WorkerObservation):
    """A worker is up and can be reached at `url` (tcp://host:port, or nats:SUBJECT through the broker: the request plane)."""

    url: str
    model: str
    revision: str
    tokenizer: str  # a folder, or "builtin:sim"
    engine: str  # simulated, transformers, openai
    engine_version: str
    dtype: str
    tp: int  # ranks of this group; 1: a lone worker
    device: str
    profile: Profile
    canary_key: str  # goldens are kept per canary key: see `canary_key`
    pid: int
    topology: Topology = Topology()  # where its devices are: over which link KV caches would travel
    migration_limit: int | None = None  # None: no limit of this worker's own
    context_tokens: int = 4096
    exact: bool = True  # False: continuations on this engine may differ from an undisturbed answer
    kv: KvLayout | None = None  # None: requests cannot leave or come with their KV cache
    dp: int = 1  # DP ranks, 0 to dp - 1: each has a KV cache and a queue of its own
    kv_events: bool = False  # it says which KV blocks it stores and removes, and answers questions about them
    waiting_max: int | None = None  # requests that it lets wait beside `max_batch`; None: it does not say
    spare: bool = False  # it begins as a spare: it gets no traffic until it takes a lost worker's place
    root: str = ""  # the weights' repository or folder, as the server behind it tells; empty: it does not
    generation_config: str = ""  # digest of the model's defaults for sampling; empty: none are known
    server: str = ""  # host and port of the server behind this worker; empty: the worker computes itself
    account: str = ""  # broker user of the worker's process; empty: not stated
    also_served: tuple[
        str, ...
    ] = ()  # further names under which the server behind it serves the same weights
    lineage: str = (
        ""  # what the engine tells of its weights and how it computes, part of the canary key; empty: nothing
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerAwaited(WorkerObservation):
    """A worker's process is there, and cannot join yet: it waits for its server, or loads its model.

    Said again when the reason changes, and every two minutes while it lasts: who says it no longer is awaited no more."""

    reason: str  # why, as one reads it: cannot connect to http://…
    model: str = ""  # what it will serve; empty: it does not know yet
    name_taken_by: str = ""  # instance of the live worker of its name, because of which it was not started


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLeft(WorkerObservation):
    """A worker's process has ended, and how."""

    mode: Literal["graceful", "immediate", "self_initiated"]
    exit: int | None = None  # exit status as a shell says it: 128 + n for signal n (-n in older facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSilent(WorkerObservation):
    """No heartbeat for `silent_s` seconds, seen by an observer that was connected all that time."""

    silent_s: float
    observer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerHeard(WorkerObservation):
    """A worker that had been reported silent was heard again."""

    observer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLingered(WorkerObservation):
    """The fleet holds this instance for dead, and its process lives all the same: nobody has ended it, so no successor of it
    comes. Whoever supervises it, a person if need be, has to."""

    pid: int  # of the process, on its host
    host: str = ""  # its host's name
    evidence: str = ""  # beat: it says that it lives; process: it is there; port: its port is open
    dead_s: float = 0.0  # seconds for which that has been seen
    observer: str = ""  # who saw it


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserverBlind(Observation):
    """More than half of the fleet fell silent at once: the observer doubts itself, and accuses nobody."""

    entity: ClassVar[str] = "fleet"
    observer: str
    silent: int  # workers
    known: int  # workers that it should hear


@dataclass(frozen=True, slots=True, kw_only=True)
class IntrusionRefused(Observation):
    """Somebody tried at the broker what he may not: it was refused, and not done."""

    entity: ClassVar[str] = "fleet"
    who: str  # a user of the broker, or "a stranger"
    tried: str  # the first thing that was refused
    times: int  # refusals since this was said last
    worker: str = ""  # the worker that did it, where it is known
    instance: str = ""  # its present life, if it has one
    eject: bool = False  # the life is to be taken out of service until an operator resumes it


@dataclass(frozen=True, slots=True, kw_only=True)
class Commanded(WorkerObservation):
    """The base of what an operator's command led to."""

    command: str = ""  # the command's id
    until: datetime | None = None  # by the stream's clock; later on the stream, it is not heeded
    by: str = ""  # who asked

    def late(self, at: datetime) -> bool:
        """Say whether a fact that came onto the stream `at` this instant came too late to be heeded."""
        return self.until is not None and at > self.until


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandRefused(Observation):
    """An operator's command was refused: nothing has come of it, and nothing will."""

    worker: str  # that the command was about; there may be none of that name
    verb: str  # drain, resume, move, restart, chaos
    command: str  # the command's id
    why: str
    late: bool = False  # its deadline was over before a controller could carry it out
    by: str = ""  # who asked


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRequested(Commanded):
    """An operator wants this worker empty. Without a deadline the policy's applies."""

    deadline_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeRequested(Commanded):
    """An operator wants this worker back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveRequested(Commanded):
    """An operator wants this worker's running requests elsewhere; it goes on taking new ones."""

    to: str = ""  # the only worker that may take them; empty: whoever suits best


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartRequested(Commanded):
    """An operator wants this worker to end in good order, and to be started again: it is told so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShutdownBegan(WorkerObservation):
    """A worker has begun to stop."""

    mode: Literal["graceful", "self_initiated"]  # it was asked to; or it cannot go on
    grace_s: float = 60.0  # seconds that its streams may still take here
    reason: str = ""  # of its own wish: what it found


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainFinished(WorkerObservation):
    """A draining worker has nothing in flight any more. Each stream that it had, or still took, ended in one of four ways.

    The drain begins when the worker is told, or with the first stream that a frontend, which heard before it, took away."""

    completed: int  # streams that ended here
    migrated: int  # streams that went on elsewhere, or were told to
    cancelled: int = 0  # streams that nobody read any more: their client, or their frontend, has gone
    failed: int = 0  # streams that the engine ended with an error


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFaulted(WorkerObservation):
    """A device of this worker reported a fault, or its code or weight changed. The fault classes stand in devices.md."""

    device: str  # the UUID of a GPU
    fault_class: str  # xid, ecc, nvlink_down, throttle …: all of them stand in devices.md
    code: str = ""  # an Xid's number, or what tells one fault of the class from another
    fatal: bool = True  # the worker cannot go on with this device
    weight: float | None = None  # of a fault that is not fatal: the share that it leaves the worker at most


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRecovered(WorkerObservation):
    """A device's fault was cleared or repaired: all that was said of this device and class."""

    device: str  # the UUID of a GPU
    fault_class: str
    code: str = ""  # of the fault as it was last reported


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFaulted(WorkerObservation):
    """The engine itself broke: it raised, died or stopped stepping. Fatal means that it cannot go on."""

    reason: str
    fatal: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosInjected(Commanded):
    """A rehearsal: somebody broke this worker on purpose (or healed it)."""

    fault: str  # a verb of `holdfast chaos`
    detail: str = ""  # its argument and its rank, where it has them
    duration_s: float | None = (
        None  # seconds after which it ends by itself; None: it lasts until somebody ends it
    )
