"""Compares admission controls under overload, in virtual time: requests answered in time.

    python -m benchmarks overload [--trace FILE] [--workers 8] [--loads 0.5 1 1.5 2 3 4] [--controls none token-capacity deadline]
                                  [--seconds 40] [--frontends 1] [--retries 0] [--batch 64] [--block-tokens 64] [--seed 1]
                                  [--plot overload.svg]

The product's own frontend with simulated engines (`world`). Requests are those of the trace (Mooncake's, with `--block-tokens`
per block in place of 512), at its own arrivals, accelerated. A load is a share of the fleet's throughput when
all requests arrive at once. 7.5 % are premium, with a deadline to the first token of 1 s, 60 % standard with 2 s, the rest
best_effort with 4 s, or twice the time of reading the whole prompt, if that is longer; 16 clients.
`--retries 2` retries as OpenAI's client does. Prints one JSON object per row:

    capacity   requests per second that the fleet completes when all arrive at once
    run        one control at one load (see `figures` for the columns); `idle`: of the moments with a waiting request, the
               share in which a worker was idle
    step       from 4 times the capacity to half of it: seconds until the last rejection after that
    result     the targets, and whether they were reached
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import TypeVar

from benchmarks.overload.clients import Arrivals, Clients, Coming, both, figures, recovery
from benchmarks.overload.world import Machines, VirtualFrontend, world
from benchmarks.plots import figure, needed, plot_file
from benchmarks.router.routing import FIRST, KV_TOKENS, SPEEDS, TRACE
from benchmarks.router.virtual.trace import positive, recorded, whole
from benchmarks.rows import Row, command_line, show
from benchmarks.virtual_loop import VirtualLoop
from controller.frontend.settings import AdmissionSettings, FrontendSettings
from controller.trace.rows import TraceRow
from workers.engines.simulated.sequence import EngineShape

CONTROLS = ("none", "token-capacity", "deadline")
LOOK_S = 0.05
T = TypeVar("T")


def virtual(work: Coroutine[object, object, T]) -> T:
    """Run in virtual time, and return the result."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


class Trial:
    """The fleet, its requests and its settings."""

    def __init__(self, rows: Sequence[TraceRow], args: argparse.Namespace) -> None:
        self._args = args
        self._shape = EngineShape(
            context_tokens=131_072,
            block_tokens=args.block_tokens,
            kv_blocks=KV_TOKENS // args.block_tokens,
            batch_max=args.batch,
            waiting_max=1_000_000,
        )
        reads_per_s = SPEEDS[args.speed].profile(self._shape).prefill_tokens_per_s
        self._arrivals = Arrivals(rows, args.block_tokens, reads_per_s)

    def _machines(self) -> Machines:
        return Machines(self._shape, SPEEDS[self._args.speed], self._args.workers)

    def capacity(self) -> float:
        """Return the requests per second that are completed while the queue never empties."""

        async def flood() -> float:
            settings = FrontendSettings(
                admission=AdmissionSettings(queue_max=1_000_000, queue_s=1e5, first_token_s=1e5)
            )
            machines = self._machines()
            async with world(machines, settings) as (one,):
                clients = Clients([one])
                count = self._args.workers * self._args.batch * 3  # the middle third fills all places
                arrivals = self._arrivals
                await clients.run(
                    Coming(n, 0.0, arrivals.prompt(n), arrivals.answer(n), "standard", "c", 1e5)
                    for n in range(count)
                )
                ends = sorted(one.at_s + one.ended_s for one in clients.attempts)
                low, high = ends[len(ends) // 5], ends[len(ends) * 4 // 5]
                return len(ends) * 0.6 / (high - low)

        return virtual(flood())

    def settings(self, control: str) -> FrontendSettings:
        """Return a frontend's settings with this control; queues have their defaults."""
        return FrontendSettings.model_validate({"admission_control": control})

    def run(self, control: str, load: float, capacity: float) -> Row:
        """Run one load, and return the figures."""
        args, began = self._args, time.perf_counter()

        async def go() -> tuple[Clients, float, int]:
            async with world(self._machines(), self.settings(control), args.frontends) as frontends:
                clients = Clients(frontends, args.retries, args.seed)
                watching = asyncio.create_task(_idle(frontends))
                await clients.run(self._arrivals.coming(load * capacity, args.seconds, args.seed))
                watching.cancel()
                idle, looks = await watching
                return clients, idle / max(1, looks), looks

        clients, idle, looks = virtual(go())
        row = {"row": "run", "control": control, "load": load, **figures(clients.attempts, args.seconds)}
        return row | {"idle": idle, "contended_looks": looks, "wall_s": time.perf_counter() - began}

    def step(self, control: str, capacity: float) -> Row:
        """Drop the load from four times the capacity to half of it."""
        args = self._args

        async def go() -> Clients:
            async with world(self._machines(), self.settings(control), args.frontends) as frontends:
                clients = Clients(frontends, args.retries, args.seed)
                half = args.seconds / 2
                high = self._arrivals.coming(4 * capacity, half, args.seed)
                low = self._arrivals.coming(capacity / 2, half, args.seed + 1, half)
                await clients.run(both(high, low))
                return clients

        return {"row": "step", "control": control, **recovery(virtual(go()).attempts, args.seconds / 2)}


async def _idle(frontends: Sequence[VirtualFrontend]) -> tuple[int, int]:
    """Sample until cancelled. Return the number of samples with a waiting request and an idle worker, and with a waiting
    request."""
    idle = looks = 0
    try:
        while True:
            await asyncio.sleep(LOOK_S)
            if any(one.waiting() for one in frontends):
                looks += 1
                loads = [one.plane.load(name) for one in frontends for name in one.plane.own]
                idle += any(load is not None and load.running + load.waiting == 0 for load in loads)
    except asyncio.CancelledError:
        return idle, looks


def result(rows: Sequence[Row]) -> Row:
    """Return the targets for `deadline`, and whether they were reached."""
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run all."""
    parser = command_line("overload", __doc__)
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--workers", type=whole, default=8)
    parser.add_argument("--loads", type=positive, nargs="+", default=[0.5, 1.0, 1.5, 2.0, 3.0, 4.0])
    parser.add_argument("--controls", choices=CONTROLS, nargs="+", default=list(CONTROLS))
    parser.add_argument("--seconds", type=positive, default=40.0)
    parser.add_argument("--frontends", type=whole, default=1)
    parser.add_argument("--retries", type=int, choices=range(6), default=0)
    parser.add_argument("--batch", type=whole, default=64)
    parser.add_argument("--block-tokens", type=int, choices=[16, 32, 64, 128, 256, 512], default=64)
    parser.add_argument("--speed", choices=list(SPEEDS), default=FIRST)
    parser.add_argument("--seed", type=int, default=1)
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
