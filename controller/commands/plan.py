"""`holdfast plan`: shows the plan of the running planner, or rehearses planning on a recorded day."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from controller.commands.flags.planning import BOUNDS, FIT
from controller.commands.plan_now import show
from controller.planner import rehearsal
from controller.planner.fleet_model import DayFigures
from controller.planner.forecast import check_installed
from controller.planner.plan import Change, PlannerPolicy
from controller.planner.rehearsal import Arrival, RehearsedFleet, most_needed
from controller.planner.sizing import WORKERS_MAX, Objectives
from controller.terminal_text import escape_controls
from controller.trace.rows import TraceReader, TraceRow
from events.errors import UsageError
from events.observations import Profile

Figures = dict[str, Any]  # the results of a rehearsal, as plain JSON types

FIRST_MINUTES = 5  # a rehearsal starts with the number of workers that the first minutes of the day need
ARRIVALS_MAX = 5_000_000  # maximum number of requests of a rehearsal
DAYS_MAX = 31  # maximum length of a recording in days


def run(args: argparse.Namespace) -> int:
    """Print the plan of the running planner, or with --trace the result of a rehearsal.

    Raise UsageError for invalid arguments, HoldfastError if no planner answers, and BadTrace, BadProfile or ForecastsMissing
    if the rehearsal cannot run."""
    defaults = args.only_with_trace.items()
    given = [f"--{name.replace('_', '-')}" for name, value in defaults if getattr(args, name) != value]
    if given and args.trace is None:
        raise UsageError(f"{', '.join(given)}: needs a recorded day, given by --trace FILE")
    if args.trace is None:
        return show(args.data, args.output)
    check_installed()
    try:
        policy = PlannerPolicy(**{name: getattr(args, name) for name in BOUNDS})
    except ValueError as error:
        raise UsageError(str(error)) from error
    objectives = Objectives(ttft_ms=args.slo_ttft_ms, tpot_ms=args.slo_tpot_ms, missed=policy.missed)
    fleet = RehearsedFleet(profile=_profile(args), objectives=objectives, policy=policy)
    rows = list(TraceReader(args.trace))
    if not rows:
        raise UsageError(f"{args.trace} has no requests")
    if (days := max(row.timestamp for row in rows) / 86_400_000) > DAYS_MAX:
        raise UsageError(f"{args.trace} spans {days:.0f} days: at most {DAYS_MAX} can be rehearsed at once")
    arrivals, fixed = _arrivals(args, fleet, rows)
    report = rehearse(fleet, arrivals, fixed, args.gpus, _progress)
    lines = [json.dumps(report, indent=2)]
    if args.output != "json":
        lines = [escape_controls(line) for line in _lines(report, args)]
    print("\n".join(lines))
    return 0


def _profile(args: argparse.Namespace) -> Profile:
    if args.profile is not None:
        if args.prefill_tokens_per_s or args.tpot_curve:
            text = (
                "--profile already sets the speed of a worker: omit --prefill-tokens-per-s and --tpot-curve"
            )
            raise UsageError(text)
        return measured(args.profile, args)
    return Profile(
        kv_blocks=args.kv_blocks,
        block_tokens=args.block_tokens,
        max_batch=args.max_batch,
        prefill_tokens_per_s=args.prefill_tokens_per_s or 4000.0,
        tpot_ms=args.tpot_curve or ((1, 25.0), (32, 40.0)),
    )


def measured(path: Path, args: argparse.Namespace) -> Profile:
    """Return a worker's profile, with the speeds that `holdfast profile` measured and wrote to `path`.

    Raise BadProfile if the file is invalid."""
    from workers.engines.simulated.sequence import EngineShape
    from workers.engines.simulated.timing import Interpolated, ModelTiming

    blocks, tokens = args.kv_blocks, args.block_tokens
    shape = EngineShape(
        context_tokens=blocks * tokens, kv_blocks=blocks, block_tokens=tokens, batch_max=args.max_batch
    )
    return ModelTiming(Interpolated.load(path)).profile(shape)


def _arrivals(
    args: argparse.Namespace, fleet: RehearsedFleet, rows: list[TraceRow]
) -> tuple[list[Arrival], int]:
    factor = args.scale
    if factor == FIT:
        if args.fleet is None:
            raise UsageError(
                "--scale fit needs --fleet, the number of workers that the busiest minute shall need"
            )
        factor = rehearsal.scale_for(fleet, rows, args.fleet)
    if len(rows) * factor > ARRIVALS_MAX:
        raise UsageError(
            f"{len(rows) * factor:.0f} requests exceed the limit of {ARRIVALS_MAX}: use a smaller --scale, or slower workers"
        )
    arrivals = rehearsal.scaled(rows, factor)
    most = most_needed(fleet, arrivals)
    if most >= WORKERS_MAX:
        raise UsageError(
            f"no number of such workers meets the objectives: the busiest minute needs {most} or more"
        )
    return arrivals, args.fleet or most


def _progress(what: str) -> None:
    if sys.stderr.isatty():
        text = f"\r\033[Krehearsing: {escape_controls(what)}"
        print(text, end="" if what else "\r", file=sys.stderr, flush=True)


def rehearse(
    fleet: RehearsedFleet,
    arrivals: list[Arrival],
    fixed: int,
    gpus: int,
    report_progress: Callable[[str], object],
) -> Figures:
    """Simulate the same day three times, and return the results of all three simulations.

    In one simulation, the planner sets the number of workers. Another has `fixed` workers all day. The third has the workers
    that follow from perfect knowledge of the day. `gpus` is the number of GPUs per worker. `report_progress` is called with the
    name of each simulation at its start, and with "" after the last one."""
    first = most_needed(fleet, [one for one in arrivals if one.at < FIRST_MINUTES * 60]) or 1
    report_progress("perfect knowledge")
    perfect = rehearsal.with_perfect_knowledge(fleet, arrivals)
    report_progress(f"{fixed} workers all day")
    always = rehearsal.with_fixed(fleet, arrivals, fixed)
    report_progress("the planner")
    planned, changes = rehearsal.with_planner(fleet, arrivals, first)
    report_progress("")
    minutes = len(rehearsal.by_minute(arrivals))
    return {
        "requests": len(arrivals),
        "minutes": minutes,
        "gpus_per_worker": gpus,
        "most_needed": most_needed(fleet, arrivals),
        "planner": _figures(planned, perfect, gpus, minutes) | {"changes_made": list(map(_change, changes))},
        "fixed": _figures(always, perfect, gpus, minutes) | {"workers": fixed},
        "perfect": _figures(perfect, perfect, gpus, minutes),
    }


def _change(change: Change) -> Figures:
    at_s = (change.at - rehearsal.EPOCH).total_seconds()
    return {"at_s": at_s, "from": change.before, "to": change.after}


def _figures(day: DayFigures, perfect: DayFigures, gpus: int, minutes: int) -> Figures:
    hours = day.worker_s * gpus / 3600
    return {
        "gpu_hours": round(hours, 3),
        "of_perfect": round(day.worker_s / perfect.worker_s, 4) if perfect.worker_s else None,
        "late": day.missed,
        "late_share": round(day.missed_share, 6),
        "late_first_tokens": day.late_first,
        "late_tokens": day.late_tokens,
        "changes": day.changes,
        "changes_per_hour": round(day.changes / max(1, minutes) * 60, 2),
        "most_workers": day.most,
    }


def _lines(day: Figures, args: argparse.Namespace) -> Iterator[str]:
    yield (
        f"{day['requests']:,} requests within {day['minutes']} minutes; the busiest minute needs {day['most_needed']} workers "
        f"for a first token within {args.slo_ttft_ms:g} ms and {args.slo_tpot_ms:g} ms for each other"
    )
    yield ""
    yield f"{'':24}{'GPU-hours':>10}{'of perfect':>12}{'late':>9}{'changes':>9}{'most':>6}"
    fixed = f"{day['fixed']['workers']} workers all day"
    for key, name in (("planner", "planner"), ("fixed", fixed), ("perfect", "perfect knowledge")):
        one = day[key]
        yield (
            f"{name:24}{one['gpu_hours']:>10.1f}{one['of_perfect']:>12.2f}{one['late_share']:>9.2%}"
            f"{one['changes']:>9}{one['most_workers']:>6}"
        )
    made = day["planner"]["changes_made"]
    if made:
        yield ""
        yield "the planner's changes: " + ", ".join(
            f"{change['at_s'] / 60:.0f} min {change['from']} → {change['to']}" for change in made
        )
