"""Compares recorded history with the history that a policy change would have led to.

There are three histories. `recorded` is the history on the journal. `again` is simulated under the recorded policy, and its
differences from `recorded` show the limits of the simulation. `would` is simulated under the changed policy.

A number in `would`, such as the number of ejections, is a range if it depends on unrecorded times. To find the range, the
simulation runs once per value in `PLACES`. The first run assumes each unrecorded time as early as possible, the second halfway,
and the third as late as possible.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from controller.deciders.fleet import DECIDERS_VERSION, OLDEST, dump, load
from controller.replay.sentences import count
from controller.replay.whatif.course import CourseTaken, CourseTerms, take_all
from controller.replay.whatif.faults import FaultPhases, FaultSeen, ejections, false_ejections, fared, faults
from controller.replay.whatif.question import INTERVAL, SILENCE, PolicyChange, setting
from controller.replay.whatif.recording import Recording
from controller.replay.whatif.weights import Weights
from events import decisions as d
from events.fact import Decision

PLACES = (0.0, 0.5, 1.0)  # values of `CourseTerms.place`; the middle one gives the likely estimate
LIKELY = len(PLACES) // 2
MEASURES = ("noticed", "fenced", "recovered")
INFINITY = float("inf")


@dataclass(frozen=True, slots=True)
class Estimate:
    """The lowest, the likely and the highest estimate of one number, such as a number of ejections.

    If the number is the time until a fault is noticed, fenced or recovered, it can be infinity. Infinity means that the
    fault did not reach this phase before the worker's next fault or the end of the recording."""

    low: float
    likely: float
    high: float

    @property
    def exact(self) -> bool:
        """Whether the lowest and the highest estimate are equal."""
        return self.low == self.high


@dataclass(frozen=True, slots=True)
class FaultCompared:
    """One fault, and the seconds until it was noticed, fenced and recovered in each history.

    The seconds count from the fault's estimated beginning. A fault is fenced when its worker gets no new requests."""

    fault: FaultSeen
    recorded: dict[str, float]
    again: dict[str, float]
    would: dict[str, Estimate]


@dataclass(frozen=True, slots=True)
class TotalCompared:
    """One total over the whole recording, such as the number of ejections, in all three histories.

    These are the recorded history and the two simulated ones."""

    name: str
    unit: str
    recorded: float
    again: float
    would: Estimate


@dataclass(frozen=True, slots=True)
class DecisionsCompared:
    """How often a decision about a worker or model is made under the recorded policy and under the changed policy."""

    kind: str
    subject: str
    what: str
    again: int  # number of decisions under the recorded policy
    would: int  # number of decisions under the changed policy


@dataclass(frozen=True, slots=True)
class Comparison:
    """The answer to a what-if question: what a policy change would have changed."""

    recording: Recording
    asked: PolicyChange
    changed: list[tuple[str, Any, Any]]  # setting, recorded value, changed value
    faults: list[FaultCompared]
    totals: list[TotalCompared]
    decisions: list[DecisionsCompared]  # decisions that `would` makes more or less often than `again`
    limits: list[str]

    def as_json(self) -> object:
        """Return the comparison as plain JSON.

        Fault times are seconds since 1970; phases are seconds since the fault began."""
        return finite({
            "from": self.recording.start, "to": self.recording.end, "events": self.recording.events,
            "asked": [{"setting": name, "was": was, "asked": now} for name, was, now in self.changed],
            "faults": [
                {"worker": one.fault.worker, "what": one.fault.what, "incident": one.fault.incident, "began": one.fault.began,
                 "first_sign": one.fault.first, "last_sign": one.fault.last, "recorded": one.recorded, "again": one.again,
                 "would": one.would}
                for one in self.faults
            ],
            "totals": self.totals, "decisions": self.decisions, "limits": self.limits,
        })  # fmt: skip


def finite(value: object) -> object:
    """Return a value as plain JSON types; an infinite number becomes None."""
    match value:
        case dict():
            return {key: finite(one) for key, one in value.items()}
        case list() | tuple():
            return [finite(one) for one in value]
        case Estimate() | TotalCompared() | DecisionsCompared():
            return finite(asdict(value))
    return None if value == INFINITY else value


def compare(recording: Recording, asked: PolicyChange, *, incident: str = "") -> Comparison:
    """Compare the recorded history with its simulation under the policy change `asked`.

    If `incident` is given, the result contains only the fault for which that incident was opened. If no such fault is found,
    the result contains all faults. Raise HelperGone if a helper process is killed."""
    found = faults(recording)
    shown = [one for one in found if one.incident == incident] if incident else found
    again, *courses = take_all(recording, [CourseTerms(), *(asked.terms(place) for place in PLACES)])
    return Comparison(
        recording,
        asked,
        _changed(recording, asked),
        [_fault(one, recording.weights, again, courses) for one in shown or found],
        totals(recording, asked, found, again, courses),
        _decisions(again.decided, courses[LIKELY].decided),
        limits(recording, asked, found, courses),
    )


