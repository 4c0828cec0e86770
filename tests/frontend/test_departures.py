"""Where the requests of a failed worker go: spread by tokens, by priority, and over frontends that plan side by side."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from frontend_kit import Kit, frontend, joined, until
from scripted_worker import Act, ScriptedWorker, undisturbed

from controller.adapters.clock import SystemClock
from controller.frontend.desk import Desk, World
from controller.frontend.flight import Flight
from controller.frontend.migration import Allowance
from controller.frontend.names import BlockNames
from controller.frontend.neighbours import HEARD_S, Neighbours
from controller.frontend.plan import Plan
from controller.frontend.settings import FrontendSettings
from controller.processes.frontend import hear_neighbours
from controller.router.table import Holder, Seat
from events import subjects
from events.bus import MemoryBus
from events.decisions import HealthStatus
from events.observations import KvLayout, Profile, RequestMigrated, Topology
from events.wire import Load, Sampling

LINEAGE = ("r1", "builtin:sim")
ROOMY = Profile(
    kv_blocks=10_000, block_tokens=16, max_batch=64, prefill_tokens_per_s=5000.0, tpot_ms=((1, 1.0),)
)
LLAMA = KvLayout(layers=80, kv_heads=8, head_size=128, element_bytes=2)


class Silent:
    """A voice that nobody listens to, and a plane on which everybody is reachable and idle."""

    stopped = False
    reached = 0

    def __init__(self) -> None:
        self.loads: dict[str, Load] = {}
        self.asked: Counter[str] = Counter()  # whether a worker is reachable

    def flush(self) -> None: ...

    def reachable(self, worker: str, instance: str) -> bool:
        self.asked[worker] += 1
        return True

    lately = reachable

    def load(self, worker: str) -> Load | None:
        return self.loads.get(worker)

    def others(self, worker: str) -> Load | None:
        return self.loads.get(worker)

    def others_by_rank(self, worker: str) -> Sequence[Load]:
        return ()


def desk_of(name: str = "f1", workers: int = 15, **changes: Any) -> tuple[Desk, Silent]:
    """Return a frontend's desk before so many idle workers w0, w1 … of 8 GPUs each."""
    plane = Silent()
    desk = Desk(World(name, plane, lambda *_, **__: None, SystemClock()), FrontendSettings())  # type: ignore[arg-type]
    one = joined(ScriptedWorker(), profile=ROOMY, tp=8, **changes)
    desk.set_static([replace(one, worker=f"w{n}", instance=f"i{n}") for n in range(workers)])
    return desk, plane


def flight_of(desk: Desk, tokens: int, *, tier: str = "standard", tried: Sequence[str] = ()) -> Flight:
    prompt = [300] * tokens
    plan = Plan(
        request="r",
        model="m",
        lineage=LINEAGE,
        prompt=prompt,
        names=BlockNames(prompt),
        prompt_text="",
        sampling=Sampling(max_tokens=100),
        guided=None,
        deterministic=True,
        tier=tier,
    )
    allowance = Allowance(3, tried=frozenset((worker, worker.replace("w", "i")) for worker in tried))
    return Flight(desk, plan, Silent(), allowance, lambda flight: None)  # type: ignore[arg-type]


def tokens_at(desk: Desk, flights: Sequence[Flight]) -> Counter[str]:
    """Return how many tokens each worker would have to compute."""
    load: Counter[str] = Counter()
    for flight, _, seat in desk.departures.plan(flights):
        load[seat.worker if seat is not None else ""] += len(flight.plan.prompt)
    return load


def test_23_requests_of_2k_tokens_lie_within_one_and_a_half_times_the_even_spread() -> None:
    desk, _ = desk_of()
    load = tokens_at(desk, [flight_of(desk, 2048) for _ in range(23)])
    assert len(load) == 15 and max(load.values()) <= 1.5 * 23 * 2048 / 15


