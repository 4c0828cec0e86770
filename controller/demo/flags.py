"""Command-line flags of `holdfast demo`."""

import argparse
from pathlib import Path

from controller.processes.flag_types import option, positive
from controller.processes.up_flags import add_router_flags

FLAGS = {
    "--data": option("data folder of the fleet (default: a new folder in .holdfast, removed at the end)",
        type=Path, metavar="DIR"),
    "--seconds": option("seconds of load (default: 60)", type=positive, default=60.0, metavar="N"),
    "--trace": option("recorded trace (JSON lines) to replay instead of the built-in profile", type=Path, metavar="FILE"),
    "--speedup": option("factor by which the trace is replayed faster (default: 3)", type=positive, default=3.0, metavar="X"),
    "--engine": option("engine of the workers (default: simulated)",
        choices=("simulated", "transformers"), default="simulated"),
    "--model": option("model folder, for --engine transformers", type=Path, metavar="DIR"),
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the demo and of the router to the parser."""
    for flag, options in FLAGS.items():
        parser.add_argument(flag, **options)
    add_router_flags(parser)
    parser.add_argument(
        "--keep", action="store_true", help="keep the new folder, to read its journal afterwards"
    )
