"""A request that crashes workers takes down two at most, however often it is repeated.

Innocent requests that were on these workers are answered.
"""

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from frontend_kit import first_goes_to, frontend, joined
from hypothesis import example, given, settings
from hypothesis import strategies as st
from json_types import Json
from msgspec import structs
from scripted_worker import Act, ScriptedWorker

from controller.frontend.health.local_breakers import LocalBreakers
from controller.frontend.health.poison import (
    SETTLED_S,
    Held,
    Poisonous,
    PoisonWatch,
    Way,
    fingerprint,
    sketch_of,
)
from controller.frontend.request.failures import Suspicion
from controller.frontend.request.state import GenerationRequest
from controller.frontend.settings import FactSettings, LocalBreakerSettings, PoisonSettings
from controller.router.endpoints import ConnectedWorkers, Endpoint
from events.blocks import BlockNames
from events.fact import Observation
from events.observations import RequestFailed, RequestPoisonous, RequestSuspected
from events.wire import Sampling

PROMPT = [300, 301, 302]
ERROR = Way.of("engine_error", "it broke at 0x7f0011223344", 0)


def request_of(prompt: list[int], guided: Json | None = None) -> GenerationRequest:
    return GenerationRequest(
        id="r", model="m", lineage=("r1", "builtin:sim"), prompt=prompt, names=BlockNames(prompt), prompt_text="",
        sampling=Sampling(max_tokens=9), guided=guided, deterministic=True,
    )  # fmt: skip


class Bench(ConnectedWorkers):
    """One frontend's poison watch, with a clock and workers that die on command."""

    def __init__(self, frontend: str = "f1", **changes: object) -> None:
        self.time = 100.0
        self.down: set[tuple[str, str]] = set()
        self.facts: list[Observation] = []
        self.slots = itertools.count(1)
        self.breakers = LocalBreakers(
            frontend, LocalBreakerSettings(), FactSettings(), self.facts.append, lambda: self.time, self
        )
        self.it = PoisonWatch(
            frontend,
            PoisonSettings(**changes),
            self.breakers,
            self,
            lambda fact, **_: self.facts.append(fact),
        )

    def reachable(self, worker: str, instance: str) -> bool:
        return (worker, instance) not in self.down

    def send(self, request: GenerationRequest, to: Endpoint) -> int:
        slot = next(self.slots)
        self.it.sent(request, to, slot)
        return slot

    def fall(self, to: Endpoint, *sent: tuple[GenerationRequest, int]) -> None:
        """Let a worker die with the requests sent to it, and let time pass."""
        self.down.add(to.key)
        for request, slot in sent:
            self.it.fell(request, to, slot, "disconnected")
            self.it.left(request, slot)
        self.time += SETTLED_S + 0.01

    def said(self, kind: type) -> list[Any]:
        return [fact for fact in self.facts if isinstance(fact, kind)]


def endpoints(count: int = 4) -> list[Endpoint]:
    one = joined(ScriptedWorker())
    return [Endpoint(replace(one, worker=f"w{n}", instance="i1"), weight=1.0) for n in range(count)]


@pytest.fixture
def bench() -> Bench:
    return Bench()


# --- falls


def test_a_request_with_which_two_workers_died_is_refused_and_reported(bench: Bench) -> None:
    first, second, *_ = endpoints()
    request = request_of(PROMPT, {"guided_json": {}})
    assert bench.it.where(request) is None
    bench.fall(first, (request, bench.send(request, first)))
    where = bench.it.where(request)
    assert where is not None and where.waits and where.endpoint is None
    bench.fall(second, (request, bench.send(request, second)))
    with pytest.raises(Poisonous):
        bench.it.where(request)
    with pytest.raises(Poisonous):  # from any client
        bench.it.where(request_of(PROMPT, {"guided_json": {}}))
    assert bench.it.where(request_of(PROMPT)) is None and bench.it.where(request_of([*PROMPT, 303])) is None
    assert [(fact.worker, fact.prompt_tokens) for fact in bench.said(RequestSuspected)] == [
        ("w0", 3),
        ("w1", 3),
    ]
    told = bench.said(RequestPoisonous)
    assert [(fact.worker, fact.guided, fact.max_tokens, fact.refused_s) for fact in told] == [
        ("w0", "guided_json", 9, 600.0), ("w1", "guided_json", 9, 600.0),
    ]  # fmt: skip
    assert len({fact.fingerprint for fact in told}) == 1


