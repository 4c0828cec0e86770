"""The reconciler decides once and atomically on what it has read, despite other deciders and failures."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace

import pytest
from fleet_history import History
from memory_cell import MemoryCell
from memory_journal import MemoryJournal, MemoryStream
from memory_store import MemoryStore
from structlog.testing import capture_logs
from waits import turns

from controller.adapters.clock import SystemClock
from controller.deciders.fleet import Fleet, FleetPolicy, evolve
from controller.deciders.health_state import HealthPolicy
from controller.ports import ReadPosition, Snapshot, StoreAhead
from controller.runtime.lease import Lease
from controller.runtime.projection.projector import Projector
from controller.runtime.reconciler import Reconciler
from controller.runtime.view import FleetView, ViewNotReady
from events.codec import UnknownKind
from events.decisions import Absorbed, HealthStatus, PolicyAdopted
from events.fact import Decision, Recorded
from events.journal.port import Fenced, JournalChanged, JournalUnavailable
from events.order import Order

Eventually = Callable[..., Awaitable[None]]
CLOCK = SystemClock()


class Flaky(MemoryJournal):
    """A journal with controlled appends: `land` is whether the next one lands, `say` what its caller gets."""

    def __init__(self, stream: MemoryStream, source: str) -> None:
        super().__init__(stream, source)
        self.script: list[tuple[bool, type[Exception] | None]] = []
        self.attempts = 0

    async def append(self, decisions: Sequence[Decision], *, through: int, after: int) -> int:
        self.attempts += 1
        land, say = self.script.pop(0) if self.script else (True, None)
        seq = await super().append(decisions, through=through, after=after) if land else 0
        if say is not None:
            raise say
        return seq


class SeverableCell:
    """The lease's cell as one process reaches it, until the process is killed."""

    def __init__(self, cell: MemoryCell) -> None:
        self.severed = False
        self._cell = cell

    async def read(self) -> tuple[bytes, int]:
        if self.severed:
            raise JournalUnavailable
        return await self._cell.read()

    async def write(self, value: bytes, revision: int) -> int:
        if self.severed:
            raise JournalUnavailable
        return await self._cell.write(value, revision)


class Controller:
    """A running reconciler with its lease."""

    def __init__(
        self,
        stream: MemoryStream,
        cell: MemoryCell,
        name: str,
        policy: FleetPolicy | None = None,
        **more: object,
    ) -> None:
        self.journal = Flaky(stream, f"controller:{name}")
        self._cell = SeverableCell(cell)
        self.lease = Lease(self._cell, name, CLOCK, ttl_s=0.2)
        self.reconciler = Reconciler(
            self.journal,
            self.lease,
            policy or FleetPolicy(),
            CLOCK,
            ask_s=0.01,
            **more,  # type: ignore[arg-type]
        )
        self.tasks: list[asyncio.Task[None]] = []

    def start(self) -> "Controller":
        self.tasks = [asyncio.create_task(self.lease.run()), asyncio.create_task(self.reconciler.run())]
        return self

    async def kill(self) -> None:
        """End without releasing the lease."""
        self._cell.severed = True
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


@pytest.fixture
async def controllers() -> AsyncIterator[list[Controller]]:
    made: list[Controller] = []
    yield made
    for controller in made:
        await controller.kill()


def decisions(stream: MemoryStream) -> list[Recorded]:
    return [event for event in stream.events if isinstance(event.fact, Decision)]


def assert_one_history(stream: MemoryStream) -> Order[Fleet]:
    """Assert that the stream folds, and that its decisions are numbered from one without a gap."""
    order: Order[Fleet] = Order(evolve, Fleet())
    for event in stream.events:
        order.take(event)
    assert [event.fact.number for event in decisions(stream)] == list(range(1, len(decisions(stream)) + 1))  # type: ignore[attr-defined]
    return order


def healthy(stream: MemoryStream, worker: str = "w0") -> bool:
    order = assert_one_history(stream)
    found = order.shown.workers.get(worker)
    return found is not None and found.health.status is HealthStatus.HEALTHY


def beginning() -> History:
    history = History()
    history.stream.clock = CLOCK.now
    history.now = CLOCK.now()
    return history


