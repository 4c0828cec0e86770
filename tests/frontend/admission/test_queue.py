"""The queue of `Admission`, in virtual time: order, bound, time limit, and how requests leave it.

The pure queue is tested in `test_pure_queue`.
"""

import asyncio
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from frontend_kit import joined
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_worker import ScriptedWorker
from waits import turns

from benchmarks.virtual_loop import VirtualLoop
from controller.frontend.admission.admission import LOOKS_MAX, Admission, Reservation
from controller.frontend.admission.refusals import Refusals, WaitedTooLong
from controller.frontend.errors import ApiError
from controller.frontend.settings import AdmissionSettings, FrontendSettings
from controller.router.endpoints import Endpoint, EndpointTable, Key, Lineage
from controller.router.load.monitor import NOTHING
from controller.router.selection.filter import AllBusy, NoneRoutable

LOOP = VirtualLoop
ELSEWHERE = (("other", "1"),)  # a request that must avoid this worker finds no room


class Workers:
    """A worker with this many slots, and its admission queue.

    Implements what `Admission` uses of the router, the load monitor, the traffic report and the metrics.
    """

    asked = NOTHING

    def __init__(self, places: int, queue_s: float = 5.0) -> None:
        self.places, self.dead, self.looks = places, False, 0
        self.endpoint = Endpoint(joined(ScriptedWorker("w1")))
        self.ended: list[tuple[str, str]] = []
        self.monitor: object = self
        self.now = lambda: 0.0
        me: Any = self
        given = FrontendSettings(admission=AdmissionSettings(queue_max=3, queue_s=queue_s))
        table = EndpointTable()
        refusals = Refusals("f1", given, table, me, me, lambda: 0.5)
        self.queue = Admission(given, table, me, refusals, me, me)

    @property
    def free(self) -> int:
        return self.places - self.endpoint.kept.requests

    def room(self, model: str, lineage: Lineage | None = None, without: Collection[Key] = ()) -> Endpoint:
        self.looks += 1
        if self.dead:
            raise NoneRoutable
        if without or not self.free:
            raise AllBusy
        return self.endpoint

    def overloaded(self, model: str) -> bool:
        return False

    def rejected(self, fact: object) -> None:
        pass

    def waited(self, model: str, outcome: str, seconds: float) -> None:
        self.ended.append((model, outcome))

    def again(self, wait_s: float = 5.0, without: Collection[Key] = ()) -> "asyncio.Future[Reservation]":
        return self.queue.again("m", self.endpoint.lineage, wait_s, without)

    def enter(self, model: str = "m") -> "asyncio.Task[Reservation]":
        return asyncio.create_task(self.queue.admit(model, "standard"))


@contextmanager
def no_request_left(workers: Workers, places: int) -> Iterator[None]:
    """Check that in the end no request waits and no slot is lost."""
    yield
    assert workers.queue.queued("m") == 0
    assert workers.free == places


async def test_requests_are_served_in_order_of_arrival_even_if_several_slots_become_free_at_once() -> None:
    w = Workers(2)
    with no_request_left(w, 2):
        one, two = await w.enter(), await w.enter()
        waiting = [w.enter() for _ in range(3)]
        await turns(4)
        assert w.queue.queued("m") == 3
        one.free()
        two.free()
        assert not any(task.done() for task in waiting), (
            "in this turn the room may still be used by the admitted request"
        )
        await turns(4)
        assert [task.done() for task in waiting] == [True, True, False]
        late = w.enter()
        await turns(4)
        waiting[0].result().free()
        await turns(4)
        assert waiting[2].done()
        assert not late.done(), "no request overtakes"
        waiting[1].result().free()
        waiting[2].result().free()
        (await late).free()
    assert w.ended == [("m", "admitted")] * 4


async def test_room_used_in_the_same_turn_is_not_granted_again() -> None:
    w = Workers(1)
    one = await w.enter()
    waiting = w.enter()
    await turns(4)
    one.free()
    w.places -= 1  # its generations are launched
    await turns(4)
    assert not waiting.done()
    w.places += 1
    w.queue.wake()
    (await waiting).free()


async def test_a_full_queue_and_an_expired_wait_are_refused() -> None:
    w = Workers(1, queue_s=0.01)
    with no_request_left(w, 1):
        one = await w.enter()
        waiting = [w.enter() for _ in range(3)]
        await turns(4)
        with pytest.raises(ApiError, match="3 requests are already waiting for a worker") as full:
            await w.enter()
        assert full.value.code == "queue_full"
        for task in waiting:
            with pytest.raises(ApiError, match=r"within 0\.01 s") as late:
                await task
            assert late.value.code == "queue_timeout"
        assert w.queue.queued("m") == 0, "a refused request has left the queue"
        one.free()
    assert w.ended == [("m", "timeout")] * 3


