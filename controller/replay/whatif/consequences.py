"""Facts that depend on decisions or timeouts, and therefore occur at other times on another course."""

from collections.abc import Iterator

from controller.replay.whatif.recording import RecordedFact, Recording
from events.decisions import DrainStarted
from events.frozen import replace
from events.observations import (
    DrainFinished,
    ShutdownBegan,
    WorkerHeard,
    WorkerJoined,
    WorkerLeft,
    WorkerSilent,
)

Successions = dict[
    tuple[str, str], list[tuple[float, RecordedFact]]
]  # by instance: seconds after the DEAD decision, and the fact


def shifted(recording: Recording, silence_s: float | None) -> Iterator[RecordedFact]:
    """Yield the observations in order, as they would occur with another silence timeout (in seconds)."""
    if silence_s is None:
        yield from recording.happened
        return
    later = silence_s - recording.silence_s
    back: dict[tuple[str, str], list[float]] = {}
    for one in recording.happened:
        if isinstance(one.fact, WorkerHeard | WorkerLeft):
            back.setdefault((one.fact.worker, one.fact.instance), []).append(one.at)
    moved: list[RecordedFact] = []
    for one in recording.happened:
        fact = one.fact
        if isinstance(fact, WorkerSilent) and fact.silent_s >= recording.silence_s:
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
    """Split off the facts that follow from an instance's DEAD decision.

    Return the other facts, and those by instance: the seconds after the decision at which its process began to end, was gone, and
    its successor joined.
    """
    rest: list[RecordedFact] = []
    found: Successions = {}
    ended: dict[str, tuple[str, str]] = {}  # by worker: the instance that was decided DEAD and has ended
    for one in facts:
        fact, life = one.fact, None
        if isinstance(fact, WorkerJoined):
            life = ended.pop(fact.worker, None)
        elif isinstance(fact, WorkerLeft | ShutdownBegan):
            life = (fact.worker, fact.instance)
        dead = recording.dead.get(life) if life is not None else None
        if life is None or dead is None or one.at < dead:
            rest.append(one)
            continue
        found.setdefault(life, []).append((one.at - dead, one))
        if isinstance(fact, WorkerLeft):
            ended[fact.worker] = life
    return rest, found


def emptied(recording: Recording) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """Return, for each instance, when its drains began and when each was finished."""
    began: dict[tuple[str, str], list[float]] = {}
    for decision in recording.decided:
        if isinstance(decision, DrainStarted):
            began.setdefault((decision.worker, decision.instance), []).append(decision.decided_at.timestamp())
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for one in recording.happened:
        if isinstance(one.fact, DrainFinished):
            life = (one.fact.worker, one.fact.instance)
            started = [at for at in began.get(life, []) if at <= one.at]
            if started:
                found.setdefault(life, []).append((started[-1], one.at))
    return found
