"""Generates the AsyncAPI document of all events and control subjects, by FastStream."""

import re
from typing import Any

from faststream.nats import NatsBroker
from faststream.specification import AsyncAPI

from controller.adapters.control_api import declare
from controller.catalogue import entries
from events import subjects
from events.dead_letters import DeadLetter

DESCRIPTION = """Every fact of a Holdfast fleet, and the operator's control subjects.

Facts are CloudEvents 1.0 in binary mode on the JetStream stream FLEET: the headers `ce-id` (a UUIDv7, also
`Nats-Msg-Id`), `ce-type` (`holdfast.` and the kind), `ce-source`, `ce-time`, `source-number`, and where they apply
`through`, `correlation`, `causation` and `traceparent`; the body is JSON. docs/reference/events.md lists the
guarantees of each kind. Control subjects are core NATS requests with JSON bodies; an answer with `error` is a
refusal. A command has an `id`, chosen by the sender, and a `deadline`, an instant by the broker's clock, which
`$JS.API.STREAM.INFO.FLEET` returns as `ts`. It is carried out once and before its deadline, or refused.
"""


def document() -> str:
    """Return the document as YAML."""
    broker = NatsBroker("nats://localhost:4222")
    declare(broker, None, None)
    for entry in entries():
        broker.publisher(
            re.sub(r"<(\w+)>", r"{\1}", entry.subject),
            schema=entry.fact,
            title=entry.kind,
            description=f"{entry.promise} Emitted by {entry.emitter}.",
        )
    broker.publisher(
        f"{subjects.DEAD}.{{webhook}}",
        schema=DeadLetter,
        title="dead_letter",
        description="An event that a webhook did not accept, on stream DEAD_LETTERS (docs/guides/webhooks.md). Emitted by "
        "the notifier.",
    )
    made: Any = AsyncAPI(broker, title="Holdfast", version="1", description=DESCRIPTION).to_specification()
    parts = (
        (made, "channels"),
        (made, "operations"),
        (made.components, "messages"),
        (made.components, "schemas"),
    )
    for part, name in parts:  # FastStream keeps registrations in a set, so the order differs in every run
        setattr(part, name, dict(sorted(getattr(part, name).items())))
    text: str = made.to_yaml()
    return text
