"""What became of one request: where it was, how it moved and what its client noticed of that, and whose tokens it holds.

The journal tells of requests to which something happened. One that was answered by the worker that it was sent to, and that
no decision has convicted, is not on it; nor is whether an answer that has moved was completed, unless it could not be. But a
frontend reports at least once a minute. One that has reported nothing for `QUIET` has ended, and has cut what it answered.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from controller.ports import Archive
from controller.replay.sentences import count, span
from events.fact import Recorded
from events.observations import (
    RequestAbandoned,
    RequestExposed,
    RequestMigrated,
    RequestPreempted,
    RequestResumed,
)

QUIET = timedelta(
    seconds=150
)  # two missing reports of traffic, which a frontend makes each minute, and a margin
ANSWERED_WITHIN = timedelta(hours=1)  # a frontend that has reported for so long since has not cut the request


@dataclass(frozen=True, slots=True)
class CutOff:
    """The frontend that answered a request ended before the journal shows an end of it."""

    frontend: str
    ended: datetime  # when it reported last


@dataclass(frozen=True, slots=True)
class ExposedSpan:
    """Tokens that came from a worker which a canary has convicted: places in the answer, from 0, both included."""

    worker: str
    first: int
    last: int


@dataclass(slots=True)
class RequestStory:
    """One request's, as far as the journal tells it."""

    request: str
    model: str = ""
    workers: list[str] = field(default_factory=list)  # one after another
    gaps_ms: list[float] = field(default_factory=list)  # that its client saw, one for each move
    put_off: int = 0  # times
    exact: bool = True  # no move has made it an approximate answer
    exposed: list[ExposedSpan] = field(default_factory=list)
    lost: str = ""  # why it could not be continued; empty: it was not said to be lost
    lost_tokens: int = 0  # that its client had by then
    cut: CutOff | None = None  # its frontend's end, if that came first
    events: list[Recorded] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Return what there is to say of it in a few words; nothing where the journal has nothing."""
        if not self.events:
            return []
        said = [f"request {self.request} ({self.model})"]
        if self.workers:
            said.append(f"  was with {', then '.join(self.workers)}")
        if self.gaps_ms:
            longest = span(max(self.gaps_ms) / 1000)
            kept = "token for token" if self.exact else "not exactly as it would have"
            said.append(
                f"  went on elsewhere {count(len(self.gaps_ms), 'time')}, {kept}; longest gap {longest}"
            )
        if self.put_off:
            said.append(f"  was put off for others {count(self.put_off, 'time')}")
        said += [
            f"  holds tokens {one.first}–{one.last} from {one.worker}, which was convicted"
            for one in self.exposed
        ]
        if self.lost:
            said.append(f"  was lost after {count(self.lost_tokens, 'token')}: {self.lost}")
        if self.cut is not None:
            said.append(
                f"  was cut by the frontend {self.cut.frontend}, which ended: it reported last at {self.cut.ended:%H:%M:%S} UTC. "
                "Only an answer that was complete by then reached its client whole"
            )
        return said


async def cut(story: RequestStory, archive: Archive, until: int) -> CutOff | None:
    """Return the end of the frontend that answered a request, if it ended after the last fact about it. `until`: the last
    sequence of the journal."""
    facts = [event for event in story.events if getattr(event.fact, "frontend", "")]
    if not facts or story.lost or getattr(facts[-1].fact, "finished", False):
        return None
    frontend, source, begun = str(getattr(facts[-1].fact, "frontend", "")), facts[-1].source, facts[-1].at
    reported, now = begun, begun
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
            if reported - begun > ANSWERED_WITHIN:
                return None
    return CutOff(frontend, reported) if now - reported > QUIET else None


def told(request: str, events: Sequence[Recorded]) -> RequestStory:
    """Return a request's story from what the journal has of it, in order."""
    story = RequestStory(request, events=[*events])
    for event in events:
        match event.fact:
            case RequestMigrated(model=model, source=source, target=target, gap_ms=gap_ms, exact=exact):
                _went(story, model, source, target, gap_ms, exact)
            case RequestResumed(model=model, source=source, target=target, gap_ms=gap_ms, exact=exact):
                _went(story, model, source, target, gap_ms, exact)
            case RequestPreempted(model=model, worker=worker):
                story.model, story.put_off = model, story.put_off + 1
                _was_with(story, worker)
            case RequestExposed(model=model, worker=worker, first=first, last=last):
                story.model = model
                story.exposed.append(ExposedSpan(worker, first, last))
                if not story.workers:
                    _was_with(story, worker)
            case RequestAbandoned(model=model, worker=worker, reason=reason, tokens=tokens):
                story.model, story.lost, story.lost_tokens = model, reason, tokens
                _was_with(story, worker)
            case _:
                pass
    return story


def _went(story: RequestStory, model: str, source: str, target: str, gap_ms: float, exact: bool) -> None:
    story.model = model
    _was_with(story, source)
    story.workers.append(target)
    story.gaps_ms.append(gap_ms)
    story.exact = story.exact and exact


def _was_with(story: RequestStory, worker: str) -> None:
    if worker and story.workers[-1:] != [worker]:
        story.workers.append(worker)
