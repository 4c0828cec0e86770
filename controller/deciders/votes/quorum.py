"""The quorum that outvotes an agreed golden: independent voices, counted per host and broker account.

A voice is not a worker. Workers on one server or host, or of one broker account, can be wrong together, so they are one
voice. A group of workers has as many voices as it has distinct machines or distinct accounts, whichever is fewer.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from controller.deciders.votes.camps import Vote, camps


@dataclass(frozen=True, slots=True)
class Voter:
    """A live worker that has a vote."""

    instance: str
    place: str  # where its answers are computed: the address of a server, or a host
    account: str  # its broker account
    confirms: bool  # this instance has passed this canary and is not convicted


def voices(workers: Iterable[str], voters: Mapping[str, Voter]) -> int:
    """Return the number of independent voices of these workers."""
    known = [voters[name] for name in workers if name in voters]
    return min(len({voter.place for voter in known}), len({voter.account for voter in known}))


def outvoters(
    contradictions: Iterable[Vote],
    tolerance: float,
    voters: Mapping[str, Voter],
    voices_min: int,
    tie_margin: float = 0.0,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the workers that outvote an agreed golden with one common answer, and the workers that confirm the golden.

    Both are empty if the golden is not outvoted. Only votes of the workers' current instances count. The outvoters need at
    least `voices_min` voices. They also need more voices than confirm the golden, and more than any other contradicting answer.
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
