"""The golden answer to one canary, and the votes of the workers that establish it.

    (none) ── proposed ──▶ provisional ── a second worker agrees ──▶ agreed
       │                        │                                      ▲
       │                        └── disputed ──▶ retired ── two agree ─┘
       │                                          └── no votes left: the next answer is provisional again
       └── configured ──▶ agreed ── more workers give one other answer than confirm it ──▶ retired, for good

    agreed ── outvoted ──▶ retired ── at once ──▶ agreed, with the answer that outvoted the former one

A golden belongs to a canary key: the same model, revision, tokenizer, engine, dtype, TP and device. An agreed golden can
convict any worker, a provisional golden only the worker that proposed it, and a retired golden no worker. Each worker has one
vote, its latest answer. Votes are kept after a dispute, so that the next worker's answer can decide the dispute.

A provisional golden convicts every instance of the worker that proposed it. If a later instance answers differently, at least
one of the two answers is wrong, and no other worker has shown which. An operator decides by resuming the convicted worker. The
resume disputes the golden, and the worker's next answer becomes the provisional golden.

A configured answer is agreed without votes. A typing error in a configured answer would convict the whole fleet, so workers
can dispute this answer until one worker has confirmed it. When enough workers agree on another answer, the configured
answer is retired, and no worker is in doubt.

An agreed golden is outvoted when live workers agree on another answer and have more voices (`votes.voices`) than the
workers that confirm the golden. This happens while new weights are deployed under the same name, on one server after
another. The answer of the outvoting workers is then agreed, and the old golden no longer convicts them. The new golden
convicts a worker that gives a third answer.

An operator can approve an answer, retire a golden, or request that a golden is recorded again (`GoldenRequested`). An
approved golden can be outvoted like any other golden.

The set of workers that disagree is not stored, but computed from the votes of live workers. When one of two disagreeing
workers dies, the other is no longer in doubt, because no live worker contradicts it.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import reduce
from typing import Literal

from controller.deciders.validation import STRICT, at_least
from controller.deciders.votes import (
    OPERATOR,
    GoldenMoves,
    OperatorRequest,
    Vote,
    Voter,
    agrees,
    camps,
    margin,
    outvoters,
    parting,
)
from events import observations as seen
from events.decisions import GoldenAgreed, GoldenRetired
from events.fact import Decision, Fact
from events.frozen import replace

CONFIGURED = "configured"
VOTES_MAX = 64  # kept per golden; the oldest is dropped first


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenPolicy:
    """Settings for agreeing on goldens, for outvoting them, and for holding back workers of a new lineage."""

    voters_min: int = 2  # number of workers that must give the same answer before it convicts others
    outvote: bool = True  # retire an agreed golden when more hosts contradict it alike than confirm it
    tie_margin: float = 0.1  # logprob lead up to which answers that diverge there count as the same answer
    # keep a worker of a new lineage out of service until its goldens are agreed
    hold_new_lineage: bool = True
    __pydantic_config__ = STRICT

    def __post_init__(self) -> None:
        at_least(2, voters_min=self.voters_min)
        at_least(0, tie_margin=self.tie_margin)


@dataclass(frozen=True, slots=True)
class Golden:
    """The golden answer to one canary for one canary key (model build and device), with the votes on it."""

    canary_key: str
    canary: str
    status: Literal["provisional", "agreed", "retired"] = "provisional"
    prompt: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    top_k: tuple[seen.TopK, ...] = ()
    margin: float = 0.0
    tolerance: float = 0.0  # of one logprob; 0: compare tokens only
    proposed_by: str = ""  # worker
    proposed_instance: str = ""
    configured: bool = False
    asked: int = 0  # tokens requested; 0: as many as the answer has
    votes: tuple[Vote, ...] = ()
    contradictions: tuple[Vote, ...] = ()  # complete answers that differ from it while it is agreed
    by: tuple[str, ...] = ()  # workers that agreed
    # workers that answered otherwise when it was agreed and have not passed since
    dissent: tuple[str, ...] = ()
    disputed_by: str = ""  # the disputing worker, until a decision has reacted
    moved_by: int = 0  # number of the last decision about it
    moves: GoldenMoves = field(default_factory=GoldenMoves)
    cause: str = ""

    @property
    def approved(self) -> bool:
        """Whether the golden is agreed because an operator approved it."""
        return self.status == "agreed" and any(name.split(" ")[0] == OPERATOR for name in self.by)


def evolve(state: Golden | None, fact: Fact, cause: str = "") -> Golden | None:
    """Return the golden after one fact about its canary and canary key; None while no answer is known."""
    match fact:
        case seen.GoldenProposed():
            return _proposed(state, fact, cause)
        case seen.CanaryPassed() | seen.CanarySlow() if state is not None:
            reconciled = _reconciled(state, fact)
            if state.configured and state.status == "agreed":
                return _confirmed(reconciled, fact, cause)
            return _passed(reconciled, fact, cause)
        case seen.CanaryFailed() if state is not None:
            return _contradicted(state, fact, cause)
        case seen.GoldenDisputed() if state is not None:
            vote = Vote(fact.worker, fact.instance, contradiction(state, fact.tokens), (), cause)
            votes = _cast(state.votes, vote)
            disputed_by = fact.worker if state.status == "provisional" else ""
            return replace(state, votes=votes, disputed_by=disputed_by, cause=cause)
        case seen.ResumeRequested() if state is not None:
            votes = tuple(vote for vote in state.votes if vote.worker != fact.worker)
            return replace(state, votes=votes, disputed_by=OPERATOR, cause=cause)
        case seen.GoldenRequested():
            return _requested(state, fact, cause)
        case GoldenAgreed() if state is not None:
            return _agreed(_approved(state), fact)
        case GoldenRetired() if state is not None:
            return _retired(state, fact)
        case _:
            return state


def _requested(state: Golden | None, fact: seen.GoldenRequested, cause: str) -> Golden | None:
    """Record an operator's request about this golden, unless the request would change nothing.

    `fact.answers` holds only the answer to this canary, if the operator supplies one.
    """
    if fact.act == "approve" and fact.answers:
        answer = fact.answers[0]
        request = OperatorRequest("approve", fact.by, answer=answer)
        vote = Vote(request.operator, "", answer.tokens, answer.top_k, cause)
        known = state or Golden(fact.canary_key, answer.canary, status="retired", prompt=answer.prompt)
        return _unless_agreed(known, replace(request, vote=vote), cause)
    if state is None:
        return None
    if fact.act == "record":
        return _with_request(state, OperatorRequest("record", fact.by, worker=fact.worker), cause)
    if fact.act == "retire":
        retired = state.status == "retired"
        return state if retired else _with_request(state, OperatorRequest("retire", fact.by), cause)
    if not fact.worker:
        provisional = state.status == "provisional"
        return _with_request(state, OperatorRequest("approve", fact.by), cause) if provisional else state
    given = last_answer(state, fact.worker, fact.instance)
    if given is None:
        return state
    return _unless_agreed(state, OperatorRequest("approve", fact.by, given), cause)


def last_answer(state: Golden, worker: str, instance: str) -> Vote | None:
    """Return a worker instance's last complete answer to this canary, as a vote; None if none is known."""
    known = (*state.contradictions, *state.votes)
    return next((vote for vote in known if (vote.worker, vote.instance) == (worker, instance)), None)


