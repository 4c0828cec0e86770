"""The canaries of one worker instance on a course: as recorded, or at another interval.

As recorded, each canary keeps its result. Where none was sent for a long time, but would be on this course, the result is
derived from the spells (`spells.py`). At another interval, all results are. `place` is the position within its gap at which
each spell begins and ends, and determines when the next canary follows: 0 is the earliest possible detection, 1 the latest,
0.5 halfway.
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
GAP = 3.0  # intervals without a canary after which probing is considered paused
JITTER = 0.1  # share of an interval, either way
NEAR_S = 2.0  # a recorded trial this long before a trial counts as the same one
SOON_S = 6.0  # and so does one this long after it
JOIN_AGAIN_S = 2.0  # seconds until a failed join canary is sent again
LOOK_S = 1.0  # seconds after a recorded trial; by then it is known whether this course has that trial as well
NOTHING = 255  # pseudo-result: no canary is sent yet; check again
INFINITY = float("inf")


@dataclass(frozen=True, slots=True)
class Question:
    """One canary in flight."""

    sent: float
    at: float  # when its result reaches the journal
    canary: int
    said: int
    fact: CanaryFailed | CanarySlow | None  # its result; None: the canary passed
    check: CheckType
    guessed: bool  # no canary was recorded at that time


class Asker:
    """The canaries of one worker instance on one course."""

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
        self._free = self._interval_changed  # whether this instance's canaries deviate from the recorded ones
        self._tried = set[int]()  # recorded trials that this course has as well
        self._place = place
        self._edges = sorted({spell.began(place) for spell in self._found})
        self._bad = sorted(recorded.facts)
        joined = recorded.at[0] if len(recorded) and recorded.check[0] == JOIN else start
        self._later = max(0.0, start - joined)  # seconds by which the instance joins later than recorded
        self._next = 0  # index of the next recorded canary
        early = JOIN_AGAIN_S if self._later else 0.0
        self._last = start - early  # when the last canary was sent, or could have been sent
        self._turn = 0
        self._then = (0, start, 0)  # `_next`, `_last` and `_turn` after the next canary

    # --- timing -------------------------------------------------------------------------------------------------------

    def following(self, after: float, calm: bool, joining: bool) -> Question | None:
        """Return the next canary that is sent after `after`; for a calm worker, skip those that simply pass.

        `joining`: no canary has admitted the worker yet. The canary counts as sent only once `asked` is called."""
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

    def asked(self) -> None:
        """Mark the canary that `following` returned last as sent."""
        self._next, self._last, self._turn = self._then

    def _joining(self, after: float) -> Question | None:
        """Return the next recorded join canary. Join canaries do not depend on the interval."""
        recorded = self.told
        while self._next < len(recorded) and recorded.check[self._next] == JOIN:
            place, self._next = self._next, self._next + 1
            self._last = recorded.sent[place]
            self._turn = recorded.asked[place]
            if recorded.at[place] > after:
                return self._recorded_at(place)
        return None

    def _at_once(self, after: float) -> Question | None:
        """Return a join canary for a worker that joins later than recorded."""
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
        if calm and not self._active_at(last):  # when the next canary is sent is only known to an interval
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
        """Advance to the canary that is sent first when wrong answers begin."""
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
        """Return the canary after a recorded trial that may be missing here: later recorded canaries would not have been sent."""
        look_at = self.told.sent[place] + LOOK_S
        if after < look_at:
            return Question(look_at, look_at, 0, NOTHING, None, "scheduled", False)
        self._free = True
        return self._slot(after, False)

    def _unasked(self, after: float, place: int) -> Question | None:
        """Return an estimated canary for a long time in which none was recorded."""
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
        """Return the trial requested at a time: the recorded one, or an estimated one."""
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
        """Return the canary before the one that a trial sends; `place` selects it if only some are answered wrongly."""
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
        active = [spell for spell in self._active_at(at) if spell.tells(canary)]
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
    """Return the fact that reports a canary's result."""
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
    """Return whether passed canaries change nothing about a worker, and time alone changes nothing either."""
    health, state = worker.health, worker.breaker
    quiet = not (
        health.canaries.failures or health.slowness.reports or health.disputed or health.charges.convictions
    )
    return (
        quiet
        and worker.well
        and health.ramp >= 1
        and not (state.canary_failures or state.request_failures)
        and not worker.drain.wanted
        and not health.exit.leaving
        and not health.charges.accused
    )


def is_asked(worker: Worker) -> bool:
    """Return whether canaries are sent to a worker: a draining worker gets them only after a resume request."""
    return worker.health.status is not HealthStatus.DRAINING or worker.health.exit.resumed
