"""The story of one request: its workers, its moves, the gaps its client saw, and suspect tokens.

The journal records only requests to which something happened. A request leaves no event if its first worker answered it and was
not convicted. Nor does the journal record that a migrated answer was completed, only that it could not be. But a frontend
reports at least once a minute: if it sends no report for `QUIET`, it has ended and has cut off its open answers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from controller.ports import Archive
from controller.replay.sentences import count, span
from events import observations as o
from events.fact import Recorded

# two missing traffic reports (a frontend sends one each minute), plus a margin
QUIET = timedelta(seconds=150)
# a frontend that reported for this long after the last fact did not cut the request off
ANSWERED_WITHIN = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class CutOff:
    """The end of a frontend while it was answering a request, before the journal shows the request's end."""

    frontend: str
    ended: datetime  # time of the frontend's last report


@dataclass(frozen=True, slots=True)
class ExposedSpan:
    """Tokens from a worker that a canary convicted: 0-based positions in the answer, both included."""

    worker: str
    first: int
    last: int


@dataclass(slots=True)
class RequestStory:
    """The story of one request, as far as the journal records it."""

    request: str
    model: str = ""
    workers: list[str] = field(default_factory=list)  # in order
    gaps_ms: list[float] = field(default_factory=list)  # the gaps that the client saw, one per move
    put_off: int = 0  # number of preemptions
    exact: bool = True  # no move made the answer approximate
    exposed: list[ExposedSpan] = field(default_factory=list)
    lost: str = ""  # why the request could not be continued; empty: not reported as lost
    lost_tokens: int = 0  # tokens that the client had received by then
    cut: CutOff | None = None  # the frontend's end, if it ended before the request did
    events: list[Recorded] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Return a summary in a few lines; none if the journal has no events about the request."""
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
    """Return the end of the request's frontend if it ended after the last fact about the request, else None.

    `until` is the last sequence of the journal.
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
    """Build a request's story from its events on the journal, in order."""
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
