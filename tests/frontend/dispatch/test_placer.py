"""Placement of a failed worker's requests: spread by tokens, by priority, and over parallel frontends."""

import asyncio
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from frontend_kit import Kit, frontend, joined
from memory_bus import MemoryBus
from msgspec import structs
from scripted_worker import Act, ScriptedWorker, undisturbed
from waits import turns, until

from controller.adapters.clock import SystemClock
from controller.frontend.director import Director, World
from controller.frontend.driver import RequestSink
from controller.frontend.openai.choice import Choice
from controller.frontend.request.events import FirstToken, Launched, Resumed
from controller.frontend.request.failures import Failure
from controller.frontend.request.state import GenerationRequest
from controller.frontend.scheduling.scheduler import HEARD_S, Peers
from controller.frontend.settings import FrontendSettings
from controller.processes.frontend import follow_peers
from controller.router.endpoints import Endpoint, WorkerRank
from events import subjects
from events.blocks import BlockNames
from events.decisions import HealthStatus
from events.observations import KvLayout, Profile, RequestMigrated, Topology
from events.wire import Load, Sampling

LINEAGE = ("r1", "builtin:sim")
ROOMY = Profile(
    kv_blocks=10_000, block_tokens=16, max_batch=64, prefill_tokens_per_s=5000.0, tpot_ms=((1, 1.0),)
)
LLAMA = KvLayout(layers=80, kv_heads=8, head_size=128, element_bytes=2)


class Silent:
    """A writer that discards its answer, and a plane on which all workers are reachable and idle."""

    stopped = False
    reached = 0

    def __init__(self) -> None:
        self.loads: dict[str, Load] = {}
        self.asked: Counter[str] = Counter()  # number of reachability checks per worker

    def flush(self) -> None: ...

    def reachable(self, worker: str, instance: str) -> bool:
        self.asked[worker] += 1
        return True

    recently_heard = reachable

    def load(self, worker: str) -> Load | None:
        return self.loads.get(worker)

    def external_load(self, worker: str) -> Load | None:
        return self.loads.get(worker)

    def others_work(self, worker: str, own_tokens: int, *, begun: bool) -> Literal["", "beside", "before"]:
        return ""

    def load_by_rank(self, worker: str) -> Sequence[Load]:
        return ()

    def external_load_by_rank(self, worker: str) -> Sequence[Load]:
        return ()


SERIAL = itertools.count(
    301
)  # each has its own prompt: of equal prompts only one at a time goes to an unknown worker


def director_of(name: str = "f1", workers: int = 15, **changes: object) -> tuple[Director, Silent]:
    """Return a frontend's director with idle workers w0, w1 … of 8 GPUs each."""
    plane = Silent()
    director = Director(World(name, plane, lambda *_, **__: None, SystemClock()), FrontendSettings())  # type: ignore[arg-type]
    one = joined(ScriptedWorker(), profile=ROOMY, tp=8, **changes)
    director.set_static([replace(one, worker=f"w{n}", instance=f"i{n}") for n in range(workers)])
    return director, plane


