"""The canaries of one canary key, and how their answers are judged.

The goldens themselves are in the fold. A set adds what only the prober needs: the questions in the model's tokens, the ranking
of the pool from which new goldens are chosen, the calibration of the tolerance, and the usual latencies. All of this may be
lost: a new leader rebuilds it by probing again.
"""

import asyncio
import random
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median, median_low

import structlog

from controller.deciders.fleet import Fleet
from controller.deciders.golden import Golden, confirmations, contradiction
from controller.router.load.work import PER_DOUBLING
from controller.runtime.canary.goldens import (
    POOL,
    TOKENS_MIN,
    Calibration,
    Canary,
    CanaryAnswer,
    ExpectedAnswer,
    GoldenDifference,
    HiddenTies,
    Vocabulary,
    compare,
    configured,
    covering,
    dealt,
    pool,
    rank,
    settled_part,
)
from controller.runtime.settings import CanarySettings
from events.observations import WorkerJoined

WINDOW = 20  # samples kept per worker and level
DRIFT_MAX = 1.5  # limit of a lone worker's baseline, relative to its warm-up
SPREADS = 5.0  # median absolute deviations above the median that still count as normal
PEERS_MIN = 2


@dataclass(slots=True)
class _Past:
    """One worker's samples at one load level, milliseconds."""

    recent: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    typical: float | None = None  # median of the recent samples, cached: each probe reads every peer's
    warm: float | None = None  # the median of the warm-up samples
    first: list[float] = field(default_factory=list)


@dataclass(slots=True)
class _Measured:
    """The measurements of one instance of a worker."""

    instance: str
    last: float | None = None  # its last latency, slow or not; None: only the cold sample so far
    levels: dict[int, _Past] = field(default_factory=dict)


@dataclass(slots=True)
class Baseline:
    """The latencies of comparable workers (one canary key, one answer length), relative to load, own past and peers.

    A latency is compared with others at the same load: a server that decodes 60 sequences takes longer for each step than an
    idle one, and is not broken. A load level is a power of two of the sequences in the worker's batch. The baseline is, in order:

        peers        the median of the other workers at the same level, if at least two of them were measured often enough
        own past     the worker's own median, capped at 1.5 times its warm-up, so that a gradual slowdown is detected (B13)
        lower level  the baseline of the nearest lower level, times PER_DOUBLING for each level in between

    A worker is slow only if its latency also exceeds the last latencies of most peers. If most became slow at once, the cause is
    common (an unseen load, a network), and no worker is to blame.

    The first sample of an instance is cold (caches, connections, compilation) and is never kept.
    """

    ratio: float = 3.0
    floor_ms: float = 50.0
    warmup: int = 5
    _workers: dict[Hashable, _Measured] = field(default_factory=dict)

    def judge(self, worker: Hashable, instance: str, latency_ms: float, load: int = 1) -> float | None:
        """Add one latency at a load of `load` sequences; return the baseline if the latency exceeds it by far, else None."""
        measured = self._workers.get(worker)
        if measured is None or measured.instance != instance:
            self._workers[worker] = _Measured(instance)
            return None
        level = _level(load)
        usual, spread = self._usual(worker, level)
        slow = usual is not None and self._exceeds(latency_ms, usual, spread)
        blamed = slow and not self._common(worker, latency_ms)
        self._keep(measured, level, latency_ms, slow)
        return usual if blamed else None

    def of(self, worker: Hashable, load: int = 1) -> float | None:
        """Return the expected latency of a canary on this worker, in milliseconds; None while that is unknown."""
        return self._usual(worker, _level(load))[0]

    def forget(self, workers: Iterable[Hashable]) -> None:
        """Drop workers that are gone: their latencies must not affect the baselines of the others."""
        for worker in workers:
            self._workers.pop(worker, None)

    def _usual(self, worker: Hashable, level: int) -> tuple[float | None, float]:
        """Return the baseline and its spread, at this level or from the nearest lower one."""
        for lower in range(level, -1, -1):
            usual, spread = self._at(worker, lower)
            if usual is not None:
                growth = PER_DOUBLING ** (level - lower)
                return usual * growth, spread * growth
        return None, 0.0

    def _at(self, worker: Hashable, level: int) -> tuple[float | None, float]:
        """Return the baseline of one level and its spread: from the peers, or from the worker's own warm-up."""
        peers = list(self._peers(worker, level))
        if len(peers) >= PEERS_MIN:
            return median(peers), _deviation(peers)
        measured = self._workers.get(worker)
        past = measured.levels.get(level) if measured is not None else None
        if past is None or past.warm is None:
            return None, 0.0
        own = min(past.typical, past.warm * DRIFT_MAX) if past.typical is not None else past.warm
        return own, _deviation(past.first)

    def _keep(self, measured: _Measured, level: int, latency_ms: float, slow: bool) -> None:
        measured.last = latency_ms
        past = measured.levels.setdefault(level, _Past())
        if past.warm is None:
            past.first.append(latency_ms)
            if len(past.first) >= self.warmup:
                past.warm = median(past.first)
        if not slow:
            past.recent.append(latency_ms)
            past.typical = median(past.recent)

    def _peers(self, worker: Hashable, level: int) -> Iterator[float]:
        for name, measured in self._workers.items():
            past = measured.levels.get(level)
            if name != worker and past is not None and past.warm is not None and past.typical is not None:
                yield past.typical

    def _common(self, worker: Hashable, latency_ms: float) -> bool:
        """Return whether the last latencies of most peers were about as long as this one."""
        last = [m.last for name, m in self._workers.items() if name != worker and m.last is not None]
        return len(last) >= PEERS_MIN and not self._exceeds(latency_ms, median_low(last), 0.0)

    def _exceeds(self, latency_ms: float, usual: float, spread: float) -> bool:
        return latency_ms > max(self.ratio * usual, usual + self.floor_ms, usual + SPREADS * spread)


