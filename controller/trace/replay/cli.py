"""One run of `holdfast trace replay`, from its flags to its report."""

import argparse
import asyncio
import json
import math
import os
import resource
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, fields
from itertools import islice, takewhile
from pathlib import Path

import uvloop
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from controller.trace import plot, profile
from controller.trace.replay import report, request_bodies
from controller.trace.replay.driver import Limits, Replay
from controller.trace.replay.endpoint import ReplayTarget, now
from controller.trace.replay.flags import CONCURRENCY
from controller.trace.replay.measures import AnswerSlo, DurationHistogram, ReplayMeasures
from controller.trace.replay.plan import PlannedRequest, ReplayShape, plan
from controller.trace.rows import BLOCK_TOKENS, TraceReader, TraceRow
from controller.trace.synthesis import synthesize
from events.errors import UsageError

ENDLESS = 1_000_000_000
REFRESH_S = 0.5
LINE_S = 5.0
BAR_WIDTH = 40
KEY = "OPENAI_API_KEY"
INTERRUPTED = 130
FILES_SPARE = 256  # descriptors other than connections
WIDTH = 100

Writing = Callable[[Path], AbstractContextManager[None]]
"""A function of a file's path. It returns a context manager that reports an error if the file cannot be written."""


@dataclass(frozen=True, slots=True)
class ExpectedDuration:
    """The expected number of requests and the expected duration of a replay, for its progress bar. None means unknown."""

    requests: int | None
    seconds: float | None


class TraceSource:
    """Yields the planned requests of a replay, from a trace or from a profile. A profile can yield any number of requests.

    A trace is first read completely, so that invalid lines are found before any request is sent.
    """

    def __init__(self, args: argparse.Namespace, block_tokens: int | None, shape: ReplayShape) -> None:
        self._args, self._shape = args, shape
        self._profile = profile.load(args.file) if profile.is_profile(args.file) else None
        self._reading: TraceReader | None = None
        if self._profile is None:
            self._block_tokens = block_tokens or BLOCK_TOKENS
            return
        learned = self._block_tokens = self._profile.block_tokens
        if block_tokens not in (None, learned):
            raise UsageError(
                f"--block-size {block_tokens}: {args.file} was learned in blocks of {learned} tokens"
            )
        if args.max_requests is None and args.seconds is None:
            raise UsageError(f"{args.file} is a profile, which has no end: set --max-requests or --seconds")

    @property
    def skipped(self) -> TraceReader | None:
        """The trace reader if it has skipped lines, else None."""
        return self._reading if self._reading is not None and self._reading.skipped else None

    def expected(self) -> ExpectedDuration:
        """Return the number of requests and the duration of the replay, as far as they are known.

        Raise BadTrace if a line of the trace is invalid; the error names the line.
        """
        if self._profile is not None:
            return ExpectedDuration(self._args.max_requests, self._args.seconds)
        until_s = self._args.seconds or math.inf
        return ExpectedDuration(
            sum(1 for _ in takewhile(lambda one: one.at_s < until_s, self.planned())), None
        )

    def planned(self) -> Iterator[PlannedRequest]:
        """Yield the requests to send. Each call begins again at the first request."""
        rows: Iterator[TraceRow]
        if self._profile is not None:
            rows = synthesize(self._profile, ENDLESS, seed=self._args.seed)
        else:
            self._reading = TraceReader(self._args.file, self._block_tokens, skip_bad=self._args.skip_bad)
            rows = iter(self._reading)
        return plan(islice(rows, self._args.max_requests), self._block_tokens, self._shape)


def run(
    args: argparse.Namespace, block_tokens: int | None, writing: Writing
) -> tuple[int, TraceReader | None]:
    """Run a replay and print its report. With --report and --plot, also write the report and a chart to files.

    Return the exit code, and the trace reader (None if no line of the trace was skipped). Raise UsageError if the folder of an
    output file does not exist.
    """
    if args.plot:
        plot.check(args.plot)
    for flag, path in (("--report", args.report), ("--plot", args.plot)):
        if path and not path.absolute().parent.is_dir():  # checked before the replay, not after it
            raise UsageError(f"{flag} {path}: the folder {path.absolute().parent} does not exist")
    run = ReplayRun(args, block_tokens)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run.replay())
    found = run.found()
    if args.output == "json":
        print(json.dumps(found, indent=1))
    else:
        report.show(found, Console(width=None if sys.stdout.isatty() else WIDTH))
    if args.report:
        with writing(args.report):
            args.report.write_text(json.dumps(found, indent=1) + "\n")
    if args.plot:
        with writing(args.plot):
            report.draw(report.head(found)[0], run.measures, args.plot)
    failed = run.measures.sent and not run.measures.whole
    return INTERRUPTED if run.interrupted else int(bool(failed)), run.source.skipped


