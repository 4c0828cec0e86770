"""Alerts and recording rules for Prometheus, with severities, dashboards and runbooks.

There are two kinds of thresholds. Conditions that must never occur (a wrong answer, no leader, a lost stream) fire at once, or
after the time of a restart. Conditions that may occur for a while (late first tokens, failed requests) fire by the burn rate of
the error budget over a long and a short window together: the long one shows that it matters, the short one that it persists.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass

from grafana.boards.common import OURS

OBJECTIVE = 0.999  # share of requests that must not fail by the fleet's fault
FIRST_TOKEN_LE = "2.2"  # seconds; a bucket of the histogram
BURNS = (("1h", "5m", 14.4, "critical"), ("6h", "30m", 6.0, "warning"))  # windows, burn rate, severity
WRONG = 'reason=~"token_mismatch|logit_drift|non_finite"'
REQUESTS, FIRST = "dynamo_frontend_requests_total", "dynamo_frontend_time_to_first_token_seconds"
DAY_S, DISK_BYTES_MIN = 86_400, 1 << 30
STATUS = "max by (worker_id) (dynamo_worker_status)"


@dataclass(frozen=True, slots=True)
class Recorded:
    """A recording rule with a value that alerts and dashboards share."""

    name: str
    expr: str


@dataclass(frozen=True, slots=True)
class Alert:
    """An alert, which fires while `expr` has been true for `lasts`."""

    name: str
    severity: str
    _: KW_ONLY
    expr: str
    summary: str
    says: str  # description, with {{ $value }} and {{ $labels.… }}
    lasts: str = "0s"
    board: str = "holdfast-fleet"
    page: str = ""  # runbook page, if it has none of its own

    @property
    def runbook(self) -> str:
        """Name of its page in docs/operations/runbooks. Both burn rates of a budget share one page."""
        return self.page or self.name.removesuffix("Fast").removesuffix("Slow")

    @property
    def runbook_url(self) -> str:
        """Path of its runbook, relative to the project's URL."""
        return f"docs/operations/runbooks/{self.runbook}.md"

    @property
    def dashboard_url(self) -> str:
        """Path of its dashboard, relative to Grafana's URL."""
        return f"/d/{self.board}"


def _errors(window: str) -> str:
    return (
        f"(sum by (model) (rate({REQUESTS}{{{OURS}}}[{window}])) or 0 * sum by (model) (rate({REQUESTS}[{window}])))"
        f" / sum by (model) (rate({REQUESTS}[{window}]))"
    )


def _late(window: str) -> str:
    return (
        f'1 - sum by (model) (rate({FIRST}_bucket{{le="{FIRST_TOKEN_LE}"}}[{window}]))'
        f" / sum by (model) (rate({FIRST}_count[{window}]))"
    )


WINDOWS = sorted({window for long, short, _, _ in BURNS for window in (long, short)})
RECORDED = (
    *(Recorded(f"holdfast:request_errors:ratio_rate{window}", _errors(window)) for window in WINDOWS),
    *(Recorded(f"holdfast:first_tokens_late:ratio_rate{window}", _late(window)) for window in WINDOWS),
)


def _burning(name: str, figure: str, what: str) -> Iterator[Alert]:
    for long, short, rate, severity in BURNS:
        bound = f"{rate * (1 - OBJECTIVE):g}"
        both = (
            f"holdfast:{figure}:ratio_rate{long} > {bound} and holdfast:{figure}:ratio_rate{short} > {bound}"
        )
        yield Alert(
            f"{name}{'Fast' if severity == 'critical' else 'Slow'}", severity, expr=both, board="holdfast-slo",
            summary=f"{what} of {{{{ $labels.model }}}} consume their error budget {rate:g} times too fast",
            says=f"{{{{ $value | humanizePercentage }}}} in the last {long}, and also in the last {short}.",
        )  # fmt: skip


