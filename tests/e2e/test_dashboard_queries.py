"""What dashboards ask for is answered: by a real Prometheus that scrapes a real fleet while it is broken, and by its Postgres."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from fleet import holdfast, running, streamed
from prometheus_server import PrometheusServer, binary, prometheus

from controller.demo.fleet import DemoFleet
from controller.processes.fleet_dir import FleetDir
from grafana.boards import incident, slo
from grafana.model import Query
from grafana.write import BOARDS

FLAGS = ("--workers", "3", "--spares", "1", "--itl-ms", "20", "--chaos", "--canary-interval", "1", "--breaker-wait", "1",
         "--breaker-backoff", "1", "--planner-mode", "propose")  # fmt: skip
BROKEN_S = 24.0
STREAMS, TOKENS = 8, 60
QUIET = {  # panels that may show nothing, since nothing of that kind is rehearsed here: nobody is refused, nobody scales
    "Control plane: Planners", "Fleet: Refused for want of room", "Incident: Exposed", "Incident: Streams that left the worker",
    "Requests and migrations: At a bound", "Requests and migrations: Errors by kind",
    "Requests and migrations: For another reason", "Requests and migrations: For want of room",
    "Requests and migrations: Given up by clients", "Requests and migrations: Panic", "Requests and migrations: Put off",
    "Requests and migrations: The wait for a worker", "Silent corruption: Which",
}  # fmt: skip


def filled(ask: str, **chosen: str) -> str:
    """Return a query with what a viewer's choices and Grafana put in its place."""
    values = {
        "$__rate_interval": "20s", "$model": ".*", "$worker": ".*", "$frontend": ".*", "$objective": "0.999",
        "${worker:singlequote}": "'w0','w1','w2','s0'", **{f"${name}": value for name, value in chosen.items()},
    }  # fmt: skip
    for name, value in values.items():
        ask = ask.replace(name, value)
    return ask


def asked(source: str) -> list[tuple[str, Query]]:
    """Return what all dashboards ask of one source, each with the name of its panel."""
    panels = [(f"{board.title}: {panel.title}", panel) for board in BOARDS for panel in board.panels()]
    return [(name, query) for name, panel in panels for query in panel.asks if query.source == source]


@contextlib.asynccontextmanager
async def users(fleet: DemoFleet) -> AsyncIterator[None]:
    """Let people ask all the while."""

    async def ask(number: int) -> None:
        while True:
            with contextlib.suppress(Exception):
                await streamed(fleet, [300 + number] * 40, TOKENS)

    tasks = [asyncio.create_task(ask(n)) for n in range(STREAMS)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def broken(fleet: DemoFleet) -> None:
    """Break the fleet in three ways, one after another."""
    for verb, worker, argument in (("corrupt", "w0", 2.0), ("error", "w1", 6.0), ("kill", "w2", None)):
        with contextlib.suppress(Exception):
            await fleet.act(verb, worker, argument)
        await asyncio.sleep(BROKEN_S / 3)


def empty(server: PrometheusServer) -> list[str]:
    """Return the panels that have a query to which Prometheus shows nothing. Each query is understood."""
    bounds = {
        name: server.ask(f"{metric}_bucket")[3]["metric"]["le"]
        for name, metric in (("ttft", slo.FIRST), ("itl", slo.NEXT))
    }
    return sorted(
        {name for name, query in asked("prometheus") if not server.ask(filled(query.ask, **bounds))}
    )


async def rows(url: str, ask: str) -> list[Any]:
    """Return what the state store answers, with Grafana's macro filled in."""
    for column in ("at", "opened_at"):
        ask = ask.replace(f"$__timeFilter({column})", f"{column} > now() - interval '1 hour'")
    connection = await asyncpg.connect(url.replace("postgresql+asyncpg", "postgresql"))
    try:
        return list(await connection.fetch(ask))
    finally:
        await connection.close()


@pytest.mark.attack
async def test_every_panel_is_answered_while_a_fleet_is_broken(tmp_path: Path) -> None:
    binary()
    async with running(tmp_path / "fleet", *FLAGS) as fleet:
        await fleet.healthy(3)
        printed = await asyncio.to_thread(holdfast, "scrape-config", "--data", str(fleet.data))
        config = printed.stdout.replace("scrape_interval: 5s", "scrape_interval: 1s").replace(
            "scrape_timeout: 4s", "scrape_timeout: 1s"
        )
        with prometheus(tmp_path / "prometheus", config) as server:
            async with users(fleet):
                await broken(fleet)
                found = await asyncio.to_thread(empty, server)
            up = {one["metric"]["role"] for one in server.ask("up == 1")}
        assert {*found} <= QUIET, {*found} - QUIET
        assert up == {"controller", "projector", "planner", "frontend", "worker"}
        url = str(FleetDir(fleet.data).recall()["database_url"])
        (latest, *_) = await rows(url, incident.CHOSEN.asks)
        chosen = {"{incident:singlequote}": f"'{latest['incident']}'"}
        nothing = {
            name for name, query in asked("postgres") if not await rows(url, filled(query.ask, **chosen))
        }
        assert nothing <= QUIET, nothing - QUIET
        assert await rows(url, filled(incident.BOARD.events, **chosen))
