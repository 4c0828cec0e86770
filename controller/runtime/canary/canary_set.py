"""Selects the canaries of one canary key, and judges the answers and latencies of the key's workers.

A canary key stands for workers with comparable answers (same model, engine and device). The goldens themselves are in the fleet
state folded from the journal. A canary set adds what only the prober needs: the questions in the model's tokens, the ranking of
the pool from which new canaries are chosen, the calibration of the tolerance, and the usual latencies. A new leading controller
lacks this data, and rebuilds it by probing again.
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

WINDOW = 20  # latencies kept per worker and load level
DRIFT_MAX = 1.5  # limit of a baseline from the worker's own latencies, relative to its warm-up
SPREADS = 5.0  # a latency counts as normal up to this many median absolute deviations above the median
PEERS_MIN = 2


@dataclass(slots=True)
class _Past:
    """The latencies of one worker at one load level, in milliseconds."""

    recent: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    # median of `recent`, cached because each probe reads the medians of all peers
    typical: float | None = None
    warm: float | None = None  # median of the warm-up latencies; None: the warm-up has not ended
    first: list[float] = field(default_factory=list)  # the warm-up latencies


@dataclass(slots=True)
class _Measured:
    """The latencies of one instance of a worker, by load level."""

    instance: str
    last: float | None = None  # the last latency, slow or not; None: only the cold one so far
    levels: dict[int, _Past] = field(default_factory=dict)


@dataclass(slots=True)
class Baseline:
    """Finds slow answers: compares a worker's canary latencies with those of its peers and with its own earlier ones.

    One `Baseline` covers the workers of one canary key and one answer length. A healthy server that decodes 60 sequences takes
    longer for each step than an idle server. So latencies are compared at the same load level, or scaled to it. The load levels
    are 1 sequence in the worker's batch, 2 to 3, 4 to 7, and so on. The baseline is the first of the following that exists:

        peers        the median of the other workers at the same level, if at least two of them were measured often enough
        own past     the worker's own median, capped at 1.5 times its warm-up median to detect a gradual slowdown
        lower level  the baseline of the nearest lower level, times PER_DOUBLING for each level of difference

    A worker is slow only if its latency also exceeds the last latencies of most peers. If most workers became slow at once, they
    have a common cause (an unseen load, the network), and no worker is blamed.

    The first latency of an instance is cold (caches, connections, compilation) and is never kept.
    """

    ratio: float = 3.0
    floor_ms: float = 50.0
    warmup: int = 5
    _workers: dict[Hashable, _Measured] = field(default_factory=dict)

    def judge(self, worker: Hashable, instance: str, latency_ms: float, load: int = 1) -> float | None:
        """Add a latency of a worker. Return the baseline in ms if the latency is too long, else None.

        `load` is the number of sequences in the worker's batch during the measurement. A latency is not too long if no baseline
        is known, or if most peers are equally slow.
        """
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
        """Return the expected latency of a canary on this worker with `load` sequences, in ms; None while it is unknown."""
        return self._usual(worker, _level(load))[0]

    def forget(self, workers: Iterable[Hashable]) -> None:
        """Drop the latencies of workers that are gone, because kept latencies would influence other workers' baselines."""
        for worker in workers:
            self._workers.pop(worker, None)

    def _usual(self, worker: Hashable, level: int) -> tuple[float | None, float]:
        """Return the baseline of this load level and its median absolute deviation, in ms.

        If this level has no baseline, scale both values from the nearest lower level with a baseline. (None, 0.0) if no level
        has a baseline.
        """
        for lower in range(level, -1, -1):
            usual, spread = self._at(worker, lower)
            if usual is not None:
                growth = PER_DOUBLING ** (level - lower)
                return usual * growth, spread * growth
        return None, 0.0

    def _at(self, worker: Hashable, level: int) -> tuple[float | None, float]:
        """Return the baseline of exactly this load level and its median absolute deviation, in ms.

        Both values are computed from the peers' latencies, or from the worker's own latencies if there are too few peers.
        (None, 0.0) if the worker has too few latencies as well.
        """
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
        """Return whether most peers' last latencies were about as long as `latency_ms`, or longer.

        If so, this worker is not to blame.
        """
        last = [m.last for name, m in self._workers.items() if name != worker and m.last is not None]
        return len(last) >= PEERS_MIN and not self._exceeds(latency_ms, median_low(last), 0.0)

    def _exceeds(self, latency_ms: float, usual: float, spread: float) -> bool:
        return latency_ms > max(self.ratio * usual, usual + self.floor_ms, usual + SPREADS * spread)


