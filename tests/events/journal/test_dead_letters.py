"""Dead letters are stored beside the journal, within bounds, and removed after redelivery."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime

import nats
import pytest

from controller.adapters.embedded.server import EmbeddedServer
from events import dead_letters
from events.dead_letters import DeadLetter, DeadLetters, LetterNotStored
from events.nats.connection import BrokerConnection

pytestmark = pytest.mark.servers


@pytest.fixture
async def letters(nats_url: str) -> AsyncIterator[DeadLetters]:
    connection = await BrokerConnection.open(nats_url, "test")
    yield DeadLetters(connection)
    await connection.close()


def letter(id: str, webhook: str = "ops") -> DeadLetter:
    return DeadLetter(
        webhook=webhook,
        reason="it answered 500, 8 times",
        tries=8,
        status=500,
        event={"id": id, "data": {"worker": "w1"}},
        given_up_at=datetime(2026, 1, 1, tzinfo=UTC),
    )


async def ids(of: DeadLetters, webhook: str = "") -> list[str]:
    return [found.event["id"] async for _, found in of.all(webhook)]


async def test_dead_letters_are_found_by_webhook_and_in_order(letters: DeadLetters) -> None:
    assert await ids(letters) == []
    for one in (letter("a"), letter("b", "chat"), letter("c")):
        await letters.bury(one)
    assert await ids(letters) == ["a", "b", "c"]
    assert await ids(letters, "ops") == ["a", "c"] and await ids(letters, "none") == []
    assert [found async for _, found in letters.all("chat")] == [letter("b", "chat")]


async def test_a_letter_stored_twice_is_one_letter_per_webhook(letters: DeadLetters) -> None:
    for one in (letter("a"), letter("a"), letter("a", "chat")):
        await letters.bury(one)
    assert await ids(letters) == ["a", "a"] and await ids(letters, "ops") == ["a"]


async def test_a_deleted_letter_is_gone_and_others_stay(letters: DeadLetters) -> None:
    for id in "abc":
        await letters.bury(letter(id))
    places = [seq async for seq, _ in letters.all()]
    await letters.forget(places[1])
    assert await ids(letters) == ["a", "c"]


async def test_the_stream_is_bounded_and_other_messages_on_it_are_skipped(
    nats_url: str, letters: DeadLetters
) -> None:
    await letters.bury(letter("a"))
    client = await nats.connect(nats_url)
    stream = client.jetstream()
    config = (await stream.stream_info("DEAD_LETTERS")).config
    assert (config.max_msgs, config.max_bytes) == (dead_letters.LETTERS_MAX, dead_letters.BYTES_MAX)
    assert config.max_age == dead_letters.AGE_MAX_S and config.discard == "old"
    await stream.publish("dead.webhook.ops", b"no letter")
    await letters.bury(letter("b"))
    assert await ids(letters) == ["a", "b"]
    await stream.delete_stream("DEAD_LETTERS")
    with pytest.raises(LetterNotStored):
        await letters.bury(letter("c"))
    await letters.bury(letter("c"))  # a retry creates the stream again
    assert await ids(letters) == ["c"]
    await client.close()


async def test_storing_a_letter_fails_while_the_broker_is_unreachable(
    own_nats: EmbeddedServer, letters: DeadLetters
) -> None:
    await letters.bury(letter("a"))
    await own_nats.kill()
    with pytest.raises(LetterNotStored):
        await letters.bury(letter("b"))
