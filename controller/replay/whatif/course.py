"""Runs a course (a simulated what-if history): the deciders run again on recorded observations.

The recorded decisions are left out, and the consequences of the new decisions are simulated. For example, a trial canary is
sent when a breaker half-opens on the course. A worker that drains on the course reports when it is empty.
"""

import gc
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from heapq import heappop, heappush
from itertools import count

from controller.deciders import breaker, drain, health_state, worker_removal
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
from controller.replay.whatif.canary_schedule import NOTHING, Asker, Question, calm, is_asked, result
from controller.replay.whatif.journal_stretch import RecordedCanaries
from controller.replay.whatif.reading import cores, helpers
from controller.replay.whatif.recording import GIVEN, RecordedFact, Recording, instant
from controller.replay.whatif.weights import Weights
from events import decisions as d
from events import observations as o
from events.fact import Decision, Fact, Recorded
from events.frozen import replace
from events.versions import InForce

EMPTY_S = 2.0  # assumed seconds until a draining worker is empty, if the recording holds no such drain
SENT_S = 1.0  # assumed seconds between sending a request and its failure
# facts that may make decisions about any worker due
ABOUT_GOLDENS = (o.GoldenProposed, o.GoldenDisputed, *GIVEN)
# decisions that may change workers other than the one they are about
FAR = (d.HealthChanged, d.SpareActivated, d.SpareReleased, d.GoldenRetired, d.GoldenAgreed)
ROUTINE = (o.CanaryResult, o.RequestsServed, o.RequestFailed)

PolicyOf = Callable[[Mapping[str, object]], FleetPolicy]


@dataclass(frozen=True, slots=True)
class CourseTerms:
    """The parameters of a course (a simulated what-if history).

    Some times, such as the beginning of a fault, are only known to lie between two recorded events. `place` sets which time
    between the two events is assumed: 0 means the earliest, 1 the latest, and 0.5 the time halfway."""

    # maps a policy that was adopted in the recording to the policy used on the course
    policy: PolicyOf = load
    # seconds between two canaries of a worker; None keeps the recorded canaries
    interval_s: float | None = None
    # seconds without messages until a worker counts as silent; None: as recorded
    silence_s: float | None = None
    place: float = 0.5


@dataclass(slots=True)
class CourseTaken:
    """The result of a course (a simulated what-if history).

    It holds the decisions, and the workers' traffic weights over time."""

    decided: list[Decision]
    weights: Weights
    guessed: set[str] = field(default_factory=set)  # workers for which an event had to be estimated


def take(recording: Recording, terms: CourseTerms) -> CourseTaken:
    """Simulate a recording with the parameters `terms`, and return the resulting decisions and weights."""
    course = _Course(recording, terms)
    course.run()
    return CourseTaken(course.decided, course.weights, course.guessed)


class Agenda:
    """The queue of a simulation's scheduled actions, ordered by time in seconds since 1970."""

    def __init__(self) -> None:
        self.numbers = count()  # actions scheduled for the same time run in this order
        self._queue: list[tuple[float, int, Callable[[float], None]]] = []

    @property
    def next_at(self) -> float:
        """The time of the next action, in seconds since 1970. Infinity means that no action is scheduled."""
        return self._queue[0][0] if self._queue else float("inf")

    def add(self, at: float, act: Callable[[float], None]) -> None:
        """Schedule an action at a time in seconds since 1970. The action is called with that time."""
        heappush(self._queue, (at, next(self.numbers), act))

    def act(self) -> None:
        """Remove the next action from the queue and run it."""
        at, _, act = heappop(self._queue)
        act(at)


