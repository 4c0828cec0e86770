"""Canary questions, and the comparison of answers with their goldens. Pure functions.

A *canary* is a question with a known answer; a *golden* is that answer. Goldens are recorded from workers, never hard-coded:
token ids differ between tokenizers and logits between engines (N23). A good canary is one where the model is certain at every
step, because greedy decoding is not invariant under batching (B15). So those with the largest top-1/top-2 margin are chosen
from a pool.

Raw logits are not compared: they are defined only up to a shift, and no API guarantees them. Logprobs of the top k are
compared (B14). A token missing from a top k ranked below its last entry, which gives a lower bound of the distance.

A *near tie* is a position where two tokens are so close that a correct engine may choose either: the last bits of a logit
depend on the batch. All tokens after a flipped tie differ as well. Such a flip is no evidence of corruption.

- A golden is truncated before its first near tie (`usable`), so most goldens contain none.
- If a tie remains (an older golden, or a tolerance that grew), a differing token counts only if the margin between it and
  the expected token is larger than the tie margin (`margin`), and nothing after it is compared.
- An engine without logprobs shows no margins. There a tie is found by repetition (`HiddenTies`).

*Covering* questions are prefixed with a slice of the vocabulary. A fault in one row of the embeddings is visible only to
requests that use that row. Four questions of thirty-two tokens touch a few hundred rows; users touch them all. With slices of
512 tokens, four questions read 2,048 rows. That is all of a small vocabulary, and the most used part of a large one, since
byte-pair tokenizers number tokens by how often they merged. Measured in `docs/concepts/silent-corruption.md`.
Questions are still ranked by margin, but within their slice, so that the best-ranked questions cover every slice.
"""

import hashlib
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_low
from typing import Literal

from controller.runtime.settings import CanarySettings, ConfiguredCanary
from events.observations import TopK
from events.wire import Chunk, Logprob

TOKENS_MIN = 8  # a golden is not truncated below this: too few tokens would be compared


def margin(golden: TopK, answer: TopK, expected: int, got: int) -> float | None:
    """Return the lead of the expected token over the one that the answer has; None without logprobs.

    The golden's logprobs decide. A token that they do not list was below the last one listed, so the lead is at least that.
    Without them (a configured answer) it is the lead that the answer's own logprobs show, in reverse.
    """
    if golden:
        return _lead(dict(golden), expected, got)
    return _lead(dict(answer), got, expected) if answer else None


def _lead(listed: dict[int, float], first: int, second: int) -> float:
    last = min(listed.values())
    return listed.get(first, last) - listed.get(second, last)


def usable(top_k: Iterable[TopK], margin_min: float, length: int) -> int:
    """Return how many of `length` tokens precede the first one with a margin below `margin_min`."""
    for place, top in enumerate(top_k):
        if len(top) > 1 and top[0][1] - top[1][1] < margin_min:
            return place
    return length


@dataclass(slots=True)
class HiddenTies:
    """Near ties of one canary key with an engine that reports no logprobs, found by answers that vary.

    A worker that gives two answers to the same question either met a near tie or is intermittently corrupt. It counts as a tie
    if another worker varies at the same position, or if there is no other worker to compare with.
    """

    _flips: dict[tuple[str, int], set[str]] = field(default_factory=dict)  # by canary and position: workers
    _ties: dict[str, int] = field(default_factory=dict)  # by canary: the first position that is a tie

    def note(self, canary: str, position: int, worker: str, *, alone: bool) -> bool:
        """Record a worker's flip at a position; return whether it counts as a tie."""
        if position >= self._ties.get(canary, position + 1):
            return True
        workers = self._flips.setdefault((canary, position), set())
        workers.add(worker)
        if alone or len(workers) > 1:
            self._ties[canary] = position
            return True
        return False

    def first(self, canary: str) -> int | None:
        """Return the first position of a canary that is known to be a tie."""
        return self._ties.get(canary)


SAMPLES_MAX = 100  # distances kept per worker
OTHERS_MIN = 2  # other workers needed before one can be an outlier
OUTLIER = 10.0  # a worker's distance, as a multiple of the median of all workers


