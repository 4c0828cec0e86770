"""Canary questions, and the comparison of answers with their goldens. Pure functions.

A *canary* is a question with a known answer, the *golden*. Goldens are recorded from workers, never hard-coded, because token ids
differ between tokenizers and logits between engines. Even in greedy decoding, the other requests of a batch change the last bits
of a logit. Two tokens with nearly equal logits can then change places, so in a good canary the model is certain of every token of
the answer. The chosen questions of the pool are those with the largest logprob difference between the best and the second-best
token.

Raw logits are not compared, because they are defined only up to a shift, and no API guarantees them. Instead the logprobs of the
top k tokens in golden and answer are compared. If a token is missing in one of these two lists, the token's logprob there is at
most that of the list's last entry. This gives a lower bound of the distance.

A *near tie* is a position where two tokens are so close that a correct engine can choose either. If an engine does not choose the
golden's token there, its later tokens differ as well. Such a difference does not prove corruption.

- A golden is truncated before its first near tie (`usable`), so most goldens contain no near tie.
- Older goldens, and goldens recorded before the tolerance grew, can contain a near tie. Two different tokens are a near tie if
  their logprobs differ by at most the tie margin (`margin`). Neither these two tokens nor later ones count as a difference.
- An engine without logprobs shows no margins. Its near ties are found by repeating the question (`HiddenTies`).

*Covering* questions are prefixed with a slice of the vocabulary. A fault in one row of the embeddings is visible only to
requests that use that row. Four questions of thirty-two tokens use a few hundred rows, but users' requests use all rows. With
slices of 512 tokens, four questions use 2,048 rows. These are all rows of a small vocabulary, and the most used rows of a large
one, because byte-pair tokenizers give low ids to frequent tokens. Measurements are in `docs/concepts/silent-corruption.md`.
Covering questions are ranked by margin within their slice, so that the best-ranked questions cover every slice.
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

TOKENS_MIN = 8  # a golden is not truncated to fewer tokens, since too few would be compared


def margin(golden: TopK, answer: TopK, expected: int, got: int) -> float | None:
    """Return by how much the logprob of the token `expected` exceeds that of `got`, the token that the worker gave.

    `golden` and `answer` list the top k tokens at the same position. The golden's logprobs are used. A token that the golden does
    not list gets the logprob of the last listed token, so the result is a lower bound. If the golden has no logprobs (a
    configured answer), return by how much `got` exceeds `expected` in the answer's logprobs. None if neither has logprobs.
    """
    if golden:
        return _lead(dict(golden), expected, got)
    return _lead(dict(answer), got, expected) if answer else None


def _lead(listed: dict[int, float], first: int, second: int) -> float:
    last = min(listed.values())
    return listed.get(first, last) - listed.get(second, last)


def usable(top_k: Iterable[TopK], margin_min: float, length: int) -> int:
    """Return how many of an answer's `length` tokens precede the first near tie.

    A near tie is a position where the logprobs of the two best tokens differ by less than `margin_min`.
    """
    for place, top in enumerate(top_k):
        if len(top) > 1 and top[0][1] - top[1][1] < margin_min:
            return place
    return length


@dataclass(slots=True)
class HiddenTies:
    """Finds near ties in the answers of engines that report no logprobs, for workers with comparable answers (one canary key).

    If a worker gives two answers to one question, either the question has a near tie or the worker is intermittently corrupt. The
    difference counts as a near tie if a second worker also gives two answers that differ at this position. It also counts if
    there is no second worker.
    """

    _flips: dict[tuple[str, int], set[str]] = field(default_factory=dict)  # workers by canary and position
    _ties: dict[str, int] = field(default_factory=dict)  # position of the first near tie by canary

    def note(self, canary: str, position: int, worker: str, *, alone: bool) -> bool:
        """Record that a worker's answers to a canary differ at `position`. Return whether that counts as a near tie.

        `alone` means that the canary key has no other live worker.
        """
        if position >= self._ties.get(canary, position + 1):
            return True
        workers = self._flips.setdefault((canary, position), set())
        workers.add(worker)
        if alone or len(workers) > 1:
            self._ties[canary] = position
            return True
        return False

    def first(self, canary: str) -> int | None:
        """Return the position of a canary's first known near tie; None if no near tie is known."""
        return self._ties.get(canary)


SAMPLES_MAX = 100  # distances kept per worker
OTHERS_MIN = 2  # number of other workers from which a worker can be an outlier
OUTLIER = 10.0  # a worker is an outlier if its distance exceeds the median of all workers by this factor


