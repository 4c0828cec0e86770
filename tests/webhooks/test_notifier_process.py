"""A real notifier, broker and receiver: nothing is lost or reordered, whichever of them fails."""

import asyncio
import json
import re
import signal
from collections.abc import AsyncIterator
from itertools import groupby
from pathlib import Path

import pytest
from nats.aio.msg import Msg
from notifier_world import KEY, NotifierWorld, notifying
from standardwebhooks import Webhook as Verifier
from typed_commands import run_command
from waits import until
from webhook_receiver import Act, Received, Receiver, receiving

from events.versions import Known

pytestmark = pytest.mark.servers


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[NotifierWorld]:
    async with notifying(tmp_path) as made:
        yield made


def verified(receiver: Receiver) -> list[str]:
    """Return the ids of accepted events, each signed, without immediate repetitions (the same id is the same event)."""
    for one in receiver.all:
        said = Verifier(KEY).verify(one.body, one.headers)
        assert said["id"] == one.id and one.headers["content-type"] == "application/cloudevents+json"
    return [id for id, _ in groupby(receiver.ids)]


@pytest.mark.slow
async def test_a_receiver_that_fails_in_every_way_gets_all_in_order(world: NotifierWorld) -> None:
    ways: list[Act] = [500, "stall", "drop", (429, {"Retry-After": "0"}), 503, 302, 404, "half", 502]
    async with receiving(*(act for way in ways for act in (way, 200))) as receiver:
        await world.notify({"url": f"{receiver.url}/told"}, TIMEOUT_S="0.4")
        ids = await world.say(*range(len(ways) + 3))
        await receiver.until(lambda: set(ids) <= {*receiver.ids})
        assert verified(receiver) == ids
        assert {one.path for one in receiver.all} == {"/told"}


@pytest.mark.slow
async def test_nothing_is_lost_by_a_notifier_that_is_killed_twice(world: NotifierWorld) -> None:
    def act(received: Received) -> Act:
        return 503 if len(receiver.all) % 3 == 1 else 200

    async with receiving() as receiver:
        receiver.act = act
        await world.notify({"url": receiver.url})
        ids = await world.say(*range(10))
        for wanted in (3, 7):
            await receiver.until(lambda wanted=wanted: len(set(receiver.ids)) >= wanted)  # type: ignore[misc]
            assert await world.end() == -signal.SIGKILL
            ids += await world.say(100 + wanted)
            await world.notify({"url": receiver.url})
        await receiver.until(lambda: set(ids) <= {*receiver.ids})
        assert verified(receiver) == ids


@pytest.mark.slow
async def test_a_stopping_notifier_finishes_its_try_and_sends_nothing_twice(
    world: NotifierWorld,
) -> None:
    async with receiving(going_on := asyncio.Event()) as receiver:
        await world.notify({"url": receiver.url})
        ids = await world.say(1, 2)
        await receiver.until(lambda: receiver.all)
        ending = asyncio.create_task(world.end(signal.SIGTERM))
        await world.asked("/live")  # it has the signal by the time of its response, or this proves nothing
        going_on.set()
        assert await ending == 0
        await world.notify({"url": receiver.url})
        await receiver.until(lambda: set(ids) <= {*receiver.ids})
        assert receiver.ids == ids


@pytest.mark.slow
async def test_an_idle_notifier_stops_at_once(world: NotifierWorld) -> None:
    async with receiving() as receiver:
        await world.notify({"url": receiver.url})
        (id,) = await world.say(1)
        await receiver.until(lambda: receiver.ids == [id])
        assert await world.end(signal.SIGTERM) == 0


@pytest.mark.slow
async def test_the_notifier_waits_for_a_broker_that_dies(world: NotifierWorld) -> None:
    async with receiving() as receiver:
        await world.notify({"url": receiver.url})
        ids = await world.say(1, 2)
        await receiver.until(lambda: ids[0] in receiver.ids)
        await world.broker_dies_and_comes_back()
        ids += await world.say(3, 4)
        await receiver.until(lambda: set(ids) <= {*receiver.ids})
        assert list(dict.fromkeys(verified(receiver))) == ids, "the event sent right before may be sent again"


