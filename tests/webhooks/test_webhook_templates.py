"""The bodies posted: CloudEvents, Slack messages and PagerDuty events, signed by Standard Webhooks."""

import base64
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from standardwebhooks import Webhook as Verifier
from standardwebhooks import WebhookVerificationError
from told_events import AT, breaker, closed, event, heard, level, opened, panic, shut

from controller.replay.sentences import sentence
from controller.webhooks import cloud_event
from controller.webhooks.message_context import RUNBOOKS, runbook, severity, thread
from controller.webhooks.settings import DEFAULT_KINDS, NotifierSettings
from controller.webhooks.templates import WebhookRequest, pagerduty, request, slack
from events import codec
from events.fact import Fact
from events.observations import CanaryFailed, GoldenDisputed

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "tests" / "events" / "facts" / "samples"
WORDING = NotifierSettings(
    fleet="prod", runbooks_url="https://docs/runbooks/", console_url="https://grafana/d/1"
)
ROUTING_KEY = "R" * 32
# https://developer.pagerduty.com/docs/send-alert-event
PAGERDUTY: dict[str, Any] = {
    "type": "object",
    "required": ["routing_key", "event_action"],
    "additionalProperties": False,
    "properties": {
        "routing_key": {"type": "string", "minLength": 32, "maxLength": 32},
        "event_action": {"enum": ["trigger", "acknowledge", "resolve"]},
        "dedup_key": {"type": "string", "maxLength": 255},
        "payload": {
            "type": "object",
            "required": ["summary", "source", "severity"],
            "additionalProperties": False,
            "properties": {
                "summary": {"type": "string", "maxLength": 1024},
                "source": {"type": "string", "minLength": 1},
                "severity": {"enum": ["critical", "error", "warning", "info"]},
                "timestamp": {"type": "string", "format": "date-time"},
                "component": {"type": "string"},
                "group": {"type": "string"},
                "class": {"type": "string"},
                "custom_details": {"type": "object"},
            },
        },
        "links": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["href"],
                "properties": {"href": {"type": "string"}, "text": {}},
            },
        },
        "images": {"type": "array"},
        "client": {"type": "string"},
        "client_url": {"type": "string"},
    },
    "if": {"properties": {"event_action": {"const": "trigger"}}},
    "then": {"required": ["payload"]},
    "else": {"required": ["dedup_key"]},
}
# https://docs.slack.dev/reference/block-kit/blocks
MRKDWN: dict[str, Any] = {
    "type": "object",
    "required": ["type", "text"],
    "additionalProperties": False,
    "properties": {
        "type": {"const": "mrkdwn"},
        "text": {"type": "string", "minLength": 1, "maxLength": 3000},
    },
}
SLACK: dict[str, Any] = {
    "type": "object",
    "required": ["text", "blocks"],
    "additionalProperties": False,
    "properties": {
        "text": {"type": "string", "minLength": 1, "maxLength": 40000},
        "blocks": {
            "type": "array",
            "maxItems": 50,
            "items": {
                "oneOf": [
                    {
                        "required": ["type", "text"],
                        "additionalProperties": False,
                        "properties": {"type": {"const": "section"}, "text": MRKDWN},
                    },
                    {
                        "required": ["type", "elements"],
                        "additionalProperties": False,
                        "properties": {
                            "type": {"const": "context"},
                            "elements": {"type": "array", "minItems": 1, "maxItems": 10, "items": MRKDWN},
                        },
                    },
                ]
            },
        },
    },
}


def every_fact() -> list[Fact]:
    """Return one fact of each kind."""
    found = []
    for kind in codec.KINDS.values():
        sample = json.loads((SAMPLES / f"{kind.kind()}.json").read_text())
        found.append(msgspec.convert(sample["body"], kind))
    return found


FACTS = every_fact()


def paged(fact: Fact) -> dict[str, Any]:
    body = pagerduty(event(fact), WORDING, ROUTING_KEY)
    assert body is not None
    found: dict[str, Any] = json.loads(body)
    return found


# --- the shapes -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: fact.kind())
def test_every_kind_has_the_shape_that_each_receiver_expects(fact: Fact) -> None:
    said = event(fact)
    jsonschema.validate(json.loads(slack(said, WORDING)), SLACK)
    page = pagerduty(said, WORDING, ROUTING_KEY)
    if page is not None:
        jsonschema.validate(json.loads(page), PAGERDUTY)
    body = json.loads(cloud_event.written(said))
    schema = json.loads((ROOT / "docs" / "reference" / "schemas" / "v1" / f"{fact.kind()}.json").read_text())
    jsonschema.validate(body["data"], schema)
    assert schema["$id"] == body["dataschema"]
    assert cloud_event.event_of(body) == said


def test_a_cloud_event_has_the_required_attributes() -> None:
    body = json.loads(cloud_event.written(event(opened(), 41)))
    assert {name: body[name] for name in ("specversion", "id", "type", "source", "subject", "sequence")} == {
        "specversion": "1.0",
        "id": "id-41",
        "type": "holdfast.incident_opened",
        "source": "controller:c:1",
        "subject": "fleet.decided.incident_opened",
        "sequence": "41",
    }
    assert body["correlation"] == "incident-7" and body["data"]["symptom"] == "token_mismatch"
    assert datetime.fromisoformat(body["time"]) == datetime.fromisoformat(body["recordedtime"]) == AT
    assert all(name.isalnum() and name == name.lower() and len(name) <= 20 for name in body)


def test_an_invalid_event_cannot_be_sent_again() -> None:
    good = cloud_event.attributes(event(opened()))
    for wrong in ({}, {**good, "type": "holdfast.no_such"}, {**good, "data": {}}, {**good, "sequence": "x"}):
        with pytest.raises(ValueError, match="not an event"):
            cloud_event.event_of(wrong)