class _Course:
    """Runs one course (a simulated what-if history), and holds its fleet state, scheduled actions and decisions."""

    def __init__(self, recording: Recording, terms: CourseTerms) -> None:
        self.decided: list[Decision] = []
        self.weights = Weights(recording.fleet)
        self.guessed: set[str] = set()
        self._recording = recording
        self._terms = terms
        self._fleet = recording.fleet
        self._policy = terms.policy(recording.policy)
        # times and numbers of the decisions made on this course
        self._moved: tuple[list[float], list[int]] = ([float("-inf")], [recording.fleet.number])
        # times and numbers of the recorded decisions
        self._said = ([at for at, _ in recording.numbers], [number for _, number in recording.numbers])
        self._changed = set[str]()  # workers that changed since the last call of `_settle`
        # workers about which the ejection budget may have to decide (`Worker.budgeted`)
        self._doubted = set[str]()
        # heap: times at which a decision about a worker becomes due without a fact
        self._dues: list[tuple[datetime, str]] = []
        self._shares = Shares()
        self._askers: dict[tuple[str, str], Asker] = {}
        self._agenda = Agenda()
        # by worker: its instance and the agenda number of its next canary, which identifies a canary that was rescheduled
        self._awaited: dict[str, tuple[str, int]] = {}
        # by worker: number of the last half-opening decision for which a trial was sent
        self._trials: dict[str, int] = {}
        self._emptied = emptied(recording)
        self._successions: Successions = {}
        self._due: datetime | None = None

    # --- main loop -------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Apply all recorded facts and scheduled actions in order of time, and make each decision when it is due."""
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
        """Return the workers about which a decision may be due at `now`.

        These are the workers that have changed or have reached a due time. The workers in `_doubted` are included, because the
        ejection budget may have to decide about them."""
        found = self._changed | self._doubted
        while self._dues and self._dues[0][0] <= now:
            found.add(heappop(self._dues)[1])
        return found & self._fleet.workers.keys()

    def _remember(self, name: str, now: datetime) -> None:
        """Record the times at which decisions about a worker become due without a new fact, and update `_doubted`."""
        worker, policy = self._fleet.workers.get(name), self._policy
        if worker is None:
            self._doubted.discard(name)
            return
        times = (
            breaker.due_at(policy.breaker, worker.breaker),
            drain.due_at(policy.drain, worker.drain),
            health_state.due_at(policy.health, worker.health),
            worker_removal.due_at(policy.forgetting, worker),
        )
        for time in times:
            if time is not None and time > now:
                heappush(self._dues, (time, name))
        if worker.budgeted:
            self._doubted.add(name)
        else:
            self._doubted.discard(name)

    def _next_due(self, now: datetime) -> datetime | None:
        """Return when the next decision becomes due without a new fact; None if no decision will."""
        levels = (level_due_at(self._policy.degradation, state) for state in self._fleet.models.values())
        times = [time for time in levels if time is not None and time > now]
        return min([*times, *(due for due, _ in self._dues[:1])], default=None)

    # --- observations --------------------------------------------------------------------------------------------------

    def _happens(self, happened: RecordedFact) -> None:
        """Apply one recorded fact to this course, with the fact's decision numbers replaced by those of this course."""
        at, fact = happened.at, happened.fact
        if isinstance(fact, d.PolicyAdopted):
            self._policy = self._terms.policy(fact.policy)
            known = OLDEST <= fact.deciders_version <= DECIDERS_VERSION
            force = InForce(fact.kinds, fact.deciders_version) if known else None
            self._settle(instant(at), None, force)
            return
        if isinstance(fact, GIVEN):
            fact = replace(fact, number=self._fleet.number + 1)
            self._moved[0].append(at)
            self._moved[1].append(fact.number)
        elif isinstance(fact, o.DrainFinished):
            return  # `_drains` creates a DrainFinished for each drain of the course
        elif isinstance(fact, o.RequestFailed | o.RequestPoisonous | o.RequestsServed):
            fact = replace(fact, routed_under=self._number_here(fact.routed_under, at))
        self._absorb(at, fact, happened.id)
        if isinstance(fact, o.WorkerJoined):
            self._ask(fact.worker, at)

    def _number_here(self, recorded_number: int, at: float) -> int:
        """Return the number of the last decision that this course had made when a recorded request was sent.

        `at` is when the request failed or was served. `recorded_number` is the last recorded decision that the frontend knew
        when it sent the request (`routed_under`). The send time therefore lies between this decision and the next recorded
        decision. The send time is assumed to be `SENT_S` seconds before `at`. If that time is not between the two decisions,
        the time of the nearer decision is assumed."""
        times, numbers = self._said
        place = bisect_right(numbers, recorded_number)
        known = times[place - 1] if place else float("-inf")
        next_ = times[place] if place < len(times) else float("inf")
        return self._number(min(next_, max(known, at - SENT_S)))

    def _number(self, at: float) -> int:
        """Return the number of the last decision that this course had made at a time."""
        return self._moved[1][bisect_right(self._moved[0], at) - 1]

    def _living(self, name: str, instance: str) -> Worker | None:
        worker = self._fleet.workers.get(name)
        return worker if worker is not None and worker.joined.instance == instance and worker.alive else None

    def _absorb(self, at: float, fact: Fact, id: str) -> None:
        """Fold one fact into the fleet state. If the fact can have made a decision due, make all due decisions."""
        now = instant(at)
        before = self._fleet
        self._fleet = evolve(before, Recorded(seq=0, at=now, fact=fact, id=id))
        name = fact.worker if isinstance(fact, o.WorkerObservation) else ""
        was, worker = before.workers.get(name), self._fleet.workers.get(name)
        self._changed.add(name)
        if isinstance(fact, o.WorkerJoined):
            self.weights.note(at, name, worker)
        if isinstance(fact, ABOUT_GOLDENS):
            self._settle(now, None)
        elif not isinstance(fact, ROUTINE) or (
            worker is not None and worker is not was and self._speaks(worker, now)
        ):
            self._settle(now, self._concerned(now))
        if was is not None and worker is not None and calm(was) and not calm(worker):
            self._ask(name, at)  # while the worker was calm, the schedule skipped canaries that it would pass

    def _speaks(self, worker: Worker, now: datetime) -> bool:
        """Return whether a fact about a canary or request of this worker may have made a decision due at `now`."""
        policy = self._policy
        return bool(
            worker.budgeted
            or health_state.decide(policy.health, worker.health, now)
            or breaker.decide(policy.breaker, worker.breaker, now)
        )

    # --- decisions --------------------------------------------------------------------------------------------------

    def _settle(self, now: datetime, among: set[str] | None, force: InForce | None = None) -> None:
        """Make all due decisions and schedule their consequences.

        If `among` is given, the deciders evaluate only these workers. If `force` is given, it replaces the fact kinds and the
        deciders version in force.
        """
        before, at = self._fleet.workers, now.timestamp()
        decisions, self._fleet = settled(self._policy, self._fleet, now, among, self._shares, force)
        fleet = self._fleet
        far = any(isinstance(decision, FAR) for decision in decisions)
        others = {*changed_since(before, fleet.workers)} if far else set[str]()
        touched = {decision.worker for decision in decisions if isinstance(decision, d.WorkerDecision)}
        self._changed.clear()
        for decision in decisions:
            self._decided(at, decision)
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

    def _decided(self, at: float, decision: Decision) -> None:
        """Record a decision. If the decision starts a drain or declares a worker dead, schedule what follows from it."""
        self._moved[0].append(at)
        self._moved[1].append(decision.number)
        if not isinstance(decision, d.PolicyAdopted):
            self.decided.append(decision)
        if isinstance(decision, d.DrainStarted):
            self._drains(at, decision)
        elif isinstance(decision, d.HealthChanged) and decision.after is d.HealthStatus.DEAD:
            self._succeeds(at, decision)

    def _drains(self, at: float, decision: d.DrainStarted) -> None:
        """Schedule the DrainFinished report of a drain that starts at `at`.

        If the recording holds a drain of this instance that began within 1 s of `at`, the report is scheduled for the end of
        that drain. Otherwise `CourseTerms.place` determines an estimated end. If `place` is 1, the estimate is that the worker
        never becomes empty, and no report is scheduled."""
        recorded = self._emptied.get((decision.worker, decision.instance), [])
        was = next((done for started, done in recorded if abs(started - at) < 1.0 and done >= at), None)
        place = self._terms.place
        if was is None:
            self.guessed.add(decision.worker)
            if place == 1:
                return
        empty = was if was is not None else at + 2 * EMPTY_S * place
        fact = o.DrainFinished(worker=decision.worker, instance=decision.instance, completed=0, migrated=0)
        self._agenda.add(empty, lambda when: self._absorb(when, fact, ""))

    def _succeeds(self, at: float, decision: d.HealthChanged) -> None:
        """Schedule the end of a dead instance's process and the start of its successor.

        Both delays, counted from the DEAD decision, are the same as in the recording."""
        life = (decision.worker, decision.instance)
        for later, happened in self._successions.pop(life, ()):
            moved = replace(happened, at=at + later)
            if abs(moved.at - happened.at) > 1.0:
                self.guessed.add(decision.worker)
            self._agenda.add(moved.at, lambda _, moved=moved: self._happens(moved))  # type: ignore[misc]

    def _tries(self, at: float, worker: Worker) -> None:
        """Schedule the result of a trial canary if the worker's breaker is half-open and has no trial yet."""
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
            canaries = self._recording.canaries.get(life) or RecordedCanaries(*life)
            terms = self._terms
            known = Asker(canaries, at, self._recording.interval_s, terms.interval_s, terms.place)
            self._askers[life] = known
        return known

    def _ask(self, name: str, at: float) -> None:
        """Cancel a worker's scheduled canary, and schedule the next one if canaries are sent to the worker."""
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
            return  # the worker's next canary was rescheduled, which cancels this one
        if question.said != NOTHING:
            asker.mark_sent()
            self._answered(name, turn[0], question)
        if self._awaited.get(name) == turn:
            self._ask(name, question.at)

    def _answered(self, name: str, instance: str, question: Question) -> None:
        worker = self._living(name, instance)
        if worker is None:
            return
        if question.guessed:
            self.guessed.add(name)
        canaries = self._asker(worker, question.at).told
        self._absorb(question.at, result(worker, canaries, question, self._number(question.sent)), "")


