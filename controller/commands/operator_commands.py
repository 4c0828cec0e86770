"""The operator's commands `events`, `drain`, `resume`, `move`, `restart` and `chaos`.

`restart` restarts workers gracefully, one after another. The steps for one worker:

    others routable? ──▶ stop (drains first) ──▶ a new instance has joined ──▶ it is routable ──▶ the next worker
                                                                             (a spare: healthy)

Workers that serve no requests (hung, dead, drained) are restarted first, and skip the check that others are routable. The next
worker is stopped only after the new instance of the previous worker serves requests. Of two workers, one therefore always
serves. `holdfast up`, systemd or the orchestrator starts the new instance; `restart` only waits for it.
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
from controller.processes.console import print_line
from controller.processes.operator_client import Operator, Unreachable, ask, closing, find, operator_name
from controller.read_model.fleet_view import FleetStatus, WorkerView
from controller.read_model.worker_names import workers_of
from controller.runtime.bounded_read import held
from controller.terminal_text import escape_controls, fitted, shortened
from events import codec
from events.chaos import ENDS, TAKE_ARGUMENT, TAKE_RANK
from events.errors import HoldfastError, UsageError
from events.fact import Recorded, Skipped
from events.nats.bus import NoAnswer

LOOK_S = 1.0  # seconds between checks of the broker connection while events are followed
STATUS_EVERY_S = 0.1  # seconds between requests for the status while a worker restarts
FIELD_CHARS_MAX = 60  # maximum characters of one field of an event in text output
# columns of indent of an event's continuation lines, which leaves the column of sequence numbers empty
EVENT_HANG = 8
# maximum number of unknown kinds that are counted separately; further kinds are counted together
UNKNOWN_KINDS_MAX = 100


# --- events -----------------------------------------------------------------------------------------------------------


async def show_events(args: argparse.Namespace) -> int:
    """Print the events on the journal, and with --follow also those that arrive later.

    Raise UsageError if --kind is unknown, or HoldfastError if the journal cannot be read."""
    from events.journal.nats import NatsJournal

    if args.kind and args.kind not in codec.KINDS:
        raise UsageError(f"unknown kind {args.kind!r}; the kinds are {', '.join(sorted(codec.KINDS))}")
    url, unknown = find(args.data)["nats_url"], UnknownKinds()
    async with closing(NatsJournal.connect(url, "reader", make=False, stops_at="nothing")) as journal:
        last = await journal.last_seq()  # raises an error at once if the broker does not answer
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
    """Counts the events of kinds that this release does not know. The first event of each such kind is reported on stderr."""

    counts: Counter[str] = field(default_factory=Counter)

    def note(self, event: Recorded) -> None:
        """Count an event if its kind is unknown. Report the event on stderr if it is the first of this kind."""
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
        """Print on stderr how many events of unknown kinds were skipped, if any were."""
        if self.counts:
            say_aside(f"skipped {self.counts.total()} events of unknown kinds: upgrade to read them")


def say_aside(text: str) -> None:
    """Print a note on stderr, because stdout is for the command's result."""
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
    """Run coroutines concurrently until one of them ends, and cancel the others.

    If the coroutine that ended has failed, raise its error."""
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
    """Print a note each time the broker disconnects or reconnects, until cancelled.

    Without the note, an outage could be mistaken for a time without events. Raise NoFleet if the fleet
    has ended while disconnected, or Unreachable if the fleet now uses a broker with another URL than `url`."""
    disconnected = False
    while True:
        await asyncio.sleep(look_s)
        if disconnected is connected():
            disconnected = not disconnected
            say_aside(f"the broker {'cannot be reached' if disconnected else 'is connected again'}")
        if disconnected and find(data)["nats_url"] != url:
            raise Unreachable(f"the fleet in {data} was restarted with another broker: run the command again")


def is_wanted(event: Recorded, args: argparse.Namespace) -> bool:
    """Return whether an event matches the filters --kind and --worker. An event of an unknown kind never matches."""
    fact = event.fact
    if isinstance(fact, Skipped) or (args.kind and fact.kind() != args.kind):
        return False
    return not args.worker or args.worker in workers_of(fact)


def event_line(event: Recorded, output: str) -> str:
    """Format one event as a line of JSON, or as text that is wrapped to the terminal's width."""
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
    """Return a value as text of at most FIELD_CHARS_MAX characters. `-o json` prints the full value."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return shortened(text, FIELD_CHARS_MAX)


# --- commands about a worker ------------------------------------------------------------------------------------------


async def _tell(args: argparse.Namespace, verb: str, otherwise: str, **body: object) -> int:
    """Send a command about a worker, and print the controller's answer, or `otherwise` if the answer has no text."""
    answer = await ask(args.data, verb, {"worker": args.worker, "by": operator_name(), **body})
    print(answer.get("says", otherwise))
    return 0


