"""What is observed of a worker's answers to questions whose right answer is known: canaries and their goldens."""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar, Literal

from events.observations.workers import Commanded, WorkerObservation

CanaryReason = Literal[
    "no_response", "token_mismatch", "logit_drift", "latency_spike", "timeout", "exception", "non_finite"
]
CheckType = Literal["scheduled", "confirm", "trial", "join"]
LINEAGE_PART = 8  # of a canary key
KIND_PARTS = (0, 3, 6, 7)  # of a canary key: model, engine, size of group, device
UNMARKED = (
    "@unmarked"  # ends the canary id of what unmarked questions showed; the id of a golden stands before it
)
TopK = tuple[tuple[int, float], ...]  # (token id, logprob), best first, of one position


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryResult(WorkerObservation):
    """The base of a probe's outcome. One probe is one fact, however many attempts it took.

    `sent_under` is the number of the last decision that the prober had folded when it sent the (first) question, so
    that a result from before a breaker's trial is recognised by number.
    """

    canary_key: str
    canary: str
    check_type: CheckType
    sent_under: int  # number of the last decision that the prober had folded
    sent_at: datetime  # the prober's clock
    latency_ms: float
    attempts: int = 1  # times that it was asked
    rank: int | None = None  # the DP rank that was asked; None: its worker has only one
    temperature: float | None = None  # at which the answer was drawn; None: greedily


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryPassed(CanaryResult):
    """Right tokens, right logits, in time. `distance` is the largest logprob difference from the golden."""

    distance: float = 0.0  # the largest difference of a logprob from the golden's


@dataclass(frozen=True, slots=True, kw_only=True)
class CanarySlow(CanaryResult):
    """Right tokens and logits, but slower than three times the baseline. It passed; it is only slow."""

    baseline_ms: float
    distance: float = 0.0  # the largest difference of a logprob from the golden's


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryFailed(CanaryResult):
    """A probe that did not pass. `confirmed`: repeating the same canary at once gave the same kind of wrong answer.

    `golden` says what the answer was compared with: an `agreed` one convicts, a `provisional` one convicts only the
    worker that it came from, `none` convicts nobody.
    """

    reason: CanaryReason
    confirmed: bool
    golden: Literal["agreed", "provisional", "none"] = "none"
    expected: tuple[int, ...] = ()
    got: tuple[int, ...] = ()
    distance: float | None = None  # the largest difference of a logprob from the golden's
    detail: str = ""
    whole: bool = (
        False  # `got` is the whole answer, and `top_k` is of it: it counts as a vote against an agreed golden
    )
    top_k: tuple[TopK, ...] = ()  # of each position of a whole answer
    engine_went_on: bool = False  # timeout: the worker's engine answered other requests meanwhile

    @property
    def golden_canary(self) -> str:
        """The canary whose golden speaks of the same weights: sampled and unmarked questions have none of their own."""
        if self.temperature is None and not self.canary.endswith(UNMARKED):
            return self.canary
        return self.canary.rpartition("@")[0] or self.canary


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenProposed(WorkerObservation):
    """A worker's answer to a canary that has no golden yet; or the configured answer (`configured`)."""

    canary_key: str
    canary: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    top_k: tuple[TopK, ...]
    margin: float  # the smallest top-1/top-2 logprob difference over the answer
    tolerance: float  # of one logprob; 0.0: compare tokens only
    configured: bool = False
    asked: int = 0  # how many tokens; some upstreams tell of fewer. 0: as many as in `tokens`


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenDisputed(WorkerObservation):
    """This worker's confirmed answer differs from a golden that only `proposed_by` has given: one of them is wrong.

    `configured` instead of a worker: it contradicts the configured answer, which no worker has confirmed."""

    canary_key: str
    canary: str
    proposed_by: str
    tokens: tuple[int, ...]
    distance: float | None = None  # the largest difference of a logprob from the golden's
    rank: int | None = None  # the DP rank that was asked; None: its worker has only one


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenAnswer:
    """A golden that an operator brings: the question, and the answer that is to be right."""

    canary: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    top_k: tuple[TopK, ...] = ()
    tolerance: float = 0.0  # of one logprob; 0.0: compare tokens only
    asked: int = 0  # how many tokens; 0: as many as in `tokens`


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenRequested(Commanded):
    """An operator wants goldens approved, retired or recorded anew. A decision about each of them follows.

    `approve`: the provisional goldens, the answers of `worker`, or `answers`. `retire`: they no longer count. `record`: they
    no longer count, and the next answer of `worker` is the provisional golden.
    """

    entity: ClassVar[str] = "fleet"
    worker: str = ""  # whose answers are meant; empty: those of no worker
    instance: str = ""  # one life of it
    act: Literal["approve", "retire", "record"]
    canary_key: str
    canaries: tuple[str, ...]
    answers: tuple[GoldenAnswer, ...] = ()  # approve: instead of what workers have answered


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensUnlikely(WorkerObservation):
    """A worker drew tokens that are less likely than chance explains: its sampler may be broken. No proof; it asks for a look.

    `canary`: sampled canaries found it, and it does not convict, because no other worker could serve or confirm the comparison.
    `users`: the share of unlikely tokens among those of users' requests is beyond that of its peers.
    """

    found_by: Literal["canary", "users"]
    canary: str = ""
    tokens: int  # that were looked at
    unlikely: int  # of them
    peers_share: float  # of unlikely tokens, at its peers
    probability: float  # that chance alone explains it
    detail: str = ""


def canary_key(
    *,
    model: str,
    revision: str,
    tokenizer: str,
    engine: str,
    engine_version: str,
    dtype: str,
    tp: int,
    device: str,
    lineage: str = "",
) -> str:
    """Return the name under which goldens are kept: answers are comparable only where all of this is equal (N23).

    `lineage`: what an engine tells of its weights and how it computes; empty: it does not. Of a tokenizer's folder only the
    last part counts: hosts keep the same model in different places, and what is in the folder is known by the revision.
    """
    folder = tokenizer.rstrip("/").rpartition("/")[2]
    parts = (model, revision, folder, engine, engine_version, dtype, f"tp{tp}", device)
    return "|".join((*parts, lineage) if lineage else parts)


def is_new_lineage(key: str, known: Collection[str]) -> bool:
    """Return whether a canary key that tells its lineage is none of `known`, while these know another lineage of its kind: of
    the same model, engine, size of group and device. What an engine tells now and did not tell before is no difference."""
    parts = tuple(key.split("|"))
    if len(parts) <= LINEAGE_PART or key in known:
        return False
    others = (tuple(other.split("|")) for other in known)
    return any(
        len(other) >= LINEAGE_PART
        and [other[part] for part in KIND_PARTS] == [parts[part] for part in KIND_PARTS]
        and other != parts[:LINEAGE_PART]
        for other in others
    )
