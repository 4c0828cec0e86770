"""Computes the user impact and the cost of an incident: affected requests, lost capacity, lost work."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

from controller.read_model.fleet_view import WorkerView
from controller.replay import request_story
from controller.replay.report.frames import Frame
from controller.replay.request_story import RequestStory
from events import observations as o
from events.fact import Fact, Recorded


@dataclass(slots=True)
class Impact:
    """The requests that an incident affected, and what the incident cost the users and the fleet."""

    # affected requests, in the order of their first event
    requests: list[RequestStory] = field(default_factory=list)
    rejected: Counter[str] = field(default_factory=Counter)  # number of rejected requests by reason
    # reports of frontends that cannot determine which requests a convicted worker served
    unknown: list[o.ExposureUnknown] = field(default_factory=list)
    served: int = 0  # number of answers of all workers
    tokens_served: int = 0
    # answer tokens that another worker recomputed; recomputed prompt tokens are not on the journal
    tokens_again: int = 0
    tokens_exposed: int = 0
    bytes_moved: int = 0  # bytes of KV caches that moved with their requests
    gpu_s: float = 0.0  # missing service in GPU-seconds: (1 - weight) times GPUs times seconds, over all workers but spares
    least_capacity: float = 1.0  # lowest share of the fleet that served, 0 to 1


def user_impact(events: Sequence[Recorded], frames: Sequence[Frame], end: datetime) -> Impact:
    """Return the user impact shown by `events`, and the capacity missing from the first event until `end`.

    There must be at least one event."""
    found, by_request, seen = Impact(), dict[str, list[Recorded]](), set[str]()
    for event in events:
        if event.id in seen:
            continue  # the same event was published twice
        seen.add(event.id)
        _count(found, event.fact)
        if request := getattr(event.fact, "request", ""):
            by_request.setdefault(request, []).append(event)
    stories = (request_story.story_of(request, its) for request, its in by_request.items())
    found.requests = [one for one in stories if one.gaps_ms or one.exposed or one.lost or one.put_off]
    found.gpu_s, found.least_capacity = _missing(frames, events[0].at, end)
    return found


def _count(found: Impact, fact: Fact) -> None:
    """Add the costs that one fact reports to `found`."""
    match fact:
        case o.RequestsRejected():
            found.rejected[fact.reason] += fact.count
        case o.ExposureUnknown():
            found.unknown.append(fact)
        case o.RequestsServed():
            found.served += fact.count
            found.tokens_served += fact.tokens
        case o.RequestMigrated():
            found.bytes_moved += fact.bytes
            found.tokens_again += fact.tokens if fact.method == "reprefill" else 0
        case o.RequestExposed():
            found.tokens_exposed += fact.last - fact.first + 1
        case _:
            pass


def _missing(frames: Sequence[Frame], start: datetime, end: datetime) -> tuple[float, float]:
    """Return the missing service in GPU-seconds, and the lowest share of the fleet that served (0 to 1).

    Both cover the time from `start` to `end`. If the first frame has no worker, the time until a worker serves does not count.
    """
    shown: dict[str, WorkerView] = {}
    gpu_s, least, serving = 0.0, 1.0, bool(frames[0].workers)
    ends = [frame.at for frame in frames[1:]] + [end]
    for frame, until in zip(frames, ends, strict=True):
        for name, one in frame.workers.items():
            if one is None:
                shown.pop(name, None)
            else:
                shown[name] = one
        if not serving and frame.capacity == 0.0:
            continue
        serving = True
        lacks = sum(one.gpus * (1.0 - (one.weight or 0.0)) for one in shown.values() if not one.spare)
        gpu_s += lacks * max(0.0, (until - max(frame.at, start)).total_seconds())
        if until >= start and shown:
            least = min(least, frame.capacity)
    return gpu_s, least