async def test_a_client_that_disconnects_leaves_the_queue_even_after_its_turn_has_come() -> None:
    w = Workers(1)
    with no_request_left(w, 1):
        one = await w.enter()
        first, second, third = (w.enter() for _ in range(3))
        await turns(4)
        second.cancel()
        one.free()
        await turns()  # the first has its slot but has not been notified yet
        first.cancel()
        (await third).free()
        await asyncio.gather(first, second, return_exceptions=True)
    assert sorted(w.ended) == [("m", "admitted"), ("m", "gone"), ("m", "gone")]


async def test_requests_in_a_queue_without_workers_are_refused_at_once() -> None:
    w = Workers(1)
    one = await w.enter()
    waiting = [w.enter(), w.enter()]
    await turns(4)
    w.dead = True
    w.queue.wake()
    for task in waiting:
        with pytest.raises(ApiError) as refused:
            await task
        assert refused.value.code == NoneRoutable.code
    one.free()


async def test_models_do_not_wait_for_each_other() -> None:
    w = Workers(0)
    busy = w.enter("a")
    await turns(4)
    w.places = 1
    (await w.enter("b")).free()
    await turns(4)
    assert not busy.done(), "the room was for the other model"
    w.queue.wake("a")
    (await busy).free()


async def test_a_sent_back_request_comes_before_the_others() -> None:
    w = Workers(1)
    with no_request_left(w, 1):
        one = await w.enter()
        waiting = w.enter()
        await turns(4)
        back = [w.again(), w.again()]
        late = w.enter()
        assert w.queue.waiting() == {"m": 3}, "the last one does not wait yet"
        for first in back:
            one.free()
            one = await first
            await turns(4)
            assert not waiting.done()
        one.free()
        (await waiting).free()
        (await late).free()
    assert w.ended == [("m", "admitted")] * 4


async def test_a_sent_back_request_bound_to_a_busy_worker_blocks_no_other() -> None:
    w = Workers(0)
    back, waiting = w.again(without=ELSEWHERE), w.enter()
    await turns(4)
    w.places = 1
    w.queue.wake("m")
    (await waiting).free()
    (await w.enter()).free()
    assert not back.done()
    back.cancel()
    await turns(4)
    assert w.queue.waiting() == {}
    assert w.ended == [("m", "admitted"), ("m", "admitted"), ("m", "gone")]


async def test_a_second_wait_ends_by_its_deadline_by_the_workers_end_and_by_the_frontends_shutdown() -> None:
    w = Workers(0)
    with no_request_left(w, 0):
        with pytest.raises(WaitedTooLong, match=r"within 0\.01 s"):
            await w.again(0.01)
        back = w.again()
        w.dead = True
        with pytest.raises(NoneRoutable):
            await back
        w.dead = False
        back = w.again()
        w.queue.refuse_all()
        with pytest.raises(WaitedTooLong, match="before this frontend shut down"):
            await back
        await turns(4)
    assert w.ended == [("m", "timeout"), ("m", "no_worker"), ("m", "timeout")]


async def test_many_sent_back_requests_without_room_cost_little_at_a_time() -> None:
    w = Workers(0)
    back = [w.again() for _ in range(100)]
    await turns(4)
    assert w.looks == LOOKS_MAX
    for turn in back:
        turn.cancel()
    await turns(4)
    assert w.queue.waiting() == {}


@settings(max_examples=25)
@given(st.lists(st.sampled_from(["enter", "free", "cancel", "turn"]), max_size=30))
def test_slots_are_conserved_and_the_order_holds_for_any_sequence_of_events(steps: list[str]) -> None:
    asyncio.run(play(steps))


async def play(steps: list[str]) -> None:
    w = Workers(2)
    tasks: list[asyncio.Task[Reservation]] = []
    held: list[Reservation] = []
    for step in steps:
        if step == "enter":
            tasks.append(w.enter())
        elif step == "free" and held:
            held.pop().free()
        elif step == "cancel" and tasks:
            tasks[-1].cancel()
        else:
            await turns(4)
        done = [task for task in tasks if task.done()]
        granted = [n for n, task in enumerate(tasks) if task in done and not failed(task)]
        waiting = [n for n, task in enumerate(tasks) if task not in done and not task.cancelling()]
        assert not granted or not waiting or max(granted) < min(waiting), "a request was overtaken"
        held += [task.result() for task in done if not failed(task)]
        tasks = [task for task in tasks if task not in done]
    for task in tasks:
        task.cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    for place in held + [one for one in ended if isinstance(one, Reservation)]:
        place.free()
    await turns(4)
    assert w.free == 2
    assert w.queue.queued("m") == 0


def failed(task: "asyncio.Task[Reservation]") -> bool:
    """Return whether a finished task has no slot."""
    return task.cancelled() or task.exception() is not None
