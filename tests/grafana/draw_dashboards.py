"""Draws the pictures of docs/operations/observability.md from a rehearsed incident.

A fleet fails for half a minute while a real Prometheus scrapes it. Each dashboard's queries are sent to that Prometheus and to
the fleet's Postgres, and Grafana's own components draw the results (`grafana/drawing.tsx`).

    make dashboards-draw     # two minutes; needs node, a chromium and a Prometheus, and 620 MB in .grafana
"""

import asyncio
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "operations" / "dashboards"
TOOLS = ROOT / ".grafana" / "node_modules"
WIDTH, BYTES_MAX = 1280, 250_000
COLORS = 48
FEWER_COLORS = """const [fs, png] = [require('fs'), require('upng-js')], [file, colors] = process.argv.slice(1);
const image = png.decode(fs.readFileSync(file));
fs.writeFileSync(file, Buffer.from(png.encode(png.toRGBA8(image), image.width, image.height, Number(colors))));"""
CALM_S, AFTER_S, RATE_S = 12.0, 20.0, 5
Json = dict[str, Any]


def named(legend: str, metric: Mapping[str, str]) -> str:
    """Return the display name of a series."""
    if not legend:
        return " ".join(value for name, value in sorted(metric.items()) if name != "__name__")
    return re.sub(r"{{(\w+)}}", lambda found: metric.get(found[1], ""), legend)


def column(name: str, values: list[Any]) -> Json:
    """Return a column with its type in Grafana's terms."""
    some = next((value for value in values if value is not None), None)
    if isinstance(some, datetime):
        return {
            "name": name,
            "type": "time",
            "values": [value and value.timestamp() * 1e3 for value in values],
        }
    if isinstance(some, bool):
        return {"name": name, "type": "boolean", "values": values}
    if some is None or isinstance(some, str | timedelta):
        return {
            "name": name,
            "type": "string",
            "values": [value if value is None else str(value) for value in values],
        }
    return {
        "name": name,
        "type": "number",
        "values": [value if value is None else float(value) for value in values],
    }


class Answers:
    """The results of a Prometheus and a Postgres for panels, as frames."""

    def __init__(self, prometheus: str, database: str, began: float, chosen: Mapping[str, str]) -> None:
        self._prometheus, self._database = prometheus, database
        self._span, self._chosen = (began, time.time()), chosen

    async def board(self, board: Any) -> Json:
        """Return a dashboard's JSON with the results in its panels."""
        shown: Json = board.json()
        panels = [panel for panel in shown["panels"] if panel["type"] != "row"]
        for panel, source in zip(panels, board.panels(), strict=True):
            panel["answers"] = [frame for query in source.asks for frame in await self._of(query)]
        return shown

    async def _of(self, query: Any) -> list[Json]:
        from test_dashboard_queries import filled, rows

        ask = filled(query.ask.replace("$__rate_interval", f"{RATE_S}s"), **self._chosen)
        if query.source == "postgres":
            found = await rows(self._database, ask)
            names = list(found[0].keys()) if found else []
            frame = {"columns": [column(name, [row[name] for row in found]) for name in names]}
            return _by_metric(frame) if query.series else [frame] if found else []
        found = await asyncio.to_thread(self._ask, ask, query.instant)
        frames = [(named(query.legend, one["metric"]), one.get("values") or [one["value"]]) for one in found]
        if query.heatmap:
            frames = bucket_counts([(one["metric"]["le"], one["values"]) for one in found])
        if not query.instant:
            frames = [(name, gaps_shown(values, self._span)) for name, values in frames]
        return [
            {
                "name": name,
                "columns": [
                    {"name": "time", "type": "time", "values": [at * 1e3 for at, _ in values]},
                    {"name": "value", "type": "number", "values": [_number(value) for _, value in values]},
                ],
            }
            for name, values in frames
        ]

    def _ask(self, ask: str, instant: bool) -> list[Json]:
        words: dict[str, Any] = {"query": ask}
        words |= {} if instant else {"start": self._span[0], "end": self._span[1], "step": 1}
        path = f"{'query' if instant else 'query_range'}?{urllib.parse.urlencode(words)}"
        with urllib.request.urlopen(f"{self._prometheus}/api/v1/{path}", timeout=30) as answer:
            found: list[Json] = json.load(answer)["data"]["result"]
            return found

    @property
    def span(self) -> list[float]:
        """Start and end in milliseconds."""
        return [at * 1e3 for at in self._span]


