"""Tracks which requests received tokens from which worker. The records are bounded.

When a worker is convicted as corrupt, these records name the exposed requests.

    CanaryPassed(sent) ───────── tokens to requests a, b, c ─────────▶ CanaryFailed, confirmed: convicted
          │                                                                 │
          └── until here the worker is known to have been correct ───▶ a, b, c are exposed, finished or not

The exposed period begins with the last pass of *the canary that failed* on this instance, at the time when the canary
was sent. Passes of other canaries do not count, because those canaries may not detect this fault. If the records do not
reach back that far, `ExposureUnknown` is reported for the missing period. So no exposure is silently left out.

Clocks: `sent` is measured by the prober's clock, token times by this frontend's clock. The exposed period is extended
by a margin, which covers small differences between the clocks. So the reports can contain requests that were not
exposed, but no exposed request is left out.
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
    """The tokens that one worker sent to one request: their indexes in the answer, and their arrival times.

    Indexes start at 0. The resolution of the arrival times is MARK_S seconds.
    """

    request: str
    model: str
    first: int
    live: int  # number of the live request
    traceparent: str = ""
    rank: int | None = None  # DP rank, if the worker has several
    key: Key = ("", "")  # of the worker
    count: int = 0
    # (time, index of the first token that arrived then), without the first entry of the span
    marks: list[tuple[float, int]] | None = None
    marked_at: float = -inf  # time of the last mark
    last_at: float = 0.0
    named: int = 0  # tokens before this index were reported as exposed

    def add(self, now: float, tokens: int) -> None:
        """Count `tokens` more tokens, which have just arrived from the worker."""
        if now - self.marked_at > MARK_S:
            if self.count:
                self.marks = self.marks or []
                self.marks.append((now, self.first + self.count))
            self.marked_at = now
        self.count += tokens
        self.last_at = now

    def since(self, instant: float) -> tuple[int, int] | None:
        """Return the first and last index of the tokens that may have arrived at `instant` or later.

        Tokens that were already reported as exposed are left out. Return None if no tokens are left.
        """
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
    """A range of tokens, first to last index, that a worker sent to one request."""

    span: ServedSpan
    first: int  # index of the first of these tokens
    last: int


class SpanHistory:
    """The served spans of one worker instance, limited in number. A span is the tokens sent to one request.

    To keep the limit, the spans that ended first are dropped. Open spans are kept, because their requests still run and
    must be reported if the worker is convicted. The worker's number of streams limits the number of open spans.
    """

    def __init__(self, entries_max: int) -> None:
        self._open: dict[ServedSpan, None] = {}
        self._ended: deque[ServedSpan] = deque()
        self._max = entries_max
        # spans that ended before this time may have been dropped; None if none was dropped
        self.forgotten_at: float | None = None

    @property
    def served_spans(self) -> list[ServedSpan]:
        """All spans that were not dropped: ended spans first, then open spans."""
        return [*self._ended, *self._open]

    def add(self, served_span: ServedSpan) -> None:
        """Add the span of a request that has just received its first token from this worker."""
        self._open[served_span] = None
        self._bound()

    def close(self, served_span: ServedSpan) -> None:
        """Mark a span as ended, because its request has left this worker."""
        if self._open.pop(served_span, served_span) is None:
            self._ended.append(served_span)
            self._bound()

    def trim(self, instant: float) -> None:
        """Drop spans that ended before `instant`, because no later conviction can reach back that far."""
        while self._ended and self._ended[0].last_at < instant:
            self._forget()

    def _bound(self) -> None:
        while self._ended and len(self._ended) + len(self._open) > self._max:
            self._forget()

    def _forget(self) -> None:
        self.forgotten_at = max(self._ended.popleft().last_at, self.forgotten_at or 0.0)


@dataclass(eq=False, repr=False)
class ServedSpans:
    """The served spans of all workers of one frontend. Builds the facts about exposed requests from them."""

    frontend: str
    entries_max: int  # largest number of spans per worker instance
    clock: Clock
    # end of the period that was already reported as unknown
    _unknown_until: dict[Key, datetime] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._began = self.clock.now()
        self._histories: dict[Key, SpanHistory] = defaultdict(lambda: SpanHistory(self.entries_max))

    def note(self, served_span: ServedSpan) -> None:
        """Add the span of a request that has just received its first token from the span's worker."""
        self._histories[served_span.key].add(served_span)

    def close(self, served_span: ServedSpan) -> None:
        """Mark a span as ended, because its request has left the worker or has ended."""
        if (history := self._histories.get(served_span.key)) is not None:
            history.close(served_span)

    def passed(self, key: Key, oldest_pass: datetime) -> None:
        """Drop the spans that ended before `oldest_pass`, because no later conviction can reach back that far.

        For each canary there is a time at which the worker last passed it; `oldest_pass` is the earliest of these
        times. A conviction covers only the time after the last pass of the canary that failed.
        """
        if (history := self._histories.get(key)) is not None:
            history.trim(self._instant(oldest_pass - MARGIN))

    def keep(self, keys: set[Key]) -> None:
        """Drop the spans of all worker instances except `keys`."""
        for key in self._histories.keys() - keys:
            del self._histories[key]
        self._unknown_until = {key: until for key, until in self._unknown_until.items() if key in keys}

    def tokens_sent(self, key: Key, since: datetime) -> list[ExposedTokens]:
        """Return the tokens that the worker has sent to each request since `since`, and mark these tokens as reported.

        Tokens that were reported before are left out.
        """
        history, found = self._histories.get(key), list[ExposedTokens]()
        instant = self._instant(since - MARGIN)
        for span in history.served_spans if history else ():
            if (tokens := span.since(instant)) is not None:
                span.named = tokens[1] + 1
                found.append(ExposedTokens(span, *tokens))
        return found

    def fact(self, fed: ExposedTokens, action: str) -> RequestExposed:
        """Return the fact about one request that received tokens from a worker that was convicted later.

        `action` is the corruption policy that was applied, or "none" if the request had finished.
        """
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
        """Return a fact for each part of the period from `since` to `until` for which records are missing.

        Each part is reported only once.
        """
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