def test_tokens_are_spread_not_requests() -> None:
    desk, _ = desk_of(workers=4)
    flights = [flight_of(desk, 3000)] + [flight_of(desk, 1000) for _ in range(9)]
    assert sorted(tokens_at(desk, flights).values()) == [3000] * 4


def test_frontends_that_know_one_another_do_not_all_begin_at_the_same_worker() -> None:
    """Each plans alone, from the same reports: 23 requests that four frontends hold."""
    names, load = ["fa", "fb", "fc", "fd"], Counter[str]()
    for name, count in zip(names, (6, 6, 6, 5), strict=True):
        desk, _ = desk_of(name)
        desk.departures.frontends = lambda: names
        load += tokens_at(desk, [flight_of(desk, 2048) for _ in range(count)])
    assert max(load.values()) <= 1.5 * 23 * 2048 / 15


def test_one_that_knows_of_no_other_begins_where_its_name_says() -> None:
    begins = set()
    for n in range(40):
        desk, _ = desk_of(f"f{n}")
        begins |= set(tokens_at(desk, [flight_of(desk, 2048)]))
    assert len(begins) > 7


def test_a_fuller_worker_comes_later() -> None:
    desk, plane = desk_of(workers=3)
    plane.loads = {"w0": Load(running=40), "w2": Load(running=40)}
    assert set(tokens_at(desk, [flight_of(desk, 100)])) == {"w1"}


def test_prompts_that_other_frontends_have_sent_there_come_first() -> None:
    desk, _ = desk_of(workers=2)
    desk.routing.choosing.slots.add("theirs", Holder("w0", "i0"), now=0.0, prefill_tokens=9000, owner="f2")
    assert tokens_at(desk, [flight_of(desk, 1000) for _ in range(4)]) == {"w1": 4000}


def test_a_worker_that_may_serve_less_gets_less() -> None:
    desk, _ = desk_of(workers=2)
    desk.table.seats["w0", "i0"].weight = 0.25
    load = tokens_at(desk, [flight_of(desk, 100) for _ in range(10)])
    assert load == {"w0": 200, "w1": 800}


def test_blocks_are_counted_before_the_next_request_is_placed() -> None:
    desk, plane = desk_of(workers=3)
    plane.loads = {"w0": Load(kv_used=9_990, kv_total=10_000), "w1": Load(kv_used=9_990, kv_total=10_000)}
    assert set(tokens_at(desk, [flight_of(desk, 2048) for _ in range(20)])) == {"w2"}


def test_nobody_goes_where_it_has_failed_already_but_to_another_life_of_it() -> None:
    desk, _ = desk_of(workers=2)
    assert set(tokens_at(desk, [flight_of(desk, 100, tried=["w0"]) for _ in range(5)])) == {"w1"}
    stranger = flight_of(desk, 100)
    stranger.allowance.tried |= {("w0", "an older life")}
    assert set(tokens_at(desk, [stranger, flight_of(desk, 100)])) == {"w0", "w1"}


def test_the_better_tier_is_placed_first() -> None:
    desk, _ = desk_of(workers=2)
    tiers = ["best_effort", "standard", "premium", "standard"]
    flights = [flight_of(desk, 100, tier=tier) for tier in tiers]
    order = [flight.plan.tier for flight, _, _ in desk.departures.plan(flights)]
    assert order == ["premium", "standard", "standard", "best_effort"]


def source(desk: Desk, **changes: Any) -> Seat:
    return Seat(replace(desk.table.seats["w0", "i0"].joined, worker="old", instance="i", **changes))


def test_a_group_that_leaves_is_sent_to_one_group_that_takes_all_and_a_dead_one_is_not_sent() -> None:
    rail = Topology(host="h1", rail="r0", gpus=("g",) * 8)
    desk, _ = desk_of(kv=LLAMA, topology=rail)
    flights = [flight_of(desk, 2048) for _ in range(23)]
    planned = desk.departures.plan(flights, source(desk, topology=replace(rail, host="h2")))
    assert {placement.method for _, placement, _ in planned} == {"transfer"}
    assert len({seat.worker for _, _, seat in planned if seat}) == 1
    assert {placement.method for _, placement, _ in desk.departures.plan(flights)} == {"reprefill"}