def gaps_shown(values: list[Any], span: tuple[float, float]) -> list[tuple[float, Any]]:
    """Return a series, second by second over its query's `span`, with None where it has no value, so that no line is drawn."""
    there = {round(at - span[0]): value for at, value in values}
    return [(span[0] + second, there.get(second)) for second in range(int(span[1] - span[0]) + 1)]


def _number(text: str | float | None) -> float | None:
    if text is None:
        return None
    value = float(text)
    return value if value == value and abs(value) != float("inf") else None


def _by_metric(frame: Json) -> list[Json]:
    """Return the series of a long table, as Grafana derives them from the columns time, metric and value."""
    if not frame["columns"]:
        return []
    times, metrics, values = (one["values"] for one in frame["columns"])
    found = []
    for name in dict.fromkeys(metrics):
        own = [n for n, metric in enumerate(metrics) if metric == name]
        columns = [
            {"name": "time", "type": "time", "values": [times[n] for n in own]},
            {"name": "value", "type": "number", "values": [values[n] for n in own]},
        ]
        found.append({"name": name, "columns": columns})
    return found


def bucket_counts(buckets: list[tuple[str, list[Any]]]) -> list[tuple[str, list[Any]]]:
    """Return a histogram's series as counts per bucket, without buckets that are always empty."""
    before: dict[float, float] = {}
    found = []
    for bound, values in sorted(buckets, key=lambda one: float(one[0])):
        own = [(at, max(0.0, float(value) - before.get(at, 0.0))) for at, value in values]
        before = {at: float(value) for at, value in values}
        if any(value for _, value in own):
            found.append((f"≤ {float(bound) * 1e3:g} ms" if bound != "+Inf" else "more", own))
    return found


async def rehearsed(folder: Path) -> tuple[list[Json], list[float]]:
    """Run a fleet with failures under load. Return the dashboards with their results, and start and end."""
    from fleet import holdfast
    from prometheus_server import prometheus
    from rehearsal import FLAGS, broken, lasts, users
    from test_dashboard_queries import rows

    from benchmarks.local_fleet import LocalFleet
    from controller.processes.fleet_dir import FleetDir
    from grafana.boards import incident
    from grafana.write import BOARDS

    fleet = LocalFleet.start(folder / "fleet", *FLAGS)
    try:
        await (await fleet.ready()).healthy(3)
        printed = await asyncio.to_thread(holdfast, "scrape-config", "--data", str(fleet.data))
        config = printed.stdout.replace("scrape_interval: 5s", "scrape_interval: 1s").replace(
            "timeout: 4s", "timeout: 1s"
        )
        with prometheus(folder / "prometheus", config) as server:
            await asyncio.to_thread(server.wait_for, "holdfast_leader")
            async with users(fleet):
                began = time.time()
                await lasts(CALM_S)
                await broken(fleet)
                await lasts(AFTER_S)
            url = str(FleetDir(fleet.data).recall()["database_url"])
            first = (await rows(url, incident.CHOSEN.asks))[-1]["incident"]
            chosen = {"{incident:singlequote}": f"'{first}'", "ttft": "0.5", "itl": "0.1"}
            chosen |= {
                name: await asyncio.to_thread(bound, server, metric, at_least)
                for name, metric, at_least in BOUNDS
            }
            answers = Answers(server.url, url, began, chosen)
            return [await answers.board(board) for board in BOARDS], answers.span
    finally:
        fleet.end()


