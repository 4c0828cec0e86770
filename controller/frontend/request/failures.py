"""Classifies failed attempts: whether the worker is at fault, a retry's cost, and the client's error.

Migration replays the prompt and all accepted tokens on a worker on which the request has not failed yet. One budget
covers all kinds of failure: with a limit of 3, a request is sent at most four times. If a worker rejects the request
without doing any work, the worker's first rejection costs no budget, so that other workers can still be tried.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Literal

from controller.frontend.errors import ApiError
from events.observations import MigrationCause

PlannedCause = Literal["drain", "device_fault", "throttled", "operator", "preempted"]
PREEMPTED: PlannedCause = "preempted"


class Suspicion(Enum):
    """Whether a failure suggests that the request itself is harmful."""

    NONE = "none"
    SUSPECT = "suspect"  # the request may crash workers
    POISONOUS = "poisonous"  # the request fails in the same way on any worker


@dataclass(frozen=True, slots=True)
class Kind:
    """The properties of one kind of failure.

    After all workers were tried, the request waits for a new worker if `patient` is true, and ends if `patient` is
    false. `again` states that only the connection failed: if no other worker is left, the same worker is tried again.
    """

    cause: MigrationCause | Literal["preempted"]
    status: int
    message: str
    blames: bool = True  # the failure counts against the worker
    free: bool = False  # the attempt costs no budget if no work was done
    patient: bool = True
    again: bool = False


FULL = "overloaded"  # the worker had no capacity; before the first token this does not count as a failure
# errors that end one request, while its worker keeps running
ERRORS = frozenset(("engine_error", "stream_incomplete", "non_finite"))
KINDS = {
    "cannot_connect": Kind("cannot_connect", 503, "the worker cannot be reached", free=True, again=True),
    "disconnected": Kind("disconnected", 502, "Stream ended before generation completed", again=True),
    "stalled": Kind("stalled", 504, "the worker stopped answering", again=True),
    "engine_error": Kind("engine_error", 500, "the engine failed", patient=False),
    "engine_shutdown": Kind("engine_shutdown", 503, "the worker is shutting down", blames=False),
    FULL: Kind("overloaded", 503, "the worker is full", blames=False, free=True, patient=False),
    "upstream_lost": Kind("engine_error", 502, "the server behind the worker was lost", patient=False),
    "stream_incomplete": Kind("engine_error", 502, "Stream ended before generation completed", patient=False),
    "non_finite": Kind("engine_error", 500, "the engine computed numbers that are not finite", patient=False),
    "invalid_output": Kind("engine_error", 502, "the worker's output was invalid", patient=False),
    "not_serving": Kind(
        "cannot_connect", 503, "the worker does not serve this model", blames=False, free=True
    ),
    "unhealthy": Kind("unhealthy", 503, "the worker was taken out of service", blames=False),
    "request_poisonous": Kind(
        "engine_error",
        422,
        "requests like this one have failed in the same way on two workers; they are refused for a while",
        blames=False,
    ),
}

# Reasons of planned moves, without any failure.
PLANNED: dict[PlannedCause, Kind] = {
    "drain": Kind("drain", 503, "the worker is drained", blames=False),
    "device_fault": Kind("device_fault", 503, "a device of the worker is broken", blames=False),
    "throttled": Kind("throttled", 503, "a device of the worker is throttled", blames=False),
    "operator": Kind("operator", 503, "the request was moved", blames=False),
    PREEMPTED: Kind("preempted", 503, "more urgent requests were served first", blames=False),
}


CAUSES = sorted({kind.cause for kind in (*KINDS.values(), *PLANNED.values())})


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an attempt ended. If `quoted` is true, `detail` is the worker's text, which clients must not receive."""

    reason: str  # a key of KINDS or PLANNED
    detail: str
    quoted: bool = False
    one_stream: bool = False  # only this stream has stopped; the connection and the worker still work

    @property
    def kind(self) -> Kind:
        return KINDS.get(self.reason) or PLANNED[self.reason]  # type: ignore[index]

    @property
    def planned(self) -> bool:
        """Whether this is a planned move rather than a failure."""
        return self.reason in PLANNED

    @property
    def error(self) -> ApiError:
        """The error for the client if the request cannot continue. Its code is `no_worker` after a planned move."""
        kind = self.kind
        detailed = not self.quoted and self.detail not in ("", kind.message)
        message = f"{kind.message}: {self.detail}" if detailed else kind.message
        retry = 1 if kind.status == 503 else None
        code = "no_worker" if self.planned else self.reason
        return ApiError(kind.status, message, code=code, retry_after_s=retry)


def classify(error: str) -> Failure:
    """Convert the `error` of a chunk to a failure. An unknown reason counts as an engine error."""
    reason, _, detail = error.partition(":")
    return Failure(reason if reason in KINDS else "engine_error", detail.strip() or error, quoted=True)
