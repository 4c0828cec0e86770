"""`holdfast demo`: starts a fleet, sends load, injects the faults of a script, reports user impact."""

import argparse
import asyncio
import contextlib
import json
import signal
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from controller.commands.top import COLOURS
from controller.demo import profile, report
from controller.demo.clients import Users
from controller.demo.fleet import DemoFleet, NotAsExpected
from controller.processes.children import shell_status
from controller.processes.operator_client import Operator, find
from controller.processes.up_flags import check_frontend_flags, frontend_variables
from controller.terminal_text import escape_controls, fitted
from events.errors import HoldfastError, UsageError
from events.fact import Recorded
from events.json_types import Json, JsonView


def render(status: JsonView, lines: list[str], elapsed: float, seconds: float, counts: str) -> RenderableType:
    """Return one frame of the terminal view: progress, the table of workers, and the last few of `lines`.

    `lines` were printed by the script. The progress is `elapsed` of `seconds` seconds. `counts` is a text with the numbers of
    requests and tokens.
    """
    workers = Table(expand=True, box=None, pad_edge=False)
    for name in ("worker", "health", "breaker", "weight", "in flight", "pid"):
        justify: JustifyMethod = "left" if name in ("worker", "health", "breaker") else "right"
        workers.add_column(name, justify=justify, overflow="fold", no_wrap=name != "worker")
    for worker in status.get("workers", ()):
        health = str(worker.get("health"))
        workers.add_row(
            Text(escape_controls(str(worker["id"]))),
            Text(escape_controls(health), style=COLOURS.get(health, "")),
            Text(escape_controls(str(worker.get("breaker", "")))),
            f"{worker.get('weight') or 0:.2f}",
            _number(worker.get("in_flight")),
            _number(worker.get("pid")),
        )
    bar = ProgressBar(total=seconds, completed=min(elapsed, seconds))
    head = Text(f"{elapsed:4.0f} / {seconds:.0f} s   {counts}")
    return Panel(
        Group(head, bar, Text(), workers, Text(), *[Text(escape_controls(line)) for line in lines[-8:]]),
        title="Holdfast demo",
    )


def _number(value: object) -> str:
    return "–" if value is None else str(value)


@dataclass(frozen=True, slots=True)
class Act:
    """One action of the demo's script on the fleet.

    `fault` is the name of the fault's row in the final table, or None if the action only ends an earlier fault.
    """

    at: float  # when the act happens, as a share of the demo's duration
    worker: int
    verb: str  # a fault of `holdfast chaos`, or drain or resume
    argument: float | None
    fault: str | None
    says: str


SCRIPT = (
    Act(0.10, 1, "kill", None, "kill -9", "its process is killed during answers"),
    Act(0.22, 2, "hang", None, "hang", "SIGSTOP: the process exists but does not respond"),
    Act(0.32, 2, "unhang", None, None, "SIGCONT"),
    Act(0.36, 0, "error", 6, "exception", "the engine raises an exception for its next requests"),
    Act(0.42, 0, "heal", None, None, "the engine works again"),
    Act(0.46, 3, "corrupt", 8, "corruption", "one token in eight is wrong, without an error"),
    Act(0.60, 3, "heal", None, None, "the hardware was replaced"),
    Act(0.64, 1, "blackhole", None, "blackhole", "the network drops everything without closing"),
    Act(0.74, 1, "heal", None, None, "the network is back"),
    Act(0.80, 0, "drain", None, "drain", "an operator drains it"),
    Act(0.90, 0, "resume", None, None, "and returns it to service"),
)
WORKERS, SPARES = 4, 1


RATE = 8.0  # requests per second, which leads to about 20 streams at once
ITL_MS = 20.0
HOME = Path(".holdfast")


