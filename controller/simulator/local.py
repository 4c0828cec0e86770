"""A frontend's own breakers: the same machine as the fleet's, fed with its own outcomes, request by request.

They can only subtract from the fleet's verdict. Their moves are numbered by the frontend itself and never journalled;
a fleet's BreakerClosed or a new instance resets them.
"""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

from controller.deciders import breaker
from controller.deciders.breaker import Breaker, BreakerPolicy
from events.decisions import BreakerClosed
from events.fact import Fact, Recorded
from events.observations import RequestFailed, RequestsServed, WorkerJoined


class LocalBreakers:
    """One frontend's breakers, by worker."""

    def __init__(self, policy: BreakerPolicy, frontend: str) -> None:
        self.moves = 0
        self._policy = policy
        self._frontend = frontend
        self._breakers: dict[str, Breaker] = {}
        self._moved: set[str] = set()  # those that are not closed, or may open now

    def follow(self, batch: Sequence[Recorded]) -> None:
        """Reset the breakers of workers that the fleet has closed, or that are new."""
        for event in batch:
            if isinstance(event.fact, BreakerClosed | WorkerJoined):
                self._breakers.pop(event.fact.worker, None)
                self._moved.discard(event.fact.worker)

    def admits(self, worker: str, instance: str, now: datetime) -> bool:
        """Return whether this worker may get a request now."""
        if worker not in self._moved:
            return True
        return breaker.admit(self._settle(worker, instance, now)) is not None

    def took(self, worker: str, instance: str, now: datetime) -> None:
        """A request was sent there: if it is the trial, it is the only one."""
        if worker in self._moved:
            admitted = breaker.admit(self._settle(worker, instance, now))
            if admitted is not None:
                self._breakers[worker] = admitted

    def succeeded(self, worker: str, instance: str, sent_under: int) -> None:
        """A request that was sent under our own move number `sent_under` was answered."""
        if worker not in self._moved:
            return
        served = RequestsServed(
            worker=worker, instance=instance, frontend=self._frontend, count=1, tokens=1, ttft_ms=1.0, itl_ms=1.0,
            routed_under=sent_under, window_s=0.0,
        )  # fmt: skip
        self._absorb(worker, instance, served)

    def failed(self, worker: str, instance: str, in_a_row: int, sent_under: int) -> None:
        """A request that was sent under our own move number `sent_under` failed."""
        failure = RequestFailed(
            worker=worker, instance=instance, frontend=self._frontend, failures_in_a_row=in_a_row, reason="failed",
            routed_under=sent_under,
        )  # fmt: skip
        self._absorb(worker, instance, failure)
        self._moved.add(worker)

    def _absorb(self, worker: str, instance: str, fact: Fact) -> None:
        self._breakers[worker] = breaker.evolve(self._of(worker, instance), fact)

    def _of(self, worker: str, instance: str) -> Breaker:
        found = self._breakers.get(worker)
        if found is None or found.instance != instance:
            found = self._breakers[worker] = Breaker(
                worker, instance, trial_by="request", moved_by=self.moves
            )
        return found

    def _settle(self, worker: str, instance: str, now: datetime) -> Breaker:
        state = self._of(worker, instance)
        while decision := next(breaker.decide(self._policy, state, now), None):
            self.moves += 1
            state = breaker.evolve(state, replace(decision, number=self.moves))
        self._breakers[worker] = state
        if state.position == "closed" and not state.request_failures:
            self._moved.discard(worker)
        return state
