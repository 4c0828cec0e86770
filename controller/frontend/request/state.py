"""The state of one request: one answer in progress, on any number of workers in succession.

All types here are immutable values. Only `step` creates new states. Workers are identified by the value `Server`, so that the
simulator's requests can use the same state machine.
"""

from math import inf
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from controller.frontend.request.failures import Failure
from controller.frontend.request.routing_overrides import NO_OVERRIDES, RoutingOverrides
from controller.migration.planned_move import Transfer
from controller.router.endpoints import Key, Lineage, Server
from events.blocks import BlockNames
from events.wire import Sampling


# A frozen dataclass takes ten times as long to create.
class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to the workers: the same on every attempt, except for the accepted tokens."""

    id: str
    model: str
    lineage: Lineage
    prompt: list[int]
    prompt_text: str  # empty if token ids were given
    sampling: Sampling
    guided: dict[str, object] | None
    # Any healthy worker returns the same tokens. This holds for greedy sampling, and for Holdfast's own engines, where seed and
    # position determine the random numbers. External servers restart their random numbers with each request.
    deterministic: bool
    names: BlockNames  # of the prompt's blocks
    tier: str = "standard"
    # priority at the worker; 0 is the best, and the priority of every request without deadline admission
    priority: int = 0
    # arrival by the frontend's monotonic clock; None: the time when the request was first due to be sent
    arrived: float | None = None
    first_token_by: float | None = None  # deadline by the same clock; None: admitted without a deadline
    cache_salt: str = ""
    overrides: RoutingOverrides = NO_OVERRIDES
    # the client's trace: passed on to the workers, and set on the events about this request
    traceparent: str = ""

    def __repr__(self) -> str:
        """Return a representation without client content, because it may appear in logs."""
        return f"<GenerationRequest {self.id}>"

    @property
    def tokens_max(self) -> int:
        """Number of tokens of the prompt and the longest possible answer: they must fit into a worker's context."""
        return len(self.prompt) + self.sampling.max_tokens


OnCorruption: TypeAlias = Literal["continue", "restart", "error"]
Phase: TypeAlias = Literal[
    "new",  # admitted, not sent yet
    "routing",  # the driver chooses a worker and sends the request; transient
    "running",  # on a worker
    "judging",  # its attempt has failed, and the driver judges the failure; transient
    "queued",  # admitted, but no worker had room: in the admission queue again
    "rerouting",  # waits for joint placement with all requests that lost their workers in this turn of the event loop
    "parked",  # waits for a worker, or until the request may be sent
    "preempted",  # paused for a more urgent request
    "done",  # finished, failed or cancelled: the only final phase
]


class Attempt(msgspec.Struct, frozen=True):
    """One attempt to serve the request on one worker."""

    server: Server
    number: int  # starts at 1; counts attempts that were sent and not turned away
    paid: bool  # the attempt has cost budget
    before: "Attempt | None" = None


class Carried(NamedTuple):
    """The KV cache that was transferred with a request."""

    bytes: int  # over all shards
    blocks: int
    link: str


class Move(msgspec.Struct, frozen=True):
    """A migration in progress, from its start until the first token of the new attempt."""

    failure: Failure
    original: Failure  # the first failure since the last token: the client's error if recovery fails
    source: Server
    since: float  # when the failure was noticed
    tokens: int  # tokens accepted by then
    carried: Carried | None = None  # None: the KV cache is recomputed
    predicted_ms: float | None = None
    refused: str = ""  # why a requested transfer did not take place


class TokenGap(NamedTuple):
    """An outage of the answer: the time without tokens from the first failure to the next token."""

    since: float
    kind: str  # ongoing_request or new_request


class AnswerProgress(NamedTuple):
    """The progress of the answer at the time of an event."""

    accepted: int = 0  # accepted tokens, which will be replayed
    reached: int = 0  # number of accepted tokens that the client may have received
    text: bool = False  # some output came as text, without token ids