def _unless_agreed(state: Golden, wanted: OperatorRequest, cause: str) -> Golden:
    """Record a request to approve an answer, unless the golden is already agreed with this answer and prompt."""
    vote, asked = wanted.vote, wanted.answer
    same = vote is None or agrees(Vote("", "", state.tokens, state.top_k), vote, state.tolerance)
    if state.status == "agreed" and same and (asked is None or asked.prompt == state.prompt):
        return state
    return _with_request(state, wanted, cause)


def _with_request(state: Golden, wanted: OperatorRequest, cause: str) -> Golden:
    return replace(state, moves=replace(state.moves, wanted=wanted), cause=cause)


def _approved(state: Golden) -> Golden:
    """Return the golden with the answer that an operator's request approves.

    If the request supplies the answer's prompt, the golden gets this prompt too. If no request approves an answer, the golden
    is unchanged.
    """
    wanted = state.moves.wanted
    if wanted is None or wanted.act != "approve":
        return state
    if wanted.vote is not None:
        state = replace(state, votes=_cast(state.votes, wanted.vote), configured=False)
    if (answer := wanted.answer) is not None:
        state = replace(state, prompt=answer.prompt, asked=answer.asked, tolerance=answer.tolerance)
    return state


def _contradicted(state: Golden, fact: seen.CanaryFailed, cause: str) -> Golden:
    """Record a worker's complete answer that differs from the golden. One such answer is kept per worker.

    An answer is recorded only if the golden is agreed, or is provisional and was proposed by the same worker. Enough equal
    answers outvote an agreed golden. If a provisional golden is retired after another worker's dispute, the recorded answer
    becomes a vote.
    """
    open_ = state.status == "agreed" or (state.status == "provisional" and fact.worker == state.proposed_by)
    if not open_ or not fact.whole or fact.sent_under < state.moved_by:
        return state
    vote = Vote(fact.worker, fact.instance, contradiction(state, fact.got), fact.top_k, cause)
    if any(replace(vote, cause=known.cause) == known for known in state.contradictions):
        return state
    return replace(state, contradictions=_cast(state.contradictions, vote), cause=cause)