def run(args: argparse.Namespace) -> int:
    """Run the demo, and return its exit code.

    The code is 0 if no stream failed and the journal names every stream with lost, doubled or altered tokens, else 1. Raise
    UsageError if the demo is to take less than 10 seconds.
    """
    check_frontend_flags(args)
    if args.seconds < 10:
        raise UsageError("a demo of less than 10 seconds has no room for its faults: --seconds 10 or more")
    load = (
        profile.from_trace(args.trace, args.seconds, args.speedup)
        if args.trace
        else profile.from_profile(args.seconds, RATE)
    )
    # a SIGTERM must also end the fleet and remove its folder
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.ExitStack() as stack:
        data = args.data or fresh_folder()
        if not (args.data or args.keep):
            stack.callback(_remove, data)
        fleet = DemoFleet.start(data, *_flags(args), environment=frontend_variables(args))
        stack.callback(fleet.stop)
        return asyncio.run(Demo(args, fleet, load).run())


def fresh_folder() -> Path:
    """Return a new folder below the current folder, so that a demo never changes the journal of another fleet."""
    HOME.mkdir(exist_ok=True)
    return Path(tempfile.mkdtemp(prefix="demo-", dir=HOME))


def _remove(data: Path) -> None:
    import shutil

    shutil.rmtree(data, ignore_errors=True)


def _flags(args: argparse.Namespace) -> list[str]:
    """Return the flags with which the demo starts `holdfast up`."""
    flags = ["--chaos", "--canary-interval", "1", "--breaker-wait", "3", "--breaker-backoff", "1"]
    flags += ["--workers", str(WORKERS), "--spares", str(SPARES), "--itl-ms", str(ITL_MS)]
    flags += ["--engine", args.engine]
    return [*flags, "--model", str(args.model)] if args.model else flags


