"""Creates the report of a replay, in three forms: a JSON object, a table, and a chart (PNG or SVG)."""

from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console
from rich.table import Table

from controller.trace.plot import COLOR, Axes, blank
from controller.trace.replay.measures import LATE_MS_MAX, DurationHistogram, ReplayMeasures, middle_s

SHARES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
BUSY_SHARE = 0.7  # CPU share of a core below which other processes, not its own load, make the generator late
LATENCIES = {
    "ttft_ms": "First token (TTFT)",
    "itl_ms": "Between tokens (ITL)",
    "tpot_ms": "A token, per answer (TPOT)",
    "e2e_ms": "Whole answer",
}

Report: TypeAlias = dict[str, Any]  # plain JSON values


def found(measures: ReplayMeasures, about: Report) -> Report:
    """Return the report as plain JSON values. `about` has the report's fields about the trace, the server and the settings."""
    m, seconds, times = measures, measures.seconds, measures.generator
    generator = {
        "kept_up": times.kept_up,
        "late_ms": spread(times.late),
        "loop_lag_ms": spread(times.lag),
        "cpu_share": _rate(times.cpu_s, seconds),  # of one core
        "held_back": times.held.count,
        "held_back_ms": spread(times.held),
        "in_flight_max": m.in_flight_max,
    }
    return {
        **about,
        "seconds": round(seconds, 3),
        "requests": {
            "sent": m.sent,
            "whole": m.whole,
            "failed": m.failed,
            "cut": m.cut,
            "shorter": m.shorter,
        },
        "errors": {
            kind: {"count": count, "first": m.samples[kind]} for kind, count in m.errors.most_common()
        },
        "requests_per_s": _rate(m.whole, seconds),
        "tokens": {"input": m.tokens.input, "output": m.tokens.output, "events": m.tokens.events},
        "output_tokens_per_s": _rate(m.tokens.output, seconds),
        "ttft_ms": spread(m.ttft),
        "itl_ms": spread(m.itl),
        "tpot_ms": spread(m.tpot),
        "e2e_ms": spread(m.e2e),
        "prefix_cache": _cache(m),
        "goodput": _goodput(m),
        "generator": generator,
    }


def spread(values: DurationHistogram) -> dict[str, float] | None:
    """Return the mean, the percentiles and the extremes of durations in milliseconds; None if there are no durations."""
    if not values.count:
        return None
    numbers = (
        values.mean,
        values.min,
        *values.percentiles(*SHARES.values()),
        values.max,
    )
    return dict(zip(("mean", "min", *SHARES, "max"), (round(n * 1e3, 3) for n in numbers), strict=True))


def _rate(count: float, seconds: float) -> float | None:
    return round(count / seconds, 3) if seconds else None


def _cache(m: ReplayMeasures) -> dict[str, object] | None:
    tokens = m.tokens
    if not tokens.cached_answers:
        return None
    share = round(tokens.cached / tokens.cached_of, 4) if tokens.cached_of else 0.0
    return {
        "answers": tokens.cached_answers,
        "tokens": tokens.cached,
        "of": tokens.cached_of,
        "share": share,
    }


def _goodput(m: ReplayMeasures) -> dict[str, object] | None:
    if not m.slo:
        return None
    limits = {"ttft_ms": m.slo.ttft_s, "tpot_ms": m.slo.tpot_s, "itl_ms": m.slo.itl_s}
    ended = m.whole + m.failed
    return {
        "slo": {name: limit * 1e3 for name, limit in limits.items() if limit is not None},
        "requests": m.good,
        "share": round(m.good / ended, 4) if ended else None,
        "requests_per_s": _rate(m.good, m.seconds),
    }


def show(report: Report, console: Console) -> None:
    """Print the report as lines of text and a table."""
    for line in head(report):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    table = Table("ms", *("mean", *SHARES, "max"))
    for column in table.columns[1:]:
        column.justify = "right"
    rows = {label: report[name] for name, label in LATENCIES.items()}
    rows["Generator: late by"] = report["generator"]["late_ms"]
    for label, values in rows.items():
        cells = (
            ["-"] * (len(SHARES) + 2)
            if values is None
            else [f"{values[c]:,.1f}" for c in ("mean", *SHARES, "max")]
        )
        table.add_row(label, *cells)
    console.print(table)
    for line in tail(report):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def head(report: Report) -> list[str]:
    """Return the lines of the printed report before the table: trace, server, counts and rates."""
    requests, tokens = report["requests"], report["tokens"]
    counts = [
        f"{requests['sent']:,} requests sent in {report['seconds']:,.1f} s",
        f"{requests['whole']:,} answered",
    ]
    counts += [f"{requests[kind]:,} {kind}" for kind in ("failed", "cut") if requests[kind]]
    lines = [f"{report['trace']} at {report['url']}, {report['model']}", ", ".join(counts)]
    rate = report["output_tokens_per_s"]
    if rate is not None:
        lines.append(
            f"{tokens['output']:,} tokens, {rate:,.0f} a second; {report['requests_per_s']:,.2f} answers a second; "
            f"at most {report['generator']['in_flight_max']:,} in flight"
        )
    return lines