@dataclass(slots=True)
class Calibration:
    """The logprob tolerance of one canary key: the largest distance of enough healthy samples, times a margin.

    A worker that drifts from the start must not widen the tolerance until its own answers pass. So with three or more workers,
    one that is far from the others does not count.
    """

    settings: CanarySettings
    _distances: dict[str, deque[float]] = field(default_factory=dict)  # by worker
    _worst: dict[str, float] = field(default_factory=dict)  # the largest distance, by worker
    _samples: int = 0  # in all
    _cached_noise: float | None = None  # the noise; None: it must be computed again

    def add(self, distance: float, worker: str = "") -> None:
        """Add the distance of one probe that passed on a healthy worker."""
        if not math.isfinite(distance):
            return
        distances = self._distances.setdefault(worker, deque(maxlen=SAMPLES_MAX))
        gone = distances[0] if len(distances) == SAMPLES_MAX else None
        distances.append(distance)
        self._samples += gone is None
        worst = self._worst.get(worker, distance)
        worst = max(distances) if gone == worst else max(worst, distance)
        if self._worst.get(worker) != worst:
            self._worst[worker], self._cached_noise = worst, None

    def forget(self, worker: str) -> None:
        """Drop the samples of a worker that is gone."""
        self._samples -= len(self._distances.pop(worker, ()))
        if self._worst.pop(worker, None) is not None:
            self._cached_noise = None

    @property
    def enough(self) -> bool:
        """Whether there are enough samples to calibrate."""
        return self._samples >= self.settings.samples_min

    @property
    def tolerance(self) -> float:
        """The current tolerance; 0.0: compare tokens only."""
        s = self.settings
        if s.tolerance is not None:
            return s.tolerance
        return (
            max(s.tolerance_floor, self._noise() * s.tolerance_margin)
            if self.enough
            else s.tolerance_uncalibrated
        )

    def _noise(self) -> float:
        """Return the largest healthy distance, cached: each probe needs it twice, and a fleet of a thousand workers sends dozens
        of probes a second."""
        if self._cached_noise is None:
            worst = list(self._worst.values())
            if len(worst) > OTHERS_MIN:
                usual = max(median_low(worst), self.settings.tolerance_floor)
                worst = [one for one in worst if one <= usual * OUTLIER]
            self._cached_noise = max(worst, default=0.0)
        return self._cached_noise


Encode = Callable[[str], Sequence[int]]
"""Encodes text to token ids with a model's own tokenizer, in the way a plain prompt is encoded."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A model's tokenizer: its encoding and the number of its tokens."""

    encode: Encode
    size: int


POOL: Mapping[str, str] = {
    # The seed's three come first.
    "france": "The capital of France is",
    "sum": "2 + 2 = ",
    "primes": "The first five prime numbers are 2, 3, 5,",
    "alphabet": "a b c d e f g h i j k l m n o p q r s t u v w x y z a b c d e f g h i j k l m n o",
    "counting": "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24,",
    "days": "Monday comes before Tuesday, Tuesday before Wednesday, Wednesday before Thursday, and",
    "code": "def add(first, second):\n    return first + second\n\n\ndef subtract(a, b):\n    return",
    "json": '[{"id": 1, "name": "one"}, {"id": 2, "name": "two"}, {"id": 3, "name":',
    "tides": "The sea rises and falls twice a day because the moon pulls at the water of the earth",
    "squares": "1 squared is 1, 2 squared is 4, 3 squared is 9, 4 squared is 16, 5 squared is",
    "colours": "red green blue red green blue red green blue red green blue red green blue red",
    "months": "January, February, March, April, May, June, July, August, September, October, November,",
}
"""Questions with one likely continuation, of several kinds: recall, arithmetic, repetition, code, prose."""

_PREAMBLE = (
    "Here is a line of text, and after it the words that follow.",
    "The text is short, it is plain, and it has one continuation that everybody would expect.",
    "Nothing else is asked for, and nothing else is said.",
)


@dataclass(frozen=True, slots=True)
class Canary:
    """One question. `expected` is its configured answer; most have none, and their answer is recorded."""

    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    expected: tuple[int, ...] = ()
    top_logit_range: tuple[float, float] | None = None
    text: str = ""  # for engines that accept no token ids

    @property
    def configured(self) -> bool:
        """Whether its answer comes from the settings."""
        return bool(self.expected)


