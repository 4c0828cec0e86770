"""What the world can report. One frozen dataclass per kind; the body of the event is its fields.

An optional field may be added to a kind; a new meaning is a new kind; nothing is ever renamed. Units stand last in
a name. No user's prompt or text ever enters an event: the tokens in here are a canary's, and canaries are ours.

`worker` is the stable name of a place that runs an engine ("w3"); `instance` is one life of it. State belongs to
the pair: a fact about another instance falls through.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar, Literal

from events.fact import Observation

CanaryReason = Literal[
    "no_response", "token_mismatch", "logit_drift", "latency_spike", "timeout", "exception", "non_finite"
]
CheckType = Literal["scheduled", "confirm", "trial", "join"]
TopK = tuple[tuple[int, float], ...]  # (token id, logprob), best first, of one position


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


# --- life of a worker -------------------------------------------------------------------------------------------


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
class ObserverBlind(Observation):
    """More than half of the fleet fell silent at once: the observer doubts itself, and accuses nobody."""

    entity: ClassVar[str] = "fleet"
    observer: str
    silent: int  # workers
    known: int  # workers that it should hear


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRequested(WorkerObservation):
    """An operator wants this worker empty. Without a deadline the policy's applies."""

    deadline_s: float | None = None
    by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeRequested(WorkerObservation):
    """An operator wants this worker back."""

    by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveRequested(WorkerObservation):
    """An operator wants this worker's running requests elsewhere; it goes on taking new ones."""

    to: str = ""  # the only worker that may take them; empty: whoever suits best
    by: str = ""  # who asked


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
class ChaosInjected(WorkerObservation):
    """A rehearsal: somebody broke this worker on purpose (or healed it)."""

    fault: str  # a verb of `holdfast chaos`
    detail: str = ""  # its argument and its rank, where it has them
    by: str = ""  # who did it


# --- canaries ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryResult(WorkerObservation):
    """The base of a probe's outcome. One probe is one fact, however many attempts it took.

    `sent_under` is the number of the last decision that the prober had folded when it sent the (first) question, so
    that a result from before a breaker's trial is recognised by number.
    """

    canary_key: str
    canary: str
    check_type: CheckType
    sent_under: int  # number of the last decision that the prober had folded
    sent_at: datetime  # the prober's clock
    latency_ms: float
    attempts: int = 1  # times that it was asked
    rank: int | None = None  # the DP rank that was asked; None: its worker has only one


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryPassed(CanaryResult):
    """Right tokens, right logits, in time. `distance` is the largest logprob difference from the golden."""

    distance: float = 0.0  # the largest difference of a logprob from the golden's


@dataclass(frozen=True, slots=True, kw_only=True)
class CanarySlow(CanaryResult):
    """Right tokens and logits, but slower than three times the baseline. It passed; it is only slow."""

    baseline_ms: float
    distance: float = 0.0  # the largest difference of a logprob from the golden's


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryFailed(CanaryResult):
    """A probe that did not pass. `confirmed`: repeating the same canary at once gave the same kind of wrong answer.

    `golden` says what the answer was compared with: an `agreed` one convicts, a `provisional` one convicts only the
    worker that it came from, `none` convicts nobody.
    """

    reason: CanaryReason
    confirmed: bool
    golden: Literal["agreed", "provisional", "none"] = "none"
    expected: tuple[int, ...] = ()
    got: tuple[int, ...] = ()
    distance: float | None = None  # the largest difference of a logprob from the golden's
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenProposed(WorkerObservation):
    """A worker's answer to a canary that has no golden yet; or the configured answer (`configured`)."""

    canary_key: str
    canary: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    top_k: tuple[TopK, ...]
    margin: float  # the smallest top-1/top-2 logprob difference over the answer
    tolerance: float  # of one logprob; 0.0: compare tokens only
    configured: bool = False
    asked: int = 0  # how many tokens; some upstreams tell of fewer. 0: as many as in `tokens`


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenDisputed(WorkerObservation):
    """This worker's confirmed answer differs from a golden that only `proposed_by` has given: one of them is wrong."""

    canary_key: str
    canary: str
    proposed_by: str
    tokens: tuple[int, ...]
    distance: float | None = None  # the largest difference of a logprob from the golden's
    rank: int | None = None  # the DP rank that was asked; None: its worker has only one


