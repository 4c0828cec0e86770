"""The `holdfast replay` and `holdfast request` commands: they print text or JSON, or write a file.

The journal and the store are passed in: see `controller.commands.replay`.
"""

import argparse
import json
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from datetime import UTC, datetime

from controller.ports import Archive
from controller.replay import moment_parser, request_story, sentences, timeline, travel
from controller.replay.rebuild import rebuild
from controller.replay.report import report_cli
from controller.replay.scan import JournalArchive
from controller.replay.store import HistoryStore
from controller.replay.verify import verify
from controller.replay.whatif import whatif_cli
from controller.replay.why import as_json, why
from controller.replay.why import lines as why_lines
from controller.terminal_text import fitted
from events.errors import HoldfastError
from events.journal.port import Journal

FINDING = 3
NO_EVENTS = (
    "the journal has no event about request {}: it was answered by the first worker that it was sent to, which was not "
    "convicted; or its frontend ended before anything happened to it; or it never arrived"
)
Echo = Callable[[str], None]
Command = Callable[[argparse.Namespace, Journal, HistoryStore | None, Echo], Awaitable[int]]


class NeedsStore(HoldfastError):
    """This command needs the state store, which is unreachable or not configured: set HOLDFAST_DATABASE_URL."""


async def execute(
    args: argparse.Namespace, journal: Journal, store: HistoryStore | None, echo: Echo = print
) -> int:
    """Run one replay command and return its exit code. Without a store, only the journal is read."""
    if args.output == "text":
        return await _COMMANDS[args.replay](args, journal, store, lambda line: echo(fitted(line)))
    return await _COMMANDS[args.replay](args, journal, store, echo)


def _archive(journal: Journal, store: HistoryStore | None) -> Archive:
    return JournalArchive(journal) if store is None else store


def _now() -> datetime:
    return datetime.now(UTC)


async def _timeline(
    args: argparse.Namespace, journal: Journal, store: HistoryStore | None, echo: Echo
) -> int:
    archive = _archive(journal, store)
    if args.incident:
        return await _story(args, journal, archive, echo)
    since = moment_parser.parse(args.since, _now()) if args.since else None
    day = None
    async for event in timeline.events(
        archive, worker=args.worker, request=args.request, since=since, routine=args.all
    ):
        if args.output == "json":
            echo(json.dumps(as_json(event)))
        else:
            echo(sentences.line(event, date=event.at.date() != day))
        day = event.at.date()
    if day is None and args.output == "text":
        named = f"request {args.request}" if args.request else f"worker {args.worker}" if args.worker else ""
        about = f" about {named}" if named else ""
        echo(f"the journal holds nothing to show{about}{f' since {args.since}' if since else ''}")
    return 0


async def _request(args: argparse.Namespace, journal: Journal, store: HistoryStore | None, echo: Echo) -> int:
    archive = _archive(journal, store)
    found = [one async for one in timeline.events(archive, request=args.request, routine=True)]
    story = request_story.story_of(args.request, found)
    cut = story.cut = await request_story.cut(story, archive, await journal.last_seq())
    lines = story.lines() or [NO_EVENTS.format(args.request)]
    if args.output == "json":
        echo(json.dumps({"request": story.request, "says": lines, "model": story.model, "workers": story.workers,
                        "gaps_ms": story.gaps_ms, "put_off": story.put_off, "exact": story.exact,
                        "exposed": [asdict(one) for one in story.exposed], "lost": story.lost,
                        "lost_tokens": story.lost_tokens,
                        "cut": asdict(cut) | {"ended": cut.ended.isoformat()} if cut else None,
                        "events": [as_json(one) for one in found]}, indent=1))  # fmt: skip
        return 0
    for line in lines:
        echo(line)
    for n, event in enumerate(found):
        echo(f"  {sentences.line(event, date=n == 0)}")
    return 0


async def _story(args: argparse.Namespace, journal: Journal, archive: Archive, echo: Echo) -> int:
    story = await timeline.story(
        journal, archive, await timeline.incident_of(archive, journal, args.incident)
    )
    if args.output == "json":
        events = [as_json(event) for event in story.events]
        echo(json.dumps({"incident": story.incident, "subject": story.subject, "symptom": story.symptom,
                        "closed": story.closed, "outcome": story.outcome, "lasted_s": story.recovered_s,
                        "recovered_s": story.recovered_s,
                        "events": events}, indent=1))  # fmt: skip
        return 0
    echo(story.headline())
    for n, event in enumerate(story.events):
        echo(f"  {sentences.line(event, date=n == 0)}")
    return 0


async def _at(args: argparse.Namespace, journal: Journal, store: HistoryStore | None, echo: Echo) -> int:
    found = await travel.at(journal, store, moment_parser.parse(args.when, _now()))
    if args.output == "json":
        echo(json.dumps(travel.describe(found), indent=1))
        return 0
    for line in travel.lines(found):
        echo(line)
    return 0


async def _why(args: argparse.Namespace, journal: Journal, store: HistoryStore | None, echo: Echo) -> int:
    chain = await why(journal, store, args.event)
    if args.output == "json":
        echo(json.dumps([as_json(event) for event in chain], indent=1))
    else:
        for line in why_lines(chain):
            echo(line)
    return 0


async def _report(args: argparse.Namespace, journal: Journal, store: HistoryStore | None, echo: Echo) -> int:
    await report_cli.execute(args, journal, store, _archive(journal, store), _now(), echo)
    return 0


async def _what_if(args: argparse.Namespace, journal: Journal, store: HistoryStore | None, echo: Echo) -> int:
    await whatif_cli.execute(args, journal, store, _archive(journal, store), _now(), echo)
    return 0


async def _verify(args: argparse.Namespace, journal: Journal, store: HistoryStore | None, echo: Echo) -> int:
    if store is None:
        raise NeedsStore
    report = await verify(journal, store, since=await _sequence(args.since, journal, store))
    if args.output == "json":
        echo(json.dumps(report.as_json(), indent=1, default=str))
    else:
        for line in report.lines():
            echo(line)
    return FINDING if report.difference else 0


async def _sequence(text: str | None, journal: Journal, store: HistoryStore) -> int:
    """Return the first sequence that `--since` includes."""
    if not text:
        return 0
    when = moment_parser.parse(text, _now())
    if isinstance(when, int):
        if when > (last := await journal.last_seq()):
            raise travel.NotYet(f"the journal ends at {last}, before {when}. {travel.NotYet.__doc__}")
        return when
    async for batch in _archive(journal, store).select(since=when):
        return batch[0].seq
    return await journal.last_seq()


async def _rebuild(args: argparse.Namespace, journal: Journal, store: HistoryStore | None, echo: Echo) -> int:
    if store is None:
        raise NeedsStore
    rebuilt = await rebuild(journal, store)
    if args.output == "json":
        echo(json.dumps(asdict(rebuilt)))
        return 0
    echo(
        f"projected {rebuilt.events} events again, up to {rebuilt.position}, in {sentences.span(rebuilt.seconds)}"
    )
    if rebuilt.foreign:
        echo("the old projection belonged to another stream")
    return 0


_COMMANDS: dict[str, Command] = {
    "timeline": _timeline, "at": _at, "why": _why, "verify": _verify, "rebuild": _rebuild,
    "report": _report, "what-if": _what_if, "request": _request,
}  # fmt: skip