async def drain(args: argparse.Namespace) -> int:
    """Send the controller the command to drain a worker, and print the answer. Raise HoldfastError if the command fails."""
    return await _tell(args, "drain", f"{args.worker} is draining", deadline_s=args.deadline)


async def resume(args: argparse.Namespace) -> int:
    """Send the controller the command to return a drained worker to service, and print the answer.

    Raise HoldfastError if the command fails."""
    return await _tell(args, "resume", f"{args.worker} returns to service after its next passed canary")


async def move(args: argparse.Namespace) -> int:
    """Send the controller the command to move the running requests of a worker, and print the answer.

    Raise HoldfastError if the command fails."""
    return await _tell(args, "move", f"the running requests of {args.worker} will move", to=args.to)


async def chaos(args: argparse.Namespace) -> int:
    """Send the controller the command to inject a fault into a worker, or to end an injected fault.

    Print the controller's answer. Raise UsageError if a flag does not apply to the fault. Raise HoldfastError if the command
    fails."""
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
    """Restart the worker that the arguments name, or with --rolling all workers.

    Raise UsageError if the arguments have both a worker and --rolling, or neither. Raise HoldfastError if a restart fails."""
    if args.rolling == bool(args.worker):
        raise UsageError("give either a WORKER, or --rolling for all workers")
    async with closing(Operator.connect(args.data)) as operator:
        names = [args.worker] if args.worker else await all_of(operator)
        await restart(operator, names, args.within)
    return 0


async def restart(operator: Operator, names: Sequence[str], within_s: float = RESTART_S) -> None:
    """Restart workers one after another. After an error, the remaining workers are not restarted.

    For each worker, wait until it can be stopped, and then until its new instance serves requests, or is healthy as a spare.
    Each wait takes at most `within_s` seconds. Raise NotRestarted if a wait would take longer, or if a worker is unknown. Raise
    OperatorRefused or NoAnswer if the controller does not restart a worker.
    """
    for name in names:
        why = f"{name} cannot be spared: no other worker of its model serves requests"
        old = await _until(operator, partial(_spared, name), within_s, why)
        answer = await operator.ask("restart", {"worker": name, "by": operator_name()})
        print_line(str(answer["says"]))
        new = await _until(operator, partial(_successor, name, old.instance), within_s, f"{name} is not back")
        print_line(f"{name} is back (pid {new.pid})")


async def _workers(operator: Operator) -> Sequence[WorkerView]:
    return FleetStatus.of(await operator.ask("status", {})).workers


async def all_of(operator: Operator) -> list[str]:
    """Return the names of all workers with a running process. Workers that serve no requests come first."""
    there = [w for w in await _workers(operator) if w.health != "DEAD" or w.lingers]
    return [w.id for w in sorted(there, key=_routable)]


def _spared(name: str, workers: Sequence[WorkerView]) -> WorkerView | None:
    """Return the worker `name` if it can be stopped, else None. Raise NotRestarted if no such worker exists.

    A worker can be stopped if it gets no requests itself, or if another worker of its model serves requests."""
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
    """Return whether a worker serves requests, or would if its lineage (weights' revision and tokenizer) were not new.

    The first worker of a new lineage serves no requests until a second worker of this lineage has joined. A rolling restart
    therefore continues before the first worker serves. Otherwise, the next worker would never be restarted, and no second worker
    could join."""
    return (_healthy(worker) and bool(worker.weight)) or (worker.held and worker.breaker == "closed")


def _healthy(worker: WorkerView) -> bool:
    return worker.health == "HEALTHY" and worker.breaker == "closed"


async def _until(
    operator: Operator, found: Callable[[Sequence[WorkerView]], WorkerView | None], within_s: float, why: str
) -> WorkerView:
    """Poll the fleet's status until `found` returns a worker, and return that worker.

    Raise NotRestarted with the reason `why` after `within_s` seconds."""
    try:
        async with asyncio.timeout(within_s):
            while True:
                with contextlib.suppress(NoAnswer):  # a controller that is starting may not answer yet
                    if seen := found(await _workers(operator)):
                        return seen
                await asyncio.sleep(STATUS_EVERY_S)
    except TimeoutError:
        raise NotRestarted(f"{why} after {within_s:g} s") from None
