"""The PagerDuty template (Events API v2): an event triggers an alert, or resolves one.

    POST https://events.pagerduty.com/v2/enqueue    https://developer.pagerduty.com/docs/send-alert-event

`dedup_key` is the fleet's name and the incident or other thread (`wording.Thread`). An event that neither begins nor ends a
thread, such as a breaker that closes while its incident is open, is not sent.
"""

import json
from typing import Any

from controller.replay.sentences import sentence
from controller.webhooks.message_context import FleetWording, severity, thread
from events.follow import FollowedEvent

SUMMARY_MAX, KEY_MAX = 1_024, 255  # characters
TYPE = "application/json"


def written(event: FollowedEvent, wording: FleetWording, key: str) -> bytes | None:
    """Return the request body; None if the event is not sent to PagerDuty."""
    belongs = thread(event)
    if belongs.action is None:
        return None
    body: dict[str, Any] = {
        "routing_key": key,
        "event_action": belongs.action,
        "dedup_key": f"{wording.fleet}:{belongs.key}"[:KEY_MAX],
    }
    if belongs.action == "trigger":
        links = {"Runbook": wording.runbook(event), "Console": wording.console_url}
        body |= {
            "payload": {
                "summary": f"{wording.fleet}: {sentence(event.fact)}"[:SUMMARY_MAX],
                "source": wording.fleet,
                "severity": severity(event),
                "timestamp": event.at.isoformat(),
                "component": str(getattr(event.fact, "worker", "") or getattr(event.fact, "subject", ""))
                or "fleet",
                "class": event.fact.kind(),
                "custom_details": {"event": event.id, "sequence": event.seq, **event.data},
            },
            "links": [{"href": url, "text": name} for name, url in links.items() if url],
            "client": "Holdfast",
        }
        if wording.console_url:
            body["client_url"] = wording.console_url
    return json.dumps(body, ensure_ascii=False).encode()
