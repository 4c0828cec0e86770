"""Sends one canary to one worker, and records the outcome on the journal.

    golden known ───▶ check: right, slow, wrong (repeated at once), or no answer
    golden unknown ─▶ record: an answer that is reproduced becomes the provisional golden

The canary loop decides when each worker is probed. If a candidate question has no reproducible answer, the next best question of
the pool replaces it.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import structlog

from controller.deciders.fleet import Fleet, Worker
from controller.deciders.golden import Golden
from controller.runtime.canary.canary_set import CanarySet, as_agreed, open_canary_set
from controller.runtime.canary.goldens import (
    Calibration,
    Canary,
    CanaryAnswer,
    ExpectedAnswer,
    GoldenDifference,
    compare,
)
from controller.runtime.canary.probe import (
    Deadline,
    ProbeResult,
    Verdict,
    ask,
    ask_until_sure,
    greedy,
    question,
)
from controller.runtime.canary.sampling_check import SamplingCheck, sampled_id
from controller.runtime.canary.tools import ProberDependencies
from controller.runtime.canary.turn import CanaryTurn, Probe, Probed, golden_of
from controller.runtime.canary.unmarked import UnmarkedCheck
from controller.runtime.settings import CanarySettings
from events.decisions import HealthStatus
from events.errors import HoldfastError
from events.observations import UNMARKED, CanaryFailed, CanaryPassed, CanarySlow, CheckType, WorkerJoined
from events.wire import Sampling

VOCABULARY_S = 30.0  # time limit for loading a tokenizer; the largest take a few seconds

Outcome = Literal["passed", "failed", "nothing"]
"""The outcome of a probe. `nothing`: the probe was cut short, or the worker is leaving or full."""

log = structlog.get_logger(__name__)


class CanaryRunner:
    """Runs probes. Keeps a canary set and a calibration for each canary key (workers with comparable answers)."""

    def __init__(
        self, look: Callable[[], tuple[Fleet, int]], tools: ProberDependencies, settings: CanarySettings
    ) -> None:
        self._look = look  # returns the current fleet and the number of its last decision
        self._tools = tools
        self._meter = tools.meter
        self._journal = tools.journal
        self._settings = settings
        self._sets: dict[str, CanarySet] = {}
        self._calibrations: dict[str, Calibration] = {}
        self._opening = asyncio.Lock()
        self.sampling = SamplingCheck(look, tools, settings)
        self.unmarked = UnmarkedCheck(lambda: look()[0], tools, settings, self._begin, self._ask_once)

    def learn(self, fact: CanaryPassed | CanarySlow) -> None:
        """Add the logprob distance of a passed probe to the calibration, if the worker is healthy.

        Probes of all controllers count. Sampled canaries and unmarked questions do not.
        """
        if fact.temperature is not None or fact.canary.endswith(UNMARKED):
            return
        worker = self._look()[0].workers.get(fact.worker)
        if worker is not None and worker.health.status is HealthStatus.HEALTHY:
            self._calibration(fact.canary_key).add(fact.distance, fact.worker)

    def wants_samples(self, worker: Worker) -> bool:
        """Whether the tolerance of the worker's canary key needs more samples, and this worker is healthy and can give them."""
        if self._settings.tolerance is not None or worker.health.status is not HealthStatus.HEALTHY:
            return False
        return not self._calibration(worker.joined.canary_key).enough

    def _calibration(self, key: str) -> Calibration:
        return self._calibrations.setdefault(key, Calibration(self._settings))

    def forget(self, worker: str) -> None:
        """Drop the measurements of a worker that is gone."""
        for canary_set in self._sets.values():
            canary_set.forget((worker,))
        for calibration in self._calibrations.values():
            calibration.forget(worker)
        self.sampling.forget(worker)
        self.unmarked.forget(worker)

    async def probe(self, worker: Worker, turn: CanaryTurn, check: CheckType) -> Outcome:
        """Send the next canary to `worker`, and return the outcome. Record one fact unless the outcome is "nothing"."""
        canary_set = await self._canary_set(worker.joined)
        fleet, _ = self._look()
        if canary_set.wants_ranking(fleet) and not (canary_set.lock.locked() and canary_set.canaries(fleet)):
            async with canary_set.lock:
                outcome = await self._rank(canary_set, worker, check)
                if outcome is not None:
                    return outcome
        if (outcome := await self._sample(worker, turn, canary_set, check)) is not None:
            return outcome
        turn.greedy_since += not turn.first_round
        for _ in canary_set.pool:
            canary = self._next(turn, canary_set, worker)
            probing = self._begin(worker, canary_set, canary, check, turn.rank % max(1, worker.joined.dp))
            outcome = await self._check_or_record(probing)
            if outcome is not None:
                turn.rank += outcome == "passed"
                return outcome
        return "failed"

    def _next(self, turn: CanaryTurn, canary_set: CanarySet, worker: Worker) -> Canary:
        """Return the worker's next canary in the round robin. A doubtful worker gets canaries with a golden, if there are any."""
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
            shift = turn.number // dp if dp > 1 else 0  # so that each DP rank gets each canary
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

    # --- probing ------------------------------------------------------------------------------------------

    async def _ask_once(
        self,
        probing: Probe,
        sampling: Sampling | None = None,
        expected: ExpectedAnswer | None = None,
        *,
        again: bool = False,
    ) -> ProbeResult:
        """Send a probe's question, record the latency and the GPU time, and return the result.

        `again` is true for a repetition that is to confirm an answer. The GPU time is the time without waiting, times the
        worker's GPUs (tensor parallelism), divided by the worker's running sequences.
        """
        drawn = sampling or greedy(probing.canary, self._settings.top_k)
        request = question(probing.canary, drawn, probing.worker, rank=probing.rank, marked=probing.marked)
        asked = await ask(self._tools.prober, probing.name, request, probing.deadline, expected)
        self._meter.count_probe(probing.name, "confirm" if again else probing.check, asked.latency_ms / 1000)
        share = max(1, self._tools.running(probing.name))
        busy_s = (asked.latency_ms - asked.waited_ms) / 1000
        self._meter.spent(probing.name, busy_s * probing.worker.joined.tp / share)
        return asked

    async def _sample(
        self, worker: Worker, turn: CanaryTurn, canary_set: CanarySet, check: CheckType
    ) -> Outcome | None:
        """Send a sampled canary, and return the outcome. None if no sampled canary is due, or no golden can judge it."""
        if turn.first_round or turn.recheck or not self.sampling.due(turn.greedy_since, worker):
            return None
        agreed = canary_set.comparable(self._look()[0])
        if not agreed:
            return None
        canary, golden = agreed[turn.sampled % len(agreed)]
        turn.greedy_since, turn.sampled = 0, turn.sampled + 1
        self.sampling.wanted.discard(worker.joined.worker)
        drawn = self.sampling.parameters
        probing = self._begin(worker, canary_set, canary, check, turn.rank % max(1, worker.joined.dp))

        async def once(sampling: Sampling, expected: ExpectedAnswer | None, again: bool) -> ProbeResult:
            return await self._ask_once(probing, sampling, expected, again=again)

        tolerance = canary_set.tolerance(golden)
        verdict = await self.sampling.ask(worker, canary, golden, drawn, tolerance, once)
        if verdict.first.declined or not self._still_valid(probing):
            return "nothing"
        if verdict.first.answer is None and not verdict.confirmed:
            return self._fail(probing, verdict, golden)
        probed = replace(probing.probed, canary=sampled_id(canary, drawn), temperature=drawn.temperature)
        probing = replace(probing, probed=probed)
        if not verdict.confirmed:
            return self._pass(probing, verdict)
        if self.sampling.may_convict(worker):
            return self._fail(probing, verdict, golden)
        self.sampling.report(worker, probed.canary, verdict)
        return "passed"

    async def _rank(self, canary_set: CanarySet, worker: Worker, check: CheckType) -> Outcome | None:
        """Send a worker all questions of the pool concurrently, and choose canaries by the worker's answers.

        Return None if canaries were chosen, or existed already. Otherwise return the outcome of this failed probe.
        """
        if not canary_set.wants_ranking(self._look()[0]):
            return None  # meanwhile, another worker's answers have been ranked
        probing = self._begin(worker, canary_set, canary_set.pool[0], check)
        probes = (replace(probing, canary=canary) for canary in canary_set.pool)
        asked = await asyncio.gather(*map(self._ask_once, probes))
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
            return None  # the existing goldens suffice to find this worker's fault
        first = next((a for a in asked if a.answer is None), asked[0])
        if first.declined:
            return "nothing"
        reason: Literal["non_finite"] | None = None if first.failure else "non_finite"
        return self._fail(
            probing, Verdict(first, GoldenDifference(reason, None, first.detail), 1, False), None
        )

    async def _check_or_record(self, probing: Probe) -> Outcome | None:
        """Send a canary, and check the answer against its golden, or record the answer if there is no golden.

        Return the outcome; None if this canary has turned out to be unusable.
        """
        fleet, _ = self._look()
        golden = probing.canary_set.golden(fleet, probing.canary)
        if golden is None and probing.canary.configured:
            golden = self._propose(probing, CanaryAnswer(()))
        if golden is None:
            return await self._record(probing)
        return await self._check(probing, golden)

    async def _check(self, probing: Probe, golden: Golden) -> Outcome:
        if not golden.configured:  # the golden may be shorter than the pool's question asks for
            probing = replace(probing, canary=as_agreed(golden, probing.canary))

        async def once(again: bool) -> ProbeResult:
            # An answer that contradicts a configured golden is read to its end, to be compared with other workers' answers.
            # A convicted worker's answer is read to its end because it is a vote. Otherwise the first wrong token suffices.
            heard_out = golden.configured or probing.worker.health.corrupt
            expected = None if heard_out else probing.canary_set.expected(golden)
            return await self._ask_once(probing, None, expected, again=again)

        def judge(answer: CanaryAnswer) -> GoldenDifference:
            return probing.canary_set.judge(probing.canary, golden, answer)

        s = self._settings
        verdict = await ask_until_sure(once, judge, s.max_retries, s.blind_repeats)
        if verdict.first.declined or not self._still_valid(probing):
            return "nothing"
        if verdict.both_ways and self._is_tie(probing, verdict):
            return self._pass(probing, verdict)
        if verdict.first.answer is None or verdict.worst.reason is not None:
            return self._fail(probing, verdict, golden)
        return self._pass(probing, verdict)

    async def _record(self, probing: Probe) -> Outcome | None:
        """Send a question that has no golden yet, and propose the answer as the golden if it is reproduced.

        If the answer has logprobs and equals the answer from the ranking of the pool, the question is sent only once. Return the
        outcome; None if the answer was not reproduced and the question is excluded.
        """
        first, before, attempts = await self._ask_repeatedly(probing)
        if first.declined or not self._still_valid(probing):
            return "nothing"
        if first.answer is None or before is None:
            return self._fail(
                probing, Verdict(first, GoldenDifference(None, None, first.detail), attempts, False), None
            )
        found = compare(first.answer, tokens=before.tokens, top_k=before.top_k, tolerance=0.0)
        part = probing.canary_set.settled_part(probing.canary, first.answer, before)
        if found.reason == "token_mismatch" and part is not None:
            found = replace(found, reason=None)  # the part before the near tie becomes the golden
        verdict = Verdict(first, found, attempts, found.reason == "token_mismatch")
        if found.reason == "token_mismatch" and probing.canary_set.spoil(probing.canary):
            log.info(
                "canary_spoilt", canary=probing.canary.id, key=probing.canary_set.key, worker=probing.name
            )
            return None
        if found.blind and found.position:  # from now on, only the part before this position is compared
            probing.canary_set.note_tie(probing.canary, found.position, probing.name)
        elif found.reason is not None:
            return self._fail(probing, verdict, None)
        part = part or first.answer
        golden = probing.canary_set.golden(self._look()[0], probing.canary)
        if golden is None:
            self._propose(probing, part)
        elif golden.tokens != part.tokens:  # meanwhile, another worker has given another answer
            return await self._check(probing, golden)
        return self._pass(probing, verdict)

    async def _ask_repeatedly(self, probing: Probe) -> tuple[ProbeResult, CanaryAnswer | None, int]:
        """Send a question repeatedly. Return the first result, another answer to compare it with, and the number of attempts.

        With logprobs, at most two attempts are made. Without logprobs a near tie shows only as a difference between answers, so
        the question is sent `blind_repeats` times in all, or until an answer differs. If an attempt gets no answer, the first
        value returned is the result of that attempt, and the second is None.
        """
        first = await self._ask_once(probing)
        if first.answer is None:
            return first, None, 1
        before, attempts = probing.canary_set.answer_before(probing.canary, first.answer), 1
        repeats = 2 if first.answer.top_k else self._settings.blind_repeats
        while attempts < repeats and (
            before is None or (repeats > 2 and before.tokens == first.answer.tokens)
        ):
            again = await self._ask_once(probing, again=True)
            attempts += 1
            if again.answer is None:
                return again, None, attempts
            before = again.answer
        return first, before, attempts

    def _is_tie(self, probing: Probe, verdict: Verdict) -> bool:
        """Record that a worker's answers without logprobs varied, and return whether that is a near tie rather than a fault."""
        position = verdict.worst.position
        assert position is not None
        canary_set, fleet = probing.canary_set, self._look()[0]
        return canary_set.note_flip(fleet, probing.canary, position, probing.name)

    async def probe_unmarked(self, worker: Worker) -> None:
        """Send a worker unmarked questions. If a conclusion is possible, record whether the worker's answers were right."""
        found = await self.unmarked.examine(worker, await self._canary_set(worker.joined))
        if found is None or not self._still_valid(found.probing):
            return
        probing = found.probing
        if found.golden is None:
            self._journal.observe(probing.probed.passed(found.verdict, None))
        else:
            self._fail(probing, found.verdict, found.golden)

    # --- recording ----------------------------------------------------------------------------------------

    def _still_valid(self, probing: Probe) -> bool:
        """Whether the outcome of this probe may still be recorded: this controller leads, and the probed instance is alive."""
        fleet, _ = self._look()
        lives = fleet.living(probing.name, probing.worker.joined.instance) is not None
        return lives and self._tools.leading()

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
        # time in a queue does not make a worker slow
        latency = verdict.first.latency_ms - verdict.first.waited_ms
        instance, load = probing.worker.joined.instance, self._tools.running(probing.name)
        usual = probing.canary_set.slow_baseline(probing.name, instance, tokens, latency, load)
        self._journal.observe(probing.probed.passed(verdict, usual))
        return "passed"

    def _fail(self, probing: Probe, verdict: Verdict, golden: Golden | None) -> Outcome:
        if not self._still_valid(probing):
            return "nothing"
        answer, contested = verdict.first.answer, False
        if golden is not None and answer is not None and not probing.worker.health.convicted:
            contested = probing.canary_set.contested(self._look()[0], golden, probing.name, answer)
        fact = probing.probed.failed(verdict, golden, contested=contested)
        log.warning(
            fact.kind(), worker=probing.name, canary=probing.probed.canary, reason=getattr(fact, "reason", "")
        )
        self._journal.observe(fact)
        if isinstance(fact, CanaryFailed) and fact.confirmed:
            self.sampling.note_wrong_answer(probing.name, probing.worker.joined.instance)
        return "failed"