class ReplayRun:
    """Runs one replay with the given flags. Raise UsageError if a flag is invalid, and BadTrace if the trace is invalid."""

    def __init__(self, args: argparse.Namespace, block_tokens: int | None) -> None:
        self.interrupted = False
        self._args = args
        self._shape = ReplayShape(**{field.name: getattr(args, field.name) for field in fields(ReplayShape)})
        self._limits = _limits(args)
        self.measures = ReplayMeasures(_slo(args))
        self._target = ReplayTarget(args.url, args.key or os.environ.get(KEY, ""))
        self.source = TraceSource(args, block_tokens, self._shape)
        self._expected = self.source.expected()
        self._model, self._form = "", ""

    async def replay(self) -> None:
        """Run the replay. Raise BadEndpoint if the server cannot be reached or is not OpenAI-compatible."""
        try:
            self._model = str((await self._target.model(self._args.model))["id"])
            worded = await request_bodies.find(self._target, self._model, chat=self._args.chat)
            self._form = worded.form
            replay = Replay(self._target, worded, self.source.planned(), self.measures, self._limits)
            with _stopping(self._target.hush) as stop:
                async with shown(self.measures, self._expected):
                    await replay.run(stop)
                self.interrupted = stop.is_set()
        finally:
            await self._target.close()

    def found(self) -> report.Report:
        """Return the report of the replay as plain JSON values."""
        skipped = self.source.skipped
        about = {
            "trace": str(self._args.file),
            "url": self._target.url,
            "model": self._model,
            "prompts": self._form,
            "shape": asdict(self._shape),
            "concurrency": self._limits.concurrency,
            "interrupted": self.interrupted,
            "skipped_lines": skipped.skipped if skipped else 0,
        }
        return report.found(self.measures, about)


@contextmanager
def _stopping(hush: Callable[[], None]) -> Iterator[asyncio.Event]:
    """Yield an event that is set at the first Ctrl-C or SIGTERM. A second Ctrl-C ends the process at once.

    asyncio sets the event only after the current iteration of the event loop. Until then, the iteration could still process
    arrived data. The signal handler therefore calls `hush` at once, and `hush` must stop the processing of data.
    """
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def first(number: int, frame: object) -> None:
        restore_handlers()
        hush()
        loop.call_soon_threadsafe(stop.set)

    def restore_handlers() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, first)
    try:
        yield stop
    finally:
        restore_handlers()


def _limits(args: argparse.Namespace) -> Limits:
    if args.max_requests is not None and args.max_requests < 1:
        raise UsageError(f"--max-requests {args.max_requests}: expected a number of at least 1")
    for name in ("seconds", "timeout"):
        if (value := getattr(args, name)) is not None and not 0 < value < 1e9:
            raise UsageError(f"--{name} {value:g}: expected a number of seconds above 0")
    return Limits(concurrency=_connections(args.concurrency), timeout_s=args.timeout, seconds=args.seconds)


def _connections(wanted: int | None) -> int:
    """Return the maximum number of connections. Increase the process's limit of open files if it is too low.

    Raise UsageError if the wanted number is below 1, or if the system does not allow that many open files.
    """
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = sys.maxsize if most == resource.RLIM_INFINITY else max(1, most - FILES_SPARE)
    if wanted is not None and wanted < 1:
        raise UsageError(f"--concurrency {wanted}: expected a number of at least 1")
    if wanted is not None and wanted > room:
        raise UsageError(
            f"--concurrency {wanted}: the limit is {most} open files (ulimit -Hn), which allows {room} connections"
        )
    count = min(CONCURRENCY, room) if wanted is None else wanted
    if files != resource.RLIM_INFINITY and files < count + FILES_SPARE:
        soft = count + FILES_SPARE
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (soft if most == resource.RLIM_INFINITY else min(soft, most), most)
        )
    return count


