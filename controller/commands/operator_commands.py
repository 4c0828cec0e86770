"""The operator's commands: events, drain, resume, move, restart, chaos."""

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from controller.commands import restart
from controller.commands.printing import event_line
from controller.commands.unknown_kinds import UnknownKinds
from controller.processes.operator_client import Operator, Unreachable, find, operator_name
from controller.read_model.worker_names import workers_of
from controller.runtime.bounded_read import held
from events import codec
from events.chaos import ENDS, TAKE_ARGUMENT, TAKE_RANK
from events.errors import UsageError
from events.fact import Recorded, Skipped

LOOK_S = 1.0  # interval of checking the connection while following


async def _with(args: argparse.Namespace, verb: str, body: dict[str, Any]) -> dict[str, Any]:
    operator = await Operator.connect(args.data)
    try:
        return await operator.ask(verb, body)
    finally:
        await operator.close()


async def show_events(args: argparse.Namespace) -> int:
    """Print the events on the journal. Raise UsageError or HoldfastError."""
    from events.journal.nats import NatsJournal

    if args.kind and args.kind not in codec.KINDS:
        raise UsageError(f"unknown kind {args.kind!r}; the kinds are {', '.join(sorted(codec.KINDS))}")
    url = find(args.data)["nats_url"]
    journal = await NatsJournal.connect(url, "reader", None, make=False, stops_at="nothing")
    unknown = UnknownKinds()
    try:
        last = await journal.last_seq()  # fails at once if the broker does not answer
        if args.follow:
            await _first(
                _print(journal.read(await journal.first_seq() - 1), args, unknown),
                until_lost(lambda: journal.connected, args.data, url),
            )
        else:
            await _print(held(journal, 0, last), args, unknown)
            unknown.report()
    finally:
        await journal.close()
    return 0


async def _print(
    batches: AsyncIterator[Sequence[Recorded]], args: argparse.Namespace, unknown: UnknownKinds
) -> None:
    async for batch in batches:
        for event in batch:
            unknown.note(event)
            if is_wanted(event, args):
                print(event_line(event, args.output), flush=args.follow)


async def _first(*works: Coroutine[Any, Any, None]) -> None:
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
            print(
                f"holdfast: the broker {'cannot be reached' if disconnected else 'is connected again'}",
                file=sys.stderr,
            )
        if disconnected and find(data)["nats_url"] != url:
            raise Unreachable(f"the fleet in {data} was restarted with another broker: run the command again")


def is_wanted(event: Recorded, args: argparse.Namespace) -> bool:
    """Return whether an event matches `--kind` and `--worker`."""
    fact = event.fact
    if isinstance(fact, Skipped) or (args.kind and fact.kind() != args.kind):
        return False
    return not args.worker or args.worker in workers_of(fact)


async def drain(args: argparse.Namespace) -> int:
    """Drain a worker. Raise HoldfastError."""
    answer = await _with(
        args, "drain", {"worker": args.worker, "deadline_s": args.deadline, "by": operator_name()}
    )
    print(answer.get("says", f"{args.worker} is draining"))
    return 0


async def resume(args: argparse.Namespace) -> int:
    """Return a drained worker to service. Raise HoldfastError."""
    answer = await _with(args, "resume", {"worker": args.worker, "by": operator_name()})
    print(answer.get("says", f"{args.worker} returns to service after its next passed canary"))
    return 0


async def move(args: argparse.Namespace) -> int:
    """Move the running requests of a worker. Raise HoldfastError."""
    answer = await _with(args, "move", {"worker": args.worker, "to": args.to, "by": operator_name()})
    print(answer.get("says", f"the running requests of {args.worker} will move"))
    return 0


async def chaos(args: argparse.Namespace) -> int:
    """Inject a fault into a worker, or heal it. Raise UsageError or HoldfastError."""
    if args.argument is not None and args.fault not in TAKE_ARGUMENT:
        raise UsageError(f"{args.fault} accepts no number; {', '.join(TAKE_ARGUMENT)} do")
    if args.rank is not None and args.fault not in TAKE_RANK:
        raise UsageError(f"{args.fault} affects the whole worker; {', '.join(TAKE_RANK)} accept a rank")
    if args.duration_s is not None and args.fault in ENDS:
        raise UsageError(f"--for does not apply to {args.fault}, which has no duration")
    body = {"worker": args.worker, "fault": args.fault, "argument": args.argument, "by": operator_name()}
    body["duration_s"] = args.duration_s
    answer = await _with(args, "chaos", body | {"rank": args.rank})
    print(answer.get("says", f"{args.worker}: {args.fault}"))
    return 0


async def restart_workers(args: argparse.Namespace) -> int:
    """Restart one worker, or all of them. Raise UsageError or HoldfastError."""
    if args.rolling == bool(args.worker):
        raise UsageError("give either a WORKER, or --rolling for all workers")
    operator = await Operator.connect(args.data)
    try:
        names = [args.worker] if args.worker else await restart.all_of(operator)
        await restart.restart(operator, names, args.within)
    finally:
        await operator.close()
    return 0
