"""Builds a webhook's request by its template, signed unless the template is a vendor's own."""

from dataclasses import dataclass

from controller.webhooks import cloud_event, pagerduty, secrets, signature, slack
from controller.webhooks.message_context import FleetWording
from controller.webhooks.settings import TemplateName
from events.follow import FollowedEvent


@dataclass(frozen=True, slots=True)
class WebhookRequest:
    """A request to post."""

    headers: dict[str, str]
    body: bytes


def request(
    template: TemplateName, event: FollowedEvent, wording: FleetWording, secret: str, timestamp: int
) -> WebhookRequest | None:
    """Return the request for an event; None if the template has no message for it. Raise ValueError for an invalid secret.

    `secret`: the text of the secret file, empty without one; `timestamp`: Unix seconds.
    """
    match template:
        case "pagerduty":
            body, kind = pagerduty.written(event, wording, secrets.routing_key(secret)), pagerduty.TYPE
        case "slack":
            body, kind = slack.written(event, wording), slack.TYPE
        case _:
            body, kind = cloud_event.written(event), cloud_event.TYPE
    if body is None:
        return None
    keys = secrets.keys_of(secret) if secret and template != "pagerduty" else ()
    return WebhookRequest({"Content-Type": kind, **signature.headers(keys, event.id, timestamp, body)}, body)
