"""Computes the capacity that a fleet of 1,024 GPUs lacks in a year, for several numbers of spares.

    python -m benchmarks spares [--years 200]

128 groups of eight GPUs, each on its own server, and the spares, which fail as well. The failure rate of a server and
the duration of its outages are drawn from the published half of StepFun's fault trace (../shared/data/gpu_faults.json): 313
faults of 400 servers within 174 days; faults that had not ended by then count as the longest. A spare replaces a failed group
within a second. The seed's fleet waits 60 s for one (N20). One JSON line for each number of spares; figures are means over
the years, and the worst of them.
"""

import argparse
import json
import random
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from pathlib import Path

from controller.planner.spares import SparePolicy, spares_for

TRACE = Path(__file__).parents[3] / "shared" / "data" / "gpu_faults.json"
SERVERS, DAYS = 400, 174.2
GROUPS, GPUS = 128, 8
YEAR = 365.0  # days
SECOND = 1 / 86_400  # of a day
ACTIVATION_S = {"holdfast": 1.0, "seed": 60.0}


@dataclass(frozen=True, slots=True)
class Outage:
    """The period in which one unit, active or spare, is away. Any unit of time can be used."""

    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Missing:
    """The shortage of a fleet over a period, where a slot is the task of one active unit."""

    unit_time: float  # of active slots without a unit
    worst: int  # largest number of units at one moment
    lacking: float  # share of the time with any unit missing
    replaced: int  # number of times that a spare replaced a unit


def missing(outages: Sequence[Outage], spares: int, activation: float, until: float) -> Missing:
    """Return the shortage of a fleet with `spares` spares in the period from 0 to `until`.

    A spare replaces a failed unit after the time `activation`. A spare that is itself away replaces no unit. A slot is empty
    during an activation, and while more units are away than there are spares. A repaired unit fills an empty slot, or becomes
    a spare.
    """
    ends: list[float] = []
    away = worst = replaced = 0
    lost = lacking = last = 0.0
    moments = sorted((one.begin, one.end) for one in outages if one.begin < until)
    for begin, end in [*moments, (until, inf)]:
        while ends and ends[0] <= begin:
            at = heappop(ends)
            short = max(0, away - spares)
            lost, lacking, last = lost + short * (at - last), lacking + (at - last) * (short > 0), at
            away -= 1
        short = max(0, away - spares)
        lost, lacking, last = lost + short * (begin - last), lacking + (begin - last) * (short > 0), begin
        if begin >= until:
            break
        away += 1
        if away <= spares:
            replaced += 1
            lost += min(activation, end - begin)
        worst = max(worst, away - spares)
        heappush(ends, min(end, until))
    return Missing(lost, max(0, worst), lacking / until if until > 0 else 0.0, replaced)


def recorded() -> tuple[float, list[float]]:
    """Return the faults per server and day, and the days that each of them lasted."""
    begun: dict[str, list[float]] = defaultdict(list)
    lasted = []
    for event in sorted(json.loads(TRACE.read_text()), key=lambda one: one["event_time"]):
        if event["event_type"] == "fault_start":
            begun[event["node_id"]].append(event["event_time"])
        elif begun[event["node_id"]]:
            lasted.append(event["event_time"] - begun[event["node_id"]].pop(0))
    lasted += [max(lasted)] * sum(map(len, begun.values()))
    return len(lasted) / SERVERS / DAYS, lasted


def year(dice: random.Random, units: int, per_day: float, lasted: Sequence[float]) -> list[Outage]:
    """Return the outages of a year; each unit has recovered before it fails the next time."""
    found = []
    for _ in range(units):
        at = dice.expovariate(per_day)
        while at < YEAR:
            end = at + dice.choice(lasted)
            found.append(Outage(at, end))
            at = end + dice.expovariate(per_day)
    return found


def measured(
    spares: int, years: int, per_day: float, lasted: Sequence[float], activation_s: float
) -> dict[str, object]:
    """Return the missing capacity over `years` years."""
    lost, worst, lacking, replaced = [], 0, 0.0, 0
    for number in range(years):
        outages = year(random.Random(number), GROUPS + spares, per_day, lasted)
        found = missing(outages, spares, activation_s * SECOND, YEAR)
        lost.append(found.unit_time * 24 * GPUS)
        worst, lacking, replaced = max(worst, found.worst), lacking + found.lacking, replaced + found.replaced
    return {
        "spares": spares,
        "activation_s": activation_s,
        "missing_gpu_hours": round(sum(lost) / years, 1),
        "of_capacity": round(sum(lost) / years / (GROUPS * GPUS * YEAR * 24), 6),
        "worst_year_gpu_hours": round(max(lost), 1),
        "worst_groups_at_once": worst,
        "lacking_share": round(lacking / years, 6),
        "replacements": round(replaced / years, 1),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print all figures."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks spares",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--years", type=int, default=200, help="simulated years (default: 200)")
    args = parser.parse_args(argv)
    per_day, lasted = recorded()
    mean = sum(lasted) / len(lasted)
    auto = {
        target: spares_for(SparePolicy(per_day=per_day, mttr_days=mean, target=target), GROUPS)
        for target in (0.99, 0.999)
    }
    head = {"failures_per_server_day": round(per_day, 6), "mean_days_away": round(mean, 3)}
    print(json.dumps({**head, "auto_99": auto[0.99], "auto_99.9": auto[0.999]}))
    tenth = round(GROUPS / 10)
    for spares in sorted({0, *auto.values(), tenth}):
        print(json.dumps(measured(spares, args.years, per_day, lasted, ACTIVATION_S["holdfast"])), flush=True)
    print(json.dumps(measured(auto[0.99], args.years, per_day, lasted, ACTIVATION_S["seed"])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