ALERTS = (
    Alert("HoldfastSilentCorruption", "critical", board="holdfast-corruption",
        expr=f"sum by (worker_id) (increase(dynamo_canary_failures_total{{{WRONG}}}[5m])) > 0",
        summary="{{ $labels.worker_id }} gave a wrong answer to a canary",
        says="{{ $value | humanize }} wrong answers within 5 minutes. The controller takes it out of service; the dashboard "
        "lists the exposed requests."),
    Alert("HoldfastWorkersFailing", "critical", lasts="1m",
        expr=f"count({STATUS} == 2 or {STATUS} == 4) / count({STATUS} != 3) > 0.1",
        summary="More than a tenth of the workers are out of service because of faults",
        says="{{ $value | humanizePercentage }} of the workers that are not being drained are unhealthy or dead."),
    Alert("HoldfastCapacityDegraded", "warning", lasts="2m",
        expr="max by (model) (holdfast_degradation_level) > 0 < 3",
        summary="{{ $labels.model }} is at degradation level {{ $value }}",
        says="Its capacity is below its objective: batches are smaller, and from level 2 on the lowest tier is shed."),
    Alert("HoldfastCapacityCritical", "critical", lasts="1m",
        expr="max by (model) (holdfast_degradation_level) >= 3",
        summary="{{ $labels.model }} is at degradation level {{ $value }}",
        says="Its capacity is below half of its throughput objective: latencies are relaxed, and level 4 "
        "admits no new requests."),
    Alert("HoldfastNoRoutableWorker", "critical", lasts="30s",
        expr="max by (model) (holdfast_model_routable_weight) == 0",
        summary="No worker can serve {{ $labels.model }}",
        says="No worker of this model is in service: each request is rejected with no_routable_worker."),
    Alert("HoldfastSuspectServing", "critical", board="holdfast-corruption",
        expr="max by (worker_id) (holdfast_worker_suspect) > 0",
        summary="{{ $labels.worker_id }} serves although canaries convict it",
        says="No other worker of its model serves. Its answers may be wrong: they carry X-Holdfast-Suspect."),
    Alert("HoldfastPanic", "warning", lasts="1m", board="holdfast-requests",
        expr="max by (model) (holdfast_panic) > 0",
        summary="Frontends ignore their local breakers for {{ $labels.model }}",
        says="Less than half of its weight would be routable: most of its workers fail requests."),
    Alert("HoldfastExposureUnknown", "warning", board="holdfast-corruption",
        expr="sum by (worker_id) (increase(holdfast_exposure_unknown_total[10m])) > 0",
        summary="Exposed requests of {{ $labels.worker_id }} are not fully known",
        says="It was convicted, and for {{ $value | humanize }} spans frontends do not know which requests it served."),
    Alert("HoldfastTokensUnlikely", "warning", board="holdfast-corruption",
        expr="sum by (worker_id) (increase(holdfast_tokens_unlikely_total[30m])) > 0",
        summary="{{ $labels.worker_id }} samples unlikely tokens: its sampler may be broken",
        says="It continues to serve: no other worker could replace it, or users' tokens alone are not proof."),
    Alert("HoldfastGoldenDisputed", "warning", board="holdfast-corruption",
        expr="sum(increase(holdfast_golden_disputes_total[10m])) > 0",
        summary="Workers disagree on a canary's expected answer",
        says="No worker is taken out of service for it: an operator must decide which answer is right."),
    Alert("HoldfastStreamsLost", "critical", board="holdfast-requests",
        expr='sum by (model) (increase(dynamo_frontend_model_migration_duration_seconds_count{outcome="failure"}[5m])) > 0',
        summary="Streams of {{ $labels.model }} have been lost",
        says="{{ $value | humanize }} requests within 5 minutes lost their worker, and no other worker could continue them."),
    Alert("HoldfastRefusals", "warning", lasts="5m", board="holdfast-requests",
        expr=f"sum by (model) (rate(dynamo_frontend_model_rejection_total[5m])) / sum by (model) (rate({REQUESTS}[5m])) > 0.05",
        summary="Requests for {{ $labels.model }} are rejected for lack of capacity",
        says="{{ $value | humanizePercentage }} of the requests in 5 minutes were rejected: traffic exceeds capacity."),
    Alert("HoldfastNoLeader", "critical", lasts="30s", board="holdfast-control-plane",
        expr="sum(holdfast_leader) == 0 or absent(holdfast_leader)",
        summary="No controller leads",
        says="No controller holds the lease: frontends still migrate streams, but no worker is taken out of service."),
    Alert("HoldfastObserverBlind", "critical", lasts="1m", board="holdfast-control-plane",
        expr="max(holdfast_observer_blind) > 0",
        summary="The controller receives heartbeats from less than half of the fleet",
        says="It probably lost its connection, so no worker is declared silent. Check the broker and the controller's network."),
    Alert("HoldfastJournalUnreachable", "critical", lasts="30s", board="holdfast-control-plane",
        expr="1 - avg(holdfast_journal_reachable) > 0.5",
        summary="Most processes cannot write to the journal",
        says="{{ $value | humanizePercentage }} of them cannot reach NATS, or do not trust its stream. Their facts "
        "wait in their spools."),
    Alert("HoldfastSpoolGrowing", "warning", lasts="1m", board="holdfast-control-plane",
        expr="max by (role, process) (holdfast_spool_depth) > 100",
        summary="{{ $labels.process }} records facts faster than the journal accepts them",
        says="{{ $value | humanize }} facts are in its spool."),
    Alert("HoldfastFactsDropped", "critical", board="holdfast-control-plane",
        expr="sum by (role, process) (increase(holdfast_facts_dropped_total[5m])) > 0",
        summary="{{ $labels.process }} has dropped facts",
        says="{{ $value | humanize }} facts within 5 minutes did not fit into its spool and will be missing from the journal."),
    Alert("HoldfastJournalFull", "critical", lasts="1m", board="holdfast-control-plane",
        expr=f"min(holdfast_journal_full_in_seconds) < {DAY_S}",
        summary="The journal is about to be full",
        says="At the growth of the last day it is full in {{ $value | humanizeDuration }}."),
    Alert("HoldfastJournalFullSoon", "warning", lasts="10m", board="holdfast-control-plane",
        page="HoldfastJournalFull",
        expr=f"min(holdfast_journal_full_in_seconds) < {7 * DAY_S}",
        summary="The journal will be full within a week",
        says="At the growth of the last day it is full in {{ $value | humanizeDuration }}."),
    Alert("HoldfastJournalDiskLow", "critical", lasts="1m", board="holdfast-control-plane",
        page="HoldfastJournalFull",
        expr=f"min(holdfast_journal_free_bytes) < {DISK_BYTES_MIN}",
        summary="The broker's disk is nearly full",
        says="{{ $value | humanize1024 }}B are free on the journal's disk, whatever has filled it."),
    Alert("HoldfastCertificateExpiring", "warning", lasts="1m", board="holdfast-control-plane",
        expr=f"clamp_min(min(holdfast_broker_certificate_ends_timestamp_seconds) - time(), 0) < {14 * DAY_S}",
        summary="The broker's certificate expires soon",
        says="It is valid for {{ $value | humanizeDuration }} more; after that no process can reconnect to NATS."),
    Alert("HoldfastStateStoreStuck", "critical", lasts="1m", board="holdfast-control-plane",
        expr="max(holdfast_projector_lag) > 0 and on () (sum(rate(holdfast_projector_events_total[1m])) == 0)",
        summary="The state store receives no events",
        says="{{ $value | humanize }} events are waiting: Postgres is unreachable, or the projector is stuck."),
    Alert("HoldfastStateStoreBehind", "warning", lasts="2m", board="holdfast-control-plane",
        expr="max(holdfast_projector_lag) > 1000",
        summary="The state store is behind",
        says="It lacks {{ $value | humanize }} events. The planner makes no changes meanwhile."),
    Alert("HoldfastWorkersMissing", "warning", lasts="1m", board="holdfast-control-plane",
        expr="max(holdfast_workers_registered) - max(holdfast_workers_reporting) > 0",
        summary="Workers that have joined send no heartbeat",
        says="{{ $value | humanize }} registered workers have no fresh heartbeat."),
    Alert("HoldfastBreakerFlapping", "warning", board="holdfast-worker",
        expr="max by (worker_id) (changes(dynamo_circuit_breaker_state[15m])) > 6",
        summary="{{ $labels.worker_id }} fails repeatedly",
        says="Its circuit breaker has changed {{ $value | humanize }} times in 15 minutes: it passes trials but fails requests."),
    Alert("HoldfastPlaceEmpty", "warning", lasts="5m",
        expr="max by (model) (holdfast_places_empty) > 0",
        summary="A lost worker of {{ $labels.model }} has not been replaced",
        says="{{ $value | humanize }} lost workers are not replaced: there are too few spares, or none is healthy."),
    Alert("HoldfastWorkerNameTaken", "warning", board="holdfast-control-plane",
        expr="max(increase(holdfast_worker_names_taken_total[10m])) > 0",
        summary="A worker was not started: another live worker has its name",
        says="{{ $value | humanize }} starts within ten minutes were refused. The first worker with the name "
        "continues to serve."),
    Alert("HoldfastWorkersLingering", "warning", lasts="5m", board="holdfast-control-plane",
        expr="max(holdfast_workers_lingering) > 0",
        summary="Processes of dead workers are still running",
        says="{{ $value | humanize }} of them hold their GPUs, because they were not terminated."),
    Alert("HoldfastWebhooksFailing", "warning", lasts="1m", board="holdfast-control-plane",
        expr="max by (webhook) (holdfast_webhook_failures_in_a_row) >= 5 or max by (webhook) (holdfast_webhook_stopped) > 0"
        ' or sum by (webhook) (increase(holdfast_webhook_deliveries_total{outcome="dead_letter"}[10m])) > 0',
        summary="The webhook {{ $labels.webhook }} does not accept events",
        says="Its receiver fails or is unreachable, answered 410 Gone, or rejected events, which are now dead letters."),
    Alert("HoldfastTargetDown", "warning", lasts="1m", board="holdfast-control-plane",
        expr='up{job="holdfast"} == 0',
        summary="{{ $labels.role }} {{ $labels.process }} cannot be scraped",
        says="It has not answered Prometheus for a minute."),
    *_burning("HoldfastErrorBudgetBurn", "request_errors", "Failed requests"),
    *_burning("HoldfastFirstTokensLate", "first_tokens_late", f"First tokens later than {FIRST_TOKEN_LE} s"),
)  # fmt: skip


