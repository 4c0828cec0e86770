"""The Slack template (incoming webhooks): one sentence, and blocks with links and details.

{"text": SENTENCE, "blocks": [section, context]}    https://docs.slack.dev/messaging/sending-messages-using-incoming-webhooks
"""

import json

from controller.replay.sentences import sentence
from controller.webhooks.message_context import FleetWording, severity
from events.follow import FollowedEvent

TEXT_MAX = 3_000  # characters of a block's text
TYPE = "application/json"


def written(event: FollowedEvent, wording: FleetWording) -> bytes:
    """Return the request body."""
    summary = _escaped(sentence(event.fact))
    title = f"{_escaped(wording.fleet)}: {summary}"
    linked = {"runbook": wording.runbook(event), "console": wording.console_url}
    links = [f"<{_in_link(url)}|{name}>" for name, url in linked.items() if url]
    when = int(event.at.timestamp())
    stamp = f"<!date^{when}^{{date_num}} {{time_secs}}|{event.at:%Y-%m-%d %H:%M:%S} UTC>"
    about = [
        severity(event),
        event.fact.kind(),
        stamp,
        *([event.correlation] if event.correlation else []),
        *links,
    ]
    return json.dumps(
        {
            "text": _short(title),
            "blocks": [
                {
                    "type": "section",
                    "text": {"type": "mrkdwn", "text": _short(f"*{_escaped(wording.fleet)}* {summary}")},
                },
                {"type": "context", "elements": [{"type": "mrkdwn", "text": _short(" · ".join(about))}]},
            ],
        },
        ensure_ascii=False,
    ).encode()


def _escaped(text: str) -> str:
    """Return a text without Slack markup: names in it may come from a third party."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _in_link(url: str) -> str:
    return _escaped(url).replace("|", "%7C")


def _short(text: str) -> str:
    return text if len(text) <= TEXT_MAX else f"{text[: TEXT_MAX - 1]}…"
