"""KV-aware routing in a frontend: requests go to their cached prefix, without piling up."""

import asyncio
import io
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import pytest
from frontend_kit import PROFILE, TOKENS, Kit, failing, frontend, joined
from move_random_walk import Clock
from scripted_worker import ScriptedWorker
from waits import until

from controller.adapters.clock import SystemClock
from controller.commands.route import TERMS
from controller.frontend.director import Director, World
from controller.frontend.request.state import GenerationRequest
from controller.frontend.scheduling.scheduler import pricing_of
from controller.frontend.settings import FrontendSettings, RouterSettings
from controller.router.endpoints import WorkerRank
from controller.router.index.view import KvView
from controller.router.load.active_sequences import STALE_S
from controller.router.selection.score import USUAL
from events.blocks import BlockNames, local_hashes, seed, sequence_hashes
from events.kv import KvBatch, Stored
from events.observations import RequestMigrated
from events.wire import Load, Sampling

PROMPT = list(range(300, 300 + 64))  # four blocks
OTHER = list(range(600, 600 + 64))
LINEAGE = ("r1", "builtin:sim")


def test_unset_settings_have_the_routers_defaults() -> None:
    assert pricing_of(RouterSettings()) == USUAL


# --- choice of the worker -------------------------------------------------------------------------------------


def served(*workers: ScriptedWorker) -> list[int]:
    return [len(worker.requests) for worker in workers]


async def test_a_prompt_goes_to_its_previous_worker_and_another_one_elsewhere() -> None:
    one, two = ScriptedWorker("w1"), ScriptedWorker("w2")
    async with frontend(one, two) as kit:
        kit.director.routing.slots.add("x", WorkerRank("w1", "i1"), now=kit.director.now(), own_blocks=1)
        await kit.complete(PROMPT, 2)
        assert served(one, two) == [0, 1], "the less loaded worker"
        kit.director.routing.slots.free("x", now=kit.director.now())
        await kit.complete([*PROMPT, 7], 2)
        assert served(one, two) == [0, 2]
        await kit.complete(OTHER, 2)
        assert served(one, two) == [1, 2]
        assert kit.counted("holdfast_router_decisions_total", "mode") == {("kv",): 3}
        assert kit.counted("holdfast_router_overlap_blocks_sum") == {(): 4}
        assert kit.counted("holdfast_router_kv_hit_rate_count") == {(): 3}
        assert kit.counted("holdfast_router_guessed_blocks") == {(): 8}


async def test_reported_caches_count_more_than_sent_requests() -> None:
    one, two = ScriptedWorker("w1"), ScriptedWorker("w2")
    async with frontend() as kit:
        view = KvView()
        kit.director.routing.state.view = view
        for worker in (one, two):
            await kit.add(worker, kv_events=True)
        view.absorb([joined(one, kv_events=True), joined(two, kv_events=True)], kit.director.now())
        names = sequence_hashes(local_hashes(PROMPT, PROFILE.block_tokens))
        view.take(KvBatch("w2", "i1", 0, 0, [Stored(names)]), kit.director.now())
        await kit.complete(PROMPT, 2)
        await kit.complete(OTHER, 2)
        await kit.complete(OTHER, 2)
        assert served(one, two) == [1, 2], (
            "no worker has reported the other prompt: the one with less recent prefill gets it"
        )
        assert kit.counted("holdfast_router_kv_blocks") == {(): 4}
        applied = kit.counted("holdfast_router_kv_events_total", "event_type", "status")
        assert applied == {("stored", "ok"): 1}
        assert kit.counted("holdfast_router_guessed_blocks") == {}


async def test_prompts_with_different_salts_share_nothing() -> None:
    one, two = ScriptedWorker("w1"), ScriptedWorker("w2")
    async with frontend(one, two) as kit:
        await kit.complete(PROMPT, 2, cache_salt="a")
        asked = {"X-Holdfast-Explain": "1"}
        body = {"model": "m", "prompt": PROMPT, "max_tokens": 2}
        for salt, cached in (("a", 4), ("b", 0)):
            _, _, headers = await kit.post("/v1/completions", asked, cache_salt=salt, **body)
            best = json.loads(headers["X-Holdfast-Explain"])["candidates"][0]
            assert best["device"] == cached
        assert [request.cache_salt for request in one.requests + two.requests][:2] == ["a", "a"]
        status, body, _ = await kit.post("/v1/completions", model="m", prompt="x", cache_salt="")
        assert (status, body["error"]["param"]) == (400, "cache_salt")


