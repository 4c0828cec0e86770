"""The report of `fidelity`: the distributions of both engines, their percentiles, and a verdict."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.plots import figure
from benchmarks.simulation.fidelity_fleet import REAL, SIMULATED
from controller.trace.replay.measures import DurationHistogram, ReplayMeasures, middle_s

ENGINES = (REAL, SIMULATED)
SHARES = {"p50": 0.5, "p95": 0.95}
LIMITS = {"p50": 0.15, "p95": 0.25}  # relative to the real engine
NAMES = {"ttft": "First token (TTFT)", "itl": "Between tokens (ITL)"}


@dataclass(frozen=True, slots=True)
class Round:
    """The results of one round."""

    measures: dict[str, ReplayMeasures]  # of each engine
    alone_ms: dict[str, float]  # by the round's profile
    speeds_ms: list[dict[str, float]]  # of fixed computations, before and after each part


def merged(histograms: Sequence[DurationHistogram]) -> DurationHistogram:
    """Merge several distributions."""
    whole = DurationHistogram()
    for one in histograms:
        whole.counts = [a + b for a, b in zip(whole.counts, one.counts, strict=True)]
        whole.count, whole.total = whole.count + one.count, whole.total + one.total
        whole.min, whole.max = min(whole.min, one.min), max(whole.max, one.max)
    return whole


def compared(real: DurationHistogram, simulated: DurationHistogram) -> dict[str, dict[str, float]]:
    """Return both percentiles in milliseconds, and the deviation of the simulated ones from the real ones."""
    found = {}
    for name, share in SHARES.items():
        (was,), (is_,) = real.percentiles(share), simulated.percentiles(share)
        found[name] = {"real_ms": was * 1e3, "simulated_ms": is_ * 1e3, "off": is_ / was - 1}
    return found


def agree(found: dict[str, dict[str, dict[str, float]]]) -> bool:
    """Return whether all percentiles are within their limits."""
    return all(within(name, of[name]) for of in found.values() for name in of)


def within(name: str, one: dict[str, float]) -> bool:
    """Return whether a percentile is within its limit."""
    return abs(one["off"]) <= LIMITS[name]


def report_of(rounds: Sequence[Round]) -> dict[str, Any]:
    """Return the report."""
    each = [one.measures for one in rounds]
    whole = {
        what: {name: merged([getattr(one[name], what) for one in each]) for name in ENGINES} for what in NAMES
    }
    found = {what: compared(of[REAL], of[SIMULATED]) for what, of in whole.items()}
    return {
        "agree": agree(found),
        "limits": LIMITS,
        "requests": sum(one[REAL].whole for one in each),
        "tokens": sum(one[REAL].tokens.output for one in each),
        "in_flight_max": {name: max(one[name].in_flight_max for one in each) for name in ENGINES},
        "cached": {name: _cached([one[name] for one in each]) for name in ENGINES},
        "kept_up": all(one[name].generator.kept_up for one in each for name in ENGINES),
        "percentiles": found,
        "mean_ms": {what: {name: of[name].mean * 1e3 for name in ENGINES} for what, of in whole.items()},
        "rounds": [
            {
                **{
                    what: compared(getattr(one.measures[REAL], what), getattr(one.measures[SIMULATED], what))
                    for what in NAMES
                },
                "seconds": {name: one.measures[name].seconds for name in ENGINES},
                "alone_ms": one.alone_ms,
                "speeds_ms": one.speeds_ms,
            }
            for one in rounds
        ],
    }


def _cached(measures: Sequence[ReplayMeasures]) -> float:
    return sum(one.tokens.cached for one in measures) / max(1, sum(one.tokens.input for one in measures))


def show(report: dict[str, Any], console: Console) -> None:
    """Print the report as tables."""
    table = Table("", "real", "simulated", "off by", "at most", "within", "in each round")
    for column in table.columns[1:]:
        column.justify = "right"
    for what, of in report["percentiles"].items():
        for name, one in of.items():
            table.add_row(
                f"{what.upper()} {name}",
                f"{one['real_ms']:.2f} ms",
                f"{one['simulated_ms']:.2f} ms",
                f"{one['off']:+.1%}",
                f"{LIMITS[name]:.0%}",
                "yes" if within(name, one) else "NO",
                " ".join(f"{each[what][name]['off']:+.1%}" for each in report["rounds"]),
            )
    console.print(table)
    table = Table(
        "round", *("profile", "first", "second", "after"), title="fixed computations, ms: Python, memory"
    )
    for number, one in enumerate(report["rounds"], 1):
        table.add_row(str(number), *(f"{at['python']:.1f}, {at['memory']:.1f}" for at in one["speeds_ms"]))
    console.print(table)
    if not report["kept_up"]:
        console.print("The load generator did not keep up: this machine is too busy for meaningful results.")


def draw(rounds: Sequence[Round], path: Path) -> None:
    """Draw both distributions of both engines."""
    with figure(path, len(NAMES), "The same requests, answered by two engines") as axes:
        for panel, (what, title) in zip(axes[0], NAMES.items(), strict=True):
            for name in ENGINES:
                whole = merged([getattr(one.measures[name], what) for one in rounds])
                used = [place for place, count in enumerate(whole.counts) if count]
                below = [sum(whole.counts[: place + 1]) / whole.count for place in used]
                panel.step([middle_s(place) * 1e3 for place in used], below, where="post", label=name)
            panel.set_xscale("log")
            panel.set_xlabel("ms")
            panel.set_ylabel("share of all that is not longer")
            panel.set_title(title)
            panel.legend()