def _changed(recording: Recording, asked: PolicyChange) -> list[tuple[str, Any, Any]]:
    written = dump(load(recording.policy))
    was = {INTERVAL: round(recording.interval_s, 2), SILENCE: recording.silence_s}
    for part, settings in written.items():
        was |= {f"{part}.{name}": value for name, value in settings.items()}
    return [(name, was.get(name), value) for name, value in asked.values.items()]


def _fault(
    fault: FaultSeen, weights: Weights, again: CourseTaken, courses: Sequence[CourseTaken]
) -> FaultCompared:
    would = [_seconds(fault, fared(fault, one.weights)) for one in courses]
    return FaultCompared(
        fault,
        _seconds(fault, fared(fault, weights)),
        _seconds(fault, fared(fault, again.weights)),
        {name: estimate([one[name] for one in would]) for name in MEASURES},
    )


def _seconds(fault: FaultSeen, what: FaultPhases) -> dict[str, float]:
    times = {name: getattr(what, name) for name in MEASURES}
    return {name: INFINITY if at is None else at - fault.likely for name, at in times.items()}


def estimate(figures: Sequence[float]) -> Estimate:
    """Combine the results of several simulations into an estimate.

    `figures` holds one number per simulation, in the order of `PLACES`."""
    return Estimate(min(figures), figures[len(figures) // 2], max(figures))


# --- totals ------------------------------------------------------------------------------------------------------


def totals(
    recording: Recording,
    asked: PolicyChange,
    found: list[FaultSeen],
    again: CourseTaken,
    courses: Sequence[CourseTaken],
) -> list[TotalCompared]:
    """Compare ejections, missing capacity, exposed answers and canaries over the whole recording.

    Exposed answers are those from faulty workers that were still in service. `again` is the simulation under the recorded policy.
    `courses` holds the simulations under the changed policy, one per value in `PLACES`."""
    start, end = recording.start, recording.end
    ways = (recording.weights, again.weights, *(one.weights for one in courses))
    figures = [
        ("ejections", "", [float(ejections(one, start, end)) for one in ways]),
        ("of them false", "", [float(false_ejections(found, one, start, end)) for one in ways]),
        ("capacity missing", "GPU s", [one.missing(start, end) for one in ways]),
        ("answers exposed", "", [_exposed(recording, found, one) for one in ways]),
        ("canaries asked", "", _canaries(recording, asked, len(courses))),
    ]
    return [
        TotalCompared(name, unit, values[0], values[1], estimate(values[2:]))
        for name, unit, values in figures
    ]


def _exposed(recording: Recording, found: Iterable[FaultSeen], weights: Weights) -> float:
    """Return the number of exposed answers: those from faulty workers that were not fenced yet.

    A fenced worker is out of service. `weights` are the workers' weights in one history. For the recorded history, return the
    number that the journal records. For a simulated history, return an estimate: the sum of rate times duration over all
    faults. The rate is the worker's recorded rate of exposed answers or, if unknown, of all answers. The duration is the time
    from the beginning of the fault until the worker is fenced or the fault ends.
    """
    total = 0.0
    for fault in found:
        if not fault.wrong:
            continue
        fenced = fared(fault, weights).fenced
        seconds = max(0.0, min(fault.over, fenced or fault.over) - fault.likely)
        if weights is recording.weights:
            total += _seen(recording, fault)
        else:
            total += _rate(recording, fault) * seconds
    return total


def _seen(recording: Recording, fault: FaultSeen) -> float:
    return float(sum(fault.first <= at <= fault.until for at in recording.exposed.get(fault.worker, [])))


def _rate(recording: Recording, fault: FaultSeen) -> float:
    exposed, fenced = _seen(recording, fault), fared(fault, recording.weights).fenced
    if exposed and fenced is not None and fenced > fault.likely:
        return exposed / (fenced - fault.likely)
    answers, _ = recording.served.get(fault.worker, (0, 0.0))
    serves = sum(
        last - first
        for first, last, step in recording.weights.stretches(fault.worker, recording.start, recording.end)
        if step.weight
    )
    return answers / serves if serves else 0.0


def _canaries(recording: Recording, asked: PolicyChange, courses: int) -> list[float]:
    put = float(sum(len(canaries) for canaries in recording.canaries.values()))
    more = recording.interval_s / asked.values[INTERVAL] if asked.values.get(INTERVAL) else 1.0
    return [put, put, *[put * more] * courses]


def _decisions(again: Iterable[Decision], would: Iterable[Decision]) -> list[DecisionsCompared]:
    """Return the decisions that the changed policy makes more or less often than the recorded policy.

    `would` holds the decisions under the changed policy, `again` those under the recorded policy."""
    ours, theirs = Counter(map(_essence, again)), Counter(map(_essence, would))
    differing = sorted(key for key in ours | theirs if ours[key] != theirs[key] and key is not None)
    return [DecisionsCompared(*key, again=ours[key], would=theirs[key]) for key in differing]


def _essence(decision: Decision) -> tuple[str, str, str] | None:
    """Return the kind, subject and effect of a decision, so that decisions can be counted regardless of their time.

    Return None for a decision that the comparison leaves out."""
    if isinstance(decision, d.Absorbed | d.IncidentClosed | d.GoldenAgreed | d.GoldenRetired):
        return None
    subject = (
        decision.worker if isinstance(decision, d.WorkerDecision) else str(getattr(decision, "model", ""))
    )
    what = ""
    match decision:
        case d.HealthChanged():
            what = f"{decision.after.value}: {decision.reason}"
        case d.BreakerOpened() | d.DrainStarted():
            what = decision.reason
        case d.DrainEnded():
            what = decision.outcome
        case d.WeightCapped():
            what = "lifted" if decision.weight is None else f"kept at {decision.weight:g}"
        case d.DegradationChanged():
            what = f"level {decision.after}"
        case d.IncidentOpened():
            subject, what = decision.subject.partition(":")[2], decision.symptom
        case _:
            pass
    return decision.kind(), subject, what


def limits(
    recording: Recording, asked: PolicyChange, found: Sequence[FaultSeen], courses: Sequence[CourseTaken]
) -> list[str]:
    """Return sentences that tell the user what the comparison does not account for."""
    guessed = sorted({name for one in courses for name in one.guessed})
    names = ", ".join(guessed[:4]) + (" and others" if len(guessed) > 4 else "")
    silence, version = asked.values.get(SILENCE), recording.fleet.deciders_version or DECIDERS_VERSION
    likely = [value for one in found for value in _seconds(one, fared(one, courses[LIKELY].weights)).values()]
    notes = [
        (True, "requests are assumed to go where they were sent: failures elsewhere are unknown, and where no request would have "
         "been sent, none fails"),
        (guessed, f"{count(len(guessed), 'worker')} would have been probed when no canary was recorded ({names}): the results "
         "are estimated from the canaries before and after; ranges go from the shortest fault that agrees with them to the "
         "longest"),
        (INTERVAL in asked.values, f"recorded canaries came about every {recording.interval_s:.3g} s"),
        (INTERVAL in asked.values, "a worker that was wrong for less than a round of its canaries may have been missed; it is "
         "missed here as well"),
        (silence is not None and silence < recording.silence_s,
         f"silences shorter than {recording.silence_s:g} s were not recorded: it is unknown how many more workers would have "
         f"been reported silent after {silence or 0:g} s"),
        (any(one.wrong for one in found), "exposed answers are estimated from the recorded rate of exposed answers, or from the "
         "worker's usual rate"),
        (not OLDEST <= version <= DECIDERS_VERSION, f"the recording was decided by deciders version {version}, this release "
         f"uses {DECIDERS_VERSION}: compare with `again`"),
        (INFINITY in likely, "“–” means: not before the recording ends, or before the worker's next fault"),
    ]  # fmt: skip
    return [note for applies, note in notes if applies]


SOONER = 3.0  # how many times more often than recorded the first of the usual questions sends canaries


def standard_questions(recording: Recording) -> list[PolicyChange]:
    """Return the policy changes that an incident's report simulates. A change that would have no effect is left out."""
    was = load(recording.policy)
    found = [PolicyChange({INTERVAL: float(f"{recording.interval_s / SOONER:.2g}")})]
    if was.health.failures_max > 1:
        found.append(PolicyChange({"health.failures_max": 1}))
    breaker = was.breaker
    wait_s = breaker.wait_min.total_seconds()
    return [*found, PolicyChange({"breaker.wait_min": wait_s / 2})] if wait_s else found


def answers(recording: Recording, incident: str) -> list[object]:
    """Simulate the policy changes of `standard_questions` for one incident.

    Return the results as plain JSON types. The list is empty if the recording contains no fault for which the incident was
    opened."""
    found: list[object] = []
    for question in standard_questions(recording):
        answer = compare(recording, question, incident=incident)
        if [one.fault.incident for one in answer.faults] != [incident]:
            return []
        found.append(_row(answer))
    return found


def _row(answer: Comparison) -> object:
    ((name, was, now),) = answer.changed
    (fault,) = answer.faults
    exposed = next(one for one in answer.totals if one.name == "answers exposed")
    return finite({
        "setting": name, "was": setting(name, was), "asked": setting(name, now), "again": fault.again, "would": fault.would,
        "exposed": {"recorded": exposed.recorded, "would": exposed.would},
    })  # fmt: skip