async def test_workers_with_different_block_sizes_are_compared_in_the_most_common_one() -> None:
    workers = [ScriptedWorker(name) for name in ("w1", "w2", "w3")]
    async with frontend() as kit:
        for worker, size in zip(workers, (16, 32, 16), strict=True):
            await kit.add(worker, profile=replace(PROFILE, block_tokens=size))
        slots = kit.director.routing.slots
        for name in ("w1", "w3"):
            slots.add(name, WorkerRank(name, "i1"), now=kit.director.now(), own_blocks=1)
        await kit.complete(PROMPT, 2)
        slots.free("w1", now=kit.director.now())
        _, _, headers = await kit.post(
            "/v1/completions", {"X-Holdfast-Explain": "1"}, model="m", prompt=PROMPT, max_tokens=2
        )
        why = json.loads(headers["X-Holdfast-Explain"])
        assert (why["block_tokens"], why["chosen"]["worker"]) == (16, "w2")
        assert why["candidates"][0]["device"] == 4


async def test_each_rank_of_a_worker_is_a_separate_target() -> None:
    worker = ScriptedWorker("w1", step_s=0.02)
    async with frontend() as kit:
        await kit.add(worker, dp=2)
        asked = [asyncio.create_task(kit.complete(prompt, 5)) for prompt in (PROMPT, OTHER)]
        await asyncio.gather(*asked)
        await kit.complete(PROMPT, 2)
        ranks = {request.tokens[0]: request.rank for request in worker.requests[:2]}
        assert set(ranks.values()) == {0, 1}
        assert worker.requests[2].rank == ranks[PROMPT[0]]


# --- counts ---------------------------------------------------------------------------------------------------


async def test_a_request_is_counted_from_before_it_is_sent_until_it_ends() -> None:
    worker = ScriptedWorker("w1", step_s=0.05)
    async with frontend(worker) as kit:
        slots, holder = kit.director.routing.slots, WorkerRank("w1", "i1")
        asked = asyncio.create_task(kit.complete(PROMPT, 4))
        await until(lambda: len(slots))
        assert slots.work(holder, now=0).prefill_tokens == 64
        assert kit.counted(
            "dynamo_frontend_worker_active_prefill_tokens", "worker_id", "dp_rank", "worker_type"
        ) == {("w1", "0", "decode"): 64}
        await until(lambda: slots.work(holder, now=0).prefill_tokens == 0)
        assert slots.work(holder, now=0).blocks == 4
        await asked
        assert len(slots) == 0


async def test_the_blocks_of_an_answer_are_counted_as_it_grows_if_enabled() -> None:
    worker = ScriptedWorker("w1", step_s=0.005)
    async with frontend(worker, router={"track_output_blocks": True}) as kit:
        slots, seen = kit.director.routing.slots, set[float]()
        asked = asyncio.create_task(kit.complete(PROMPT, 40))

        def sampled() -> bool:
            seen.add(slots.work(WorkerRank("w1", "i1"), now=0).blocks)
            return asked.done()

        await until(sampled, every_s=0.005)
        assert {4, 5, 6} <= seen <= {0, 4, 5, 6}


@pytest.mark.parametrize("how", ["disconnect", "error", "silence"])
async def test_a_request_that_moves_is_counted_at_its_current_worker(how: str) -> None:
    first, other = failing("w1", how, 2), ScriptedWorker("w2", step_s=0.01)
    async with frontend(first, other) as kit:
        slots = kit.director.routing.slots
        asked = asyncio.create_task(kit.complete(PROMPT, 20))
        await until(lambda: kit.director.table.endpoints[("w2", "i1")].active)
        assert [entry.holder.worker for _, entry in slots.requests()] == ["w2"]
        await asked
        assert len(kit.said(RequestMigrated)) == 1
        assert len(slots) == 0


async def test_requests_wait_while_every_worker_has_too_much_prefill() -> None:
    worker = ScriptedWorker("w1")
    async with frontend(router={"queue_prefill_s": 0.5}) as kit:
        await kit.add(worker, profile=replace(PROFILE, prefill_tokens_per_s=100))  # 64 tokens take 0.64 s
        slots, holder = kit.director.routing.slots, WorkerRank("w1", "i1")
        slots.add("another", holder, now=kit.director.now(), prefill_tokens=64)
        asked = asyncio.create_task(kit.complete(PROMPT, 4))
        await until(lambda: kit.director.admission.queued("m") == 1)
        assert not worker.requests
        slots.prefill_done("another", now=kit.director.now())
        await asked
        assert kit.counted("holdfast_queue_wait_seconds_count", "outcome") == {("admitted",): 1}


async def test_a_worker_that_has_left_is_dropped() -> None:
    one, two = ScriptedWorker("w1"), ScriptedWorker("w2")
    async with frontend(one, two) as kit:
        await kit.complete(PROMPT, 2)
        scheduler = kit.director.routing
        assert (scheduler.state.guessed, {holder.worker for holder in scheduler.slots.holders}) == (
            4,
            {"w1", "w2"},
        )
        await one.stop()
        kit.tell(replace(joined(one), instance="i2", url="tcp://127.0.0.1:1"))
        assert scheduler.state.guessed == 0
        assert WorkerRank("w1", "i1", 0) not in scheduler.slots.holders


