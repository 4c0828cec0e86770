"""Flags of `holdfast demo`."""

import argparse
from pathlib import Path

from controller.processes.flag_types import positive
from controller.processes.up_flags import add_router_flags


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the demo's flags."""
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="data folder of the fleet (default: a new folder in .holdfast, removed at the end)",
    )
    parser.add_argument(
        "--seconds", type=positive, default=60.0, metavar="N", help="seconds of load (default: 60)"
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="recorded trace (JSON lines) to replay instead of the built-in profile",
    )
    parser.add_argument(
        "--speedup",
        type=positive,
        default=3.0,
        metavar="X",
        help="factor by which the trace is replayed faster (default: 3)",
    )
    parser.add_argument(
        "--engine",
        choices=("simulated", "transformers"),
        default="simulated",
        help="engine of the workers (default: simulated)",
    )
    parser.add_argument("--model", type=Path, metavar="DIR", help="model folder, for --engine transformers")
    add_router_flags(parser)
    parser.add_argument(
        "--keep", action="store_true", help="keep the new folder, to read its journal afterwards"
    )
