"""The operator's commands: status, events, drain, resume, move, restart, chaos, replay."""

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from controller.commands import restart, status
from controller.commands.printing import event_line
from controller.commands.unknown_kinds import UnknownKinds
from controller.processes.flag_types import positive
from controller.processes.operator_client import Operator, Unreachable, find, operator_name
from controller.read_model.worker_names import workers_of
from controller.runtime.bounded_read import held
from events import codec
from events.chaos import ENDS, FAULTS, TAKE_ARGUMENT, TAKE_RANK
from events.errors import UsageError
from events.fact import Recorded, Skipped

Run = Callable[[argparse.Namespace], int]
LOOK_S = 1.0  # interval of checking the connection while following


def prepare(name: str, parser: argparse.ArgumentParser) -> Run:
    """Add one command's flags. Return the function that runs it."""
    add = parser.add_argument
    if name in ("status", "events"):
        add("-o", "--output", choices=("text", "json"), default="text", help="output format (default: text)")
    if name == "status":
        status.add_arguments(parser)
    if name in ("drain", "resume", "move"):
        add("worker", metavar="WORKER", help="name of the worker")
    if name == "drain":
        add(
            "--deadline",
            type=positive,
            metavar="S",
            help="seconds until running requests move (default: the policy's)",
        )
    if name == "move":
        add("--to", default="", metavar="W", help="target worker (default: the best one for each request)")
    if name == "restart":
        add("worker", metavar="WORKER", nargs="?", help="name of the worker")
        add("--rolling", action="store_true", help="restart all workers, one after another")
        add(
            "--within",
            type=positive,
            default=restart.WITHIN_S,
            metavar="S",
            help=f"seconds for each worker to stop and start again (default: {restart.WITHIN_S:g})",
        )
    if name == "events":
        add("--follow", action="store_true", help="keep printing events as they arrive")
        add("--worker", metavar="W", help="show only events about this worker")
        add("--kind", metavar="K", help="show only events of this kind, e.g. canary_failed")
    if name == "chaos":
        add("fault", choices=FAULTS, help="fault to inject; heal ends all faults of the worker")
        add("worker", metavar="WORKER", help="name of the worker")
        add(
            "argument",
            nargs="?",
            type=positive,
            metavar="X",
            help="corrupt: one token in X; slow: factor X; error: X requests; drift: by X; xid, nvlink: Xid X",
        )
        add(
            "--for",
            dest="duration_s",
            type=positive,
            metavar="S",
            help="seconds until the fault ends by itself (default: until healed)",
        )
        add(
            "--rank",
            type=_rank,
            metavar="R",
            help="rank that gets the fault (error, corrupt, drift, slow), or its simulated device (xid, nvlink) (default: 0)",
        )
    return lambda args: asyncio.run(COMMANDS[name](args))


def _rank(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a rank (0, 1 …)")
    return int(text)


async def _with(args: argparse.Namespace, verb: str, body: dict[str, Any]) -> dict[str, Any]:
    operator = await Operator.connect(args.data)
    try:
        return await operator.ask(verb, body)
    finally:
        await operator.close()


async def _events(args: argparse.Namespace) -> int:
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
    """Print when the broker disconnects and reconnects, so that an outage is not mistaken for calm. Raise NoFleet or
    Unreachable if the broker is gone for good."""
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
    """Return whether `--kind` and `--worker` select an event."""
    fact = event.fact
    if isinstance(fact, Skipped) or (args.kind and fact.kind() != args.kind):
        return False
    return not args.worker or args.worker in workers_of(fact)


async def _drain(args: argparse.Namespace) -> int:
    answer = await _with(
        args, "drain", {"worker": args.worker, "deadline_s": args.deadline, "by": operator_name()}
    )
    print(answer.get("says", f"{args.worker} is draining"))
    return 0


async def _resume(args: argparse.Namespace) -> int:
    answer = await _with(args, "resume", {"worker": args.worker, "by": operator_name()})
    print(answer.get("says", f"{args.worker} returns to service after its next passed canary"))
    return 0


async def _move(args: argparse.Namespace) -> int:
    answer = await _with(args, "move", {"worker": args.worker, "to": args.to, "by": operator_name()})
    print(answer.get("says", f"the running requests of {args.worker} will move"))
    return 0


async def _chaos(args: argparse.Namespace) -> int:
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


async def _restart(args: argparse.Namespace) -> int:
    if args.rolling == bool(args.worker):
        raise UsageError("give either a WORKER, or --rolling for all workers")
    operator = await Operator.connect(args.data)
    try:
        names = [args.worker] if args.worker else await restart.all_of(operator)
        await restart.restart(operator, names, args.within)
    finally:
        await operator.close()
    return 0


COMMANDS = {
    "status": status.run,
    "events": _events,
    "drain": _drain,
    "resume": _resume,
    "move": _move,
    "restart": _restart,
    "chaos": _chaos,
}


def prepare_request(parser: argparse.ArgumentParser) -> Run:
    """Add the flags of `holdfast request`, which runs on the same code as `replay`."""
    from controller.replay import cli

    cli.add_request_arguments(parser)
    return _replay


def prepare_replay(parser: argparse.ArgumentParser) -> Run:
    """Add the subcommands of `holdfast replay`."""
    from controller.replay import cli

    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    cli.add_arguments(commands)
    for command in commands.choices.values():  # --data is accepted before and after the command
        command.add_argument("--data", type=Path, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    return _replay


def _replay(args: argparse.Namespace) -> int:
    from controller.commands import replay

    return replay.run_cli(args, find(args.data))
