"""Groups the workers' votes on a canary's answer, and counts independent voices to outvote a golden.

Workers on one server or host, or of one broker account, can be wrong together, so they count as one voice. The number of
voices of several workers is the number of their distinct machines or of their distinct accounts, whichever is smaller.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from events.observations import GoldenAnswer, TopK


@dataclass(frozen=True, slots=True)
class Vote:
    """One worker's answer to a canary."""

    worker: str
    instance: str
    tokens: tuple[int, ...]
    top_k: tuple[TopK, ...] = ()
    cause: str = ""
    revised: bool = False  # its answer has changed: it contradicts its own provisional golden
    passed: bool = False  # it passed the canary: the canary loop compared its answer with the golden


def camps(votes: Iterable[Vote], tolerance: float, tie_margin: float = 0.0) -> list[list[Vote]]:
    """Return the votes grouped by answer. The votes of a group agree with its first vote."""
    found: list[list[Vote]] = []
    for vote in votes:
        camp = next((camp for camp in found if agrees(camp[0], vote, tolerance, tie_margin)), None)
        if camp is None:
            found.append([vote])
        else:
            camp.append(vote)
    return found


def agrees(one: Vote, other: Vote, tolerance: float, tie_margin: float = 0.0) -> bool:
    """Return whether two answers count as the same.

    Their tokens must be equal, and logprobs must be within `tolerance` where both answers have them. With a `tie_margin`,
    answers may also diverge at a near tie. The tokens after such a near tie are not compared.
    """
    place = parting(one.tokens, other.tokens)
    if place is None:
        if len(one.tokens) != len(other.tokens):
            return False
    elif not (_is_tie(one, other, place, tie_margin) and _is_tie(other, one, place, tie_margin)):
        return False
    if tolerance <= 0 or not one.top_k or not other.top_k:
        return True
    return distance(one.top_k[:place], other.top_k[:place]) <= tolerance


def parting(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the first position at which two answers have different tokens.

    None means that the answers are equal, or that one is a prefix of the other.
    """
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)


def _is_tie(own: Vote, other: Vote, place: int, tie_margin: float) -> bool:
    """Return whether `own` rates the tokens of both answers at position `place` as nearly equally likely.

    The logprobs of the two tokens may differ by at most `tie_margin`.
    """
    if tie_margin <= 0 or place >= len(own.top_k):
        return False
    listed = dict(own.top_k[place])
    mine, theirs = listed.get(own.tokens[place]), listed.get(other.tokens[place])
    return mine is not None and theirs is not None and abs(mine - theirs) <= tie_margin


def distance(one: Sequence[TopK], other: Sequence[TopK]) -> float:
    """Return the largest logprob difference between two answers; 0 if no token can be compared.

    A token is compared if both answers list it at the same position.
    """
    worst = 0.0
    for mine, theirs in zip(one, other, strict=False):
        listed = dict(theirs)
        for token, logprob in mine:
            if token in listed:
                worst = max(worst, abs(logprob - listed[token]))
    return worst


def margin(top_k: Sequence[TopK]) -> float:
    """Return the smallest logprob difference, over an answer's positions, between the two most likely tokens.

    The result is 0 if any position lists fewer than two tokens, or if there are no positions.
    """
    return min((top[0][1] - top[1][1] if len(top) > 1 else 0.0 for top in top_k), default=0.0)


@dataclass(frozen=True, slots=True)
class Voter:
    """A live worker that may vote on a golden."""

    instance: str
    place: str  # where its answers are computed: the address of a server, or a host
    account: str  # its broker account
    confirms: bool  # this instance has passed this canary and is not convicted


def voices(workers: Iterable[str], voters: Mapping[str, Voter]) -> int:
    """Return the number of independent voices of these workers. Workers that are not in `voters` are ignored.

    This is the number of their distinct machines or of their distinct broker accounts, whichever is smaller.
    """
    known = [voters[name] for name in workers if name in voters]
    return min(len({voter.place for voter in known}), len({voter.account for voter in known}))


def outvoters(
    contradictions: Iterable[Vote],
    tolerance: float,
    voters: Mapping[str, Voter],
    voices_min: int,
    tie_margin: float = 0.0,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the workers that outvote an agreed golden with one common answer, and those that confirm the golden.

    Both are empty if the golden is not outvoted. Only votes of the workers' current instances count. The workers with the
    common answer need at least `voices_min` voices. They also need more voices than the confirming workers, and more than the
    workers with any other answer.
    """
    votes = [vote for vote in contradictions if _present(vote, voters)]
    against = {vote.worker for vote in votes}
    confirming = sorted(name for name, voter in voters.items() if voter.confirms and name not in against)
    found = camps(votes, tolerance, tie_margin)
    counted = [(voices((vote.worker for vote in camp), voters), camp) for camp in found]
    counted.sort(key=lambda one: one[0], reverse=True)
    most = counted[0][0] if counted else 0
    rival = counted[1][0] if len(counted) > 1 else 0
    if most < voices_min or most <= max(rival, voices(confirming, voters)):
        return (), ()
    return tuple(sorted(vote.worker for vote in counted[0][1])), tuple(confirming)


def _present(vote: Vote, voters: Mapping[str, Voter]) -> bool:
    voter = voters.get(vote.worker)
    return voter is not None and voter.instance == vote.instance


OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class OperatorRequest:
    """An operator's request about one golden: to approve it, to retire it, or to record it again."""

    act: Literal["approve", "retire", "record"]
    by: str  # the operator
    vote: Vote | None = None  # approve: the answer to make golden; None: the provisional one
    answer: GoldenAnswer | None = None  # approve: the prompt with that answer, if the operator supplies it
    worker: str = ""  # record: the worker that provides the next provisional golden

    @property
    def operator(self) -> str:
        """The name that stands for the operator where goldens and decisions list workers.

        No worker has this name, because worker names contain no space.
        """
        return f"{OPERATOR} {self.by}".rstrip()


@dataclass(frozen=True, slots=True)
class GoldenMoves:
    """What changes a golden besides votes: a decision that it was outvoted, and an operator's request."""

    outvoted_by: int = 0  # number of the decision by which another answer last outvoted it
    wanted: OperatorRequest | None = None  # an operator's request, until a decision has reacted
    recorder: str = ""  # the worker that provides the next provisional golden, by an operator's request
