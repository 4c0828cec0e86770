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
LINEAGE_PART = 8  # of a canary key
KIND_PARTS = (0, 3, 6, 7)  # of a canary key: model, engine, size of group, device
UNMARKED = "@unmarked"  # suffix of the canary id of unmarked probes; the id of their golden precedes it
TopK = tuple[tuple[int, float], ...]  # (token id, logprob), best first, of one position


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryResult(WorkerObservation):
    """The base of a probe's outcome. One probe is one fact, however many attempts it took.

    `sent_under` is the number of the last decision that the prober had folded when it sent the (first) probe. It identifies a
    result from before a breaker's trial.
    """

    canary_key: str
    canary: str
    check_type: CheckType
    sent_under: int  # number of the last decision that the prober had folded
    sent_at: datetime  # the prober's clock
    latency_ms: float
    attempts: int = 1  # how often the probe was sent
    rank: int | None = None  # the DP rank that was probed; None: the worker has only one
    temperature: float | None = None  # sampling temperature of the answer; None: greedy


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryPassed(CanaryResult):
    """A probe passed: right tokens, right logits, in time. `distance` is the largest logprob difference from the golden."""

    distance: float = 0.0  # largest logprob difference from the golden


@dataclass(frozen=True, slots=True, kw_only=True)
class CanarySlow(CanaryResult):
    """A probe passed, but slowly: right tokens and logits, at more than three times the baseline latency."""

    baseline_ms: float
    distance: float = 0.0  # largest logprob difference from the golden


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryFailed(CanaryResult):
    """A probe failed. `confirmed`: an immediate repetition of the same canary gave the same kind of wrong answer.

    `golden` says what the answer was compared with. An `agreed` golden convicts. A `provisional` one convicts only the
    worker that gave it. `none` convicts no worker.
    """

    reason: CanaryReason
    confirmed: bool
    golden: Literal["agreed", "provisional", "none"] = "none"
    expected: tuple[int, ...] = ()
    got: tuple[int, ...] = ()
    distance: float | None = None  # largest logprob difference from the golden
    detail: str = ""
    whole: bool = False  # `got` and `top_k` are the complete answer: it is a vote against an agreed golden
    top_k: tuple[TopK, ...] = ()  # per position of a complete answer
    engine_went_on: bool = False  # timeout: the worker's engine answered other requests meanwhile

    @property
    def golden_canary(self) -> str:
        """The canary that has the golden of the same weights: sampled and unmarked probes have none themselves."""
        if self.temperature is None and not self.canary.endswith(UNMARKED):
            return self.canary
        return self.canary.rpartition("@")[0] or self.canary


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenProposed(WorkerObservation):
    """A worker answered a canary that has no golden yet, or the operator configured an answer (`configured`)."""

    canary_key: str
    canary: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    top_k: tuple[TopK, ...]
    margin: float  # smallest top-1/top-2 logprob difference over the answer
    tolerance: float  # allowed difference of one logprob; 0.0: compare tokens only
    configured: bool = False
    asked: int = 0  # tokens requested; some upstreams report fewer. 0: as many as in `tokens`


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenDisputed(WorkerObservation):
    """This worker's confirmed answer differs from a golden that only `proposed_by` has given: one of them is wrong.

    With `proposed_by` = `configured`, the answer contradicts the configured golden, which no worker has confirmed."""

    canary_key: str
    canary: str
    proposed_by: str
    tokens: tuple[int, ...]
    distance: float | None = None  # largest logprob difference from the golden
    rank: int | None = None  # the DP rank that was probed; None: the worker has only one


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenAnswer:
    """A golden that an operator supplies: the prompt and its right answer."""

    canary: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    top_k: tuple[TopK, ...] = ()
    tolerance: float = 0.0  # allowed difference of one logprob; 0.0: compare tokens only
    asked: int = 0  # tokens requested; 0: as many as in `tokens`


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenRequested(Commanded):
    """An operator requested that goldens be approved, retired or recorded again. A decision about each of them follows.

    `approve` makes agreed goldens of: the provisional goldens, the answers of `worker`, or `answers`. `retire`: the goldens no
    longer count. `record`: they no longer count, and the next answer of `worker` becomes the provisional golden.
    """

    entity: ClassVar[str] = "fleet"
    worker: str = ""  # the worker that gave the answers; empty: none
    instance: str = ""  # instance of that worker
    act: Literal["approve", "retire", "record"]
    canary_key: str
    canaries: tuple[str, ...]
    answers: tuple[GoldenAnswer, ...] = ()  # approve: used instead of workers' answers


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensUnlikely(WorkerObservation):
    """A worker drew tokens that are less likely than chance explains: its sampler may be broken. This is a warning, no proof.

    `canary`: sampled canaries found it; it does not convict, because no other worker could serve or confirm the comparison.
    `users`: the share of unlikely tokens in users' requests is higher than that of the worker's peers.
    """

    found_by: Literal["canary", "users"]
    canary: str = ""
    tokens: int  # tokens examined
    unlikely: int  # of these, unlikely ones
    peers_share: float  # share of unlikely tokens at the worker's peers
    probability: float  # probability that chance alone explains it
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
    """Return the key under which goldens are stored: answers are comparable only where all of this is equal (N23).

    `lineage` is what an engine reports about its weights and its computation; empty: nothing. Of a tokenizer's path only the last
    part counts: hosts keep the same model in different folders, and the revision identifies the folder's content.
    """
    folder = tokenizer.rstrip("/").rpartition("/")[2]
    parts = (model, revision, folder, engine, engine_version, dtype, f"tp{tp}", device)
    return "|".join((*parts, lineage) if lineage else parts)


def is_new_lineage(key: str, known: Collection[str]) -> bool:
    """Return whether a canary key with a lineage is not in `known`, while `known` has another lineage of the same kind.

    The same kind means the same model, engine, group size and device. A lineage is not new if the engine reported none before."""
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
