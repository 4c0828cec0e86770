"""Does a worker take new requests, and how have streams ended since it does not?

A drain begins when the worker is told of it; or before that, with the first stream that a frontend, which has heard of it
sooner, takes away for it.
"""

from dataclasses import dataclass

from workers.counters import Ends, WorkerCounters


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why new requests are turned away. Canaries are let through while the worker may come back."""

    reason: str
    canaries_too: bool


class DrainState:
    """One worker's refusal of new requests, and its account of the streams that ended under it."""

    def __init__(self, counters: WorkerCounters) -> None:
        """Take everything. `counters` count how streams end."""
        self.refusal: Refusal | None = None
        self.deregistered = False  # frontends are told to send nothing more; what is on its way is taken
        self._counters = counters
        self._before: Ends | None = None  # when it began to drain, or had last said how it goes
        self._drained_by: set[str] = set()  # frontends that drain it, before it was told to drain

    @property
    def draining(self) -> bool:
        """Whether frontends are told to send nothing new."""
        return self.deregistered or self.refusal is not None

    def refuses(self, canary: bool) -> str:
        """Return why a request is turned away; empty: it is taken."""
        refusal = self.refusal
        return refusal.reason if refusal and (refusal.canaries_too or not canary) else ""

    def deregister(self) -> None:
        """Have frontends told to send nothing more."""
        self._begin()
        self.deregistered = True

    def refuse(self, refusal: Refusal | None) -> None:
        """Turn new requests away from now on (None: no longer)."""
        self.refusal = refusal
        if refusal is None:
            self._before = None
        else:
            self._begin()

    def _begin(self) -> None:
        """From now on this worker drains, unless a frontend has drained it already."""
        self._before = self._before or self._counters.ends
        self._drained_by.clear()

    def taken_away_by(self, frontend: str) -> None:
        """Note that a frontend takes a stream away for a drain: if it has heard of it first, the drain begins now."""
        if not self.draining:
            self._before = self._before or self._counters.ends
            self._drained_by.add(frontend)

    def asked_by(self, frontend: str) -> None:
        """Note a request: of a frontend that drains this worker, the drain was taken back before this worker heard of it."""
        if frontend in self._drained_by:
            self._drained_by.clear()
            self._before = None

    def drained(self) -> Ends:
        """Return how streams have ended since the drain began, or since this was last asked."""
        now = self._counters.ends
        before, self._before = self._before or now, now
        return now - before
