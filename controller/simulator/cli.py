"""The `holdfast simulate` command: runs seeded fault histories in virtual time and reports on them."""

import argparse
import sys
from functools import partial
from pathlib import Path

from controller.simulator.rates import PRESETS

# The minimum and maximum of each flag, and a remark on the maximum.
RANGES: dict[str, tuple[float, float, str]] = {
    "workers": (1, 1000, ""),
    "minutes": (1, 7 * 24 * 60, " (a week)"),
    "runs": (1, 100_000, ""),
    "processes": (1, 256, ""),
    "provisioned": (0.1, 10, ""),
    "spares": (0, 16, ""),
}
EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_FOUND = 0, 1, 2, 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.description = (
        "Run the deciders through a seeded history of faults in virtual time, and check every invariant "
        "throughout. Exit status 3: an invariant was violated."
    )
    add = partial(parser.add_argument, type=int)
    add("--seed", default=1, metavar="N", help="seed of the history (default: %(default)s)")
    add("--runs", default=1, metavar="K", help="run K seeds, starting at N (default: %(default)s)")
    add("--processes", default=1, metavar="P", help="worker processes for --runs (default: %(default)s)")
    add("--workers", default=16, metavar="W", help="number of workers in the fleet (default: %(default)s)")
    add("--minutes", type=float, default=60.0, metavar="M", help="virtual minutes to simulate (default: 60)")
    text = "distribute the workers' faults as this field study measured them"
    parser.add_argument("--rates", choices=sorted(PRESETS), help=text)
    add("--tp", default=8, metavar="T", help="GPUs per worker, for --rates (default: %(default)s)")
    text = (
        "simulate every request token by token through the frontend's request machine, and check it as well: waiting, "
        "moves with and without the KV cache, convictions, deadlines, clients that disconnect"
    )
    parser.add_argument("--live-requests", action="store_true", help=text)
    add("--dump", type=Path, metavar="FILE", help="write the history to FILE as JSON lines")
    text = "run one scenario instead: a GPU of one of 16 groups fails with 23 requests in flight"
    parser.add_argument("--scenario", choices=("group-failure",), help=text)
    text = "capacity as a multiple of the SLO, for --scenario (default: %(default)s)"  # 15 of 16 groups still meet the objective
    add("--provisioned", type=float, default=1.067, metavar="X", help=text)
    text = "additional spare groups, for --scenario (default: %(default)s)"
    add("--spares", default=0, metavar="N", help=text)
    parser.add_argument(
        "-o", dest="output", choices=("text", "json"), default="text", help="output format (default: text)"
    )


def run_cli(args: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    if problem := _usage_error(args):
        print(f"holdfast simulate: {problem}", file=sys.stderr)
        return EXIT_USAGE
    if args.scenario is not None:
        from controller.simulator.stories import group_failure

        print(group_failure.transcript(args.provisioned, args.spares), end="")
        return EXIT_OK
    from controller.simulator import report
    from controller.simulator.simulation import SweepRun, sweep

    about = args.workers, args.minutes, args.rates, args.live_requests
    runs = [SweepRun(seed, *about) for seed in range(args.seed, args.seed + args.runs)]
    if args.dump is not None:
        simulation = runs[0].simulation()
        results = iter([simulation.run()])
        try:
            args.dump.write_text("".join(simulation.history()), encoding="utf-8")
        except OSError as error:
            print(f"holdfast simulate: cannot write {args.dump}: {error.strerror}", file=sys.stderr)
            return EXIT_FAILED
    else:
        results = sweep(runs, min(args.processes, args.runs))
    status = EXIT_OK
    for run, result in zip(runs, results, strict=True):
        print(report.output(args, run, result))
        status = status if result.violation is None else EXIT_FOUND
    return status


def _usage_error(args: argparse.Namespace) -> str:
    for flag, (least, most, what) in RANGES.items():
        value = getattr(args, flag)
        if not least <= value <= most:
            shown = f"{value:g}" if isinstance(value, float) else value
            return f"--{flag} {shown}: must be a number from {least} to {most}{what}"
    if args.dump is not None and args.runs > 1:
        return "--dump writes a single history: omit --runs"
    if args.scenario is not None and args.output == "json":
        return "--scenario prints text only: omit -o json"
    if args.live_requests and args.scenario is not None:
        return "--live-requests applies to seeds: omit --scenario"
    if args.spares and args.scenario is None:
        return "--spares applies to --scenario only: a seed draws its own number of spares"
    return f"--tp {args.tp}: a worker needs at least one GPU" if args.tp < 1 else ""
