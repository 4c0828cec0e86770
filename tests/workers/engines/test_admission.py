"""An engine behind a limit: exactly N requests inside and Q waiting, in every history."""

from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import pytest
from engine_contract import EngineContract, Rig, asked, prompt
from hypothesis import given, settings
from hypothesis import strategies as st
from waits import turns

from controller.router.endpoints import Endpoint
from workers.config.settings import WorkerConfig
from workers.config.settings_check import load_settings
from workers.control.membership import registration
from workers.engines.admission import AT_CAPACITY, LimitedEngine, RequestLimit
from workers.engines.build import build_engine
from workers.engines.engine import CANARIES_MAX, Engine, MoveRefused
from workers.engines.simulated.engine import SimulatedEngine
from workers.engines.simulated.sequence import EngineShape
from workers.engines.simulated.timing import ConstantTiming

SMALL = EngineShape(context_tokens=2048, kv_blocks=512)


class TestLimited(EngineContract):
    """An engine that never reaches its limit behaves as without one."""

    @pytest.fixture
    async def engine(self) -> Engine:
        return LimitedEngine(SimulatedEngine(SMALL), 256, 16)


class TestLimitedToTwo(EngineContract):
    """An engine that nearly always is at its limit still answers every request, two at a time."""

    @pytest.fixture
    async def engine(self) -> Engine:
        return LimitedEngine(SimulatedEngine(SMALL, turn_tokens=8), 2, 64)

    async def test_a_batch_limit_holds_until_it_is_raised(self, rig: Rig) -> None:
        """At most two requests run at any time."""
        most, keys = 0, [rig.submit(prompt(20 + n, n)) for n in range(9)]
        while not all(rig.answers[key].over.is_set() for key in keys):
            most = max(most, rig.engine.load().running)
            await rig.delivery()
        assert most == 2


Begin = Callable[[int, int], Awaitable[Rig]]


def requests_of(rig: Rig) -> RequestLimit:
    assert isinstance(rig.engine, LimitedEngine)
    return rig.engine.requests


@pytest.fixture
async def limited() -> AsyncIterator[Begin]:
    """`await limited(n, q)` starts an engine behind a limit; its steps take 5 ms."""
    rigs: list[Rig] = []

    async def begin(limit: int, queue: int) -> Rig:
        engine = LimitedEngine(SimulatedEngine(SMALL, ConstantTiming(itl_s=0.005)), limit, queue)
        rigs.append(Rig(engine))
        await rigs[-1].start()
        return rigs[-1]

    yield begin
    for rig in rigs:
        await rig.engine.stop()


@pytest.mark.parametrize(("limit", "queue"), [(3, 2), (1, 2), (5, 16), (2, 1), (1, 0)])
async def test_exactly_n_and_q_are_accepted_and_the_rest_is_refused_at_once(
    limited: Begin, limit: int, queue: int
) -> None:
    """Q = 1 is an edge case of the original: its dispatcher held one more request, N + 2."""
    rig = await limited(limit, queue)
    keys = [rig.submit(prompt(20, n), max_tokens=8) for n in range(limit + queue + 4)]
    refused = [key for key in keys if rig.answers[key].over.is_set()]
    assert refused == keys[limit + queue :]
    assert {rig.answers[key].error for key in refused} == {
        "overloaded: Server overloaded: worker at capacity"
    }
    assert (len(requests_of(rig).inside), requests_of(rig).waiting) == (limit, queue)
    assert requests_of(rig).refused == 4
    assert rig.engine.load().running + rig.engine.load().waiting == limit + queue
    for key in keys[: limit + queue]:
        assert len((await rig.answer(key)).tokens) == 8
    assert requests_of(rig).waiting == 0
    again = await rig.ask(prompt(20))
    assert again.error is None, "an ended request has made room"


async def test_requests_enter_in_order_but_started_ones_first(
    limited: Begin,
) -> None:
    rig = await limited(1, 8)
    first = rig.submit(prompt(20), max_tokens=4)
    fresh = [rig.submit(prompt(20, n), max_tokens=4) for n in (1, 2)]
    begun = rig.submit(prompt(24, 3), prompt=20, max_tokens=4)
    order: list[int] = []

    def note() -> None:
        order.extend(k for k in (first, *fresh, begun) if rig.answers[k].over.is_set() and k not in order)

    rig.after_delivery = note
    for key in (first, begun, *fresh):
        await rig.answer(key)
    assert order == [first, begun, *fresh]


async def test_a_cancelled_request_makes_room_inside_or_in_the_queue(limited: Begin) -> None:
    rig = await limited(1, 2)
    runs, waits, last = (rig.submit(prompt(20, n), max_tokens=1000) for n in range(3))
    rig.engine.cancel(waits)
    rig.engine.cancel(waits)
    rig.engine.cancel(10_000)
    assert requests_of(rig).waiting == 1
    rig.engine.cancel(runs)
    await rig.until(lambda: rig.answers[last].tokens)
    assert not rig.answers[waits].chunks and requests_of(rig).inside == {last}