@pytest.mark.parametrize("others", [1, 2, 3])
def test_a_worker_that_dies_for_another_reason_raises_the_deaths_needed_by_one_up_to_two(
    bench: Bench, others: int
) -> None:
    """In an outage that kills one worker after another, a request can be unlucky twice without being the cause."""
    workers, request = endpoints(4 + others), request_of(PROMPT)
    for other in workers[4:]:
        bench.it.fell_by_itself(other.key, "disconnected")
        bench.down.add(other.key)
    *unlucky, last = workers[: 2 + min(others, 2)]
    for worker in unlucky:
        bench.fall(worker, (request, bench.send(request, worker)))
        assert bench.it.where(request) is not None  # it is tried again
    bench.fall(last, (request, bench.send(request, last)))
    with pytest.raises(Poisonous):
        bench.it.where(request)


def test_workers_crashed_by_a_poisonous_request_are_no_evidence_for_the_next_one(bench: Bench) -> None:
    workers = endpoints(6)
    for number, pair in enumerate(zip(workers[::2], workers[1::2], strict=True)):
        request = request_of([*PROMPT, number])
        for worker in pair:
            bench.it.fell_by_itself(worker.key, "disconnected")  # others had tokens from it
            bench.fall(worker, (request, bench.send(request, worker)))
        with pytest.raises(Poisonous):
            bench.it.where(request)


def test_an_old_death_or_a_restored_connection_is_no_evidence(bench: Bench) -> None:
    old, back, first, second = endpoints()
    bench.it.fell_by_itself(old.key, "disconnected")
    bench.down.add(old.key)
    bench.time += 61.0
    bench.it.fell_by_itself(back.key, "disconnected")
    request = request_of(PROMPT)
    for worker in (first, second):
        bench.fall(worker, (request, bench.send(request, worker)))
    with pytest.raises(Poisonous):
        bench.it.where(request)


def test_copies_of_an_unknown_request_go_to_the_same_worker_until_a_token(bench: Bench) -> None:
    first, *_ = endpoints()
    bench.send(request_of(PROMPT), first)
    where = bench.it.where(request_of(PROMPT))
    assert where is not None and where.endpoint is first
    bench.it.hold(request_of(PROMPT))  # there was no room
    bench.it.read(request_of(PROMPT), first.key)
    assert bench.it.resolved
    assert bench.it.where(request_of(PROMPT)) is None


def test_a_copy_that_ends_without_a_token_lets_the_next_one_be_tried(bench: Bench) -> None:
    first, *_ = endpoints()
    slot = bench.send(request_of(PROMPT), first)
    bench.it.left(request_of(PROMPT), slot)
    assert bench.it.where(request_of(PROMPT)) is None


def test_innocent_requests_on_dead_workers_are_tried_one_by_one_and_answered(bench: Bench) -> None:
    first, second, third, fourth = endpoints()
    poison, *innocent = [request_of([*PROMPT, n]) for n in range(3)]
    bench.fall(first, *[(one, bench.send(one, first)) for one in (poison, *innocent)])
    tried = bench.send(poison, second)
    where = bench.it.where(innocent[0])
    assert where is not None and where.avoid == {second.key} and where.waits
    bench.send(innocent[0], third)
    bench.fall(second, (poison, tried))
    with pytest.raises(Poisonous):
        bench.it.where(poison)
    bench.it.read(innocent[0], third.key)
    assert bench.it.where(innocent[0]) is None
    bench.send(innocent[1], fourth)
    bench.it.read(innocent[1], third.key)
    assert [fact.prompt_tokens for fact in bench.said(RequestPoisonous)] == [4, 4]


def test_a_new_request_avoids_a_worker_where_a_suspect_is_tried(bench: Bench) -> None:
    first, second, *_ = endpoints()
    suspect, newcomer = request_of(PROMPT), request_of([900, 901])
    bench.fall(first, (suspect, bench.send(suspect, first)))
    bench.send(suspect, second)
    where = bench.it.where(newcomer)
    assert where is not None and (where.avoid, where.endpoint, where.waits) == (
        frozenset({second.key}),
        None,
        False,
    )
    bench.it.read(suspect, first.key)
    assert bench.it.where(newcomer) is None, "it is no suspect any more"