def _reconciled(state: Golden, fact: seen.CanaryPassed | seen.CanarySlow) -> Golden:
    """Remove a worker's recorded contradiction, because the worker has since given the agreed answer."""
    if not state.contradictions or fact.sent_under < state.moved_by:
        return state
    left = tuple(vote for vote in state.contradictions if vote.worker != fact.worker)
    return state if len(left) == len(state.contradictions) else replace(state, contradictions=left)


def _retired(state: Golden, fact: GoldenRetired) -> Golden:
    """Apply the retirement of a golden.

    If the golden was not outvoted, all votes remain, and the recorded contradictions become votes too. If a configured golden
    was outvoted, all votes remain. If any other golden was outvoted, only the votes of the workers that outvoted it remain, and
    the next decision makes their answer the golden.
    """
    wanted = state.moves.wanted
    retired = replace(
        state,
        status="retired",
        disputed_by="",
        contradictions=(),
        moved_by=fact.number,
        cause=f"decision:{fact.number}",
        moves=replace(
            state.moves,
            outvoted_by=fact.number if fact.outvoted_by else state.moves.outvoted_by,
            wanted=wanted if wanted is not None and wanted.act == "approve" else None,
            recorder=wanted.worker if wanted is not None else "",
        ),
    )
    if not fact.outvoted_by:
        revised = (replace(vote, revised=True) for vote in state.contradictions)
        return replace(retired, votes=reduce(_cast, revised, state.votes))
    if state.configured:
        return retired
    votes = tuple(vote for vote in state.contradictions if vote.worker in fact.outvoted_by)
    return replace(retired, votes=votes, dissent=(), by=())


def contradiction(golden: Golden, tokens: tuple[int, ...]) -> tuple[int, ...]:
    """Return the tokens to record as the vote of a worker that disputes the golden with the answer `tokens`.

    This is `tokens` itself, with one exception: the golden is configured and has the same tokens. The worker then disputes
    only the golden's logprobs and votes for no other answer, so the result is empty.
    """
    return () if golden.configured and tokens == golden.tokens else tokens