@dataclass(slots=True)
class Calibration:
    """Derives the logprob tolerance of one canary key from the answers of healthy workers.

    The tolerance is the largest logprob distance of such answers from their goldens, times a margin. With three or more workers,
    outliers do not count. If they did, a worker with wrong logprobs from the start would widen the tolerance until its own
    answers pass.
    """

    settings: CanarySettings
    _distances: dict[str, deque[float]] = field(default_factory=dict)  # by worker
    _worst: dict[str, float] = field(default_factory=dict)  # the largest distance, by worker
    _samples: int = 0  # number of distances kept, over all workers
    _cached_noise: float | None = None  # result of `_noise`; None: it must be computed again

    def add(self, distance: float, worker: str = "") -> None:
        """Add the largest logprob distance of a healthy worker's passed answer from the golden. Ignore an infinite distance."""
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
        """Whether there are enough samples to derive the tolerance from them."""
        return self._samples >= self.settings.samples_min

    @property
    def tolerance(self) -> float:
        """The current tolerance of a logprob; 0.0 means that only tokens are compared."""
        s = self.settings
        if s.tolerance is not None:
            return s.tolerance
        return (
            max(s.tolerance_floor, self._noise() * s.tolerance_margin)
            if self.enough
            else s.tolerance_uncalibrated
        )

    def _noise(self) -> float:
        """Return the largest logprob distance between an answer and its golden, over all workers that are not outliers.

        Cached, because each probe needs the value twice and a fleet of a thousand workers sends dozens of probes a second.
        """
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
    """A model's tokenizer: the function that encodes text, and the number of tokens in its vocabulary."""

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
    """One canary question. `expected` is a configured answer; for most canaries it is empty, and a golden is recorded."""

    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    expected: tuple[int, ...] = ()
    top_logit_range: tuple[float, float] | None = None
    text: str = ""  # for engines that accept no token ids

    @property
    def configured(self) -> bool:
        """Whether the canary's expected answer comes from the settings."""
        return bool(self.expected)


@dataclass(frozen=True, slots=True)
class CanaryAnswer:
    """A worker's answer to a canary."""

    tokens: tuple[int, ...]
    top_k: tuple[TopK, ...] = ()  # the best tokens of each position with their logprobs; empty: none reported
    finite: bool = True  # whether no logprob was NaN or infinite
    cut: bool = False  # whether reading stopped early, because the answer was already wrong
    shortened: bool = False  # whether the prober has truncated the answer before its first near tie

    @property
    def margin(self) -> float:
        """The smallest difference, over all positions, between the logprobs of a position's two best tokens.

        0 if the engine did not report two tokens for every position, or if a logprob was not finite.
        """
        gaps = [top[0][1] - top[1][1] if len(top) > 1 else 0.0 for top in self.top_k]
        return min(gaps, default=0.0) if self.finite else 0.0

    def begin(self, tokens: int) -> "CanaryAnswer":
        """Return the first `tokens` tokens of this answer."""
        return CanaryAnswer(self.tokens[:tokens], self.top_k[:tokens], self.finite, shortened=True)


@dataclass(frozen=True, slots=True)
class GoldenDifference:
    """The difference between an answer and its golden. A `reason` of None means that the two agree."""

    reason: Literal["token_mismatch", "logit_drift", "non_finite"] | None
    distance: float | None  # the largest logprob difference; None: no logprobs could be compared
    detail: str = ""
    position: int | None = None  # index of the first token that differs
    blind: bool = False  # a token differs, and there are no logprobs to show whether this is a near tie


# --- questions ----------------------------------------------------------------------------------------------


def pool(encode: Encode, *, tokens: int, prompt_tokens_min: int) -> tuple[Canary, ...]:
    """Return all questions of POOL as canaries for one model, with answers of `tokens` tokens.

    Each prompt is extended to at least `prompt_tokens_min` tokens.
    """
    found = []
    for id, text in POOL.items():
        longer = extended(text, encode, prompt_tokens_min)
        found.append(Canary(id, tuple(encode(longer)), tokens, text=longer))
    return tuple(found)


def extended(text: str, encode: Encode, tokens_min: int) -> str:
    """Prefix `text` with sentences until it has at least `tokens_min` tokens.

    The end of the text, which is the question, is not changed. Raise ValueError if the tokenizer yields no tokens for added
    sentences.
    """
    round = 0
    while len(encode(text)) < tokens_min:
        if round > tokens_min:
            raise ValueError(f"the tokenizer gives {len(encode(text))} tokens for {len(text)} characters")
        text = f"{_PREAMBLE[round % len(_PREAMBLE)]} {text}"
        round += 1
    return text


