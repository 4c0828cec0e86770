"""The dashboards' queries have results, from a real Prometheus and the state store of a broken fleet.

The runbooks' commands have a useful output, too.
"""

import asyncio
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from fleet import holdfast, running
from prometheus_server import PrometheusServer, binary, prometheus
from rehearsal import FLAGS, broken, lasts, users
from runbooks import all_named, all_shown, first_incident, printed
from webhook_receiver import receiving

from controller.processes.fleet_dir import FleetDir
from grafana.boards import incident, slo
from grafana.model import Query
from grafana.rules import text
from grafana.write import BOARDS

CALM_S = 5.0
ALARMS = {"HoldfastSilentCorruption", "HoldfastTargetDown", "HoldfastWorkersFailing"}
QUIET = {  # panels that may be empty, since nothing of that kind is rehearsed here: no parked request, no scaling
    "Control plane: Certificate expires in", "Control plane: Full in", "Control plane: Planners", "Incident: Exposed requests",
    "Incident: Migrated streams", "Requests and migrations: At a limit",
    "Requests and migrations: For other reasons", "Requests and migrations: Cancelled by clients",
    "Requests and migrations: Panic", "Requests and migrations: Preemptions", "Requests and migrations: Queue wait",
    "Silent corruption: Unknown exposure", "Silent corruption: Exposed token ranges",
}  # fmt: skip


def filled(ask: str, **chosen: str) -> str:
    """Return a query with the viewer's choices and Grafana's macros filled in."""
    values = {
        "$__rate_interval": "20s", "$model": ".*", "$worker": ".*", "$frontend": ".*", "$objective": "0.999",
        "${worker:singlequote}": "'w0','w1','w2','s0'", **{f"${name}": value for name, value in chosen.items()},
    }  # fmt: skip
    for name, value in values.items():
        ask = ask.replace(name, value)
    return ask


def asked(source: str) -> list[tuple[str, Query]]:
    """Return all dashboards' queries to one source, each with the name of its panel."""
    panels = [(f"{board.title}: {panel.title}", panel) for board in BOARDS for panel in board.panels()]
    return [(name, query) for name, panel in panels for query in panel.asks if query.source == source]


def fired(server: PrometheusServer, within: str = "10m") -> set[str]:
    """Return the alerts that have fired recently."""
    ever = server.ask(f'count by (alertname) (max_over_time(ALERTS{{alertstate="firing"}}[{within}]))')
    return {one["metric"]["alertname"] for one in ever}


def empty(server: PrometheusServer) -> list[str]:
    """Return the panels with a query without results. Every query is valid."""
    bounds = {
        name: server.ask(f"{metric}_bucket")[3]["metric"]["le"]
        for name, metric in (("ttft", slo.FIRST), ("itl", slo.NEXT))
    }
    return sorted(
        {name for name, query in asked("prometheus") if not server.ask(filled(query.ask, **bounds))}
    )


async def rows(url: str, ask: str) -> list[Any]:
    """Return the state store's answer, with Grafana's macro filled in."""
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
    async with receiving() as told, running(tmp_path / "fleet", *FLAGS, "--webhook", told.url) as fleet:
        await fleet.healthy(3)
        said = await asyncio.to_thread(holdfast, "scrape-config", "--data", str(fleet.data))
        config = said.stdout.replace("scrape_interval: 5s", "scrape_interval: 1s").replace(
            "scrape_timeout: 4s", "scrape_timeout: 1s\n  evaluation_interval: 1s"
        )
        (rules := tmp_path / "rules.yaml").write_text(text(rehearsed=True))
        config += f"rule_files: ['{rules}']\n"
        with prometheus(tmp_path / "prometheus", config) as server:
            async with users(fleet):
                await asyncio.to_thread(server.wait_for, "holdfast_leader")
                await lasts(CALM_S)
                false = fired(server, "3s")  # before, nothing had been measured
                await broken(fleet)
                found = await asyncio.to_thread(empty, server)
                alarms = fired(server)
            up = {one["metric"]["role"] for one in server.ask("up == 1")}
        assert not false, "a healthy fleet fires no alert"
        assert alarms >= ALARMS, ALARMS - alarms
        assert {*found} <= QUIET, {*found} - QUIET
        assert up == {"controller", "projector", "planner", "notifier", "frontend", "worker"}
        url = str(FleetDir(fleet.data).recall()["database_url"])
        (latest, *_) = await rows(url, incident.CHOSEN.asks)
        chosen = {"{incident:singlequote}": f"'{latest['incident']}'"}
        nothing = {
            name for name, query in asked("postgres") if not await rows(url, filled(query.ask, **chosen))
        }
        assert nothing <= QUIET, nothing - QUIET
        shown = await printed(fleet.data, all_shown(), await first_incident(fleet.data))
        for command, (code, output, errors) in shown.items():
            assert code == 0 and output.strip() and not errors, (command, code, output, errors)
        await fleet.until(lambda status: not any(w["health"] == "DEAD" for w in status["workers"]))
        for command in all_named():  # one after another: some move workers
            ((code, output, errors),) = (await printed(fleet.data, [command], "")).values()
            assert code == 0 and "Traceback" not in errors, (command, code, output, errors)
        assert await rows(url, filled(incident.BOARD.events, **chosen))
