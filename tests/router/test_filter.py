"""The filter gives the same result for all endpoints at once and one at a time."""

from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest
from filter_rules import Links, rules
from hypothesis import given
from hypothesis import strategies as st
from router_kit import BLOCK, PROFILE, endpoint

from controller.router.endpoints import Endpoint, WorkerRank
from controller.router.load.active_sequences import ActiveSequences
from controller.router.selection.filter import (
    AllBusy,
    AllTried,
    Filter,
    Headroom,
    NoneReachable,
    NoneRoutable,
    NotServed,
    NoWorker,
    cost,
)
from controller.router.selection.score import Pricing, ScoredPrompt
from controller.router.selection.selector import Chooser, Mode
from events.wire import Load

CAP = 4


@dataclass(frozen=True)
class Made:
    """One worker as the rules see it."""

    weight: float = 1.0
    reachable: bool = True
    tried: bool = False
    allowed: bool = True
    active: int = 0
    others: int = 0
    recently_heard: bool = True
    blocks: int = 0  # in use there
    waiting_max: int | None = None  # in addition to a batch of one
    refused: bool = False  # a request, since it last reported its load
    enough: bool = False  # overloaded, by its KV blocks or unread prompts


MADE = st.builds(
    Made,
    weight=st.sampled_from([0.0, 0.5, 1.0, 1.0]),
    reachable=st.integers(0, 3).map(bool),
    tried=st.integers(0, 3).map(lambda n: n == 0),
    allowed=st.integers(0, 3).map(bool),
    active=st.integers(0, CAP),
    others=st.integers(0, CAP),
    recently_heard=st.integers(0, 2).map(bool),
    blocks=st.integers(0, 4),
    waiting_max=st.none() | st.integers(0, CAP),
    refused=st.integers(0, 4).map(lambda n: n == 0),
    enough=st.integers(0, 4).map(lambda n: n == 0),
)
FLEETS = st.lists(MADE, max_size=14)


@dataclass(frozen=True)
class Asked:
    """The parameters of one filter call."""

    room: Headroom = Headroom.FRESH
    frontends: int = 1
    contenders: int = 1  # frontends with waiting requests, including this one


ASKED = st.builds(Asked, st.sampled_from(Headroom), st.integers(1, 3), st.integers(1, 3))


def holds_one_more(one: Made) -> bool:
    """Return whether a worker with a batch of one can hold another request."""
    whole = one.active + one.others
    return not one.refused and (one.waiting_max is None or whole < 1 + one.waiting_max)


def takes_a_fresh_one(one: Made, asked: Asked) -> bool:
    """Return whether a worker may get a new request by the frontends' own cap."""
    share = one.active * asked.frontends < CAP or asked.frontends == 1
    modest = (
        one.waiting_max is None
        or one.active * asked.contenders < 1 + one.waiting_max
        or asked.contenders == 1
    )
    return one.active < CAP and modest and (share or one.active + one.others < CAP) and not one.enough


def plainly(fleet: list[Made], asked: Asked) -> list[int]:
    """Filter in the order of the module's docstring."""
    numbers = list(range(len(fleet)))
    room = {
        n: asked.room is Headroom.NONE
        or (holds_one_more(fleet[n]) and (asked.room is Headroom.HELD or takes_a_fresh_one(fleet[n], asked)))
        for n in numbers
    }
    stages: list[tuple[type[NoWorker], Any]] = [
        (NoneRoutable, lambda n: fleet[n].weight > 0),
        (NoneReachable, lambda n: fleet[n].reachable),
        (AllTried, lambda n: not fleet[n].tried),
        (NoneRoutable, lambda n: fleet[n].allowed),
        (AllBusy, lambda n: room[n]),
    ]
    if not numbers:
        raise NotServed
    for error, keeps in stages:
        numbers = [n for n in numbers if keeps(n)]
        if not numbers:
            raise error
    return [n for n in numbers if fleet[n].recently_heard] or numbers


def filter_of(fleet: list[Made], asked: Asked) -> tuple[Filter, list[Endpoint]]:
    alone = replace(PROFILE, max_batch=1)
    endpoints = [
        endpoint(str(n), one.weight, profile=alone, waiting_max=one.waiting_max)
        for n, one in enumerate(fleet)
    ]
    loads = [Load(running=one.others) for one in fleet]
    for one, made in zip(endpoints, fleet, strict=True):
        one.begin(requests=made.active)
        if made.refused:
            one.refused_at = loads[int(one.worker)]
    links = Links(
        there=lambda worker: fleet[int(worker)].reachable,
        heard=lambda worker: fleet[int(worker)].recently_heard,
        external=lambda worker: loads[int(worker)],
    )
    known = rules(
        links,
        CAP,
        lambda one: fleet[int(one.worker)].enough,
        barred={one.key for one, made in zip(endpoints, fleet, strict=True) if not made.allowed},
        frontends=asked.frontends,
        contenders={"m": asked.contenders} if asked.contenders > 1 else {},
    )
    tried = {one.key for one, made in zip(endpoints, fleet, strict=True) if made.tried}
    return Filter(endpoints, known, tried, asked.room), endpoints


