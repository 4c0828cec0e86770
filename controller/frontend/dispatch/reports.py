"""Publishes facts and metrics about answers that were migrated, preempted, resumed or abandoned."""

from collections.abc import Collection
from dataclasses import dataclass

from controller.frontend.dispatch.live_request import LiveRequest
from controller.frontend.request import effects as do
from controller.frontend.request_metrics import RequestMetrics
from controller.ports import Observe
from controller.router.endpoints import Endpoint, Server
from events.observations import (
    FrontendObservation,
    RequestAbandoned,
    RequestMigrated,
    RequestPreempted,
    RequestResumed,
)


@dataclass(eq=False, repr=False)
class MigrationReports:
    """Publishes the facts about one frontend's migrations and preemptions, and updates the metrics."""

    frontend: str
    observe: Observe
    metrics: RequestMetrics

    def migrated(self, live: LiveRequest, effect: do.ReportMigrated, now: float) -> None:
        """Report that an answer has moved to the worker of its most recent attempt."""
        request, stats, last, move = live.request, live.stats, live.state.last, effect.move
        assert last is not None
        repeatable = request.deterministic and not live.continuation.texts and not effect.spoilt
        exact = repeatable and same_answers(move.source, last.server, request.sampling.unset)
        if effect.well and move.tokens and not exact:
            live.answer.exact = False
        gap_s = now - (stats.last_at if stats.first_at is not None else move.since)
        carried, cause = move.carried, move.failure.kind.cause
        source, target = move.source.key, last.server.key
        fact: FrontendObservation
        if cause == "preempted":
            if not effect.well:
                return
            fact = RequestResumed(
                frontend=self.frontend,
                request=request.id,
                model=request.model,
                source=source[0],
                target=target[0],
                target_instance=target[1],
                tokens=move.tokens,
                gap_ms=gap_s * 1000,
                exact=exact,
            )
        else:
            if effect.well:
                self.metrics.resumed(cause, gap_s)
            fact = RequestMigrated(
                frontend=self.frontend,
                request=request.id,
                model=request.model,
                source=source[0],
                source_instance=source[1],
                target=target[0],
                target_instance=target[1],
                cause=cause,
                method="transfer" if carried else "reprefill",
                tokens=move.tokens,
                gap_ms=gap_s * 1000,
                attempt=last.number,
                exact=exact,
                kind_of_move="ongoing_request" if move.tokens else "new_request",
                bytes=carried.bytes if carried else 0,
                blocks=carried.blocks if carried else 0,
                link=carried.link if carried else "",
                predicted_ms=move.predicted_ms,
                refused=move.refused,
            )
        self.observe(fact, traceparent=request.traceparent)

    def preempted(self, live: LiveRequest, source: Endpoint) -> None:
        """Report that an answer on the worker `source` is preempted for a more urgent request."""
        request = live.request
        self.metrics.preempted(request.model, request.tier)
        fact = RequestPreempted(
            frontend=self.frontend,
            request=request.id,
            model=request.model,
            tier=request.tier,
            worker=source.worker,
            instance=source.instance,
            tokens=len(live.accepted),
        )
        self.observe(fact, traceparent=request.traceparent)

    def abandoned(self, live: LiveRequest, reason: str) -> None:
        """Report that an answer ended because no worker could continue it."""
        request, last = live.request, live.state.last
        fact = RequestAbandoned(
            frontend=self.frontend,
            request=request.id,
            model=request.model,
            worker=last.server.key[0] if last is not None else "",
            instance=last.server.key[1] if last is not None else "",
            reason=reason,
            tokens=len(live.accepted),
        )
        self.observe(fact, traceparent=request.traceparent)


def same_answers(source: Server, target: Server, unset: Collection[str]) -> bool:
    """Return whether the target would continue an answer with the tokens that the source would have generated.

    Both servers must accept tokens, and must serve the same weights with the same defaults. `unset` contains the
    sampling parameters that the client did not set, so the server's defaults apply. If the servers do not name their
    weights, their defaults are unknown. The result is then true only if `unset` is empty.
    """
    same = (source.root, source.generation_config) == (target.root, target.generation_config)
    return source.exact and target.exact and same and bool(source.root or not unset)
