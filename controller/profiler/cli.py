"""The command `holdfast profile`: runs the measurements, shows progress, and writes the profile."""

import argparse
import asyncio
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from controller.profiler.flags import KEY, Sweep
from controller.profiler.openai_target import OpenAITarget
from controller.profiler.profile_arrays import Array, TooFewPoints, arrays
from controller.profiler.sweep import Measuring, OnMeasurement
from controller.profiler.target import CannotMeasure, ProfiledEngine
from controller.profiler.worker_target import WorkerTarget
from events.errors import HoldfastError, UsageError


class ProfileUnwritable(HoldfastError):
    """The profile cannot be written."""


def run(args: argparse.Namespace) -> int:
    """Measure the engine, write the profile, print the measurements, and return the exit code.

    Raise UsageError if the URL or the output path is invalid. Raise CannotMeasure if too few points could be measured.
    """
    target = _target(args)
    if args.output.suffix != ".npz":
        raise UsageError(f"--output {args.output}: the file name must end with .npz")
    if args.output.is_dir():
        raise UsageError(f"--output {args.output}: is a folder")
    if not args.output.absolute().parent.is_dir():
        raise UsageError(f"--output {args.output}: the folder {args.output.absolute().parent} does not exist")
    measured = asyncio.run(_measure(target, args))
    try:
        made = arrays(measured.prefill, measured.decode, measured.beside)
    except TooFewPoints as error:
        raise CannotMeasure("; left out: ".join([str(error), *measured.skipped[-1:]])) from None
    _write(args.output, made)
    _show(target.name, measured, Console())
    if "pass_ms" in made:
        print(f"fixed cost of a pass: {float(made['pass_ms']):.2f} ms")
    print(f"written: {args.output}")
    return 0


def _target(args: argparse.Namespace) -> ProfiledEngine:
    try:
        parts = urlsplit(args.url)
        known = bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is not a number
        known = False
    if known and parts.scheme in ("http", "https"):
        return OpenAITarget(args.url, args.key or os.environ.get(KEY, ""), args.model)
    if known and parts.scheme == "tcp" and parts.port:
        return WorkerTarget(args.url)
    raise UsageError(
        f"{args.url!r} is neither a server (http://127.0.0.1:8000) nor a worker (tcp://127.0.0.1:9000)"
    )


async def _measure(target: ProfiledEngine, args: argparse.Namespace) -> Measuring:
    given = {name: value for name in ("lengths", "contexts", "batches") if (value := getattr(args, name))}
    try:
        await target.open()
        sweep = Sweep(**given, repeats=args.repeats, tokens=args.tokens)
        fitting = sweep.within(target.context_tokens)
        if not fitting.lengths or not fitting.contexts:
            raise CannotMeasure(
                f"no requested length fits into the engine's context of {target.context_tokens} tokens"
            )
        if min(len(fitting.lengths), len(fitting.contexts)) < 2:
            raise CannotMeasure(
                "a line needs two points: give at least two values for each of --isl and --context"
            )
        with _progress(f"{target.name} at {args.url}", fitting.steps) as report:
            measuring = Measuring(target, fitting, report)
            await measuring.run()
    finally:
        await target.close()
    if longer := sorted({*sweep.lengths, *sweep.contexts} - {*fitting.lengths, *fitting.contexts}):
        room = f"longer than the engine's context of {target.context_tokens} tokens allows"
        measuring.skipped.insert(0, f"{', '.join(map(str, longer))} tokens: {room}")
    return measuring


@contextmanager
def _progress(what: str, steps: int) -> Iterator[OnMeasurement]:
    """Show the progress of the measurements, on a terminal as a bar and otherwise as one line per measured point.

    Yield the function that must be called before each measurement.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        print(f"measuring {what}: at most {steps} measurements", file=sys.stderr, flush=True)
        yield _lines()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(f"measuring {what}", total=steps)

        def report(measured: str) -> None:
            bar.update(task, advance=1, description=measured)

        yield report


def _lines() -> Callable[[str], None]:
    last = ""

    def report(measured: str) -> None:
        nonlocal last
        if measured != last:
            print(measured, file=sys.stderr, flush=True)
        last = measured

    return report


def _write(path: Path, made: dict[str, Array]) -> None:
    """Write a profile to a file atomically. Raise ProfileUnwritable if the file cannot be written."""
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("wb") as file:
            np.savez(file, allow_pickle=False, **made)
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise ProfileUnwritable(f"{path} cannot be written: {error.strerror}") from None


def _show(model: str, measured: Measuring, console: Console) -> None:
    """Print the measured times of prompts and batches as tables. Then print why measurements were left out."""
    table = Table(title=f"{model}: first token of a prompt")
    for name in ("prompt tokens", "ms", "tokens/s"):
        table.add_column(name, justify="right")
    for one in measured.prefill:
        table.add_row(
            str(one.tokens), f"{one.ttft_ms:.1f}", f"{one.tokens / max(one.ttft_ms, 1e-3) * 1e3:,.0f}"
        )
    console.print(table)
    contexts = sorted({one.asked for one in measured.decode})
    table = Table(title="ms between two tokens, by batch size")
    table.add_column("batch", justify="right")
    for context in contexts:
        table.add_column(f"{context} tokens", justify="right")
    for batch in sorted({one.batch for one in measured.decode}):
        cells = [
            _median(one.itl_ms for one in measured.decode if (one.batch, one.asked) == (batch, c))
            for c in contexts
        ]
        table.add_row(str(batch), *cells)
    console.print(table)
    for reason in measured.skipped:
        console.print(f"left out: {reason}", markup=False, highlight=False, soft_wrap=True)


def _median(values: Iterator[float]) -> str:
    found = list(values)
    return f"{float(np.median(found)):.2f}" if found else ""
