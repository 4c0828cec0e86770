"""The operator's commands: events, drain, resume, move, restart, chaos.

`restart` stops workers gracefully, one after another; their supervisor starts them again:

    others routable? ──▶ stop (drains first) ──▶ a new instance has joined ──▶ it is routable ──▶ the next worker
                                                                             (a spare: healthy)

Workers that serve no requests (hung, dead, drained) are restarted first, without waiting for another worker to be routable. The
next worker is stopped only when the new instance of the previous one serves requests, so a fleet of two always has one that
serves. `holdfast up`, systemd or the orchestrator starts the workers again; this command only waits for that.
"""

import argparse
import asyncio
import contextlib
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from controller.commands.flags.operating import RESTART_S
from controller.processes.console import say
from controller.processes.operator_client import Operator, Unreachable, ask, closing, find, operator_name
from controller.read_model.fleet_view import FleetStatus, WorkerView
from controller.read_model.worker_names import workers_of
from controller.runtime.bounded_read import held
from controller.terminal_text import escape_controls, fitted
from events import codec
from events.chaos import ENDS, TAKE_ARGUMENT, TAKE_RANK
from events.errors import HoldfastError, UsageError
from events.fact import Recorded, Skipped
from events.nats.bus import NoAnswer

LOOK_S = 1.0  # interval of checking the connection while following
STATUS_EVERY_S = 0.1  # interval of asking for the status while a worker restarts
FIELD_CHARS_MAX = 60  # of one field of an event in text output
EVENT_HANG = 8  # columns; continuation lines leave the sequence column empty
UNKNOWN_KINDS_MAX = 100  # kinds that are counted separately; further kinds are counted together


# --- events -----------------------------------------------------------------------------------------------------------


async def show_events(args: argparse.Namespace) -> int:
    """Print the events on the journal. Raise UsageError or HoldfastError."""
    from events.journal.nats import NatsJournal

    if args.kind and args.kind not in codec.KINDS:
        raise UsageError(f"unknown kind {args.kind!r}; the kinds are {', '.join(sorted(codec.KINDS))}")
    url, unknown = find(args.data)["nats_url"], UnknownKinds()
    async with closing(NatsJournal.connect(url, "reader", make=False, stops_at="nothing")) as journal:
        last = await journal.last_seq()  # fails at once if the broker does not answer
        if args.follow:
            await _first(
                _print(journal.read(await journal.first_seq() - 1), args, unknown),
                until_lost(lambda: journal.connected, args.data, url),
            )
        else:
            await _print(held(journal, 0, last), args, unknown)
            unknown.report()
    return 0


@dataclass(slots=True)
class UnknownKinds:
    """Counts events of kinds that this release does not know. Prints each kind once on stderr."""

    counts: Counter[str] = field(default_factory=Counter)

    def note(self, event: Recorded) -> None:
        """Count an event if its kind is unknown."""
        fact = event.fact
        if not isinstance(fact, Skipped) or not fact.unknown:
            return
        kind = escape_controls(fact.subject.rpartition(".")[2])
        if kind not in self.counts and len(self.counts) >= UNKNOWN_KINDS_MAX:
            kind = "other kinds"
        self.counts[kind] += 1
        if self.counts[kind] == 1:
            say_aside(f"event {event.seq} has a kind that this release does not know ({kind}) and is skipped")

    def report(self) -> None:
        """Print the number of skipped events."""
        if self.counts:
            say_aside(f"skipped {self.counts.total()} events of unknown kinds: upgrade to read them")


def say_aside(text: str) -> None:
    """Print a line on stderr."""
    print(f"holdfast: {text}", file=sys.stderr)


async def _print(
    batches: AsyncIterator[Sequence[Recorded]], args: argparse.Namespace, unknown: UnknownKinds
) -> None:
    async for batch in batches:
        for event in batch:
            unknown.note(event)
            if is_wanted(event, args):
                print(event_line(event, args.output), flush=args.follow)


async def _first(*works: Coroutine[object, object, None]) -> None:
    """Run all of these until one ends."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until_lost(connected: Callable[[], bool], data: Path, url: str, look_s: float = LOOK_S) -> None:
    """Print when the broker disconnects and reconnects, so that an outage is not mistaken for a time without events. Raise
    NoFleet or Unreachable if the broker is gone for good."""
    disconnected = False
    while True:
        await asyncio.sleep(look_s)
        if disconnected is connected():
            disconnected = not disconnected
            say_aside(f"the broker {'cannot be reached' if disconnected else 'is connected again'}")
        if disconnected and find(data)["nats_url"] != url:
            raise Unreachable(f"the fleet in {data} was restarted with another broker: run the command again")


def is_wanted(event: Recorded, args: argparse.Namespace) -> bool:
    """Return whether an event matches `--kind` and `--worker`."""
    fact = event.fact
    if isinstance(fact, Skipped) or (args.kind and fact.kind() != args.kind):
        return False
    return not args.worker or args.worker in workers_of(fact)


def event_line(event: Recorded, output: str) -> str:
    """Return one event as a line: JSON, or text wrapped to the terminal."""
    kind, body = event.fact.kind(), codec.to_builtins(event.fact)
    if output == "json":
        return json.dumps({
            "seq": event.seq, "at": event.at.isoformat(), "kind": kind, "id": event.id, "source": event.source,
            "through": event.through, "incident": event.correlation, "cause": event.causation, "body": body,
        })  # fmt: skip
    fields = " ".join(
        f"{k}={escape_controls(_short(v))}" for k, v in body.items() if v not in (None, "", [], {}, ())
    )
    line = f"{event.seq:>7} {event.at:%Y-%m-%dT%H:%M:%S.%f}Z {kind:<20} {fields}"
    return fitted(line, hang=EVENT_HANG - (len(line) - len(line.lstrip())))


def _short(value: object) -> str:
    """Return a value as text, truncated so that an event takes a few lines; `-o json` has all of it."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= FIELD_CHARS_MAX else f"{text[: FIELD_CHARS_MAX - 1]}…"