@dataclass(frozen=True, slots=True)
class CanaryAnswer:
    """A worker's answer to a canary: its tokens, the top k of each position, and whether all values were finite."""

    tokens: tuple[int, ...]
    top_k: tuple[TopK, ...] = ()
    finite: bool = True
    cut: bool = False  # reading stopped early, because the answer was already wrong
    shortened: bool = False  # truncated by us before its first near tie

    @property
    def margin(self) -> float:
        """The smallest top-1/top-2 logprob difference over the answer; 0 if the engine reported no top two."""
        gaps = [top[0][1] - top[1][1] if len(top) > 1 else 0.0 for top in self.top_k]
        return min(gaps, default=0.0) if self.finite else 0.0

    def begin(self, tokens: int) -> "CanaryAnswer":
        """Return the first `tokens` tokens of this answer."""
        return CanaryAnswer(self.tokens[:tokens], self.top_k[:tokens], self.finite, shortened=True)


@dataclass(frozen=True, slots=True)
class GoldenDifference:
    """The difference between an answer and its golden. `reason` None: they agree."""

    reason: Literal["token_mismatch", "logit_drift", "non_finite"] | None
    distance: float | None  # the largest logprob difference; None: nothing could be compared
    detail: str = ""
    position: int | None = None  # of the first token that differs
    blind: bool = False  # a token differs, and no logprobs show whether it was a near tie


# --- questions ----------------------------------------------------------------------------------------------


def pool(encode: Encode, *, tokens: int, prompt_tokens_min: int) -> tuple[Canary, ...]:
    """Return the candidates in one model's tokens, each prompt at least `prompt_tokens_min` tokens long."""
    found = []
    for id, text in POOL.items():
        longer = extended(text, encode, prompt_tokens_min)
        found.append(Canary(id, tuple(encode(longer)), tokens, text=longer))
    return tuple(found)


def extended(text: str, encode: Encode, tokens_min: int) -> str:
    """Prefix `text` with sentences until it has at least `tokens_min` tokens; its end, which is the question, does not change.

    Raise ValueError if the tokenizer yields too few tokens."""
    round = 0
    while len(encode(text)) < tokens_min:
        if round > tokens_min:
            raise ValueError(f"the tokenizer gives {len(encode(text))} tokens for {len(text)} characters")
        text = f"{_PREAMBLE[round % len(_PREAMBLE)]} {text}"
        round += 1
    return text


def configured(canaries: Iterable[ConfiguredCanary], model: str, encode: Encode) -> tuple[Canary, ...]:
    """Return the operator's configured canaries for one model. Their ids change with their content."""
    found = []
    for canary in canaries:
        if canary.model not in (None, model):
            continue
        mark = hashlib.sha256(canary.model_dump_json().encode()).hexdigest()[:8]
        bounds = canary.expected_top_logit_range if canary.check_logits else None
        found.append(
            Canary(
                id=f"{canary.name or 'configured'}-{mark}",
                prompt=tuple(encode(canary.prompt)),
                max_tokens=canary.max_tokens,
                expected=canary.expected_tokens,
                top_logit_range=bounds,
                text=canary.prompt,
            )
        )
    return tuple(found)


def rank(answers: Mapping[str, CanaryAnswer], *, tokens: int) -> tuple[str, ...]:
    """Return the usable candidates, best first: full length before shorter, then by margin, then in pool order."""
    usable = [id for id, answer in answers.items() if answer.finite and answer.tokens]
    return tuple(sorted(usable, key=lambda id: (len(answers[id].tokens) < tokens, -answers[id].margin)))


def settled_part(answer: CanaryAnswer, repeated: CanaryAnswer, margin_min: float) -> CanaryAnswer | None:
    """Return the part of an answer that can be a golden: the tokens before its first near tie.

    The part ends where the margin is below `margin_min`, or where repeating the question gave another token. If fewer than
    TOKENS_MIN tokens are left, return the whole answer; None if the repetition differed.
    """
    agreed = _agreed(answer.tokens, repeated.tokens)
    cut = min(agreed, usable(answer.top_k, margin_min, len(answer.tokens)))
    if TOKENS_MIN <= cut < len(answer.tokens):
        return answer.begin(cut)
    return answer if repeated.tokens == answer.tokens else None