FORKED_FROM = 20_000  # events; a course of a shorter recording takes less time than starting a process
# what the forked processes work on; they inherit it
_task: tuple[Recording, Sequence[CourseTerms]] | None = None


def take_all(recording: Recording, terms: Sequence[CourseTerms]) -> list[CourseTaken]:
    """Run one course (a simulated what-if history) for each element of `terms`, and return the results in order.

    The courses of a long recording run in parallel, in at most one process per core. Raise HelperGone if a process is killed.
    """
    if recording.events < FORKED_FROM or cores() == 1 or len(terms) == 1:
        return [take(recording, one) for one in terms]
    global _task
    _task = recording, terms
    gc.freeze()  # otherwise a garbage collection in a child would copy the memory that it shares with the parent
    try:
        with helpers(min(cores(), len(terms))) as pool:
            return list(pool.map(_take, range(len(terms))))
    finally:
        gc.unfreeze()
        _task = None


def _take(place: int) -> CourseTaken:
    assert _task is not None
    recording, terms = _task
    return take(recording, terms[place])


# by (worker, instance): the facts that follow the DEAD decision, each with its delay in seconds after that decision
Successions = dict[tuple[str, str], list[tuple[float, RecordedFact]]]


def shifted(recording: Recording, silence_s: float | None) -> Iterator[RecordedFact]:
    """Yield the recorded facts as they would have occurred with a silence timeout of `silence_s` seconds.

    The facts are in order of time. If `silence_s` is None, all facts are yielded as recorded. Otherwise the
    report of a silence moves by the difference between `silence_s` and the recorded timeout. If the worker is reachable again
    or has left by the report's new time, the report is dropped. Reports that came before the recorded timeout do not move."""
    if silence_s is None:
        yield from recording.happened
        return
    later = silence_s - recording.silence_s
    back: dict[tuple[str, str], list[float]] = {}
    for one in recording.happened:
        if isinstance(one.fact, o.WorkerHeard | o.WorkerLeft):
            back.setdefault((one.fact.worker, one.fact.instance), []).append(one.at)
    moved: list[RecordedFact] = []
    for one in recording.happened:
        fact = one.fact
        if isinstance(fact, o.WorkerSilent) and fact.silent_s >= recording.silence_s:
            at = max(recording.start, one.at + later)
            heard = next((h for h in back.get((fact.worker, fact.instance), []) if h >= one.at), float("inf"))
            if at < heard:
                moved.append(
                    RecordedFact(at, replace(fact, silent_s=max(0.0, fact.silent_s + later)), one.id)
                )
        else:
            moved.append(one)
    yield from sorted(moved, key=lambda one: one.at)


