"""Defines the flags of `holdfast plan`."""

import argparse
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from controller.common_flags import output_flag
from controller.planner.plan import PlannerPolicy

FIT = "fit"
BOUNDS = {
    "start_s": "seconds until a new worker serves",
    "workers_min": "minimum number of workers",
    "workers_max": "maximum number of workers",
    "changes_per_hour": "maximum changes per hour",
    "step_max": "maximum workers per change, or a quarter of the workers if that is more",
    "missed": "share of answers that may be late",
}


def _whole(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 10_000_000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _positive(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < 1e12:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return found


def _scale(text: str) -> float | str:
    return FIT if text == FIT else _positive(text)


def _curve(text: str) -> tuple[tuple[int, float], ...]:
    try:
        pairs = [part.split("=") for part in text.split(",")]
        found = tuple((int(n), float(ms)) for n, ms in pairs)
    except ValueError:
        found = ()
    rising = all(a[0] < b[0] for a, b in pairwise(found))
    if not found or not rising or found[0][0] < 1 or any(not 0 < ms < 1e6 for _, ms in found):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a rising list of sequences=milliseconds, such as 1=25,32=40"
        )
    return found


FLAGS: Mapping[str, Mapping[str, Any]] = {
    "--trace": {"type": Path, "metavar": "FILE",
                "help": "recorded day to rehearse: Mooncake JSONL or Azure CSV (default: show the running planner's plan)"},
    "--fleet": {"type": _whole, "metavar": "N",
                "help": "workers of the fixed fleet to compare with (default: as many as needed)"},
    "--scale": {"type": _scale, "default": 1.0, "metavar": "F|fit",
                "help": "factor on the number of requests; fit: as many as --fleet can serve"},
    "--profile": {"type": Path, "metavar": "FILE",
                  "help": "measured speed of a worker, a .npz file of `holdfast profile`"},
    "--prefill-tokens-per-s": {"type": _positive, "metavar": "N",
                               "help": "prompt tokens that a worker reads per second (default: 4000)"},
    "--tpot-curve": {"type": _curve, "metavar": "N=MS,…",
                     "help": "milliseconds per token with N sequences (default: 1=25,32=40)"},
    "--max-batch": {"type": _whole, "default": 32, "metavar": "N",
                    "help": "sequences that a worker runs at once (default: 32)"},
    "--kv-blocks": {"type": _whole, "default": 40_000, "metavar": "N", "help": "KV blocks per worker (default: 40000)"},
    "--block-tokens": {"type": _whole, "default": 16, "metavar": "N", "help": "tokens per block (default: 16)"},
    "--gpus": {"type": _whole, "default": 1, "metavar": "N", "help": "GPUs per worker (default: 1)"},
    "--slo-ttft-ms": {"type": _positive, "default": 500.0, "metavar": "MS",
                      "help": "objective for the first token in milliseconds (default: 500)"},
    "--slo-tpot-ms": {"type": _positive, "default": 30.0, "metavar": "MS",
                      "help": "objective for each later token in milliseconds (default: 30)"},
}  # fmt: skip


def plan(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `holdfast plan`.

    The parsed arguments also hold `only_with_trace`: the defaults of the flags that require --trace, by name."""
    for flag, options in FLAGS.items():
        parser.add_argument(flag, **options)
    defaults = PlannerPolicy()
    for name, text in BOUNDS.items():
        value, flag = getattr(defaults, name), f"--{name.replace('_', '-')}"
        parser.add_argument(
            flag, type=type(value), default=value, metavar="N", help=f"{text} (default: {value:g})"
        )
    output_flag(parser)
    names = [flag[2:].replace("-", "_") for flag in FLAGS] + [*BOUNDS]
    parser.set_defaults(only_with_trace={name: parser.get_default(name) for name in names})
