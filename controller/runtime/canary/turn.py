"""The data of one probe, the facts about its verdict, and a worker's turn in the round robin."""

import math
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any, Literal

from controller.deciders.fleet import Worker
from controller.deciders.golden import CONFIGURED, Golden
from controller.runtime.canary.canary_set import CanarySet
from controller.runtime.canary.goldens import Canary, CanaryAnswer
from controller.runtime.canary.probe import Deadline, Verdict
from events.observations import (
    UNMARKED,
    CanaryFailed,
    CanaryPassed,
    CanaryReason,
    CanarySlow,
    CheckType,
    GoldenDisputed,
    GoldenProposed,
)

DETAIL_MAX = 300  # characters of an engine's message
NO_REASON: CanaryReason = "no_response"


@dataclass(frozen=True, slots=True)
class Probed:
    """The fields that all facts about a probe share: worker, canary, time, and the last decision before the probe was sent."""

    worker: str
    instance: str
    canary_key: str
    canary: str
    check_type: CheckType
    sent_under: int
    sent_at: datetime
    rank: int | None = None  # the DP rank that was probed; None: the worker has only one
    temperature: float | None = None  # None: not a sampled canary

    def _common(self, verdict: Verdict) -> dict[str, Any]:
        latency_ms = round(verdict.first.latency_ms, 3)
        return {**asdict(self), "latency_ms": latency_ms, "attempts": verdict.attempts}

    def passed(self, verdict: Verdict, baseline_ms: float | None) -> CanaryPassed | CanarySlow:
        """Return the fact of a right answer: CanarySlow if `baseline_ms` is given, else CanaryPassed.

        `baseline_ms` is given only if the latency was too long compared with this baseline.
        """
        distance = verdict.worst.distance or 0.0
        if baseline_ms is None:
            return CanaryPassed(**self._common(verdict), distance=distance)
        return CanarySlow(**self._common(verdict), distance=distance, baseline_ms=round(baseline_ms, 3))

    def failed(
        self, verdict: Verdict, golden: Golden | None, *, contested: bool = False
    ) -> CanaryFailed | GoldenDisputed:
        """Return the fact of a wrong or missing answer.

        The fact is GoldenDisputed if a confirmed wrong answer puts the golden in doubt rather than the worker. This is the case
        for another worker's provisional golden, and for a `contested` configured golden. Otherwise the fact is CanaryFailed.
        """
        answer, reason = verdict.first.answer, verdict.worst.reason or verdict.first.failure or NO_REASON
        wrong = reason in ("token_mismatch", "logit_drift")
        if wrong and verdict.confirmed and answer is not None and golden is not None:
            foreign = _standing(golden) == "provisional" and golden.proposed_by != self.worker
            if contested or foreign:
                return self._disputed(verdict, golden, answer)
        # unmarked questions have no golden
        whole = wrong and answer is not None and not answer.cut and not self.canary.endswith(UNMARKED)
        return CanaryFailed(
            **self._common(verdict),
            whole=whole and verdict.confirmed,
            top_k=answer.top_k if answer is not None and whole else (),
            reason=reason,
            confirmed=verdict.confirmed,
            golden=_standing(golden),
            expected=golden.tokens if golden is not None and wrong else (),
            got=answer.tokens if answer is not None else (),
            distance=_finite(verdict.worst.distance),
            engine_went_on=verdict.first.engine_went_on,
            detail=(verdict.worst.detail or verdict.first.detail)[:DETAIL_MAX],
        )

    def _disputed(self, verdict: Verdict, golden: Golden, answer: CanaryAnswer) -> GoldenDisputed:
        return GoldenDisputed(
            worker=self.worker,
            instance=self.instance,
            canary_key=self.canary_key,
            canary=self.canary,
            proposed_by=CONFIGURED if golden.configured else golden.proposed_by,
            tokens=answer.tokens,
            distance=_finite(verdict.worst.distance),
            rank=self.rank,
        )

    def proposed(self, canary: Canary, answer: CanaryAnswer, tolerance: float) -> GoldenProposed:
        """Return the proposal of this worker's answer as a golden. For a configured canary, its configured answer is proposed."""
        return GoldenProposed(
            worker=self.worker,
            instance=self.instance,
            canary_key=self.canary_key,
            canary=self.canary,
            prompt=canary.prompt,
            tokens=canary.expected or answer.tokens,
            top_k=() if canary.configured else answer.top_k,
            margin=0.0 if canary.configured else _finite(answer.margin) or 0.0,
            tolerance=0.0 if canary.configured or not answer.top_k else tolerance,
            configured=canary.configured,
            asked=len(answer.tokens) if answer.shortened else canary.max_tokens,
        )


@dataclass(slots=True)
class CanaryTurn:
    """The position of one worker instance in the round robin of its canaries."""

    number: int = 0  # number of canaries sent in the round robin
    rank: int = 0  # number of passed probes, which selects the DP rank; a failed rank is probed again
    asked: set[str] = field(default_factory=set)  # ids of canaries sent since the join or the last recheck
    first_round: bool = False  # whether some canary has not been sent since the join
    recheck: bool = False  # whether all canaries are being sent again at once, as votes on their goldens
    greedy_since: int = 0  # number of greedy canaries since the last sampled one
    sampled: int = 0  # number of sampled canaries sent

    def ask_all_again(self) -> None:
        """Start a recheck: the next probes send all canaries again, without waiting between them."""
        self.recheck, self.asked = True, set()


@dataclass(frozen=True, slots=True)
class Probe:
    """The immutable data of one probe of one worker."""

    worker: Worker
    canary_set: CanarySet
    canary: Canary
    check: CheckType
    probed: Probed
    deadline: Deadline
    rank: int = 0  # the DP rank that is probed
    marked: bool = True  # whether the request is marked as a canary, so that the worker knows it

    @property
    def name(self) -> str:
        return self.worker.joined.worker


def golden_of(proposal: GoldenProposed) -> Golden:
    """Return the golden that a proposal becomes in the fleet state."""
    return Golden(
        canary_key=proposal.canary_key,
        canary=proposal.canary,
        status="agreed" if proposal.configured else "provisional",
        prompt=proposal.prompt,
        tokens=proposal.tokens,
        top_k=proposal.top_k,
        margin=proposal.margin,
        tolerance=proposal.tolerance,
        proposed_by=proposal.worker,
        proposed_instance=proposal.instance,
        configured=proposal.configured,
        asked=proposal.asked,
    )


def _standing(golden: Golden | None) -> Literal["agreed", "provisional", "none"]:
    if golden is None or golden.status == "retired":
        return "none"
    return "agreed" if golden.configured else golden.status


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
