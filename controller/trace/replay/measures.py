"""Collects the measurements of a replay, in bounded memory for any duration."""

import math
from collections import Counter
from dataclasses import dataclass

from controller.trace.replay.answer import ReplayedAnswer, failure
from controller.trace.replay.endpoint import Reply

BASE = 1.01  # ratio of the bounds of two buckets, so that percentiles are exact to half a per cent
LOW_S = 1e-6  # upper bound of the first bucket
BUCKETS = 2_800  # number of buckets, which covers durations up to 10 days
POINTS_MAX = 4_096
KINDS_MAX = 50  # distinct kinds of errors; further kinds are counted as "other"
LATE_MS_MAX = 20.0  # 99th percentile above which the generator counts as too slow
_SCALE = 1 / math.log(BASE)


class DurationHistogram:
    """A histogram of durations in seconds, with buckets of equal width on a logarithmic scale."""

    def __init__(self) -> None:
        self.counts = [0] * BUCKETS
        self.count, self.total = 0, 0.0
        self.min, self.max = math.inf, 0.0

    def add(self, value: float) -> None:
        """Add a duration in seconds."""
        place = int(math.log(value / LOW_S) * _SCALE) if value > LOW_S else 0
        self.counts[place if place < BUCKETS else -1] += 1
        self.count += 1
        self.total += value
        if value < self.min:
            self.min = value
        if value > self.max:
            self.max = value

    @property
    def mean(self) -> float:
        """The mean of all durations in seconds; 0 if there are none."""
        return self.total / self.count if self.count else 0.0

    def percentiles(self, *shares: float) -> list[float]:
        """Return percentiles in seconds; zeros if there are no durations.

        `shares` are fractions from 0 to 1 in increasing order; 0.5 gives the median.
        """
        found: list[float] = []
        seen, wanted = 0, [max(1, math.ceil(share * self.count)) for share in shares]
        for place, count in enumerate(self.counts):
            seen += count
            while len(found) < len(wanted) and count and seen >= wanted[len(found)]:
                found.append(min(self.max, max(self.min, middle_s(place))))
        return found or [0.0] * len(shares)


