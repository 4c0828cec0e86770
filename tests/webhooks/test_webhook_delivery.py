"""Deliveries to one webhook in virtual time: each event, in order, through crashes and any responses."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from told_events import AT, event, heard
from virtual_clock import VirtualClock

from controller.webhooks.delivery import Delivery, NotifierMetrics
from controller.webhooks.retry_policy import Answer
from controller.webhooks.settings import NotifierSettings, Webhook
from controller.webhooks.templates import WebhookRequest
from events.dead_letters import DeadLetter, LetterNotStored
from events.follow import CannotFollow, FollowedEvent

SETTINGS = NotifierSettings(tries_max=3, hold_s=3_600, wait_min_s=1, wait_max_s=60)


@dataclass
class JournalSaid:
    """The journal, with the position that the broker keeps for this webhook: as `follow` with a durable name."""

    events: list[FollowedEvent]
    taken: int = 0
    begun: list[datetime] = field(default_factory=list)
    fails: list[CannotFollow] = field(default_factory=list)

    async def follow(self, since: datetime) -> AsyncGenerator[FollowedEvent, None]:
        self.begun.append(since)
        if self.fails:
            raise self.fails.pop()
        while True:
            if self.taken == len(self.events):
                await asyncio.Event().wait()
            yield self.events[self.taken]
            self.taken += 1


@dataclass
class World:
    """A receiver that answers as scripted and then accepts everything, the dead letters, and a clock."""

    journal: JournalSaid
    answers: list[int | None] = field(default_factory=list)
    clock: VirtualClock = field(default_factory=lambda: VirtualClock(AT))
    tried: list[tuple[str, int | None]] = field(default_factory=list)
    letters: list[DeadLetter] = field(default_factory=list)
    unburied: int = 0  # times that the broker rejects a letter
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)

    def __post_init__(self) -> None:
        self.metrics = NotifierMetrics(self.registry)

    async def send(self, url: str, request: WebhookRequest) -> Answer:
        status = self.answers.pop(0) if self.answers else 200
        self.tried.append((request.headers["webhook-id"], status))
        return Answer(status, "because")

    async def bury(self, letter: DeadLetter) -> None:
        if self.unburied:
            self.unburied -= 1
            raise LetterNotStored
        self.letters.append(letter)

    def delivery(self) -> Delivery:
        webhook = Webhook(url="http://receiver/", name="ops", kinds=("worker_heard",))
        made = Delivery(
            webhook,
            SETTINGS,
            self.journal.follow,
            self.send,
            self.bury,
            self.clock,
            self.metrics,
        )
        made.chance = lambda: 1.0
        return made

    async def run(self, until: Callable[[], object], steps: int = 5_000, step_s: float = 60.0) -> Delivery:
        """Run one process until `until` holds or `steps` steps of time have passed; then kill it."""
        delivery = self.delivery()
        running = asyncio.create_task(delivery.run())
        for _ in range(steps):
            await self.clock.advance(step_s if not until() else 0)
            if until() or running.done():
                break
        running.cancel()
        await asyncio.wait({running})
        return delivery

    def counted(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, {"webhook": "ops", **labels})


def world(count: int, *answers: int | None) -> World:
    return World(JournalSaid([event(heard(n), n) for n in range(count)]), [*answers])


def all_taken(of: World) -> Callable[[], bool]:
    return lambda: of.journal.taken == len(of.journal.events)


async def test_events_are_delivered_in_order() -> None:
    here = world(5)
    await here.run(all_taken(here))
    assert here.tried == [(f"id-{n}", 200) for n in range(5)] and not here.letters


async def test_events_wait_for_a_receiver_that_is_away() -> None:
    here = world(3, None, 503, 429, 502, None, None)
    await here.run(all_taken(here), step_s=5)
    assert [id for id, _ in here.tried] == ["id-0"] * 7 + ["id-1", "id-2"] and not here.letters


async def test_a_receiver_that_returns_late_gets_the_events_that_are_young_enough() -> None:
    here = world(3, *[None] * 200)
    here.journal.events[2] = event(heard(2), 2, after_s=7_000.0)
    await here.run(lambda: len(here.letters) == 2, step_s=30)
    assert [letter.event["id"] for letter in here.letters] == ["id-0", "id-1"]
    assert (here.clock.now() - AT).total_seconds() == pytest.approx(SETTINGS.hold_s, abs=120)
    assert "older than 3600 s" in here.letters[0].reason and here.letters[1].tries == 1
    here.answers = [None, None]
    await here.run(all_taken(here))
    assert here.tried[-1] == ("id-2", 200)


async def test_a_refused_event_goes_to_the_dead_letters_and_the_next_one_is_delivered() -> None:
    here = world(2, 500, 500, 500)
    await here.run(all_taken(here))
    (letter,) = here.letters
    assert (letter.webhook, letter.status, letter.tries) == ("ops", 500, 3)
    assert letter.event["id"] == "id-0" and letter.event["data"]["worker"] == "w1"
    assert here.tried[-1] == ("id-1", 200)
    assert here.counted("holdfast_webhook_deliveries_total", outcome="failed") == 3
    assert here.counted("holdfast_webhook_deliveries_total", outcome="dead_letter") == 1
    assert here.counted("holdfast_webhook_failures_in_a_row") == 0


async def test_a_dead_letter_waits_for_the_broker() -> None:
    here = world(2, 400, 400, 400)
    here.unburied = 4
    await here.run(all_taken(here), step_s=3)
    assert len(here.letters) == 1 and here.tried[-1] == ("id-1", 200)


async def test_a_stopped_webhook_sends_nothing_and_loses_nothing() -> None:
    here = world(3, 200, 410)
    delivery = await here.run(lambda: False, steps=20)
    assert here.tried == [("id-0", 200), ("id-1", 410)]
    assert "410" in delivery.why_not and here.counted("holdfast_webhook_stopped") == 1
    await here.run(all_taken(here))  # after a restart it is tried again
    assert here.tried[2:] == [("id-1", 200), ("id-2", 200)]


async def test_a_repeated_event_is_delivered_once() -> None:
    here = world(2)
    here.journal.events.insert(1, here.journal.events[0])  # the broker missed the acknowledgement
    await here.run(all_taken(here))
    assert here.tried == [("id-0", 200), ("id-1", 200)]


async def test_delivery_reports_why_the_journal_cannot_be_followed_and_continues_later() -> None:
    here = world(2)
    here.journal.fails = [CannotFollow("the broker is away")] * 3
    delivery = here.delivery()
    running = asyncio.create_task(delivery.run())
    await here.clock.advance(1)
    assert delivery.why_not == "the broker is away"
    await here.clock.advance(10)
    assert here.journal.taken == 2 and not delivery.why_not
    running.cancel()
    await asyncio.wait({running})


async def test_all_new_events_of_a_recreated_stream_are_delivered() -> None:
    here = world(1)
    here.journal.events[0] = event(heard(0), 0, after_s=500.0)
    delivery = here.delivery()
    running = asyncio.create_task(delivery.run())
    await here.clock.advance(1)
    running.cancel()
    await asyncio.wait({running})
    here.journal.fails = [CannotFollow("it is another one")]
    running = asyncio.create_task(delivery.run())
    await here.clock.advance(10)
    running.cancel()
    await asyncio.wait({running})
    assert here.journal.begun[0] == AT
    assert here.journal.begun[-1] == here.journal.events[0].at


async def test_the_age_of_the_current_event_is_visible() -> None:
    here = world(2, *[None] * 9)
    delivery = here.delivery()
    running = asyncio.create_task(delivery.run())
    await here.clock.advance(100)
    delivery.measure()
    assert here.counted("holdfast_webhook_lag_seconds") == 100
    await here.clock.advance(1_000)
    delivery.measure()
    assert here.counted("holdfast_webhook_lag_seconds") == 0
    running.cancel()
    await asyncio.wait({running})


ANSWERS = st.lists(st.sampled_from([200, 204, 302, 400, 404, 408, 429, 500, 503, None]), max_size=60)


@pytest.mark.slow
@given(st.integers(1, 8), ANSWERS, st.lists(st.integers(1, 12), max_size=4))
def test_nothing_is_lost_or_reordered_for_any_responses_and_crashes(
    count: int, answers: Sequence[int | None], crashes: Sequence[int]
) -> None:
    """Each event is accepted by the receiver or among the dead letters; repetitions are of the same event."""

    async def play() -> None:
        here = world(count, *answers)
        for tries in crashes:
            until = len(here.tried) + tries
            await here.run(lambda until=until: len(here.tried) >= until or all_taken(here)())  # type: ignore[misc]
        await here.run(all_taken(here))
        good = [id for id, status in here.tried if status is not None and 200 <= status < 300]
        ids = [one.id for one in here.journal.events]
        dead = [letter.event["id"] for letter in here.letters]
        assert sorted({*good, *dead}) == ids
        order = [id for id, _ in here.tried]
        assert order == sorted(order) and len(good) <= count + len(crashes)

    asyncio.run(play())
