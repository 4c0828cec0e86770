"""Waiting requests are admitted by priority: the best first, in order among equals."""

import asyncio
from random import Random

from hypothesis import given
from hypothesis import strategies as st
from waits import turns

from events.wire import Generate, Sampling
from workers.engines.admission import RequestLimit
from workers.engines.openai.requests import Places
from workers.engines.simulated.sequence import SimulatedSequence, WaitingQueue

PRIORITIES = st.lists(st.integers(0, 3), max_size=20)


def by_priority(priorities: list[int]) -> list[int]:
    return sorted(range(len(priorities)), key=lambda key: priorities[key])


def sequence(key: int, priority: int = 0, *, canary: bool = False) -> SimulatedSequence:
    made = SimulatedSequence(key, 1, 2, canary=canary)
    made.priority = priority
    return made


def taken(queue: WaitingQueue) -> list[int]:
    order = []
    while queue:
        order.append(queue.first.key)
        queue.remove(order[-1])
    return order


@given(PRIORITIES)
def test_the_simulated_engine_admits_by_priority(priorities: list[int]) -> None:
    queue = WaitingQueue()
    for key, priority in enumerate(priorities):
        queue.add(sequence(key, priority))
    assert list(queue) == by_priority(priorities)
    assert len(queue) == len(priorities)
    assert taken(queue) == by_priority(priorities)


def test_canaries_and_preempted_requests_go_before_the_best_priority() -> None:
    queue = WaitingQueue()
    queue.add(sequence(1, 0))
    queue.add(sequence(2, 3))
    queue.put_back(sequence(3, 2))
    queue.add(sequence(4, 3, canary=True))
    assert taken(queue) == [4, 3, 1, 2]
    queue.add(sequence(5, 1))
    queue.clear()
    assert not queue and 5 not in queue and list(queue) == []


@given(PRIORITIES)
def test_a_limited_engine_admits_by_priority(priorities: list[int]) -> None:
    bound = RequestLimit(1, len(priorities))
    assert bound.take(99, request(0)) == "inside"
    for key, priority in enumerate(priorities):
        assert bound.take(key, request(priority)) == "waits"
    bound.forget(99)
    order = []
    while (entered := bound.next()) is not None:
        order.append(entered[0])
        bound.forget(entered[0])
    assert order == by_priority(priorities)


def test_a_limited_engine_admits_started_requests_before_the_best_priority() -> None:
    bound = RequestLimit(1, 3)
    bound.take(0, request(0))
    bound.take(1, request(0))
    bound.take(2, Generate(0, "r", [1, 2, 3], 2, Sampling(4), priority=3))
    bound.forget(0)
    entered = bound.next()
    assert entered is not None and entered[0] == 2


def request(priority: int) -> Generate:
    return Generate(0, "r", [1, 2], 2, Sampling(4), priority=priority)


async def test_upstream_places_go_by_priority_and_a_cancelled_waiter_loses_none() -> None:
    places, order, dice = Places(), list[int](), Random(3)
    places.limit(1)
    priorities = [dice.randrange(4) for _ in range(12)]

    async def use(key: int, priority: int) -> None:
        async with places.one(priority):
            order.append(key)
            await turns()

    async with places.one():
        tasks = [asyncio.create_task(use(key, priority)) for key, priority in enumerate(priorities)]
        await turns()
        tasks[5].cancel()
        await turns()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == [key for key in by_priority(priorities) if key != 5]
    async with asyncio.timeout(1):
        async with places.one():
            pass
