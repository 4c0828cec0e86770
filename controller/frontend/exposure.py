"""Whom has a corrupt worker served? A bounded memory of who was fed by whom, and since when.

    CanaryPassed(sent) ───────── tokens to requests a, b, c ─────────▶ CanaryFailed, confirmed: convicted
          │                                                                 │
          └── up to here this worker is known to have been right ────▶ a, b, c are exposed, finished or not

The span begins when *the canary that failed* was last sent and passed on this instance: other canaries may
not see this fault. Where the memory does not reach back so far, that is said too (`ExposureUnknown`): never
silently less.

Clocks: `sent` is the prober's, our marks are ours. A margin covers small differences; it errs towards naming
more.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from math import inf
from typing import TYPE_CHECKING, TypeAlias

from controller.router.table import Key
from events.observations import ExposureUnknown, FrontendObservation, RequestExposed

if TYPE_CHECKING:
    from controller.frontend.flight import Flight

MARGIN = timedelta(milliseconds=200)
MARK_S = 0.2  # how finely a stint remembers when its tokens came

Traced: TypeAlias = tuple[FrontendObservation, str]  # a fact, and the trace of the request that it is about


@dataclass(slots=True, eq=False)
class Stint:
    """What one worker gave one request: tokens `first`… (0-based), and when, to within MARK_S."""

    request: str
    model: str
    first: int
    flight: "Flight | None"  # None once the request has ended
    traceparent: str = ""
    rank: int | None = None  # the worker's DP rank, of several
    key: Key = ("", "")  # the worker
    count: int = 0
    marks: list[tuple[float, int]] | None = (
        None  # (instant, index of the first token then), but for the first of all
    )
    marked_at: float = -inf  # when a mark was due last
    last_at: float = 0.0
    named: int = 0  # tokens before this index have been named as exposed

    def add(self, now: float, tokens: int) -> None:
        """Count tokens that came now."""
        if now - self.marked_at > MARK_S:
            if self.count:
                self.marks = self.marks or []
                self.marks.append((now, self.first + self.count))
            self.marked_at = now
        self.count += tokens
        self.last_at = now

    def since(self, instant: float) -> tuple[int, int] | None:
        """Return the first and last index of the tokens that came at `instant` or later and have not been named; None
        if there are none."""
        if not self.count or self.last_at < instant:
            return None
        first = self.first
        for at, index in self.marks or ():
            if at > instant:
                break
            first = index  # tokens after this mark may have come later than `instant`
        last = self.first + self.count - 1
        return (max(first, self.named), last) if self.named <= last else None


class Ring:
    """The stints of one life of a worker: those that it still feeds, and those that ended, oldest first.

    Only what has ended is ever forgotten: a request in the air must be dealt with, and it goes on being fed. How
    many those are is bounded by the worker's streams.
    """

    def __init__(self, entries_max: int) -> None:
        self._feeding: dict[Stint, None] = {}
        self._ended: deque[Stint] = deque()
        self._max = entries_max
        self.forgotten_at: float | None = None  # what ended before this is not known any more

    @property
    def stints(self) -> list[Stint]:
        """All that is remembered."""
        return [*self._ended, *self._feeding]

    def add(self, stint: Stint) -> None:
        """Remember a stint from its first token on."""
        self._feeding[stint] = None
        self._bound()

    def close(self, stint: Stint) -> None:
        """The request has left this worker."""
        if self._feeding.pop(stint, stint) is None:
            self._ended.append(stint)
            self._bound()

    def trim(self, instant: float) -> None:
        """Forget ended stints from before `instant`, which no conviction can reach any more."""
        while self._ended and self._ended[0].last_at < instant:
            self._forget()

    def _bound(self) -> None:
        while self._ended and len(self._ended) + len(self._feeding) > self._max:
            self._forget()

    def _forget(self) -> None:
        self.forgotten_at = max(self._ended.popleft().last_at, self.forgotten_at or 0.0)


class Exposures:
    """The rings of all workers."""

    def __init__(
        self, frontend: str, entries_max: int, began: datetime, wall: Callable[[], tuple[datetime, float]]
    ) -> None:
        self._frontend = frontend
        self._max = entries_max
        self._began = began
        self._wall = wall  # now, by the calendar and by the loop's clock
        self._rings: dict[Key, Ring] = {}
        self._unknown_until: dict[Key, datetime] = {}  # what was said to be unknown is not said again

    def note(self, stint: Stint) -> None:
        """Remember a stint from its first token on."""
        ring = self._rings.get(stint.key)
        if ring is None:
            ring = self._rings[stint.key] = Ring(self._max)
        ring.add(stint)

    def close(self, stint: Stint) -> None:
        """The request has left that worker, or ended."""
        ring = self._rings.get(stint.key)
        if ring is not None:
            ring.close(stint)

    def passed(self, key: Key, oldest_pass: datetime) -> None:
        """Forget what came before every canary of this worker was last sent and passed."""
        ring = self._rings.get(key)
        if ring is not None:
            ring.trim(self._instant(oldest_pass - MARGIN))

    def keep(self, keys: set[Key]) -> None:
        """Forget lives of workers that are gone for good."""
        for key in [key for key in self._rings if key not in keys]:
            del self._rings[key]
        self._unknown_until = {key: until for key, until in self._unknown_until.items() if key in keys}

    def convict(
        self, key: Key, since: datetime, act: Callable[[Stint, int], str], until: datetime
    ) -> list[Traced]:
        """Return a fact for every request that this worker fed since `since`; `act` deals with those in the air."""
        facts: list[Traced] = [(fact, "") for fact in self._unknown(key, since, until)]
        instant = self._instant(since - MARGIN)
        ring = self._rings.get(key)
        fed = [(stint, stint.since(instant), stint.flight is None) for stint in ring.stints] if ring else []
        for stint, span, finished in fed:
            if span is None:
                continue
            stint.named = span[1] + 1
            # What is done about one choice of an answer may have ended the others.
            action = "none" if finished else "error" if stint.flight is None else act(stint, span[0])
            fact = RequestExposed(
                frontend=self._frontend,
                request=stint.request,
                model=stint.model,
                worker=key[0],
                instance=key[1],
                first=span[0],
                last=span[1],
                finished=finished,
                action=action,  # type: ignore[arg-type]
                rank=stint.rank,
            )
            facts.append((fact, stint.traceparent))
        return facts

    def _unknown(self, key: Key, since: datetime, until: datetime) -> list[ExposureUnknown]:
        """Say which part of the span is not remembered, each part of it once."""
        since = max(since, self._unknown_until.get(key, since))
        ring, out = self._rings.get(key), []
        if since < self._began:
            out.append((since, self._began, "this frontend started only then"))
        if ring is not None and ring.forgotten_at is not None:
            start, end = max(since, self._began), self._calendar(ring.forgotten_at)
            if end > start:
                out.append((start, end, "this frontend remembers no longer whom it served then"))
        if out:
            self._unknown_until[key] = out[-1][1]
        return [
            ExposureUnknown(
                frontend=self._frontend,
                worker=key[0],
                instance=key[1],
                since=start,
                until=min(end, until),
                why=why,
            )
            for start, end, why in out
        ]

    def _instant(self, moment: datetime) -> float:
        now, instant = self._wall()
        return instant - (now - moment).total_seconds()

    def _calendar(self, instant: float) -> datetime:
        now, then = self._wall()
        return now - timedelta(seconds=then - instant)