async def test_it_adopts_its_policy_and_decides_what_is_due(
    controllers: list[Controller], eventually: Eventually
) -> None:
    history = beginning()
    controllers.append(Controller(history.stream, MemoryCell(), "c1").start())
    speaker = MemoryJournal(history.stream, "worker:w0")
    speaker.observe(history.joined("w0"))
    await eventually(lambda: "w0" in assert_one_history(history.stream).shown.workers)
    speaker.observe(history.passed("w0", check="join"))
    await eventually(lambda: healthy(history.stream))
    assert isinstance(decisions(history.stream)[0].fact, PolicyAdopted)
    await eventually(lambda: controllers[0].reconciler.leading)


async def test_a_new_leader_with_the_same_policy_adopts_nothing_and_another_policy_is_adopted_first(
    controllers: list[Controller], eventually: Eventually
) -> None:
    stream, cell = MemoryStream(), MemoryCell()
    for name, policy in (("c1", None), ("c2", None), ("c3", FleetPolicy(health=HealthPolicy(trials_max=9)))):
        controller = Controller(stream, cell, name, policy).start()
        controllers.append(controller)
        await eventually(lambda controller=controller: controller.reconciler.leading)
        await eventually(lambda controller=controller: controller.reconciler.counters.settles > 2)
        await controller.kill()
    assert [type(event.fact) for event in decisions(stream)] == [PolicyAdopted, PolicyAdopted]


async def test_one_of_two_controllers_decides_and_the_other_takes_over(
    controllers: list[Controller], eventually: Eventually
) -> None:
    history, cell = beginning(), MemoryCell()
    controllers += [Controller(history.stream, cell, name).start() for name in ("c1", "c2")]
    await eventually(lambda: any(c.reconciler.leading for c in controllers))
    first = next(c for c in controllers if c.lease.held)
    other = next(c for c in controllers if c is not first)
    assert other.journal.attempts == 0
    await first.kill()
    speaker = MemoryJournal(history.stream, "worker:w0")
    speaker.observe(history.joined("w0"))
    speaker.observe(history.passed("w0", check="join"))
    await eventually(lambda: healthy(history.stream))
    assert other.lease.held


async def test_two_controllers_that_both_believe_they_lead_write_one_history(
    controllers: list[Controller], eventually: Eventually
) -> None:
    history = beginning()
    controllers += [
        Controller(history.stream, MemoryCell(), name).start() for name in ("c1", "c2")
    ]  # a cell each
    speaker = MemoryJournal(history.stream, "worker:test")
    for number in range(20):
        speaker.observe(history.joined(f"w{number}"))
        speaker.observe(history.passed(f"w{number}", check="join"))
        await turns()
    await eventually(lambda: healthy(history.stream, "w19"))
    assert all(controller.lease.held for controller in controllers)
    assert_one_history(history.stream)


@pytest.mark.parametrize(
    ("land", "say"), [(True, JournalUnavailable), (False, JournalUnavailable), (False, Fenced)]
)
async def test_an_append_of_unknown_outcome_is_read_back_not_repeated(
    controllers: list[Controller], eventually: Eventually, land: bool, say: type[Exception]
) -> None:
    history = beginning()
    controller = Controller(history.stream, MemoryCell(), "c1")
    controller.journal.script = [(land, say)]
    controllers.append(controller.start())
    speaker = MemoryJournal(history.stream, "worker:w0")
    speaker.observe(history.joined("w0"))
    speaker.observe(history.passed("w0", check="join"))
    await eventually(lambda: healthy(history.stream))
    assert_one_history(history.stream)


async def test_it_decides_nothing_while_the_journal_is_unavailable_and_continues_after(
    controllers: list[Controller], eventually: Eventually
) -> None:
    history = beginning()
    controllers.append(Controller(history.stream, MemoryCell(), "c1").start())
    await eventually(lambda: len(decisions(history.stream)) == 1)
    history.stream.reachable = False
    speaker = MemoryJournal(history.stream, "worker:w0")
    speaker.observe(history.joined("w0"))
    speaker.observe(history.passed("w0", check="join"))
    assert speaker.spool_depth == 2
    history.stream.reachable = True
    await eventually(lambda: healthy(history.stream))


async def test_more_decisions_than_one_append_can_hold_are_split(
    controllers: list[Controller], eventually: Eventually
) -> None:
    history = beginning()
    speaker = MemoryJournal(history.stream, "worker:test")
    for number in range(20):
        speaker.observe(history.joined(f"w{number}"))
        speaker.observe(history.passed(f"w{number}", check="join"))
    controllers.append(Controller(history.stream, MemoryCell(), "c1", append_max=7).start())
    await eventually(lambda: healthy(history.stream, "w19"))
    assert controllers[0].journal.attempts >= 3
    assert_one_history(history.stream)


