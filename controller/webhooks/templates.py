"""Builds a webhook's request in the format of its template, and signs it if there is a signing key.

    cloudevents  the event itself, see `cloud_event`
    slack        {"text": SENTENCE, "blocks": [section, context]}: one sentence, and blocks with links and details
                 https://docs.slack.dev/messaging/sending-messages-using-incoming-webhooks
    pagerduty    Events API v2: an event triggers an alert, or resolves one
                 POST https://events.pagerduty.com/v2/enqueue    https://developer.pagerduty.com/docs/send-alert-event

Requests with a signing key are signed as Standard Webhooks (standardwebhooks.com) specifies, by HMAC-SHA256. Requests to
PagerDuty are not signed, because their secret is PagerDuty's routing key. The headers:

    webhook-id         the event's id, which is the same for every try and redelivery
    webhook-timestamp  Unix seconds of this try
    webhook-signature  v1,BASE64 of hmac(key, "id.timestamp.body"); one per key, separated by spaces
"""

import base64
import hmac
import json
from dataclasses import dataclass

from controller.replay.sentences import sentence
from controller.terminal_text import shortened
from controller.webhooks import cloud_event
from controller.webhooks.message_context import runbook, severity, thread
from controller.webhooks.settings import NotifierSettings, TemplateName, keys_of, routing_key
from events.follow import FollowedEvent

JSON = "application/json"
SLACK_TEXT_MAX = 3_000  # characters of a block's text
PAGERDUTY_SUMMARY_MAX, PAGERDUTY_KEY_MAX = 1_024, 255  # characters


@dataclass(frozen=True, slots=True)
class WebhookRequest:
    """The headers and the body of a webhook's request."""

    headers: dict[str, str]
    body: bytes


def request(
    template: TemplateName, event: FollowedEvent, settings: NotifierSettings, secret: str, timestamp: int
) -> WebhookRequest | None:
    """Return the request for an event; None if the template has no message for the event.

    Args:
        secret: the text of the secret file; empty if there is none.
        timestamp: the time of this try, in Unix seconds.

    Raise ValueError if the secret is not valid for the template.
    """
    match template:
        case "pagerduty":
            body, kind = pagerduty(event, settings, routing_key(secret)), JSON
        case "slack":
            body, kind = slack(event, settings), JSON
        case _:
            body, kind = cloud_event.written(event), cloud_event.TYPE
    if body is None:
        return None
    headers = {"Content-Type": kind, "webhook-id": event.id, "webhook-timestamp": str(timestamp)}
    if secret and template != "pagerduty":
        signed = f"{event.id}.{timestamp}.".encode() + body
        digests = [hmac.digest(key, signed, "sha256") for key in keys_of(secret)]
        headers["webhook-signature"] = " ".join(f"v1,{base64.b64encode(one).decode()}" for one in digests)
    return WebhookRequest(headers, body)


def slack(event: FollowedEvent, settings: NotifierSettings) -> bytes:
    """Return the body of a request that posts an event to a Slack incoming webhook."""
    summary, fleet = _escaped(sentence(event.fact)), _escaped(settings.fleet)
    linked = {"runbook": runbook(event, settings), "console": settings.console_url}
    links = [f"<{_escaped(url).replace('|', '%7C')}|{name}>" for name, url in linked.items() if url]
    when = int(event.at.timestamp())
    stamp = f"<!date^{when}^{{date_num}} {{time_secs}}|{event.at:%Y-%m-%d %H:%M:%S} UTC>"
    about = [severity(event), event.fact.kind(), stamp, *filter(None, [event.correlation]), *links]
    body = {
        "text": shortened(f"{fleet}: {summary}", SLACK_TEXT_MAX),
        "blocks": [
            {"type": "section", "text": _mrkdwn(f"*{fleet}* {summary}")},
            {"type": "context", "elements": [_mrkdwn(" · ".join(about))]},
        ],
    }
    return json.dumps(body, ensure_ascii=False).encode()


def _mrkdwn(text: str) -> dict[str, str]:
    return {"type": "mrkdwn", "text": shortened(text, SLACK_TEXT_MAX)}


def _escaped(text: str) -> str:
    """Escape Slack markup in a text, because a third party may have chosen names in the text."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def pagerduty(event: FollowedEvent, settings: NotifierSettings, key: str) -> bytes | None:
    """Return the body of a request that sends an event to PagerDuty.

    The `dedup_key` is the fleet's name and the event's thread. Return None if the event neither opens nor ends a thread. For
    example, a breaker may close while its incident is open.
    """
    belongs = thread(event)
    if belongs.action is None:
        return None
    body: dict[str, object] = {
        "routing_key": key,
        "event_action": belongs.action,
        "dedup_key": f"{settings.fleet}:{belongs.key}"[:PAGERDUTY_KEY_MAX],
    }
    if belongs.action == "trigger":
        links = {"Runbook": runbook(event, settings), "Console": settings.console_url}
        about = str(getattr(event.fact, "worker", "") or getattr(event.fact, "subject", ""))
        body |= {
            "payload": {
                "summary": f"{settings.fleet}: {sentence(event.fact)}"[:PAGERDUTY_SUMMARY_MAX],
                "source": settings.fleet,
                "severity": severity(event),
                "timestamp": event.at.isoformat(),
                "component": about or "fleet",
                "class": event.fact.kind(),
                "custom_details": {"event": event.id, "sequence": event.seq, **event.data},
            },
            "links": [{"href": url, "text": name} for name, url in links.items() if url],
            "client": "Holdfast",
        }
        if settings.console_url:
            body["client_url"] = settings.console_url
    return json.dumps(body, ensure_ascii=False).encode()