def tail(report: Report) -> list[str]:
    """Return the lines of the printed report after the table: prefix cache, goodput, errors and the generator's delays."""
    lines = []
    if (cache := report["prefix_cache"]) is not None:
        lines.append(
            f"Prefix cache: {cache['share']:.1%} of {cache['of']:,} prompt tokens were cached "
            f"(reported for {cache['answers']:,} answers)"
        )
    if (good := report["goodput"]) is not None and good["share"] is not None:
        limits = ", ".join(
            f"{name.removesuffix('_ms').upper()} {ms:g} ms" for name, ms in good["slo"].items()
        )
        lines.append(
            f"Goodput: {good['requests']:,} requests ({good['share']:.1%}) within {limits}; "
            f"{good['requests_per_s'] or 0:,.2f} a second"
        )
    if shorter := report["requests"]["shorter"]:
        lines.append(f"{shorter:,} answers were shorter than requested")
    lines += [
        f"Failed: {error['count']:,} × {kind}: {error['first']}" for kind, error in report["errors"].items()
    ]
    return lines + _generator(report["generator"])


def _generator(generator: Report) -> list[str]:
    lines = []
    if held := generator["held_back"]:
        were = "1 request was" if held == 1 else f"{held:,} requests were"
        lines.append(
            f"{were} held back because --concurrency was reached, "
            f"for {generator['held_back_ms']['p50']:,.0f} ms (median)"
        )
    if not generator["kept_up"]:
        late, lag = (
            generator[name]["p99"] if generator[name] else 0.0 for name in ("late_ms", "loop_lag_ms")
        )
        lines.append(
            f"The generator did not keep up: 1 % of its requests were sent {late:,.0f} ms late, and 1 % of its "
            f"network reads were {lag:,.0f} ms late (limit: {LATE_MS_MAX:g}). The measured times include these delays"
        )
        if (share := generator["cpu_share"] or 0.0) < BUSY_SHARE:
            lines.append(f"It used {share:.0%} of a core, so other processes keep this machine busy")
    return lines


BARS_MAX = 60
WIDE = 10.0  # ratio of the last to the first value; above it, the scale is logarithmic
STEP_S = 0.1  # shortest time between two samples from which a rate is computed


def draw(title: str, measures: ReplayMeasures, path: Path) -> None:
    """Write the chart of a replay to `path`. Raise OSError if the file cannot be written."""
    made = blank()
    made.suptitle(title)
    ttft, itl, whole, flying, tokens, failed = made.subplots(2, 3).flat
    _distribution(ttft, "First token", measures.ttft)
    _distribution(itl, "Between tokens", measures.itl)
    _distribution(whole, "Whole answer", measures.e2e)
    points = measures.timeline.points
    times = [point.at_s for point in points]
    _line(flying, "In flight", "requests", times, [float(point.in_flight) for point in points])
    steps = [(a, b) for a, b in pairwise(points) if b.at_s - a.at_s > STEP_S]
    ends = [b.at_s for _, b in steps]
    _line(tokens, "Tokens", "a second", ends, [(b.events - a.events) / (b.at_s - a.at_s) for a, b in steps])
    _line(failed, "Failed", "requests so far", times, [float(point.failed) for point in points])
    made.savefig(path, dpi=110)


def _distribution(axes: Axes, title: str, values: DurationHistogram) -> None:
    axes.set_title(title)
    axes.set_xlabel("ms")
    axes.set_ylabel("share")
    if not values.count:
        axes.text(0.5, 0.5, "none", ha="center", va="center", transform=axes.transAxes)
        return
    used = [place for place, count in enumerate(values.counts) if count]
    group = 1 + (used[-1] - used[0]) // BARS_MAX
    begins = range(used[0], used[-1] + 1, group)
    shares = [sum(values.counts[place : place + group]) / values.count for place in begins]
    edges = [middle_s(place) * 1e3 for place in (*begins, begins[-1] + group)]
    axes.stairs(shares, edges, color=COLOR, fill=True)
    if edges[-1] > WIDE * edges[0]:
        axes.set_xscale("log")


def _line(axes: Axes, title: str, unit: str, times: list[float], values: list[float]) -> None:
    axes.set_title(title)
    axes.set_xlabel("seconds")
    axes.set_ylabel(unit)
    axes.plot(times, values, color=COLOR)
    axes.set_ylim(0, max(1.0, 1.05 * max(values, default=0.0)))
