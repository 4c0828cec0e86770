"""The commands `holdfast trace analyze`, `synthesize`, `fit` and `replay`, with their flags."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import IO, cast

from controller.trace.replay.flags import add_flags
from controller.trace.rows import BLOCK_TOKENS, TraceReader
from events.errors import HoldfastError, UsageError

REQUESTS_MAX = 1_000_000_000
GZIP_LEVEL = 3  # gzip level; 9 takes four times as long, and saves 1 %


class TraceUnwritable(HoldfastError):
    """A file cannot be written."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the commands of `holdfast trace` to the parser, each with its flags."""
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for run, files, flags, text in (
        (analyze, "FILE", _analyze_flags, "print the lengths of prompts and answers, and how much prompts share"),
        (synthesize, "FILE|PROFILE", _synthesize_flags, "generate requests like those of a trace or a profile"),
        (fit, "FILE", _fit_flags, "learn a profile of a trace, without any of its requests"),
        (replay, "FILE|PROFILE", add_flags, "send a trace to an OpenAI-compatible server, and measure the answers"),
    ):  # fmt: skip
        command = commands.add_parser(
            run.__name__, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False
        )
        command.set_defaults(trace_command=run)
        _reading_flags(command.add_argument, files)
        flags(command)


def run_cli(args: argparse.Namespace) -> int:
    """Run the given `holdfast trace` command and return its exit code."""
    command: Callable[[argparse.Namespace], int] = args.trace_command
    return command(args)


def _reading_flags(add: Callable[..., object], what: str) -> None:
    blocks = f"tokens in the block that a hash id names (default: {BLOCK_TOKENS})"
    bad = "skip and count invalid lines instead of failing at the first one"
    add("file", type=Path, metavar=what, help="trace file: Mooncake JSONL or Azure CSV, plain or gzip")
    add("--block-size", type=int, metavar="N", help=blocks)
    add("--skip-bad", action="store_true", help=bad)


def _analyze_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--plot", type=Path, metavar="PICTURE", help="chart to write, .png or .svg (needs the extra `plots`)")
    add("-o", "--output", choices=("text", "json"), default="text", help="output format (default: text)")


def _fit_flags(parser: argparse.ArgumentParser) -> None:
    text = "file to write the profile to, e.g. profile.json.gz"
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="PROFILE", help=text)


def _synthesize_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--requests", type=int, required=True, metavar="N", help="number of requests to generate")
    out = "file to write them to; compressed if it ends in .gz (default: standard output)"
    add("-o", "--output", type=Path, metavar="FILE", help=out)
    seed = "random seed; the same seed generates the same requests (default: 0)"
    add("--seed", type=int, default=0, metavar="N", help=seed)
    for flag, kind, text in (
        ("--prefix-len-multiplier", float, "factor on the length of shared prefixes (default: 1)"),
        ("--prefix-root-multiplier", int, "number of disjoint prefix trees (default: 1)"),
        ("--prompt-len-multiplier", float, "factor on the unshared part of each prompt (default: 1)"),
        ("--osl-multiplier", float, "factor on the length of outputs (default: 1)"),
        ("--speedup-ratio", float, "factor on the request rate (default: 1)"),
        ("--max-isl", int, "maximum prompt tokens; longer prompts are redrawn (default: no limit)"),
        ("--max-osl", int, "maximum output tokens; longer outputs are cut (default: no limit)"),
    ):
        add(flag, type=kind, metavar="X" if kind is float else "N", help=text)


def analyze(args: argparse.Namespace) -> int:
    """Print a trace's statistics and, with --plot, write a chart of them. Return the exit code."""
    from controller.trace import analysis, plot

    if args.plot:
        plot.check(args.plot)
    reading = _reading(args)
    measures = analysis.measure(reading, _block_tokens(args), refuse=reading.refuse)
    found = measures.analysis()
    if args.output == "json":
        print(json.dumps({**asdict(found), "skipped_lines": reading.skipped}, indent=1))
    else:
        print(*analysis.lines(str(args.file), found), sep="\n")
    if args.plot:
        with _writing(args.plot):
            plot.draw(args.file.name, measures, args.plot)
    _report_skipped(reading)
    return 0


def fit(args: argparse.Namespace) -> int:
    """Learn the profile of a trace, and write the profile to a file. Return the exit code."""
    from controller.trace import profile

    reading = _reading(args)
    learned = profile.learn(
        reading, _block_tokens(args), says=f"fitted to {args.file.name}", refuse=reading.refuse
    )
    with _writing(args.output):
        args.output.write_bytes(profile.save(learned))
    _report_skipped(reading)
    nodes = len(learned.core.nodes) - 1
    print(f"{args.output}: learned from {learned.requests:,} requests, with {nodes:,} shared prefixes")
    return 0


def synthesize(args: argparse.Namespace) -> int:
    """Read a trace or the profile of a trace, and write generated requests that are similar to the trace's requests.

    Return the exit code. Raise UsageError if the number of requests or the block size is invalid.
    """
    from controller.trace import profile, rows, synthesis

    if not 1 <= args.requests <= REQUESTS_MAX:
        raise UsageError(f"--requests {args.requests}: expected a number from 1 to {REQUESTS_MAX:,}")
    given = {field.name: getattr(args, field.name) for field in fields(synthesis.SynthesisKnobs)}
    knobs = synthesis.SynthesisKnobs(**{name: value for name, value in given.items() if value is not None})
    if profile.is_profile(args.file):
        learned = profile.load(args.file)
        if args.block_size not in (None, learned.block_tokens):
            raise UsageError(
                f"--block-size {args.block_size}: {args.file} was learned in blocks of {learned.block_tokens} tokens"
            )
    else:
        reading = _reading(args)
        learned = profile.learn(reading, _block_tokens(args), refuse=reading.refuse)
        _report_skipped(reading)
    made = synthesis.synthesize(learned, args.requests, knobs, seed=args.seed)
    with _output(args.output) as out:
        for row in made:
            out.write(rows.encode(row))
    return 0


def replay(args: argparse.Namespace) -> int:
    """Send the requests of a trace, or requests generated from a profile, to a server, and report the measurements.

    Return the exit code.
    """
    from controller.trace.replay import cli

    code, skipped = cli.run(args, _block_tokens(args) if args.block_size is not None else None, _writing)
    if skipped is not None:
        _report_skipped(skipped)
    return code


def _block_tokens(args: argparse.Namespace) -> int:
    size: int | None = args.block_size
    if size is not None and size < 1:
        raise UsageError(f"--block-size {size}: expected a number of at least 1")
    return BLOCK_TOKENS if size is None else size


def _reading(args: argparse.Namespace) -> TraceReader:
    return TraceReader(args.file, _block_tokens(args), skip_bad=args.skip_bad)


def _report_skipped(reading: TraceReader) -> None:
    if reading.skipped:
        lines = "1 line was" if reading.skipped == 1 else f"{reading.skipped:,} lines were"
        print(f"{lines} skipped; the first: {reading.first_error}", file=sys.stderr)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TraceUnwritable(f"{path} cannot be written: {error.strerror}") from error


@contextmanager
def _output(path: Path | None) -> Iterator[IO[bytes]]:
    """Open the file `path` for generated requests. The file is compressed if its name ends in .gz.

    If `path` is None, yield the standard output.
    """
    import gzip

    if path is None:
        yield sys.stdout.buffer
        return
    with _writing(path), path.open("wb") as raw:
        if path.suffix != ".gz":
            yield raw
            return
        with gzip.GzipFile("", "wb", GZIP_LEVEL, raw, mtime=0) as out:
            yield cast(IO[bytes], out)