# --- overrides and explanations ---------------------------------------------------------------------------------


async def test_an_override_in_a_header_applies_to_its_request() -> None:
    one, two = ScriptedWorker("w1"), ScriptedWorker("w2")
    async with frontend(one, two) as kit:
        turns = {"X-Holdfast-Router-Mode": "round-robin"}
        for _ in range(4):
            await kit.post("/v1/completions", turns, model="m", prompt=PROMPT, max_tokens=2)
        assert served(one, two) == [2, 2]
        wrong = {"X-Holdfast-Router-Temperature": "hot"}
        status, body, _ = await kit.post("/v1/completions", wrong, model="m", prompt=PROMPT, max_tokens=2)
        assert (status, body["error"]["param"]) == (400, "X-Holdfast-Router-Temperature")
        assert "is 'hot': input should be a valid number" in body["error"]["message"]


async def test_an_answer_explains_the_choice_of_its_worker_on_request() -> None:
    async with frontend(ScriptedWorker("w1"), ScriptedWorker("w2")) as kit:
        _, _, headers = await kit.post("/v1/completions", model="m", prompt=PROMPT, max_tokens=2)
        assert "X-Holdfast-Explain" not in headers
        asked = kit.http.post(
            kit.url + "/v1/completions",
            json={"model": "m", "prompt": PROMPT, "max_tokens": 2, "stream": True},
            headers={"X-Holdfast-Explain": "1"},
        )
        async with asked as response:
            why = json.loads(response.headers["X-Holdfast-Explain"])
        assert (why["mode"], why["chosen"]["worker"], why["required_blocks"]) == ("kv", "w1", 4)
        first, second = why["candidates"]
        assert {*TERMS} <= first.keys(), "`holdfast route` shows these terms"
        assert (first["worker"], first["device"], second["device"]) == ("w1", 4, 0)
        assert first["cost"] < second["cost"]


async def test_an_explanation_has_the_best_eight_candidates_and_the_chosen_one() -> None:
    async with frontend(*(ScriptedWorker(f"w{n}") for n in range(11))) as kit:
        kit.director.table.endpoints[("w10", "i1")].weight = 0.0
        slots, drawn = kit.director.routing.slots, {"X-Holdfast-Router-Mode": "random"}
        slots.add("another", WorkerRank("w0", "i1"), now=kit.director.now(), own_blocks=1)
        asked = drawn | {"X-Holdfast-Explain": "1"}
        _, _, headers = await kit.post("/v1/completions", asked, model="m", prompt=PROMPT, max_tokens=1)
        why = json.loads(headers["X-Holdfast-Explain"])
        assert [one["worker"] for one in why["candidates"]] == [f"w{n}" for n in range(1, 9)] + ["w0"]
        assert (why["of"], why["chosen"]["worker"]) == (10, "w0"), "a worker out of service is no candidate"


async def ask_route(kit: Kit, **body: object) -> tuple[int, Any]:
    async with kit.http.post(kit.admin + "/route", json=body) as response:
        return response.status, await response.json()


async def test_a_frontend_explains_where_a_prompt_would_go_and_sends_nothing() -> None:
    workers = [ScriptedWorker(name) for name in ("w1", "w2", "w3")]
    async with frontend(*workers) as kit:
        await kit.complete(PROMPT, 2)
        kit.director.table.endpoints[("w3", "i1")].weight = 0.0
        status, said = await ask_route(kit, tokens=PROMPT)
        assert (status, said["model"], said["why"]) == (200, "m", "the lowest cost")
        assert (said["chosen"]["worker"], said["candidates"][0]["device"]) == ("w1", 4)
        assert said["left_out"] == [{"worker": "w3", "why": "the fleet took it out of service (HEALTHY)"}]
        assert said["known"] == "4 blocks guessed from what was sent"
        _, said = await ask_route(kit, model="m", tokens=PROMPT, cache_salt="x", router={"mode": "random"})
        assert (said["candidates"][0]["device"], said["why"]) == (0, "random choice")
        _, said = await ask_route(kit, prompt=TOKENS.decode(PROMPT))
        assert said["prompt_tokens"] > 1
        assert served(*workers) == [1, 0, 0]
        async with kit.http.post(kit.url + "/route", json={"tokens": PROMPT}) as response:
            assert response.status == 404, "it is not part of the API"


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({}, 400, "give either prompt or tokens"),
        ({"prompt": "a", "tokens": [1]}, 400, "give either prompt or tokens"),
        ({"prompt": "a", "model": "x"}, 404, "the model 'x' does not exist"),
        ({"prompt": "a", "router": {"mode": "best"}}, 400, "the header X-Holdfast-Router-Mode is 'best'"),
        ({"tokens": [-1]}, 400, "below zero"),
        ({"tokens": []}, 400, "must not be empty"),
        ({"prompt": "a", "explain": True}, 400, "explain: Extra inputs are not permitted"),
        ([], 400, "must be a JSON object"),
    ],
)
async def test_an_invalid_question_gets_one_sentence(body: object, status: int, says: str) -> None:
    async with (
        frontend(ScriptedWorker()) as kit,
        kit.http.post(kit.admin + "/route", json=body) as response,
    ):
        assert response.status == status
        assert says in (await response.json())["error"]["message"]


