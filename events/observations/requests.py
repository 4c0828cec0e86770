"""What frontends observe of requests: those that were served, failed, moved, given up, turned away or answered wrong."""

from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar, Literal

from events.fact import Observation
from events.observations.workers import WorkerObservation


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
    weighed: int = 0  # tokens of these answers that came with logprobs, because clients asked for them
    unlikely: int = 0  # of these: below the frontend's logprob floor
    sampling: tuple[float, float, int] | None = (
        None  # the commonest (temperature, top_p, top_k) of these requests
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFailed(WorkerObservation):
    """A request failed on this worker; the client's own mistakes never count."""

    frontend: str
    failures_in_a_row: int  # of this worker at this frontend
    reason: str
    routed_under: int  # the last decision that the frontend had folded when it sent the request


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSuspected(WorkerObservation):
    """This worker fell (its connection broke, or its server's ended) before anything of this request's answer had come from
    it. Most such requests are innocent: until one like it brings a token they are tried with no other suspect beside them."""

    frontend: str
    request: str
    model: str
    fingerprint: (
        str  # the same for all requests of this prompt and form; nothing of the text can be read from it
    )
    reason: str  # how the worker fell: disconnected, upstream_lost
    prompt_tokens: int  # of the request, and what was accepted of its answer before


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPoisonous(WorkerObservation):
    """A request failed in the same way on two workers, of which this is one: it was not tried a third time, and its like is
    refused for a while. What it had counted against them is taken back."""

    frontend: str
    request: str
    model: str
    fingerprint: (
        str  # the same for all requests of this prompt and form; nothing of the text can be read from it
    )
    reason: str  # the way in which it fails
    prompt_tokens: int
    max_tokens: int
    guided: str  # the field that constrains the answer's form, if there is one
    failures_in_a_row: int  # of this worker at this frontend, without this request's
    routed_under: int  # the last decision that the frontend had folded when it sent the request
    refused_s: float  # for so long its like is refused


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
class RequestPreempted(FrontendObservation):
    """A running answer was put off, because a request of a better tier would have missed its deadline: its worker has freed
    it, and it goes on later. Nothing has failed."""

    request: str
    model: str
    tier: str
    worker: str
    instance: str
    tokens: int  # accepted until then


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestResumed(FrontendObservation):
    """An answer that was put off goes on: its next token has come."""

    request: str
    model: str
    source: str  # the worker that it was with before
    target: str
    target_instance: str
    tokens: int  # accepted before, and not computed anew
    gap_ms: float  # what the client saw: from the last token before to the next
    exact: bool  # False: the answer is approximate, it may differ from an undisturbed one from here on


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
class BusyThresholdsSet(FrontendObservation):
    """Somebody has set, through this frontend, from where on workers of a model are busy. What is missing stays as it is."""

    model: str
    active_decode_blocks: float | None = None  # share of a rank's KV blocks, 0 to 1
    active_prefill_tokens: int | None = None  # prompt tokens still to be read
    active_prefill_tokens_frac: float | None = None  # the same as a multiple of the tokens of one step


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
class BreakerMove:
    """One move of a frontend's own breaker of one worker."""

    worker: str
    instance: str
    position: Literal["closed", "open", "half_open"]  # after the move
    ago_ms: float  # before the event was published, by the frontend's clock
    reason: str  # of an opening; fleet_breaker_closed: the fleet's verdict reset it; empty: a trial began or passed


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendBreakersMoved(FrontendObservation):
    """All moves of this frontend's own breakers within one second, in order. They only keep this frontend's requests away from
    a worker: no decider reads them."""

    moves: tuple[BreakerMove, ...]  # the first 200
    dropped: int  # moves that did not fit


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