def generation_of(
    director: Director, tokens: int, *, tier: str = "standard", tried: Sequence[str] = ()
) -> RequestSink:
    prompt = [*[300] * (tokens - 1), next(SERIAL)]
    request = GenerationRequest(
        id="r",
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
    live = director.driver.open(Choice(request, Silent()))  # type: ignore[arg-type]
    assert isinstance(live, RequestSink)
    barred = frozenset((worker, worker.replace("w", "i")) for worker in tried)
    live.state = structs.replace(live.state, tried=barred)
    return live


def start(director: Director, live: RequestSink, endpoint: Endpoint | None = None) -> None:
    """Send a request to a worker: to this one, if it has room."""
    director.driver.feed(live, Launched(endpoint.key if endpoint is not None else None))


def lose(director: Director, lives: Sequence[RequestSink]) -> None:
    """Let requests lose their workers in one turn of the event loop, through no fault of the workers."""
    for live in lives:
        start(director, live, director.table.endpoints["w0", "i0"])
    for live in lives:
        director.driver.fail(live, Failure("unhealthy", ""))


def tokens_at(director: Director, generations: Sequence[RequestSink]) -> Counter[str]:
    """Return how many tokens each worker would have to compute."""
    load: Counter[str] = Counter()
    for generation, _, endpoint in director.placer.plan(generations):
        load[endpoint.worker if endpoint is not None else ""] += len(generation.request.prompt)
    return load


def test_23_requests_of_2k_tokens_stay_within_one_and_a_half_times_the_even_spread() -> None:
    director, _ = director_of()
    load = tokens_at(director, [generation_of(director, 2048) for _ in range(23)])
    assert len(load) == 15 and max(load.values()) <= 1.5 * 23 * 2048 / 15


def test_tokens_are_spread_not_requests() -> None:
    director, _ = director_of(workers=4)
    generations = [generation_of(director, 3000)] + [generation_of(director, 1000) for _ in range(9)]
    assert sorted(tokens_at(director, generations).values()) == [3000] * 4


def test_frontends_that_know_each_other_do_not_all_start_at_the_same_worker() -> None:
    """Each frontend plans alone, from the same reports: four frontends hold 23 requests."""
    names, load = ["fa", "fb", "fc", "fd"], Counter[str]()
    for name, count in zip(names, (6, 6, 6, 5), strict=True):
        director, _ = director_of(name)
        for peer in names:
            director.peers.on_links("", {"frontend": peer, "workers": {}})
        load += tokens_at(director, [generation_of(director, 2048) for _ in range(count)])
    assert max(load.values()) <= 1.5 * 23 * 2048 / 15


def test_a_frontend_that_knows_no_other_starts_where_its_name_says() -> None:
    begins = set()
    for n in range(40):
        director, _ = director_of(f"f{n}")
        begins |= set(tokens_at(director, [generation_of(director, 2048)]))
    assert len(begins) > 7


def test_a_fuller_worker_comes_later() -> None:
    director, plane = director_of(workers=3)
    plane.loads = {"w0": Load(running=40), "w2": Load(running=40)}
    assert set(tokens_at(director, [generation_of(director, 100)])) == {"w1"}


def test_workers_with_prompts_from_other_frontends_come_later() -> None:
    director, _ = director_of(workers=2)
    director.routing.slots.add("theirs", WorkerRank("w0", "i0"), now=0.0, prefill_tokens=9000, owner="f2")
    assert tokens_at(director, [generation_of(director, 1000) for _ in range(4)]) == {"w1": 4000}


def test_a_worker_with_less_weight_gets_less() -> None:
    director, _ = director_of(workers=2)
    director.table.endpoints["w0", "i0"].weight = 0.25
    load = tokens_at(director, [generation_of(director, 100) for _ in range(10)])
    assert load == {"w0": 200, "w1": 800}


def test_blocks_are_counted_before_the_next_request_is_placed() -> None:
    director, plane = director_of(workers=3)
    plane.loads = {"w0": Load(kv_used=9_990, kv_total=10_000), "w1": Load(kv_used=9_990, kv_total=10_000)}
    assert set(tokens_at(director, [generation_of(director, 2048) for _ in range(20)])) == {"w2"}


def test_a_request_avoids_the_life_of_a_worker_that_failed_it_but_not_another_life() -> None:
    director, _ = director_of(workers=2)
    assert set(tokens_at(director, [generation_of(director, 100, tried=["w0"]) for _ in range(5)])) == {"w1"}
    stranger = generation_of(director, 100)
    stranger.state = structs.replace(stranger.state, tried=frozenset({("w0", "an older life")}))
    assert set(tokens_at(director, [stranger, generation_of(director, 100)])) == {"w0", "w1"}


async def test_a_worker_that_declined_a_request_is_not_chosen_again_before_its_first_token() -> None:
    director, plane = director_of(workers=2)
    plane.open, plane.cancel = lambda *_: 1, lambda *_: None  # type: ignore[attr-defined]
    declined = generation_of(director, 100)
    closed = frozenset({("w0", "i0")})
    declined.state = structs.replace(declined.state, declined=closed)
    assert set(tokens_at(director, [declined] * 2)) == {"w1"}
    planned = director.table.endpoints["w0", "i0"]
    start(director, declined, planned)
    assert declined.endpoint is not None and declined.endpoint.worker == "w1"
    director.driver.feed(declined, FirstToken())  # its client has a token, and worker w0 may have room by now
    director.driver.fail(declined, Failure("unhealthy", ""))
    director.driver.feed(declined, Resumed(planned.key))
    assert declined.endpoint is planned


def test_the_better_tier_is_placed_first() -> None:
    director, _ = director_of(workers=2)
    tiers = ["best_effort", "standard", "premium", "standard"]
    generations = [generation_of(director, 100, tier=tier) for tier in tiers]
    order = [generation.request.tier for generation, _, _ in director.placer.plan(generations)]
    assert order == ["premium", "standard", "standard", "best_effort"]


def source(director: Director, **changes: Any) -> Endpoint:
    return Endpoint(
        replace(director.table.endpoints["w0", "i0"].joined, worker="old", instance="i", **changes)
    )


def test_a_group_that_leaves_is_sent_to_one_group_with_room_and_a_dead_one_is_not_sent() -> None:
    rail = Topology(host="h1", rail="r0", gpus=("g",) * 8)
    director, _ = director_of(kv=LLAMA, topology=rail)
    generations = [generation_of(director, 2048) for _ in range(23)]
    planned = director.placer.plan(generations, source(director, topology=replace(rail, host="h2")))
    assert {placement.method for _, placement, _ in planned} == {"transfer"}
    assert len({endpoint.worker for _, _, endpoint in planned if endpoint}) == 1
    assert {placement.method for _, placement, _ in director.placer.plan(generations)} == {"reprefill"}


def test_nothing_is_sent_to_a_target_with_other_shards() -> None:
    rail = Topology(host="h1", rail="r0", gpus=("g",) * 8)
    director, _ = director_of(kv=LLAMA, topology=rail)
    for other in (
        {"tp": 4},
        {"kv": replace(LLAMA, layers=40)},
        {"kv": None},
        {"kv": replace(LLAMA, kv_heads=0)},
    ):
        planned = director.placer.plan([generation_of(director, 2048)], source(director, **other))
        assert [placement.method for _, placement, _ in planned] == ["reprefill"], other


def test_a_silent_frontend_is_no_peer() -> None:
    now = 100.0
    peers = Peers(lambda: now)
    peers.on_links("s", {"frontend": "fb", "workers": {}})
    now += HEARD_S - 1
    peers.on_links("s", {"frontend": "fa", "workers": {}})
    assert peers.names() == ["fa", "fb"]
    now += 2
    assert peers.names() == ["fa"]
    peers.on_links("s", {"frontend": "fa", "workers": {}})
    peers.on_links("s", {"frontend": "fc", "workers": {}})
    assert peers.names() == ["fa", "fc"]  # immediately
    now += HEARD_S + 0.1
    assert peers.names() == []
    peers.on_links("s", {"frontend": "fa", "workers": {}})
    assert peers.names() == ["fa"]


def test_a_worker_that_registers_nonsense_does_not_stop_planning_for_others() -> None:
    director, _ = director_of(workers=3)
    odd = director.table.endpoints["w0", "i0"]
    odd.joined = replace(
        odd.joined, profile=replace(ROOMY, block_tokens=0, max_batch=0, prefill_tokens_per_s=-1.0)
    )
    assert {"w1", "w2"} <= set(tokens_at(director, [generation_of(director, 100) for _ in range(9)]))


async def test_a_request_that_cannot_be_sent_does_not_stop_the_others() -> None:
    director, plane = director_of(workers=2)
    first, second = (generation_of(director, 100) for _ in range(2))
    opened: list[str] = []

    def open_(worker: str, *_: object) -> int:
        opened.append(worker)
        if len(opened) == 3:
            raise RuntimeError("an internal error")
        return len(opened)

    plane.open, plane.cancel = open_, lambda *_: None  # type: ignore[attr-defined]
    lose(director, [first, second])
    await turns()
    error = first.answer.error
    assert first.over and error is not None and error.status == 500
    assert not second.over and second.endpoint is not None


async def test_requests_that_cannot_be_planned_together_continue_separately() -> None:
    director, plane = director_of(workers=2)
    plane.open, plane.cancel = lambda *_: 1, lambda *_: None  # type: ignore[attr-defined]
    lives = [generation_of(director, 100) for _ in range(2)]
    lose(director, lives)
    plane.load = dict[str, Load]().__getitem__  # type: ignore[assignment, method-assign]  # an internal error, only in the plan
    await turns()
    assert all(live.endpoint is not None for live in lives)


async def test_a_request_with_a_mishandled_loss_does_not_stop_others_from_being_notified() -> None:
    director, plane = director_of(workers=2)
    plane.open, plane.cancel = lambda *_: 1, lambda *_: None  # type: ignore[attr-defined]
    first, second = (generation_of(director, 100) for _ in range(2))
    for live in (first, second):
        start(director, live, director.table.endpoints["w0", "i0"])
    first.state = structs.replace(first.state, tried=None)  # an internal error
    for live in (first, second):
        live.lost("stalled", "")
    error = first.answer.error
    assert first.over and error is not None and error.status == 500
    await turns()
    assert not second.over and second.endpoint is not None and second.endpoint.worker == "w1"


async def test_targets_for_streams_of_an_unhealthy_worker_are_looked_up_once_not_per_stream() -> None:
    director, plane = director_of(workers=20)
    opened: list[str] = []

    def open_(worker: str, *_: object) -> int:
        opened.append(worker)
        return len(opened)

    plane.open, plane.cancel = open_, lambda *_: None  # type: ignore[attr-defined]
    endpoint = director.table.endpoints["w0", "i0"]
    for _ in range(300):
        start(director, generation_of(director, 100), endpoint)
    endpoint.status, endpoint.weight = HealthStatus.UNHEALTHY, 0.0
    plane.asked.clear()
    director.changed()
    assert 0 < max(plane.asked.values()) < 30
    await turns()
    assert not director.running.at(endpoint) and set(Counter(opened[300:]).values()) <= {15, 16}


async def test_a_stream_of_an_unhealthy_worker_stays_if_all_others_have_failed_it() -> None:
    director, plane = director_of(workers=3)
    plane.open, plane.cancel = lambda *_: 1, lambda *_: None  # type: ignore[attr-defined]
    endpoint = director.table.endpoints["w0", "i0"]
    stays, goes = generation_of(director, 100, tried=["w1", "w2"]), generation_of(director, 100, tried=["w1"])
    for live in (stays, goes):
        start(director, live, endpoint)
    endpoint.status, endpoint.weight = HealthStatus.UNHEALTHY, 0.0
    director.changed()
    await turns()
    assert stays.endpoint is endpoint and goes.endpoint is director.table.endpoints["w2", "i2"]


async def test_frontends_learn_of_each_other_over_the_broker() -> None:
    bus, (director, _) = MemoryBus(), director_of("fa")
    await follow_peers(director, bus)
    await bus.publish(subjects.links("fb"), {"frontend": "fb", "workers": {}})
    await until(lambda: director.peers.names() == ["fb"])


# --- with real connections ----------------------------------------------------------------------------------------


async def crash(kit: Kit, requests: int, survivors: int) -> tuple[list[ScriptedWorker], list[str]]:
    """Let a worker with this many requests of different lengths die. Return the survivors and the answers' texts."""
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


async def test_a_crash_is_spread_and_reported_once_per_request() -> None:
    async with frontend() as kit:
        others, texts = await crash(kit, 12, 3)
        expected = [undisturbed([300 + n] * (20 + 40 * n), 40) for n in range(12)]
        from frontend_kit import TOKENS

        assert texts == [TOKENS.decode(tokens) for tokens in expected]
        load = [sum(len(request.tokens) for request in other.requests) for other in others]
        assert max(load) <= 1.5 * sum(load) / 3
        moved = [fact.request for fact in kit.said(RequestMigrated)]
        assert len(moved) == len(set(moved)) == 12


async def test_a_client_that_leaves_before_placement_is_not_sent_anywhere() -> None:
    async with frontend() as kit:
        dying, other = ScriptedWorker("w0", step_s=0.01), ScriptedWorker("w1", instance="i1")
        await kit.add(dying)
        answer = asyncio.ensure_future(kit.complete([300] * 10, 40))
        await until(lambda: dying.requests)
        await kit.add(other)
        live = next(iter(kit.running("w0")))
        assert isinstance(live, RequestSink)
        live.lost("disconnected", "it broke")
        kit.director.driver.cancel([live.answer])
        await kit.ticks()
        assert not other.requests
        answer.cancel()