async def test_a_question_may_be_as_long_as_a_request() -> None:
    body = io.BytesIO(json.dumps({"tokens": [1] * 400_000}).encode())
    async with frontend(ScriptedWorker()) as kit, kit.http.post(kit.admin + "/route", data=body) as response:
        assert "the model's context is" in (await response.json())["error"]["message"]


async def test_workers_that_are_no_candidates_are_listed_with_the_reason() -> None:
    workers = [ScriptedWorker(name) for name in ("w1", "w2", "w3", "w4")]
    async with frontend(*workers[:3], admission={"inflight_max": 1}) as kit:
        await kit.add(workers[3], revision="r2")
        await workers[1].stop()
        kit.director.table.endpoints[("w3", "i1")].begin()
        await until(lambda: not kit.plane.reachable("w2", "i1"))
        _, said = await ask_route(kit, tokens=PROMPT)
        kit.director.table.endpoints[("w3", "i1")].end()
        assert {one["worker"]: one["why"] for one in said["left_out"]} == {
            "w2": "this frontend cannot reach it",
            "w3": "it has the maximum number of requests",
            "w4": "it has a different revision or tokenizer",
        }


# --- bursts -----------------------------------------------------------------------------------------------------


def test_a_request_without_a_reported_end_is_dropped_after_an_hour() -> None:
    clock = Clock()
    director = Director(World("f1", Silent(), lambda *_, **__: None, clock), FrontendSettings())  # type: ignore[arg-type]
    slots = director.routing.slots
    slots.add("lost", WorkerRank("w1", "i1"), now=director.now(), prefill_tokens=9)
    for _ in range(2):
        director.tick()
        assert len(slots) == 1
        clock.at += STALE_S / 2
    director.tick()
    assert len(slots) == 0


class Silent:
    """A request plane without reports, of workers that have just started."""

    def reachable(self, worker: str, instance: str) -> bool:
        return True

    recently_heard = reachable

    def load(self, worker: str) -> Load | None:
        return None

    external_load = load

    def others_work(self, worker: str, own_tokens: int, *, begun: bool) -> Literal["", "beside", "before"]:
        return ""

    def load_by_rank(self, worker: str) -> Sequence[Load]:
        return ()

    def external_load_by_rank(self, worker: str) -> Sequence[Load]:
        return ()


FRONTENDS, WORKERS, BURST = 8, 64, 1_000


def burst(prompts: list[list[int]]) -> Counter[str]:
    """Send these requests, in one moment and in turn, to frontends that do not know each other. Return the count per worker."""
    chance = random.Random(7)
    desks = []
    for n in range(FRONTENDS):
        world = World(f"f{n}", Silent(), lambda *_, **__: None, SystemClock(), chance.random)  # type: ignore[arg-type]
        director = Director(world, FrontendSettings())
        one = joined(ScriptedWorker(), profile=replace(PROFILE, max_batch=256))
        director.set_static([replace(one, worker=f"w{k}") for k in range(WORKERS)])
        desks.append(director)
    got: Counter[str] = Counter()
    for n, prompt in enumerate(prompts):
        plan = GenerationRequest(
            id=f"r{n}", model="m", lineage=LINEAGE, prompt=prompt, prompt_text="", sampling=Sampling(max_tokens=8),
            guided=None, deterministic=True, names=BlockNames(prompt, seed()),
        )  # fmt: skip
        routing = desks[n % FRONTENDS].routing
        choice = routing.route(plan, ())
        routing.state.begin(choice, plan, ())
        got[choice.endpoint.worker] += 1
    return got


def test_a_burst_in_one_moment_spreads_over_the_workers_before_any_report() -> None:
    got = burst([[300 + n] * 512 for n in range(BURST)])
    even = BURST / WORKERS
    assert len(got) == WORKERS, "no worker stays idle"
    assert max(got.values()) < 2 * even, got.most_common(3)


def test_a_burst_of_one_prompt_does_not_pile_up_at_its_cached_prefix() -> None:
    got = burst([PROMPT * 8] * BURST)
    assert max(got.values()) < 4 * BURST / WORKERS, got.most_common(3)
