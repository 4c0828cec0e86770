"""A course that history could have taken: the facts of the world, decided by the deciders under a policy, from a time on.

What was decided then is left out; what follows from decisions follows from the new ones: a breaker's trial is asked when that
half-opens, a drained worker reports that it is empty, requests fail nowhere where none are sent.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from heapq import heappop, heappush
from itertools import count
from typing import Any

from controller.deciders import breaker, drain, forgetting, health_moves
from controller.deciders.degradation import due_at as level_due_at
from controller.deciders.fleet import (
    DECIDERS_VERSION,
    OLDEST,
    FleetPolicy,
    Shares,
    Worker,
    changed_since,
    evolve,
    load,
    settled,
)
from controller.replay.whatif.asking import NOTHING, Asker, Question, calm, is_asked, result
from controller.replay.whatif.consequences import Successions, emptied, shifted, successions
from controller.replay.whatif.recording import GIVEN, Happened, Recording, instant
from controller.replay.whatif.stretch import CanariesTold
from controller.replay.whatif.weights import Weights
from events.decisions import (
    DrainStarted,
    GoldenAgreed,
    GoldenRetired,
    HealthChanged,
    HealthStatus,
    PolicyAdopted,
    SpareActivated,
    SpareReleased,
    WorkerDecision,
)
from events.fact import Decision, Fact, Recorded
from events.frozen import replace
from events.observations import (
    CanaryResult,
    DrainFinished,
    GoldenDisputed,
    GoldenProposed,
    RequestFailed,
    RequestPoisonous,
    RequestsServed,
    WorkerJoined,
    WorkerObservation,
)
from events.versions import InForce

EMPTY_S = 2.0  # until a drained worker has nothing left, where nobody has seen it
SENT_S = 1.0  # before it fails a request was sent
ABOUT_GOLDENS = (GoldenProposed, GoldenDisputed, *GIVEN)  # these concern many workers
FAR = (
    HealthChanged,
    SpareActivated,
    SpareReleased,
    GoldenRetired,
    GoldenAgreed,
)  # these may change other workers
ROUTINE = (CanaryResult, RequestsServed, RequestFailed)

PolicyOf = Callable[[Mapping[str, Any]], FleetPolicy]


@dataclass(frozen=True, slots=True)
class CourseTerms:
    """Under which terms a course is decided. `place` is where in its gap everything lies that nobody has seen: 0, for the
    shortest trouble; 1, for the longest; 0.5, halfway."""

    policy: PolicyOf = load  # of what was adopted then
    interval_s: float | None = None  # between canaries of a worker; None: as they were
    silence_s: float | None = None  # until a worker counts as silent; None: as it was
    place: float = 0.5


@dataclass(slots=True)
class CourseTaken:
    """What came of it."""

    decided: list[Decision]
    weights: Weights
    guessed: set[str] = field(default_factory=set)  # workers, of whom something had to be guessed


def take(recording: Recording, terms: CourseTerms) -> CourseTaken:
    """Decide a part of history again."""
    course = _Course(recording, terms)
    course.run()
    return CourseTaken(course.decided, course.weights, course.guessed)


class Agenda:
    """What is to be done when."""

    def __init__(self) -> None:
        self.numbers = count()  # in which what is due at the same time is done
        self._queue: list[tuple[float, int, Callable[[float], None]]] = []

    @property
    def next_at(self) -> float:
        """When the next thing is to be done; infinity: nothing is."""
        return self._queue[0][0] if self._queue else float("inf")

    def add(self, at: float, act: Callable[[float], None]) -> None:
        """Do something at a time."""
        heappush(self._queue, (at, next(self.numbers), act))

    def act(self) -> None:
        """Do what is next."""
        at, _, act = heappop(self._queue)
        act(at)


class _Course:
    """One course, as far as it has come."""

    def __init__(self, recording: Recording, terms: CourseTerms) -> None:
        self.decided: list[Decision] = []
        self.weights = Weights(recording.fleet)
        self.guessed: set[str] = set()
        self._recording = recording
        self._terms = terms
        self._fleet = recording.fleet
        self._policy = terms.policy(recording.policy)
        self._moved: tuple[list[float], list[int]] = (
            [float("-inf")],
            [recording.fleet.number],
        )  # when, and its number
        self._said = (
            [at for at, _ in recording.numbers],
            [number for _, number in recording.numbers],
        )  # as it was
        self._changed = set[str]()  # workers, since it was decided last
        self._doubted = set[
            str
        ]()  # workers that doubt alone keeps out of service, or that are kept there all the same
        self._dues: list[tuple[datetime, str]] = []  # when time alone may make something due of a worker
        self._shares = Shares()
        self._askers: dict[tuple[str, str], Asker] = {}
        self._agenda = Agenda()
        self._awaited: dict[
            str, tuple[str, int]
        ] = {}  # of each worker, its life and which canary is the next
        self._trials: dict[str, int] = {}  # of each worker, the half-opening whose trial was asked last
        self._emptied = emptied(recording)
        self._successions: Successions = {}
        self._due: datetime | None = None

    # --- time -------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Take the whole course."""
        recording = self._recording
        moved, end = list(shifted(recording, self._terms.silence_s)), recording.end
        facts, self._successions = successions(recording, moved)
        for name in recording.fleet.workers:
            self._ask(name, recording.start)
        self._settle(instant(recording.start), None)
        place, late = 0, recording.late_s
        while True:
            next_at = facts[place].at if place < len(facts) else float("inf")
            queued = self._agenda.next_at
            due = self._due
            if due is not None and due.timestamp() + late <= min(next_at, queued, end):
                self._settle(due + timedelta(seconds=late), self._concerned(due))
            elif min(next_at, queued) > end:
                return
            elif queued <= next_at:
                self._agenda.act()
            else:
                self._happens(facts[place])
                place += 1

    def _concerned(self, now: datetime) -> set[str]:
        """Return whose machines may have something to say: who has changed, whose time has come, and who is in doubt."""
        found = self._changed | self._doubted
        while self._dues and self._dues[0][0] <= now:
            found.add(heappop(self._dues)[1])
        return found & self._fleet.workers.keys()

    def _remember(self, name: str, now: datetime) -> None:
        """Note when time alone will make something due of a worker about which all has been decided."""
        worker, policy = self._fleet.workers.get(name), self._policy
        if worker is None:
            self._doubted.discard(name)
            return
        times = (
            breaker.due_at(policy.breaker, worker.breaker),
            drain.due_at(policy.drain, worker.drain),
            health_moves.due_at(policy.health, worker.health),
            forgetting.due_at(policy.forgetting, worker),
        )
        for time in times:
            if time is not None and time > now:
                heappush(self._dues, (time, name))
        if worker.budgeted:
            self._doubted.add(name)
        else:
            self._doubted.discard(name)

    def _next_due(self, now: datetime) -> datetime | None:
        """Return when time alone makes something due next, of workers or of models."""
        levels = (level_due_at(self._policy.degradation, state) for state in self._fleet.models.values())
        times = [time for time in levels if time is not None and time > now]
        return min([*times, *(due for due, _ in self._dues[:1])], default=None)

    # --- the world --------------------------------------------------------------------------------------------------

    def _happens(self, happened: Happened) -> None:
        """Take one fact of the world, as it would have been here."""
        at, fact = happened.at, happened.fact
        if isinstance(fact, PolicyAdopted):
            self._policy = self._terms.policy(fact.policy)
            known = OLDEST <= fact.deciders_version <= DECIDERS_VERSION
            force = InForce(fact.kinds, fact.deciders_version) if known else None
            self._settle(instant(at), None, force)
            return
        if isinstance(fact, GIVEN):
            fact = replace(fact, number=self._fleet.number + 1)
            self._moved[0].append(at)
            self._moved[1].append(fact.number)
        elif isinstance(fact, DrainFinished):
            return  # it says so whenever it drains
        elif isinstance(fact, RequestFailed | RequestPoisonous | RequestsServed):
            fact = replace(fact, routed_under=self._number_here(fact.routed_under, at))
        self._absorb(at, fact, happened.id)
        if isinstance(fact, WorkerJoined):
            self._ask(fact.worker, at)

    def _number_here(self, there: int, at: float) -> int:
        """Return how far somebody had read here who had read up to a decision there, and whose request fails at `at`."""
        times, numbers = self._said
        place = bisect_right(numbers, there)
        known = times[place - 1] if place else float("-inf")
        next_ = times[place] if place < len(times) else float("inf")
        return self._number(min(next_, max(known, at - SENT_S)))

    def _number(self, at: float) -> int:
        """Return the number of the last decision before a time."""
        return self._moved[1][bisect_right(self._moved[0], at) - 1]

    def _living(self, name: str, instance: str) -> Worker | None:
        worker = self._fleet.workers.get(name)
        return worker if worker is not None and worker.joined.instance == instance and worker.alive else None

    def _absorb(self, at: float, fact: Fact, id: str) -> None:
        """Fold one fact, and decide what follows."""
        now = instant(at)
        before = self._fleet
        self._fleet = evolve(before, Recorded(seq=0, at=now, fact=fact, id=id))
        name = fact.worker if isinstance(fact, WorkerObservation) else ""
        was, worker = before.workers.get(name), self._fleet.workers.get(name)
        self._changed.add(name)
        if isinstance(fact, WorkerJoined):
            self.weights.note(at, name, worker)
        if isinstance(fact, ABOUT_GOLDENS):
            self._settle(now, None)
        elif not isinstance(fact, ROUTINE) or (
            worker is not None and worker is not was and self._speaks(worker, now)
        ):
            self._settle(now, self._concerned(now))
        if was is not None and worker is not None and calm(was) and not calm(worker):
            self._ask(name, at)  # it was not to be asked for long

    def _speaks(self, worker: Worker, now: datetime) -> bool:
        """Say whether a fact that one worker alone concerns may have made something due."""
        policy = self._policy
        return bool(
            worker.budgeted
            or health_moves.decide(policy.health, worker.health, now)
            or breaker.decide(policy.breaker, worker.breaker, now)
        )

    # --- decisions --------------------------------------------------------------------------------------------------

    def _settle(self, now: datetime, among: set[str] | None, force: InForce | None = None) -> None:
        """Decide all that is due, and do what follows from it. `among`: of these workers alone anything can be. `force`: what is
        in force from now on; None: what is."""
        before, at = self._fleet.workers, now.timestamp()
        decisions, self._fleet = settled(self._policy, self._fleet, now, among, self._shares, force)
        fleet, touched, others = self._fleet, set[str](), set[str]()
        for decision in decisions:
            self._moved[0].append(at)
            self._moved[1].append(decision.number)
            if isinstance(decision, WorkerDecision):
                touched.add(decision.worker)
            if not isinstance(decision, PolicyAdopted):
                self.decided.append(decision)
        if any(isinstance(decision, FAR) for decision in decisions):
            others = {*changed_since(before, fleet.workers)}
        self._changed.clear()
        for decision in decisions:
            if isinstance(decision, DrainStarted):
                self._drains(at, decision)
            elif isinstance(decision, HealthChanged) and decision.after is HealthStatus.DEAD:
                self._succeeds(at, decision)
        concerned = touched | others
        for name in fleet.workers if among is None else (among | concerned):
            self._remember(name, now)
        for name in concerned:
            self.weights.note(at, name, fleet.workers.get(name))
        for name in touched:
            if (worker := fleet.workers.get(name)) is not None:
                self._tries(at, worker)
                self._ask(name, at)
        self._changed |= others - touched
        if among is not None and self._changed:
            self._settle(now, self._concerned(now))
        else:
            self._due = self._next_due(now)

    def _drains(self, at: float, decision: DrainStarted) -> None:
        """Let a worker that drains say when it is empty."""
        seen = self._emptied.get((decision.worker, decision.instance), [])
        was = next((done for started, done in seen if abs(started - at) < 1.0 and done >= at), None)
        place = self._terms.place
        if was is None:
            self.guessed.add(decision.worker)
            if place == 1:
                return
        empty = was if was is not None else at + 2 * EMPTY_S * place
        fact = DrainFinished(worker=decision.worker, instance=decision.instance, completed=0, migrated=0)
        self._agenda.add(empty, lambda when: self._absorb(when, fact, ""))

    def _succeeds(self, at: float, decision: HealthChanged) -> None:
        """Let whoever is held for dead be ended, and his successor come, as soon after that as it was."""
        life = (decision.worker, decision.instance)
        for later, happened in self._successions.pop(life, ()):
            moved = replace(happened, at=at + later)
            if abs(moved.at - happened.at) > 1.0:
                self.guessed.add(decision.worker)
            self._agenda.add(moved.at, lambda _, moved=moved: self._happens(moved))  # type: ignore[misc]

    def _tries(self, at: float, worker: Worker) -> None:
        """Ask for the trial of a breaker that is half-open."""
        name, state = worker.joined.worker, worker.breaker
        if state.position != "half_open" or self._trials.get(name) == state.moved_by:
            return
        self._trials[name] = state.moved_by
        question = self._asker(worker, at).trial(at)
        self._agenda.add(question.at, lambda _: self._answered(name, worker.joined.instance, question))

    # --- canaries ---------------------------------------------------------------------------------------------------

    def _asker(self, worker: Worker, at: float) -> Asker:
        life = (worker.joined.worker, worker.joined.instance)
        known = self._askers.get(life)
        if known is None:
            told = self._recording.canaries.get(life) or CanariesTold(*life)
            terms = self._terms
            known = Asker(told, at, self._recording.interval_s, terms.interval_s, terms.place)
            self._askers[life] = known
        return known

    def _ask(self, name: str, at: float) -> None:
        """Wait for the next canary of a worker."""
        worker = self._fleet.workers.get(name)
        if worker is None or not worker.alive or not is_asked(worker):
            self._awaited.pop(name, None)
            return
        asker = self._asker(worker, at)
        question = asker.following(at, calm(worker), worker.health.joining)
        turn = (worker.joined.instance, next(self._agenda.numbers))
        self._awaited[name] = turn
        if question is not None:
            self._agenda.add(question.at, lambda _: self._turn(name, turn, asker, question))

    def _turn(self, name: str, turn: tuple[str, int], asker: Asker, question: Question) -> None:
        if self._awaited.get(name) != turn:
            return  # something has happened since: it was put otherwise
        if question.said != NOTHING:
            asker.asked()
            self._answered(name, turn[0], question)
        if self._awaited.get(name) == turn:
            self._ask(name, question.at)

    def _answered(self, name: str, instance: str, question: Question) -> None:
        worker = self._living(name, instance)
        if worker is None:
            return
        if question.guessed:
            self.guessed.add(name)
        told = self._asker(worker, question.at).told
        self._absorb(question.at, result(worker, told, question, self._number(question.sent)), "")
