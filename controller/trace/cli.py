"""`holdfast trace analyze | synthesize | fit | replay`: recorded requests, what is typical, more like them, and load."""

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

Run = Callable[[argparse.Namespace], int]
REQUESTS_MAX = 1_000_000_000
GZIP_LEVEL = 3  # 9 takes four times as long, and saves 1 %


class TraceUnwritable(HoldfastError):
    """A file cannot be written."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the commands of `holdfast trace`, each with its flags."""
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _analyze_flags(
        _command(commands, "analyze", "how long prompts and answers are, and how much prompts share", analyze)
    )
    _synthesize_flags(
        _command(commands, "synthesize", "requests like those of a trace or a profile", synthesize)
    )
    _fit_flags(_command(commands, "fit", "what is typical of a trace, without any of its requests", fit))
    replaying = _command(
        commands, "replay", "send a trace to an OpenAI-compatible server, and measure", replay
    )
    _reading_flags(replaying, "FILE|PROFILE")
    add_flags(replaying)


def run_cli(args: argparse.Namespace) -> int:
    """Run one command and return its exit code."""
    command: Run = args.trace_command
    return command(args)


def _command(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, text: str, run: Run
) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False
    )
    command.set_defaults(trace_command=run)
    return command


def _reading_flags(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("file", type=Path, metavar=what, help="Mooncake JSONL or Azure CSV, plain or gzip")
    parser.add_argument(
        "--block-size",
        type=int,
        metavar="N",
        help=f"tokens in a block, of which each hash id names one (default: {BLOCK_TOKENS})",
    )
    parser.add_argument(
        "--skip-bad",
        action="store_true",
        help="skip and count lines that are wrong, instead of ending with the first",
    )


def _analyze_flags(parser: argparse.ArgumentParser) -> None:
    _reading_flags(parser, "FILE")
    parser.add_argument(
        "--plot", type=Path, metavar="PICTURE", help="also draw it: a .png or .svg (needs the extra `plots`)"
    )
    parser.add_argument(
        "-o", "--output", choices=("text", "json"), default="text", help="how to print (default: text)"
    )


def _fit_flags(parser: argparse.ArgumentParser) -> None:
    _reading_flags(parser, "FILE")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        required=True,
        metavar="PROFILE",
        help="where to write it, e.g. profile.json.gz",
    )


def _synthesize_flags(parser: argparse.ArgumentParser) -> None:
    _reading_flags(parser, "FILE|PROFILE")
    parser.add_argument("--requests", type=int, required=True, metavar="N", help="how many")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="where to write them; compressed, if it ends in .gz (default: print them)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="the same seed makes the same requests (default: 0)"
    )
    for flag, kind, text in (
        ("--prefix-len-multiplier", float, "make shared prefixes X times as long (default: 1)"),
        (
            "--prefix-root-multiplier",
            int,
            "make so many trees of prefixes with nothing in common (default: 1)",
        ),
        (
            "--prompt-len-multiplier",
            float,
            "make the part of each prompt that is its own X times as long (default: 1)",
        ),
        ("--osl-multiplier", float, "make outputs X times as long (default: 1)"),
        ("--speedup-ratio", float, "let requests follow each other X times as fast (default: 1)"),
        ("--max-isl", int, "draw prompts of more tokens again (default: no limit)"),
        ("--max-osl", int, "cut outputs to so many tokens (default: no limit)"),
    ):
        parser.add_argument(flag, type=kind, metavar="X" if kind is float else "N", help=text)


def analyze(args: argparse.Namespace) -> int:
    """Print a trace's statistics, and draw them if asked."""
    from controller.trace import analysis, plot, report

    if args.plot:
        plot.check(args.plot)
    reading = _reading(args)
    measures = analysis.measure(reading, _block_tokens(args), refuse=reading.refuse)
    found = measures.analysis()
    if args.output == "json":
        print(json.dumps({**asdict(found), "skipped_lines": reading.skipped}, indent=1))
    else:
        print(*report.lines(str(args.file), found), sep="\n")
    if args.plot:
        with _writing(args.plot):
            plot.draw(args.file.name, measures, args.plot)
    _tell_skipped(reading)
    return 0


def fit(args: argparse.Namespace) -> int:
    """Write a trace's profile."""
    from controller.trace import profile

    reading = _reading(args)
    learned = profile.learn(
        reading, _block_tokens(args), says=f"fitted to {args.file.name}", refuse=reading.refuse
    )
    with _writing(args.output):
        args.output.write_bytes(profile.save(learned))
    _tell_skipped(reading)
    nodes = len(learned.core.nodes) - 1
    print(f"{args.output}: learned from {learned.requests:,} requests, with {nodes:,} shared prefixes")
    return 0


def synthesize(args: argparse.Namespace) -> int:
    """Write requests like those of a trace or a profile. Raise UsageError for a number or a size of blocks that cannot be."""
    from controller.trace import profile, rows, synthesis

    if not 1 <= args.requests <= REQUESTS_MAX:
        raise UsageError(f"--requests {args.requests}: give a number from 1 to {REQUESTS_MAX:,}")
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
        _tell_skipped(reading)
    made = synthesis.synthesize(learned, args.requests, knobs, seed=args.seed)
    with _written(args.output) as out:
        for row in made:
            out.write(rows.encode(row))
    return 0


def replay(args: argparse.Namespace) -> int:
    """Send a trace or a profile's requests to a server, and report what came."""
    from controller.trace.replay import cli

    code, skipped = cli.run(args, _block_tokens(args) if args.block_size is not None else None, _writing)
    if skipped is not None:
        _tell_skipped(skipped)
    return code


def _block_tokens(args: argparse.Namespace) -> int:
    size: int | None = args.block_size
    if size is not None and size < 1:
        raise UsageError(f"--block-size {size}: give a number from 1")
    return BLOCK_TOKENS if size is None else size


def _reading(args: argparse.Namespace) -> TraceReader:
    return TraceReader(args.file, _block_tokens(args), skip_bad=args.skip_bad)


def _tell_skipped(reading: TraceReader) -> None:
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
def _written(path: Path | None) -> Iterator[IO[bytes]]:
    """Open what requests are written to: a file, compressed if its name says so, or the standard output."""
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
