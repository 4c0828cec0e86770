"""Tracks which requests received tokens from which worker. The records are bounded.

When a worker is convicted as corrupt, these records name the exposed requests.

    CanaryPassed(sent) ───────── tokens to requests a, b, c ─────────▶ CanaryFailed, confirmed: convicted
          │                                                                 │
          └── until here the worker is known to have been correct ───▶ a, b, c are exposed, finished or not

The exposed period begins when *the canary that failed* was last sent and passed on this instance: other canaries may not detect
this fault. If the records do not reach back that far, that is reported too (`ExposureUnknown`). Exposure is never underreported
silently.

Clocks: `sent` is measured by the prober's clock, token times by this frontend's clock. A margin covers small differences. It may
name too many requests, but not too few.
"""

from collections import defaultdict, deque
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from math import inf
from typing import NamedTuple

from controller.ports import Clock
from controller.router.endpoints import Key
from events.observations import ExposureUnknown, RequestExposed

MARGIN = timedelta(milliseconds=200)
MARK_S = 0.2  # resolution in seconds of a span's token times


@dataclass(slots=True, eq=False, repr=False)
class ServedSpan:
    """The tokens that one worker sent to one request: the index of the first (from 0), and arrival times to within MARK_S."""

    request: str
    model: str
    first: int
    live: int  # number of the live request
    traceparent: str = ""
    rank: int | None = None  # DP rank, if the worker has several
    key: Key = ("", "")  # of the worker
    count: int = 0
    marks: list[tuple[float, int]] | None = None  # (instant, index of the first token at it), after the first
    marked_at: float = -inf  # time of the last mark
    last_at: float = 0.0
    named: int = 0  # tokens before this index have already been reported as exposed

    def add(self, now: float, tokens: int) -> None:
        """Count tokens that have just arrived."""
        if now - self.marked_at > MARK_S:
            if self.count:
                self.marks = self.marks or []
                self.marks.append((now, self.first + self.count))
            self.marked_at = now
        self.count += tokens
        self.last_at = now

    def since(self, instant: float) -> tuple[int, int] | None:
        """Return the first and last index of the unreported tokens that arrived at `instant` or later; None if there are none."""
        if not self.count or self.last_at < instant:
            return None
        first = self.first
        for at, index in self.marks or ():
            if at > instant:
                break
            first = index  # tokens after this mark may have arrived later than `instant`
        last = self.first + self.count - 1
        return (max(first, self.named), last) if self.named <= last else None


class ExposedTokens(NamedTuple):
    """Tokens that a worker sent to one request."""

    span: ServedSpan
    first: int  # index of the first of these tokens
    last: int


class SpanHistory:
    """The open spans and the ended spans of one worker instance, oldest first.

    Only ended spans are dropped to stay within the limit: a running request must be named, and still receives tokens. The number
    of open spans is bounded by the worker's streams.
    """

    def __init__(self, entries_max: int) -> None:
        self._open: dict[ServedSpan, None] = {}
        self._ended: deque[ServedSpan] = deque()
        self._max = entries_max
        self.forgotten_at: float | None = None  # spans that ended before this may have been dropped

    @property
    def served_spans(self) -> list[ServedSpan]:
        """All recorded spans that were not dropped."""
        return [*self._ended, *self._open]

    def add(self, served_span: ServedSpan) -> None:
        """Add a span, from its first token on."""
        self._open[served_span] = None
        self._bound()

    def close(self, served_span: ServedSpan) -> None:
        """Mark a span as ended, because its request has left this worker."""
        if self._open.pop(served_span, served_span) is None:
            self._ended.append(served_span)
            self._bound()

    def trim(self, instant: float) -> None:
        """Drop spans that ended before `instant`, because no later conviction can cover them."""
        while self._ended and self._ended[0].last_at < instant:
            self._forget()

    def _bound(self) -> None:
        while self._ended and len(self._ended) + len(self._open) > self._max:
            self._forget()

    def _forget(self) -> None:
        self.forgotten_at = max(self._ended.popleft().last_at, self.forgotten_at or 0.0)


@dataclass(eq=False, repr=False)
class ServedSpans:
    """The span histories of all workers of one frontend."""

    frontend: str
    entries_max: int  # per worker
    clock: Clock
    # end of the period already reported as unknown
    _unknown_until: dict[Key, datetime] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._began = self.clock.now()
        self._histories: dict[Key, SpanHistory] = defaultdict(lambda: SpanHistory(self.entries_max))

    def note(self, served_span: ServedSpan) -> None:
        """Add a span, from its first token on."""
        self._histories[served_span.key].add(served_span)

    def close(self, served_span: ServedSpan) -> None:
        """Mark a span as ended, because its request has left the worker or has ended."""
        if (history := self._histories.get(served_span.key)) is not None:
            history.close(served_span)

    def passed(self, key: Key, oldest_pass: datetime) -> None:
        """Drop the worker's spans that ended before `oldest_pass`: all canaries have been sent and passed since that time."""
        if (history := self._histories.get(key)) is not None:
            history.trim(self._instant(oldest_pass - MARGIN))

    def keep(self, keys: set[Key]) -> None:
        """Drop the spans of all worker instances except `keys`."""
        for key in self._histories.keys() - keys:
            del self._histories[key]
        self._unknown_until = {key: until for key, until in self._unknown_until.items() if key in keys}

    def fed(self, key: Key, since: datetime) -> list[ExposedTokens]:
        """Return the tokens that the worker has sent to each request since `since`, and mark them as reported.

        Tokens that were reported earlier are omitted.
        """
        history, found = self._histories.get(key), list[ExposedTokens]()
        instant = self._instant(since - MARGIN)
        for span in history.served_spans if history else ():
            if (tokens := span.since(instant)) is not None:
                span.named = tokens[1] + 1
                found.append(ExposedTokens(span, *tokens))
        return found

    def fact(self, fed: ExposedTokens, action: str) -> RequestExposed:
        """Return the fact about one exposed request. `action`: the policy applied; none: the request had finished."""
        span = fed.span
        return RequestExposed(
            frontend=self.frontend,
            request=span.request,
            model=span.model,
            worker=span.key[0],
            instance=span.key[1],
            first=fed.first,
            last=fed.last,
            finished=action == "none",
            action=action,  # type: ignore[arg-type]
            rank=span.rank,
        )

    def unknown(self, key: Key, since: datetime, until: datetime) -> list[ExposureUnknown]:
        """Return the facts about the parts of this period without complete records. Each part is reported only once."""
        since = max(since, self._unknown_until.get(key, since))
        history, out = self._histories.get(key), []
        if since < self._began:
            out.append((since, self._began, "this frontend started only then"))
        if history is not None and history.forgotten_at is not None:
            start, end = max(since, self._began), self._calendar(history.forgotten_at)
            if end > start:
                out.append((start, end, "this frontend no longer remembers the requests that it served then"))
        if out:
            self._unknown_until[key] = out[-1][1]
        return [
            ExposureUnknown(
                frontend=self.frontend,
                worker=key[0],
                instance=key[1],
                since=start,
                until=min(end, until),
                why=why,
            )
            for start, end, why in out
        ]

    def _instant(self, moment: datetime) -> float:
        return self.clock.monotonic() - (self.clock.now() - moment).total_seconds()

    def _calendar(self, instant: float) -> datetime:
        return self.clock.now() - timedelta(seconds=self.clock.monotonic() - instant)