def _level(load: int) -> int:
    """Return the load level of `load` sequences: 0 for 0, 1 for 1, 2 for 2 and 3, 3 for 4 to 7, and so on."""
    return max(0, load).bit_length()


def _deviation(samples: Sequence[float]) -> float:
    """Return the median absolute deviation of the samples: the median of their distances from their median."""
    middle = median(samples)
    return median(abs(sample - middle) for sample in samples)


CONTEXT_SHARE = 2  # a covering question must fit this many times into the model's context
DEADLINE_SHARE = 4  # a covering question's prefill must fit this many times into a probe's deadline
FALLBACK_TOKENS = (16, 1_000)  # range of token ids that every language model's vocabulary has

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class CanarySet:
    """The canaries of one canary key (workers with comparable answers), and the data to choose them and judge answers."""

    key: str
    settings: CanarySettings
    configured: tuple[Canary, ...]
    pool: tuple[Canary, ...]
    calibration: Calibration
    vocabulary: Vocabulary | None = None
    covers: bool = False  # whether each question of the pool is prefixed with a slice of the vocabulary
    ranking: tuple[str, ...] | None = None  # the pool's ids, best first; None: not ranked yet
    ranked: dict[str, CanaryAnswer] = field(default_factory=dict)  # the answers behind the ranking, by id
    proposed: dict[str, Golden] = field(default_factory=dict)  # goldens that are not folded yet, by canary
    spoilt: set[str] = field(default_factory=set)  # ids of candidates without a reproducible answer
    unchecked: set[str] = field(default_factory=set)  # ids with a top_logit_range that cannot be checked
    ties: HiddenTies = field(default_factory=HiddenTies)  # near ties, for an engine without logprobs
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while the pool is ranked
    baselines: dict[int, Baseline] = field(default_factory=dict)  # by the number of tokens of an answer

    def canaries(self, fleet: Fleet) -> tuple[Canary, ...]:
        """Return the canaries to probe with: the configured ones, those with a golden, and the best-ranked others of the pool."""
        found = {canary.id: canary for canary in self.configured if not self._refuted(fleet, canary)}
        given = len(found)
        by_id = {canary.id: canary for canary in self.pool}
        for golden in self.goldens(fleet):
            candidate = by_id.get(golden.canary)
            if candidate is None and golden.approved:
                candidate = Canary(golden.canary, golden.prompt, 0)  # an operator supplied the question
            if candidate is not None and golden.canary not in self.spoilt:
                found[golden.canary] = as_agreed(golden, candidate)
        for id in self.ranking or ():
            if len(found) >= max(self.settings.canaries, given):
                break
            if id not in self.spoilt:
                found.setdefault(id, by_id[id])
        return tuple(found.values())

    def goldens(self, fleet: Fleet) -> list[Golden]:
        """Return the goldens of this canary key, retired ones included, ordered by canary id."""
        return [fleet.goldens[k] for k in sorted(fleet.goldens) if k[0] == self.key]

    def golden(self, fleet: Fleet, canary: Canary) -> Golden | None:
        """Return a canary's golden from the fleet state, or a proposed golden that is not yet in it.

        None if the canary has no golden, or if its golden is retired or was recorded for another prompt.
        """
        golden = fleet.goldens.get((self.key, canary.id)) or self.proposed.get(canary.id)
        if golden is None or golden.status == "retired" or golden.prompt != canary.prompt:
            return None
        return golden

    def comparable(self, fleet: Fleet) -> list[tuple[Canary, Golden]]:
        """Return each canary with its golden, if the golden can judge sampled answers (temperature above 0).

        A golden can judge sampled answers if it is agreed, not provisional, and has logprobs.
        """
        found = ((canary, self.golden(fleet, canary)) for canary in self.canaries(fleet))
        return [(c, g) for c, g in found if g is not None and g.status == "agreed" and g.top_k]

    def propose(self, golden: Golden) -> None:
        """Keep a proposed golden until the fleet state contains it, so that it is not proposed twice."""
        self.proposed[golden.canary] = golden

    def folded(self, fleet: Fleet) -> None:
        """Drop the proposed goldens that the fleet state now contains."""
        for id in [id for id in self.proposed if (self.key, id) in fleet.goldens]:
            del self.proposed[id]

    def wants_ranking(self, fleet: Fleet) -> bool:
        """Whether the pool must be ranked: it has not been ranked yet, and there are too few canaries."""
        return self.ranking is None and len(self.canaries(fleet)) < self.settings.canaries

    def rank(self, answers: dict[str, CanaryAnswer]) -> tuple[str, ...]:
        """Rank the pool by one worker's answers, and return the candidates' ids, best first.

        If no answer is usable, the previous ranking is kept and returned; () if there was none.
        """
        order = rank(answers, tokens=self.settings.tokens)
        if order:
            self.ranking = dealt(order, self.pool) if self.covers else order
            self.ranked = answers
        return self.ranking or ()

    def answer_before(self, canary: Canary, answer: CanaryAnswer) -> CanaryAnswer | None:
        """Return the canary's answer from the pool's ranking, if that answer and `answer` have equal tokens; else None.

        An equal answer saves a repetition of the question. A different answer proves nothing, because the ranking's answer can be
        another worker's, or from a time before this worker was healed.
        """
        before = self.ranked.get(canary.id)
        return before if before is not None and before.tokens == answer.tokens else None

    def useful(self, fleet: Fleet, canary: Canary, worker: str, doubtful: bool) -> bool:
        """Whether this worker's answer to the canary is worth a probe.

        True for a configured canary, and for a canary with a golden in use. In all other cases, the first rule that fits decides:

        - if an operator wants one worker to record the golden, and that worker is alive: true for that worker only;
        - if the golden is retired, and this worker has already voted on it: true unless this worker is convicted;
        - if neither rule fits: true unless this worker is `doubtful`.
        """
        if self.golden(fleet, canary) is not None or canary.configured:
            return True
        retired = fleet.goldens.get((self.key, canary.id))
        recorder = fleet.workers.get(retired.moves.recorder) if retired is not None else None
        if recorder is not None and recorder.alive:
            return recorder.joined.worker == worker
        if retired is not None and any(vote.worker == worker for vote in retired.votes):
            # the worker's weights may have changed since its vote
            return not fleet.workers[worker].health.convicted
        return not doubtful

    def voted(self, fleet: Fleet, golden: Golden) -> bool:
        """Whether the fleet state already has a vote of the golden's proposer for the golden's tokens."""
        known = fleet.goldens.get((self.key, golden.canary))
        votes = known.votes if known is not None else ()
        return any(v.worker == golden.proposed_by and v.tokens == golden.tokens for v in votes)

    def contested(self, fleet: Fleet, golden: Golden, worker: str, answer: CanaryAnswer) -> bool:
        """Whether this worker's wrong answer puts a configured golden in doubt, rather than the worker.

        True if no worker has confirmed the golden, and a second worker has voted for this answer or has not voted yet. Only live,
        unconvicted workers of the golden's canary key count as a second worker.
        """
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
        """Whether the workers have outvoted the canary's configured answer."""
        golden = fleet.goldens.get((self.key, canary.id))
        return golden is not None and golden.configured and golden.status == "retired"

    def judge(self, canary: Canary, golden: Golden, answer: CanaryAnswer) -> GoldenDifference:
        """Compare an answer with its golden, and return the difference.

        A near tie is a position at which a correct engine can give either of two tokens. If the tokens before the canary's first
        known near tie are equal, the answer counts as right, whatever follows.
        """
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
        """Return an object that compares an answer with this golden while the answer arrives."""
        return ExpectedAnswer(golden.tokens, golden.top_k, self.tolerance(golden))

    def tie_margin(self, golden: Golden) -> float:
        """Return the tie margin: the largest logprob difference of two tokens at a near tie; 0.0 tolerates no near tie.

        A token other than the expected one is evidence of a fault only if the two logprobs differ by more than this margin.
        """
        return max(self.tolerance(golden), self.settings.tie_margin) if self.settings.tie_margin else 0.0

    def settled_part(
        self, canary: Canary, answer: CanaryAnswer, repeated: CanaryAnswer
    ) -> CanaryAnswer | None:
        """Return the part of an answer that can become a golden; None if there is no such part.

        This is usually the part before the first near tie (`goldens.settled_part`). An answer without the requested number of
        tokens is returned whole if `repeated`, the answer to the repeated question, is equal.
        """
        # some upstreams report fewer tokens, so positions are unknown
        if len(answer.tokens) != canary.max_tokens:
            return answer if repeated.tokens == answer.tokens else None
        return settled_part(answer, repeated, self.settings.margin_min)

    def note_tie(self, canary: Canary, position: int, worker: str) -> None:
        """Record a near tie: from now on, answers to this canary are compared only up to `position`.

        At this position, the worker's answers varied while the golden was recorded.
        """
        self.ties.note(canary.id, position, worker, alone=True)

    def note_flip(self, fleet: Fleet, canary: Canary, position: int, worker: str) -> bool:
        """Record that a worker's answers without logprobs varied at `position`. Return whether that is a near tie.

        A near tie with fewer than TOKENS_MIN tokens before it makes the canary useless. `spoil` then excludes the canary if
        possible.
        """
        others = any(
            name != worker and other.joined.canary_key == self.key and other.alive
            for name, other in fleet.workers.items()
        )
        tie = self.ties.note(canary.id, position, worker, alone=not others)
        if tie and position < TOKENS_MIN:
            self.spoil(canary)  # too few tokens precede the tie
        return tie

    def tolerance(self, golden: Golden) -> float:
        """Return the current logprob tolerance. 0.0 if the golden has no logprobs, so that only tokens are compared."""
        return self.calibration.tolerance if golden.top_k else 0.0

    def slow_baseline(
        self, worker: Hashable, instance: str, tokens: int, latency_ms: float, load: int
    ) -> float | None:
        """Add the latency of an answer of `tokens` tokens. Return the baseline in ms if the latency is too long, else None.

        `load` is the number of sequences in the worker's batch. See `Baseline.judge`.
        """
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
        """Exclude a candidate without a reproducible answer, and return True.

        If the candidate is configured, or if the ranked pool has no replacement, keep the candidate and return False.
        """
        left = [id for id in self.ranking or () if id not in self.spoilt and id != canary.id]
        if len(left) < self.settings.canaries or canary.configured:
            return False
        self.spoilt.add(canary.id)
        return True


def as_agreed(golden: Golden, candidate: Canary) -> Canary:
    """Return the canary with the prompt and the number of answer tokens with which its golden was recorded."""
    prompt = tuple(golden.prompt)
    text = candidate.text if candidate.prompt == prompt else ""
    return Canary(golden.canary, prompt, golden.asked or len(golden.tokens), text=text)


def open_canary_set(
    joined: WorkerJoined, vocabulary: Vocabulary | None, calibration: Calibration, settings: CanarySettings
) -> CanarySet:
    """Return a new canary set for the canary key of `joined`.

    Without a `vocabulary`, the questions consist of fixed token ids that every vocabulary has. A canary need not be text.
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
