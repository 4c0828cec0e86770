"""What an operator types: status, events, drain, resume, chaos, replay. Finds the fleet, asks it, prints the answer."""

import argparse
import asyncio
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from controller.processes.fleet_dir import FleetDir
from events import codec, subjects
from events.bus import NatsBus
from events.errors import HoldfastError
from events.fact import Recorded
from events.presence import present

Run = Callable[[argparse.Namespace], int]
ASK_WITHIN_S = 5.0
CONNECT_WITHIN_S = 3.0
FIELD_CHARS_MAX = 60  # of one field of an event, in text
FAULTS = ("kill", "hang", "unhang", "error", "corrupt", "drift", "slow", "blackhole", "heal")


class Unreachable(HoldfastError):
    """The fleet's broker cannot be reached."""


class Refused(HoldfastError):
    """The controller refused."""


async def http_ok(url: str, deadline_s: float = 1.0) -> bool:
    """Return whether a GET answers 200."""

    def get() -> bool:
        try:
            with urllib.request.urlopen(url, timeout=deadline_s) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError, ValueError):
            return False

    return await asyncio.to_thread(get)


def find(data: Path) -> dict[str, Any]:
    """Return how the fleet is reached: from the environment, or from the data directory. Raise NoFleet."""
    known: dict[str, Any] = {}
    if not os.environ.get("HOLDFAST_NATS_URL"):
        known = FleetDir(data).recall()
    for key in ("nats_url", "database_url"):
        known[key] = os.environ.get(f"HOLDFAST_{key.upper()}") or known.get(key, "")
    return known


class Operator:
    """A connection to the controller's control subjects."""

    def __init__(self, bus: NatsBus, url: str) -> None:
        self._bus, self._url = bus, url

    @classmethod
    async def connect(cls, data: Path) -> "Operator":
        """Connect to the fleet of a data directory. Raise NoFleet or Unreachable."""
        url = find(data)["nats_url"]
        bus = await NatsBus.connect(url, "operator", wait_s=CONNECT_WITHIN_S)
        if bus.since is None:
            await bus.close()
            raise Unreachable(f"{url}: {Unreachable.__doc__}")
        return cls(bus, url)

    async def ask(self, verb: str, body: dict[str, Any], deadline_s: float = ASK_WITHIN_S) -> dict[str, Any]:
        """Ask the controller for one thing. Raise Refused with its reason, or NoAnswer."""
        answer = dict(await self._bus.request(f"{subjects.CONTROL}.{verb}", body, deadline_s))
        if error := answer.get("error"):
            raise Refused(str(error))
        return answer

    async def act(self, verb: str, worker: str, argument: float | None = None) -> dict[str, Any]:
        """Do one thing to one worker: drain, resume, or a fault of `holdfast chaos`."""
        if verb in ("drain", "resume"):
            return await self.ask(verb, {"worker": worker, "by": _who()})
        return await self.ask("chaos", {"worker": worker, "fault": verb, "argument": argument, "by": _who()})

    async def close(self) -> None:
        """Let go of the broker."""
        await self._bus.close()


def _who() -> str:
    return os.environ.get("USER") or os.environ.get("LOGNAME") or f"uid {os.getuid()}"


async def read_all(data: Path) -> list[Recorded]:
    """Return every event of the fleet's journal."""
    from events.journal.nats import NatsJournal

    journal = await NatsJournal.connect(find(data)["nats_url"], "reader", None)
    try:
        events: list[Recorded] = []
        last = await journal.last_seq()
        if last:
            async for batch in journal.read(0, until=last):
                events.extend(batch)
        return events
    finally:
        await journal.close()


# --- the commands ---------------------------------------------------------------------------------------------------


def prepare(name: str, parser: argparse.ArgumentParser) -> Run:
    """Add one command's flags and return what runs it."""
    add = parser.add_argument
    if name in ("status", "events"):
        add("-o", "--output", choices=("text", "json"), default="text", help="how to print (default: text)")
    if name in ("drain", "resume"):
        add("worker", metavar="WORKER")
    if name == "drain":
        add("--deadline", type=_above_0, metavar="S", help="seconds until what still runs is moved elsewhere")
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
            type=_above_0,
            metavar="X",
            help="corrupt: one token in X; slow: X times; error: X requests",
        )
    run = {"status": _status, "events": _events, "drain": _drain, "resume": _resume, "chaos": _chaos}[name]
    return lambda args: asyncio.run(run(args))