BOUNDS = (
    ("ttft", "dynamo_frontend_time_to_first_token_seconds", 0.5),
    ("itl", "dynamo_frontend_inter_token_latency_seconds", 0.05),
)


def bound(server: Any, metric: str, at_least: float) -> str:
    """Return the bucket of a histogram that a viewer would choose: the first that is at least as large as this."""
    found = {one["metric"]["le"] for one in server.ask(f"{metric}_bucket")}
    return str(min((le for le in found if float(le) >= at_least), key=float))


def bundled(folder: Path) -> tuple[str, str]:
    """Return the page's script and style sheet."""
    loaders = [f"--loader:.{kind}=empty" for kind in ("woff2", "woff", "ttf", "png")] + [
        "--loader:.svg=dataurl"
    ]
    # the CommonJS build: it imports CommonJS, of which the module build would get the wrong default export
    loaders += [f"--alias:@grafana/ui={TOOLS / '@grafana' / 'ui' / 'dist' / 'cjs' / 'index.cjs'}"]
    command = [str(TOOLS / ".bin" / "esbuild"), str(ROOT / "grafana" / "drawing.tsx"), "--bundle", "--minify",
               '--define:process.env.NODE_ENV="production"', f"--outfile={folder / 'page.js'}", "--log-level=error"]  # fmt: skip
    environment = {"NODE_PATH": str(TOOLS), "PATH": "/usr/bin:/bin"}
    subprocess.run([*command, *loaders], check=True, timeout=120, env=environment)
    return (folder / "page.js").read_text(), (folder / "page.css").read_text()


def fewer_colors(picture: Path) -> None:
    """Reduce the colours of a picture, which shrinks it to a third."""
    command = ["node", "-e", FEWER_COLORS, str(picture), str(COLORS)]
    subprocess.run(command, check=True, timeout=60, cwd=TOOLS)


async def draw(boards: list[Json], span: list[float], folder: Path) -> None:
    """Draw each dashboard into a picture. Raise SystemExit if the page reports an error or the picture is too large."""
    from benchmarks import browser

    script, style = bundled(folder)
    PICTURES.mkdir(exist_ok=True)
    async with browser.browser(folder) as found:
        for board in boards:
            page, picture = (
                folder / f"{board['uid']}.html",
                PICTURES / f"{board['uid'].removeprefix('holdfast-')}.png",
            )
            data = json.dumps(board).replace("</", "<\\/")
            given = f"var BOARD = {data}, SPAN = {json.dumps(span)}, __grafana_public_path__ = 'data:,';"
            page.write_text(
                f"<!doctype html><meta charset=utf-8><style>{style}</style><div id=board></div>"
                f"<script>{given}</script><script>{script}</script>"
            )
            async with browser.opened(found, page) as (shown, complaints):
                complaints = [
                    one for one in complaints if not re.search("font|OTS", one)
                ]  # the font Inter is not published
                if complaints:
                    raise SystemExit(f"{board['title']} cannot be drawn: {complaints[:5]}")
                height = await shown.evaluate("document.getElementById('board').scrollHeight")
                await shown.set_viewport_size({"width": WIDTH, "height": height})
                await shown.locator("#board").screenshot(path=picture)
            await asyncio.to_thread(fewer_colors, picture)
            assert picture.stat().st_size <= BYTES_MAX, f"{picture} is too large"
            print(f"{picture.relative_to(ROOT)}: {picture.stat().st_size / 1e3:.0f} kB")


async def main() -> None:
    """Rehearse, or load stored frames (`--frames FILE`), and draw."""
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(sys.argv[2]) if sys.argv[1:2] == ["--frames"] else None
        if kept is not None and kept.exists():
            boards, span = json.loads(kept.read_text())
        else:
            boards, span = await rehearsed(Path(folder))
            if kept is not None:
                kept.write_text(json.dumps((boards, span)))
        await draw(boards, span, Path(folder))


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / one) for one in (".", "tests", "tests/fixtures", "tests/e2e")]
    asyncio.run(main())