def test_a_new_request_without_another_worker_goes_to_that_worker(bench: Bench) -> None:
    """Then it is unknown which prompt crashed the worker."""
    first, second, *_ = endpoints()
    suspect, newcomer = request_of(PROMPT), request_of([900, 901])
    bench.fall(first, (suspect, bench.send(suspect, first)))
    sent = bench.send(suspect, second)
    bench.fall(second, (suspect, sent), (newcomer, bench.send(newcomer, second)))
    assert bench.it.where(suspect) is not None and bench.said(RequestPoisonous) == []


def test_a_suspect_that_waits_too_long_goes_anywhere_without_being_condemned_for_it(bench: Bench) -> None:
    first, second, third, *_ = endpoints()
    one, other = request_of([1, 2]), request_of([3, 4])
    bench.fall(first, (one, bench.send(one, first)), (other, bench.send(other, first)))
    slot = bench.send(one, second)
    bench.it.hold(other)
    bench.time += 2.1
    where = bench.it.where(other)
    assert where is not None and not where.waits
    beside = bench.send(other, second)
    bench.fall(second, (other, beside))  # it is unknown which of them was the cause
    where = bench.it.where(other)
    assert where is not None and where.waits
    bench.it.left(one, slot)
    alone = bench.send(other, third)
    bench.fall(third, (other, alone))
    with pytest.raises(Poisonous):
        bench.it.where(other)


def test_a_worker_with_only_a_broken_connection_has_not_died(bench: Bench) -> None:
    first, second, *_ = endpoints()
    request = request_of(PROMPT)
    bench.fall(first, (request, bench.send(request, first)))
    bench.fall(second, (request, bench.send(request, second)))
    bench.down.clear()  # both are connected again, as the same lives
    assert bench.it.where(request) is None
    assert bench.said(RequestPoisonous) == []


def test_no_request_is_tried_while_other_workers_may_be_dying_with_it(bench: Bench) -> None:
    first, *_ = endpoints()
    request = request_of(PROMPT)
    bench.fall(first, (request, bench.send(request, first)))
    bench.time -= SETTLED_S
    with pytest.raises(Held):
        bench.it.where(request)


def test_after_its_time_it_is_tried_once_and_then_refused_for_twice_as_long(bench: Bench) -> None:
    workers = endpoints(8)
    request = request_of(PROMPT)
    for worker in workers[:2]:
        bench.fall(worker, (request, bench.send(request, worker)))
    waits = []
    for worker in workers[2:5]:
        with pytest.raises(Poisonous):
            bench.it.where(request)
        waits.append(bench.said(RequestPoisonous)[-1].refused_s)
        bench.time += waits[-1]
        assert bench.it.where(request) is not None
        bench.fall(worker, (request, bench.send(request, worker)))
    assert waits == [600, 1200, 2400]


def test_a_token_clears_a_request(bench: Bench) -> None:
    first, second, *_ = endpoints()
    request = request_of(PROMPT)
    bench.fall(first, (request, bench.send(request, first)))
    bench.send(request, second)
    bench.it.read(request, second.key)
    assert bench.it.where(request) is None
    bench.fall(second, (request, bench.send(request, second)))
    assert bench.it.where(request) is not None and bench.said(RequestPoisonous) == []


def test_frontends_share_their_evidence(bench: Bench) -> None:
    first, second, *_ = endpoints()
    other = Bench("f2")
    request = request_of(PROMPT)
    bench.fall(first, (request, bench.send(request, first)))
    other.fall(second, (request, other.send(request, second)))
    for one, another in ((bench, other), (other, bench)):
        one.down |= another.down
        for fact in another.said(RequestSuspected):
            one.it.apply_report(fact, 0.1)
        one.time += SETTLED_S
    for one in (bench, other):
        with pytest.raises(Poisonous):
            one.it.where(request)
    late = Bench("f3")
    for fact in bench.said(RequestPoisonous):
        late.it.apply_report(fact, 590.0)
    with pytest.raises(Poisonous):
        late.it.where(request)
    late.time += 11
    assert late.it.where(request) is not None  # still a suspect


# --- stalls


