"""Webhooks of a fleet receive all events, in order, across killed processes and a restart."""

import base64
import json
import os
import signal
from itertools import groupby
from pathlib import Path

from fleet import running
from standardwebhooks import Webhook as Verifier
from waits import until
from webhook_receiver import Act, Received, Receiver, receiving

from benchmarks.local_fleet import LocalFleet
from controller.webhooks.settings import DEFAULT_KINDS
from events.observations import IntrusionRefused

KEY = f"whsec_{base64.b64encode(bytes(32)).decode()}"
FLAGS = ("--workers", "3", "--chaos", "--canary-interval", "0.5", "--breaker-wait", "1", "--itl-ms", "5")


def heard(receiver: Receiver) -> list[str]:
    """Return the ids that a receiver has accepted, without immediate repetitions, each verified."""
    for one in receiver.all:
        Verifier(KEY).verify(one.body, one.headers)
    return [id for id, _ in groupby(receiver.ids)]


def closed(receiver: Receiver, incidents: int) -> bool:
    """Return whether this number of incidents have been delivered from beginning to end."""
    kinds = [one.headers["webhook-id"] for one in receiver.taken if b"incident_closed" in one.body]
    return len({*kinds}) >= incidents


async def said(fleet: LocalFleet) -> list[str]:
    """Return the ids that should have been delivered, by the journal."""
    events = await fleet.events()
    assert not [event for event in events if isinstance(event.fact, IntrusionRefused)]
    return [event.id for event in events if event.fact.kind() in DEFAULT_KINDS]


async def all_is_told(receiver: Receiver, fleet: LocalFleet, incidents: int) -> None:
    """Wait until this number of incidents have been delivered to their end, and no event of the journal is missing."""
    await receiver.until(lambda: closed(receiver, incidents), 60)

    async def complete() -> bool:
        return heard(receiver) == await said(fleet)

    await until(complete, 60, every_s=0.1)


async def notifier_dies(fleet: LocalFleet) -> None:
    (pid,) = (one["pid"] for one in (await fleet.status())["processes"] if one["role"] == "notifier")
    os.kill(pid, signal.SIGKILL)


async def test_all_events_are_delivered_in_order_and_a_page_is_resolved(tmp_path: Path) -> None:
    (signs := tmp_path / "signs").write_text(KEY)
    (routes := tmp_path / "routes").write_text("R" * 32)

    def moody(received: Received) -> Act:
        acts: tuple[Act, ...] = (503, 200, "drop")
        return acts[len(ops.all) % len(acts)] if len(ops.all) < 12 else 200

    async with receiving() as ops, receiving() as page:
        ops.act = moody
        hooks = (
            *(
                "--webhook",
                f"ops={ops.url}",
                "--webhook-template",
                "cloudevents",
                "--webhook-secret-file",
                str(signs),
            ),
            *(
                "--webhook",
                f"page={page.url}",
                "--webhook-template",
                "pagerduty",
                "--webhook-secret-file",
                str(routes),
            ),
        )
        async with running(tmp_path / "fleet", *FLAGS, *hooks, stops=True) as fleet:
            await fleet.healthy(3)
            await fleet.act("kill", "w1")
            await ops.until(lambda: len(ops.all) > 1)
            await notifier_dies(fleet)
            await fleet.healthy(3)
            await all_is_told(ops, fleet, 1)
        async with running(tmp_path / "fleet", *FLAGS, *hooks, stops=True) as fleet:
            await fleet.healthy(3)
            await fleet.act("kill", "w2")
            await all_is_told(ops, fleet, 2)
    pages = [json.loads(one.body) for one in page.taken]
    triggered = {one["dedup_key"] for one in pages if one["event_action"] == "trigger"}
    resolved = {one["dedup_key"] for one in pages if one["event_action"] == "resolve"}
    assert len(resolved) >= 2 and resolved <= triggered
