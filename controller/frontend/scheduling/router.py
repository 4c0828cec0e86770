"""Who may get a request of this frontend? What the fleet says of a worker, and what we know ourselves: whether it is
connected, how it fared with us, and how much of ours it has to do.

Where panic has begun, what we know of failures is ignored for as long as it lasts.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

from controller.frontend.health.local_breakers import LocalBreakers
from controller.frontend.health.panic import Panic
from controller.frontend.request.failures import smallest_limit
from controller.frontend.request.generation_request import GenerationRequest
from controller.frontend.scheduling.load_monitor import LoadMonitor, WantedRoom
from controller.frontend.scheduling.peers import Peers
from controller.frontend.scheduling.scheduler import KvScheduler
from controller.frontend.settings import FrontendSettings
from controller.ports import RequestPlane
from controller.router.endpoints import Endpoint, EndpointGroup, EndpointTable, Key, Lineage
from controller.router.selection.filter import (
    AllBusy,
    AllClosed,
    Filter,
    Headroom,
    NotServed,
    NoWorker,
    Picker,
    Rules,
)
from controller.router.selection.selector import Selection

MANY = 1 << 30
_AS_IT_IS = nullcontext()


def _sharing(frontends: Callable[[], int]) -> int:
    """Return among how many frontends a worker's batch is shared beyond what is free of it: each may have one request there,
    whatever the others have, and no more. Who waits at a worker waits for its next place alone."""
    return 1 if frontends() == 1 else MANY


def _never(endpoint: Endpoint) -> bool:
    return False


class RequestRouter:
    """The choice of a worker, and what the workers of a model have in common."""

    def __init__(
        self,
        peers: Peers,
        table: EndpointTable,
        plane: RequestPlane,
        settings: FrontendSettings,
        breakers: LocalBreakers,
        panic: Panic,
        scheduler: KvScheduler,
        live: Callable[[], bool],
    ) -> None:
        self._table = table
        self._plane = plane
        self._settings = settings
        self._inflight_max = settings.admission.inflight_max
        self._inflight_per_batch = settings.inflight_per_batch
        self._breakers = breakers
        self._open = breakers.open
        self._panic = panic
        self.scheduler = scheduler
        self.frontends = peers.frontends  # how many share the workers, this one included
        self.monitor = LoadMonitor(settings, table, plane, scheduler)
        self._live = live  # before, the fold is history, and no reason for panic
        self._picker = Picker()
        self._rules = Rules(
            plane.reachable,
            self._allowed,
            plane.external_load,
            self.cap,
            partial(_sharing, peers.frontends) if settings.by_deadline else peers.frontends,
            plane.recently_heard,
            self._open,
            peers.contenders,
            self.monitor.has_enough if self.monitor.decides else _never,
        )
        self._ignoring = False  # own breakers, for the pick that is made now
        self._beyond = (
            0.0  # the batch, times it: places of the worker's own line, for the pick that is made now
        )

    # --- the choice ---------------------------------------------------------------------------------------

    def cap(self, endpoint: Endpoint) -> int:
        """Return how many requests may be in flight there, however little else it may have to do."""
        whole = self._inflight_max or endpoint.max_batch * self._inflight_per_batch
        cap = int(whole * self._table.knobs(endpoint.model).batch_size)
        if self.monitor.decides:
            cap = self.monitor.places(endpoint, cap)
        if self._beyond:
            cap += max(1, int(endpoint.max_batch * self._beyond))
        return cap if cap > 1 else 1

    def _allowed(self, endpoint: Endpoint) -> bool:
        return self._ignoring or self._breakers.allowed(endpoint)

    def _endpoints(self, model: str) -> Sequence[Endpoint]:
        """Return a model's endpoints, and see whether there is panic."""
        endpoints = self._table.models.get(model, ())
        if self._open or self._panic.models:
            self._ignoring = self._live() and self._panic.ignores(model, endpoints)
        else:
            self._ignoring = False  # nearly always, all is calm
        return endpoints

    def _siblings(self, plan: GenerationRequest) -> Sequence[Endpoint]:
        """Return the endpoints of a request's lineage, and see whether there is panic."""
        self._endpoints(plan.model)
        group = self._table.group(plan.model, plan.lineage)
        return group.endpoints if group is not None else ()

    def look_for_panic(self) -> None:
        """The fold or a breaker may have moved: see whether panic has begun or ended anywhere."""
        if self._live():
            for model in self._table.known:
                self._panic.look(model, self._table.models.get(model, ()))

    @contextmanager
    def asking(self, wanted: WantedRoom, beyond: float = 0.0) -> Iterator[None]:
        """Look for room for this. `beyond`: for one that may wait at the worker, so much more than its batch, as a part of it."""
        monitor = self.monitor
        before = monitor.asked, self._beyond
        monitor.asked, self._beyond = wanted, beyond
        try:
            yield
        finally:
            monitor.asked, self._beyond = before

    def room(self, model: str, lineage: Lineage | None = None, without: Collection[Key] = ()) -> Endpoint:
        """Return an endpoint, none of `without`, with room for a new request of any lineage or of this one. Raise NoWorker."""
        endpoints = self._endpoints(model)
        if lineage is not None:
            group = self._table.group(model, lineage)
            endpoints = group.endpoints if group is not None else ()
        if without:
            endpoints = [endpoint for endpoint in endpoints if endpoint.key not in without]
        return self._picker.room(endpoints, self._rules)

    def route(
        self,
        plan: GenerationRequest,
        tried: Collection[Key],
        output: Sequence[int] = (),
        *,
        room: Headroom = Headroom.HELD,
    ) -> Selection:
        """Return where a request's next attempt goes, none of `tried`, with so much room. `output` was accepted of its answer.
        Raise NoWorker."""
        asking: AbstractContextManager[None] = _AS_IT_IS
        if room is Headroom.FRESH and self._settings.by_deadline:
            tokens, answer_max = len(plan.prompt) + len(output), plan.sampling.max_tokens
            asking = self.asking(
                self.monitor.wanted(plan.model, tokens, answer_max, plan.names), self._beyond
            )
        with asking:
            among = Filter(self._siblings(plan), self._rules, tried, room, tokens=plan.tokens_max)
            if plan.overrides.explain:  # among those that could have it
                return self.scheduler.choose(among.left(), plan, output)
            return self.scheduler.choose(among, plan, output)

    def at(self, endpoint: Endpoint, plan: GenerationRequest, output: Sequence[int] = ()) -> Selection:
        """Return where at this endpoint a request goes: to which of its DP ranks."""
        return self.scheduler.choose([endpoint], plan, output)

    def lineage(self, model: str) -> Lineage:
        """Return the lineage that a new request of a model would be bound to. Raise NoWorker."""
        try:
            return self.room(model).lineage
        except AllBusy:
            return self._picker.pick(self._endpoints(model), self._rules, room=Headroom.NONE).lineage

    def shortlist(self, plan: GenerationRequest) -> list[Endpoint]:
        """Return who could take a new request: those with room, or all, if nobody has any. Raise NoWorker."""
        endpoints = self._siblings(plan)
        try:
            return Filter(endpoints, self._rules, tokens=plan.tokens_max).left()
        except (AllBusy, AllClosed):
            return Filter(endpoints, self._rules, room=Headroom.NONE, tokens=plan.tokens_max).left()

    def room_at(self, endpoint: Endpoint, lineage: Lineage, tokens: int = 0) -> None:
        """See whether this endpoint could take a request of so many tokens. Raise NoWorker."""
        Filter([endpoint] if endpoint.lineage == lineage else [], self._rules, tokens=tokens).left()

    def targets(self, plan: GenerationRequest) -> list[Endpoint]:
        """Return everybody who could take requests like this one that have begun, none if there is nobody."""
        try:
            return Filter(
                self._siblings(plan), self._rules, room=Headroom.HELD, tokens=plan.tokens_max
            ).left()
        except NoWorker:
            return []

    def has_room(self, endpoint: Endpoint, room: Headroom) -> bool:
        """Say whether an endpoint has so much room for one request more."""
        return Filter((endpoint,), self._rules, room=room).has_room(endpoint)

    def refused(self, endpoint: Endpoint) -> None:
        """An endpoint has refused a request for want of room: it gets none until it next reports its load."""
        endpoint.refuse(self._plane.external_load(endpoint.worker))

    def takes(self, endpoint: Endpoint) -> bool:
        """Say whether an endpoint that could take a request a moment ago still can: one on trial takes a single one."""
        return self._allowed(endpoint) and self._plane.reachable(endpoint.worker, endpoint.instance)

    def expire(self) -> None:
        """Forget what has not ended in an hour, and what is cached no more."""
        self.scheduler.expire()

    def forget(self, keys: Collection[Key]) -> None:
        """Drop the memory of endpoints that are gone; keep `keys`."""
        self._picker.forget(keys)
        self.scheduler.forget(keys)

    # --- what a model's workers have in common --------------------------------------------------------------

    def urgency(self, tier: str) -> int:
        """Return how urgent requests of a tier are: 0 is the best."""
        return self._table.urgency(tier)

    def limit(self, model: str) -> int:
        """Return how many migrations a request of this model may have."""
        own, registered = self._settings.migration_limit, self._table.migration_limit(model)
        return own if registered is None else smallest_limit(own, (registered,))

    def group(self, model: str, lineage: Lineage) -> EndpointGroup:
        """Return the workers of a model and lineage, and what they have in common. Raise NotServed."""
        group = self._table.group(model, lineage)
        if group is None:
            raise NotServed
        return group

    # --- what is shown --------------------------------------------------------------------------------------

    @property
    def served(self) -> list[str]:
        """The models that some worker in service serves."""
        return sorted(
            model for model, endpoints in self._table.models.items() if any(s.routable for s in endpoints)
        )

    @property
    def servable(self) -> bool:
        """Whether any request could be served now."""
        reachable = self._plane.reachable
        return any(s.routable and reachable(s.worker, s.instance) for s in self._table.endpoints.values())

    def roll(self) -> list[dict[str, object]]:
        """Return what /health says of each worker."""
        reachable = self._plane.reachable
        return [
            endpoint.shown(reachable(endpoint.worker, endpoint.instance))
            for endpoint in self._table.endpoints.values()
        ]