@pytest.mark.slow
async def test_a_refused_event_becomes_a_dead_letter_that_can_be_sent_again(world: NotifierWorld) -> None:
    at_broker = {"HOLDFAST_NATS_URL": world.url, "HOLDFAST_DATA": str(world.data)}
    async with receiving() as receiver:
        refused: set[str] = set()

        def act(received: Received) -> Act:
            return 400 if json.loads(received.body)["data"]["instance"] in refused else 200

        receiver.act, refused = act, {"i1", "i3"}
        await world.notify({"url": receiver.url})
        ids = await world.say(*range(5))
        await receiver.until(lambda: ids[4] in receiver.ids)
        assert receiver.ids == [ids[0], ids[2], ids[4]]
        listed = await asyncio.to_thread(run_command, ("webhooks", "dead", "-o", "json"), at_broker)
        letters = [json.loads(line) for line in listed.stdout.splitlines()]
        assert [(one["event"]["id"], one["status"], one["tries"]) for one in letters] == [
            (ids[1], 400, 3),
            (ids[3], 400, 3),
        ]
        refused = {"i3"}
        again = ("webhooks", "resend", receiver.url, "--secret-file", str(world.folder / "secret"))
        done = await asyncio.to_thread(run_command, again, at_broker)
        assert done.returncode == 1 and done.stdout.endswith("1 accepted, 1 not accepted\n"), done.stderr
        assert receiver.ids[-1] == ids[1]
        shown = await asyncio.to_thread(run_command, ("webhooks", "dead", "--webhook", "ops"), at_broker)
        assert ids[3] in shown.stdout and "it answered 400, 3 times" in shown.stdout
        assert shown.stdout.endswith("1 dead letter\n")
        refused = set()
        assert (await asyncio.to_thread(run_command, again, at_broker)).returncode == 0
        none = await asyncio.to_thread(run_command, ("webhooks", "dead"), at_broker)
        assert none.stdout == "no dead letters\n"
        assert {*receiver.ids} == {*ids} and len(verified(receiver)) == 5


@pytest.mark.slow
async def test_a_receiver_that_answers_410_gets_no_more_events_and_this_is_visible(
    world: NotifierWorld,
) -> None:
    async with receiving(200, 410) as gone, receiving() as other:
        await world.notify({"url": gone.url}, {"url": other.url, "name": "other"})
        ids = await world.say(1, 2, 3)
        await other.until(lambda: set(ids) <= {*other.ids})
        await gone.until(lambda: len(gone.all) == 2)

        async def stopped() -> str:
            ready = await world.asked("/ready")
            return ready if "410" in ready else ""

        said = json.loads(await until(stopped))
        assert not said["ready"] and "410 Gone" in said["webhooks"]["ops"] and said["webhooks"]["other"] == ""
        metrics = await world.asked("/metrics")
        assert 'holdfast_webhook_stopped{webhook="ops"} 1.0' in metrics
        assert 'holdfast_webhook_deliveries_total{outcome="delivered",webhook="other"} 3.0' in metrics
        assert re.search(
            r'holdfast_webhook_last_success_timestamp_seconds{webhook="other"} 1\.[0-9]+e\+09', metrics
        )
        assert len(gone.all) == 2


@pytest.mark.slow
async def test_changed_kinds_apply_from_the_current_position(world: NotifierWorld) -> None:
    async with receiving() as receiver:
        await world.notify({"url": receiver.url})
        (first,) = await world.say(1)
        await receiver.until(lambda: first in receiver.ids)
        await world.end(signal.SIGTERM)
        (second,) = await world.say(2)
        await world.notify({"url": receiver.url, "kinds": ["worker_heard", "worker_silent"]})
        await receiver.until(lambda: second in receiver.ids)
        assert receiver.ids == [first, second]


@pytest.mark.slow
async def test_a_notifier_announces_which_kinds_it_knows_and_that_it_leaves(world: NotifierWorld) -> None:
    announced: asyncio.Queue[dict[str, object]] = asyncio.Queue()

    async def on_known(message: Msg) -> None:
        announced.put_nowait(json.loads(message.data))

    await world.journal.connection.subscribe("live.known.notifier.*", on_known)
    async with receiving() as receiver, asyncio.timeout(60):
        await world.notify({"url": receiver.url})
        first = await announced.get()
        assert Known.of_body(first) == Known.ours() and not first["left"]
        assert await world.end(signal.SIGTERM) == 0
        while not (await announced.get())["left"]:
            pass