def _above_0(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


async def _with(args: argparse.Namespace, verb: str, body: dict[str, Any]) -> dict[str, Any]:
    operator = await Operator.connect(args.data)
    try:
        return await operator.ask(verb, body)
    finally:
        await operator.close()


async def _status(args: argparse.Namespace) -> int:
    try:
        status = await _with(args, "status", {})
    except HoldfastError:
        if os.environ.get("HOLDFAST_NATS_URL") or not present(args.data):
            raise
        return _partial(args)
    if args.output == "json":
        print(json.dumps(status, indent=1))
    else:
        _print_status(status)
    return 0


def _partial(args: argparse.Namespace) -> int:
    """Show what is known without a controller: the processes of this host."""
    processes = [{"role": p.role, "name": p.name, "pid": p.pid, "url": p.url} for p in present(args.data)]
    if args.output == "json":
        empty: dict[str, Any] = {"workers": [], "levels": {}, "journal": {"last_seq": None}, "leader": None}
        print(
            json.dumps(
                {**empty, "projector": {"position": None, "lag": None}, "processes": processes}, indent=1
            )
        )
    else:
        print("The controller does not answer; these processes of the fleet live:")
        for p in processes:
            print(f"  {p['name']:<11} {p['role']:<11} pid {p['pid']:<8} {p['url']}")
    return 1


def _print_status(status: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in ("worker", "health", "weight", "breaker", "in flight", "model", "last canary"):
        table.add_column(column, overflow="fold", no_wrap=column not in ("worker", "model"))
    for w in status["workers"]:
        weight = None if w["weight"] is None else f"{w['weight']:g}"
        cells = (w["id"], w["health"], weight, w["breaker"], w["in_flight"], w["model"])
        table.add_row(*("–" if c is None else str(c) for c in cells), _canary(w.get("last_canary")))
    console.print(table, soft_wrap=False)
    for line in _lines(status):
        console.print(line)


def _lines(status: dict[str, Any]) -> Iterator[str]:
    """Yield what stands below the workers: levels, positions, the leader, the processes of this host."""
    levels = ", ".join(f"{model} level {level}" for model, level in status["levels"].items())
    position, lag = status["projector"]["position"], status["projector"]["lag"]
    yield f"degradation  {levels or 'no model yet'}"
    yield f"journal      {status['journal']['last_seq']} events"
    yield "projector    " + ("not heard of yet" if position is None else f"at {position}, {lag} behind")
    yield f"leader       {(status['leader'] or 'nobody').removeprefix('controller:')}"
    yield "processes"
    for p in status["processes"]:
        yield f"  {p['name']:<11} {p['role']:<11} pid {p['pid']:<8} {p['url']}"


def _canary(last: Any) -> str:
    if not isinstance(last, dict):
        return "–"
    took = last.get("latency_ms")
    said = str(last.get("reason") or last.get("outcome", ""))
    return said + (f", {took:.0f} ms" if isinstance(took, float) else "")


async def _events(args: argparse.Namespace) -> int:
    from events.journal.nats import NatsJournal

    if args.kind and args.kind not in codec.KINDS:
        raise HoldfastError(f"there is no kind {args.kind!r}; the kinds are {', '.join(sorted(codec.KINDS))}")
    journal = await NatsJournal.connect(find(args.data)["nats_url"], "reader", None)
    try:
        last = None if args.follow else await journal.last_seq()
        if last == 0:
            return 0
        async for batch in journal.read(0, until=last):
            for event in batch:
                if _wanted(event, args):
                    print(_line(event, args.output), flush=args.follow)
    finally:
        await journal.close()
    return 0


def _wanted(event: Recorded, args: argparse.Namespace) -> bool:
    fact = event.fact
    if args.kind and fact.kind() != args.kind:
        return False
    mentions = (getattr(fact, name, None) for name in ("worker", "source", "target"))
    return not args.worker or args.worker in mentions


def _line(event: Recorded, output: str) -> str:
    if output == "json":
        row = {"seq": event.seq, "at": event.at.isoformat(), "kind": event.fact.kind(), "id": event.id}
        row |= {
            "source": event.source,
            "through": event.through,
            "incident": event.correlation,
            "cause": event.causation,
        }
        return json.dumps({**row, "body": codec.to_builtins(event.fact)})
    body = codec.to_builtins(event.fact)
    fields = " ".join(f"{k}={_short(v)}" for k, v in body.items() if v not in (None, "", [], {}, ()))
    return f"{event.seq:>7} {event.at:%H:%M:%S.%f} {event.fact.kind():<20} {fields}"


def _short(value: Any) -> str:
    """Write a value so that a line stays a line; `-o json` has it whole."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= FIELD_CHARS_MAX else f"{text[: FIELD_CHARS_MAX - 1]}…"


async def _drain(args: argparse.Namespace) -> int:
    answer = await _with(args, "drain", {"worker": args.worker, "deadline_s": args.deadline, "by": _who()})
    print(answer.get("says", f"{args.worker} is draining"))
    return 0


async def _resume(args: argparse.Namespace) -> int:
    answer = await _with(args, "resume", {"worker": args.worker, "by": _who()})
    print(answer.get("says", f"{args.worker} comes back after its next good canary"))
    return 0


async def _chaos(args: argparse.Namespace) -> int:
    body = {"worker": args.worker, "fault": args.fault, "argument": args.argument, "by": _who()}
    answer = await _with(args, "chaos", body)
    print(answer.get("says", f"{args.worker}: {args.fault}"), file=sys.stdout)
    return 0


def prepare_replay(parser: argparse.ArgumentParser) -> Run:
    """Add the replay commands."""
    from controller.replay import cli

    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    cli.add_arguments(commands)
    for command in commands.choices.values():  # --data is understood before and after the command
        command.add_argument("--data", type=Path, default=argparse.SUPPRESS, help=argparse.SUPPRESS)

    def run(args: argparse.Namespace) -> int:
        from controller.processes import replay

        return replay.run_cli(args, find(args.data))

    return run