def _passed(state: Golden, fact: seen.CanaryPassed | seen.CanarySlow, cause: str) -> Golden:
    """Count a passed canary as a vote for the golden, if the golden is provisional and undisputed.

    A pass also ends the worker's dissent from an agreed golden. A worker that has voted for another answer gets no second
    vote. The reason is that a pass does not name the golden with which the answer was compared. A new leader may have used an
    older golden.
    """
    undisputed = state.status == "provisional" and not state.disputed_by
    open_to_votes = undisputed and fact.worker != state.proposed_by
    if fact.sent_under < state.moved_by or not (open_to_votes or fact.worker in state.dissent):
        return state
    own = next((v for v in state.votes if (v.worker, v.instance) == (fact.worker, fact.instance)), None)
    if own is not None and (own.passed or (open_to_votes and own.tokens != state.tokens)):
        return state  # it has already voted, or it answered otherwise before this golden existed
    vote = Vote(fact.worker, fact.instance, state.tokens, (), cause, passed=True)
    dissent = tuple(worker for worker in state.dissent if worker != fact.worker)
    return replace(state, votes=_cast(state.votes, vote), dissent=dissent, cause=cause)


def _confirmed(state: Golden, fact: seen.CanaryPassed | seen.CanarySlow, cause: str) -> Golden:
    """Record that a worker gave the configured answer.

    After the first confirmation the answer can no longer be disputed. At most two confirmations are needed, so further ones
    are not recorded.
    """
    dissent = tuple(worker for worker in state.dissent if worker != fact.worker)
    known = [vote for vote in confirmations(state) if vote.worker != fact.worker]
    if len(known) > 1 and dissent == state.dissent:
        return state
    vote = Vote(fact.worker, fact.instance, state.tokens, (), cause, passed=True)
    if dissent == state.dissent and any(replace(vote, cause=own.cause) == own for own in state.votes):
        return state
    return replace(state, votes=_cast(state.votes, vote), dissent=dissent, cause=cause)


def confirmations(state: Golden) -> list[Vote]:
    """Return the workers' votes for exactly the tokens of this golden. The vote of the configuration is left out."""
    return [vote for vote in state.votes if vote.tokens == state.tokens and vote.worker != CONFIGURED]


def _proposed(state: Golden | None, fact: seen.GoldenProposed, cause: str) -> Golden:
    """Apply a proposed answer as a vote. A proposal is ignored if the golden is already agreed.

    A new configured answer is the exception: it replaces even an agreed golden.
    """
    voter = CONFIGURED if fact.configured else fact.worker
    vote = Vote(voter, fact.instance, fact.tokens, fact.top_k, cause)
    if state is None:
        return _start_over(Golden(fact.canary_key, fact.canary), fact, vote)
    known = state.configured and state.tokens == fact.tokens
    if state.status == "agreed" and (known or not fact.configured):
        return state
    if state.status == "retired" and known:
        return state  # a retired configured answer is not revived by repeating it
    orphaned = state.status == "retired" and not state.votes
    if fact.configured or orphaned:
        return _start_over(state, fact, vote)
    return replace(state, votes=_cast(state.votes, vote), disputed_by=_disputed_by(state, vote), cause=cause)


def _start_over(state: Golden, fact: seen.GoldenProposed, vote: Vote) -> Golden:
    """Return a provisional, undisputed golden with the proposed answer.

    A configured answer drops all earlier votes, because these votes were not compared with the configured answer.
    """
    return replace(
        state,
        status="provisional",
        prompt=fact.prompt,
        tokens=fact.tokens,
        top_k=fact.top_k,
        margin=fact.margin,
        tolerance=fact.tolerance,
        proposed_by=vote.worker,
        proposed_instance=fact.instance,
        configured=fact.configured,
        asked=fact.asked,
        votes=(vote,) if fact.configured else _cast(state.votes, vote),
        contradictions=(),
        by=(),
        dissent=(),
        disputed_by="",
        cause=vote.cause,
        moves=replace(state.moves, wanted=None, recorder=""),
    )