# --- requests, as frontends see them ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestsServed(WorkerObservation):
    """What one frontend was served by one worker in one window of time. Latencies are medians of the window."""

    frontend: str
    count: int  # answers
    tokens: int  # of these answers
    ttft_ms: float
    itl_ms: float
    routed_under: int  # the last decision that the frontend had folded when it sent the first of them
    window_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFailed(WorkerObservation):
    """A request failed on this worker; the client's own mistakes never count."""

    frontend: str
    failures_in_a_row: int  # of this worker at this frontend
    reason: str
    routed_under: int  # the last decision that the frontend had folded when it sent the request


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSlow(WorkerObservation):
    """A frontend found this worker slower than three times its peers."""

    frontend: str
    latency_ms: float
    baseline_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSlowCleared(WorkerObservation):
    """A worker that had been slow keeps up with its peers again."""

    frontend: str
    latency_ms: float
    baseline_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendObservation(Observation):
    """The base of what a frontend says about its own work."""

    entity: ClassVar[str] = "frontend"
    frontend: str


MigrationCause = Literal[
    "cannot_connect",
    "disconnected",
    "stalled",
    "engine_error",
    "engine_shutdown",
    "overloaded",
    "unhealthy",
    "drain",
    "device_fault",
    "throttled",
    "operator",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMigrated(FrontendObservation):
    """A request went on elsewhere. `tokens` were already accepted from the source; `gap_ms` is what the client saw."""

    request: str
    model: str
    source: str
    source_instance: str
    target: str
    target_instance: str
    cause: MigrationCause  # drain, device_fault, throttled, operator: nothing had failed
    method: Literal["transfer", "reprefill"]  # with its KV cache, or by its tokens alone
    tokens: int  # accepted from the source, and not computed anew
    gap_ms: float  # what the client saw: from the last token before to the next
    attempt: int  # 2 for the first migration
    exact: bool  # False: the answer is approximate, it may differ from an undisturbed one from here on
    kind_of_move: Literal["new_request", "ongoing_request"] = "ongoing_request"  # no token had come; some had
    bytes: int = 0  # of KV cache that travelled, over all shards
    blocks: int = 0  # of KV cache that travelled, over all shards
    link: str = ""  # over what they travelled
    predicted_ms: float | None = None  # of the method that was chosen; None: nothing was, after a failure
    refused: str = ""  # why a transfer that was wanted became a re-prefill


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestAbandoned(FrontendObservation):
    """A request could not be continued; the client got the original error."""

    request: str
    model: str
    worker: str
    instance: str
    reason: (
        str  # guided_decoding, n_over_1, cancelled, over_cap, budget_exhausted, no_worker, corrupt_output …
    )
    tokens: int  # accepted until then


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestsRejected(FrontendObservation):
    """Requests that were turned away in one window: shed, not accepted, over a bound."""

    model: str
    count: int  # requests
    reason: str
    tier: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestExposed(FrontendObservation):
    """Tokens `first`…`last` (0-based, inclusive) of this request came from a worker that a canary has convicted.

    A worker is convicted with all of its DP ranks: `canary_failed` says which of them was found out, `rank` which one spoke.
    """

    request: str
    model: str
    worker: str
    instance: str
    first: int  # place of a token in the answer, from 0
    last: int  # place of a token in the answer, itself included
    finished: bool
    action: Literal["continue", "restart", "error", "none"]
    rank: int | None = None  # the DP rank that said them; None: its worker has only one


@dataclass(frozen=True, slots=True, kw_only=True)
class ExposureUnknown(FrontendObservation):
    """This frontend cannot say which requests the worker served in this span (restarted, or its memory was full)."""

    worker: str
    instance: str
    since: datetime
    until: datetime
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PanicBegan(FrontendObservation):
    """Less than half of a model's weight was routable: this frontend ignores its own breakers for it."""

    model: str
    routable_share: float  # of the model's weight, 0 to 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PanicEnded(FrontendObservation):
    """Enough of a model's weight is routable again."""

    model: str
    routable_share: float  # of the model's weight, 0 to 1


def canary_key(
    *,
    model: str,
    revision: str,
    tokenizer: str,
    engine: str,
    engine_version: str,
    dtype: str,
    tp: int,
    device: str,
) -> str:
    """Return the name under which goldens are kept: answers are comparable only where all of this is equal (N23).

    Of a tokenizer's folder only the last part counts: hosts keep the same model in different places, and what is in
    the folder is known by the revision.
    """
    folder = tokenizer.rstrip("/").rpartition("/")[2]
    return "|".join((model, revision, folder, engine, engine_version, dtype, f"tp{tp}", device))