@given(FLEETS, ASKED, st.floats(0, 1, exclude_max=True))
def test_the_best_remaining_endpoint_is_chosen(fleet: list[Made], asked: Asked, draw: float) -> None:
    among, endpoints = filter_of(fleet, asked)
    slots = ActiveSequences()
    for n, made in enumerate(fleet):
        slots.add(n, WorkerRank(*endpoints[n].key), now=0.0, own_blocks=made.blocks)
    chooser, prompt = Chooser(slots), ScoredPrompt(BLOCK, BLOCK)
    try:
        left = plainly(fleet, asked)
    except NoWorker as error:
        with pytest.raises(type(error)) as caught:
            among.left()
        assert caught.type is type(error)
        with pytest.raises(type(error)):
            chooser.choose(among, prompt, pricing=Pricing(), now=0.0, draw=draw)
        return
    assert among.left() == [endpoints[n] for n in left]
    assert [n for n in left if fleet[n].recently_heard] == [
        n for n, one in enumerate(endpoints) if among.fits(one)
    ]
    lowest = min((1 + fleet[n].blocks) / fleet[n].weight for n in left)
    best = {str(n) for n in left if (1 + fleet[n].blocks) / fleet[n].weight == lowest}
    assert chooser.choose(among, prompt, pricing=Pricing(), now=0.0, draw=draw).endpoint.worker in best
    assert chooser.choose(among.left(), prompt, pricing=Pricing(), now=0.0, draw=draw).endpoint.worker in best
    for mode in Mode:
        assert int(chooser.choose(among, prompt, mode=mode, now=0.0, draw=draw).endpoint.worker) in left


def test_workers_that_are_full_by_the_counts_get_no_load_check() -> None:
    """In an overload each rejection checks all workers: checking 64 workers' KV blocks took a third of a frontend's time."""
    among, endpoints = filter_of([Made(active=CAP)] * 3 + [Made(others=CAP)], Asked())
    looked: list[Endpoint] = []

    def look(endpoint: Endpoint) -> bool:
        looked.append(endpoint)
        return False

    among.rules = rules(among.rules.plane, CAP, look)
    assert among.left() == [endpoints[3]], "others fill its batch, but a lone frontend may fill its own share"
    assert looked == [endpoints[3]]


@pytest.mark.parametrize("mode", list(Mode))
def test_equal_workers_are_chosen_evenly_even_if_some_are_out(mode: Mode) -> None:
    fleet = [Made(tried=True), Made(reachable=False), Made(), Made(), Made()]
    among, _ = filter_of(fleet, Asked())
    chooser, counts, dice = Chooser(ActiveSequences()), dict.fromkeys("234", 0), Random(1)
    for _ in range(1200):
        choice = chooser.choose(among, ScoredPrompt(BLOCK, BLOCK), mode=mode, now=0.0, draw=dice.random())
        counts[choice.endpoint.worker] += 1
    assert all(abs(count - 400) < 60 for count in counts.values()), counts


@pytest.mark.parametrize("mode", [Mode.ROUND_ROBIN, Mode.RANDOM])
@pytest.mark.parametrize("replica_sync", [False, True])
def test_a_worker_gets_requests_in_proportion_to_the_weight_that_it_reports(
    mode: Mode, replica_sync: bool
) -> None:
    endpoints, shares = [endpoint(f"w{n}") for n in range(3)], {"w0": 1.0, "w1": 1.0, "w2": 0.25}
    plane = Links(external=lambda worker: Load(weight=shares[worker]))
    among, chooser = Filter(endpoints, rules(plane)), Chooser(ActiveSequences(), plane)
    counts, dice = dict.fromkeys(shares, 0), Random(1)
    others = None if replica_sync else plane
    for _ in range(900):
        choice = chooser.choose(
            among, ScoredPrompt(BLOCK, BLOCK), mode=mode, now=0.0, draw=dice.random(), others=others
        )
        counts[choice.endpoint.worker] += 1
    assert counts["w2"] == pytest.approx(100, abs=25)
    assert counts["w0"] == pytest.approx(counts["w1"], abs=75)


def test_the_cost_of_a_worker_grows_as_its_reported_weight_shrinks() -> None:
    one = endpoint("w0")
    assert cost(one, Load(running=1, weight=0.25)) == 4 * cost(one, Load(running=1))
