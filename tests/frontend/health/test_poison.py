"""A request that brings workers down takes two of them at most, however often and by however many it is repeated, and an innocent
one that was there when they fell is answered."""

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from frontend_kit import first_goes_to, frontend, joined
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scripted_worker import Act, ScriptedWorker

from controller.frontend.health.local_breakers import LocalBreakers
from controller.frontend.health.poison import SETTLED_S, Held, Poisonous, PoisonWatch, Way
from controller.frontend.request.failures import Suspicion
from controller.frontend.request.fingerprint import fingerprint, sketch_of
from controller.frontend.request.state import GenerationRequest
from controller.frontend.settings import FactSettings, LocalBreakerSettings, PoisonSettings
from controller.router.endpoints import ConnectedWorkers, Endpoint
from events.blocks import BlockNames
from events.fact import Observation
from events.observations import RequestFailed, RequestPoisonous, RequestSuspected
from events.wire import Sampling

PROMPT = [300, 301, 302]
ERROR = Way.of("engine_error", "it broke at 0x7f0011223344", 0)


def request_of(prompt: list[int], guided: dict[str, Any] | None = None) -> GenerationRequest:
    return GenerationRequest(
        id="r", model="m", lineage=("r1", "builtin:sim"), prompt=prompt, names=BlockNames(prompt), prompt_text="",
        sampling=Sampling(max_tokens=9), guided=guided, deterministic=True,
    )  # fmt: skip