def _level(load: int) -> int:
    """Return the load level of `load` sequences: 1 for 1, 2 for 2 and 3, 3 for 4 to 7."""
    return max(0, load).bit_length()


def _deviation(samples: Sequence[float]) -> float:
    """Return the median absolute deviation: the median distance of the samples from their median."""
    middle = median(samples)
    return median(abs(sample - middle) for sample in samples)


CONTEXT_SHARE = 2  # a covering question must fit this many times into the context
DEADLINE_SHARE = 4  # and its prefill must fit this many times into a probe's deadline
FALLBACK_TOKENS = (16, 1_000)  # ids that every language model's vocabulary has

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class CanarySet:
    """The prober's data about one canary key."""

    key: str
    settings: CanarySettings
    configured: tuple[Canary, ...]
    pool: tuple[Canary, ...]
    calibration: Calibration
    vocabulary: Vocabulary | None = None
    covers: bool = False  # each question of the pool is prefixed with a slice of the vocabulary
    ranking: tuple[str, ...] | None = None  # the pool's ids, best first; None: not ranked yet
    ranked: dict[str, CanaryAnswer] = field(default_factory=dict)
    proposed: dict[str, Golden] = field(default_factory=dict)  # not folded yet
    spoilt: set[str] = field(default_factory=set)  # candidates without a reproducible answer
    unchecked: set[str] = field(default_factory=set)  # configured ones with an uncheckable range
    ties: HiddenTies = field(default_factory=HiddenTies)  # of an engine without logprobs
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while the pool is ranked
    baselines: dict[int, Baseline] = field(default_factory=dict)  # by length of the answer

    def canaries(self, fleet: Fleet) -> tuple[Canary, ...]:
        """Return the set to probe with: configured ones, those with a golden, and the next best of the pool."""
        found = {canary.id: canary for canary in self.configured if not self._refuted(fleet, canary)}
        given = len(found)
        by_id = {canary.id: canary for canary in self.pool}
        for golden in self.goldens(fleet):
            candidate = by_id.get(golden.canary)
            if candidate is None and golden.approved:
                candidate = Canary(golden.canary, golden.prompt, 0)  # supplied by an operator
            if candidate is not None and golden.canary not in self.spoilt:
                found[golden.canary] = as_agreed(golden, candidate)
        for id in self.ranking or ():
            if len(found) >= max(self.settings.canaries, given):
                break
            if id not in self.spoilt:
                found.setdefault(id, by_id[id])
        return tuple(found.values())

    def goldens(self, fleet: Fleet) -> list[Golden]:
        """Return the goldens of this key, ordered by canary name."""
        return [fleet.goldens[k] for k in sorted(fleet.goldens) if k[0] == self.key]

    def golden(self, fleet: Fleet, canary: Canary) -> Golden | None:
        """Return a canary's golden: the fold's, or one that was just proposed. A retired one does not count."""
        golden = fleet.goldens.get((self.key, canary.id)) or self.proposed.get(canary.id)
        if golden is None or golden.status == "retired" or golden.prompt != canary.prompt:
            return None
        return golden

    def comparable(self, fleet: Fleet) -> list[tuple[Canary, Golden]]:
        """Return the canaries that sampled answers can be compared with: agreed goldens with the probability of each token."""
        found = ((canary, self.golden(fleet, canary)) for canary in self.canaries(fleet))
        return [(c, g) for c, g in found if g is not None and g.status == "agreed" and g.top_k]

    def propose(self, golden: Golden) -> None:
        """Keep a golden until it is folded, so that it is not proposed twice."""
        self.proposed[golden.canary] = golden

    def folded(self, fleet: Fleet) -> None:
        """Drop proposals that the fold contains by now."""
        for id in [id for id in self.proposed if (self.key, id) in fleet.goldens]:
            del self.proposed[id]

    def wants_ranking(self, fleet: Fleet) -> bool:
        """Whether there are too few canaries, and the pool has not been ranked yet."""
        return self.ranking is None and len(self.canaries(fleet)) < self.settings.canaries

    def rank(self, answers: dict[str, CanaryAnswer]) -> tuple[str, ...]:
        """Keep one worker's answers to the pool, and return the order of the canaries: best first."""
        order = rank(answers, tokens=self.settings.tokens)
        if order:
            self.ranking = dealt(order, self.pool) if self.covers else order
            self.ranked = answers
        return self.ranking or ()

    def answer_before(self, canary: Canary, answer: CanaryAnswer) -> CanaryAnswer | None:
        """Return the ranking's answer if it equals `answer`. A different one may come from another worker, or from one that
        was healed since: only a repetition can show whether this answer is reproducible."""
        before = self.ranked.get(canary.id)
        return before if before is not None and before.tokens == answer.tokens else None

    def useful(self, fleet: Fleet, canary: Canary, worker: str, doubtful: bool) -> bool:
        """Whether this worker's answer is informative. A doubtful worker's answer to a question without a golden is not. A worker
        that has voted in a dispute is probed again."""
        if self.golden(fleet, canary) is not None or canary.configured:
            return True
        retired = fleet.goldens.get((self.key, canary.id))
        recorder = fleet.workers.get(retired.moves.recorder) if retired is not None else None
        if recorder is not None and recorder.alive:
            return recorder.joined.worker == worker
        if retired is not None and any(vote.worker == worker for vote in retired.votes):
            return not fleet.workers[worker].health.convicted  # its weights may have changed since it voted
        return not doubtful

    def voted(self, fleet: Fleet, golden: Golden) -> bool:
        """Whether the journal already holds this answer of this worker as a vote."""
        known = fleet.goldens.get((self.key, golden.canary))
        votes = known.votes if known is not None else ()
        return any(v.worker == golden.proposed_by and v.tokens == golden.tokens for v in votes)

    def contested(self, fleet: Fleet, golden: Golden, worker: str, answer: CanaryAnswer) -> bool:
        """Whether a configured answer is in doubt when this worker contradicts it: no worker has confirmed it, and another worker
        has not answered yet, or gave the same answer as this one."""
        if not golden.configured or confirmations(golden):
            return False
        votes = {vote.worker: vote.tokens for vote in golden.votes}
        mine = contradiction(golden, answer.tokens)
        others = [
            name
            for name, other in fleet.workers.items()
            if name != worker
            and other.joined.canary_key == self.key
            and other.alive
            and not other.health.convicted
        ]
        return any(votes.get(name, mine) == mine for name in others)

    def _refuted(self, fleet: Fleet, canary: Canary) -> bool:
        """Whether the workers have outvoted this configured answer."""
        golden = fleet.goldens.get((self.key, canary.id))
        return golden is not None and golden.configured and golden.status == "retired"

    def judge(self, canary: Canary, golden: Golden, answer: CanaryAnswer) -> GoldenDifference:
        """Compare an answer with its golden."""
        if canary.top_logit_range is not None and not answer.top_k and canary.id not in self.unchecked:
            self.unchecked.add(canary.id)
            log.warning(
                "top_logit_range_unchecked",
                canary=canary.id,
                key=self.key,
                why="the engine gives no logprobs",
            )
        tie = self.ties.first(canary.id)
        if tie is not None and answer.tokens[:tie] == golden.tokens[:tie]:
            return GoldenDifference(None, None, f"compared up to the near tie at position {tie}")
        return compare(
            answer,
            tokens=golden.tokens,
            top_k=golden.top_k,
            tolerance=self.tolerance(golden),
            top_logit_range=canary.top_logit_range,
            tie_margin=self.tie_margin(golden),
        )

    def expected(self, golden: Golden) -> ExpectedAnswer:
        """Return the answer that an arriving answer is compared with."""
        return ExpectedAnswer(golden.tokens, golden.top_k, self.tolerance(golden))

    def tie_margin(self, golden: Golden) -> float:
        """Return the lead that a token must exceed to be evidence; 0.0: near ties are ignored."""
        return max(self.tolerance(golden), self.settings.tie_margin) if self.settings.tie_margin else 0.0

    def settled_part(
        self, canary: Canary, answer: CanaryAnswer, repeated: CanaryAnswer
    ) -> CanaryAnswer | None:
        """Return the part of an answer that can be a golden; None if repeating the question gave another answer."""
        if len(answer.tokens) != canary.max_tokens:  # some upstreams report fewer: positions are unknown
            return answer if repeated.tokens == answer.tokens else None
        return settled_part(answer, repeated, self.settings.margin_min)

    def note_tie(self, canary: Canary, position: int, worker: str) -> None:
        """Compare a canary only up to this position from now on: its recording was not reproducible there."""
        self.ties.note(canary.id, position, worker, alone=True)

    def note_flip(self, fleet: Fleet, canary: Canary, position: int, worker: str) -> bool:
        """Record that a worker without logprobs answered a canary in two ways; return whether that is a near tie."""
        others = any(
            name != worker and other.joined.canary_key == self.key and other.alive
            for name, other in fleet.workers.items()
        )
        tie = self.ties.note(canary.id, position, worker, alone=not others)
        if tie and position < TOKENS_MIN:
            self.spoil(canary)  # the part that can be compared is too short
        return tie

    def tolerance(self, golden: Golden) -> float:
        """Return the current tolerance: a golden without logprobs is compared by its tokens only."""
        return self.calibration.tolerance if golden.top_k else 0.0

    def usual(
        self, worker: Hashable, instance: str, tokens: int, latency_ms: float, load: int
    ) -> float | None:
        """Add a latency at a load of `load` sequences; return the baseline (ms) if the latency exceeds it by far, else None."""
        baseline = self.baselines.get(tokens)
        if baseline is None:
            s = self.settings
            baseline = self.baselines[tokens] = Baseline(s.slow_ratio, s.slow_floor_ms, s.warmup_samples)
        return baseline.judge(worker, instance, latency_ms, load)

    def forget(self, workers: Iterable[Hashable]) -> None:
        """Drop the latencies of workers that are gone."""
        names = tuple(workers)
        for baseline in self.baselines.values():
            baseline.forget(names)

    def spoil(self, canary: Canary) -> bool:
        """Exclude a candidate without a reproducible answer if the pool has a replacement; return whether it was excluded."""
        left = [id for id in self.ranking or () if id not in self.spoilt and id != canary.id]
        if len(left) < self.settings.canaries or canary.configured:
            return False
        self.spoilt.add(canary.id)
        return True


