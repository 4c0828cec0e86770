"""Observations of requests by frontends, such as served, failed and migrated requests."""

from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar, Literal

from events.fact import Observation
from events.observations.workers import WorkerObservation


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestsServed(WorkerObservation):
    """What one worker served to one frontend in one time window. Latencies are medians over the window."""

    frontend: str
    count: int  # number of answers
    tokens: int  # number of tokens of these answers
    ttft_ms: float
    itl_ms: float
    # number of the last decision that the frontend had folded when it sent the first request
    routed_under: int
    window_s: float
    weighed: int = 0  # number of tokens with logprobs in these answers; only some clients request logprobs
    unlikely: int = 0  # number of the tokens with logprobs that are below the frontend's logprob floor
    sampling: tuple[float, float, int] | None = None  # most common (temperature, top_p, top_k)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFailed(WorkerObservation):
    """A request failed on this worker. Errors of the client are not reported."""

    frontend: str
    failures_in_a_row: int  # number of consecutive failures of this worker at this frontend
    reason: str
    routed_under: int  # number of the last decision that the frontend had folded when it sent the request


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSuspected(WorkerObservation):
    """This worker failed before it returned any part of this request's answer, so the request may have caused the failure.

    Either the connection between the frontend and the worker broke, or the worker lost the server that runs its model. Most
    suspected requests are innocent. Each is retried on a worker without other suspects, until a similar request yields a token.
    """

    frontend: str
    request: str
    model: str
    fingerprint: str  # equal for all requests of this prompt and form; it reveals nothing of the text
    reason: str  # how the worker failed: disconnected, upstream_lost
    prompt_tokens: int  # tokens of the prompt and of the part of the answer that was accepted before


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPoisonous(WorkerObservation):
    """A request failed in the same way on two workers, and this worker is one of the two.

    The request was not tried on a third worker, and similar requests are refused for a while. The request's failures no longer
    count against the two workers.
    """

    frontend: str
    request: str
    model: str
    fingerprint: str  # equal for all requests of this prompt and form; it reveals nothing of the text
    reason: str  # the way in which the request fails
    prompt_tokens: int
    max_tokens: int
    guided: str  # the request's field that constrains the form of the answer; empty: no field does
    # consecutive failures of this worker at this frontend, without those of this request
    failures_in_a_row: int
    routed_under: int  # number of the last decision that the frontend had folded when it sent the request
    refused_s: float  # seconds for which similar requests are refused


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSlow(WorkerObservation):
    """A frontend measured that this worker is more than three times slower than its peers."""

    frontend: str
    latency_ms: float
    baseline_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSlowCleared(WorkerObservation):
    """A slow worker is as fast as its peers again, as measured by a frontend."""

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
    """A request continued on another worker. The frontend had accepted `tokens` tokens from the first worker, and the client saw
    a pause of `gap_ms`."""

    request: str
    model: str
    source: str
    source_instance: str
    target: str
    target_instance: str
    cause: MigrationCause  # for drain, device_fault, throttled and operator there was no failure
    method: Literal["transfer", "reprefill"]  # transfer: with its KV cache; reprefill: by its tokens alone
    tokens: int  # number of tokens that were accepted from the source and not generated again
    gap_ms: float  # the pause that the client saw, from the token before the move to the next one
    attempt: int  # number of the attempt, which is 2 for the first migration
    exact: bool  # False: from this point on the answer may differ from an undisturbed one
    # new_request: the request had no token yet
    kind_of_move: Literal["new_request", "ongoing_request"] = "ongoing_request"
    bytes: int = 0  # bytes of KV cache transferred, over all shards
    blocks: int = 0  # blocks of KV cache transferred, over all shards
    link: str = ""  # link of the transfer: shm, unix, tcp, nixl
    # predicted pause by the chosen method; None: after a failure, because no method is chosen then
    predicted_ms: float | None = None
    refused: str = ""  # why a requested transfer became a re-prefill; empty: it did not


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPreempted(FrontendObservation):
    """A running request was preempted, because a request of a better tier would have missed its deadline.

    The worker has freed the KV cache of the preempted request, which resumes later. No failure was involved.
    """

    request: str
    model: str
    tier: str
    worker: str
    instance: str
    tokens: int  # number of tokens accepted until then


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestResumed(FrontendObservation):
    """A preempted request resumed, and its next token arrived."""

    request: str
    model: str
    source: str  # the worker that served the request before
    target: str
    target_instance: str
    tokens: int  # number of tokens that were accepted before and not generated again
    gap_ms: float  # the pause that the client saw, from the token before the preemption to the next one
    exact: bool  # False: from this point on the answer may differ from an undisturbed one


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestAbandoned(FrontendObservation):
    """A request could not be continued, and the client received the original error."""

    request: str
    model: str
    worker: str
    instance: str
    # guided_decoding, n_over_1, cancelled, over_cap, budget_exhausted, no_worker, corrupt_output …
    reason: str
    tokens: int  # number of tokens accepted until then


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestsRejected(FrontendObservation):
    """A number of requests were rejected in one time window, because they were shed, not admitted or over a limit."""

    model: str
    count: int  # number of requests
    reason: str
    tier: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BusyThresholdsSet(FrontendObservation):
    """An operator or client set, through this frontend, the thresholds above which a model's workers count as busy.

    A field that is None keeps its value.
    """

    model: str
    active_decode_blocks: float | None = None  # share of a rank's KV blocks, 0 to 1
    active_prefill_tokens: int | None = None  # prompt tokens that are not prefilled yet
    # prompt tokens not prefilled yet, as a multiple of the prompt tokens of one engine step
    active_prefill_tokens_frac: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestExposed(FrontendObservation):
    """The tokens at positions `first` to `last` (from 0, inclusive) of this request came from a worker that a canary has
    convicted.

    A conviction applies to all DP ranks of a worker. The event `canary_failed` names the rank that failed, and `rank` is the
    one that generated these tokens.
    """

    request: str
    model: str
    worker: str
    instance: str
    first: int  # position of the first such token in the answer, counted from 0
    last: int  # position of the last such token, inclusive
    finished: bool
    action: Literal["continue", "restart", "error", "none"]
    rank: int | None = None  # the DP rank that generated the tokens; None: the worker has only one


@dataclass(frozen=True, slots=True, kw_only=True)
class ExposureUnknown(FrontendObservation):
    """This frontend does not know which requests the worker served in this span, because it restarted or its memory was
    full."""

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
    position: Literal["closed", "open", "half_open"]  # position after the transition
    ago_ms: float  # time from the transition until the event was published, by the frontend's clock
    reason: str  # why the breaker opened; fleet_breaker_closed: the fleet's breaker reset it; empty: a trial began or passed


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendBreakersMoved(FrontendObservation):
    """All transitions of this frontend's own breakers within one second, in order.

    These breakers affect only this frontend's requests, and no decider reads this event.
    """

    moves: tuple[BreakerMove, ...]  # the first 200 transitions
    dropped: int  # number of further transitions


@dataclass(frozen=True, slots=True, kw_only=True)
class PanicBegan(FrontendObservation):
    """This frontend now ignores its own breakers for a model.

    Its breakers had excluded all reachable workers, or less than half (by default) of the model's weight was left for requests.
    """

    model: str
    routable_share: float  # routable share of the model's weight, 0 to 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PanicEnded(FrontendObservation):
    """Enough of a model's weight is routable again, so this frontend respects its own breakers again."""

    model: str
    routable_share: float  # routable share of the model's weight, 0 to 1
