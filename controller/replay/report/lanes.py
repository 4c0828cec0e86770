"""Computes the data of a report's swim-lane chart: worker states, canaries, moves and capacity.

Times are milliseconds since 1970, by the broker's clock.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from controller.read_model.fleet_view import WELL, millis
from controller.replay import sentences, timeline
from controller.replay.report.document import Report
from controller.replay.report.frames import Stretch
from events import observations as o
from events.fact import Recorded

LANES_MAX = 60  # maximum number of lanes, because a chart with more is unreadable
# maximum number of passed canaries drawn; if there are more, only every second, third … is drawn
PASSED_MAX = 1500
# moves between the same two workers within this many milliseconds are drawn as one arrow
MOVES_TOGETHER_MS = 200


def lanes(found: Report) -> dict[str, Any]:
    """Return the data of a report's chart as plain JSON types."""
    workers = concerned(found)
    shown = set(workers[:LANES_MAX])
    return {
        "workers": workers[:LANES_MAX],
        "left_out": workers[LANES_MAX:],
        "start": millis(found.start),
        "end": millis(found.end),
        "states": _stretches(found.states, shown),
        "breakers": [one for one in _stretches(found.breakers, shown) if one[1] != "closed"],
        "canaries": _canaries(found.events, shown),
        "moves": _moves(found.events, shown),
        "control": [
            [millis(event.at), sentences.sentence(event.fact)]
            for event in found.events
            if _is_of_the_control_plane(event)
        ],
        "capacity": [[millis(frame.at), round(frame.capacity, 4)] for frame in found.frames],
        "levels": [
            [millis(frame.at), model, level]
            for before, frame in zip([None, *found.frames], found.frames, strict=False)
            for model, level in frame.levels.items()
            if before is None or before.levels.get(model) != level
        ],
    }


def concerned(found: Report) -> list[str]:
    """Return the sorted names of the workers that the chart shows: those to which something happened.

    A worker is shown if it changed its displayed state, was not fully healthy, or had a breaker that was not closed. A
    worker is also shown if it failed a canary or ran an affected request.
    """
    lives = Counter(one.worker for one in found.states)
    names = {one.worker for one in found.states if one.what not in WELL or lives[one.worker] > 1}
    names |= {one.worker for one in found.breakers if one.what != "closed"}
    names |= {event.fact.worker for event in found.events if isinstance(event.fact, o.CanaryFailed)}
    for one in found.hurt.requests:
        names.update(one.workers)
    return sorted(names, key=_natural)


def _natural(text: str) -> tuple[str, int, str]:
    """Return a sort key for a name that ends in a number, so that w2 comes before w10."""
    letters = text.rstrip("0123456789")
    return letters, int(text[len(letters) :] or 0), text


def _stretches(found: Iterable[Stretch], shown: set[str]) -> list[list[Any]]:
    return [
        [one.worker, one.what, millis(one.start), millis(one.end)]
        for one in found
        if one.worker in shown and one.end > one.start
    ]


def _canaries(events: Sequence[Recorded], shown: set[str]) -> list[list[Any]]:
    passed = [e for e in events if isinstance(e.fact, o.CanaryPassed) and e.fact.worker in shown]
    every = -(-len(passed) // PASSED_MAX) if passed else 1
    notable = [event for event in events if isinstance(event.fact, o.CanarySlow | o.CanaryFailed)]
    found = sorted([*passed[::every], *notable], key=lambda event: event.seq)
    return [
        [event.fact.worker, _outcome(event.fact), millis(event.at), sentences.sentence(event.fact)]
        for event in found
        if isinstance(event.fact, o.CanaryResult) and event.fact.worker in shown
    ]


def _outcome(fact: o.CanaryResult) -> str:
    if isinstance(fact, o.CanaryFailed):
        return "failed"
    return "slow" if isinstance(fact, o.CanarySlow) else "passed"


def _moves(events: Iterable[Recorded], shown: set[str]) -> list[list[Any]]:
    together: Counter[tuple[int, str, str]] = Counter()
    for event in events:
        fact = event.fact
        if isinstance(fact, o.RequestMigrated | o.RequestResumed) and {fact.source, fact.target} <= shown:
            together[int(millis(event.at) // MOVES_TOGETHER_MS), fact.source, fact.target] += 1
    return [
        [turn * MOVES_TOGETHER_MS, source, target, count]
        for (turn, source, target), count in together.items()
    ]


def _is_of_the_control_plane(event: Recorded) -> bool:
    fact = event.fact
    elsewhere = hasattr(fact, "worker") or hasattr(fact, "request") or isinstance(fact, o.RequestsRejected)
    about_a_worker = getattr(fact, "subject", "").startswith("worker:")
    return not (elsewhere or about_a_worker or isinstance(fact, o.SnapshotKept) or timeline.is_routine(fact))
