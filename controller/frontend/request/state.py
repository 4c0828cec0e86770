"""The state of one request: one answer that is being made, over any number of workers.

Values only. `step` is the only writer; each field states the invariant that it keeps. Workers are known by `Server`, a value,
so that the simulator's requests run through the same machine.
"""

from math import inf
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from controller.frontend.request.failures import Failure
from controller.frontend.request.routing_overrides import NO_OVERRIDES, RoutingOverrides
from controller.migration.live import Transfer
from controller.router.endpoints import Key, Lineage, Server
from events.blocks import BlockNames
from events.wire import Sampling


class GenerationRequest(
    msgspec.Struct, frozen=True, kw_only=True
):  # a frozen dataclass takes ten times as long to make
    """What is asked of the workers: the same on every attempt, but for what has been accepted already."""

    id: str
    model: str
    lineage: Lineage
    prompt: list[int]
    prompt_text: str  # empty if token ids were given
    sampling: Sampling
    guided: dict[str, Any] | None
    # The same tokens come from any healthy worker: greedy ones, or those of our own engines, whose random numbers
    # are named by the seed and the position. Other servers' random numbers begin anew with each request.
    deterministic: bool
    names: BlockNames  # of the prompt's blocks
    tier: str = "standard"
    priority: int = 0  # at the worker; 0 is the best, and that of every request without deadline admission
    arrived: float | None = (
        None  # when, by the frontend's monotonic clock; None: when it was sent to a worker first
    )
    first_token_by: float | None = None  # by the same clock, where it was let in by a deadline
    cache_salt: str = ""
    overrides: RoutingOverrides = NO_OVERRIDES
    traceparent: str = (
        ""  # the client's trace: it goes to the workers, and onto the events about this request
    )

    def __repr__(self) -> str:
        """Name the request. No log holds what a client has said."""
        return f"<GenerationRequest {self.id}>"

    @property
    def tokens_max(self) -> int:
        """The tokens of the prompt and of the longest answer: what a worker's context must hold."""
        return len(self.prompt) + self.sampling.max_tokens


OnCorruption: TypeAlias = Literal["continue", "restart", "error"]
Phase: TypeAlias = Literal[
    "new",  # admitted, not sent yet
    "routing",  # the driver chooses a worker and sends the request; never left standing
    "running",  # at a worker
    "judging",  # its attempt has failed, and the driver judges the failure; never left standing
    "queued",  # no worker has room after all: in the admission queue once more
    "rerouting",  # without a worker, until all that lost theirs in this turn of the loop are placed
    "parked",  # waits for a worker that may come, or until it may be sent at all
    "preempted",  # put off for a more urgent request
    "done",  # finished, failed or cancelled: the only final phase
]


class Attempt(msgspec.Struct, frozen=True):
    """One try at one worker."""

    server: Server
    number: int  # 1 for the first; one more with each that was sent and not turned away
    paid: bool  # it has cost budget
    before: "Attempt | None" = None


class Carried(NamedTuple):
    """The KV cache that came along with a request."""

    bytes: int  # over all shards
    blocks: int
    link: str


class Move(msgspec.Struct, frozen=True):
    """A migration that has begun and whose first token has not come yet."""

    failure: Failure
    original: Failure  # the first failure since a token came: the client is told this one if nothing helps
    source: Server
    since: float  # when the failure was noticed
    tokens: int  # accepted until then
    carried: Carried | None = None  # None: it is computed again
    predicted_ms: float | None = None
    refused: str = ""  # why a transfer that was wanted did not take place


class TokenGap(NamedTuple):
    """The time in which no token can come, from the first failure to the next token."""

    since: float
    kind: str  # ongoing_request or new_request


class AnswerProgress(NamedTuple):
    """How far the answer is when an event comes."""

    accepted: int = 0  # tokens that were accepted, and will be replayed
    reached: int = 0  # of these, those that the client may have seen
    text: bool = False  # some of it came as text, without token ids


class RequestTerms(msgspec.Struct, frozen=True):
    """What holds for a request from its beginning to its end."""

    prompt_tokens: int = 0
    max_tokens: int = 1
    migration_limit: int = 3  # attempts beyond the first that may cost budget
    max_seq_len: int | None = None  # tokens of prompt and answer, beyond which it does not move
    forbidden: str = ""  # why it may not move once its client has a token: guided_decoding, n_over_1
    on_corruption: OnCorruption = "continue"
    reroute_s: float = 10.0  # longest wait for a worker that continues it
    first_token_s: float = inf  # longest wait for its first token, before the model's latency factor


class RequestState(msgspec.Struct, frozen=True):
    """Everything that decides what happens to a request next."""

    terms: RequestTerms
    began_at: float  # when it was first to be sent
    phase: Phase = "new"

    # Attempts. `attempt` is set exactly in the phases running and judging.
    attempt: Attempt | None = None
    first: Attempt | None = None  # the oldest attempt that was not turned away
    last: Attempt | None = None  # the newest one; it is `attempt` where that is set
    has_output: bool = False  # the present attempt has brought a token
    begun: bool = False  # the answer has its first token; never unset
    free: bool = False  # the attempt that is being routed costs no budget

    # Budget: `spent` never exceeds `terms.migration_limit` when an attempt that costs budget is sent.
    spent: int = 0
    tried: frozenset[Key] = frozenset()  # workers that failed it
    failed: frozenset[Key] = frozenset()  # of `tried`, those that never get it again
    declined: frozenset[Key] = (
        frozenset()
    )  # closed workers that turned it away: not asked again before the first token
    missed: frozenset[Key] = frozenset()  # workers that could not be reached while it is being routed

    # The disturbance that is being made good. All are at their defaults until the first failure or move.
    disturbed: bool = False  # there was one; never unset
    move: Move | None = None  # None once the first token after the move has come
    outage: TokenGap | None = None  # None once a token has come
    spoilt: bool = False  # some accepted token may be wrong; never unset
    transfer_refused: str = ""  # why the last transfer that was wanted of this attempt did not take place
    transfer: Transfer | None = None  # a KV transfer under way; only while running
    failing: "Failing | None" = None  # set exactly in the phase judging

    # Waiting.
    not_before: float = 0.0  # while parked: when it may be sent again
    waits_until: float = inf  # while parked: when it is given up
    put_off_s: float = 0.0  # seconds in all for which more urgent requests went before it


class Failing(NamedTuple):
    """A failed attempt that is being judged."""

    failure: Failure
    replaced: Failure | None  # the failure that this attempt was to make good, if it has brought nothing
    not_carried: str  # why the KV cache did not come along, though that was wanted
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
    """Return whether no further attempt is allowed, however short the request is. An attempt that is being sent counts."""
    spent = state.spent + (state.phase == "routing" and not state.free)
    return bool(state.terms.forbidden) or spent > state.terms.migration_limit


def stays(terms: RequestTerms, accepted: int) -> bool:
    """Return whether a request does not move on purpose. Such a move costs no budget, but where migration is off none takes
    place."""
    return bool(terms.forbidden) or terms.migration_limit == 0 or over_cap(terms, accepted)


def over_cap(terms: RequestTerms, accepted: int) -> bool:
    """Return whether prompt and answer are longer than what may move."""
    return terms.max_seq_len is not None and terms.prompt_tokens + accepted > terms.max_seq_len


def closed_to(state: RequestState) -> frozenset[Key]:
    """Return the workers that declined the request and are not sent it again: each gets it once before the first token."""
    return frozenset() if state.begun else state.declined


def may_return(state: RequestState) -> bool:
    """Return whether some worker that failed it may be asked again, because only its connection had failed."""
    return state.tried > state.failed