def stick(bench: Bench, request: GenerationRequest, to: Endpoint, *, connected: bool = True) -> bool:
    """Let a worker's engine hang with a request without a token. Return whether that counts as a death caused by it."""
    slot = bench.send(request, to)
    fell = bench.it.brings_down("stalled", to.key, one_stream=False, connected=connected)
    bench.down.add(to.key)
    if fell:
        bench.it.fell(request, to, slot, "stalled")
    bench.it.left(request, slot)
    bench.time += SETTLED_S + 0.01
    return fell


def works(bench: Bench, *workers: Endpoint) -> None:
    for one in workers:
        bench.it.read(request_of([7, 8, 9]), one.key)


def test_a_request_with_which_two_engines_got_stuck_is_refused_for_a_short_time(bench: Bench) -> None:
    first, second, *_ = endpoints()
    request = request_of(PROMPT)
    works(bench, first, second)
    assert stick(bench, request, first)
    assert bench.it.where(request) is not None
    assert stick(bench, request, second)
    with pytest.raises(Poisonous):
        bench.it.where(request)
    told = bench.said(RequestPoisonous)
    assert [(fact.worker, fact.reason, fact.refused_s) for fact in told] == [
        ("w0", "stalled", 10.0),
        ("w1", "stalled", 10.0),
    ]


def test_an_engine_that_recovers_did_not_die(bench: Bench) -> None:
    first, second, *_ = endpoints()
    request = request_of(PROMPT)
    works(bench, first, second)
    assert stick(bench, request, first)
    bench.down.clear()
    assert stick(bench, request, second)
    assert bench.it.where(request) is not None and not bench.said(RequestPoisonous)


def test_silent_and_idle_workers_do_not_count_against_a_request(bench: Bench) -> None:
    """If all workers or all upstreams stop at once, the request is innocent."""
    first, second, third, _ = endpoints()
    request = request_of(PROMPT)
    works(bench, first, second)
    assert not stick(bench, request, first, connected=False)
    assert not stick(bench, request, third), "it produced no token recently: it may have hung before"
    bench.time += 61
    assert not stick(bench, request, second)
    assert bench.it.where(request) is None and not bench.said(RequestSuspected)


async def test_a_request_that_stalls_on_two_running_workers_is_not_tried_on_a_third() -> None:
    first = ScriptedWorker("w1", acts=deque([Act(after=2, how="quiet")]))
    others = [ScriptedWorker(n, acts=deque([Act(after=0, how="quiet")])) for n in ("w2", "w3")]
    workers = [first, *others]
    stall = {"floor_s": 0.4, "ceiling_s": 0.5, "sweep_s": 0.05}
    async with frontend(stall=stall, admission={"first_token_s": 0.5}) as kit:
        await first_goes_to(kit, *workers[:2])
        await kit.add(workers[2])
        status, body, _ = await kit.post("/v1/completions", model="m", prompt=PROMPT, max_tokens=20)
        assert (status, body["error"]["code"]) == (422, "request_poisonous")
        assert sum(len(worker.requests) for worker in workers) == 2
        assert {fact.reason for fact in kit.said(RequestPoisonous)} == {"stalled"}
        assert set(kit.director.breakers.positions().values()) == {"closed"}
        assert all(kit.director.breakers.outcomes(key).stalls == 0 for key in kit.director.table.endpoints)


async def test_a_request_that_hangs_engines_takes_down_two_of_four_and_silent_workers_make_none_poisonous() -> (
    None
):
    for how, expected in (("stall", (422, "request_poisonous")), ("silence", (200, None))):
        acts = [Act(), Act(after=0, how=how)]
        workers = [ScriptedWorker(f"{how}{n}", acts=deque(acts if n < 2 else [])) for n in range(4)]
        async with frontend(*workers, router={"mode": "round-robin"}) as kit:
            for n in range(4):  # each has worked recently
                await kit.complete([*PROMPT, 300 + n], 2)
            status, body, _ = await kit.post("/v1/completions", model="m", prompt=PROMPT, max_tokens=4)
            assert (status, body.get("error", {}).get("code")) == expected
            assert (
                [len(worker.requests) for worker in workers] == [2, 2, 1, 1]
                if how == "stall"
                else [2, 2, 2, 1]
            )
            assert len(kit.said(RequestPoisonous)) == (2 if how == "stall" else 0)