def _disputed_by(state: Golden, vote: Vote) -> str:
    """Return the worker that disputes the provisional answer; empty if none does.

    The result is the worker of `vote` if `vote` contradicts the provisional answer. If not, it is the worker that was
    already recorded as disputing.
    """
    contradicts = state.status == "provisional" and vote.worker != state.proposed_by
    if contradicts and not agrees(Vote("", "", state.tokens, state.top_k), vote, state.tolerance):
        return vote.worker
    return state.disputed_by


def _cast(votes: tuple[Vote, ...], vote: Vote) -> tuple[Vote, ...]:
    """Return the votes with `vote` as the only vote of its worker. Beyond VOTES_MAX the oldest are dropped."""
    return (*(v for v in votes if v.worker != vote.worker), vote)[-VOTES_MAX:]


def _of(votes: Iterable[Vote], by: Collection[str]) -> list[Vote]:
    """Return the votes of the workers in `by`, those with logprobs first.

    If these workers agree on a golden, the first vote provides the golden's answer.
    """
    return sorted((v for v in votes if v.worker in by), key=lambda v: not v.top_k)


def _tied(votes: Iterable[Vote], by: Collection[str]) -> tuple[str, ...]:
    """Return the workers in `by` that agree on the golden, although their answers differ from it from a near tie on.

    A near tie is a position at which the golden's token and the worker's token have nearly equal logprobs.
    """
    first, *others = _of(votes, by) or [Vote("", "", ())]
    return tuple(sorted(v.worker for v in others if parting(first.tokens, v.tokens) is not None))


def _agreed(state: Golden, fact: GoldenAgreed) -> Golden:
    """Apply an agreement. The common answer of the workers in `fact.by` becomes the golden."""
    votes = _of(state.votes, fact.by)
    agreed = replace(
        state,
        status="agreed",
        by=fact.by,
        disputed_by="",
        moved_by=fact.number,
        cause=f"decision:{fact.number}",
        moves=replace(state.moves, wanted=None, recorder=""),
    )
    if not votes:
        return agreed
    first = votes[0]
    others = tuple(v.worker for v in state.votes if not agrees(first, v, state.tolerance))
    apart = (CONFIGURED, *fact.tied)
    agreed = replace(agreed, dissent=tuple(worker for worker in others if worker not in apart))
    if agrees(Vote("", "", state.tokens, state.top_k), first, state.tolerance):
        return agreed
    return replace(
        agreed,
        tokens=first.tokens,
        top_k=first.top_k,
        margin=margin(first.top_k),
        proposed_by=first.worker,
        proposed_instance=first.instance,
    )


def is_undisputed(state: Golden) -> bool:
    """Return whether this golden puts no worker in doubt, regardless of which workers are alive."""
    return not state.dissent if state.status == "agreed" else state.configured or len(state.votes) < 2


def at_odds(state: Golden, lives: Mapping[str, str]) -> tuple[str, ...]:
    """Return the workers in doubt over this golden. `lives` maps each live worker to its instance.

    Before an agreement, all voters are in doubt if their votes differ. After an agreement, only the workers that dissent are in
    doubt.
    """
    votes = [vote for vote in state.votes if lives.get(vote.worker) == vote.instance]
    if state.status == "agreed":
        return tuple(vote.worker for vote in votes if vote.worker in state.dissent)
    if state.configured:
        return ()  # the configuration is in doubt, not a worker
    return tuple(vote.worker for vote in votes) if len(camps(votes, state.tolerance)) > 1 else ()


def decide(
    policy: GoldenPolicy,
    state: Golden,
    now: datetime,
    voters: Callable[[], Mapping[str, Voter]] = dict,
) -> Iterator[Decision]:
    """Yield the decisions that are due: an agreement on this golden, its retirement, or both.

    `voters` returns the live workers of the golden's canary key, by name.
    """
    if state.moves.wanted is not None:
        yield from _decide_request(state, state.moves.wanted, now)
        return
    contradicted = state.status == "agreed" and len(state.contradictions) >= policy.voters_min
    if contradicted and policy.outvote:
        against, confirming = outvoters(
            state.contradictions, state.tolerance, voters(), policy.voters_min, policy.tie_margin
        )
        if against:
            yield from _outvoted(state, against, confirming, now)
            return
    if state.configured and state.status != "provisional":
        if state.status == "agreed" and (against := _against(policy, state)):
            yield _retirement(state, f"disputed: {', '.join(against)} against the configured answer", now)
        return
    if state.status == "agreed":
        return
    if by := _majority(policy, state):
        yield _agreement(state, by, _tied(state.votes, by), now)
    elif state.disputed_by and state.status == "provisional":
        yield _retirement(state, f"disputed: {state.disputed_by} against {state.proposed_by}", now)