def middle_s(place: int) -> float:
    """Return the geometric mean of the bounds of bucket number `place`, in seconds."""
    return LOW_S * math.pow(BASE, place + 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerSlo:
    """The limits in seconds within which an answer counts as good. None means no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None  # mean time between an answer's first token and its last
    itl_s: float | None = None  # the longest gap of an answer

    def __bool__(self) -> bool:
        return not (self.ttft_s is None and self.tpot_s is None and self.itl_s is None)

    def met(self, ttft: float, tpot: float, gap_max: float) -> bool:
        """Return whether an answer with these times, in seconds, is within all limits."""
        limits = ((self.ttft_s, ttft), (self.tpot_s, tpot), (self.itl_s, gap_max))
        return all(limit is None or value <= limit for limit, value in limits)


@dataclass(frozen=True, slots=True)
class Point:
    """One sample of a replay, for the replay's chart. All counts except `in_flight` are cumulative."""

    at_s: float
    in_flight: int
    sent: int
    failed: int
    events: int


class ReplayTimeline:
    """The samples of a replay over time, in bounded memory.

    When the maximum number of samples is reached, every second sample is dropped and the interval between samples doubles.
    """

    def __init__(self, points_max: int = POINTS_MAX) -> None:
        self.points: list[Point] = []
        self._points_max = points_max
        self._every = self._skipped = 1

    def due(self) -> bool:
        """Return whether to add a sample now. The caller must call this method exactly once per tick of the sampling clock."""
        if self._skipped < self._every:
            self._skipped += 1
            return False
        self._skipped = 1
        return True

    def add(self, point: Point) -> None:
        """Add a sample. If the maximum number of samples is reached, drop every second sample and halve the sampling rate."""
        self.points.append(point)
        if len(self.points) >= self._points_max:
            del self.points[1::2]
            self._every *= 2


@dataclass(slots=True)
class TokenCounts:
    """Token totals over all requests. The server's own counts are used if the server reports them."""

    events: int = 0  # number of events with output; an event may have several tokens
    output: int = 0  # tokens of all answers
    input: int = 0  # tokens of the prompts of complete answers
    cached: int = 0  # prompt tokens found in prefix caches
    cached_of: int = 0  # all prompt tokens of the answers that report cached tokens
    cached_answers: int = 0  # number of answers that report cached tokens


class GeneratorTimes:
    """The delays of the load generator, and its CPU time."""

    def __init__(self) -> None:
        self.late = DurationHistogram()  # delay from when a request could be sent until it was sent
        self.lag = DurationHistogram()  # lag of the generator's event loop
        self.held = DurationHistogram()  # time held back, because the maximum was in flight
        self.cpu_s = 0.0  # CPU time of this process

    @property
    def kept_up(self) -> bool:
        """Whether the generator kept its schedule. If not, the measured times include the generator's own delays."""
        return all(one.percentiles(0.99)[0] * 1e3 <= LATE_MS_MAX for one in (self.late, self.lag))


class ReplayMeasures:
    """All counts and times of a replay.

    All times are in seconds. `began` is when the replay began, and `ended` is when its last answer ended.
    """

    def __init__(self, slo: AnswerSlo, points_max: int = POINTS_MAX) -> None:
        self.slo = slo
        self.began = self.ended = 0.0
        self.sent = self.whole = self.failed = self.cut = self.in_flight = self.in_flight_max = 0
        self.shorter = 0  # answers with fewer tokens than requested
        self.good = 0
        self.tokens = TokenCounts()
        self.generator = GeneratorTimes()
        self.timeline = ReplayTimeline(points_max)
        self.ttft, self.itl = DurationHistogram(), DurationHistogram()
        self.tpot, self.e2e = DurationHistogram(), DurationHistogram()
        self.errors = Counter[str]()
        self.samples: dict[str, str] = {}

    def first_token(self, seconds: float) -> None:
        """Record the time from a request to its answer's first token."""
        self.tokens.events += 1
        self.ttft.add(seconds)

    def gap(self, seconds: float) -> None:
        """Record the time between two events of one answer."""
        self.tokens.events += 1
        self.itl.add(seconds)

    def leaves(self) -> None:
        """Count a request as sent and in flight. Called when the request is sent."""
        self.sent += 1
        self.in_flight += 1
        if self.in_flight > self.in_flight_max:
            self.in_flight_max = self.in_flight

    def ends(self, reply: Reply, answer: ReplayedAnswer, asked: int) -> None:
        """Record the outcome of a request that asked for an answer of `asked` tokens."""
        self.in_flight -= 1
        self.ended = max(self.ended, reply.ended)
        self.tokens.output += answer.tokens
        kind, sample = failure(reply, answer)
        if kind:
            self.fails(kind, sample)
            return
        self.whole += 1
        self.shorter += answer.tokens < asked
        self.tokens.input += answer.prompt_tokens
        if answer.cached is not None:
            self.tokens.cached_answers += 1
            self.tokens.cached_of += answer.prompt_tokens
            self.tokens.cached += answer.cached
        tpot = 0.0
        self.e2e.add(reply.ended - reply.began)
        if answer.tokens > 1:
            tpot = (answer.last - answer.first) / (answer.tokens - 1)
            self.tpot.add(tpot)
        self.good += self.slo.met(answer.first - answer.asked_at, tpot, answer.gap_max)

    def fails(self, kind: str, sample: str) -> None:
        """Count a failed request by the kind of its error, and keep the first error text of each kind."""
        self.failed += 1
        if kind not in self.errors and len(self.errors) >= KINDS_MAX:
            kind = "other"
        self.errors[kind] += 1
        self.samples.setdefault(kind, sample)

    def cuts(self) -> None:
        """Count a request that was in flight when the replay was stopped."""
        self.in_flight -= 1
        self.cut += 1

    def sample(self, at: float) -> None:
        """Add a sample of the current counts to the timeline if a sample is due. `at` is the current time."""
        if self.timeline.due():
            self.timeline.add(
                Point(at - self.began, self.in_flight, self.sent, self.failed, self.tokens.events)
            )

    @property
    def seconds(self) -> float:
        """The duration of the replay in seconds."""
        return max(self.ended - self.began, 0.0)