# --- Slack ------------------------------------------------------------------------------------------------------------


def test_slack_gets_one_sentence_and_links() -> None:
    said = json.loads(slack(event(breaker()), WORDING))
    assert said["text"] == "prod: the breaker of w1 opened for 60 s (timeout)"
    (about,) = said["blocks"][1]["elements"]
    assert "<https://docs/runbooks/HoldfastBreakerFlapping.md|runbook>" in about["text"]
    assert "<https://grafana/d/1|console>" in about["text"] and "incident-7" in about["text"]


def test_names_are_escaped_for_slack() -> None:
    said = slack(
        event(opened(subject="worker:<!channel>&", symptom="<http://evil|ok>")), NotifierSettings()
    ).decode()
    assert "<!channel>" not in said and "<http" not in said
    assert "&lt;!channel&gt;&amp;" in said


def test_a_long_sentence_fits() -> None:
    jsonschema.validate(json.loads(slack(event(opened(symptom="x" * 50_000)), WORDING)), SLACK)
    assert len(paged(opened(symptom="x" * 50_000))["payload"]["summary"]) == 1024


# --- PagerDuty --------------------------------------------------------------------------------------------------------


def test_a_recovery_resolves_the_alert_of_its_incident() -> None:
    assert [
        (said["event_action"], said["dedup_key"]) for said in map(paged, (opened(), breaker(), closed()))
    ] == [
        ("trigger", "prod:incident-7"),
        ("trigger", "prod:incident-7"),
        ("resolve", "prod:incident-7"),
    ]
    assert paged(opened("incident-8"))["dedup_key"] == "prod:incident-8"


def test_a_breaker_that_closes_within_an_incident_resolves_nothing() -> None:
    assert pagerduty(event(shut()), WORDING, ROUTING_KEY) is None
    assert paged(shut(""))["event_action"] == "resolve"
    assert paged(shut(""))["dedup_key"] == paged(breaker(""))["dedup_key"] == "prod:worker:w1"


def test_an_alert_without_an_incident_is_resolved_by_its_own_end() -> None:
    assert thread(event(panic(False))).key == thread(event(panic(True))).key
    assert [thread(event(panic(ended))).action for ended in (False, True)] == ["trigger", "resolve"]
    assert [thread(event(level(*moves))).action for moves in ((0, 2), (2, 1))] == ["trigger", "resolve"]


def test_a_page_has_a_severity() -> None:
    assert [severity(event(level(0, after))) for after in (0, 1, 2, 3, 4)] == [
        *("info", "warning", "warning", "critical", "critical")
    ]
    assert severity(event(opened())) == "error" and severity(event(heard(1))) == "info"
    said = paged(breaker())
    assert said["payload"]["component"] == "w1" and said["payload"]["class"] == "breaker_opened"
    assert said["payload"]["summary"] == f"prod: {sentence(breaker())}"
    assert said["client_url"] == "https://grafana/d/1"


# --- default kinds and links -----------------------------------------------------------------------------------


def test_the_default_kinds_exist_and_have_sentences() -> None:
    assert set(DEFAULT_KINDS) <= set(codec.KINDS) and {CanaryFailed.kind()}.isdisjoint(DEFAULT_KINDS)
    assert GoldenDisputed.kind() in DEFAULT_KINDS


def test_runbooks_exist() -> None:
    assert set(RUNBOOKS) <= set(codec.KINDS)
    for page in RUNBOOKS.values():
        assert (ROOT / "docs" / "operations" / "runbooks" / f"{page}.md").exists()
    assert runbook(event(breaker()), NotifierSettings()) == "" and runbook(event(heard(1)), WORDING) == ""


# --- signatures -------------------------------------------------------------------------------------------------------


def now() -> int:
    """Return the present time, because verifiers reject old signatures."""
    return int(datetime.now(UTC).timestamp())


KEYS = [f"whsec_{base64.b64encode(bytes([n]) * 32).decode()}" for n in range(3)]


def signed(secret: str) -> WebhookRequest:
    made = request("cloudevents", event(opened()), WORDING, secret, now())
    assert made is not None
    return made


def test_the_signature_is_verified_by_the_standard_webhooks_library() -> None:
    made = signed(KEYS[0])
    assert Verifier(KEYS[0]).verify(made.body, made.headers)["id"] == "id-1" == made.headers["webhook-id"]
    with pytest.raises(WebhookVerificationError):
        Verifier(KEYS[1]).verify(made.body, made.headers)
    for name, value in (
        ("webhook-id", "id-2"),
        ("webhook-timestamp", str(int(made.headers["webhook-timestamp"]) - 1)),
    ):
        with pytest.raises(WebhookVerificationError):
            Verifier(KEYS[0]).verify(made.body, {**made.headers, name: value})
    with pytest.raises(WebhookVerificationError):
        Verifier(KEYS[0]).verify(made.body + b" ", made.headers)


def test_while_a_key_is_replaced_both_sign() -> None:
    made = signed(f"{KEYS[0]}\n{KEYS[1]}\n")
    for key in KEYS[:2]:
        assert Verifier(key).verify(made.body, made.headers)
    with pytest.raises(WebhookVerificationError):
        Verifier(KEYS[2]).verify(made.body, made.headers)


def test_without_a_key_nothing_is_signed_and_pagerduty_gets_its_own() -> None:
    assert "webhook-signature" not in signed("").headers
    page = request("pagerduty", event(opened()), WORDING, ROUTING_KEY, now())
    assert page is not None and json.loads(page.body)["routing_key"] == ROUTING_KEY
    assert "webhook-signature" not in page.headers