# --- commands about a worker ------------------------------------------------------------------------------------------


async def _tell(args: argparse.Namespace, verb: str, otherwise: str, **body: object) -> int:
    """Send a command about a worker, and print the controller's answer; `otherwise` if the answer has no text."""
    answer = await ask(args.data, verb, {"worker": args.worker, "by": operator_name(), **body})
    print(answer.get("says", otherwise))
    return 0


async def drain(args: argparse.Namespace) -> int:
    """Drain a worker. Raise HoldfastError."""
    return await _tell(args, "drain", f"{args.worker} is draining", deadline_s=args.deadline)


async def resume(args: argparse.Namespace) -> int:
    """Return a drained worker to service. Raise HoldfastError."""
    return await _tell(args, "resume", f"{args.worker} returns to service after its next passed canary")


async def move(args: argparse.Namespace) -> int:
    """Move the running requests of a worker. Raise HoldfastError."""
    return await _tell(args, "move", f"the running requests of {args.worker} will move", to=args.to)


async def chaos(args: argparse.Namespace) -> int:
    """Inject a fault into a worker, or heal it. Raise UsageError or HoldfastError."""
    if args.argument is not None and args.fault not in TAKE_ARGUMENT:
        raise UsageError(f"{args.fault} accepts no number; {', '.join(TAKE_ARGUMENT)} do")
    if args.rank is not None and args.fault not in TAKE_RANK:
        raise UsageError(f"{args.fault} affects the whole worker; {', '.join(TAKE_RANK)} accept a rank")
    if args.duration_s is not None and args.fault in ENDS:
        raise UsageError(f"--for does not apply to {args.fault}, which has no duration")
    body = {name: getattr(args, name) for name in ("fault", "argument", "duration_s", "rank")}
    return await _tell(args, "chaos", f"{args.worker}: {args.fault}", **body)


# --- restart ----------------------------------------------------------------------------------------------------------


class NotRestarted(HoldfastError):
    """A worker did not return, or the fleet cannot spare it."""


async def restart_workers(args: argparse.Namespace) -> int:
    """Restart one worker, or all of them. Raise UsageError or HoldfastError."""
    if args.rolling == bool(args.worker):
        raise UsageError("give either a WORKER, or --rolling for all workers")
    async with closing(Operator.connect(args.data)) as operator:
        names = [args.worker] if args.worker else await all_of(operator)
        await restart(operator, names, args.within)
    return 0


async def restart(operator: Operator, names: Sequence[str], within_s: float = RESTART_S) -> None:
    """Restart workers one after another. Raise NotRestarted, Refused or NoAnswer, which leaves later workers untouched."""
    for name in names:
        why = f"{name} cannot be spared: no other worker of its model serves requests"
        old = await _until(operator, partial(_spared, name), within_s, why)
        answer = await operator.ask("restart", {"worker": name, "by": operator_name()})
        say(str(answer["says"]))
        new = await _until(operator, partial(_successor, name, old.instance), within_s, f"{name} is not back")
        say(f"{name} is back (pid {new.pid})")


async def _workers(operator: Operator) -> Sequence[WorkerView]:
    return FleetStatus.of(await operator.ask("status", {})).workers


async def all_of(operator: Operator) -> list[str]:
    """Return the names of all running workers, those that serve no requests first."""
    there = [w for w in await _workers(operator) if w.health != "DEAD" or w.lingers]
    return [w.id for w in sorted(there, key=_routable)]


def _spared(name: str, workers: Sequence[WorkerView]) -> WorkerView | None:
    """Return a worker if another one of its model serves requests, or if it serves none itself."""
    worker = _found(workers, name)
    others = [w for w in workers if w.model == worker.model and w.id != name]
    return worker if worker.weight == 0 or any(map(_routable, others)) else None


def _successor(name: str, old: str, workers: Sequence[WorkerView]) -> WorkerView | None:
    worker = _found(workers, name)
    back = _routable(worker) or (worker.spare and _healthy(worker))
    return worker if worker.instance != old and back else None


def _found(workers: Sequence[WorkerView], name: str) -> WorkerView:
    for worker in workers:
        if worker.id == name:
            return worker
    raise NotRestarted(f"unknown worker {name!r}; `holdfast status` lists all workers")


def _routable(worker: WorkerView) -> bool:
    """Return whether a worker serves requests, or would as the last of its model. A worker of a new lineage is held back until
    another one of that lineage has joined."""
    return (_healthy(worker) and bool(worker.weight)) or (worker.held and worker.breaker == "closed")


def _healthy(worker: WorkerView) -> bool:
    return worker.health == "HEALTHY" and worker.breaker == "closed"


async def _until(
    operator: Operator, found: Callable[[Sequence[WorkerView]], WorkerView | None], within_s: float, why: str
) -> WorkerView:
    """Poll the status until `found` returns a worker. Raise NotRestarted with `why`."""
    try:
        async with asyncio.timeout(within_s):
            while True:
                with contextlib.suppress(NoAnswer):  # a starting controller answers a moment later
                    if seen := found(await _workers(operator)):
                        return seen
                await asyncio.sleep(STATUS_EVERY_S)
    except TimeoutError:
        raise NotRestarted(f"{why} after {within_s:g} s") from None
