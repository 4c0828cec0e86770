"""Runs the commands `holdfast replay` and `holdfast request`.

The result is printed as text or JSON, or written to a file. `controller.commands.replay` opens the journal and the state store,
and passes both to `execute`.
"""

import argparse
import json
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from controller.replay import moment_parser, request_story, sentences, timeline, travel
from controller.replay.event_lookup import FleetHistory, as_json, why
from controller.replay.event_lookup import lines as why_lines
from controller.replay.rebuild import rebuild
from controller.replay.report import report_cli
from controller.replay.store import HistoryStore
from controller.replay.verify import verify
from controller.replay.whatif import whatif_cli
from controller.terminal_text import fitted
from events.errors import HoldfastError
from events.fact import Recorded
from events.journal.port import Journal

FINDING = 3
NO_EVENTS = (
    "the journal has no event about request {}: it was answered by the first worker that it was sent to, which was not "
    "convicted; or its frontend ended before anything happened to it; or it never arrived"
)
Echo = Callable[[str], None]


class NeedsStore(HoldfastError):
    """This command needs the state store, which is unreachable or not configured: set HOLDFAST_DATABASE_URL."""


async def execute(
    args: argparse.Namespace, journal: Journal, store: HistoryStore | None, echo: Echo = print
) -> int:
    """Run one replay command and return its exit code. The code is FINDING (3) if `verify` found a difference.

    If `store` is None, only the journal is read. Raise NeedsStore if `store` is None and the command needs a store."""
    if args.output == "text":
        return await _COMMANDS[args.replay](
            _Replay(args, FleetHistory(journal, store), lambda line: echo(fitted(line)))
        )
    return await _COMMANDS[args.replay](_Replay(args, FleetHistory(journal, store), echo))


@dataclass(frozen=True, slots=True)
class _Replay:
    """Runs one replay command on a journal and a state store. Each command is a method that returns its exit code."""

    args: argparse.Namespace
    history: FleetHistory
    echo: Echo

    @property
    def needed_store(self) -> HistoryStore:
        if self.history.store is None:
            raise NeedsStore
        return self.history.store

    def print_result(self, document: object, lines: Iterable[str]) -> int:
        """Print `document` as JSON if `-o json` is given, otherwise print `lines`. Return exit code 0."""
        if self.args.output == "json":
            lines = [json.dumps(document, indent=1, default=str)]
        for line in lines:
            self.echo(line)
        return 0

    async def timeline(self) -> int:
        args, day = self.args, None
        if args.incident:
            return await self._story()
        since = moment_parser.parse(args.since, _now()) if args.since else None
        async for event in timeline.events(
            self.history.archive, worker=args.worker, request=args.request, since=since, routine=args.all
        ):
            if args.output == "json":
                self.echo(json.dumps(as_json(event)))
            else:
                self.echo(sentences.line(event, date=event.at.date() != day))
            day = event.at.date()
        if day is None and args.output == "text":
            named = f" about request {args.request}" if args.request else ""
            named = named or (f" about worker {args.worker}" if args.worker else "")
            self.echo(f"the journal holds nothing to show{named}{f' since {args.since}' if since else ''}")
        return 0

    async def _story(self) -> int:
        incident = await timeline.incident_of(self.history.archive, self.history.journal, self.args.incident)
        story = await timeline.story(self.history.journal, self.history.archive, incident)
        document = story.summary() | {"events": [as_json(event) for event in story.events]}
        return self.print_result(document, [story.headline(), *_indented(story.events)])

    async def request(self) -> int:
        request, archive, journal = self.args.request, self.history.archive, self.history.journal
        found = [one async for one in timeline.events(archive, request=request, routine=True)]
        story = request_story.story_of(request, found)
        cut = story.cut = await request_story.cut(story, archive, await journal.last_seq())
        lines = story.lines() or [NO_EVENTS.format(request)]
        document = {"request": story.request, "says": lines, "model": story.model, "workers": story.workers,
                    "gaps_ms": story.gaps_ms, "put_off": story.put_off, "exact": story.exact,
                    "exposed": [asdict(one) for one in story.exposed], "lost": story.lost,
                    "lost_tokens": story.lost_tokens,
                    "cut": asdict(cut) | {"ended": cut.ended.isoformat()} if cut else None,
                    "events": [as_json(one) for one in found]}  # fmt: skip
        return self.print_result(document, [*lines, *_indented(found)])

    async def at(self) -> int:
        found = await travel.at(
            self.history.journal, self.history.store, moment_parser.parse(self.args.when, _now())
        )
        return self.print_result(travel.describe(found), travel.lines(found))

    async def why(self) -> int:
        chain = await why(self.history.journal, self.history.store, self.args.event)
        return self.print_result([as_json(event) for event in chain], why_lines(chain))

    async def report(self) -> int:
        await report_cli.execute(self.args, self.history, _now(), self.echo)
        return 0

    async def what_if(self) -> int:
        await whatif_cli.execute(self.args, self.history, _now(), self.echo)
        return 0

    async def verify(self) -> int:
        report = await verify(self.history.journal, self.needed_store, since=await self._since())
        self.print_result(report.as_json(), report.lines())
        return FINDING if report.difference else 0

    async def _since(self) -> int:
        """Return the sequence number of the first event that `--since` includes; 0 without `--since`.

        If all events are older than `--since`, return the journal's last sequence number. Raise NotYet if `--since` is a
        sequence number that the journal has not reached."""
        if not self.args.since:
            return 0
        journal, archive = self.history.journal, self.history.archive
        when, last = moment_parser.parse(self.args.since, _now()), await journal.last_seq()
        if isinstance(when, int):
            if when > last:
                raise travel.NotYet(f"the journal ends at {last}, before {when}. {travel.NotYet.__doc__}")
            return when
        async for batch in archive.select(since=when):
            return batch[0].seq
        return last

    async def rebuild(self) -> int:
        done = await rebuild(self.history.journal, self.needed_store)
        if self.args.output == "json":
            self.echo(json.dumps(asdict(done)))
            return 0
        took = sentences.span(done.seconds)
        self.echo(f"projected {done.events} events again, up to {done.position}, in {took}")
        if done.foreign:
            self.echo("the old projection belonged to another stream")
        return 0


def _now() -> datetime:
    return datetime.now(UTC)


def _indented(events: Iterable[Recorded]) -> Iterator[str]:
    for n, event in enumerate(events):
        yield f"  {sentences.line(event, date=n == 0)}"


_COMMANDS: dict[str, Callable[[_Replay], Awaitable[int]]] = {
    "timeline": _Replay.timeline, "at": _Replay.at, "why": _Replay.why, "verify": _Replay.verify, "rebuild": _Replay.rebuild,
    "report": _Replay.report, "what-if": _Replay.what_if, "request": _Replay.request,
}  # fmt: skip
