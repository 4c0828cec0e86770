"""Puts one canary to one worker and says on the journal what came of it. The canary loop decides whom and when.

    golden known ───▶ check: right, slow, wrong (asked again at once), or no answer
    golden unknown ─▶ record: an answer that repeats itself becomes the provisional golden

A candidate whose answer does not repeat itself is no canary; the next best one of the pool takes its place.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import structlog

from controller.deciders.fleet import Fleet, Worker
from controller.deciders.golden import Golden
from controller.runtime.canary.canary_set import CanarySet, open_calibration, open_canary_set
from controller.runtime.canary.facts import Probed, golden_of
from controller.runtime.canary.goldens import (
    Calibration,
    Canary,
    CanaryAnswer,
    ExpectedAnswer,
    GoldenDifference,
    compare,
)
from controller.runtime.canary.probe import Deadline, ProbeResult, Verdict, ask, ask_until_sure, question
from controller.runtime.canary.tools import Tools
from controller.runtime.settings import CanarySettings
from events.decisions import HealthStatus
from events.errors import HoldfastError
from events.observations import CanaryPassed, CanarySlow, CheckType, WorkerJoined

VOCABULARY_S = 30.0  # to read a tokenizer; the largest take a few seconds

Outcome = Literal["passed", "failed", "nothing"]
"""What a probe said; `nothing`: it was cut short, or the worker is leaving, or full."""

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class CanaryTurn:
    """Where one instance is in the round robin of its canaries."""

    number: int = 0
    rank: int = 0  # passed so far: the DP ranks are asked one after another, and one that has failed again
    asked: set[str] = field(default_factory=set)  # since it joined
    first_round: bool = False  # not every canary has been asked yet
    recheck: bool = False  # all canaries are asked again at once: its answers are votes on their goldens

    def ask_all_again(self) -> None:
        """Ask all canaries again at once."""
        self.recheck, self.asked = True, set()


@dataclass(frozen=True, slots=True)
class Probe:
    """One probe of one worker: everything about it that does not change meanwhile."""

    worker: Worker
    canary_set: CanarySet
    canary: Canary
    check: CheckType
    probed: Probed
    deadline: Deadline
    rank: int = 0  # the DP rank that is asked

    @property
    def name(self) -> str:
        return self.worker.joined.worker


class CanaryRunner:
    """Knows the canaries of every kind of worker, and what the right answers are."""

    def __init__(self, look: Callable[[], tuple[Fleet, int]], tools: Tools, settings: CanarySettings) -> None:
        self._look = look  # the shown fleet, and the number of the last decision in it
        self._tools = tools
        self._meter = tools.meter
        self._journal = tools.journal
        self._settings = settings
        self._sets: dict[str, CanarySet] = {}
        self._calibrations: dict[str, Calibration] = {}
        self._opening = asyncio.Lock()

    def learn(self, fact: CanaryPassed | CanarySlow) -> None:
        """Take the distance of a passed probe, whichever controller sent it, as a sample of healthy noise."""
        worker = self._look()[0].workers.get(fact.worker)
        if worker is not None and worker.health.status is HealthStatus.HEALTHY:
            self._calibration(fact.canary_key).add(fact.distance, fact.worker)

    def wants_samples(self, worker: Worker) -> bool:
        """Whether the tolerance for workers like this one is still to be calibrated, and this one can help."""
        if self._settings.tolerance is not None or worker.health.status is not HealthStatus.HEALTHY:
            return False
        return not self._calibration(worker.joined.canary_key).enough

    def _calibration(self, key: str) -> Calibration:
        return self._calibrations.setdefault(key, open_calibration(self._settings))

    def forget(self, worker: str) -> None:
        """Drop what was measured of a worker that is gone."""
        for canary_set in self._sets.values():
            canary_set.forget((worker,))
        for calibration in self._calibrations.values():
            calibration.forget(worker)

    async def probe(self, worker: Worker, turn: CanaryTurn, check: CheckType) -> Outcome:
        """Put the next canary to `worker`; exactly one fact about it is said unless the outcome is
        `nothing`."""
        canary_set = await self._canary_set(worker.joined)
        fleet, _ = self._look()
        if canary_set.wants_ranking(fleet) and not (canary_set.lock.locked() and canary_set.canaries(fleet)):
            async with canary_set.lock:
                outcome = await self._rank(canary_set, worker, check)
                if outcome is not None:
                    return outcome
        for _ in canary_set.pool:
            canary = self._next(turn, canary_set, worker)
            probing = self._begin(worker, canary_set, canary, check, turn.rank % max(1, worker.joined.dp))
            outcome = await self._probing(probing)
            if outcome is not None:
                turn.rank += outcome == "passed"
                return outcome
        return "failed"

    def _next(self, turn: CanaryTurn, canary_set: CanarySet, worker: Worker) -> Canary:
        """Return the next canary of the round robin. Who is in doubt is not asked what nobody has answered
        yet."""
        fleet, _ = self._look()
        canary_set.folded(fleet)
        canaries = canary_set.canaries(fleet)
        doubtful = worker.health.convicted or bool(worker.health.disputed)
        useful = tuple(c for c in canaries if canary_set.useful(fleet, c, worker.joined.worker, doubtful))
        canaries = useful or canaries
        if turn.first_round or turn.recheck:
            canary = next((c for c in canaries if c.id not in turn.asked), canaries[0])
            turn.asked.add(canary.id)
            left = any(c.id not in turn.asked for c in canaries)
            turn.first_round, turn.recheck = turn.first_round and left, turn.recheck and left
        else:
            dp = worker.joined.dp
            shift = turn.number // dp if dp > 1 else 0  # each rank is to be asked each of them
            canary = canaries[(turn.number + shift) % len(canaries)]
            turn.number += 1
        return canary

    async def _canary_set(self, joined: WorkerJoined) -> CanarySet:
        async with self._opening:
            canary_set = self._sets.get(joined.canary_key)
            if canary_set is None:
                canary_set = self._sets[joined.canary_key] = await self._opened(joined)
            return canary_set

    async def _opened(self, joined: WorkerJoined) -> CanarySet:
        calibration = self._calibration(joined.canary_key)
        try:
            async with asyncio.timeout(VOCABULARY_S):
                vocabulary = await self._tools.vocabulary(joined.tokenizer)
            return open_canary_set(joined, vocabulary, calibration, self._settings)
        except (HoldfastError, ValueError, TimeoutError) as error:
            log.warning("canary_tokenizer_missing", tokenizer=joined.tokenizer, error=str(error))
            return open_canary_set(joined, None, calibration, self._settings)

    def _begin(
        self, worker: Worker, canary_set: CanarySet, canary: Canary, check: CheckType, rank: int = 0
    ) -> Probe:
        joined, clock = worker.joined, self._tools.clock
        named, under = rank if joined.dp > 1 else None, self._look()[1]
        probed = Probed(
            joined.worker, joined.instance, canary_set.key, canary.id, check, under, clock.now(), named
        )
        s = self._settings
        deadline = Deadline(clock, clock.monotonic() + s.timeout_s, s.busy_s)
        return Probe(worker, canary_set, canary, check, probed, deadline, rank)

    # --- asking -------------------------------------------------------------------------------------------

    async def _once(
        self, probing: Probe, canary: Canary, check: CheckType, expected: ExpectedAnswer | None = None
    ) -> ProbeResult:
        """Ask one question, and measure it."""
        top_k = self._settings.top_k
        request = question(canary, top_k=top_k, ignore_eos=not canary.configured, rank=probing.rank)
        asked = await ask(self._tools.prober, probing.name, request, probing.deadline, expected)
        self._meter.asked(probing.name, check, asked.latency_ms / 1000)
        share = max(1, self._tools.running(probing.name))
        busy_s = (asked.latency_ms - asked.waited_ms) / 1000
        self._meter.spent(probing.name, busy_s * probing.worker.joined.tp / share)
        return asked

    async def _rank(self, canary_set: CanarySet, worker: Worker, check: CheckType) -> Outcome | None:
        """Ask a worker the whole pool at once, to choose from it. Return None once there is a choice."""
        if not canary_set.wants_ranking(self._look()[0]):
            return None  # another worker's answers have been ranked meanwhile
        probing = self._begin(worker, canary_set, canary_set.pool[0], check)
        asked = await asyncio.gather(*(self._once(probing, canary, check) for canary in canary_set.pool))
        answers = {
            c.id: a.answer for c, a in zip(canary_set.pool, asked, strict=True) if a.answer is not None
        }
        if order := canary_set.rank(answers):
            log.info(
                "canaries_chosen",
                key=canary_set.key,
                canaries=order[: self._settings.canaries],
                by=probing.name,
            )
            return None
        if canary_set.canaries(self._look()[0]):
            return None  # the goldens that there are will do, and will say what is wrong with this worker
        first = next((a for a in asked if a.answer is None), asked[0])
        if first.declined:
            return "nothing"
        reason: Literal["non_finite"] | None = None if first.failure else "non_finite"
        return self._fail(
            probing, Verdict(first, GoldenDifference(reason, None, first.detail), 1, False), None
        )

    async def _probing(self, probing: Probe) -> Outcome | None:
        """Check or record. Return None if this canary turned out to be none."""
        fleet, _ = self._look()
        golden = probing.canary_set.golden(fleet, probing.canary)
        if golden is None and probing.canary.configured:
            golden = self._propose(probing, CanaryAnswer(()))
        if golden is None:
            return await self._record(probing)
        return await self._check(probing, golden)

    async def _check(self, probing: Probe, golden: Golden) -> Outcome:
        async def once(again: bool) -> ProbeResult:
            check = "confirm" if again else probing.check
            # What contradicts a configured answer is heard to its end: it is compared with what others say. So is a
            # convicted worker, for its whole answer is its vote; of any other the first wrong token convicts sooner.
            heard_out = golden.configured or probing.worker.health.corrupt
            expected = None if heard_out else probing.canary_set.expected(golden)
            return await self._once(probing, probing.canary, check, expected)

        def judge(answer: CanaryAnswer) -> GoldenDifference:
            return probing.canary_set.judge(probing.canary, golden, answer)

        verdict = await ask_until_sure(once, judge, self._settings.max_retries)
        if verdict.first.declined or not self._stands(probing):
            return "nothing"
        if verdict.first.answer is None or verdict.worst.reason is not None:
            return self._fail(probing, verdict, golden)
        return self._pass(probing, verdict)

    async def _record(self, probing: Probe) -> Outcome | None:
        """Ask for an answer that nobody has given yet, twice, unless this worker has given it for the
        ranking."""
        first = await self._once(probing, probing.canary, probing.check)
        answer = first.answer or CanaryAnswer(())
        before, attempts = probing.canary_set.answer_before(probing.canary, answer), 1
        if before is None and first.answer is not None:
            again = await self._once(probing, probing.canary, "confirm")
            before, attempts = again.answer, 2
            first = first if before is not None else again
        if first.declined or not self._stands(probing):
            return "nothing"
        if first.answer is None or before is None:
            return self._fail(
                probing, Verdict(first, GoldenDifference(None, None, first.detail), attempts, False), None
            )
        found = compare(first.answer, tokens=before.tokens, top_k=before.top_k, tolerance=0.0)
        verdict = Verdict(first, found, attempts, found.reason == "token_mismatch")
        if found.reason == "token_mismatch" and probing.canary_set.spoil(probing.canary):
            log.info(
                "canary_spoilt", canary=probing.canary.id, key=probing.canary_set.key, worker=probing.name
            )
            return None
        if found.reason is not None:
            return self._fail(probing, verdict, None)
        golden = probing.canary_set.golden(self._look()[0], probing.canary)
        if golden is None:
            self._propose(probing, first.answer)
        elif golden.tokens != first.answer.tokens:
            return await self._check(probing, golden)  # another worker has answered meanwhile, otherwise
        return self._pass(probing, verdict)

    # --- saying -------------------------------------------------------------------------------------------

    def _stands(self, probing: Probe) -> bool:
        """Whether this probe may still speak: the lease is held, and this life of the worker goes on."""
        worker = self._look()[0].workers.get(probing.name)
        same = (
            worker is not None and worker.joined.instance == probing.worker.joined.instance and worker.alive
        )
        return same and self._tools.leading()

    def _propose(self, probing: Probe, answer: CanaryAnswer) -> Golden:
        proposal = probing.probed.proposed(probing.canary, answer, probing.canary_set.calibration.tolerance)
        golden = golden_of(proposal)
        if not probing.canary_set.voted(self._look()[0], golden):
            self._journal.observe(proposal)
        probing.canary_set.propose(golden)
        return golden

    def _pass(self, probing: Probe, verdict: Verdict) -> Outcome:
        assert verdict.first.answer is not None
        tokens = len(verdict.first.answer.tokens)
        latency = verdict.first.latency_ms - verdict.first.waited_ms  # a queue is not the worker's slowness
        usual = probing.canary_set.usual(probing.name, probing.worker.joined.instance, tokens, latency)
        self._journal.observe(probing.probed.passed(verdict, usual))
        return "passed"

    def _fail(self, probing: Probe, verdict: Verdict, golden: Golden | None) -> Outcome:
        if not self._stands(probing):
            return "nothing"
        answer, contested = verdict.first.answer, False
        if golden is not None and answer is not None and not probing.worker.health.convicted:
            contested = probing.canary_set.contested(self._look()[0], golden, probing.name, answer)
        fact = probing.probed.failed(verdict, golden, contested=contested)
        log.warning(
            fact.kind(), worker=probing.name, canary=probing.canary.id, reason=getattr(fact, "reason", "")
        )
        self._journal.observe(fact)
        return "failed"
