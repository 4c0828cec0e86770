"""Formats the result of a simulation run as text and as JSON."""

import argparse
import json
from dataclasses import asdict

from controller.simulator.rates import PRESETS, Forecast
from controller.simulator.simulation import ALL_INVARIANTS, Result, SweepRun
from controller.simulator.world.scenario import Scenario

# Fields of the scenario and of the result that the JSON output has under the same name.
SCENARIO = ("seed", "workers", "minutes", "models", "controllers", "frontends", "spares")
RESULT = (
    "events", "decisions", "kinds", "faults", "requests", "worst_level", "appends_fenced", "stored_twice", "checks",
)  # fmt: skip


def output(args: argparse.Namespace, run: SweepRun, result: Result) -> str:
    """Return the output for a run in the form that `args` selects: JSON, one line (with `--runs`), or text."""
    forecast = None
    if args.rates is not None:
        forecast = Forecast(rates=PRESETS[args.rates], gpus=args.workers * args.tp, tp=args.tp)
    if args.output == "json":
        return json.dumps(as_plain(result, run.command, forecast))
    if args.runs > 1 and result.violation is None:
        return line(result)
    return text(result, run.command, forecast)


def line(result: Result) -> str:
    """Return one line of text about a run without violations."""
    return (
        f"seed {result.scenario.seed}: {result.events} events, {result.decisions} decisions, "
        f"{sum(result.faults.values())} faults, {result.speed:,.0f} x real time: all invariants held"
    )


def text(result: Result, again: str, expected: Forecast | None) -> str:
    """Return the result of a run as text.

    `again` is the command that repeats the run. `expected` holds the failures that the preset of failure rates
    predicts, or None without a preset.
    """
    parts = [_head(result), _happened(result), _clients(result), _checked(result)]
    if expected is not None:
        parts.append(_expected(expected))
    if result.violation is not None:
        found = result.violation
        parts.append(
            f"BROKEN at {found.at_s:.3f} s, after event {found.seq}: {found.invariant}\n"
            f"  {found.sentence}\n  {found.detail}"
        )
    parts.append(f"again: {again}")
    return "\n\n".join(parts)


def as_plain(result: Result, again: str, expected: Forecast | None) -> dict[str, object]:
    """Return the result of a run as plain JSON values.

    `again` is the command that repeats the run. `expected` holds the failures that the preset of failure rates
    predicts, or None without a preset.
    """
    scenario, violation = result.scenario, result.violation
    planning, crowd = scenario.planning, scenario.crowd
    return {
        **{name: getattr(scenario, name) for name in SCENARIO},
        "planners": planning.planners if planning is not None else 0,
        "room": crowd.batch + crowd.waiting if crowd is not None else None,
        "canary_interval_s": scenario.interval / 1e6,
        "healed_at_s": scenario.heal_at / 1e6,
        **{name: getattr(result, name) for name in RESULT},
        "requests": asdict(result.requests),
        "violation": None if violation is None else asdict(violation),
        "wall_s": round(result.wall_s, 3),
        "times_real_time": round(result.speed, 1),
        "digest": result.digest,
        "command": again,
        "rates": None if expected is None else _expected_plain(expected),
    }


def _head(result: Result) -> str:
    scenario = result.scenario
    return (
        f"seed {scenario.seed}: {scenario.workers} workers ({', '.join(scenario.models)}), "
        f"{scenario.controllers} controllers, {scenario.frontends} frontends{_besides(scenario)}, a canary every "
        f"{scenario.interval / 1e6:g} s\n{scenario.minutes:g} virtual minutes in {result.wall_s:.2f} s: "
        f"{result.speed:,.0f} x real time, {result.steps:,} steps\nhistory {result.digest[:16]}"
    )


def _besides(scenario: Scenario) -> str:
    """Return a phrase about the scenario's spares, planners and request limits; "" if there are none."""
    planning, crowd = scenario.planning, scenario.crowd
    found = [f"{scenario.spares} spares"] if scenario.spares else []
    if planning is not None:
        found.append(f"{planning.planners} planners")
    if crowd is not None:
        found.append(f"room for {crowd.batch} + {crowd.waiting} requests at each worker")
    return "".join(f", {one}" for one in found)


def _happened(result: Result) -> str:
    faults = ", ".join(f"{count} {name}" for name, count in result.faults.items()) or "none"
    kinds = sorted(result.kinds.items(), key=lambda pair: -pair[1])
    rows = [f"  {count:>7,}  {kind}" for kind, count in kinds]
    return (
        f"faults until {result.scenario.heal_at / 60e6:.1f} min: {faults}\n"
        f"{result.events:,} events, {result.decisions:,} of them decisions; {result.appends_fenced} appends fenced, "
        f"{result.stored_twice} facts stored twice\n" + "\n".join(rows)
    )


def _clients(result: Result) -> str:
    tally = result.requests
    return (
        f"requests: {tally.requests:,} came, {tally.served:,} served, {tally.migrated:,} migrations, "
        f"{tally.rejected:,} shed, {tally.unserved:,} without a worker, {tally.lost:,} lost, "
        f"{tally.altered:,} served by a worker that was corrupt"
    )


def _checked(result: Result) -> str:
    checked = (one for one in ALL_INVARIANTS.values() if one.name in result.checks)
    rows = [f"  {result.checks[one.name]:>9,} x  {one.sentence}" for one in checked]
    verdict = "all held" if result.violation is None else f"{result.violation.invariant} was broken"
    return f"invariants: {verdict}\n" + "\n".join(rows)


def _expected(expected: Forecast) -> str:
    rates = expected.rates
    mix = ", ".join(f"{name} {share:.1%}" for name, share in rates.mix.items() if share)
    gpu = "" if rates.gpu_share is None else f" (the GPU's own fault: {rates.gpu_share:.0%})"
    return (
        f"rates {rates.name}: {rates.source}\n"
        f"  per GPU                   {rates.per_gpu_day:.3e} a day = {rates.afr:.1%} a year{gpu}\n"
        f"  fleet                     {expected.gpus} GPUs in groups of {expected.tp}\n"
        f"  failure events per day    {expected.failures_per_day:.4f}   (whatever the groups)\n"
        f"  time between failures     {expected.mtbf_hours:,.1f} h\n"
        f"  GPU-hours lost per day    {expected.gpu_hours_lost_per_day:.2f}   "
        f"(events x {expected.tp} GPUs x {rates.mttr_hours:g} h; {rates.mttr_source})\n"
        f"  mix of the faults played  {mix}"
    )


def _expected_plain(expected: Forecast) -> dict[str, object]:
    rates = expected.rates
    return {
        "preset": rates.name,
        "source": rates.source,
        "gpus": expected.gpus,
        "tp": expected.tp,
        "per_gpu_day": rates.per_gpu_day,
        "annual_failure_rate": rates.afr,
        "failures_per_day": expected.failures_per_day,
        "mtbf_hours": expected.mtbf_hours,
        "gpu_hours_lost_per_day": expected.gpu_hours_lost_per_day,
        "mttr_hours": rates.mttr_hours,
        "mix": dict(rates.mix),
    }
