"""The progress of a running replay: a bar and a table on a terminal, otherwise a line every 5 s."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from controller.trace.replay.connection import now
from controller.trace.replay.measures import DurationHistogram, ReplayMeasures
from controller.trace.replay.source import ExpectedDuration

REFRESH_S = 0.5
LINE_S = 5.0
BAR_WIDTH = 40


def share_of(measures: ReplayMeasures, expected: ExpectedDuration) -> float | None:
    """Return the completed share of a replay, from 0 to 1: by requests or by time, whichever is larger.

    None if neither total is known.
    """
    if expected.requests is None and expected.seconds is None:
        return None
    over = measures.whole + measures.failed
    by_count = over / expected.requests if expected.requests else 0.0
    by_time = (now() - measures.began) / expected.seconds if expected.seconds and measures.began else 0.0
    return min(1.0, max(by_count, by_time))


@asynccontextmanager
async def shown(measures: ReplayMeasures, expected: ExpectedDuration) -> AsyncIterator[None]:
    """Show the progress until the end of the block."""
    console = Console(stderr=True)
    task = asyncio.ensure_future(
        _draw(measures, expected, console) if console.is_terminal else _print_lines(measures, expected)
    )
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait((task,), timeout=REFRESH_S)


async def _print_lines(measures: ReplayMeasures, expected: ExpectedDuration) -> None:
    while True:
        await asyncio.sleep(LINE_S)
        print(line(measures, expected), file=sys.stderr, flush=True)


def line(measures: ReplayMeasures, expected: ExpectedDuration) -> str:
    """Return the progress as one line."""
    share = share_of(measures, expected)
    ttft, itl = (_ms(one, 0.5, 0.99) for one in (measures.ttft, measures.itl))
    return (
        f"{now() - measures.began:.0f} s{'' if share is None else f' ({share:.0%})'}: {measures.sent:,} sent, "
        f"{measures.in_flight:,} in flight, {measures.failed:,} failed, {measures.tokens.events:,} tokens; "
        f"TTFT p50 {ttft[0]} p99 {ttft[1]} ms, ITL p50 {itl[0]} p99 {itl[1]} ms"
    )


async def _draw(measures: ReplayMeasures, expected: ExpectedDuration, console: Console) -> None:
    before, events = now(), 0
    with Live(console=console, auto_refresh=False, transient=True) as live:
        try:
            while True:
                await asyncio.sleep(REFRESH_S)
                at = now()
                rate = (measures.tokens.events - events) / (at - before)
                before, events = at, measures.tokens.events
                live.update(_picture(measures, expected, rate), refresh=True)
        finally:
            live.update("", refresh=True)  # the last frame would stay on a small terminal


def _picture(measures: ReplayMeasures, expected: ExpectedDuration, rate: float) -> RenderableType:
    share = share_of(measures, expected)
    bar = Table.grid(padding=(0, 1))
    bar.add_row(
        f"{now() - measures.began:6.0f} s",
        ProgressBar(1.0, share or 0.0, width=BAR_WIDTH, pulse=share is None, animation_time=now()),
        "" if share is None else f"{share:.0%}",
    )
    counts = (
        f"{measures.sent:,} sent, {measures.in_flight:,} in flight, {measures.whole:,} answered, "
        f"{measures.failed:,} failed; {rate:,.0f} tokens/s"
    )
    table = Table("ms", "p50", "p95", "p99", "max", box=None)
    for label, values in (
        ("TTFT", measures.ttft), ("ITL", measures.itl), ("whole answer", measures.e2e), ("late", measures.generator.late),
    ):  # fmt: skip
        table.add_row(label, *_ms(values, 0.5, 0.95, 0.99, 1.0))
    return Group(bar, counts, table)


def _ms(values: DurationHistogram, *shares: float) -> list[str]:
    if not values.count:
        return ["-"] * len(shares)
    return [f"{value * 1e3:,.1f}" for value in values.percentiles(*shares)]
