"""Statistics of one answer: when its tokens came, and from which worker. Counted once per turn of the loop, however many tokens
came.

An answer depends on the worker that gave its tokens and, after a transfer, on every worker whose KV cache that worker took
over: what was computed wrongly there stays wrong at the target, so a conviction of the source names everything that came since.
"""

from collections.abc import Sequence
from math import inf
from typing import Any

import msgspec

from controller.frontend.health.exposure import Exposures, ServedSpan
from controller.frontend.request.state import GenerationRequest, RequestState, budget_ended
from controller.frontend.request_metrics import ModelMetrics
from controller.router.endpoints import Endpoint, Key
from controller.router.load.active_sequences import ActiveSequences
from events.wire import Logprob


class Dispatch(msgspec.Struct, eq=False):
    """An attempt as it is counted outside the machine: where it runs, and under which numbers. It never changes."""

    endpoint: Endpoint
    rank: int | None  # the one of several DP ranks
    stream: int  # its number on the request plane
    slot: int  # its number in the slot tracker
    routed_under: int  # the fleet's last decision when it was routed
    breaker_epoch: int  # the last move of this frontend's own breakers then
    before: "Dispatch | None"
    claimed: int = 0  # prompt tokens that its worker said it had cached
    explained: dict[str, Any] | None = None  # why this worker was chosen, if that was asked


LOGPROB_FLOOR = -9.0  # one in 8,000: correct samplers draw few tokens below it, a broken one mostly such


class OutputStats:
    """When the tokens of one answer came, how many are counted, and the spans that workers served."""

    __slots__ = (
        "_exposures", "_live", "_metrics", "_request", "_tracker", "arrived_at", "attempt_at", "began_at", "cached_tokens",
        "counted", "first_at", "last_at", "movable_max", "own", "sources", "unlikely", "weighed",
    )  # fmt: skip

    def __init__(
        self,
        now: float,
        live: int,
        request: GenerationRequest,
        metrics: ModelMetrics,
        exposures: Exposures,
        max_seq_len: int | None,
        tracker: ActiveSequences | None,
    ) -> None:
        """`live`: the number of the live request; `max_seq_len`: tokens of prompt and answer, beyond which it does not move;
        `tracker`: counts tokens too."""
        self._tracker = tracker
        self._live = live
        self._request = request
        self._metrics = metrics
        self._exposures = exposures
        # tokens; inf: there is no limit, or more were counted already
        self.movable_max = inf if max_seq_len is None else max_seq_len - len(request.prompt)
        self.began_at = self.last_at = self.attempt_at = now  # sent to its first worker, or its last one
        self.arrived_at = now if request.arrived is None else request.arrived
        self.first_at: float | None = None
        self.cached_tokens: int | None = None  # of the prompt, at the first worker that reports it
        self.counted = 0  # accepted tokens when the last turn ended
        self.weighed = self.unlikely = 0  # tokens with logprobs, and those of them that are improbable
        self.own: ServedSpan | None = None  # of the present worker, from its first token on
        self.sources: tuple[ServedSpan, ...] = ()  # of the workers whose KV cache it has taken over

    def first_output(self, now: float) -> None:
        """The first token of the answer has come."""
        self.first_at = now
        self._metrics.ttft.note(now - self.arrived_at)

    def weigh(self, logprobs: Sequence[Logprob]) -> None:
        """Count tokens that came with logprobs, and those below the floor."""
        self.weighed += len(logprobs)
        self.unlikely += sum(one.chosen < LOGPROB_FLOOR for one in logprobs)

    def count(self, now: float, accepted: int, dispatch: Dispatch) -> None:
        """Count the accepted tokens that are new: all of them came from this attempt, in this turn."""
        counted = self.counted
        new = accepted - counted
        if not new:
            return
        metrics, own = self._metrics, self.own
        if own is None:
            request, key = self._request, dispatch.endpoint.key
            own = self.own = ServedSpan(
                request.id, request.model, counted, self._live, request.traceparent, dispatch.rank, key
            )
            self._exposures.note(own)
        own.add(now, new)
        for source in self.sources:
            source.add(now, new)
        if self._tracker is not None:
            self._tracker.output(dispatch.slot, new)
        metrics.tokens += new
        if counted:
            metrics.itl.add((now - self.last_at) / new, new)
        self.counted = accepted
        self.last_at = now

    def note_length(self, accepted: int, state: RequestState) -> None:
        """Count the request as too long to move, once, if it could have moved before."""
        if accepted > self.movable_max and not budget_ended(state):
            self.movable_max = inf
            self._metrics.outgrown()

    def rewind(self, count: int) -> None:
        """Count what comes after the first `count` tokens anew."""
        self.counted = min(self.counted, count)

    # --- provenance

    def depends_on(self, key: Key) -> bool:
        """Return whether what comes now is computed from what this worker computed."""
        return any(span.key == key for span in self._open)

    def hand_over(self) -> None:
        """Another worker continues, with the KV cache of the present one."""
        self.sources, self.own = self._open, None

    def leave(self) -> None:
        """What comes from now on is computed anew."""
        for span in self._open:
            self._exposures.close(span)
        self.sources, self.own = (), None

    @property
    def _open(self) -> tuple[ServedSpan, ...]:
        return (*self.sources, self.own) if self.own is not None else self.sources

    def ended(self, now: float, accepted: int, *, well: bool) -> None:
        """The answer is over: as its client wanted it, or not."""
        request, metrics = self._request, self._metrics
        metrics.ended(now - self.arrived_at, accepted, self.cached_tokens)
        if not well or self.first_at is None:
            return
        by, arrived_at = request.first_token_by, self.arrived_at
        metrics.traffic.ended(
            len(request.prompt),
            accepted,
            self.first_at - arrived_at,
            (self.last_at - self.first_at) / (accepted - 1) if accepted > 1 else 0.0,
            None if by is None else by - arrived_at,
        )
