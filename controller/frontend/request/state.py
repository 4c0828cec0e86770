"""The state of one request in the state machine: one answer in progress, on one worker after another.

All types in this module are immutable values. Only `step` creates new states. Workers are identified by the value
`Server`, so that the simulator's requests can use the same state machine.
"""

from math import inf
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from controller.frontend.request.answer_grammar import AnswerGrammar
from controller.frontend.request.failures import Failure
from controller.frontend.request.routing_overrides import NO_OVERRIDES, RoutingOverrides
from controller.migration.planned_move import Transfer
from controller.router.endpoints import Key, Lineage, Server
from events.blocks import BlockNames
from events.wire import Committed, Generate, ProxiedRequest, Sampling


# A frozen dataclass takes ten times as long to create.
class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request as it is sent to workers: the same on every attempt, except for the accepted tokens that are added."""

    id: str
    model: str
    lineage: Lineage
    prompt: list[int]
    prompt_text: str = ""  # empty if token ids were given
    sampling: Sampling
    guided: dict[str, object] | None = None  # the client's own field that constrains the answer's form
    grammar: AnswerGrammar | None = None  # the same constraint as a grammar, if it has one
    # Whether any healthy worker returns the same tokens. This holds for greedy sampling, and for Holdfast's own
    # engines, where seed and position determine the random numbers. External servers restart their random numbers
    # with each request.
    deterministic: bool
    names: BlockNames  # of the prompt's blocks
    tier: str = "standard"
    # priority at the worker: 0 is the best, and is used for every request without admission by deadlines
    priority: int = 0
    # arrival by the frontend's monotonic clock; None: the time when the request was first due to be sent
    arrived: float | None = None
    first_token_by: float | None = None  # deadline by the same clock; None: admitted without a deadline
    cache_salt: str = ""
    # The HTTP request to pass on to the server behind the worker; `prompt` then stands for its body. None: `prompt` is sent.
    proxied: ProxiedRequest | None = None
    adapter: str = ""  # the LoRA adapter; empty: the model without an adapter
    overrides: RoutingOverrides = NO_OVERRIDES
    # the client's trace, passed on to the workers and set on the events about this request
    traceparent: str = ""

    def __repr__(self) -> str:
        """Return a representation that may appear in logs, and therefore has no client content."""
        return f"<GenerationRequest {self.id}>"

    def passed_on(self, rank: int) -> Generate:
        """Return the frame of a proxied request for a worker and a DP rank."""
        return Generate(
            0, self.id, [], len(self.prompt), self.sampling,
            traceparent=self.traceparent, rank=rank, priority=self.priority, proxied=self.proxied,
            adapter=self.adapter,
        )  # fmt: skip

    @property
    def served(self) -> str:
        """The name under which the endpoint table lists the workers that may serve the request: its adapter, or its model."""
        return self.adapter or self.model

    @property
    def tokens_max(self) -> int:
        """Number of tokens of the prompt plus the longest possible answer, which must fit into a worker's context."""
        return len(self.prompt) + self.sampling.max_tokens


OnCorruption: TypeAlias = Literal["continue", "restart", "error"]
Phase: TypeAlias = Literal[
    "new",  # admitted, not sent yet
    "routing",  # the driver chooses a worker and sends the request; this phase ends within the same call
    "running",  # on a worker
    # the attempt has failed, and the driver judges the failure; this phase ends within the same call
    "judging",
    "queued",  # admitted, but no worker had a free slot, so it is in the admission queue again
    # waits for joint placement with all requests that lost their workers in this event-loop iteration
    "rerouting",
    "parked",  # waits for a worker, or until the request may be sent
    "preempted",  # paused for a more urgent request
    "done",  # finished, failed or cancelled: the only final phase
]


class Attempt(msgspec.Struct, frozen=True):
    """One attempt: the request was sent to one worker."""

    server: Server
    number: int  # starts at 1; counts attempts that were sent and not rejected for lack of capacity
    paid: bool  # whether the attempt has cost budget
    before: "Attempt | None" = None


class Move(msgspec.Struct, frozen=True):
    """A migration in progress, from its start until the first token of the new attempt."""

    failure: Failure
    # the first failure since the last token, which becomes the client's error if recovery fails
    original: Failure
    source: Server
    since: float  # time at which the failure was noticed
    tokens: int  # number of accepted tokens at that time
    carried: Committed | None = None  # the KV cache that was transferred; None: it is recomputed
    predicted_ms: float | None = None
    refused: str = ""  # why a requested transfer did not take place


class TokenGap(NamedTuple):
    """An outage of the answer: the time without tokens from the first failure to the next token."""

    since: float
    kind: str  # ongoing_request if the answer had tokens, otherwise new_request