def successions(recording: Recording, facts: list[RecordedFact]) -> tuple[list[RecordedFact], Successions]:
    """Split off the facts that follow from an instance's DEAD decision: shutdown, exit and the successor's join.

    Return two results. The first is all other facts. The second maps each dead instance to the facts split off, each with
    its delay in seconds after the DEAD decision.
    """
    rest: list[RecordedFact] = []
    found: Successions = {}
    # by worker: the instance that was declared DEAD, after its process has ended
    ended: dict[str, tuple[str, str]] = {}
    for one in facts:
        fact, life = one.fact, None
        if isinstance(fact, o.WorkerJoined):
            life = ended.pop(fact.worker, None)
        elif isinstance(fact, o.WorkerLeft | o.ShutdownBegan):
            life = (fact.worker, fact.instance)
        dead = recording.dead.get(life) if life is not None else None
        if life is None or dead is None or one.at < dead:
            rest.append(one)
            continue
        found.setdefault(life, []).append((one.at - dead, one))
        if isinstance(fact, o.WorkerLeft):
            ended[fact.worker] = life
    return rest, found


def emptied(recording: Recording) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """Return the finished drains of each (worker, instance), as pairs of begin and end in seconds since 1970."""
    began: dict[tuple[str, str], list[float]] = {}
    for decision in recording.decided:
        if isinstance(decision, d.DrainStarted):
            began.setdefault((decision.worker, decision.instance), []).append(decision.decided_at.timestamp())
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for one in recording.happened:
        if isinstance(one.fact, o.DrainFinished):
            life = (one.fact.worker, one.fact.instance)
            started = [at for at in began.get(life, []) if at <= one.at]
            if started:
                found.setdefault(life, []).append((started[-1], one.at))
    return found
