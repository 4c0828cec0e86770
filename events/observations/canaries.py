"""Observations of canaries (probes with a known right answer) and of goldens (the known answers)."""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar, Literal

from events.observations.workers import Commanded, WorkerObservation

CanaryReason = Literal[
    "no_response", "token_mismatch", "logit_drift", "latency_spike", "timeout", "exception", "non_finite"
]
CheckType = Literal["scheduled", "confirm", "trial", "join"]
LINEAGE_PART = 8  # index of the lineage in the parts of a canary key
# indices in a canary key of the parts that make its kind: model, engine, size of group, device
KIND_PARTS = (0, 3, 6, 7)
UNMARKED = "@unmarked"  # suffix of the canary id of unmarked probes; the id of their golden precedes it
TopK = tuple[tuple[int, float], ...]  # (token id, logprob), best first, of one position


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryResult(WorkerObservation):
    """The base of a probe's outcome. One probe is one fact, even if it took several attempts.

    `sent_under` is the number of the last decision that the prober had folded when it sent the first attempt. From this number
    a fold recognizes a result from before a breaker's trial.
    """

    canary_key: str
    canary: str
    check_type: CheckType
    sent_under: int  # number of the last decision that the prober had folded
    sent_at: datetime  # by the prober's clock
    latency_ms: float
    attempts: int = 1  # number of times that the probe was sent
    rank: int | None = None  # the DP rank that was probed; None: the worker has only one
    temperature: float | None = None  # sampling temperature of the answer; None: greedy


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryPassed(CanaryResult):
    """A probe passed, because the tokens and logits were right and the answer arrived in time. `distance` is the largest
    logprob difference from the golden."""

    distance: float = 0.0  # largest logprob difference from the golden


@dataclass(frozen=True, slots=True, kw_only=True)
class CanarySlow(CanaryResult):
    """A probe passed slowly. The tokens and logits were right, but the latency was more than three times the baseline."""

    baseline_ms: float
    distance: float = 0.0  # largest logprob difference from the golden


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryFailed(CanaryResult):
    """A probe failed. If `confirmed` is true, an immediate repetition of the same canary gave the same kind of wrong answer.

    `golden` is the kind of golden with which the answer was compared. A deviation from an `agreed` golden convicts. A deviation
    from a `provisional` golden convicts only the worker that gave that golden. `none` means that there was no golden, and
    convicts no worker.
    """

    reason: CanaryReason
    confirmed: bool
    golden: Literal["agreed", "provisional", "none"] = "none"
    expected: tuple[int, ...] = ()
    got: tuple[int, ...] = ()
    distance: float | None = None  # largest logprob difference from the golden
    detail: str = ""
    whole: bool = False  # `got` and `top_k` are the complete answer, so that the answer is a vote against an agreed golden
    top_k: tuple[TopK, ...] = ()  # for each position of a complete answer
    # with the reason timeout: the worker's engine answered other requests meanwhile
    engine_went_on: bool = False

    @property
    def golden_canary(self) -> str:
        """The id of the canary with the golden (the known right answer) that applies to this probe.

        Two kinds of probes have no golden under their own id `canary`: sampled ones (`temperature` is set), and unmarked ones,
        which the worker cannot distinguish from a user's request. For these, the result is the part of `canary` before the last
        `@`.
        """
        if self.temperature is None and not self.canary.endswith(UNMARKED):
            return self.canary
        return self.canary.rpartition("@")[0] or self.canary


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenProposed(WorkerObservation):
    """A worker answered a canary that has no golden yet, or the operator configured an answer (then `configured` is true)."""

    canary_key: str
    canary: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    top_k: tuple[TopK, ...]
    margin: float  # smallest top-1/top-2 logprob difference over the answer
    tolerance: float  # allowed difference of one logprob; 0.0: compare tokens only
    configured: bool = False
    asked: int = 0  # number of tokens requested; some upstreams report fewer. 0: as many as in `tokens`


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenDisputed(WorkerObservation):
    """This worker's confirmed answer differs from a golden that only the worker `proposed_by` has given. One of the two answers
    is wrong.

    If `proposed_by` is `configured`, the answer contradicts the configured golden, which no worker has confirmed.
    """

    canary_key: str
    canary: str
    proposed_by: str
    tokens: tuple[int, ...]
    distance: float | None = None  # largest logprob difference from the golden
    rank: int | None = None  # the DP rank that was probed; None: the worker has only one


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenAnswer:
    """A golden that an operator supplies: a canary's prompt and its right answer."""

    canary: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    top_k: tuple[TopK, ...] = ()
    tolerance: float = 0.0  # allowed difference of one logprob; 0.0: compare tokens only
    asked: int = 0  # number of tokens requested; 0: as many as in `tokens`


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenRequested(Commanded):
    """An operator requested that goldens be approved, retired or recorded again. A decision about each golden follows.

    With `act` = `approve`, answers become agreed goldens: those in `answers`; without `answers`, the last answers of `worker`;
    without `answers` and `worker`, the provisional goldens. With `retire`, the goldens are no longer used. With `record`, the
    goldens are no longer used, and the next answer of `worker` becomes the provisional golden.
    """

    entity: ClassVar[str] = "fleet"
    worker: str = ""  # the worker that gave the answers; empty: no worker
    instance: str = ""  # instance of that worker
    act: Literal["approve", "retire", "record"]
    canary_key: str
    canaries: tuple[str, ...]
    answers: tuple[GoldenAnswer, ...] = ()  # with approve: used instead of workers' answers


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensUnlikely(WorkerObservation):
    """A worker generated tokens that are less likely than chance explains, so its sampler may be broken. This is a warning, not
    a proof.

    If `found_by` is `canary`, the tokens are the worker's answer to a sampled canary. Such an answer convicts only under two
    conditions: a healthy peer with likely tokens can serve in the worker's place, and more peers gave likely tokens than
    unlikely ones. A peer is another worker of the same model. If `found_by` is `users`, the worker's share of unlikely tokens in
    users' requests is higher than that of its peers.
    """

    found_by: Literal["canary", "users"]
    canary: str = ""
    tokens: int  # number of tokens examined
    unlikely: int  # number of unlikely tokens among the examined ones
    peers_share: float  # share of unlikely tokens at the worker's peers, 0 to 1
    probability: float  # probability that chance alone explains the unlikely tokens
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
    """Return the key under which goldens (the known right answers) are stored. Two answers are comparable only if all parts of
    their keys are equal.

    docs/concepts/corrections.md gives the reason (N23). `lineage` is what an engine reports about its weights and its
    computation, or empty if it reports nothing. Only the last part of a tokenizer's path is used, because hosts keep the same
    model in different folders. The revision identifies the content of the folder.
    """
    folder = tokenizer.rstrip("/").rpartition("/")[2]
    parts = (model, revision, folder, engine, engine_version, dtype, f"tp{tp}", device)
    return "|".join((*parts, lineage) if lineage else parts)


def is_new_lineage(key: str, known: Collection[str]) -> bool:
    """Return whether a canary key has a new lineage (an engine's report about its weights and its computation).

    This is so if `known` lacks the key, but has a key with another lineage for the same model, engine, group size and device.
    The first lineage that an engine reports is not new.
    """
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
