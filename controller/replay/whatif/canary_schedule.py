"""Computes the canaries of a worker instance in a what-if simulation: send times and results.

A simulated history is called a course. If a course has the recorded canary interval, each recorded canary keeps its result. A
canary at another time gets a result that is derived from the spells (`spells.py`), the periods in which the worker answered
badly. If a course has another canary interval, only join canaries, which are sent until the worker is admitted, keep their
recorded results. All other results are then derived from the spells.

The recording shows only between which two canaries a spell began, and between which two it ended. The parameter `place` sets
the assumed times within these gaps, and how soon the first canary within the spell is sent. With 0, a fault is detected as
early as possible; with 1, as late as possible; with 0.5, in between.
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass

from controller.deciders.fleet import Worker
from controller.replay.whatif.journal_stretch import CHECKS, GOOD, MUTE, SLOW, WRONG, RecordedCanaries
from controller.replay.whatif.recording import instant
from controller.replay.whatif.spells import Spell, spells
from events.decisions import HealthStatus
from events.frozen import replace
from events.observations import CanaryFailed, CanaryPassed, CanaryResult, CanarySlow, CheckType

TRIAL, JOIN = CHECKS.index("trial"), CHECKS.index("join")
GAP = 3.0  # probing counts as paused after this many recorded intervals without a canary
JITTER = 0.1  # an interval may be longer or shorter by this share
NEAR_S = 2.0  # a recorded trial up to this many seconds before a trial of the course counts as the same trial
SOON_S = 6.0  # a recorded trial up to this many seconds after a trial of the course counts as the same trial
JOIN_AGAIN_S = 2.0  # seconds after which a failed join canary is sent again
# seconds after a recorded trial until it is certain whether this course has sent that trial as well
LOOK_S = 1.0
NOTHING = 255  # pseudo-result: no canary was sent; the schedule must be computed again at this time
INFINITY = float("inf")


@dataclass(frozen=True, slots=True)
class Question:
    """One canary that is sent to a worker in a what-if simulation, with its result. Times are seconds since 1970."""

    sent: float
    at: float  # when the result reaches the journal
    canary: int  # index in `RecordedCanaries.names`
    said: int  # the result: GOOD, SLOW, WRONG, MUTE or NOTHING
    fact: CanaryFailed | CanarySlow | None  # the result as a fact; None: the canary passed
    check: CheckType
    guessed: bool  # the result is estimated, because no canary was recorded at that time


class Asker:
    """Computes the canaries that a worker instance receives on a course, one after the other.

    A course is a simulated what-if history. `start` is when the instance joins on the course. `recorded_s` is the recorded
    canary interval in seconds. `interval_s` is the interval on the course; None means the recorded one. `CourseTerms` explains
    `place`."""

    def __init__(
        self,
        recorded: RecordedCanaries,
        start: float,
        recorded_s: float,
        interval_s: float | None,
        place: float,
    ) -> None:
        self.told = recorded
        self._found = spells(recorded) if recorded.facts else []
        self._every = (interval_s or recorded_s) * (1.0 + JITTER * (2 * place - 1))
        self._gap = GAP * recorded_s
        self._interval_changed = interval_s is not None
        # whether canaries are computed by the interval instead of taken from the recording
        self._free = self._interval_changed
        self._tried = set[int]()  # indices of the recorded trials that this course has sent as well
        self._place = place
        self._edges = sorted({spell.began(place) for spell in self._found})
        self._bad = sorted(recorded.facts)
        joined = recorded.at[0] if len(recorded) and recorded.check[0] == JOIN else start
        # seconds by which the instance joins later than in the recording
        self._later = max(0.0, start - joined)
        self._next = 0  # index of the next recorded canary
        early = JOIN_AGAIN_S if self._later else 0.0
        self._last = start - early  # when the last canary was sent, or could have been sent
        self._turn = 0
        self._then = (0, start, 0)  # `_next`, `_last` and `_turn` after the next canary

    # --- timing -------------------------------------------------------------------------------------------------------

    def following(self, after: float, calm: bool, joining: bool) -> Question | None:
        """Return the next canary that is sent after the time `after`, or None if no further canary is sent.

        If the worker is `calm` (see the function `calm`), canaries that pass are skipped because they change nothing. `joining`
        is true until a passed join canary has admitted the worker. The returned canary counts as sent only when `mark_sent` is
        called."""
        before = (self._next, self._last, self._turn)
        self._free = self._interval_changed or (self._free and not calm)
        if joining and self._later:
            found: Question | None = self._at_once(after)
        elif self._free:
            found = self._joining(after) or self._slot(after, calm)
        else:
            found = self._recorded(after, calm)
        self._then = (self._next, self._last, self._turn)
        self._next, self._last, self._turn = before
        return found

    def mark_sent(self) -> None:
        """Mark the canary from the last call of `following` as sent."""
        self._next, self._last, self._turn = self._then

    def _joining(self, after: float) -> Question | None:
        """Return the next recorded join canary after the time `after`; None if another type of canary comes first.

        Join canaries, which are sent until the worker is admitted, do not depend on the canary interval. They are therefore
        used as recorded."""
        recorded = self.told
        while self._next < len(recorded) and recorded.check[self._next] == JOIN:
            place, self._next = self._next, self._next + 1
            self._last = recorded.sent[place]
            self._turn = recorded.asked[place]
            if recorded.at[place] > after:
                return self._recorded_at(place)
        return None

    def _at_once(self, after: float) -> Question | None:
        """Return the next join canary of an instance that joins later than recorded; None if the instance ends first."""
        sent = max(after, self._last + JOIN_AGAIN_S)
        if sent >= self.told.end + self._later:
            return None
        self._last = sent
        return self._ask(sent, "join")

    def _slot(self, after: float, calm: bool) -> Question | None:
        every, last = self._every, self._last
        if after > last + every:
            last += int((after - last) / every) * every
        sent = max(last + every, after)
        # Canaries of a calm worker are skipped until its next spell. The time of the first canary within the spell is uncertain
        # by one interval; `_place` says which time is assumed.
        if calm and not self._active_at(last):
            edge = self._edge(last)
            if edge == INFINITY:
                return None
            sent = max(edge + max(1e-6, self._place * every), after)
            self._face(edge)
        if sent >= self.told.end:
            return None
        self._last = sent
        return self._ask(sent, "scheduled")

    def _edge(self, after: float) -> float:
        place = bisect_right(self._edges, after)
        return self._edges[place] if place < len(self._edges) else INFINITY

    def _face(self, edge: float) -> None:
        """Choose the canary that is sent first in the period of wrong answers (the spell) that begins at `edge`.

        Only some canaries are answered wrongly in such a spell. The choice determines how many canaries pass before one fails.
        """
        spell = next((s for s in self._found if s.asked and s.began(self._place) == edge), None)
        if spell is None:
            return
        names, wrong = len(self.told.names), len(spell.asked)
        mean, most = (names - wrong) / (wrong + 1), names - wrong
        twice = 2 * self._place
        steps = round(mean * twice if twice <= 1 else mean + (most - mean) * (twice - 1))
        self._turn = (min(spell.asked) - steps - 1) % names

    def _recorded(self, after: float, calm: bool) -> Question | None:
        recorded = self.told
        place = max(self._next, bisect_left(recorded.at, after if calm else after - 2 * LOOK_S))
        if calm:
            bad = bisect_left(self._bad, place)
            place = self._bad[bad] if bad < len(self._bad) else len(recorded)
        while place < len(recorded) and (recorded.at[place] < after or recorded.check[place] == TRIAL):
            if recorded.check[place] == TRIAL and not calm and place not in self._tried:
                return self._untried(after, place)
            place += 1
        if not calm and (guess := self._unasked(after, place)):
            return guess
        if place == len(recorded):
            self._next = place
            return None
        self._next = place + 1
        self._last, self._turn = recorded.sent[place], recorded.asked[place]
        return self._recorded_at(place)

    def _untried(self, after: float, place: int) -> Question | None:
        """Return the next canary if the recording continues with a trial that this course has not sent.

        `place` is the index of the trial. The course can still send the trial until LOOK_S (1 s) after the recorded time. Until
        then, return a placeholder with the result NOTHING. After this time, the course no longer follows the recording: return
        a canary that is due by the canary interval.
        """
        look_at = self.told.sent[place] + LOOK_S
        if after < look_at:
            return Question(look_at, look_at, 0, NOTHING, None, "scheduled", False)
        self._free = True
        return self._slot(after, False)

    def _unasked(self, after: float, place: int) -> Question | None:
        """Return an estimated canary if the recording has a long gap before the canary at index `place`, else None."""
        recorded = self.told
        before = recorded.sent[place - 1] if place else self._last
        until = recorded.sent[place] if place < len(recorded) else recorded.end
        if until - before < self._gap:
            return None
        sent = max(self._last, before, after - self._every) + self._every
        if sent + self._every > until:
            return None
        self._last = sent
        return self._ask(sent, "scheduled")

    # --- results -------------------------------------------------------------------------------------------------------

    def trial(self, at: float) -> Question:
        """Return the trial canary that is sent at the time `at`.

        If the canary interval is as recorded and a recorded trial is close in time, return the recorded trial. Otherwise return
        an estimate."""
        recorded = self.told
        near = bisect_left(recorded.sent, at - NEAR_S)
        while near < len(recorded) and recorded.sent[near] <= at + SOON_S:
            if recorded.check[near] == TRIAL and not self._interval_changed:
                self._tried.add(near)
                was = self._recorded_at(near)
                return Question(
                    max(at, was.sent), max(at, was.at), was.canary, was.said, was.fact, "trial", False
                )
            near += 1
        self._turn, self._last, self._free = self._chosen(at), at, True
        return self._ask(at, "trial")

    def _chosen(self, at: float) -> int:
        """Choose the canary of a trial at the time `at`, and return the index of the canary before it.

        Canaries have a fixed order, and `_ask` sends the one that follows the returned index. If some canaries are answered
        wrongly at that time, the parameter `place` of `Asker` decides. With 0, the trial sends a correctly answered canary;
        with 1, a wrongly answered one. In all other cases, the trial sends the next canary in the order."""
        some = {canary for s in self._active_at(at) for canary in s.asked}
        rest = set(range(len(self.told.names))) - some
        of = {0.0: rest, 1.0: some}.get(self._place, set())
        return (min(of) - 1) % len(self.told.names) if some and of else self._turn

    def _ask(self, sent: float, check: CheckType) -> Question:
        recorded = self.told
        self._turn = (self._turn + 1) % max(1, len(recorded.names))
        spell = self._spell(sent, self._turn)
        if spell is None:
            latency = recorded.good.latency_ms if recorded.good is not None else 0.0
            return Question(sent, sent + latency / 1000, self._turn, GOOD, None, check, True)
        return Question(sent, sent + spell.took, self._turn, spell.said, spell.fact, check, True)

    def _spell(self, at: float, canary: int) -> Spell | None:
        active = [spell for spell in self._active_at(at) if spell.detects(canary)]
        for result in (MUTE, WRONG, SLOW):
            for one in active:
                if one.said == result:
                    return one
        return None

    def _active_at(self, at: float) -> list[Spell]:
        return [one for one in self._found if one.began(self._place) <= at < one.ended(self._place)]

    def _recorded_at(self, place: int) -> Question:
        recorded = self.told
        fact = recorded.facts.get(place)
        return Question(
            recorded.sent[place],
            recorded.at[place],
            recorded.asked[place],
            recorded.said[place],
            fact,
            CHECKS[recorded.check[place]],
            False,
        )


def result(worker: Worker, recorded: RecordedCanaries, question: Question, sent_under: int) -> CanaryResult:
    """Return a canary's result as the fact that a prober would report.

    `sent_under` is the number of the last decision made before the canary was sent."""
    joined, took = worker.joined, (question.at - question.sent) * 1e3
    like = question.fact or recorded.good
    if like is None:  # no canary of this instance was recorded as passed
        like = CanaryPassed(
            worker=joined.worker, instance=joined.instance, canary_key=joined.canary_key, canary="", check_type="scheduled",
            sent_under=0, sent_at=instant(question.sent), latency_ms=took,
        )  # fmt: skip
    return replace(
        like,
        canary=recorded.names[question.canary] if recorded.names else "",
        check_type=question.check,
        sent_at=instant(question.sent),
        sent_under=sent_under,
    )


def calm(worker: Worker) -> bool:
    """Return whether a worker is in full service with no failure or suspicion pending.

    A passed canary changes nothing about a calm worker."""
    health, state = worker.health, worker.breaker
    quiet = not (
        health.canaries.failures or health.slowness.reports or health.disputed or health.charges.convictions
    )
    return (
        quiet
        and worker.fully_healthy
        and health.ramp >= 1
        and not (state.canary_failures or state.request_failures)
        and not worker.drain.wanted
        and not health.exit.leaving
        and not health.charges.accused
    )


def is_asked(worker: Worker) -> bool:
    """Return whether canaries are sent to a worker. A draining worker gets canaries only after a resume request."""
    return worker.health.status is not HealthStatus.DRAINING or worker.health.exit.resumed
