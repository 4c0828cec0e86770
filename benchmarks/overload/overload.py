"""Compares admission controls under overload, in virtual time: requests answered in time.

    python -m benchmarks overload [--trace FILE] [--workers 8] [--loads 0.5 1 1.5 2 3 4] [--controls none token-capacity deadline]
                                  [--seconds 40] [--frontends 1] [--retries 0] [--batch 64] [--block-tokens 64] [--seed 1]
                                  [--plot overload.svg]

The frontend is the product's own, and the engines are simulated (`world`). The requests are those of Mooncake's trace, with
`--block-tokens` tokens per block instead of 512. They arrive as in the trace, but faster. A load is a multiple of the fleet's
capacity. Of the requests, 7.5 % are premium, 60 % standard and the others best_effort, with deadlines of 1, 2 and 4 s for the
first token. A deadline is longer if a prompt is long: at least twice the time in which an idle worker prefills the prompt. The
requests come from 16 clients. `--retries 2` retries as OpenAI's client does. Prints one JSON object per row:

    capacity   requests per second that the fleet completes when all requests arrive at once
    run        one control at one load (`figures` describes most columns). `idle`: of the samples in which a request waits, the
               share in which a worker is idle
    step       the load drops from 4 times the capacity to half of it: seconds from the drop to the last rejection
    result     the control `deadline`: goodput at loads 2 and 4 relative to load 1, and the worst value of other columns
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.overload.clients import Arrivals, Attempt, Clients, Coming, figures, recovery
from benchmarks.overload.world import Machines, VirtualFrontend, world
from benchmarks.plots import figure, needed, plot_file
from benchmarks.router.routing import FIRST, SPEEDS, TRACE, shape
from benchmarks.router.virtual.trace import recorded, whole
from benchmarks.rows import Row, command_line, show
from benchmarks.virtual_loop import VirtualLoop
from controller.frontend.settings import FrontendSettings
from controller.processes.flag_types import positive
from controller.trace.rows import TraceRow

CONTROLS = ("none", "token-capacity", "deadline")
LOOK_S = 0.05


class Trial:
    """Measures admission controls, with the same requests and settings."""

    def __init__(self, rows: Sequence[TraceRow], args: argparse.Namespace) -> None:
        self._args = args
        self._shape = replace(shape(args.block_tokens), context_tokens=131_072, batch_max=args.batch)
        reads_per_s = SPEEDS[args.speed].profile(self._shape).prefill_tokens_per_s
        self._arrivals = Arrivals(rows, args.block_tokens, reads_per_s)

    def _attempts(
        self,
        coming: Iterable[Coming],
        frontends: int = 1,
        looks: list[bool] | None = None,
        **settings: object,
    ) -> Sequence[Attempt]:
        """Send requests to a new fleet, in virtual time, and return their attempts.

        `settings` are settings of the frontends. `looks` is the list for the samples of `_watch`, or None.
        """
        args = self._args

        async def play() -> Sequence[Attempt]:
            machines = Machines(self._shape, SPEEDS[args.speed], args.workers)
            async with world(machines, FrontendSettings.model_validate(settings), frontends) as made:
                clients = Clients(made, args.retries, args.seed)
                watching = None if looks is None else asyncio.create_task(_watch(made, looks))
                await clients.run(coming)
                if watching is not None:
                    watching.cancel()
                return clients.attempts

        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            return runner.run(play())

    def capacity(self) -> float:
        """Return the requests per second that the fleet completes when all requests arrive at once.

        The first and the last fifth of the completed requests do not count.
        """
        # three times the batch slots, so that all slots are full in the middle of the run
        count = self._args.workers * self._args.batch * 3
        coming = (self._arrivals.request(n, 0.0, 1e5) for n in range(count))
        patient = {"queue_max": 1_000_000, "queue_s": 1e5, "first_token_s": 1e5}
        attempts = self._attempts(coming, admission=patient)
        ends = sorted(one.at_s + one.ended_s for one in attempts)
        low, high = ends[len(ends) // 5], ends[len(ends) * 4 // 5]
        return len(ends) * 0.6 / (high - low)

    def run(self, control: str, load: float, capacity: float) -> Row:
        """Measure one control at one load. Return the `run` row."""
        args, began, looks = self._args, time.perf_counter(), list[bool]()
        coming = self._arrivals.coming(load * capacity, args.seconds, args.seed)
        attempts = self._attempts(coming, args.frontends, looks, admission_control=control)
        row = {"row": "run", "control": control, "load": load, **figures(attempts, args.seconds)}
        row |= {"idle": sum(looks) / max(1, len(looks)), "contended_looks": len(looks)}
        return row | {"wall_s": time.perf_counter() - began}

    def step(self, control: str, capacity: float) -> Row:
        """Drop the load from four times the capacity to half of it. Return the `step` row."""
        args, half_s = self._args, self._args.seconds / 2
        coming = self._arrivals.falling(capacity, half_s, args.seed)
        attempts = self._attempts(coming, args.frontends, admission_control=control)
        return {"row": "step", "control": control, **recovery(attempts, half_s)}


async def _watch(frontends: Sequence[VirtualFrontend], looks: list[bool]) -> None:
    """Sample the frontends until cancelled. If a request waits, append to `looks` whether a worker is idle."""
    while True:
        await asyncio.sleep(LOOK_S)
        if any(one.waiting() for one in frontends):
            loads = [load for one in frontends for load in one.plane.reported.values()]
            looks.append(any(load.running + load.waiting == 0 for load in loads))


def result(rows: Sequence[Row]) -> Row:
    """Return the goodput of `deadline` above load 1 relative to load 1, and the worst value of other columns."""
    runs = {row["load"]: row for row in rows if row["row"] == "run" and row["control"] == "deadline"}
    steps = [row["last_refusal_s"] for row in rows if row["row"] == "step" and row["control"] == "deadline"]
    found: Row = {"row": "result"}
    if 1.0 in runs:
        peak, above = runs[1.0]["goodput"], [load for load in (2.0, 4.0) if load in runs]
        found |= {f"goodput_at_{load:g}_of_peak": runs[load]["goodput"] / peak for load in above}
    if 4.0 in runs:
        found["premium_good_at_4"] = runs[4.0]["premium_good"]
    columns = {"admitted_p99_of_deadline": "admitted_p99", "refusal_ms_p99": "refusal_ms_p99", "idle": "idle"}
    found |= {name: max((row[key] for row in runs.values()), default=None) for name, key in columns.items()}
    return found | {"last_refusal_s": max(steps, default=None)}


def arguments(
    name: str, about: str | None, workers: int, loads: Sequence[float], seconds: float
) -> argparse.ArgumentParser:
    """Return a parser with the flags of both overload benchmarks, and with these defaults."""
    parser = command_line(name, about)
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--workers", type=whole, default=workers)
    parser.add_argument("--loads", type=positive, nargs="+", default=loads)
    parser.add_argument("--controls", choices=CONTROLS, nargs="+", default=list(CONTROLS))
    parser.add_argument("--seconds", type=positive, default=seconds)
    parser.add_argument("--seed", type=int, default=1)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit status."""
    parser = arguments("overload", __doc__, 8, [0.5, 1.0, 1.5, 2.0, 3.0, 4.0], 40.0)
    parser.add_argument("--frontends", type=whole, default=1)
    parser.add_argument("--retries", type=int, choices=range(6), default=0)
    parser.add_argument("--batch", type=whole, default=64)
    parser.add_argument("--block-tokens", type=int, choices=[16, 32, 64, 128, 256, 512], default=64)
    parser.add_argument("--speed", choices=list(SPEEDS), default=FIRST)
    parser.add_argument("--plot", type=plot_file)
    args = parser.parse_args(argv)
    if args.plot:
        needed()
    trial = Trial(recorded(parser, args.trace), args)
    capacity = trial.capacity()
    said = [show({"row": "capacity", "workers": args.workers, "requests_per_s": capacity})]
    for control in args.controls:
        said += [show(trial.run(control, load, capacity)) for load in args.loads]
        said.append(show(trial.step(control, capacity)))
    show(result(said))
    if args.plot:
        _draw(args.plot, said)
    return 0


def _draw(path: Path, rows: Sequence[Row]) -> None:
    with figure(path, 2, "Answers within their deadline under overload") as ((goodput, late),):
        for control in dict.fromkeys(row["control"] for row in rows if row["row"] == "run"):
            runs = [row for row in rows if row["row"] == "run" and row["control"] == control]
            loads = [row["load"] for row in runs]
            goodput.plot(loads, [row["goodput"] for row in runs], marker="o", label=control)
            late.plot(loads, [row["admitted_p99"] for row in runs], marker="o", label=control)
        offered = "offered load, times the capacity"
        goodput.set(xlabel=offered, ylabel="answers in time, a second", ylim=(0, None))
        late.set(xlabel=offered, ylabel="p99 of the first token, over its deadline", yscale="log")
        late.axhline(1.0, color="grey", linewidth=0.8)
        goodput.legend()


if __name__ == "__main__":
    sys.exit(main())