def test_nothing_is_sent_to_shards_of_another_kind() -> None:
    rail = Topology(host="h1", rail="r0", gpus=("g",) * 8)
    desk, _ = desk_of(kv=LLAMA, topology=rail)
    for other in (
        {"tp": 4},
        {"kv": replace(LLAMA, layers=40)},
        {"kv": None},
        {"kv": replace(LLAMA, kv_heads=0)},
    ):
        planned = desk.departures.plan([flight_of(desk, 2048)], source(desk, **other))
        assert [placement.method for _, placement, _ in planned] == ["reprefill"], other


def test_who_was_not_heard_lately_is_no_neighbour() -> None:
    now = 100.0
    neighbours = Neighbours(lambda: now)
    neighbours.on_links("s", {"frontend": "fb", "workers": {}})
    now += HEARD_S - 1
    neighbours.on_links("s", {"frontend": "fa", "workers": {}})
    assert neighbours.names() == ["fa", "fb"]
    now += 2
    assert neighbours.names() == ["fa"]
    neighbours.on_links("s", {"frontend": "fa", "workers": {}})
    neighbours.on_links("s", {"frontend": "fc", "workers": {}})
    assert neighbours.names() == ["fa", "fc"]  # at once
    now += HEARD_S + 0.1
    assert neighbours.names() == []
    neighbours.on_links("s", {"frontend": "fa", "workers": {}})
    assert neighbours.names() == ["fa"]


def test_a_worker_that_registers_nonsense_keeps_nobody_from_being_planned_for() -> None:
    desk, _ = desk_of(workers=3)
    odd = desk.table.seats["w0", "i0"]
    odd.joined = replace(
        odd.joined, profile=replace(ROOMY, block_tokens=0, max_batch=0, prefill_tokens_per_s=-1.0)
    )
    assert {"w1", "w2"} <= set(tokens_at(desk, [flight_of(desk, 100) for _ in range(9)]))


async def test_one_that_cannot_be_sent_keeps_nobody_from_going_on() -> None:
    desk, plane = desk_of(workers=2)
    first, second = (flight_of(desk, 100) for _ in range(2))
    opened: list[str] = []

    def open_(worker: str, *_: Any) -> int:
        opened.append(worker)
        if len(opened) == 1:
            raise RuntimeError("a mistake of ours")
        return 1

    plane.open = open_  # type: ignore[attr-defined]
    for flight in (first, second):
        desk.departures.add(flight)
    await asyncio.sleep(0)
    assert first.done and first.error is not None and first.error.status == 500
    assert not second.done and second.seat is not None


async def test_requests_that_cannot_be_planned_for_together_go_on_one_by_one() -> None:
    desk, plane = desk_of(workers=2)
    plane.open = lambda *_: 1  # type: ignore[attr-defined]
    plane.load = {}.__getitem__  # type: ignore[method-assign]  # a mistake of ours, which only the plan makes
    flights = [flight_of(desk, 100) for _ in range(2)]
    for flight in flights:
        desk.departures.add(flight)
    await asyncio.sleep(0)
    assert all(flight.seat is not None for flight in flights)


async def test_one_whose_loss_is_mishandled_keeps_nobody_from_hearing_of_it() -> None:
    desk, plane = desk_of(workers=2)
    plane.open, plane.cancel = lambda *_: 1, lambda *_: None  # type: ignore[attr-defined]
    first, second = (flight_of(desk, 100) for _ in range(2))
    for flight in (first, second):
        flight.launch(desk.table.seats["w0", "i0"])
    first.allowance.tried = None  # type: ignore[assignment]  # a mistake of ours
    for flight in (first, second):
        flight.lost("disconnected", "")
    assert first.done and first.error is not None and first.error.status == 500
    await asyncio.sleep(0)
    assert not second.done and second.seat is not None and second.seat.worker == "w1"