class AnswerProgress(NamedTuple):
    """The numbers of accepted and written tokens of an answer at the time of an event."""

    accepted: int = 0  # number of accepted tokens, which are replayed after a move
    reached: int = 0  # number of accepted tokens that the client may have received
    text: bool = False  # whether some output came as text, without token ids
    stuck: str = ""  # why no other worker can continue the answer: guided_decoding; empty if one can


class RequestTerms(msgspec.Struct, frozen=True):
    """The limits and policies of a request. They do not change while the request is served."""

    prompt_tokens: int = 0
    max_tokens: int = 1
    migration_limit: int = 3  # number of attempts beyond the first that may cost budget
    max_seq_len: int | None = None  # tokens of prompt and answer above which the request does not move
    # why the request may not move once its client has a token: guided_decoding (a constraint without a grammar), n_over_1,
    # proxied; empty if it may move
    forbidden: str = ""
    on_corruption: OnCorruption = "continue"
    reroute_s: float = 10.0  # longest wait for a worker to continue on
    first_token_s: float = inf  # longest wait for the first token, before the model's latency factor


class RequestState(msgspec.Struct, frozen=True):
    """The complete state of one request in the state machine. Immutable."""

    terms: RequestTerms
    began_at: float  # time at which the request was first due to be sent
    phase: Phase = "new"

    attempt: Attempt | None = None  # set in the phases running and judging, and only there
    first: Attempt | None = None  # the oldest attempt that was not rejected for lack of capacity
    last: Attempt | None = None  # the newest such attempt; equals `attempt` if that is set
    has_output: bool = False  # the current attempt has produced a token
    begun: bool = False  # the answer has its first token; never unset
    free: bool = False  # the attempt being routed costs no budget

    # `spent` never exceeds `terms.migration_limit` when an attempt that costs budget is sent.
    spent: int = 0
    tried: frozenset[Key] = frozenset()  # workers on which the request has failed
    failed: frozenset[Key] = frozenset()  # workers in `tried` that never get the request again
    # workers that rejected the request and accept none for a while: not tried again before the first token
    declined: frozenset[Key] = frozenset()
    missed: frozenset[Key] = frozenset()  # workers found unreachable during the current routing

    # Failures and moves. All fields are at their defaults until the first failure or move.
    disturbed: bool = False  # the request has had a failure or move; never unset
    move: Move | None = None  # None once the first token after the move has arrived
    outage: TokenGap | None = None  # None once a token has arrived
    spoilt: bool = False  # whether some accepted token may be wrong; never unset
    transfer_refused: str = ""  # why the last requested transfer of this attempt did not take place
    transfer: Transfer | None = None  # a KV transfer under way; only while running
    failing: "Failing | None" = None  # set only in the phase judging

    # Waiting.
    not_before: float = 0.0  # while parked: time from which the request may be sent again
    waits_until: float = inf  # while parked: time at which the request ends with an error
    put_off_s: float = 0.0  # total seconds for which the request was preempted


class Failing(NamedTuple):
    """A failed attempt that the driver is judging, with the data needed afterwards."""

    failure: Failure
    # the earlier failure from which this attempt had to recover; None if the attempt produced a token or was the
    # first
    replaced: Failure | None
    not_carried: str  # why a requested KV transfer did not take place
    spoilt: bool
    answer: AnswerProgress


def refusal(state: RequestState, answer: AnswerProgress) -> str:
    """Return why no further attempt is allowed. Return an empty string if another attempt is allowed.

    A length of exactly `max_seq_len` is allowed.
    """
    terms = state.terms
    forbidden = terms.forbidden or answer.stuck
    if forbidden and answer.reached > 0:
        return forbidden
    if over_cap(terms, answer.accepted):
        return "over_cap"
    if state.spent > terms.migration_limit:
        return "budget_exhausted"
    return ""


def budget_ended(state: RequestState) -> bool:
    """Return whether the request may not be sent again, because its budget is spent or moves are forbidden.

    The length of the request does not matter here. An attempt that is being sent already counts as spent budget.
    """
    spent = state.spent + (state.phase == "routing" and not state.free)
    return bool(state.terms.forbidden) or spent > state.terms.migration_limit


def stays(terms: RequestTerms, accepted: int) -> bool:
    """Return whether planned moves of a request are forbidden.

    A planned move costs no budget, but a migration limit of 0 forbids planned moves too.
    """
    return bool(terms.forbidden) or terms.migration_limit == 0 or over_cap(terms, accepted)


def over_cap(terms: RequestTerms, accepted: int) -> bool:
    """Return whether prompt and answer together are too long to move."""
    return terms.max_seq_len is not None and terms.prompt_tokens + accepted > terms.max_seq_len


def closed_to(state: RequestState) -> frozenset[Key]:
    """Return the workers that are not tried again before the answer has a token, because they rejected the request."""
    return frozenset() if state.begun else state.declined


def may_return(state: RequestState) -> bool:
    """Return whether there is a worker that may be tried again, because only the connection to that worker failed."""
    return state.tried > state.failed