def as_agreed(golden: Golden, candidate: Canary) -> Canary:
    """Return the question in the form of its golden: the same prompt, and as many tokens as were compared."""
    prompt = tuple(golden.prompt)
    text = candidate.text if candidate.prompt == prompt else ""
    return Canary(golden.canary, prompt, golden.asked or len(golden.tokens), text=text)


def open_canary_set(
    joined: WorkerJoined, vocabulary: Vocabulary | None, calibration: Calibration, settings: CanarySettings
) -> CanarySet:
    """Return a fresh set for workers like `joined`.

    Without a tokenizer the questions are fixed token ids: a canary need not be text.
    """
    s, key = settings, joined.canary_key
    if vocabulary is None:
        return CanarySet(key, s, (), _ids_only(s), calibration)
    own = configured(s.canary_prompts, joined.model, vocabulary.encode)
    candidates = pool(vocabulary.encode, tokens=s.tokens, prompt_tokens_min=s.prompt_tokens_min)
    wide = covering(candidates, vocabulary.size)
    longest = max(len(canary.prompt) for canary in wide) + s.tokens
    quick = longest * DEADLINE_SHARE <= joined.profile.prefill_tokens_per_s * s.timeout_s
    covers = s.coverage and quick and longest * CONTEXT_SHARE <= joined.context_tokens
    return CanarySet(key, s, own, wide if covers else candidates, calibration, vocabulary, covers=covers)


def _ids_only(settings: CanarySettings) -> tuple[Canary, ...]:
    length = max(settings.prompt_tokens_min, 32)
    found = []
    for name in POOL:
        draw = random.Random(name)
        ids = tuple(draw.randrange(*FALLBACK_TOKENS) for _ in range(length))
        found.append(Canary(f"{name}-ids", ids, settings.tokens))
    return tuple(found)
