"""The notifier process: runs one delivery per webhook, a broker connection and a small admin port."""

import asyncio
from collections.abc import AsyncGenerator
from functools import partial
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest

from controller.adapters.clock import SystemClock
from controller.processes import collector
from controller.processes.controller_admin import serve, url_of
from controller.webhooks.delivery import Delivery, NotifierMetrics
from controller.webhooks.sender import WebhookSender
from controller.webhooks.settings import NotifierSettings, Webhook
from events import codec
from events.dead_letters import DeadLetters
from events.follow import FollowedEvent, Since, follow
from events.journal.counters import JournalCounters
from events.journal.kind_gate import Announcer, KindGate
from events.nats.connection import BrokerConnection
from events.process import presence
from events.process.stopping import run_until, stop_signal
from events.versions import Known

LEAVE_S = 9.0  # shorter than the 10 s for which `up` waits


async def run_notifier(
    settings: NotifierSettings, *, nats_url: str, database_url: str | None, data: Path, name: str
) -> int:
    """Deliver events to webhooks until SIGTERM, and return the exit code 0.

    Raise HoldfastError, with the reason, if an operator must act.
    """
    settings.check()
    stop = stop_signal()
    connection = await BrokerConnection.open(nats_url, f"notifier:{name}")
    clock, registry = SystemClock(), CollectorRegistry()
    metrics, bury = NotifierMetrics(registry), DeadLetters(connection).bury
    sender = await WebhookSender.open(clock, settings.timeout_s, allow_link_local=settings.allow_link_local)
    deliveries = [
        Delivery(webhook, settings, partial(_followed, nats_url, webhook), sender.send, bury, clock, metrics)
        for webhook in settings.webhooks
    ]
    announcer = Announcer(
        connection, KindGate(JournalCounters()), f"notifier:{name}:{codec.new_id()}", Known.ours()
    )
    announcing = asyncio.create_task(announcer.run())
    runner = await serve(
        partial(_render, deliveries, registry),
        partial(report, deliveries, connection),
        settings.admin_host,
        settings.admin_port,
    )
    try:
        presence.announce(data, "notifier", name, url_of(runner))
        collector.freeze_and_tune()
        await run_until(stop, *(delivery.run() for delivery in deliveries), leave_s=LEAVE_S)
        return 0
    finally:
        announcing.cancel()
        await announcer.leave()
        await runner.cleanup()
        await sender.close()
        await connection.close()


def _followed(nats_url: str, webhook: Webhook, since: Since) -> AsyncGenerator[FollowedEvent, None]:
    return follow(nats_url, kinds=webhook.kinds, since=since, durable=webhook.durable, may_change_kinds=True)


def _render(deliveries: list[Delivery], registry: CollectorRegistry) -> bytes:
    for delivery in deliveries:
        delivery.measure()
    return generate_latest(registry)


def report(deliveries: list[Delivery], connection: BrokerConnection) -> dict[str, object]:
    """Return the body of /ready and /health: whether all webhooks get their events, and the reason for each that does not."""
    disconnected = "" if connection.connected else f"the broker cannot be reached: {connection.why}"
    webhooks = {one.webhook.called: one.why_not or disconnected for one in deliveries}
    why = "; ".join(f"{name}: {reason}" for name, reason in webhooks.items() if reason)
    return {"ready": not why, "reason": why, "webhooks": webhooks}
