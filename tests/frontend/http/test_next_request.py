"""State cached between requests is never stale: every change applies to the very next request."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import pytest
from frontend_kit import joined
from scripted_worker import ScriptedWorker

from controller.adapters.clock import SystemClock
from controller.deciders.degradation import Degradation
from controller.deciders.fleet import Fleet
from controller.frontend.director import Director, World
from controller.frontend.request.state import GenerationRequest
from controller.frontend.settings import FrontendSettings
from controller.router.endpoints import Endpoint
from controller.router.selection.filter import Headroom, NoWorker
from events.blocks import BlockNames
from events.decisions import Knobs
from events.wire import Load, Sampling

LINEAGE = ("r1", "builtin:sim")
BUSY = Load(running=100, active_tokens=100_000)


class Plane:
    """A plane on which all workers are reachable and idle, unless a test changes that."""

    def __init__(self) -> None:
        self.gone: set[str] = set()
        self.silent: set[str] = set()
        self.loads: dict[str, Load] = {}

    def reachable(self, worker: str, instance: str) -> bool:
        return worker not in self.gone

    def recently_heard(self, worker: str, instance: str) -> bool:
        return worker not in self.gone | self.silent

    def load(self, worker: str) -> Load | None:
        return self.loads.get(worker)

    external_load = load

    def others_work(self, worker: str, own_tokens: int, *, begun: bool) -> Literal["", "beside", "before"]:
        return ""

    def load_by_rank(self, worker: str) -> tuple[Load, ...]:
        return ()

    def external_load_by_rank(self, worker: str) -> tuple[Load, ...]:
        return ()

    def draining(self, worker: str, instance: str) -> bool:
        return False


class Frontend:
    """One frontend with workers a and b; requests stay where they were sent unless a test ends them."""

    def __init__(self, *, live: bool = True) -> None:
        self.plane = Plane()
        world = World("f1", self.plane, lambda *_, **__: None, SystemClock())  # type: ignore[arg-type]
        self.director = Director(world, FrontendSettings())
        if live:
            self.director.go_live()
        self.join("a", "b")

    def join(self, *names: str, **changes: Any) -> None:
        one = replace(joined(ScriptedWorker()), **changes)
        self.director.set_static([replace(one, worker=name, instance="i1") for name in names])

    def endpoint(self, name: str) -> Endpoint:
        return self.director.table.endpoints[name, "i1"]

    def fail(self, name: str) -> None:
        """Open the local breaker of a worker."""
        breakers, key = self.director.breakers, self.endpoint(name).key
        for _ in range(3):
            breakers.failed(key, "engine_error", 0, breakers.routed(key))
        breakers.tick([key])

    def asked(self) -> tuple[str, str]:
        """Return where the next request finds room, and where it is sent; or the name of the error."""
        found = []
        for find in (self._room, self._route):
            try:
                found.append(find())
            except NoWorker as error:
                found.append(type(error).__name__)
        return found[0], found[1]

    def _room(self) -> str:
        return self.director.routing.room("m").worker

    def _route(self) -> str:
        prompt = list(range(300, 340))
        plan = GenerationRequest(
            id="r",
            model="m",
            lineage=LINEAGE,
            prompt=prompt,
            names=BlockNames(prompt),
            prompt_text="",
            sampling=Sampling(max_tokens=10),
            guided=None,
            deterministic=True,
        )
        choice = self.director.routing.route(plan, (), room=Headroom.FRESH)
        state = self.director.routing.state
        state.end(state.begin(choice, plan, ()), self.director.now())
        return choice.endpoint.worker


def panic(world: Frontend) -> None:
    world.fail("b")
    world.fail("a")
    world.plane.gone.add("b")


def another_joins(world: Frontend) -> None:
    world.plane.gone.add("b")
    world.join("a", "b", "c")


FACTS: dict[str, tuple[Callable[[Frontend], Any], str]] = {
    "the fleet takes it out": (lambda world: setattr(world.endpoint("a"), "weight", 0.0), "b"),
    "its breaker opens": (lambda world: world.fail("a"), "b"),
    "its connection breaks": (lambda world: world.plane.gone.add("a"), "b"),
    "it falls silent": (lambda world: world.plane.silent.add("a"), "b"),
    "others load it": (lambda world: world.plane.loads.update(a=BUSY), "b"),
    "it is full": (lambda world: setattr(world.endpoint("a").kept, "requests", 10_000), "b"),
    "it leaves": (lambda world: world.join("b"), "b"),
    "another one joins": (another_joins, "a c"),
    "all workers have failed": (panic, "a"),
    "no worker is left": (lambda world: world.plane.gone.update("ab"), "NoneReachable"),
}


@pytest.mark.parametrize("fact", FACTS)
def test_a_change_applies_to_the_very_next_request(fact: str) -> None:
    world = Frontend()
    for _ in range(4):  # fill all caches
        assert set(world.asked()) <= {"a", "b"}
    learn, expected = FACTS[fact]
    learn(world)
    for _ in range(4):
        assert set(world.asked()) <= set(expected.split()), fact


def test_a_level_that_halves_the_caps_applies_to_the_very_next_request_and_so_does_its_end() -> None:
    world = Frontend()
    world.plane.gone.add("b")
    whole = world.director.routing.monitor.cap(world.endpoint("a"))
    world.endpoint("a").begin(requests=whole // 2)
    assert world.asked() == ("a", "a")
    world.director.absorb(Fleet(models={"m": Degradation("m", knobs=Knobs(batch_size=0.5))}), ())
    assert world.asked() == ("AllBusy", "AllBusy")
    world.director.absorb(Fleet(), ())
    assert world.asked() == ("a", "a")


def test_a_breaker_that_closes_again_applies_to_the_very_next_request() -> None:
    world = Frontend(live=False)  # no panic
    world.plane.gone.add("b")
    world.fail("a")
    assert world.asked() == ("NoneRoutable", "NoneRoutable")
    world.director.breakers.reset(world.endpoint("a").key)
    assert world.asked() == ("a", "a")


def test_a_worker_with_a_new_block_size_gets_blocks_of_that_size() -> None:
    world = Frontend()
    world.asked()
    profile = replace(world.endpoint("a").joined.profile, block_tokens=8)
    world.join("c", profile=profile)
    assert world.asked() == ("c", "c")
    group = world.director.table.group("m", LINEAGE)
    assert group is not None and group.block_sizes == (8,)
