"""Preemption: pauses a running answer for a more urgent request, and resumes it later.

    a request of the best tier would miss its deadline, and no worker has room
        └── of the last tier's running answers, the cheapest to recompute ──▶ preempted: its worker frees the slot
    preempted ── a worker has room, and no better request waits ──▶ sent to a worker, which recomputes the KV cache
        └─────── preempted for `park_s` in total ──▶ sent before all others, also into a worker's queue; never preempted again

No output is lost or repeated: the answer continues as after the failure of its worker. While an answer is preempted,
its client receives SSE comments, so that no proxy closes the connection as idle.

A frontend preempts only its own answers, because it does not know the answers of other frontends.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from operator import attrgetter

from controller.frontend.admission.admission import Admission
from controller.frontend.admission.deadlines import Preemptor
from controller.frontend.dispatch.live_request import LiveRequest, RunningRequests
from controller.frontend.dispatch.reports import MigrationReports
from controller.frontend.request.events import Event, MovedOnPurpose
from controller.frontend.request.failures import PREEMPTED, Failure
from controller.frontend.request.state import Move
from controller.frontend.scheduling.scheduler import Scheduler
from controller.router.endpoints import Endpoint, EndpointTable, Lineage
from controller.router.selection.filter import AllBusy, Headroom, NoWorker

LOOKS_MAX = 64  # number of workers that are considered when one answer to preempt is chosen
# pause in seconds after a preemption that freed no room, or when no answer could be preempted
IN_VAIN_S = 0.2
COMMENTS_S = 10.0  # seconds between two comments to a client


@dataclass(frozen=True, slots=True)
class _PutOff:
    """One preempted answer: its move, the latest time to resume the answer, and the time of the next SSE comment.

    The move records how the answer left its worker. The comments keep the connection to the client alive.
    """

    move: Move
    until: float
    comment_at: float


@dataclass(eq=False, repr=False)
class Preemption(Preemptor):
    """Chooses which running answers of one frontend to preempt, and when to resume them."""

    table: EndpointTable
    routing: Scheduler
    running: RunningRequests
    reports: MigrationReports
    now: Callable[[], float]
    park_s: float  # maximum total seconds for which one answer is preempted; 0 disables preemption
    feed: Callable[[LiveRequest, Event], None] | None = None  # set by the driver
    put_off: dict[LiveRequest, _PutOff] = field(default_factory=dict)
    # by model or adapter, and lineage: time until which no preemption is tried
    vain_until: dict[tuple[str, Lineage], float] = field(default_factory=dict)
    looked_at: int = 0  # index of the first worker to consider for the next preemption
    making_room: bool = False  # a preemption for another request is in progress

    # --- making room

    def may(self, served: str, lineage: Lineage, tier: int) -> bool:
        """Return whether a running answer can be preempted for a request of this tier.

        If none can be, preemption for this model or adapter and lineage pauses for IN_VAIN_S.
        """
        if not self.park_s or tier > 0 or self.now() < self.vain_until.get((served, lineage), 0.0):
            return False
        if self._victim(served, lineage) is not None:
            return True
        self.looked_at += LOOKS_MAX  # look at other workers next time, if there are more
        self.in_vain(served, lineage)
        return False

    def make_room(self, served: str, lineage: Lineage) -> bool:
        """Preempt one answer to make room at its worker. Return False if no answer can be preempted."""
        found = self._victim(served, lineage)
        source = found.endpoint if found is not None else None
        if found is None or source is None or self.feed is None:
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

    def in_vain(self, served: str, lineage: Lineage) -> None:
        """Pause preemption for IN_VAIN_S, because the last preemption freed no room.

        A worker reports free room only in its next load report.
        """
        self.vain_until[served, lineage] = self.now() + IN_VAIN_S

    def _victim(self, served: str, lineage: Lineage) -> LiveRequest | None:
        """Return the answer to preempt next, or None if no answer can be preempted.

        If some worker would have room with one more free slot, the result is the answer that is cheapest to recompute.
        If workers lack KV blocks rather than slots, the result is the longest answer, which holds the most blocks.
        """
        group = self.table.group(served, lineage)
        if group is None:
            return None
        by_count, by_blocks = list[LiveRequest](), list[LiveRequest]()
        endpoints, monitor = group.endpoints, self.routing.monitor
        for n in range(min(LOOKS_MAX, len(endpoints))):
            endpoint = endpoints[(self.looked_at + n) % len(endpoints)]
            if endpoint.routable and endpoint.active > 0 and self.routing.takes(endpoint):
                found = [one for one in self.running.at(endpoint) if self._may_be_put_off(one, endpoint)]
                if self._has_room_without_one(endpoint):
                    by_count += found
                elif monitor.busy(endpoint) or monitor.lacks_blocks(endpoint):
                    by_blocks += found
        size = attrgetter("length")
        return min(by_count, key=size) if by_count else max(by_blocks, key=size, default=None)

    def _has_room_without_one(self, endpoint: Endpoint) -> bool:
        """Return whether a worker would have room for a new request if one request of this frontend ended there."""
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
            and state.put_off_s < self.park_s
            and one.request.deterministic  # otherwise the answer would not continue with the same tokens
            and endpoint.joined.exact
            and not one.stays
        )

    # --- resuming

    def waits(self, served: str, lineage: Lineage, tier: int) -> bool:
        """Return whether a preempted answer must resume before requests of this tier are admitted."""
        for one, put_off in self.put_off.items():
            same = (one.request.served, one.request.lineage) == (served, lineage)
            if same and not _stale(one, put_off) and self.table.urgency(one.request.tier) <= tier:
                return True
        return False

    def resume(
        self, admission: Admission, model: str | None = None
    ) -> Iterator[tuple[LiveRequest, Endpoint | None]]:
        """Yield the preempted answers that may resume now, each with a worker that has room for it.

        `model` limits the answers to one model. The worker is None if the answer has reached its maximum preemption
        time and no worker can serve it. The caller must send each answer before it advances the iterator.
        """
        if self.making_room:
            return
        full: set[tuple[str, Lineage, bool]] = set()
        now = self.now()
        for one, put_off in list(self.put_off.items()):
            request, due = one.request, now >= put_off.until
            pool = (request.served, request.lineage, due)
            if _stale(one, put_off):
                del self.put_off[one]
            elif model in (None, request.model) and pool not in full:
                best = None if due else admission.best_waiting(request.served, request.lineage)
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
        """Send the keep-alive comments that are due to the clients of preempted answers. Called on every tick."""
        now = self.now()
        for one, put_off in list(self.put_off.items()):
            if now >= put_off.comment_at and not _stale(one, put_off):
                self.put_off[one] = replace(put_off, comment_at=now + COMMENTS_S)
                one.writer.keep_alive()


def _stale(one: LiveRequest, put_off: _PutOff) -> bool:
    """Return whether this preemption is over: the answer has ended, or moves for another reason."""
    return one.over or one.state.move is not put_off.move