def text(*, rehearsed: bool = False) -> str:
    """Return the rules as Prometheus reads them.

    `rehearsed`: for a Prometheus that evaluates each second, with windows of a thirtieth and durations of a sixtieth."""
    return "".join(_lines(rehearsed))


def rehearsed_duration_s(alert: Alert) -> int:
    """Return for how many seconds an alert's rehearsed rule must hold before it fires."""
    seconds = _seconds(alert.lasts)
    return max(1, round(seconds / 60)) if seconds else 0


def _seconds(duration: str) -> int:
    return int(duration[:-1]) * {"s": 1, "m": 60, "h": 3600}[duration[-1]]


def _quicker(expr: str) -> str:
    """Shorten an expression's windows. The shortest window still contains four scrapes."""
    return re.sub(r"\[(\d+[smh])\]", lambda found: f"[{max(4, _seconds(found[1]) // 30)}s]", expr)


def _lines(rehearsed: bool) -> Iterator[str]:
    yield "# Generated by `make dashboards` from grafana/rules.py.\n"
    yield f"groups:\n  - name: holdfast.recorded\n    interval: {'1s' if rehearsed else '15s'}\n    rules:\n"
    paced = _quicker if rehearsed else str
    for one in RECORDED:
        yield f"      - record: {one.name}\n        expr: {json.dumps(paced(one.expr))}\n"
    yield "  - name: holdfast\n    rules:\n"
    for alert in ALERTS:
        lasts = f"{rehearsed_duration_s(alert)}s" if rehearsed else alert.lasts
        yield f"      - alert: {alert.name}\n        expr: {json.dumps(paced(alert.expr))}\n        for: {lasts}\n"
        yield f"        labels:\n          severity: {alert.severity}\n        annotations:\n"
        yield f"          summary: {json.dumps(alert.summary, ensure_ascii=False)}\n"
        yield f"          description: {json.dumps(alert.says, ensure_ascii=False)}\n"
        yield f"          dashboard_url: {alert.dashboard_url}\n"
        yield f"          runbook_url: {alert.runbook_url}\n"