class RequestTerms(msgspec.Struct, frozen=True):
    """The limits and policies of a request. They do not change while it is served."""

    prompt_tokens: int = 0
    max_tokens: int = 1
    migration_limit: int = 3  # attempts beyond the first that may cost budget
    max_seq_len: int | None = None  # tokens of prompt and answer above which the request does not move
    # why the request may not move once its client has a token: guided_decoding, n_over_1; empty: it may
    forbidden: str = ""
    on_corruption: OnCorruption = "continue"
    reroute_s: float = 10.0  # longest wait for a worker to continue on
    first_token_s: float = inf  # longest wait for the first token, before the model's latency factor


class RequestState(msgspec.Struct, frozen=True):
    """The complete state of one request in the state machine."""

    terms: RequestTerms
    began_at: float  # when the request was first due to be sent
    phase: Phase = "new"

    # Attempts. `attempt` is set in the phases running and judging, and only there.
    attempt: Attempt | None = None
    first: Attempt | None = None  # the oldest attempt that was not turned away
    last: Attempt | None = None  # the newest such attempt; equals `attempt` if that is set
    has_output: bool = False  # the current attempt has produced a token
    begun: bool = False  # the answer has its first token; never unset
    free: bool = False  # the attempt being routed costs no budget

    # Budget: `spent` never exceeds `terms.migration_limit` when an attempt that costs budget is sent.
    spent: int = 0
    tried: frozenset[Key] = frozenset()  # workers on which the request has failed
    failed: frozenset[Key] = frozenset()  # those of `tried` that never get the request again
    # closed workers that turned the request away: not tried again before the first token
    declined: frozenset[Key] = frozenset()
    missed: frozenset[Key] = frozenset()  # workers found unreachable during the current routing

    # Failures and moves. All fields are at their defaults until the first failure or move.
    disturbed: bool = False  # the request has had a failure or move; never unset
    move: Move | None = None  # None once the first token after the move has arrived
    outage: TokenGap | None = None  # None once a token has arrived
    spoilt: bool = False  # some accepted token may be wrong; never unset
    transfer_refused: str = ""  # why the last requested transfer of this attempt did not take place
    transfer: Transfer | None = None  # a KV transfer under way; only while running
    failing: "Failing | None" = None  # set in the phase judging, and only there

    # Waiting.
    not_before: float = 0.0  # while parked: time from which the request may be sent again
    waits_until: float = inf  # while parked: time at which the request ends with an error
    put_off_s: float = 0.0  # total seconds for which the request was preempted


class Failing(NamedTuple):
    """A failed attempt that is being judged."""

    failure: Failure
    # the earlier failure from which this attempt was to recover; None if it produced a token or was the first
    replaced: Failure | None
    not_carried: str  # why a requested KV transfer did not take place
    spoilt: bool
    answer: AnswerProgress


def refusal(state: RequestState, answer: AnswerProgress) -> str:
    """Return the reason why no further attempt is allowed; empty if one is. A length of exactly `max_seq_len` is allowed."""
    terms = state.terms
    if terms.forbidden and answer.reached > 0:
        return terms.forbidden
    if over_cap(terms, answer.accepted):
        return "over_cap"
    if state.spent > terms.migration_limit:
        return "budget_exhausted"
    return ""


def budget_ended(state: RequestState) -> bool:
    """Return whether no further attempt is allowed, regardless of length. An attempt that is being sent counts as spent."""
    spent = state.spent + (state.phase == "routing" and not state.free)
    return bool(state.terms.forbidden) or spent > state.terms.migration_limit


def stays(terms: RequestTerms, accepted: int) -> bool:
    """Return whether planned moves of a request are forbidden.

    A planned move costs no budget. With a migration limit of 0, planned moves are disabled too.
    """
    return bool(terms.forbidden) or terms.migration_limit == 0 or over_cap(terms, accepted)


def over_cap(terms: RequestTerms, accepted: int) -> bool:
    """Return whether prompt and answer are too long to move."""
    return terms.max_seq_len is not None and terms.prompt_tokens + accepted > terms.max_seq_len


def closed_to(state: RequestState) -> frozenset[Key]:
    """Return the closed workers that declined the request and are not tried again until its first token."""
    return frozenset() if state.begun else state.declined


def may_return(state: RequestState) -> bool:
    """Return whether a worker on which the request failed may be tried again, because only its connection failed."""
    return state.tried > state.failed
