"""The check ledger of one request, built only from the events and effects of the request machine."""

from dataclasses import dataclass, field
from typing import NamedTuple

from controller.frontend.request import effects as do
from controller.frontend.request import events as on
from controller.frontend.request.effects import Effects
from controller.frontend.request.failures import FULL, Failure
from controller.frontend.request.state import RequestState
from controller.router.endpoints import Key
from controller.simulator.world.requests.traffic import SimulatedRequest


@dataclass(slots=True)
class RequestLedger:
    """The recorded history of one request."""

    before: RequestState
    ends: int = 0
    paid: int = 0  # attempts that cost budget
    free: bool = False  # the next attempt costs no budget, because nothing had failed
    at: Key | None = None  # the worker of the current attempt
    charged: bool = False  # the current attempt has cost budget
    tried: set[Key] = field(default_factory=set)
    failed: set[Key] = field(default_factory=set)  # those that failed by more than a broken connection
    first: Failure | None = None  # failures since the last token
    moving: bool = False  # an attempt was lost, and no token has arrived since the loss
    reported: bool = False
    outage: bool = False
    waits_since: float | None = None  # since when the request has had no worker, in seconds
    could_resume_since: int | None = None

    def write(self, step: "MachineStep", now: float) -> None:
        """Record an event and its effects."""
        _, request, event, effects = step
        self.ends += sum(isinstance(one, do.Complete | do.Refuse | do.End) for one in effects)
        for effect in effects:
            if isinstance(effect, do.CountFailure):
                self.outage = True
            elif isinstance(effect, do.CountRestored):
                self.outage = False
            elif isinstance(effect, do.ReportMigrated):
                self.reported = True
        match event:
            case on.Sent(server) | on.Switched(server):
                self.charged = not self.free and isinstance(event, on.Sent)
                self.paid += self.charged
                self.at, self.free, self.waits_since = server.key, False, None
                self.moving, self.reported = self.moving or isinstance(event, on.Switched), False
            case on.FirstToken():
                self.first, self.moving = None, False
            case on.MovedOnPurpose():
                self.free, self.moving, self.at, self.waits_since = True, True, None, now
            case on.NoneLeft() | on.Resumed() if self.before.phase == "preempted":
                self.waits_since = now  # the request was preempted until now
            case on.ConnectFailed(key):
                self.tried.add(key)
            case on.AttemptFailed(failure) if self._refused(failure):
                self.paid -= self.charged
                self.free, self.at = not self.charged, None
            case on.AttemptFailed(failure):
                self._lost(failure, now)
            case on.WorkerUnhealthy() if request.state.phase != self.before.phase:
                self._lost(Failure("unhealthy", ""), now)
            case on.Exposed(key=key) if do.CancelStream("elsewhere") in effects:
                if key == self.at:
                    self._lost(Failure("unhealthy", "corrupt output"), now)
                else:  # the worker is healthy and only restarts the request
                    self.paid -= self.charged and self.at is not None
                    self._moved(Failure("unhealthy", "corrupt KV cache"), now)
        self.before = request.state

    def _refused(self, failure: Failure) -> bool:
        return failure.reason == FULL and not self.before.has_output

    def _lost(self, failure: Failure, now: float) -> None:
        assert self.at is not None
        kind = failure.kind
        if kind.free and not self.before.has_output and self.at not in self.tried:
            self.paid -= self.charged
        self.tried.add(self.at)
        if not kind.again:
            self.failed.add(self.at)
        self._moved(failure, now)

    def _moved(self, failure: Failure, now: float) -> None:
        self.first, self.at, self.moving, self.waits_since = self.first or failure, None, True, now
        self.free = False


class MachineStep(NamedTuple):
    """One step of the state machine: the ledger before the step, the request after it, the event and its effects."""

    ledger: RequestLedger
    request: SimulatedRequest
    event: on.Event
    effects: Effects
