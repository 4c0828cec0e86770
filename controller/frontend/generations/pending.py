"""Which answers wait, for what, and how long? For their first token, or for a worker that goes on with them.

begun ── its first token ──▶ heard                    too late: given up, `first_token_timeout`
put off for a more urgent one ── room, or long enough ──▶ sent            see `preemption`
lost ──▶ rescheduled with all that were lost in this turn ──▶ sent elsewhere
  └────▶ parked ── a worker may have come ──▶ rescheduled       too late: given up, `no_worker`
held, and never sent: parked, and its room kept ──▶ sent        too late: given up, `first_token_timeout`
turned away, and never begun: in line once more ──▶ sent        too late: refused
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Generic, Literal, Protocol, TypeAlias, TypeVar

from controller.frontend.errors import ApiError
from controller.frontend.generations.migration_progress import MigrationProgress
from controller.frontend.generations.output_stats import OutputStats
from controller.frontend.generations.preemption import Preemptible, Preemption
from controller.frontend.generations.rescheduler import Rescheduler
from controller.frontend.generations.stall_watch import Stallable, StallWatch
from controller.frontend.request.failures import MigrationBudget
from controller.frontend.scheduling.admission import Admission, Reservation
from controller.frontend.scheduling.queue import WaitedTooLong
from controller.frontend.settings import FrontendSettings
from controller.router.endpoints import EndpointTable
from controller.router.selection.filter import NoWorker

GivenUp: TypeAlias = Literal["no_worker", "first_token_timeout"]


class Waiting(Preemptible, Stallable, Protocol):
    """What waits: a generation."""

    @property
    def stats(self) -> OutputStats: ...
    @property
    def progress(self) -> MigrationProgress: ...
    @property
    def budget(self) -> MigrationBudget: ...

    def give_up(self, why: GivenUp) -> None:
        """It has waited too long."""
        ...

    def refused(self, error: ApiError) -> None:
        """Nobody takes it, and it has not begun."""
        ...


W = TypeVar("W", bound=Waiting)


class PendingGenerations(Generic[W]):
    """The answers of one frontend that wait."""

    def __init__(
        self,
        table: EndpointTable,
        settings: FrontendSettings,
        rescheduler: Rescheduler,
        now: Callable[[], float],
        admission: Admission,
        preemption: Preemption[W],
        stalls: StallWatch[W] | None = None,
        ended: Callable[[W], object] | None = None,
    ) -> None:
        """Begin with none. `stalls` moves streams that stalled; `ended` is told of each answer that is over."""
        self._stalls = stalls
        self._table = table
        self._first_token_s = settings.admission.first_token_s
        self._first_token_s_per_token = settings.admission.first_token_s_per_1k / 1000
        self._reroute_s = settings.reroute_s
        self._rescheduler = rescheduler
        self._now = now
        self._queue_s = settings.admission.queue_s
        self._admission = admission
        self._preemption = preemption
        self._in_line: dict[W, asyncio.Future[Reservation]] = {}
        self._ended = ended
        self._parked: dict[W, float] = {}  # until when
        self._begun: dict[W, None] = {}  # those without a first token yet
        self._rooms: dict[W, Reservation] = {}  # of those that were let in and never sent

    @property
    def parked(self) -> int:
        """How many wait for a worker to go on with."""
        return len(self._parked)

    @property
    def put_off(self) -> int:
        """How many go on when more urgent ones have been served."""
        return len(self._preemption)

    @property
    def begun(self) -> int:
        """How many wait for their first token."""
        return len(self._begun)

    def begin(self, generation: W) -> None:
        """A request was sent to a worker, and nothing of its answer has come."""
        self._begun[generation] = None

    def first_token(self, generation: W) -> None:
        """The first token of an answer has come: its worker may read another prompt."""
        self._begun.pop(generation, None)
        self._admission.wake(generation.request.model)

    def reschedule(self, generation: W) -> None:
        """Send it elsewhere, together with all that lose their workers in this turn of the loop."""
        self._rescheduler.add(generation)

    def park(self, generation: W, since: float) -> None:
        """Nobody can go on with this answer now: it waits for a worker, for a while that began at `since`."""
        self._parked[generation] = since + self._reroute_s

    def hold(self, generation: W, since: float, room: Reservation | None) -> None:
        """This answer may not be sent yet: it waits as long as for its first token. Meanwhile the room that it was let in with,
        and has given back, is kept for it."""
        self._parked[generation] = since + self._first_token_limit(generation)
        if room is not None:
            self._rooms[generation] = room.again()

    def line_up(self, generation: W) -> None:
        """This answer was let in, and no worker has room for it after all: it waits for room, before those who came later."""
        request, now = generation.request, self._now()
        until = request.first_token_by
        if until is None:
            until = generation.stats.began_at + self._queue_s * self._table.knobs(request.model).latency
        declined = generation.budget.declined
        turn = self._admission.again(request.model, request.lineage, max(0.0, until - now), declined)
        self._in_line[generation] = turn
        turn.add_done_callback(partial(self._leave_line, generation))

    def _leave_line(self, generation: W, turn: "asyncio.Future[Reservation]") -> None:
        wanted = self._in_line.pop(generation, None) is turn
        if turn.cancelled():
            return
        if (error := turn.exception()) is None:
            turn.result().free()  # for the generation, which is sent before anybody else's turn comes
            if wanted:
                generation.retry()
        elif wanted and isinstance(error, WaitedTooLong | NoWorker):
            request = generation.request
            generation.refused(self._admission.refusal(error, request.model, request.tier))

    def give_back(self, generation: W) -> Reservation | None:
        """Give back the room that was kept for an answer, if any was, and return it."""
        room = self._rooms.pop(generation, None)
        if room is not None:
            room.free()
        return room

    def end(self, generation: W) -> None:
        """An answer is over: it waits for nothing."""
        if generation.stats.first_at is None:
            self._begun.pop(generation, None)
        else:
            self._admission.ended(generation.request.model, len(generation.accepted))
        if self._in_line and (turn := self._in_line.pop(generation, None)) is not None:
            turn.cancel()
        if generation.progress.disturbed:  # else it has never waited for another worker
            self._parked.pop(generation, None)
            self._rescheduler.discard(generation)
            self.give_back(generation)
        if self._ended is not None:
            self._ended(generation)

    def wake(self) -> None:
        """A worker may have come, or have room: let those try that may."""
        now = self._now()
        for generation in list(self._parked):
            if generation in self._parked and now >= generation.progress.not_before:
                del self._parked[generation]
                if generation.progress.move is not None:
                    self._rescheduler.add(generation)
                else:  # no worker has failed it: it is sent as any other request, when this turn of the loop is over
                    asyncio.get_running_loop().call_soon(generation.retry)

    def wake_one(self, model: str) -> None:
        """A worker of this model has room: let the one try that has waited longest to go on."""
        now = self._now()
        found = [
            one
            for one in self._parked
            if one.request.model == model and one.progress.move is not None and now >= one.progress.not_before
        ]
        if found:
            first = min(found, key=self._parked.__getitem__)
            del self._parked[first]
            self._rescheduler.add(first)

    def resume(self, model: str | None = None) -> None:
        """A worker of this model, or of any, may have room: let those go on that were put off, where nobody better waits."""
        if self._preemption:
            for generation in self._preemption.resume(self._admission.best_waiting, model):
                self.park(generation, self._now())

    def _first_token_limit(self, generation: W) -> float:
        """Return the seconds that an answer may wait for its first token: long prompts take long to read."""
        return self._first_token_s + self._first_token_s_per_token * len(generation.request.prompt)

    def tick(self) -> None:
        """Give up what has waited too long."""
        now = self._now()
        if self._stalls is not None:
            self._stalls.tick()
        self._preemption.comment()
        self.resume()
        for generation, until in list(self._parked.items()):
            if now > until and generation in self._parked:
                del self._parked[generation]
                generation.give_up("no_worker")
        young = now - self._first_token_s  # no limit is shorter: knobs only lengthen it
        for generation in list(self._begun):
            began_at = generation.stats.began_at
            if began_at >= young:
                continue
            limit = self._first_token_limit(generation) * self._table.knobs(generation.request.model).latency
            if now - began_at > limit:
                generation.give_up("first_token_timeout")
