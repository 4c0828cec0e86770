"""Observations of requests by frontends: served, failed, migrated, abandoned, rejected, exposed."""

from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar, Literal

from events.fact import Observation
from events.observations.workers import WorkerObservation


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestsServed(WorkerObservation):
    """What one worker served one frontend in one time window. Latencies are medians over the window."""

    frontend: str
    count: int  # answers
    tokens: int  # of these answers
    ttft_ms: float
    itl_ms: float
    routed_under: int  # number of the last decision the frontend had folded when it sent the first request
    window_s: float
    weighed: int = 0  # tokens of these answers that came with logprobs, because clients requested them
    unlikely: int = 0  # of these, tokens below the frontend's logprob floor
    sampling: tuple[float, float, int] | None = None  # most common (temperature, top_p, top_k)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFailed(WorkerObservation):
    """A request failed on this worker. Client errors never count."""

    frontend: str
    failures_in_a_row: int  # of this worker at this frontend
    reason: str
    routed_under: int  # number of the last decision the frontend had folded when it sent the request


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSuspected(WorkerObservation):
    """This worker failed (its connection broke, or the one to its server) before it returned any part of this request's answer.

    Most such requests are innocent. Until a similar one yields a token, each is retried on a worker without other suspects."""

    frontend: str
    request: str
    model: str
    fingerprint: str  # equal for all requests of this prompt and form; it reveals nothing of the text
    reason: str  # how the worker failed: disconnected, upstream_lost
    prompt_tokens: int  # of the request, and of the part of its answer that was accepted before


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPoisonous(WorkerObservation):
    """A request failed in the same way on two workers, one of which is this worker. It was not tried on a third, and similar
    requests are refused for a while. Its failures no longer count against the two workers."""

    frontend: str
    request: str
    model: str
    fingerprint: str  # equal for all requests of this prompt and form; it reveals nothing of the text
    reason: str  # the way in which it fails
    prompt_tokens: int
    max_tokens: int
    guided: str  # the field that constrains the answer's form; empty: none
    failures_in_a_row: int  # of this worker at this frontend, without this request's
    routed_under: int  # number of the last decision the frontend had folded when it sent the request
    refused_s: float  # seconds for which similar requests are refused


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSlow(WorkerObservation):
    """A frontend measured that this worker is more than three times slower than its peers."""

    frontend: str
    latency_ms: float
    baseline_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSlowCleared(WorkerObservation):
    """A worker that was slow is as fast as its peers again."""

    frontend: str
    latency_ms: float
    baseline_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendObservation(Observation):
    """The base of facts that a frontend reports about its own work."""

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
    """A request continued on another worker. `tokens` were accepted from the source; `gap_ms` is the pause the client saw."""

    request: str
    model: str
    source: str
    source_instance: str
    target: str
    target_instance: str
    cause: MigrationCause  # drain, device_fault, throttled, operator: nothing had failed
    method: Literal["transfer", "reprefill"]  # with its KV cache, or by its tokens alone
    tokens: int  # accepted from the source, and not generated again
    gap_ms: float  # the pause the client saw: from the token before the move to the next one
    attempt: int  # 2 for the first migration
    exact: bool  # False: from here on the answer may differ from an undisturbed one
    kind_of_move: Literal["new_request", "ongoing_request"] = "ongoing_request"  # by whether it had any token
    bytes: int = 0  # of KV cache transferred, over all shards
    blocks: int = 0  # of KV cache transferred, over all shards
    link: str = ""  # the link of the transfer
    predicted_ms: float | None = None  # by the chosen method; None: after a failure no method is chosen
    refused: str = ""  # why a transfer that was requested became a re-prefill


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPreempted(FrontendObservation):
    """A running request was preempted, because a request of a better tier would have missed its deadline. Its worker has freed
    its KV cache, and the request resumes later. Nothing has failed."""

    request: str
    model: str
    tier: str
    worker: str
    instance: str
    tokens: int  # accepted until then


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestResumed(FrontendObservation):
    """A preempted request resumed: its next token arrived."""

    request: str
    model: str
    source: str  # the worker that served it before
    target: str
    target_instance: str
    tokens: int  # accepted before, and not generated again
    gap_ms: float  # the pause the client saw: from the token before the preemption to the next one
    exact: bool  # False: from here on the answer may differ from an undisturbed one


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestAbandoned(FrontendObservation):
    """A request could not be continued; the client received the original error."""

    request: str
    model: str
    worker: str
    instance: str
    # guided_decoding, n_over_1, cancelled, over_cap, budget_exhausted, no_worker, corrupt_output …
    reason: str
    tokens: int  # accepted until then


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestsRejected(FrontendObservation):
    """Requests that were rejected in one time window: shed, not admitted, or over a limit."""

    model: str
    count: int  # requests
    reason: str
    tier: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BusyThresholdsSet(FrontendObservation):
    """An operator or client set, through this frontend, the thresholds above which a model's workers are busy. A field that is
    None keeps its value."""

    model: str
    active_decode_blocks: float | None = None  # share of a rank's KV blocks, 0 to 1
    active_prefill_tokens: int | None = None  # prompt tokens that are not prefilled yet
    active_prefill_tokens_frac: float | None = None  # the same, as a multiple of the tokens of one step


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestExposed(FrontendObservation):
    """Tokens `first`…`last` (0-based, inclusive) of this request came from a worker that a canary has convicted.

    A worker is convicted with all of its DP ranks: `canary_failed` names the rank that failed, `rank` the one that generated
    these tokens.
    """

    request: str
    model: str
    worker: str
    instance: str
    first: int  # position of the first such token in the answer, from 0
    last: int  # position of the last one, inclusive
    finished: bool
    action: Literal["continue", "restart", "error", "none"]
    rank: int | None = None  # the DP rank that generated them; None: the worker has only one


@dataclass(frozen=True, slots=True, kw_only=True)
class ExposureUnknown(FrontendObservation):
    """This frontend does not know which requests the worker served in this span: it restarted, or its memory was full."""

    worker: str
    instance: str
    since: datetime
    until: datetime
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerMove:
    """One transition of a frontend's own breaker of one worker."""

    worker: str
    instance: str
    position: Literal["closed", "open", "half_open"]  # after the move
    ago_ms: float  # before the event was published, by the frontend's clock
    reason: str  # of an opening; fleet_breaker_closed: the fleet's breaker reset it; empty: a trial began or passed


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendBreakersMoved(FrontendObservation):
    """All transitions of this frontend's own breakers within one second, in order. They affect only this frontend's requests:
    no decider reads them."""

    moves: tuple[BreakerMove, ...]  # the first 200
    dropped: int  # moves that did not fit


@dataclass(frozen=True, slots=True, kw_only=True)
class PanicBegan(FrontendObservation):
    """This frontend ignores its own breakers for a model: less than half of its weight, or no reachable worker, was routable."""

    model: str
    routable_share: float  # of the model's weight, 0 to 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PanicEnded(FrontendObservation):
    """Enough of a model's weight is routable again."""

    model: str
    routable_share: float  # of the model's weight, 0 to 1
