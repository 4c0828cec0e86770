"""Who may get a request of this frontend? What the fleet says of a worker, and what we know ourselves: whether it is
connected, how it fared with us, and how much of ours it has to do.

Where panic has begun, what we know of failures is ignored for as long as it lasts.
"""

from collections.abc import Callable, Collection, Sequence

from controller.frontend.choosing import Choosing
from controller.frontend.migration import smallest_limit
from controller.frontend.outcomes import Outcomes
from controller.frontend.panic import Panic
from controller.frontend.plan import Plan
from controller.frontend.settings import FrontendSettings
from controller.ports import Plane
from controller.router.modes import Choice
from controller.router.pick import AllBusy, Filter, NotServed, NoWorker, Picker, Rules
from controller.router.table import Key, Lineage, Seat, Table


class Routing:
    """The choice of a worker, and what the workers of a model have in common."""

    def __init__(
        self,
        name: str,
        table: Table,
        plane: Plane,
        settings: FrontendSettings,
        outcomes: Outcomes,
        panic: Panic,
        choosing: Choosing,
        live: Callable[[], bool],
    ) -> None:
        self._name = name
        self._table = table
        self._plane = plane
        self._settings = settings
        self._inflight_max = settings.admission.inflight_max
        self._inflight_per_batch = settings.admission.inflight_per_batch
        self._unread_s = settings.router.queue_prefill_s  # the most that a worker may have to read
        self._outcomes = outcomes
        self._open = outcomes.open
        self._panic = panic
        self.choosing = choosing
        self._live = live  # before, the fold is history, and no reason for panic
        self._picker = Picker()
        self.neighbours: Callable[[], Collection[str]] = (
            lambda: ()
        )  # frontends that serve now, as far as is known
        self._rules = Rules(
            plane.reachable,
            self._allowed,
            plane.others,
            self.cap,
            self._frontends,
            plane.lately,
            self._open,
        )
        self._ignoring = False  # own breakers, for the pick that is made now

    # --- the choice ---------------------------------------------------------------------------------------

    def cap(self, seat: Seat) -> int:
        """Return how many requests may be in flight there; none more where the prompts that it has take too long to be read."""
        if self._unread_s is not None and self._reading_too_long(seat, self._unread_s):
            return 0
        whole = self._inflight_max or seat.max_batch * self._inflight_per_batch
        cap = int(whole * self._table.knobs(seat.model).batch_size)
        return cap if cap > 1 else 1

    def _reading_too_long(self, seat: Seat, limit_s: float) -> bool:
        rate = seat.joined.profile.prefill_tokens_per_s
        return rate > 0 and self.choosing.unread(seat) > limit_s * rate * seat.ranks

    def _frontends(self) -> int:
        others = self.neighbours()
        return len({*others, self._name}) if others else 1

    def _allowed(self, seat: Seat) -> bool:
        return self._ignoring or self._outcomes.allowed(seat)

    def _seats(self, model: str) -> Sequence[Seat]:
        """Return a model's seats, and see whether there is panic."""
        seats = self._table.models.get(model, ())
        if self._open or self._panic.models:
            self._ignoring = self._live() and self._panic.ignores(model, seats)
        else:
            self._ignoring = False  # nearly always, all is calm
        return seats

    def _kindred(self, plan: Plan) -> Sequence[Seat]:
        """Return the seats of a request's lineage, and see whether there is panic."""
        self._seats(plan.model)
        kin = self._table.kin(plan.model, plan.lineage)
        return kin.seats if kin is not None else ()

    def look_for_panic(self) -> None:
        """The fold or a breaker may have moved: see whether panic has begun or ended anywhere."""
        if self._live():
            for model in self._table.known:
                self._panic.look(model, self._table.models.get(model, ()))

    def room(self, model: str) -> Seat:
        """Return a seat that has room for a new request. Raise NoWorker."""
        return self._picker.room(self._seats(model), self._rules)

    def route(
        self, plan: Plan, tried: Collection[Key], said: Sequence[int] = (), *, capped: bool = False
    ) -> Choice:
        """Return where a request's next attempt goes, none of `tried`, with room if there must be. `said` was accepted of its
        answer. Raise NoWorker."""
        among = Filter(self._kindred(plan), self._rules, tried, capped)
        if plan.wishes.explain:  # among those that could have it
            return self.choosing.choose(among.left(), plan, said)
        return self.choosing.choose(among, plan, said)

    def at(self, seat: Seat, plan: Plan, said: Sequence[int] = ()) -> Choice:
        """Return where at this seat a request goes: to which of its DP ranks."""
        return self.choosing.choose([seat], plan, said)

    def lineage(self, model: str) -> Lineage:
        """Return the lineage that a new request of a model would be bound to. Raise NoWorker."""
        try:
            return self.room(model).lineage
        except AllBusy:
            return self._picker.pick(self._seats(model), self._rules, capped=False).lineage

    def shortlist(self, plan: Plan) -> list[Seat]:
        """Return who could take a new request: those with room, or all, if nobody has any. Raise NoWorker."""
        seats = self._kindred(plan)
        try:
            return Filter(seats, self._rules).left()
        except AllBusy:
            return Filter(seats, self._rules, capped=False).left()

    def room_at(self, seat: Seat, lineage: Lineage) -> None:
        """See whether this seat could take a request. Raise NoWorker."""
        Filter([seat] if seat.lineage == lineage else [], self._rules).left()

    def targets(self, plan: Plan) -> list[Seat]:
        """Return everybody who could take requests like this one, none if there is nobody."""
        try:
            return Filter(self._kindred(plan), self._rules, capped=False).left()
        except NoWorker:
            return []

    def takes(self, seat: Seat) -> bool:
        """Say whether a seat that could take a request a moment ago still can: one on trial takes a single one."""
        return self._allowed(seat) and self._plane.reachable(seat.worker, seat.instance)

    def forget(self, keys: Collection[Key]) -> None:
        """Drop the memory of seats that are gone; keep `keys`."""
        self._picker.forget(keys)
        self.choosing.forget(keys)

    # --- what a model's workers have in common --------------------------------------------------------------

    def limit(self, model: str) -> int:
        """Return how many migrations a request of this model may have."""
        own, registered = self._settings.migration_limit, self._table.migration_limit(model)
        return own if registered is None else smallest_limit(own, (registered,))

    def context(self, model: str, lineage: Lineage) -> int:
        """Return how many tokens a prompt and its answer may have together. Raise NotServed."""
        kin = self._table.kin(model, lineage)
        if kin is None:
            raise NotServed
        return kin.context_tokens

    def engine(self, model: str, lineage: Lineage) -> str:
        """Return the kind of engine that serves a lineage."""
        kin = self._table.kin(model, lineage)
        return kin.engine if kin is not None else ""

    def text_only(self, model: str, lineage: Lineage) -> bool:
        """Whether some of those that serve a lineage give text and no tokens."""
        kin = self._table.kin(model, lineage)
        return kin is not None and kin.text_only

    # --- what is shown --------------------------------------------------------------------------------------

    @property
    def served(self) -> list[str]:
        """The models that some worker in service serves."""
        return sorted(model for model, seats in self._table.models.items() if any(s.routable for s in seats))

    @property
    def servable(self) -> bool:
        """Whether any request could be served now."""
        reachable = self._plane.reachable
        return any(s.routable and reachable(s.worker, s.instance) for s in self._table.seats.values())

    def roll(self) -> list[dict[str, object]]:
        """Return what /health says of each worker."""
        reachable = self._plane.reachable
        return [seat.shown(reachable(seat.worker, seat.instance)) for seat in self._table.seats.values()]