async def test_whom_streams_of_an_unhealthy_worker_could_go_to_is_asked_once_not_per_stream() -> None:
    desk, plane = desk_of(workers=20)
    opened: list[str] = []

    def open_(worker: str, *_: Any) -> int:
        opened.append(worker)
        return len(opened)

    plane.open, plane.cancel = open_, lambda *_: None  # type: ignore[attr-defined]
    seat = desk.table.seats["w0", "i0"]
    for _ in range(300):
        flight_of(desk, 100).launch(seat)
    seat.status, seat.weight = HealthStatus.UNHEALTHY, 0.0
    plane.asked.clear()
    desk.changed()
    assert 0 < max(plane.asked.values()) < 30
    await asyncio.sleep(0)
    assert not seat.flights and set(Counter(opened[300:]).values()) <= {15, 16}


async def test_a_stream_of_an_unhealthy_worker_stays_where_every_other_has_failed_it_already() -> None:
    desk, plane = desk_of(workers=3)
    plane.open, plane.cancel = lambda *_: 1, lambda *_: None  # type: ignore[attr-defined]
    seat = desk.table.seats["w0", "i0"]
    stays, goes = flight_of(desk, 100, tried=["w1", "w2"]), flight_of(desk, 100, tried=["w1"])
    for flight in (stays, goes):
        flight.launch(seat)
    seat.status, seat.weight = HealthStatus.UNHEALTHY, 0.0
    desk.changed()
    await asyncio.sleep(0)
    assert stays.seat is seat and goes.seat is desk.table.seats["w2", "i2"]


async def test_frontends_hear_one_another_over_the_broker() -> None:
    bus, (desk, _) = MemoryBus(), desk_of("fa")
    await hear_neighbours(desk, bus)
    await bus.publish(subjects.links("fb"), {"frontend": "fb", "workers": {}})
    await until(lambda: desk.departures.frontends() == ["fb"])


# --- with real connections ----------------------------------------------------------------------------------------


async def crash(kit: Kit, requests: int, survivors: int) -> tuple[list[ScriptedWorker], list[str]]:
    """Let a worker with so many requests of different lengths die; return the survivors and the answers' texts."""
    dying = ScriptedWorker("w0", step_s=0.005, always=Act(per_step=1))
    await kit.add(dying)
    prompts = [[300 + n] * (20 + 40 * n) for n in range(requests)]
    answers = [asyncio.ensure_future(kit.complete(prompt, 40)) for prompt in prompts]
    await until(lambda: len(dying.requests) == requests)
    others = [ScriptedWorker(f"w{n + 1}", instance=f"i{n + 1}") for n in range(survivors)]
    for other in others:
        await kit.add(other)
    dying.drop()
    await dying.stop()
    texts = [(await answer)[0] for answer in answers]
    return others, texts


async def test_a_crash_is_spread_and_said_once_per_request() -> None:
    async with frontend() as kit:
        others, texts = await crash(kit, 12, 3)
        expected = [undisturbed([300 + n] * (20 + 40 * n), 40) for n in range(12)]
        from frontend_kit import TOKENS

        assert texts == [TOKENS.decode(tokens) for tokens in expected]
        load = [sum(len(request.tokens) for request in other.requests) for other in others]
        assert max(load) <= 1.5 * sum(load) / 3
        moved = [fact.request for fact in kit.said(RequestMigrated)]
        assert len(moved) == len(set(moved)) == 12


async def test_a_client_that_leaves_before_its_place_is_found_is_not_sent_anywhere() -> None:
    async with frontend() as kit:
        dying, other = ScriptedWorker("w0", step_s=0.01), ScriptedWorker("w1", instance="i1")
        await kit.add(dying)
        answer = asyncio.ensure_future(kit.complete([300] * 10, 40))
        await until(lambda: dying.requests)
        await kit.add(other)
        flight = next(iter(kit.desk.table.seats["w0", "i1"].flights))
        flight.lost("disconnected", "it broke")
        flight.cancel()
        await asyncio.sleep(0.05)
        assert not other.requests
        answer.cancel()