def _decide_request(state: Golden, wanted: OperatorRequest, now: datetime) -> Iterator[Decision]:
    """Yield the decisions that carry out an operator's request.

    A golden that the request replaces or retires convicts no worker any more.
    """
    vote = wanted.vote
    agree = vote or Vote("", "", state.tokens, state.top_k)
    voted = {one.worker for one in state.votes if agrees(agree, one, state.tolerance)} - {CONFIGURED}
    by = tuple(dict.fromkeys((wanted.operator, *([vote.worker] if vote is not None else sorted(voted)))))
    replaces = state.status != "retired" and vote is not None
    if replaces or wanted.act != "approve":
        revisers = by if replaces else (wanted.operator,)
        yield _retirement(state, f"{wanted.act}: {wanted.operator}", now, revisers)
    if wanted.act == "approve":
        yield _agreement(state, by, (), now)


def _outvoted(
    state: Golden, against: tuple[str, ...], confirming: tuple[str, ...], now: datetime
) -> Iterator[Decision]:
    """Yield the retirement of an outvoted golden and the agreement on the answer that outvoted it.

    A configured golden is only retired, without an agreement.
    """
    why = f"outvoted: {', '.join(against)} against {', '.join(confirming) or 'no worker'}"
    yield _retirement(state, why, now, against)
    if not state.configured:
        yield _agreement(state, against, _tied(state.contradictions, against), now)


def _agreement(state: Golden, by: tuple[str, ...], tied: tuple[str, ...], now: datetime) -> GoldenAgreed:
    return GoldenAgreed(
        canary_key=state.canary_key,
        canary=state.canary,
        by=by,
        tied=tied,
        decided_at=now,
        cause=state.cause,
    )


def _retirement(
    state: Golden, reason: str, now: datetime, outvoted_by: tuple[str, ...] = ()
) -> GoldenRetired:
    return GoldenRetired(
        canary_key=state.canary_key,
        canary=state.canary,
        reason=reason,
        outvoted_by=outvoted_by,
        decided_at=now,
        cause=state.cause,
    )


def _majority(policy: GoldenPolicy, state: Golden) -> tuple[str, ...]:
    """Return the workers that gave the most common answer.

    The result is empty if these workers are fewer than `voters_min`, or if another answer is as common. For a configured
    golden the result contains only CONFIGURED, because a configured answer needs no votes.
    """
    if state.configured:
        return (CONFIGURED,)
    found = camps(state.votes, state.tolerance, policy.tie_margin)
    sizes = sorted((len(camp) for camp in found), reverse=True)
    if not sizes or sizes[0] < policy.voters_min or (len(sizes) > 1 and sizes[1] == sizes[0]):
        return ()
    largest = next(camp for camp in found if len(camp) == sizes[0])
    return tuple(sorted(vote.worker for vote in largest))


def _against(policy: GoldenPolicy, state: Golden) -> tuple[str, ...]:
    """Return the workers that gave the most common answer other than the configured one.

    The result is empty if they are fewer than `voters_min`, or if as many or more workers confirm the configured answer.
    """
    others = [vote for vote in state.votes if vote.worker != CONFIGURED and vote.tokens != state.tokens]
    largest = max(camps(others, 0.0, policy.tie_margin), key=len, default=[])
    if len(largest) < policy.voters_min or len(largest) <= len(confirmations(state)):
        return ()
    return tuple(sorted(vote.worker for vote in largest))