# --- answers ------------------------------------------------------------------------------------------------


def read(chunks: Iterable[Chunk]) -> CanaryAnswer:
    """Return the answer assembled from a worker's chunks.

    Where an engine returns text and no tokens, the text's bytes stand for tokens, so that they can be compared as well.
    """
    tokens: list[int] = []
    text: list[str] = []
    tops: list[TopK] = []
    finite = True
    for chunk in chunks:
        tokens += chunk.tokens
        if chunk.text:
            text.append(chunk.text)
        for logprob in chunk.logprobs or ():
            finite = finite and _finite(logprob)
            tops.append(tuple((token, value) for token, value in logprob.top))
    said = tuple(tokens) if tokens else tuple("".join(text).encode())
    return CanaryAnswer(said, tuple(tops) if any(tops) else (), finite)


def _finite(logprob: Logprob) -> bool:
    return math.isfinite(logprob.chosen) and all(math.isfinite(value) for _, value in logprob.top)


def compare(
    answer: CanaryAnswer,
    *,
    tokens: Sequence[int],
    top_k: Sequence[TopK],
    tolerance: float,
    top_logit_range: tuple[float, float] | None = None,
    tie_margin: float = 0.0,
) -> GoldenDifference:
    """Compare an answer with its golden: finite, the same tokens, logprobs within `tolerance` (0.0: unchecked).

    A token that differs at a near tie (a lead of at most `tie_margin`) is no difference; what follows is not compared.
    """
    if not answer.finite:
        return GoldenDifference("non_finite", None, "NaN or infinity among the logprobs")
    agreed = _agreed(tokens, answer.tokens)
    far = distance(top_k, answer.top_k, positions=agreed)
    if tuple(tokens) != answer.tokens and not (answer.cut and agreed == len(answer.tokens)):
        return _differing(answer, tokens, top_k, agreed, far, tolerance, tie_margin)
    if tolerance > 0 and top_k and not answer.top_k:
        return GoldenDifference(
            "logit_drift", None, "the answer came without the logprobs that its golden has"
        )
    if far is not None and (answer.cut or far > tolerance > 0):
        return _drift(far, tolerance)
    outside = _out_of_range(answer, top_logit_range)
    return GoldenDifference("logit_drift", far, outside) if outside else GoldenDifference(None, far)


def _differing(
    answer: CanaryAnswer,
    tokens: Sequence[int],
    top_k: Sequence[TopK],
    agreed: int,
    far: float | None,
    tolerance: float,
    tie_margin: float,
) -> GoldenDifference:
    """Judge an answer that differs from the golden at position `agreed`."""
    lead = None
    if agreed < min(len(tokens), len(answer.tokens)):
        lead = margin(_at(top_k, agreed), _at(answer.top_k, agreed), tokens[agreed], answer.tokens[agreed])
    if lead is None or tie_margin <= 0 or abs(lead) > tie_margin:
        blind = not top_k and not answer.top_k
        detail = f"the tokens differ from position {agreed} on"
        return GoldenDifference("token_mismatch", far, detail, agreed, blind)
    if far is not None and far > tolerance > 0:
        return _drift(far, tolerance)
    return GoldenDifference(None, far, f"a near tie at position {agreed} fell the other way", agreed)


def _at(top_k: Sequence[TopK], place: int) -> TopK:
    return top_k[place] if place < len(top_k) else ()


def _drift(far: float, tolerance: float) -> GoldenDifference:
    return GoldenDifference(
        "logit_drift", far, f"a logprob is off by {far:.3g}; {tolerance:.3g} is tolerated"
    )


