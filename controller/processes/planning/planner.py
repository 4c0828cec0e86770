"""The planner process: composes the state store, the journal, the planning loop and an admin port."""

import shlex
from pathlib import Path

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest

from controller.adapters.clock import SystemClock
from controller.adapters.postgres.reader import RowReader
from controller.metrics import JournalMetrics
from controller.ports import ScaleHook
from controller.processes import collector
from controller.processes.controller_admin import serve, url_of
from controller.runtime.planning import PlannerMetrics, Planning
from controller.runtime.settings import PlannerSettings
from events.errors import BadSetting
from events.journal.nats import NatsJournal
from events.process import presence
from events.process.stopping import run_until, stop_signal
from events.versions import Known


async def run_planner(
    settings: PlannerSettings, *, nats_url: str, database_url: str | None, data: Path, name: str
) -> int:
    """Plan until SIGTERM, and return the exit code 0. Raise HoldfastError, with the reason, if an operator must act."""
    assert database_url, "the role's settings require it"
    hook = hook_of(settings)
    stop = stop_signal()
    journal = await NatsJournal.connect(
        nats_url, f"planner:{name}", data / "spool" / name, make=False, known=Known.ours()
    )
    store = RowReader(database_url)
    metrics = PlannerMetrics(CollectorRegistry())
    metrics.registry.register(JournalMetrics(journal))
    planning = Planning(store, journal, SystemClock(), settings, name, hook, metrics)
    runner = await _serve(planning, metrics, settings)
    try:
        presence.announce(data, "planner", name, url_of(runner))
        collector.freeze_and_tune()
        await run_until(stop, planning.run())
        return 0
    finally:
        await runner.cleanup()
        await store.close()
        await journal.close()


def hook_of(settings: PlannerSettings) -> ScaleHook | None:
    """Return the hook that applies proposals, or None if the supervisor applies them or no hook is set.

    Raise BadSetting if the hook's settings are invalid.
    """
    if settings.by == "command":
        from controller.adapters.scaling.command_hook import CommandScaleHook

        try:
            words = shlex.split(settings.hook_command)
        except ValueError as error:
            raise BadSetting(f"hook_command {settings.hook_command!r} cannot be split: {error}") from error
        return CommandScaleHook(words, settings.hook_timeout_s)
    if settings.by == "http":
        from controller.adapters.scaling.http_hook import HttpScaleHook

        token, authority = settings.hook_token_file, settings.hook_ca_file
        return HttpScaleHook(
            settings.hook_url,
            token_file=Path(token) if token else None,
            ca_file=Path(authority) if authority else None,
            timeout_s=settings.hook_timeout_s,
        )
    return None


async def _serve(planning: Planning, metrics: PlannerMetrics, settings: PlannerSettings) -> web.AppRunner:
    def report() -> dict[str, object]:
        why = planning.why_not
        return {"ready": not why, "reason": why}

    async def shown(request: web.Request) -> web.Response:
        return web.json_response(planning.report())

    def render() -> bytes:
        return generate_latest(metrics.registry)

    return await serve(render, report, settings.admin_host, settings.admin_port, [web.get("/plan", shown)])
