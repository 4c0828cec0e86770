"""The requests that wait for a worker before one frontend: production's queue."""

import itertools
from collections.abc import Callable, Iterator

from controller.frontend.admission.queue import Line, Queue, QueuedRequest
from controller.simulator.world.kernel import SECOND
from controller.simulator.world.requests.traffic import WaitingRequest


class WaitingLines:
    """The queue of one frontend, by the simulator's requests."""

    def __init__(self, line: type[Line]) -> None:
        self._queue = Queue(line=line)
        self._numbers = itertools.count()
        self._waiting: dict[int, WaitingRequest] = {}
        self._queued: dict[WaitingRequest, QueuedRequest] = {}

    def __iter__(self) -> Iterator[WaitingRequest]:
        """Yield all waiting requests."""
        return iter([*self._queued])

    def push(self, waiting: WaitingRequest, client: str) -> None:
        """Add a request."""
        since, latest = waiting.since / SECOND, waiting.latest / SECOND
        self._add(waiting, QueuedRequest(waiting.model, None, waiting.rank, client, 1.0, since, latest))

    def push_back(self, waiting: WaitingRequest) -> None:
        """Add a request, before all in line: its worker had no room."""
        self._add(waiting, QueuedRequest(waiting.model, sent_back=True))

    def _add(self, waiting: WaitingRequest, queued: QueuedRequest) -> None:
        queued.number = next(self._numbers)
        self._waiting[queued.number], self._queued[waiting] = waiting, queued
        self._queue.line_of(queued).push(queued)

    def best(self, model: str) -> int | None:
        """Return the best tier of the requests in line; None: there are none."""
        return min((queued.tier for line in self._queue.lines(model) for queued in line), default=None)

    def let_in(self, model: str, now_s: float, goes: Callable[[WaitingRequest], bool]) -> None:
        """Ask `goes` whether each request that was sent back leaves now, then the head of each line, until one does not."""
        for queued in self._queue.sent_back(model):
            if goes(self._waiting[queued.number]):
                self._remove(queued, served=True)
        for line in self._queue.lines(model):
            while (head := line.head(now_s)) is not None and goes(self._waiting[head.number]):
                self._remove(head, served=True)

    def _remove(self, queued: QueuedRequest, *, served: bool) -> None:
        del self._queued[self._waiting.pop(queued.number)]
        self._queue.line_of(queued).remove(queued, served=served)

    def leave(self, waiting: WaitingRequest) -> bool:
        """Remove a request. False: it does not wait."""
        queued = self._queued.get(waiting)
        if queued is not None:
            self._remove(queued, served=False)
        return queued is not None
