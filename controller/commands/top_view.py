"""What `holdfast top` shows: the fleet, how busy it is, and what happened last, within the columns and lines that there are."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from rich.console import Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from controller.deciders.worker import SPARE
from controller.replay import sentences, timeline
from events.fact import Recorded
from events.observations import RequestsRejected, RequestsServed

TOLD_MAX = 200  # events that are remembered
RATES_OVER = timedelta(seconds=10)
HEAD_LINES, EVENT_LINES_LEAST = 5, 5
COLOURS = {
    "HEALTHY": "green",
    "SUSPICIOUS": "yellow",
    "UNHEALTHY": "red",
    "DRAINING": "blue",
    "DEAD": "bright_black",
}
ORDER = ("UNHEALTHY", "SUSPICIOUS", "DRAINING", "DEAD", "HEALTHY")


@dataclass(slots=True)
class EventTold:
    """An event, and how many came right behind it that say the same of other requests."""

    event: Recorded
    alike: tuple[object, ...] | None  # what those have in common; None: it is of no request
    more: int = 0

    def line(self) -> str:
        """Return it as a line for people."""
        return (f"[{self.more + 1} times] " if self.more else "") + sentences.line(self.event)


def _alike(event: Recorded) -> tuple[object, ...] | None:
    fact = event.fact
    if not hasattr(fact, "request"):
        return None
    return (
        type(fact),
        getattr(fact, "worker", None),
        getattr(fact, "source", None),
        getattr(fact, "target", None),
    )


@dataclass(slots=True)
class FleetSeen:
    """What is known so far."""

    status: Mapping[str, Any] | None = None
    fault: str = ""  # why the last status is not there, or old
    told: "deque[EventTold]" = field(default_factory=lambda: deque(maxlen=TOLD_MAX))
    served: deque[tuple[datetime, RequestsServed]] = field(default_factory=deque)
    rejected: deque[tuple[datetime, int]] = field(default_factory=deque)
    now: datetime | None = None  # by the stream's clock, as of the last event
    last: int = 0  # its sequence

    def take(self, events: Sequence[Recorded]) -> None:
        """Take events in, in order."""
        for event in events:
            self.now, self.last = event.at, event.seq
            match event.fact:
                case RequestsServed() as fact:
                    self.served.append((event.at, fact))
                case RequestsRejected(count=count):
                    self.rejected.append((event.at, count))
                case _:
                    pass
            if not timeline.is_routine(event.fact):
                self._tell(event)
        for rates in (self.served, self.rejected):
            while rates and self.now is not None and rates[0][0] < self.now - RATES_OVER:
                rates.popleft()

    def _tell(self, event: Recorded) -> None:
        """Remember an event, together with the last one where that says the same of another request."""
        alike = _alike(event)
        if self.told and alike is not None and self.told[-1].alike == alike:
            self.told[-1].more += 1
        else:
            self.told.append(EventTold(event, alike))

    def rates(self) -> str:
        """Return how much is served, as a line for people."""
        over = RATES_OVER.total_seconds()
        facts = [fact for _, fact in self.served]
        answers, tokens = sum(fact.count for fact in facts), sum(fact.tokens for fact in facts)
        said = [f"{answers / over:.1f} answers/s", f"{tokens / over:,.0f} tokens/s"]
        if answers:
            ttft = sum(fact.ttft_ms * fact.count for fact in facts) / answers
            said.append(f"first token {ttft:.0f} ms")
        if refused := sum(count for _, count in self.rejected):
            said.append(f"{refused / over:.1f} refused/s")
        return "   ".join(said)


def picture(seen: FleetSeen, lines: int) -> RenderableType:
    """Return one picture that takes at most so many lines."""
    status = seen.status or {}
    workers = sorted(status.get("workers", ()), key=_urgency)
    room = max(1, lines - HEAD_LINES - 2 - EVENT_LINES_LEAST)
    shown = workers[:room]
    rest = len(workers) - len(shown)
    used = HEAD_LINES + 1 + len(shown) + (1 if rest else 0)
    told = [*seen.told][-max(1, lines - used - 1) :]
    parts: list[RenderableType] = [*_head(seen, workers), _table(shown)]
    if rest:
        parts.append(Text(f"{rest} more workers", style="dim"))
    parts.append(Text())
    parts += [_line(one.line()) for one in told]
    return Group(*parts)


def _urgency(worker: Mapping[str, Any]) -> tuple[int, bool, str]:
    health = str(worker.get("health"))
    place = ORDER.index(health) if health in ORDER else len(ORDER)
    return place, not _why(worker), str(worker.get("id"))


def _why(worker: Mapping[str, Any]) -> str:
    return "; ".join(reason for reason in worker.get("reasons") or () if reason != SPARE)


def _head(seen: FleetSeen, workers: Sequence[Mapping[str, Any]]) -> Iterator[Text]:
    if seen.fault:
        yield _line(seen.fault, style="bold red")
    elif seen.status is None:
        yield _line("waiting for the fleet", style="dim")
    else:
        yield Text.assemble(("Holdfast  ", "bold"), *_counts(workers), overflow="ellipsis", no_wrap=True)
    serving = [worker for worker in workers if not worker.get("spare")]
    share = sum(worker.get("weight") or 0.0 for worker in serving)
    busy = sum(worker.get("in_flight") or 0 for worker in workers)
    spares = sum(bool(worker.get("spare")) for worker in workers)
    extra = f", {spares} spare{'' if spares == 1 else 's'}" if spares else ""
    yield _line(f"serving with {share:.3g} of {len(serving)}{extra}   {busy} in flight")
    yield _line(seen.rates())
    yield _line(_positions(seen.status) if seen.status is not None else "")
    yield Text()


def _counts(workers: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    for health in ORDER[-1:] + ORDER[:-1]:
        if count := sum(worker.get("health") == health for worker in workers):
            yield f"{count} {health}  ", COLOURS[health]


def _positions(status: Mapping[str, Any]) -> str:
    levels = [f"{model} level {level}" for model, level in status.get("levels", {}).items() if level]
    leader = (status.get("leader") or "nobody").removeprefix("controller:").partition(":")[0]
    journal, lag = status.get("journal", {}), status.get("projector", {}).get("lag")
    said = [f"leader {leader}", f"{journal.get('last_seq') or 0:,} events"]
    said += [] if lag is None else [f"store {lag} behind"]
    return "   ".join([*said, *(levels or ["no degradation"])])


def _line(text: str, style: str = "") -> Text:
    return Text(text, style=style, overflow="ellipsis", no_wrap=True)


def _table(workers: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(expand=True, box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("worker", "health", "weight", "breaker", "in flight", "why"):
        justify: JustifyMethod = "right" if name in ("weight", "in flight") else "left"
        table.add_column(
            name, justify=justify, overflow="ellipsis", no_wrap=True, ratio=1 if name == "why" else None
        )
    for worker in workers:
        health = str(worker.get("health"))
        weight = SPARE if worker.get("spare") else f"{worker.get('weight') or 0:.3g}"
        cells = (str(worker.get("breaker") or "–"), str(worker.get("in_flight") or 0), _why(worker))
        row = [Text(str(worker.get("id"))), Text(health, style=COLOURS.get(health, "")), Text(weight)]
        table.add_row(*row, *map(Text, cells))  # texts: what somebody has named or said is no markup
    return table
