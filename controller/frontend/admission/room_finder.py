"""Finds room at a worker for a request about to be sent, by preemption if the request is urgent.

a worker has room ──▶ its endpoint
all are busy, or one will serve in a moment ──▶ AllBusy: the request may wait
a request of the best tier would miss its deadline ──▶ a running answer of the last tier is preempted ──▶ its endpoint
no worker will serve soon ──▶ another NoWorker
"""

from collections.abc import Collection
from dataclasses import dataclass

from controller.frontend.admission.queue import QueuedRequest
from controller.frontend.scheduling.scheduler import Scheduler
from controller.router.endpoints import Endpoint, EndpointTable, Key, Lineage
from controller.router.load.monitor import NOTHING, RequiredRoom
from controller.router.selection.filter import AllBusy, AllClosed, NoneReachable, NoneRoutable, NotServed

BEYOND = 0.125  # share of a batch by which a full worker may be exceeded
PREEMPTS = 0.5  # used share of its waiting time above which a best-tier request preempts
SPILLS = 0.7  # used share of its waiting time above which a request may wait at a worker


class Preemptor:
    """The interface for preempting running answers for more urgent requests. This one never does: see `Preemption`."""

    def may(self, model: str, lineage: Lineage, tier: int) -> bool:
        """Return whether an answer can be preempted for a request of this tier."""
        return False

    def make_room(self, model: str, lineage: Lineage) -> bool:
        """Preempt one answer to free room. Return False if none may be preempted."""
        return False

    def in_vain(self, model: str, lineage: Lineage) -> None:
        """Record that the last preemption has freed no room."""

    def waits(self, model: str, lineage: Lineage, tier: int) -> bool:
        """Return whether a preempted answer must resume before requests of this tier are admitted."""
        return False


@dataclass(eq=False, repr=False)
class RoomFinder:
    """Finds room at the workers of one frontend."""

    queue_s: float  # longest time for which a closed server is waited for
    table: EndpointTable
    routing: Scheduler
    preemptor: Preemptor

    def find(
        self,
        model: str,
        lineage: Lineage | None = None,
        wanted: RequiredRoom = NOTHING,
        beyond: float = 0.0,
        without: Collection[Key] = (),
    ) -> Endpoint:
        """Return an endpoint with this much room, of any lineage or of the given one, and none of `without`.

        `beyond`: the share of a batch by which a full one may be exceeded. Raise NoWorker.
        """
        try:
            monitor = self.routing.monitor
            if wanted is monitor.asked and not beyond:  # the common case
                return self.routing.room(model, lineage, without)
            with monitor.asking(wanted, beyond):
                return self.routing.room(model, lineage, without)
        except AllClosed as error:
            if error.wait_s > self.queue_s:
                raise
            raise AllBusy from error  # worth waiting for
        except (NoneRoutable, NoneReachable, NotServed) as error:
            if not self.table.stands_in(model, lineage, without):
                raise
            raise AllBusy from error  # worth waiting for: a suspect is about to serve as the last worker

    def for_queued(self, request: QueuedRequest, wanted: RequiredRoom, beyond: float = 0.0) -> Endpoint:
        """Return an endpoint for the next queued request, unless a preempted answer must resume first. Raise NoWorker."""
        model, lineage = request.model, request.lineage
        if lineage is not None and self.preemptor.waits(model, lineage, request.tier):
            raise AllBusy
        return self.find(model, lineage, wanted, beyond)

    def for_head(self, request: QueuedRequest, wanted: RequiredRoom, now: float) -> Endpoint:
        """Return an endpoint for the request at the head of a line. Its urgency grows with its waiting time. Raise NoWorker."""
        used_up = request.used_up(now)
        # If several frontends share the workers, a best-tier request that has waited for a while is sent into a worker's own
        # queue, which is ordered by tier. There it gets the next free slot, even if another frontend's request frees that slot.
        spills = request.tier == 0 and used_up >= SPILLS and self.routing.frontends() != 1
        try:
            return self.for_queued(request, wanted, BEYOND if spills else 0.0)
        except AllBusy:
            if used_up < PREEMPTS or not self.may_preempt(request):
                raise
            if (made := self.preempt(request, wanted)) is None:
                raise
            return made

    def may_preempt(self, request: QueuedRequest) -> bool:
        """Return whether running answers may be preempted for a request."""
        model, lineage = request.model, request.lineage
        return lineage is not None and self.preemptor.may(model, lineage, request.tier)

    def preempt(self, request: QueuedRequest, wanted: RequiredRoom, *, first: bool = True) -> Endpoint | None:
        """Preempt an answer and return the endpoint with the freed room.

        None: no room is free yet, or the request is not the `first` in line. Raise NoWorker.
        """
        model, lineage = request.model, request.lineage
        assert lineage is not None
        monitor = self.routing.monitor
        with monitor.asking(wanted):
            made = self.preemptor.make_room(model, lineage)
        try:
            return self.find(model, lineage, wanted) if made and first else None
        except AllBusy:
            self.preemptor.in_vain(model, lineage)
            return None