def configured(canaries: Iterable[ConfiguredCanary], model: str, encode: Encode) -> tuple[Canary, ...]:
    """Return the operator's configured canaries for one model. A canary's id contains a hash of its configuration."""
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
    """Return the ids of the canaries with usable answers, best first.

    An answer is usable if it has tokens and all its logprobs are finite. Answers of at least `tokens` tokens come before shorter
    ones. Within each of these two groups, the answers are sorted by margin, the largest first. Equal margins keep the order of
    `answers`.
    """
    usable = [id for id, answer in answers.items() if answer.finite and answer.tokens]
    return tuple(sorted(usable, key=lambda id: (len(answers[id].tokens) < tokens, -answers[id].margin)))


def settled_part(answer: CanaryAnswer, repeated: CanaryAnswer, margin_min: float) -> CanaryAnswer | None:
    """Return the part of an answer that can become a golden: the tokens before its first near tie.

    The part ends where the margin is below `margin_min`, or where the repeated question gave another token. If this part has
    fewer than TOKENS_MIN tokens, it is not used. The whole answer is then returned if the repeated answer equals it, else None.
    """
    agreed = _agreed(answer.tokens, repeated.tokens)
    cut = min(agreed, usable(answer.top_k, margin_min, len(answer.tokens)))
    if TOKENS_MIN <= cut < len(answer.tokens):
        return answer.begin(cut)
    return answer if repeated.tokens == answer.tokens else None


# --- answers ------------------------------------------------------------------------------------------------


def read(chunks: Iterable[Chunk]) -> CanaryAnswer:
    """Return the answer assembled from a worker's chunks.

    If an engine returns text without tokens, the bytes of the text are used as tokens, so that answers can still be compared.
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
    """Compare an answer with its golden, given as `tokens` and `top_k`, and return the difference.

    The two agree if all logprobs are finite, the tokens are equal, and each logprob differs by at most `tolerance` (0.0: not
    checked). If the first pair of different tokens is a near tie (logprobs that differ by at most `tie_margin`), this pair
    does not count as a difference. The tokens after it are not compared.
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
    """Return the difference of an answer from its golden. `agreed` is the index of the first token that differs.

    `far` is the largest logprob difference up to this index; None if no logprobs could be compared.
    """
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
    """Compares an answer with its golden while the answer arrives, so that reading can stop at the first difference."""

    tokens: Sequence[int]
    top_k: Sequence[TopK] = ()
    tolerance: float = 0.0
    _tokens_read: int = 0
    _logprobs_read: int = 0

    def departs(self, chunk: Chunk) -> bool:
        """Compare the next chunk of the answer, and return whether this chunk differs from the golden."""
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


def distance(expected: Sequence[TopK], got: Sequence[TopK], *, positions: int) -> float | None:
    """Return the largest logprob difference of two answers that have the first `positions` tokens in common.

    The position after these tokens is compared too, because the same tokens precede it. None if no position has logprobs in both.
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
    """Return the number of leading tokens that are equal in both."""
    count = 0
    for one, other in zip(tokens, got, strict=False):
        if one != other:
            break
        count += 1
    return count


def _out_of_range(answer: CanaryAnswer, bounds: tuple[float, float] | None) -> str:
    """Return an error text if the highest logprob at the answer's first position is outside `bounds`; otherwise "".

    "" also if there are no bounds, or if the answer has no logprobs.
    """
    if bounds is None or not answer.top_k or not answer.top_k[0]:
        return ""
    values = [value for _, value in answer.top_k[0]]
    low, high = bounds
    return "" if low <= max(values) <= high else f"top_logit={max(values):.2f}, expected [{low}, {high}]"


SLICES = 4
SLICE_TOKENS = 512
FIRST_ID = 3  # most vocabularies have their special tokens before it


def covering(pool: Sequence[Canary], vocabulary: int) -> tuple[Canary, ...]:
    """Return the pool with a slice of the vocabulary before each prompt. The n-th canary gets slice number n modulo SLICES.

    `Canary.text`, which is for engines that accept no token ids, is not changed. Do not pass configured canaries, because a
    configured answer is valid only for its exact prompt.
    """
    rows = list(range(FIRST_ID, min(vocabulary, FIRST_ID + SLICES * SLICE_TOKENS)))
    random.Random(len(rows)).shuffle(rows)
    return tuple(
        replace(canary, prompt=(*rows[number % SLICES :: SLICES], *canary.prompt))
        for number, canary in enumerate(pool)
    )


def dealt(order: Sequence[str], pool: Sequence[Canary]) -> tuple[str, ...]:
    """Reorder `order` (ids, best first): the best of each vocabulary slice first, then the second best of each, and so on."""
    slice_of = {canary.id: number % SLICES for number, canary in enumerate(pool)}
    taken = [0] * SLICES
    places = {}
    for place, id in enumerate(order):
        places[id] = (taken[slice_of[id]], place)
        taken[slice_of[id]] += 1
    return tuple(sorted(order, key=places.__getitem__))
