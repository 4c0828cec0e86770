"""Finds the faults in a recording, and when each was noticed, fenced and recovered in one history.

A fault is a series of evidence against one worker without a long pause in between. Evidence is a failed canary or request, a
silence, a device or engine fault, or an unplanned exit. The recorded and all simulated histories have the same faults, but
differ in the decisions about them. A worker is fenced from the time at which it gets no new requests.
"""

from dataclasses import dataclass

from controller.replay.whatif.journal_stretch import WRONG, Adverse
from controller.replay.whatif.recording import Recording
from controller.replay.whatif.spells import Spell, spells
from controller.replay.whatif.weights import Weights

APART_S, APART_CANARIES = 30.0, 4.0  # evidence after a pause of this length belongs to another fault
BEFORE_S = 0.5  # seconds by which a decision may be recorded before the evidence that caused it
DOUBT_ONLY = "requests: "  # prefix of evidence that comes from requests alone


@dataclass(frozen=True, slots=True)
class FaultSeen:
    """One fault of one worker. Times are seconds since 1970."""

    worker: str
    what: str  # the first evidence against the worker, preferably other than a failed request
    began: tuple[float, float]  # earliest and latest beginning
    first: float  # time of the first evidence
    last: float  # time of the last evidence
    over: float  # latest end of the fault
    until: float  # beginning of this worker's next fault, or the end of the recording
    wrong: bool  # the worker answered canaries wrongly
    certain: bool  # the evidence includes more than failed requests
    incident: str  # id of the incident opened for the fault; empty if no incident was opened

    @property
    def likely(self) -> float:
        """The estimated beginning of the fault, halfway between the earliest and the latest possible beginning."""
        return (self.began[0] + self.began[1]) / 2


@dataclass(frozen=True, slots=True)
class FaultPhases:
    """When a fault was noticed, fenced and recovered in one history (recorded or simulated), in seconds since 1970.

    A time is None if its phase was not reached before the worker's next fault or the end of the recording."""

    noticed: float | None
    fenced: float | None
    recovered: float | None


def faults(recording: Recording) -> list[FaultSeen]:
    """Return all faults of a recording, sorted by the time of their first evidence."""
    apart = max(APART_S, APART_CANARIES * recording.interval_s)
    found: list[FaultSeen] = []
    known: dict[str, list[Spell]] = {}
    for (worker, _), canaries in recording.canaries.items():
        if canaries.facts:
            known.setdefault(worker, []).extend(spells(canaries))
    for worker, adverse in recording.adverse.items():
        groups = _groups(adverse, apart)
        for n, group in enumerate(groups):
            until = groups[n + 1][0].at if n + 1 < len(groups) else recording.end
            found.append(_fault(recording, worker, group, until, known.get(worker, [])))
    return sorted(found, key=lambda one: (one.first, one.worker))


def _groups(adverse: list[Adverse], apart: float) -> list[list[Adverse]]:
    groups: list[list[Adverse]] = []
    for one in sorted(adverse, key=lambda one: one.at):
        if groups and one.at - groups[-1][-1].at <= apart:
            groups[-1].append(one)
        else:
            groups.append([one])
    return groups


def _fault(
    recording: Recording,
    worker: str,
    group: list[Adverse],
    until: float,
    known: list[Spell],
) -> FaultSeen:
    first, last = group[0].at, group[-1].at
    within = [spell for spell in known if first - APART_S <= spell.first <= last]
    after = min((spell.after for spell in within), default=first)
    before = min((spell.first for spell in within), default=first)
    if group[0].what == "silent":
        after = before = first - recording.silence_s
    incident = next(
        (i for at, i in reversed(recording.incidents.get(worker, [])) if first - BEFORE_S <= at < until), ""
    )
    return FaultSeen(
        worker,
        next((one.what for one in group if not one.what.startswith(DOUBT_ONLY)), group[0].what),
        (min(after, first), min(before, first)),
        first,
        last,
        min(until, max([last, *(spell.before for spell in within if spell.before < float("inf"))])),
        until,
        any(spell.said == WRONG for spell in within),
        any(not one.what.startswith(DOUBT_ONLY) for one in group),
        incident,
    )


def fared(fault: FaultSeen, weights: Weights) -> FaultPhases:
    """Return when a fault was noticed, fenced and recovered, given the workers' weights in one history."""
    start = fault.began[0] - BEFORE_S
    noticed = fenced = recovered = None
    for step in weights.since(fault.worker, start):
        at = max(step.at, start)
        if at > fault.until:
            break
        if not step.in_service:
            noticed = at if noticed is None else noticed
            fenced = at if fenced is None and step.fenced else fenced
            # after the end of the fault, a lower weight has another cause
            recovered = None if at <= fault.over else recovered
        elif noticed is not None and recovered is None:
            recovered = at
    return FaultPhases(noticed, fenced, recovered)


def false_ejections(found: list[FaultSeen], weights: Weights, start: float, end: float) -> int:
    """Return how often a worker was taken out of service without a certain fault.

    A fault is certain if its evidence includes more than failed requests. Drains, deaths and workers that are still joining
    do not count.
    """
    certain: dict[str, list[FaultSeen]] = {}
    for fault in found:
        if fault.certain:
            certain.setdefault(fault.worker, []).append(fault)
    count = 0
    for name in weights.steps:
        out = False
        for first, _, step in weights.stretches(name, start, end):
            if step.fenced and not out and step.status.value not in ("DRAINING", "DEAD"):
                known = any(f.began[0] - BEFORE_S <= first <= f.until for f in certain.get(name, []))
                joining = first == weights.steps[name][0].at
                count += not known and not joining
            out = step.fenced
    return count


def ejections(weights: Weights, start: float, end: float) -> int:
    """Return how often the weight of a serving worker became 0 between two times in seconds since 1970."""
    count = 0
    for name in weights.steps:
        served = False
        for _, _, step in weights.stretches(name, start, end):
            if step.fenced and served:
                count += 1
            served = step.weight > 0
    return count