class Bench(ConnectedWorkers):
    """One frontend's watch, with a clock and workers that fall when they are told to."""

    def __init__(self, frontend: str = "f1", **changes: Any) -> None:
        self.time = 100.0
        self.down: set[tuple[str, str]] = set()
        self.facts: list[Observation] = []
        self.slots = itertools.count(1)
        self.breakers = LocalBreakers(
            frontend, LocalBreakerSettings(), FactSettings(), self.facts.append, lambda: self.time
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
        """A worker dies with what was sent to it, and nobody takes note of anything else for a while."""
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


def test_what_two_workers_fell_with_is_refused_and_told(bench: Bench) -> None:
    first, second, *_ = endpoints()
    request = request_of(PROMPT, {"guided_json": {}})
    assert bench.it.where(request) is None
    bench.fall(first, (request, bench.send(request, first)))
    where = bench.it.where(request)
    assert where is not None and where.waits and where.endpoint is None
    bench.fall(second, (request, bench.send(request, second)))
    with pytest.raises(Poisonous):
        bench.it.where(request)
    with pytest.raises(Poisonous):  # whoever asks
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
def test_a_worker_that_falls_by_itself_raises_the_falls_needed_by_one_and_two_is_the_most(
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


def test_what_fell_with_a_poisonous_request_is_no_evidence_for_the_next_one(bench: Bench) -> None:
    workers = endpoints(6)
    for number, pair in enumerate(zip(workers[::2], workers[1::2], strict=True)):
        request = request_of([*PROMPT, number])
        for worker in pair:
            bench.it.fell_by_itself(worker.key, "disconnected")  # others had tokens from it
            bench.fall(worker, (request, bench.send(request, worker)))
        with pytest.raises(Poisonous):
            bench.it.where(request)


def test_a_fall_of_long_ago_or_a_connection_that_is_back_is_no_evidence(bench: Bench) -> None:
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


def test_copies_of_what_is_unknown_go_where_the_first_went_until_a_token_has_come(bench: Bench) -> None:
    first, *_ = endpoints()
    bench.send(request_of(PROMPT), first)
    where = bench.it.where(request_of(PROMPT))
    assert where is not None and where.endpoint is first
    bench.it.hold(request_of(PROMPT))  # there was no room
    bench.it.read(request_of(PROMPT), first.key)
    assert bench.it.resolved
    assert bench.it.where(request_of(PROMPT)) is None


def test_a_copy_that_ends_without_a_token_lets_the_next_one_try(bench: Bench) -> None:
    first, *_ = endpoints()
    slot = bench.send(request_of(PROMPT), first)
    bench.it.left(request_of(PROMPT), slot)
    assert bench.it.where(request_of(PROMPT)) is None


def test_innocents_that_were_there_are_tried_one_by_one_and_answered(bench: Bench) -> None:
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


def test_a_newcomer_goes_to_others_while_a_suspect_is_tried(bench: Bench) -> None:
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
    assert bench.it.where(newcomer) is None, "it is none any more"


def test_a_newcomer_that_has_nowhere_else_to_go_goes_there(bench: Bench) -> None:
    """Nobody can say then with whose prompt its worker falls."""
    first, second, *_ = endpoints()
    suspect, newcomer = request_of(PROMPT), request_of([900, 901])
    bench.fall(first, (suspect, bench.send(suspect, first)))
    sent = bench.send(suspect, second)
    bench.fall(second, (suspect, sent), (newcomer, bench.send(newcomer, second)))
    assert bench.it.where(suspect) is not None and bench.said(RequestPoisonous) == []


def test_a_suspect_that_waits_too_long_goes_anywhere_and_is_not_condemned_for_it(bench: Bench) -> None:
    first, second, third, *_ = endpoints()
    one, other = request_of([1, 2]), request_of([3, 4])
    bench.fall(first, (one, bench.send(one, first)), (other, bench.send(other, first)))
    slot = bench.send(one, second)
    bench.it.hold(other)
    bench.time += 2.1
    where = bench.it.where(other)
    assert where is not None and not where.waits
    beside = bench.send(other, second)
    bench.fall(second, (other, beside))  # which of them it was nobody knows
    where = bench.it.where(other)
    assert where is not None and where.waits
    bench.it.left(one, slot)
    alone = bench.send(other, third)
    bench.fall(third, (other, alone))
    with pytest.raises(Poisonous):
        bench.it.where(other)


def test_a_worker_whose_connection_only_broke_has_not_fallen(bench: Bench) -> None:
    first, second, *_ = endpoints()
    request = request_of(PROMPT)
    bench.fall(first, (request, bench.send(request, first)))
    bench.fall(second, (request, bench.send(request, second)))
    bench.down.clear()  # both are back, as the same lives
    assert bench.it.where(request) is None
    assert bench.said(RequestPoisonous) == []


def test_nothing_is_tried_while_others_may_be_dying_with_it(bench: Bench) -> None:
    first, *_ = endpoints()
    request = request_of(PROMPT)
    bench.fall(first, (request, bench.send(request, first)))
    bench.time -= SETTLED_S
    with pytest.raises(Held):
        bench.it.where(request)


def test_its_time_over_it_is_tried_once_and_refused_for_twice_as_long(bench: Bench) -> None:
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


def test_a_token_clears_it(bench: Bench) -> None:
    first, second, *_ = endpoints()
    request = request_of(PROMPT)
    bench.fall(first, (request, bench.send(request, first)))
    bench.send(request, second)
    bench.it.read(request, second.key)
    assert bench.it.where(request) is None
    bench.fall(second, (request, bench.send(request, second)))
    assert bench.it.where(request) is not None and bench.said(RequestPoisonous) == []


def test_frontends_tell_one_another(bench: Bench) -> None:
    first, second, *_ = endpoints()
    other = Bench("f2")
    request = request_of(PROMPT)
    bench.fall(first, (request, bench.send(request, first)))
    other.fall(second, (request, other.send(request, second)))
    for one, another in ((bench, other), (other, bench)):
        one.down |= another.down
        for fact in another.said(RequestSuspected):
            one.it.heard(fact, 0.1)
        one.time += SETTLED_S
    for one in (bench, other):
        with pytest.raises(Poisonous):
            one.it.where(request)
    late = Bench("f3")
    for fact in bench.said(RequestPoisonous):
        late.it.heard(fact, 590.0)
    with pytest.raises(Poisonous):
        late.it.where(request)
    late.time += 11
    assert late.it.where(request) is not None  # a suspect still


# --- stalls


def stick(bench: Bench, request: GenerationRequest, to: Endpoint, *, connected: bool = True) -> bool:
    """A worker's engine is stuck with a request that it had not begun. Return whether that counts as a fall by it."""
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


def test_what_two_engines_got_stuck_with_is_refused_for_a_short_time(bench: Bench) -> None:
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


def test_an_engine_that_goes_on_again_did_not_fall(bench: Bench) -> None:
    first, second, *_ = endpoints()
    request = request_of(PROMPT)
    works(bench, first, second)
    assert stick(bench, request, first)
    bench.down.clear()
    assert stick(bench, request, second)
    assert bench.it.where(request) is not None and not bench.said(RequestPoisonous)


def test_silent_workers_and_idle_ones_are_not_held_against_a_request(bench: Bench) -> None:
    """All workers that are stopped at once, and all upstreams: the request is innocent."""
    first, second, third, _ = endpoints()
    request = request_of(PROMPT)
    works(bench, first, second)
    assert not stick(bench, request, first, connected=False)
    assert not stick(bench, request, third), "no token of it was seen lately: it may have hung before"
    bench.time += 61
    assert not stick(bench, request, second)
    assert bench.it.where(request) is None and not bench.said(RequestSuspected)


async def test_a_request_whose_stream_stalls_at_two_workers_that_go_on_is_not_tried_at_a_third() -> None:
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
            for n in range(4):  # each has worked lately
                await kit.complete([*PROMPT, 300 + n], 2)
            status, body, _ = await kit.post("/v1/completions", model="m", prompt=PROMPT, max_tokens=4)
            assert (status, body.get("error", {}).get("code")) == expected
            assert (
                [len(worker.requests) for worker in workers] == [2, 2, 1, 1]
                if how == "stall"
                else [2, 2, 2, 1]
            )
            assert len(kit.said(RequestPoisonous)) == (2 if how == "stall" else 0)


# --- errors


def fails(bench: Bench, request: GenerationRequest, to: Endpoint, way: Way = ERROR) -> Suspicion:
    if not bench.it.repeats(request, to.key, way):
        bench.breakers.failed(to.key, way.reason, 0, bench.breakers.routed(to.key))
    return bench.it.failed(request, to.key, way, 0)


def test_the_same_error_of_two_workers_is_the_requests_own_and_is_taken_back(bench: Bench) -> None:
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
def test_another_error_or_another_place_is_another_way(bench: Bench, way: Way) -> None:
    first, second, *_ = endpoints()
    request = request_of(PROMPT)
    fails(bench, request, first, Way.of("engine_error", "it broke", 0))
    assert fails(bench, request, second, way) is Suspicion.NONE


def test_workers_that_fail_others_too_are_at_fault_themselves(bench: Bench) -> None:
    first, second, *_ = endpoints()
    for n in range(2):
        fails(bench, request_of([n, n]), first)
    request = request_of(PROMPT)
    fails(bench, request, first)
    assert fails(bench, request, second) is Suspicion.NONE
    assert bench.breakers.outcomes(first.key).failures == 3


def test_repeated_at_one_worker_it_counts_once(bench: Bench) -> None:
    first, *_ = endpoints()
    for _ in range(6):
        fails(bench, request_of(PROMPT), first)
    assert bench.breakers.outcomes(first.key).failures == 1
    assert len(bench.said(RequestFailed)) == 1
    where = bench.it.where(request_of(PROMPT))
    assert where is not None and where.avoid == {first.key} and not where.waits
    bench.it.served(request_of(PROMPT))  # somewhere else it was answered
    assert bench.it.where(request_of(PROMPT)) is None


async def test_a_request_that_every_worker_fails_in_the_same_way_opens_no_breaker() -> None:
    """Six times, as it was found: then its like is refused, and others are served."""
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
def test_a_fingerprint_holds_its_sketch(prompt: list[int], guided: dict[str, Any] | None) -> None:
    sketch = BlockNames(prompt).sketch
    name = fingerprint(sketch, "m", prompt, guided)
    assert sketch_of(name) == sketch == BlockNames(list(prompt)).sketch
    assert fingerprint(sketch, "another", prompt, guided) != name


def test_no_more_is_remembered_than_there_is_room_for() -> None:
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
)  # a newcomer goes where a suspect is tried
@settings(max_examples=300)
@given(st.lists(ACTIONS, max_size=60), st.sets(st.integers(0, 3), max_size=2))
def test_whatever_happens_an_innocent_is_never_condemned_and_a_poisonous_one_takes_two(
    actions: list[tuple[str, int, int]], poison: set[int]
) -> None:
    """Workers fall only with what is poisonous and alone with it; a new life takes the place of each."""
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
            assert fingerprint(request.names.sketch, "m", request.prompt, None) not in condemned
        assert fallen[n] <= 2
