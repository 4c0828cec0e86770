"""What a frontend says of answers that changed their workers: facts, and what a client has noticed."""

from controller.frontend.generations.attempt import Attempt
from controller.frontend.request.generation_request import GenerationRequest, Move
from controller.frontend.request_metrics import RequestMetrics
from controller.ports import Observe
from controller.router.endpoints import Endpoint
from events.observations import RequestAbandoned, RequestMigrated, RequestPreempted, RequestResumed


class MigrationReports:
    """The facts about one frontend's migrations."""

    def __init__(self, frontend: str, observe: Observe, metrics: RequestMetrics) -> None:
        self._frontend = frontend
        self._observe = observe
        self._metrics = metrics

    def migrated(
        self,
        request: GenerationRequest,
        move: Move,
        attempt: Attempt,
        gap_s: float,
        *,
        exact: bool,
        well: bool,
    ) -> None:
        """An answer went on elsewhere, by this attempt: `well` if its next token has come, or that attempt failed too."""
        carried, target, cause = move.carried, attempt.endpoint, move.failure.kind.cause
        if cause == "preempted":
            if well:
                self._resumed(request, move, target, gap_s, exact=exact)
            return
        if well:
            self._metrics.resumed(cause, gap_s)
        self._observe(
            RequestMigrated(
                frontend=self._frontend,
                request=request.id,
                model=request.model,
                source=move.source.worker,
                source_instance=move.source.instance,
                target=target.worker,
                target_instance=target.instance,
                cause=cause,
                method="transfer" if carried else "reprefill",
                tokens=move.tokens,
                gap_ms=gap_s * 1000,
                attempt=attempt.number,
                exact=exact,
                kind_of_move="ongoing_request" if move.tokens else "new_request",
                bytes=carried.bytes if carried else 0,
                blocks=carried.blocks if carried else 0,
                link=carried.link if carried else "",
                predicted_ms=move.predicted_ms,
                refused=move.refused,
            ),
            traceparent=request.traceparent,
        )

    def preempted(self, request: GenerationRequest, source: Endpoint, tokens: int) -> None:
        """An answer of so many tokens is put off for one that is more urgent."""
        self._metrics.preempted(request.model, request.tier)
        fact = RequestPreempted(
            frontend=self._frontend,
            request=request.id,
            model=request.model,
            tier=request.tier,
            worker=source.worker,
            instance=source.instance,
            tokens=tokens,
        )
        self._observe(fact, traceparent=request.traceparent)

    def _resumed(
        self, request: GenerationRequest, move: Move, target: Endpoint, gap_s: float, *, exact: bool
    ) -> None:
        """One that was put off goes on."""
        fact = RequestResumed(
            frontend=self._frontend,
            request=request.id,
            model=request.model,
            source=move.source.worker,
            target=target.worker,
            target_instance=target.instance,
            tokens=move.tokens,
            gap_ms=gap_s * 1000,
            exact=exact,
        )
        self._observe(fact, traceparent=request.traceparent)

    def abandoned(self, request: GenerationRequest, last: Attempt | None, tokens: int, reason: str) -> None:
        """An answer of so many tokens could not be continued; `last`: its last attempt."""
        fact = RequestAbandoned(
            frontend=self._frontend,
            request=request.id,
            model=request.model,
            worker=last.endpoint.worker if last is not None else "",
            instance=last.endpoint.instance if last is not None else "",
            reason=reason,
            tokens=tokens,
        )
        self._observe(fact, traceparent=request.traceparent)