class Demo:
    """One run of the demo: sends the load, injects the faults, shows the fleet and prints the report."""

    def __init__(
        self,
        args: argparse.Namespace,
        fleet: DemoFleet,
        load: profile.DemoLoad,
        console: Console | None = None,
    ) -> None:
        self.console = console or Console()
        self.seconds: float = args.seconds
        self.kept = bool(args.data or args.keep)
        self.fleet, self.load = fleet, load
        self.lines: list[str] = []
        self.injected: list[report.Injected] = []
        self.status: Json = {}
        self.live: Live | None = None

    async def run(self) -> int:
        """Run the demo and return the exit code.

        Raise NotAsExpected if the fleet does not become ready, or ends during the demo."""
        self.console.print(f"Starting a fleet of {WORKERS} workers and {SPARES} spare …")
        began = time.monotonic()
        await self.fleet.ready()
        self.console.print(
            f"Ready after {time.monotonic() - began:.1f} s at {self.fleet.url}; logs in {self.fleet.data}"
            + ("" if self.kept else ", removed at the end"),
            soft_wrap=True,
        )
        operator = await Operator.connect(self.fleet.data)
        try:
            return await self._rehearse(operator)
        finally:
            await operator.close()

    async def _rehearse(self, operator: Operator) -> int:
        self.status = await operator.ask("status", {})
        workers = sorted(w["id"] for w in self.status["workers"] if w["id"].startswith("w"))
        users = Users(self.fleet.url, self.status["workers"][0]["model"], self.load.prompts)
        async with users.session() as session:
            self.console.print(f"Requesting the undisturbed answer to {len(self.load.prompts)} prompts …")
            answers = await users.answers(session, profile.OUTPUT_MAX)
            started = time.monotonic()
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(self.watch(operator, users, started))
                group.create_task(self.play(operator, workers, started))
                await self.send(users, session, started)
                watch.cancel()
        if self.fleet.ended:
            status = shell_status(self.fleet.process.returncode)
            raise NotAsExpected(f"the fleet has ended with status {status}")
        return await self._conclude(users, answers)

    async def send(self, users: Users, session: Any, started: float) -> None:
        """Send every planned request at its time, and wait until all streams have ended."""
        async with asyncio.TaskGroup() as group:
            for number, planned in enumerate(self.load.requests):
                await asyncio.sleep(max(0.0, started + planned.at_s - time.monotonic()))
                if self.fleet.ended:
                    break
                group.create_task(users.ask(session, planned.prompt, planned.output_tokens, f"demo-{number}"))

    async def play(self, operator: Operator, workers: list[str], started: float) -> None:
        """Carry out the actions of the script at their times."""
        for act in SCRIPT:
            await asyncio.sleep(max(0.0, started + act.at * self.seconds - time.monotonic()))
            if self.fleet.ended:
                break
            worker = workers[act.worker % len(workers)]
            self._print(f"{time.monotonic() - started:5.1f} s  {act.verb} {worker}: {act.says}")
            self._note(act, worker)
            try:
                await operator.act(act.verb, worker, act.argument)
            except HoldfastError as error:
                self._print(f"        {error}")

    def _note(self, act: Act, worker: str) -> None:
        now = datetime.now(UTC)
        if act.fault:
            self.injected.append(report.Injected(act.fault, worker, now))
        else:
            for one in self.injected:
                if one.worker == worker and one.ended is None:
                    one.ended = now

    def _print(self, line: str) -> None:
        self.lines.append(line)
        if self.live is None:
            self.console.print(escape_controls(line), markup=False)

    async def watch(self, operator: Operator, users: Users, started: float) -> None:
        """Refresh the terminal view until cancelled.

        If the output is not a terminal, return at once, because then only the script's lines are printed."""
        if not self.console.is_terminal:
            return
        with Live(console=self.console, refresh_per_second=4, transient=True) as self.live:
            try:
                while True:
                    with contextlib.suppress(HoldfastError):
                        self.status = await operator.ask("status", {}, deadline_s=1.0)
                    counts = (
                        f"{len(users.streams)} requests, {users.in_flight} in flight, {users.tokens} tokens"
                    )
                    elapsed = time.monotonic() - started
                    self.live.update(render(self.status, self.lines, elapsed, self.seconds, counts))
                    await asyncio.sleep(0.25)
            finally:
                # cleared, because rich draws the last frame uncropped, and it would stay on a small terminal
                self.live.update("")

    async def _conclude(self, users: Users, answers: list[list[str]]) -> int:
        self.live = None
        events = await self.fleet.events()
        others_hit = report.attribute(events, self.injected)
        result = report.assess(users.streams, answers, self.injected, others_hit)
        Console(width=max(report.WIDTH, self.console.width)).print(report.table(result))
        self.console.print("\n".join(map(escape_controls, _verdict(result, events))), markup=False)
        more = "removed with this demo; --keep keeps it"
        if self.kept:
            data = self.fleet.data
            more = f"`holdfast up --data {data}`, then `holdfast replay timeline --data {data}` show more"
        self.console.print(f"\nThe incidents, from the journal ({more}):", highlight=False, markup=False)
        async for line in report.incident_lines(find(self.fleet.data)["nats_url"], events):
            shown = fitted(escape_controls(line), self.console.width)
            self.console.print(shown, highlight=False, markup=False, soft_wrap=True)
        where = (self.fleet.data if self.kept else HOME) / "demo.html"
        self.console.print()
        line = await report.write_report(find(self.fleet.data)["nats_url"], where)
        self.console.print(escape_controls(line), highlight=False, markup=False, soft_wrap=True)
        (self.fleet.data / "demo.json").write_text(json.dumps(_as_json(result)))
        return 0 if result.clean else 1


def _verdict(result: report.DemoReport, events: list[Recorded]) -> list[str]:
    lines = [f"{result.requests} requests, {result.tokens} tokens, {len(result.failed)} streams lost."]
    if result.altered_streams:
        named = result.altered_streams - len(result.unnamed)
        lines.append(
            f"Streams with corrupt tokens that were delivered before the canary caught the worker: "
            f"{result.altered_streams}; named in the journal (RequestExposed): {named}."
        )
    lines += [f"  lost: {s.request}: {s.error}" for s in result.failed[:5]]
    if blind := report.unknown(events):
        lines.append(
            f"{blind} times a frontend did not know which requests a worker had served (ExposureUnknown)."
        )
    return lines


def _as_json(result: report.DemoReport) -> Json:
    return {
        "requests": result.requests,
        "tokens": result.tokens,
        "streams_lost": len(result.failed),
        "clean": result.clean,
        "altered_streams": result.altered_streams,
        "unnamed": list(result.unnamed),
        "faults": [
            {
                "fault": r.fault,
                "worker": r.worker,
                "hit": r.hit,
                "lost": r.lost,
                "p50_ms": r.p50_ms,
                "p99_ms": r.p99_ms,
                "capacity_back_ms": r.back_ms,
            }
            for r in result.rows
        ],
    }
