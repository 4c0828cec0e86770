"""Summarizes one request: workers, migrations, gaps that the client saw, and tokens of bad workers.

The journal has an event for each move or preemption of a request, for its loss, and for tokens from a worker that was convicted
of wrong answers. It has no event for the completion of an answer. About most requests, the journal therefore has no event.

A frontend reports at least once a minute. If a frontend sends no report for `QUIET` (150 s), the frontend counts as ended.
The answers that the frontend was streaming at its end were cut off.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from controller.ports import Archive
from controller.replay.sentences import count, span
from events import observations as o
from events.fact import Recorded

# the time of two missing traffic reports, of which a frontend sends one each minute, plus a margin
QUIET = timedelta(seconds=150)
# if a frontend still reports this long after the last fact about a request, it did not cut the request off
ANSWERED_WITHIN = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class CutOff:
    """The end of the frontend that was streaming an answer.

    The answer was cut off, unless the frontend had already completed the answer.
    """

    frontend: str
    ended: datetime  # time of the frontend's last report


@dataclass(frozen=True, slots=True)
class ExposedSpan:
    """Answer tokens from a worker that was convicted of wrong answers: first and last position, counted from 0."""

    worker: str
    first: int
    last: int


@dataclass(slots=True)
class RequestStory:
    """What the journal records about one request: its workers, moves, preemptions and loss.

    Also holds the positions of the tokens that came from workers convicted of wrong answers."""

    request: str
    model: str = ""
    workers: list[str] = field(default_factory=list)  # in the order in which they served the request
    # milliseconds without a token that the client saw, one per move
    gaps_ms: list[float] = field(default_factory=list)
    put_off: int = 0  # number of preemptions
    exact: bool = True  # whether every move continued the answer exactly, token for token
    exposed: list[ExposedSpan] = field(default_factory=list)
    lost: str = ""  # why the request could not be continued; empty: it was not lost
    lost_tokens: int = 0  # number of answer tokens that the frontend had accepted before the request was lost
    cut: CutOff | None = None  # the frontend's end, if it ended before the request did
    events: list[Recorded] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Return a short summary of the request, in lines. Without events about the request, the list is empty."""
        if not self.events:
            return []
        summary = [f"request {self.request} ({self.model})"]
        if self.workers:
            summary.append(f"  ran on {', then '.join(self.workers)}")
        if self.gaps_ms:
            longest = span(max(self.gaps_ms) / 1000)
            kept = "token for token" if self.exact else "approximately"
            summary.append(f"  migrated {count(len(self.gaps_ms), 'time')}, {kept}; longest gap {longest}")
        if self.put_off:
            summary.append(f"  was preempted {count(self.put_off, 'time')}")
        summary += [
            f"  holds tokens {one.first}–{one.last} from {one.worker}, which was convicted"
            for one in self.exposed
        ]
        if self.lost:
            summary.append(f"  was lost after {count(self.lost_tokens, 'token')}: {self.lost}")
        if self.cut is not None:
            summary.append(
                f"  was cut off when the frontend {self.cut.frontend} ended; it last reported at {self.cut.ended:%H:%M:%S} UTC. "
                "Only an answer completed by then reached its client in full"
            )
        return summary


async def cut(story: RequestStory, archive: Archive, until: int) -> CutOff | None:
    """Return the end of the request's frontend if this end may have cut off the answer, else None.

    The frontend counts as ended if it sent no report for `QUIET`. `until` is the last sequence number of the journal.
    """
    facts = [event for event in story.events if getattr(event.fact, "frontend", "")]
    if not facts or story.lost or getattr(facts[-1].fact, "finished", False):
        return None
    frontend, source, last_fact_at = (
        str(getattr(facts[-1].fact, "frontend", "")),
        facts[-1].source,
        facts[-1].at,
    )
    reported, now = last_fact_at, last_fact_at
    async for batch in archive.select(after=facts[-1].seq):
        for event in batch:
            if event.seq > until:
                break
            now = event.at
            if event.source != source:
                continue
            if now - reported > QUIET:
                return CutOff(frontend, reported)
            reported = now
            if reported - last_fact_at > ANSWERED_WITHIN:
                return None
    return CutOff(frontend, reported) if now - reported > QUIET else None


def story_of(request: str, events: Sequence[Recorded]) -> RequestStory:
    """Build the summary of one request from the events about it. `events` must be in the order of the journal."""
    story = RequestStory(request, events=[*events])
    for event in events:
        match event.fact:
            case o.RequestMigrated(model=model, source=source, target=target, gap_ms=gap_ms, exact=exact):
                _add_move(story, model, source, target, gap_ms, exact)
            case o.RequestResumed(model=model, source=source, target=target, gap_ms=gap_ms, exact=exact):
                _add_move(story, model, source, target, gap_ms, exact)
            case o.RequestPreempted(model=model, worker=worker):
                story.model, story.put_off = model, story.put_off + 1
                _add_worker(story, worker)
            case o.RequestExposed(model=model, worker=worker, first=first, last=last):
                story.model = model
                story.exposed.append(ExposedSpan(worker, first, last))
                if not story.workers:
                    _add_worker(story, worker)
            case o.RequestAbandoned(model=model, worker=worker, reason=reason, tokens=tokens):
                story.model, story.lost, story.lost_tokens = model, reason, tokens
                _add_worker(story, worker)
            case _:
                pass
    return story


def _add_move(story: RequestStory, model: str, source: str, target: str, gap_ms: float, exact: bool) -> None:
    story.model = model
    _add_worker(story, source)
    story.workers.append(target)
    story.gaps_ms.append(gap_ms)
    story.exact = story.exact and exact


def _add_worker(story: RequestStory, worker: str) -> None:
    if worker and story.workers[-1:] != [worker]:
        story.workers.append(worker)