def _slo(args: argparse.Namespace) -> AnswerSlo:
    seconds: dict[str, float | None] = {}
    for name in ("ttft", "tpot", "itl"):
        ms = getattr(args, f"slo_{name}_ms")
        if ms is not None and not 0 < ms < 1e9:
            raise UsageError(f"--slo-{name}-ms {ms:g}: expected a number of milliseconds above 0")
        seconds[f"{name}_s"] = None if ms is None else ms / 1e3
    return AnswerSlo(**seconds)


def share_of(measures: ReplayMeasures, expected: ExpectedDuration) -> float | None:
    """Return the completed fraction of a replay, from 0 to 1: by requests or by time, whichever is larger.

    None if neither the number of requests nor the duration is known.
    """
    if expected.requests is None and expected.seconds is None:
        return None
    over = measures.whole + measures.failed
    by_count = over / expected.requests if expected.requests else 0.0
    by_time = (now() - measures.began) / expected.seconds if expected.seconds and measures.began else 0.0
    return min(1.0, max(by_count, by_time))


@asynccontextmanager
async def shown(measures: ReplayMeasures, expected: ExpectedDuration) -> AsyncIterator[None]:
    """While the context is open, show the progress on standard error: live on a terminal, otherwise one line every LINE_S."""
    console = Console(stderr=True)
    task = asyncio.ensure_future(
        _draw(measures, expected, console) if console.is_terminal else _print_lines(measures, expected)
    )
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait((task,), timeout=REFRESH_S)


async def _print_lines(measures: ReplayMeasures, expected: ExpectedDuration) -> None:
    while True:
        await asyncio.sleep(LINE_S)
        print(line(measures, expected), file=sys.stderr, flush=True)


def line(measures: ReplayMeasures, expected: ExpectedDuration) -> str:
    """Return the progress of a replay as one line of text."""
    share = share_of(measures, expected)
    ttft, itl = (_ms(one, 0.5, 0.99) for one in (measures.ttft, measures.itl))
    return (
        f"{now() - measures.began:.0f} s{'' if share is None else f' ({share:.0%})'}: {measures.sent:,} sent, "
        f"{measures.in_flight:,} in flight, {measures.failed:,} failed, {measures.tokens.events:,} tokens; "
        f"TTFT p50 {ttft[0]} p99 {ttft[1]} ms, ITL p50 {itl[0]} p99 {itl[1]} ms"
    )


async def _draw(measures: ReplayMeasures, expected: ExpectedDuration, console: Console) -> None:
    before, events = now(), 0
    with Live(console=console, auto_refresh=False, transient=True) as live:
        try:
            while True:
                await asyncio.sleep(REFRESH_S)
                at = now()
                rate = (measures.tokens.events - events) / (at - before)
                before, events = at, measures.tokens.events
                live.update(_picture(measures, expected, rate), refresh=True)
        finally:
            live.update("", refresh=True)  # clears the last frame, which would stay on a small terminal


def _picture(measures: ReplayMeasures, expected: ExpectedDuration, rate: float) -> RenderableType:
    share = share_of(measures, expected)
    bar = Table.grid(padding=(0, 1))
    bar.add_row(
        f"{now() - measures.began:6.0f} s",
        ProgressBar(1.0, share or 0.0, width=BAR_WIDTH, pulse=share is None, animation_time=now()),
        "" if share is None else f"{share:.0%}",
    )
    counts = (
        f"{measures.sent:,} sent, {measures.in_flight:,} in flight, {measures.whole:,} answered, "
        f"{measures.failed:,} failed; {rate:,.0f} tokens/s"
    )
    table = Table("ms", "p50", "p95", "p99", "max", box=None)
    for label, values in (
        ("TTFT", measures.ttft), ("ITL", measures.itl), ("whole answer", measures.e2e), ("late", measures.generator.late),
    ):  # fmt: skip
        table.add_row(label, *_ms(values, 0.5, 0.95, 0.99, 1.0))
    return Group(bar, counts, table)


def _ms(values: DurationHistogram, *shares: float) -> list[str]:
    if not values.count:
        return ["-"] * len(shares)
    return [f"{value * 1e3:,.1f}" for value in values.percentiles(*shares)]