async def test_canaries_take_no_room(limited: Begin) -> None:
    rig = await limited(1, 0)
    key = rig.submit(prompt(20), max_tokens=40)
    for _ in range(CANARIES_MAX):
        assert (await rig.ask(prompt(30), canary=True, max_tokens=4)).error is None
    assert (await rig.ask(prompt(30))).error == AT_CAPACITY
    assert (await rig.answer(key)).error is None


async def test_a_request_with_its_kv_cache_never_waits_and_frees_its_place(
    limited: Begin,
) -> None:
    rig = await limited(1, 2)
    engine = rig.engine
    request = asked(0, prompt(32), 20)
    key = rig.key()
    room = engine.reserve(key, request, 64)
    assert not isinstance(room, str) and requests_of(rig).inside == {key}
    assert engine.reserve(rig.key(), request, 64) == AT_CAPACITY
    waits = rig.submit(prompt(20), max_tokens=4)
    await turns(20)
    assert not rig.answers[waits].chunks
    with pytest.raises(MoveRefused):
        await room.take(0, 10_000, b"")
    engine.cancel(key)
    engine.cancel(key)
    assert (await rig.answer(waits)).error is None
    elsewhere = msgspec.structs.replace(request, rank=3)
    assert "no DP rank 3" in str(engine.reserve(rig.key(), elsewhere, 64)) and not requests_of(rig).inside


def test_frontends_see_the_limit() -> None:
    for limit, queue, batch in ((3, 2, 256), (300, 16, 256), (256, 2, 256)):
        engine = build_engine(
            load_settings({"engine_request_limit": str(limit), "request_queue_limit": str(queue)}, {})
        )
        assert isinstance(engine, LimitedEngine)
        joined = registration(WorkerConfig(name="w0", instance="i"), engine, "tcp://h:1", (), kv_events=False)
        assert joined.profile.max_batch == min(limit, batch)
        assert Endpoint(joined).holds == limit + queue


def test_there_is_no_limit_by_default_and_dynamos_names_work() -> None:
    assert isinstance(build_engine(load_settings({}, {})), SimulatedEngine)
    dynamos = {"DYN_ENGINE_REQUEST_LIMIT": "5", "DYN_DYNAMO_REQUEST_QUEUE_LIMIT": "4"}
    found = load_settings({}, dynamos)
    assert (found.engine_request_limit, found.request_queue_limit) == (5, 4)
    ours = load_settings({}, {**dynamos, "HOLDFAST_WORKER_ENGINE_REQUEST_LIMIT": "7"})
    assert (ours.engine_request_limit, ours.request_queue_limit) == (7, 4)


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(0, 4),
    st.lists(st.tuples(st.sampled_from(["fresh", "begun", "enters", "end", "next"]), st.integers(0, 99))),
)
def test_in_any_history_no_request_is_in_two_places_and_no_bound_is_exceeded(
    limit: int, queue: int, steps: list[tuple[str, int]]
) -> None:
    requests, refused = RequestLimit(limit, queue), 0
    inside: list[int] = []
    waiting: dict[str, list[int]] = {"begun": [], "fresh": []}
    for key, (step, number) in enumerate(steps):
        line = waiting["begun"] + waiting["fresh"]
        match step:
            case "fresh" | "begun":
                what = requests.take(key, asked(key, [1] * 9, 9 if step == "fresh" else 3))
                if len(inside) + len(line) == limit + queue:
                    assert what == "refused"
                    refused += 1
                elif len(inside) < limit and not line:
                    assert what == "inside"
                    inside.append(key)
                else:
                    assert what == "waits"
                    waiting[step].append(key)
            case "enters":
                free = len(inside) < limit and not line
                assert requests.enters(key) is free
                refused += not free
                inside += [key] if free else []
            case "end" if inside or line:
                gone = (inside + line)[number % len(inside + line)]
                assert requests.forget(gone) is (gone in line)
                for place in (inside, *waiting.values()):
                    place[:] = [one for one in place if one != gone]
            case "next":
                entered = requests.next()
                if line and len(inside) < limit:
                    assert entered is not None and entered[0] == line[0]
                    inside.append(line[0])
                    (waiting["begun"] or waiting["fresh"]).pop(0)
                else:
                    assert entered is None
        assert requests.inside == set(inside) and len(inside) <= limit
        assert requests.waiting == sum(map(len, waiting.values()))
        assert len(inside) + requests.waiting <= limit + queue
        assert requests.refused == refused
