"""Whose answer is put off for one that is more urgent, and when does it go on?

    a request of the best tier would miss its deadline, and nobody has room
        └── of the running answers of the last tier the one that is cheapest to compute again ──▶ preempted: its worker frees it
    preempted ── room, and nobody better waits for it ──▶ computed again from its tokens, where the router sends it
        └─────── it has been put off for `park_s` in all ──▶ before all others, into a worker's line too; never preempted again

Nothing of it is lost, and no token comes twice: it goes on as an answer does whose worker has died. Its client gets comments
meanwhile, so that nothing between takes the connection for dead.

What a reader would get wrong: a frontend puts off its own answers alone. Those of others it does not know.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from controller.frontend.admission.admission import Admission
from controller.frontend.admission.rooms import Preemptor
from controller.frontend.dispatch.live_request import LiveRequest, RunningRequests
from controller.frontend.dispatch.reports import MigrationReports
from controller.frontend.request.events import Event, MovedOnPurpose
from controller.frontend.request.failures import PREEMPTED, Failure
from controller.frontend.request.state import Move
from controller.frontend.scheduling.scheduler import Scheduler
from controller.router.endpoints import Endpoint, EndpointTable, Lineage
from controller.router.selection.filter import AllBusy, Headroom, NoWorker

LOOKS_MAX = 64  # workers that are looked at for one answer to put off
IN_VAIN_S = (
    0.2  # where that has brought no room, or there was none to put off, it is not tried again for so long
)
COMMENTS_S = 10.0  # from one comment to the client to the next


@dataclass(frozen=True, slots=True)
class _PutOff:
    """Why an answer is put off, until when at most, and when its client gets the next comment."""

    move: Move
    until: float
    comment_at: float


@dataclass(eq=False, repr=False)
class Preemption(Preemptor):
    """The answers of one frontend that are put off."""

    table: EndpointTable
    routing: Scheduler
    running: RunningRequests
    reports: MigrationReports
    now: Callable[[], float]
    park_s: float | None  # the longest that one answer is put off, in all; None: none ever is
    feed: Callable[[LiveRequest, Event], None] | None = None  # set by the driver
    put_off: dict[LiveRequest, _PutOff] = field(default_factory=dict)
    vain_until: dict[tuple[str, Lineage], float] = field(default_factory=dict)  # nothing is tried there
    looked_at: int = 0
    making_room: bool = False  # for another request

    # --- making room

    def may(self, model: str, lineage: Lineage, tier: int) -> bool:
        """Say whether room can be made for a request of this tier."""
        if self.park_s is None or tier > 0 or self.now() < self.vain_until.get((model, lineage), 0.0):
            return False
        if self._victim(model, lineage) is not None:
            return True
        self.looked_at += LOOKS_MAX  # at others the next time, where there are so many
        self.in_vain(model, lineage)
        return False

    def make_room(self, model: str, lineage: Lineage) -> bool:
        """Put one answer off. False: there is none that may be."""
        found = self._victim(model, lineage)
        source = found.endpoint if found is not None else None
        if found is None or source is None or self.park_s is None or self.feed is None:
            return False
        now, why = self.now(), Failure(PREEMPTED, "")
        move = Move(why, why, source.server, now, len(found.accepted))
        self.reports.preempted(found, source)
        self.making_room = True
        try:
            self.feed(found, MovedOnPurpose(move, None))
        finally:
            self.making_room = False
        self.put_off[found] = _PutOff(move, now + self.park_s - found.state.put_off_s, now + COMMENTS_S)
        return True

    def in_vain(self, model: str, lineage: Lineage) -> None:
        """What was tried has brought no room: workers say only with their next report what is free."""
        self.vain_until[model, lineage] = self.now() + IN_VAIN_S

    def _victim(self, model: str, lineage: Lineage) -> LiveRequest | None:
        """Return the answer that is put off next: the one that is cheapest to compute again, where its leaving makes room; else,
        where KV blocks are what is missing, the one that has most of them."""
        group = self.table.group(model, lineage)
        if group is None:
            return None
        cheapest = largest = None
        endpoints, monitor = group.endpoints, self.routing.monitor
        for n in range(min(LOOKS_MAX, len(endpoints))):
            endpoint = endpoints[(self.looked_at + n) % len(endpoints)]
            if not (endpoint.routable and endpoint.active > 0 and self.routing.takes(endpoint)):
                continue
            by_count = self._has_room_without_one(endpoint)
            by_blocks = monitor.busy(endpoint) or monitor.lacks_blocks(endpoint)
            for one in self.running.at(endpoint):
                if not self._may_be_put_off(one, endpoint):
                    continue
                if by_count and (cheapest is None or _size(one) < _size(cheapest)):
                    cheapest = one
                elif by_blocks and (largest is None or _size(one) > _size(largest)):
                    largest = one
        return cheapest or largest

    def _has_room_without_one(self, endpoint: Endpoint) -> bool:
        """Say whether a worker would take a new request, if one of ours were not there."""
        endpoint.end()
        try:
            return self.routing.has_room(endpoint, Headroom.FRESH)
        finally:
            endpoint.begin()

    def _may_be_put_off(self, one: LiveRequest, endpoint: Endpoint) -> bool:
        state, tiers = one.state, self.table.tiers
        return (
            tiers.is_last(one.request.tier)
            and state.has_output
            and state.transfer is None
            and not state.tried
            and self.park_s is not None
            and state.put_off_s < self.park_s
            and one.request.deterministic  # else it would not go on as it would have
            and endpoint.joined.exact
            and not one.stays
        )

    # --- going on

    def waits(self, model: str, lineage: Lineage, tier: int) -> bool:
        """Say whether an answer is put off that comes before requests of this tier."""
        return bool(self.put_off) and any(self._before(tier, model, lineage))

    def _before(self, tier: int, model: str, lineage: Lineage) -> Iterator[bool]:
        for one, put_off in self.put_off.items():
            request = one.request
            if (request.model, request.lineage) == (model, lineage) and not _stale(one, put_off):
                yield self.table.urgency(request.tier) <= tier

    def resume(
        self, admission: Admission, model: str | None = None
    ) -> Iterator[tuple[LiveRequest, Endpoint | None]]:
        """Yield those that may go on, of one model or of all, each with a worker that has room for it. None: it has been
        put off for long enough, and there is no worker to take it. Each is to be sent before the next is asked for."""
        if self.making_room:
            return
        full: set[tuple[str, Lineage, bool]] = set()
        now = self.now()
        for one, put_off in list(self.put_off.items()):
            request, due = one.request, now >= put_off.until
            pool = (request.model, request.lineage, due)
            if _stale(one, put_off):
                del self.put_off[one]
            elif model in (None, request.model) and pool not in full:
                best = None if due else admission.best_waiting(request.model, request.lineage)
                if best is not None and best < self.table.urgency(request.tier):
                    full.add(pool)
                    continue
                try:
                    room = Headroom.HELD if due else Headroom.FRESH
                    endpoint = self.routing.route(request, one.state.tried, one.accepted, room=room).endpoint
                except AllBusy:
                    full.add(pool)
                except NoWorker:
                    if due:
                        del self.put_off[one]
                        yield one, None
                else:
                    del self.put_off[one]
                    yield one, endpoint

    def comment(self) -> None:
        """Let the clients of those that are put off know that they are not forgotten. To be called often."""
        now = self.now()
        for one, put_off in list(self.put_off.items()):
            if now >= put_off.comment_at and not _stale(one, put_off):
                self.put_off[one] = replace(put_off, comment_at=now + COMMENTS_S)
                one.writer.keep_alive()


def _stale(one: LiveRequest, put_off: _PutOff) -> bool:
    """Return whether an answer waits for this no more: it is over, or is moved for another reason."""
    return one.over or one.state.move is not put_off.move


def _size(one: LiveRequest) -> int:
    return len(one.request.prompt) + len(one.accepted)