async def test_a_worker_that_died_under_a_running_stream_lets_a_request_survive_two_deaths_more() -> None:
    """The first worker gets stuck under a stream that has tokens; two more under a request that has none."""
    second = {
        "s0": Act(after=3, how="stall"),
        "s2": Act(after=0, how="stall"),
        "s3": Act(after=0, how="stall"),
    }
    workers = [ScriptedWorker(n, acts=deque([Act(), second.get(n, Act())])) for n in ("s0", "s1", "s2", "s3")]
    async with frontend(*workers, router={"mode": "round-robin"}) as kit:
        for n in range(4):  # each has worked recently
            await kit.complete([*PROMPT, 300 + n], 2)
        await kit.complete([*PROMPT, 400], 6)  # begins on s0, continues on s1
        status, body, _ = await kit.post("/v1/completions", model="m", prompt=PROMPT, max_tokens=4)
        assert status == 200, body
        assert [len(worker.requests) for worker in workers] == [2, 3, 2, 2]
        assert len(kit.said(RequestSuspected)) == 2 and not kit.said(RequestPoisonous)


# --- errors


def fails(bench: Bench, request: GenerationRequest, to: Endpoint, way: Way = ERROR) -> Suspicion:
    if not bench.it.repeats(request, to.key, way):
        bench.breakers.failed(to.key, way.reason, 0, bench.breakers.routed(to.key))
    return bench.it.failed(request, to.key, way, 0)