async def test_pending_facts_of_a_calm_fleet_are_absorbed(
    controllers: list[Controller], eventually: Eventually
) -> None:
    history = beginning()
    controller = Controller(history.stream, MemoryCell(), "c1").start()
    controllers.append(controller)
    await eventually(lambda: controller.reconciler.leading)
    speaker = MemoryJournal(history.stream, "worker:w0")
    for _ in range(1001):
        speaker.observe(history.passed("absent"))
    await eventually(lambda: isinstance(decisions(history.stream)[-1].fact, Absorbed))
    await eventually(lambda: not controller.reconciler.order.pending)


async def test_it_stops_at_an_unknown_kind(
    controllers: list[Controller], eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Strange(MemoryJournal):
        def read(self, after: int, *, until: int | None = None) -> AsyncIterator[Sequence[Recorded]]:
            raise UnknownKind("event 3 is of the unknown kind 'of_tomorrow'")

    reconciler = Reconciler(
        Strange(MemoryStream(), "controller:c1"), Lease(MemoryCell(), "c1", CLOCK), FleetPolicy(), CLOCK
    )
    with pytest.raises(UnknownKind, match="of_tomorrow"):
        await asyncio.wait_for(reconciler.run(), 20)


class Store:
    """A store with one snapshot at most."""

    def __init__(self, snapshot: Snapshot | None, position: ReadPosition) -> None:
        self.snapshot = snapshot
        self.at = position
        self.on_load: Callable[[], object] = lambda: None

    async def position(self) -> ReadPosition:
        return self.at

    async def load(self) -> Snapshot | None:
        self.on_load()
        return self.snapshot

    async def select(self, *, after: int = 0) -> AsyncIterator[Sequence[Recorded]]:
        """Yield nothing: it has kept no events."""
        for _ in ():
            yield ()


def kept(history: History) -> Store:
    order = history.order()
    last = history.events[-1]
    return Store(
        Snapshot(order.settled, order.position, dict(order.sources)), ReadPosition(last.seq, last.id, last.at)
    )


async def test_it_starts_from_the_store_and_continues_from_its_position(
    controllers: list[Controller], eventually: Eventually
) -> None:
    history = beginning().start()
    history.absorb()
    store = kept(history)
    controller = Controller(history.stream, MemoryCell(), "c1", store=store)
    controllers.append(controller.start())
    speaker = MemoryJournal(history.stream, "canary:c1")
    speaker.observe(history.failed("w1", confirmed=True, reason="token_mismatch"))
    await eventually(
        lambda: assert_one_history(history.stream).shown.workers["w1"].health.status is HealthStatus.UNHEALTHY
    )


async def test_a_store_that_is_ahead_of_the_stream_is_refused() -> None:
    history = beginning().start()
    shorter = MemoryStream(events=history.events[:2])
    view = FleetView(MemoryJournal(shorter, "frontend:f1"), store=kept(history))  # type: ignore[arg-type]
    with pytest.raises(StoreAhead, match="ends at 2"):
        await asyncio.wait_for(view.run(), 20)
    assert view.fault is not None
    assert view.fleet.workers.keys() == {"w0", "w1", "w2"}  # it keeps its state


@pytest.mark.parametrize("left", [0, 2])
async def test_a_store_that_is_too_young_for_a_snapshot_is_refused_as_well(left: int) -> None:
    history = beginning().start()
    store = Store(None, kept(history).at)
    shorter = MemoryJournal(MemoryStream(events=history.events[:left]), "frontend:f1")
    view = FleetView(shorter, store=store)  # type: ignore[arg-type]
    running = asyncio.create_task(view.run())
    with pytest.raises(StoreAhead, match=f"ends at {left}"):
        await view.ready(5)
    assert not view.is_ready, "an empty stream is no empty fleet"
    with pytest.raises(StoreAhead):
        await running


async def test_the_reconciler_refuses_a_store_of_another_stream() -> None:
    history, other = beginning().start(), beginning().start().corruption()
    journal = MemoryJournal(other.stream, "controller:c1")
    lease = Lease(MemoryCell(), "c1", CLOCK)
    reconciler = Reconciler(journal, lease, FleetPolicy(), CLOCK, store=kept(history))  # type: ignore[arg-type]
    with pytest.raises(JournalChanged, match="the state store has folded"):
        await asyncio.wait_for(reconciler.run(), 20)


async def test_a_view_is_ready_once_all_is_read_and_reports_each_batch(eventually: Eventually) -> None:
    history = beginning().start()
    view = FleetView(MemoryJournal(history.stream, "frontend:f1"))
    heard: list[int] = []
    view.listen(lambda v, batch: heard.extend(event.seq for event in batch))
    with pytest.raises(ViewNotReady):
        await view.ready(0.01)
    task = asyncio.create_task(view.run())
    await view.ready(5)
    assert view.seq == len(history.events) and view.number == history.order().position.number
    assert view.fleet.workers["w0"].routable
    speaker = MemoryJournal(history.stream, "worker:w9")
    speaker.observe(history.joined("w9"))
    await eventually(lambda: "w9" in view.fleet.workers)
    assert heard == list(range(1, len(history.events) + 1))
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_without_a_broker_a_view_uses_the_store() -> None:
    history = beginning().start()
    history.stream.reachable = False
    journal = MemoryJournal(history.stream, "frontend:f1")
    knowing = FleetView(journal, store=kept(history), store_suffices_after_s=0.05)  # type: ignore[arg-type]
    knowing_nothing = FleetView(journal, store_suffices_after_s=0.05)
    tasks = [asyncio.create_task(view.run()) for view in (knowing, knowing_nothing)]
    await knowing.ready(5)
    assert knowing.fleet.workers.keys() == {"w0", "w1", "w2"}
    assert not knowing_nothing.is_ready
    history.stream.reachable = True
    await knowing_nothing.ready(5)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("kept_snapshots", [0, 1])
async def test_without_a_broker_a_view_folds_the_stores_events(
    kept_snapshots: int, eventually: Eventually
) -> None:
    """A frontend that starts while the broker is unavailable knows the fleet from the store's events, with or without a snapshot.

    It follows the journal from the snapshot again when the broker returns."""
    history = beginning().start()
    history.say(history.passed("w0"))
    history.absorb()
    store = MemoryStore(snapshot_every=len(history.events))
    await Projector(MemoryJournal(history.stream, "projector"), store).catch_up(len(history.events))
    del store.tables.snapshots[kept_snapshots:]
    assert len(store.tables.snapshots) == kept_snapshots
    held = history.order()
    history.stream.reachable = False
    view = FleetView(MemoryJournal(history.stream, "frontend:f1"), store=store, store_suffices_after_s=0.05)
    task = asyncio.create_task(view.run())
    await view.ready(5)
    assert (view.fleet, view.seq) == (held.shown, held.last_seq)
    history.stream.reachable = True
    MemoryJournal(history.stream, "worker:w9").observe(history.joined("w9"))
    await eventually(lambda: "w9" in view.fleet.workers)
    whole: Order[Fleet] = Order(evolve, Fleet())
    for event in history.stream.events:
        whole.take(event)
    assert view.order.shown == whole.shown and view.order.settled == whole.settled
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("wrong", [False, True])
async def test_a_view_compares_itself_with_the_store(eventually: Eventually, wrong: bool) -> None:
    history = beginning().start()
    store = kept(history)
    journal = MemoryJournal(history.stream, "frontend:f1")
    view = FleetView(journal, store=store, audit_every_s=0.01)  # type: ignore[arg-type]
    task = asyncio.create_task(view.run())
    await view.ready(5)
    if wrong:
        assert store.snapshot is not None
        store.snapshot = replace(store.snapshot, fleet=Fleet())
    history.absorb()
    later = kept(history).snapshot
    assert later is not None
    store.snapshot = replace(later, fleet=Fleet()) if wrong else later
    compared: list[bool] = []  # it compares rows at once if the view is at their position
    store.on_load = lambda: compared.append(later.position == view.order.position)
    with capture_logs() as logs:
        history.stream.wake()
        await eventually(lambda: any(compared))
    assert any(line["event"] == "store_differs" for line in logs) == wrong
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_view_of_an_empty_journal_is_ready(eventually: Eventually) -> None:
    view = FleetView(MemoryJournal(MemoryStream(), "frontend:f1"))
    task = asyncio.create_task(view.run())
    await view.ready(5)
    assert not view.fleet.workers
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
