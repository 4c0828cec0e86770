"""What an operator types: status, events, drain, resume, move, restart, chaos, replay."""

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
from controller.processes.operator_client import Operator, Unreachable, find, who
from controller.read_model.worker_names import workers_of
from controller.runtime.history import held
from events import codec
from events.chaos import ENDS, FAULTS, TAKE_ARGUMENT, TAKE_RANK
from events.errors import UsageError
from events.fact import Recorded, Skipped

Run = Callable[[argparse.Namespace], int]
LOOK_S = 1.0  # whether a broker that is followed is still there


def prepare(name: str, parser: argparse.ArgumentParser) -> Run:
    """Add one command's flags and return what runs it."""
    add = parser.add_argument
    if name in ("status", "events"):
        add("-o", "--output", choices=("text", "json"), default="text", help="how to print (default: text)")
    if name == "status":
        status.add_arguments(parser)
    if name in ("drain", "resume", "move"):
        add("worker", metavar="WORKER")
    if name == "drain":
        add("--deadline", type=positive, metavar="S", help="seconds until what still runs is moved elsewhere")
    if name == "move":
        add(
            "--to",
            default="",
            metavar="W",
            help="the only worker that may take them (default: whoever suits)",
        )
    if name == "restart":
        add("worker", metavar="WORKER", nargs="?")
        add("--rolling", action="store_true", help="all workers, one after another")
        add(
            "--within",
            type=positive,
            default=restart.WITHIN_S,
            metavar="S",
            help=f"seconds for each worker to leave and come back (default: {restart.WITHIN_S:g})",
        )
    if name == "events":
        add("--follow", action="store_true", help="go on printing as facts arrive")
        add("--worker", metavar="W", help="only facts about this worker")
        add("--kind", metavar="K", help="only this kind, for example canary_failed")
    if name == "chaos":
        add("fault", choices=FAULTS)
        add("worker", metavar="WORKER")
        add(
            "argument",
            nargs="?",
            type=positive,
            metavar="X",
            help="corrupt: one token in X; slow: X times; error: X requests; drift: by X; xid, nvlink: Xid X",
        )
        add(
            "--for",
            dest="duration_s",
            type=positive,
            metavar="S",
            help="seconds until this fault ends by itself (default: it lasts until heal)",
        )
        add(
            "--rank",
            type=_rank,
            metavar="R",
            help="the rank that fails (error, corrupt, drift, slow) or whose simulated device does (xid, nvlink); else the first",
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
        raise UsageError(f"there is no kind {args.kind!r}; the kinds are {', '.join(sorted(codec.KINDS))}")
    url = find(args.data)["nats_url"]
    journal = await NatsJournal.connect(url, "reader", None, make=False, stops_at="nothing")
    unknown = UnknownKinds()
    try:
        last = await journal.last_seq()  # also says at once if nobody answers
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
    """Do all of these until one ends."""
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
    """Say when the broker goes and comes, lest silence pass for calm. Raise NoFleet or Unreachable if it has gone for good."""
    away = False
    while True:
        await asyncio.sleep(look_s)
        if away is connected():
            away = not away
            print(f"holdfast: the broker {'cannot be reached' if away else 'is back'}", file=sys.stderr)
        if away and find(data)["nats_url"] != url:
            raise Unreachable(f"the fleet of {data} was started anew: follow it again")


def is_wanted(event: Recorded, args: argparse.Namespace) -> bool:
    """Return whether `--kind` and `--worker` select an event."""
    fact = event.fact
    if isinstance(fact, Skipped) or (args.kind and fact.kind() != args.kind):
        return False
    return not args.worker or args.worker in workers_of(fact)


async def _drain(args: argparse.Namespace) -> int:
    answer = await _with(args, "drain", {"worker": args.worker, "deadline_s": args.deadline, "by": who()})
    print(answer.get("says", f"{args.worker} is draining"))
    return 0


async def _resume(args: argparse.Namespace) -> int:
    answer = await _with(args, "resume", {"worker": args.worker, "by": who()})
    print(answer.get("says", f"{args.worker} comes back after its next good canary"))
    return 0


async def _move(args: argparse.Namespace) -> int:
    answer = await _with(args, "move", {"worker": args.worker, "to": args.to, "by": who()})
    print(answer.get("says", f"what runs on {args.worker} is to move"))
    return 0


async def _chaos(args: argparse.Namespace) -> int:
    if args.argument is not None and args.fault not in TAKE_ARGUMENT:
        raise UsageError(f"{args.fault} takes no number; {', '.join(TAKE_ARGUMENT)} do")
    if args.rank is not None and args.fault not in TAKE_RANK:
        raise UsageError(f"{args.fault} strikes the whole worker; {', '.join(TAKE_RANK)} take a rank")
    if args.duration_s is not None and args.fault in ENDS:
        raise UsageError(f"{args.fault} is no fault that could last: --for does not go with it")
    body = {"worker": args.worker, "fault": args.fault, "argument": args.argument, "by": who()}
    body["duration_s"] = args.duration_s
    answer = await _with(args, "chaos", body | {"rank": args.rank})
    print(answer.get("says", f"{args.worker}: {args.fault}"))
    return 0


async def _restart(args: argparse.Namespace) -> int:
    if args.rolling == bool(args.worker):
        raise UsageError("either the name of a WORKER, or --rolling for all of them")
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
    """Add the flags of `holdfast request`, which reads what `replay` does."""
    from controller.replay import cli

    cli.add_request_arguments(parser)
    return _replay


def prepare_replay(parser: argparse.ArgumentParser) -> Run:
    """Add the replay commands."""
    from controller.replay import cli

    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    cli.add_arguments(commands)
    for command in commands.choices.values():  # --data is understood before and after the command
        command.add_argument("--data", type=Path, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    return _replay


def _replay(args: argparse.Namespace) -> int:
    from controller.commands import replay

    return replay.run_cli(args, find(args.data))