def test_the_same_error_on_two_workers_is_the_requests_fault_and_is_undone(bench: Bench) -> None:
    first, second, *_ = endpoints()
    request = request_of(PROMPT)
    assert fails(bench, request, first) is Suspicion.NONE
    assert (
        fails(bench, request, second, Way.of("engine_error", "it broke at 0x00aa11bb22cc", 0))
        is Suspicion.POISONOUS
    )
    assert [bench.breakers.outcomes(one.key).failures for one in (first, second)] == [0, 0]
    with pytest.raises(Poisonous):
        bench.it.where(request_of(PROMPT))
    assert [(f.worker, f.failures_in_a_row, f.refused_s) for f in bench.said(RequestPoisonous)] == [
        ("w0", 0, 10.0), ("w1", 0, 10.0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "way",
    [
        Way.of("engine_error", "out of memory", 0),
        Way.of("non_finite", "it broke", 0),
        Way.of("engine_error", "it broke", 4),
    ],
)
def test_another_error_or_position_is_another_way_of_failing(bench: Bench, way: Way) -> None:
    first, second, *_ = endpoints()
    request = request_of(PROMPT)
    fails(bench, request, first, Way.of("engine_error", "it broke", 0))
    assert fails(bench, request, second, way) is Suspicion.NONE


def test_workers_that_fail_other_requests_too_are_at_fault_themselves(bench: Bench) -> None:
    first, second, *_ = endpoints()
    for n in range(2):
        fails(bench, request_of([n, n]), first)
    request = request_of(PROMPT)
    fails(bench, request, first)
    assert fails(bench, request, second) is Suspicion.NONE
    assert bench.breakers.outcomes(first.key).failures == 3


def test_repeated_failures_on_one_worker_count_once(bench: Bench) -> None:
    first, *_ = endpoints()
    for _ in range(6):
        fails(bench, request_of(PROMPT), first)
    assert bench.breakers.outcomes(first.key).failures == 1
    assert len(bench.said(RequestFailed)) == 1
    where = bench.it.where(request_of(PROMPT))
    assert where is not None and where.avoid == {first.key} and not where.waits
    bench.it.served(request_of(PROMPT))  # it was answered elsewhere
    assert bench.it.where(request_of(PROMPT)) is None


async def test_a_request_that_every_worker_fails_in_the_same_way_opens_no_breaker() -> None:
    """Sent six times: then requests like it are refused, and others are served."""
    workers = [ScriptedWorker(n, acts=deque([Act(after=0, how="error")])) for n in ("w1", "w2", "w3")]
    async with frontend(*workers) as kit:
        for _ in range(6):
            status, body, _ = await kit.post("/v1/completions", model="m", prompt=PROMPT, max_tokens=4)
            assert (status, body["error"]["code"]) == (422, "request_poisonous")
        assert sum(len(worker.requests) for worker in workers) == 2
        assert set(kit.director.breakers.positions().values()) == {"closed"}
        assert {fact.worker for fact in kit.said(RequestPoisonous)} == {
            worker.name for worker in workers if worker.requests
        }
        assert len(kit.said(RequestFailed)) == 2
        for worker in workers:
            worker.acts.clear()
        await kit.complete([*PROMPT, 303], 4)


# --- fingerprints and bounds


@given(st.lists(st.integers(0, 2**32), max_size=50), st.none() | st.dictionaries(st.text(), st.integers()))
def test_a_fingerprint_contains_its_sketch(prompt: list[int], guided: Json | None) -> None:
    sketch = BlockNames(prompt).sketch
    request = request_of(prompt, guided)
    name = fingerprint(request)
    assert sketch_of(name) == sketch == BlockNames(list(prompt)).sketch
    assert fingerprint(structs.replace(request, model="another")) != name


def test_the_memory_is_bounded() -> None:
    small = Bench(records_max=3)
    first, *_ = endpoints()
    requests = [request_of([n]) for n in range(5)]
    for request in requests:
        small.fall(first, (request, small.send(request, first)))
    assert [small.it.where(request) is None for request in requests] == [True, True, False, False, False]


ACTIONS = st.tuples(
    st.sampled_from(("send", "read", "left", "fall", "served", "wait")), st.integers(0, 3), st.integers(0, 4)
)


@example(
    [("send", 0, 0), ("send", 1, 0), ("send", 0, 2), ("send", 2, 2), ("send", 0, 0)], {1, 2}
)  # a new request goes to a worker where a suspect is tried
@settings(max_examples=300)
@given(st.lists(ACTIONS, max_size=60), st.sets(st.integers(0, 3), max_size=2))
def test_an_innocent_request_is_never_condemned_and_a_poisonous_one_takes_two_workers(
    actions: list[tuple[str, int, int]], poison: set[int]
) -> None:
    """Workers die only with a poisonous request, and with it alone; a new life replaces each."""
    bench, lives = Bench(), itertools.count()
    requests = [request_of([n, 7]) for n in range(4)]
    base = joined(ScriptedWorker())
    workers = [
        Endpoint(replace(base, worker=f"w{n}", instance=str(next(lives))), weight=1.0) for n in range(5)
    ]
    there: dict[int, dict[int, list[int]]] = {n: {} for n in range(5)}  # slots of each prompt at each worker
    fallen = dict.fromkeys(range(4), 0)

    def sent(n: int) -> Iterator[tuple[int, int]]:
        yield from ((w, slot) for w, found in there.items() for slot in found.get(n, []))

    for action, n, w in actions:
        request = requests[n]
        if action == "send":
            try:
                where = bench.it.where(request)
            except (Held, Poisonous):
                continue
            if where is not None and where.endpoint is not None:
                w = next((at for at, one in enumerate(workers) if one is where.endpoint), -1)
                if w < 0:
                    continue
            elif where is not None and where.waits and workers[w].key in where.avoid:
                continue
            there[w].setdefault(n, []).append(bench.send(request, workers[w]))
            bench.it.where(request_of([99, w]))
        elif action in ("read", "left", "served") and n not in poison:
            for at, slot in list(sent(n)):
                if action != "left":
                    bench.it.read(request, workers[at].key)
                if action != "read":
                    bench.it.left(request, slot)
                    there[at][n].remove(slot)
            if action == "served":
                bench.it.served(request)
        elif action == "wait":
            bench.time += 0.3
        for at in [at for at, found in there.items() if any(found.get(k) for k in poison)]:
            for k in poison:
                fallen[k] += bool(there[at].get(k))
            lost = [(requests[k], slot) for k, slots in there[at].items() for slot in slots]
            there[at] = {}
            bench.fall(workers[at], *lost)
            workers[at] = Endpoint(replace(base, worker=f"w{at}", instance=str(next(lives))), weight=1.0)
    condemned = {fact.fingerprint for fact in bench.said(RequestPoisonous)}
    for n, request in enumerate(requests):
        if n not in poison:
            assert fingerprint(request) not in condemned
        assert fallen[n] <= 2
