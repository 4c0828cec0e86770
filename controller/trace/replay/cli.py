"""One run of `holdfast trace replay`, from its flags to its report."""

import argparse
import asyncio
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console

from controller.trace import plot
from controller.trace.replay import replay_plot, report, request_bodies, view
from controller.trace.replay.driver import Limits, Replay
from controller.trace.replay.endpoint import ReplayTarget
from controller.trace.replay.flags import CONCURRENCY
from controller.trace.replay.measures import AnswerSlo, ReplayMeasures
from controller.trace.replay.plan import ReplayShape
from controller.trace.replay.source import TraceSource, Wanted
from controller.trace.rows import TraceReader
from events.errors import UsageError

KEY = "OPENAI_API_KEY"
INTERRUPTED = 130
FILES_SPARE = 256  # descriptors other than connections
WIDTH = 100

Writing = Callable[[Path], AbstractContextManager[None]]
"""Context manager that reports a file that cannot be written."""


def run(
    args: argparse.Namespace, block_tokens: int | None, writing: Writing
) -> tuple[int, TraceReader | None]:
    """Replay and report. Return the exit code, and the trace reader if it skipped lines.

    Raise UsageError if an output file has no folder.
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
            replay_plot.draw(report.head(found)[0], run.measures, args.plot)
    failed = run.measures.sent and not run.measures.whole
    return INTERRUPTED if run.interrupted else int(bool(failed)), run.source.skipped


class ReplayRun:
    """One replay, from its flags to its report. Raise UsageError if they are invalid, BadTrace if the trace is."""

    def __init__(self, args: argparse.Namespace, block_tokens: int | None) -> None:
        self.interrupted = False
        self._args = args
        self._shape = ReplayShape(
            speedup_ratio=args.speedup_ratio,
            scale_input=args.scale_input,
            scale_output=args.scale_output,
            max_isl=args.max_isl,
            max_osl=args.max_osl,
        )
        self._limits = _limits(args)
        self.measures = ReplayMeasures(_slo(args))
        self._target = ReplayTarget(args.url, args.key or os.environ.get(KEY, ""))
        self.source = TraceSource(
            Wanted(
                path=args.file,
                block_tokens=block_tokens,
                skip_bad=args.skip_bad,
                seed=args.seed,
                shape=self._shape,
                requests=args.max_requests,
                seconds=args.seconds,
            )
        )
        self._expected = self.source.expected()
        self._model, self._form = "", ""

    async def replay(self) -> None:
        """Run the replay. Raise BadEndpoint if the endpoint cannot be reached, or is not OpenAI-compatible."""
        try:
            self._model = (await self._target.model(self._args.model))["id"]
            worded = await request_bodies.find(self._target, self._model, chat=self._args.chat)
            self._form = worded.form
            replay = Replay(self._target, worded, self.source.planned(), self.measures, self._limits)
            with _stopping(self._target.hush) as stop:
                async with view.shown(self.measures, self._expected):
                    await replay.run(stop)
                self.interrupted = stop.is_set()
        finally:
            self._target.close()

    def found(self) -> dict[str, Any]:
        """Return the report of the replay as plain JSON types."""
        shape = {name: getattr(self._shape, name) for name in ReplayShape.__dataclass_fields__}
        skipped = self.source.skipped
        about = {
            "trace": str(self._args.file),
            "url": self._target.url,
            "model": self._model,
            "prompts": self._form,
            "shape": shape,
            "concurrency": self._limits.concurrency,
            "interrupted": self.interrupted,
            "skipped_lines": skipped.skipped if skipped else 0,
        }
        return report.found(self.measures, about)


@contextmanager
def _stopping(hush: Callable[[], None]) -> Iterator[asyncio.Event]:
    """Set a flag at the first Ctrl-C or SIGTERM; a second Ctrl-C ends the process at once.

    asyncio's own signal handlers run only after the loop's current iteration, which may still read arrived data. `hush` is
    called during the iteration, so that no more data is processed.
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
    """Return the maximum number of connections, and raise the limit of open files accordingly."""
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
