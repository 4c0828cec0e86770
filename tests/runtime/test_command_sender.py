"""The outcome of a command without an answer: the journal's, and no claim beyond it."""

from collections.abc import AsyncIterator, Callable, Mapping
from datetime import datetime
from typing import Any

import pytest

from controller.adapters.embedded.server import EmbeddedServer
from controller.runtime.command_sender import NotCarriedOut, command
from events.fact import Observation
from events.journal.nats import NatsJournal
from events.nats.bus import Answer, BusUnavailable, NatsBus, NoAnswer, NoSubscriber
from events.observations import CommandRefused, DrainRequested

pytestmark = pytest.mark.servers
WITHIN_S = 0.3
Heard = Callable[[Mapping[str, Any]], Answer]


class Controller:
    """Receives drains over a real broker, and handles them as the test defines."""

    def __init__(self, server: EmbeddedServer, bus: NatsBus, journal: NatsJournal) -> None:
        self.server, self.bus, self.journal = server, bus, journal
        self.heard: list[Mapping[str, Any]] = []

    async def hear(self, does: Heard) -> None:
        """Subscribe with this behaviour."""

        def on_drain(_: str, body: Mapping[str, Any]) -> Answer:
            self.heard.append(body)
            return does(body)

        await self.bus.subscribe("control.drain", on_drain)
        await self.bus.connection.client.flush()

    def say(self, fact: Observation) -> None:
        """Publish a fact to the journal, without an answer."""
        self.journal.observe(fact)

    async def ask(self) -> dict[str, Any]:
        """Send a drain as an operator does."""
        return await command(self.bus, self.server.url, "drain", {"worker": "w1", "by": "ada"}, WITHIN_S)


@pytest.fixture
async def controller(own_nats: EmbeddedServer) -> AsyncIterator[Controller]:
    bus = await NatsBus.connect(own_nats.url, "operator")
    journal = await NatsJournal.connect(own_nats.url, "controller:one")
    yield Controller(own_nats, bus, journal)
    await bus.close()
    await journal.close()


def asked_for(body: Mapping[str, Any], **more: Any) -> DrainRequested:
    deadline = datetime.fromisoformat(body["deadline"])
    return DrainRequested(worker="w1", instance="i", command=body["id"], until=deadline, **more)


async def test_a_command_has_an_id_and_a_deadline_by_the_brokers_clock(controller: Controller) -> None:
    await controller.hear(lambda body: {"says": "done"})
    before = (await controller.journal.end()).at
    assert await controller.ask() == {"says": "done"}
    after = (await controller.journal.end()).at
    (body,) = controller.heard
    left = datetime.fromisoformat(body["deadline"])
    assert before < left and (left - after).total_seconds() < WITHIN_S
    assert len(body["id"]) >= 8 and (body["worker"], body["by"]) == ("w1", "ada")
    await controller.ask()
    assert controller.heard[0]["id"] != controller.heard[1]["id"]


async def test_a_command_that_was_carried_out_without_an_answer_is_reported_as_done(
    controller: Controller,
) -> None:
    await controller.hear(lambda body: controller.say(asked_for(body, deadline_s=30)))
    assert await controller.ask() == {"says": "w1 will drain within 30 s"}


async def test_a_refusal_that_is_only_on_the_journal_is_reported(controller: Controller) -> None:
    await controller.hear(
        lambda body: controller.say(
            CommandRefused(worker="w1", verb="drain", command=body["id"], why="w1 is dead")
        )
    )
    assert await controller.ask() == {"error": "w1 is dead"}


async def test_a_command_without_a_fact_by_its_deadline_is_reported_as_never_carried_out(
    controller: Controller,
) -> None:
    await controller.hear(lambda body: controller.say(asked_for({**body, "id": "another-command"})))
    with pytest.raises(NotCarriedOut, match=r"within 0\.3 s, and none will carry it out any more"):
        await controller.ask()


async def test_a_fact_after_the_deadline_does_not_count_as_carried_out(controller: Controller) -> None:
    def late(body: Mapping[str, Any]) -> None:
        controller.say(asked_for({**body, "deadline": "2026-01-01T00:00:00Z"}))

    await controller.hear(late)
    with pytest.raises(NotCarriedOut):
        await controller.ask()


async def test_an_unknown_outcome_is_reported_as_unknown(controller: Controller) -> None:
    def dies(body: Mapping[str, Any]) -> None:
        controller.server.process.kill()

    await controller.hear(dies)
    with pytest.raises(NoAnswer, match="whether drain was carried out is unknown") as raised:
        await controller.ask()
    assert not isinstance(raised.value, NotCarriedOut)


async def test_without_a_controller_the_command_is_reported_as_not_received(controller: Controller) -> None:
    with pytest.raises(NoSubscriber):
        await controller.ask()
    assert not isinstance(NoSubscriber(), BusUnavailable)
