"""What does a webhook's request say? By its template, and signed where the template is not a vendor's own."""

from dataclasses import dataclass

from controller.webhooks import cloud_event, pagerduty, secrets, signature, slack
from controller.webhooks.settings import TemplateName
from controller.webhooks.wording import FleetWording
from events.follow import FollowedEvent


@dataclass(frozen=True, slots=True)
class WebhookRequest:
    """What is posted."""

    headers: dict[str, str]
    body: bytes


def request(
    template: TemplateName, event: FollowedEvent, wording: FleetWording, secret: str, timestamp: int
) -> WebhookRequest | None:
    """Return what is posted of an event; None: it is nothing for this template. `secret`: the text of the secret file, empty
    without one; `timestamp`: Unix seconds. Raise ValueError for a secret that is none."""
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