@dataclass(slots=True)
class ExpectedAnswer:
    """The right answer, compared with an answer while it arrives."""

    tokens: Sequence[int]
    top_k: Sequence[TopK] = ()
    tolerance: float = 0.0
    _tokens_read: int = 0
    _logprobs_read: int = 0

    def departs(self, chunk: Chunk) -> bool:
        """Consume the next chunk; return whether the answer is already known to be wrong."""
        if self._as_expected(chunk):
            return False
        due = tuple(self.tokens[self._tokens_read : self._tokens_read + len(chunk.tokens)])
        self._tokens_read += len(chunk.tokens)
        got = read((chunk,))
        shown = len(chunk.logprobs or ())
        tops = self.top_k[self._logprobs_read : self._logprobs_read + shown]
        self._logprobs_read += shown
        if tuple(chunk.tokens) != due or not got.finite:
            return True
        far = distance(tops, got.top_k, positions=shown) if self.tolerance > 0 else None
        return far is not None and far > self.tolerance

    def _as_expected(self, chunk: Chunk) -> bool:
        """Consume a chunk that is exactly as expected, and return True; otherwise change nothing. Nearly all chunks are."""
        said, shown, logprobs = self._tokens_read, self._logprobs_read, chunk.logprobs or ()
        if list(self.tokens[said : said + len(chunk.tokens)]) != chunk.tokens:
            return False
        tops = self.top_k[shown : shown + len(logprobs)]
        if len(tops) != len(logprobs):
            return False
        for top, logprob in zip(tops, logprobs, strict=True):
            if tuple(logprob.top) != top or not math.isfinite(logprob.chosen):
                return False
        self._tokens_read, self._logprobs_read = said + len(chunk.tokens), shown + len(logprobs)
        return True


def distance(expected: Sequence[TopK], got: Sequence[TopK], *, positions: int) -> float | None:
    """Return the largest logprob difference over the first `positions` positions that both have; None if there is none.

    One position beyond the agreed tokens is comparable too: the same tokens precede it.
    """
    worst: float | None = None
    for one, other in zip(expected[: positions + 1], got[: positions + 1], strict=False):
        if one and other:
            worst = max(worst or 0.0, 0.0 if one == other else _top_k_distance(one, other))
    return worst


def _top_k_distance(one: TopK, other: TopK) -> float:
    first, second = dict(one), dict(other)
    last_of_first, last_of_second = min(first.values()), min(second.values())
    worst = 0.0
    for token, value in first.items():
        worst = max(worst, abs(value - second[token]) if token in second else value - last_of_second)
    for token, value in second.items():
        if token not in first:
            worst = max(worst, value - last_of_first)
    return worst


def _agreed(tokens: Sequence[int], got: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    count = 0
    for one, other in zip(tokens, got, strict=False):
        if one != other:
            break
        count += 1
    return count


def _out_of_range(answer: CanaryAnswer, bounds: tuple[float, float] | None) -> str:
    """Describe how the first position's best value leaves its range; "" if it does not, or is unknown."""
    if bounds is None or not answer.top_k or not answer.top_k[0]:
        return ""
    values = [value for _, value in answer.top_k[0]]
    low, high = bounds
    return "" if low <= max(values) <= high else f"top_logit={max(values):.2f}, expected [{low}, {high}]"


SLICES = 4
SLICE_TOKENS = 512
FIRST_ID = 3  # most vocabularies have their special tokens before it


def covering(pool: Sequence[Canary], vocabulary: int) -> tuple[Canary, ...]:
    """Return the pool with a slice of the vocabulary before each prompt: the n-th canary gets slice n modulo SLICES.

    The text, for engines that accept no token ids, is not changed. Do not pass a configured canary: its answer belongs to its
    exact prompt.
    """
    rows = list(range(FIRST_ID, min(vocabulary, FIRST_ID + SLICES * SLICE_TOKENS)))
    random.Random(len(rows)).shuffle(rows)
    return tuple(
        replace(canary, prompt=(*rows[number % SLICES :: SLICES], *canary.prompt))
        for number, canary in enumerate(pool)
    )


def dealt(order: Sequence[str], pool: Sequence[Canary]) -> tuple[str, ...]:
    """Return the ids of `order` (best first), reordered: the best of each slice, then the second best of each, and so on."""
    slice_of = {canary.id: number % SLICES for number, canary in enumerate(pool)}
    taken = [0] * SLICES
    places = {}
    for place, id in enumerate(order):
        places[id] = (taken[slice_of[id]], place)
        taken[slice_of[id]] += 1
    return tuple(sorted(order, key=places.__getitem__))
