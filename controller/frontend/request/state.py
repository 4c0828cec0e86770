"""The state of one request: one answer in progress, over any number of workers.

Values only. `step` is the only writer; each field states its invariant. Workers are identified by `Server`, a value, so that
the simulator's requests use the same state machine.
"""

from math import inf
from typing import Any, Literal, NamedTuple, TypeAlias

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
    guided: dict[str, Any] | None
    # Any healthy worker returns the same tokens: with greedy sampling, or with Holdfast's own engines: their random numbers are
    # determined by seed and position. External servers restart their random numbers with each request.
    deterministic: bool
    names: BlockNames  # of the prompt's blocks
    tier: str = "standard"
    # at the worker; 0 is the best, and the priority of every request without deadline admission
    priority: int = 0
    # arrival by the frontend's monotonic clock; None: when it was first sent to a worker
    arrived: float | None = None
    first_token_by: float | None = None  # by the same clock, if it was admitted by a deadline
    cache_salt: str = ""
    overrides: RoutingOverrides = NO_OVERRIDES
    # the client's trace: passed on to the workers, and set on the events about this request
    traceparent: str = ""

    def __repr__(self) -> str:
        """Return a representation without client content, because it may appear in logs."""
        return f"<GenerationRequest {self.id}>"

    @property
    def tokens_max(self) -> int:
        """The tokens of the prompt and of the longest answer: a worker's context must hold them."""
        return len(self.prompt) + self.sampling.max_tokens


OnCorruption: TypeAlias = Literal["continue", "restart", "error"]
Phase: TypeAlias = Literal[
    "new",  # admitted, not sent yet
    "routing",  # the driver chooses a worker and sends the request; transient
    "running",  # on a worker
    "judging",  # its attempt has failed, and the driver judges the failure; transient
    "queued",  # no worker has room after all: in the admission queue again
    "rerouting",  # without a worker, until all that lost theirs in this turn of the event loop are placed
    "parked",  # waits for a worker to join, or until it may be sent at all
    "preempted",  # paused for a more urgent request
    "done",  # finished, failed or cancelled: the only final phase
]


class Attempt(msgspec.Struct, frozen=True):
    """One attempt at one worker."""

    server: Server
    number: int  # starts at 1; counts attempts that were sent and not turned away
    paid: bool  # it has cost budget
    before: "Attempt | None" = None


class Carried(NamedTuple):
    """The KV cache that was transferred with a request."""

    bytes: int  # over all shards
    blocks: int
    link: str


class Move(msgspec.Struct, frozen=True):
    """A migration that has started, before its first token has arrived."""

    failure: Failure
    original: Failure  # the first failure since the last token: the client's error if nothing helps
    source: Server
    since: float  # when the failure was noticed
    tokens: int  # tokens accepted by then
    carried: Carried | None = None  # None: it is recomputed
    predicted_ms: float | None = None
    refused: str = ""  # why a requested transfer did not take place


class TokenGap(NamedTuple):
    """The time in which no token can arrive, from the first failure to the next token."""

    since: float
    kind: str  # ongoing_request or new_request


class AnswerProgress(NamedTuple):
    """The progress of the answer at the time of an event."""

    accepted: int = 0  # accepted tokens, which will be replayed
    reached: int = 0  # those of them that the client may have received
    text: bool = False  # some output came as text, without token ids


class RequestTerms(msgspec.Struct, frozen=True):
    """The constant terms of a request."""

    prompt_tokens: int = 0
    max_tokens: int = 1
    migration_limit: int = 3  # attempts beyond the first that may cost budget
    max_seq_len: int | None = None  # tokens of prompt and answer above which it does not move
    forbidden: str = ""  # why it may not move once its client has a token: guided_decoding, n_over_1
    on_corruption: OnCorruption = "continue"
    reroute_s: float = 10.0  # longest wait for a worker to continue on
    first_token_s: float = inf  # longest wait for its first token, before the model's latency factor


class RequestState(msgspec.Struct, frozen=True):
    """Everything that determines what happens to a request next."""

    terms: RequestTerms
    began_at: float  # when it was first due to be sent
    phase: Phase = "new"

    # Attempts. `attempt` is set exactly in the phases running and judging.
    attempt: Attempt | None = None
    first: Attempt | None = None  # the oldest attempt that was not turned away
    last: Attempt | None = None  # the newest one; equals `attempt` if that is set
    has_output: bool = False  # the current attempt has produced a token
    begun: bool = False  # the answer has its first token; never unset
    free: bool = False  # the attempt being routed costs no budget

    # Budget: `spent` never exceeds `terms.migration_limit` when an attempt that costs budget is sent.
    spent: int = 0
    tried: frozenset[Key] = frozenset()  # workers that failed it
    failed: frozenset[Key] = frozenset()  # those of `tried` that never get it again
    # closed workers that turned it away: not asked again before the first token
    declined: frozenset[Key] = frozenset()
    missed: frozenset[Key] = frozenset()  # workers that were unreachable while it is being routed

    # The current disturbance. All are at their defaults until the first failure or move.
    disturbed: bool = False  # there was a failure or move; never unset
    move: Move | None = None  # None once the first token after the move has arrived
    outage: TokenGap | None = None  # None once a token has arrived
    spoilt: bool = False  # some accepted token may be wrong; never unset
    transfer_refused: str = ""  # why the last requested transfer of this attempt did not take place
    transfer: Transfer | None = None  # a KV transfer under way; only while running
    failing: "Failing | None" = None  # set exactly in the phase judging

    # Waiting.
    not_before: float = 0.0  # while parked: when it may be sent again
    waits_until: float = inf  # while parked: when waiting is given up
    put_off_s: float = 0.0  # total seconds for which it was preempted


class Failing(NamedTuple):
    """A failed attempt that is being judged."""

    failure: Failure
    # the failure that this attempt should have recovered from, if it produced nothing
    replaced: Failure | None
    not_carried: str  # why the KV cache was not transferred, although that was requested
    spoilt: bool
    answer: AnswerProgress


def refusal(state: RequestState, answer: AnswerProgress) -> str:
    """Return why the budget allows no further attempt; empty if it allows one. Exactly `max_seq_len` is still allowed."""
    terms = state.terms
    if terms.forbidden and answer.reached > 0:
        return terms.forbidden
    if over_cap(terms, answer.accepted):
        return "over_cap"
    if state.spent > terms.migration_limit:
        return "budget_exhausted"
    return ""


def budget_ended(state: RequestState) -> bool:
    """Return whether no further attempt is allowed, regardless of length. An attempt being sent counts."""
    spent = state.spent + (state.phase == "routing" and not state.free)
    return bool(state.terms.forbidden) or spent > state.terms.migration_limit


def stays(terms: RequestTerms, accepted: int) -> bool:
    """Return whether planned moves of a request are forbidden.

    A planned move costs no budget, but with migration disabled none takes place.
    """
    return bool(terms.forbidden) or terms.migration_limit == 0 or over_cap(terms, accepted)


def over_cap(terms: RequestTerms, accepted: int) -> bool:
    """Return whether prompt and answer are too long to move."""
    return terms.max_seq_len is not None and terms.prompt_tokens + accepted > terms.max_seq_len


def closed_to(state: RequestState) -> frozenset[Key]:
    """Return the workers that declined the request and are not tried again: each gets it once before the first token."""
    return frozenset() if state.begun else state.declined


def may_return(state: RequestState) -> bool:
    """Return whether some worker that failed the request may be tried again, because only its connection failed."""
    return state.tried > state.failed
