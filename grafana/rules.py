"""Alerts and recording rules for Prometheus: what wakes somebody up, how badly, and where he looks first.

Two kinds of thresholds. What must never be (a wrong answer, nobody who decides, a lost stream) fires at once, or after as long as
a restart takes. What may be for a while (late first tokens, failed requests) fires by how fast the error budget is used up, over
a long and a short window together: the long one says that it matters, the short one that it is still so.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from grafana.boards.common import OURS

OBJECTIVE = 0.999  # of the requests, that do not fail by a fault of ours
FIRST_TOKEN_LE = "2.2"  # seconds: a bucket of the histogram
BURNS = (("1h", "5m", 14.4, "critical"), ("6h", "30m", 6.0, "warning"))  # windows, rate, severity
WRONG = 'reason=~"token_mismatch|logit_drift|non_finite"'
REQUESTS, FIRST = "dynamo_frontend_requests_total", "dynamo_frontend_time_to_first_token_seconds"
DAY_S, DISK_BYTES_MIN = 86_400, 1 << 30
STATUS = "max by (worker_id) (dynamo_worker_status)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A figure that alerts and dashboards share."""

    name: str
    expr: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """What fires while `expr` has been true for `lasts`."""

    name: str
    expr: str
    severity: str
    summary: str
    says: str  # with {{ $value }} and {{ $labels.… }}
    lasts: str = "0s"
    board: str = "holdfast-fleet"
    page: str = ""  # where it has none of its own

    @property
    def runbook(self) -> str:
        """The name of its page in docs/runbooks: one for both rates at which a budget burns."""
        return self.page or self.name.removesuffix("Fast").removesuffix("Slow")

    @property
    def runbook_url(self) -> str:
        """Where that is, below the project's own address."""
        return f"docs/runbooks/{self.runbook}.md"

    @property
    def dashboard_url(self) -> str:
        """Where its dashboard is, below Grafana's own address."""
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
    *(
        Recorded(name=f"holdfast:request_errors:ratio_rate{window}", expr=_errors(window))
        for window in WINDOWS
    ),
    *(
        Recorded(name=f"holdfast:first_tokens_late:ratio_rate{window}", expr=_late(window))
        for window in WINDOWS
    ),
)


def _burning(name: str, figure: str, what: str) -> Iterator[Alert]:
    for long, short, rate, severity in BURNS:
        bound = f"{rate * (1 - OBJECTIVE):g}"
        both = (
            f"holdfast:{figure}:ratio_rate{long} > {bound} and holdfast:{figure}:ratio_rate{short} > {bound}"
        )
        yield Alert(
            name=f"{name}{'Fast' if severity == 'critical' else 'Slow'}", expr=both, severity=severity, board="holdfast-slo",
            summary=f"{what} of {{{{ $labels.model }}}} use up their error budget {rate:g} times as fast as they may",
            says=f"{{{{ $value | humanizePercentage }}}} in the last {long}, and in the last {short} as well.",
        )  # fmt: skip


ALERTS = (
    Alert(
        name="HoldfastSilentCorruption", severity="critical", board="holdfast-corruption",
        expr=f"sum by (worker_id) (increase(dynamo_canary_failures_total{{{WRONG}}}[5m])) > 0",
        summary="{{ $labels.worker_id }} has answered a canary wrongly",
        says="{{ $value | humanize }} wrong answers within 5 minutes. It is taken out of service by itself; which answers of "
        "clients it had touched is on the dashboard.",
    ),
    Alert(
        name="HoldfastWorkersFailing", severity="critical", lasts="1m",
        expr=f"count({STATUS} == 2 or {STATUS} == 4) / count({STATUS} != 3) > 0.1",
        summary="More than a tenth of the workers are out of service by a fault",
        says="{{ $value | humanizePercentage }} of the workers that are not being drained are unhealthy or dead.",
    ),
    Alert(
        name="HoldfastCapacityDegraded", severity="warning", lasts="2m",
        expr="max by (model) (holdfast_degradation_level) > 0 < 3",
        summary="{{ $labels.model }} is at degradation level {{ $value }}",
        says="Its workers carry less than its objective: batches are smaller, from level 2 on the lowest tier is shed.",
    ),
    Alert(
        name="HoldfastCapacityCritical", severity="critical", lasts="1m",
        expr="max by (model) (holdfast_degradation_level) >= 3",
        summary="{{ $labels.model }} is at degradation level {{ $value }}",
        says="Less than half of its throughput objective is left: latencies are relaxed, at level 4 nobody new is let in.",
    ),
    Alert(
        name="HoldfastNoRoutableWorker", severity="critical", lasts="30s",
        expr="max by (model) (holdfast_model_routable_weight) == 0",
        summary="Nobody can serve {{ $labels.model }}",
        says="No worker of it is in service: each request is refused with no_routable_worker.",
    ),
    Alert(
        name="HoldfastSuspectServing", severity="critical", board="holdfast-corruption",
        expr="max by (worker_id) (holdfast_worker_suspect) > 0",
        summary="{{ $labels.worker_id }} serves although canaries convict it",
        says="No other worker of its model serves. Its answers may be wrong: they carry X-Holdfast-Suspect.",
    ),
    Alert(
        name="HoldfastPanic", severity="warning", lasts="1m", board="holdfast-requests",
        expr="max by (model) (holdfast_panic) > 0",
        summary="Frontends ignore their own breakers for {{ $labels.model }}",
        says="Less than half of its weight would be routable: most of its workers fail requests.",
    ),
    Alert(
        name="HoldfastExposureUnknown", severity="warning", board="holdfast-corruption",
        expr="sum by (worker_id) (increase(holdfast_exposure_unknown_total[10m])) > 0",
        summary="Nobody can say all whom {{ $labels.worker_id }} has answered wrongly",
        says="It was convicted, and of {{ $value | humanize }} spans frontends do not know which requests it served.",
    ),
    Alert(
        name="HoldfastTokensUnlikely", severity="warning", board="holdfast-corruption",
        expr="sum by (worker_id) (increase(holdfast_tokens_unlikely_total[30m])) > 0",
        summary="{{ $labels.worker_id }} draws unlikely tokens: its sampler may be broken",
        says="It serves on: no other worker could take its place, or users' tokens alone are no proof.",
    ),
    Alert(
        name="HoldfastGoldenDisputed", severity="warning", board="holdfast-corruption",
        expr="sum(increase(holdfast_golden_disputes_total[10m])) > 0",
        summary="Workers do not agree on a canary's right answer",
        says="Nobody is taken out of service for it: somebody has to say which of two answers is right.",
    ),
    Alert(
        name="HoldfastStreamsLost", severity="critical", board="holdfast-requests",
        expr='sum by (model) (increase(dynamo_frontend_model_migration_duration_seconds_count{outcome="failure"}[5m])) > 0',
        summary="Streams of {{ $labels.model }} have been lost",
        says="{{ $value | humanize }} requests within 5 minutes had lost their worker and could go on nowhere.",
    ),
    Alert(
        name="HoldfastRefusals", severity="warning", lasts="5m", board="holdfast-requests",
        expr=f"sum by (model) (rate(dynamo_frontend_model_rejection_total[5m])) / sum by (model) (rate({REQUESTS}[5m])) > 0.05",
        summary="{{ $labels.model }} turns requests away for want of room",
        says="{{ $value | humanizePercentage }} of what has ended in 5 minutes was refused: more comes than its workers take.",
    ),
    Alert(
        name="HoldfastNoLeader", severity="critical", lasts="30s", board="holdfast-control-plane",
        expr="sum(holdfast_leader) == 0 or absent(holdfast_leader)",
        summary="No controller decides",
        says="Nobody holds the lease: what fails now is moved by frontends alone, and nobody is taken out of service.",
    ),
    Alert(
        name="HoldfastObserverBlind", severity="critical", lasts="1m", board="holdfast-control-plane",
        expr="max(holdfast_observer_blind) > 0",
        summary="The controller hears less than half of the fleet",
        says="More likely it is deaf than they are dead: nobody is accused. Look at the broker, and at the controller's network.",
    ),
    Alert(
        name="HoldfastJournalUnreachable", severity="critical", lasts="30s", board="holdfast-control-plane",
        expr="1 - avg(holdfast_journal_reachable) > 0.5",
        summary="Most processes cannot write to the journal",
        says="{{ $value | humanizePercentage }} of them cannot reach NATS, or do not trust its stream. What they have to say "
        "waits in their spools.",
    ),
    Alert(
        name="HoldfastSpoolGrowing", severity="warning", lasts="1m", board="holdfast-control-plane",
        expr="max by (role, process) (holdfast_spool_depth) > 100",
        summary="{{ $labels.process }} has more to say than the journal takes",
        says="{{ $value | humanize }} facts are in its spool.",
    ),
    Alert(
        name="HoldfastFactsDropped", severity="critical", board="holdfast-control-plane",
        expr="sum by (role, process) (increase(holdfast_facts_dropped_total[5m])) > 0",
        summary="{{ $labels.process }} has dropped facts",
        says="{{ $value | humanize }} facts within 5 minutes did not fit into its spool: the journal will not tell of them.",
    ),
    Alert(
        name="HoldfastJournalFull", severity="critical", lasts="1m", board="holdfast-control-plane",
        expr=f"min(holdfast_journal_full_in_seconds) < {DAY_S}",
        summary="The journal is about to be full",
        says="At the growth of the last day it takes nothing more in {{ $value | humanizeDuration }}.",
    ),
    Alert(
        name="HoldfastJournalFullSoon", severity="warning", lasts="10m", board="holdfast-control-plane",
        page="HoldfastJournalFull",
        expr=f"min(holdfast_journal_full_in_seconds) < {7 * DAY_S}",
        summary="The journal will be full within a week",
        says="At the growth of the last day it takes nothing more in {{ $value | humanizeDuration }}.",
    ),
    Alert(
        name="HoldfastJournalDiskLow", severity="critical", lasts="1m", board="holdfast-control-plane",
        page="HoldfastJournalFull",
        expr=f"min(holdfast_journal_free_bytes) < {DISK_BYTES_MIN}",
        summary="The broker's disk is nearly full",
        says="{{ $value | humanize1024 }}B are free where the journal lies, whoever has filled it.",
    ),
    Alert(
        name="HoldfastCertificateExpiring", severity="warning", lasts="1m", board="holdfast-control-plane",
        expr=f"clamp_min(min(holdfast_broker_certificate_ends_timestamp_seconds) - time(), 0) < {14 * DAY_S}",
        summary="The broker's certificate ends soon",
        says="It holds for {{ $value | humanizeDuration }} more: after that no process connects to NATS again.",
    ),
    Alert(
        name="HoldfastStateStoreStuck", severity="critical", lasts="1m", board="holdfast-control-plane",
        expr="max(holdfast_projector_lag) > 0 and on () (sum(rate(holdfast_projector_events_total[1m])) == 0)",
        summary="Nothing gets into the state store",
        says="{{ $value | humanize }} events wait: Postgres is away, or the projector is stuck.",
    ),
    Alert(
        name="HoldfastStateStoreBehind", severity="warning", lasts="2m", board="holdfast-control-plane",
        expr="max(holdfast_projector_lag) > 1000",
        summary="The state store is behind",
        says="It does not show {{ $value | humanize }} events yet. The planner holds still meanwhile.",
    ),
    Alert(
        name="HoldfastWorkersMissing", severity="warning", lasts="1m", board="holdfast-control-plane",
        expr="max(holdfast_workers_registered) - max(holdfast_workers_reporting) > 0",
        summary="Workers that have joined are not heard",
        says="{{ $value | humanize }} workers are registered, and send no heartbeat.",
    ),
    Alert(
        name="HoldfastBreakerFlapping", severity="warning", board="holdfast-worker",
        expr="max by (worker_id) (changes(dynamo_circuit_breaker_state[15m])) > 6",
        summary="{{ $labels.worker_id }} fails again and again",
        says="Its circuit breaker has moved {{ $value | humanize }} times in 15 minutes: it passes trials, and fails requests.",
    ),
    Alert(
        name="HoldfastPlaceEmpty", severity="warning", lasts="5m",
        expr="max by (model) (holdfast_places_empty) > 0",
        summary="A lost worker of {{ $labels.model }} has not been replaced",
        says="{{ $value | humanize }} places are empty: there are too few spares, or none that is well.",
    ),
    Alert(
        name="HoldfastWorkerNameTaken", severity="warning", board="holdfast-control-plane",
        expr="max(increase(holdfast_worker_names_taken_total[10m])) > 0",
        summary="A worker was not started: another live worker has its name",
        says="{{ $value | humanize }} starts in ten minutes were refused. The first worker of the name serves on.",
    ),
    Alert(
        name="HoldfastWorkersLingering", severity="warning", lasts="5m", board="holdfast-control-plane",
        expr="max(holdfast_workers_lingering) > 0",
        summary="Processes of dead workers are still there",
        says="{{ $value | humanize }} of them hold their GPU, and nobody has ended them.",
    ),
    Alert(
        name="HoldfastWebhooksFailing", severity="warning", lasts="1m", board="holdfast-control-plane",
        expr="max by (webhook) (holdfast_webhook_failures_in_a_row) >= 5 or max by (webhook) (holdfast_webhook_stopped) > 0"
        ' or sum by (webhook) (increase(holdfast_webhook_deliveries_total{outcome="dead_letter"}[10m])) > 0',
        summary="The webhook {{ $labels.webhook }} does not take what it is told",
        says="Its receiver fails or is away, has answered 410 Gone, or has refused events, which are among the dead letters.",
    ),
    Alert(
        name="HoldfastTargetDown", severity="warning", lasts="1m", board="holdfast-control-plane",
        expr='up{job="holdfast"} == 0',
        summary="{{ $labels.role }} {{ $labels.process }} cannot be measured",
        says="It has not answered Prometheus for a minute.",
    ),
    *_burning("HoldfastErrorBudgetBurn", "request_errors", "Failed requests"),
    *_burning("HoldfastFirstTokensLate", "first_tokens_late", f"First tokens later than {FIRST_TOKEN_LE} s"),
)  # fmt: skip


def text(*, rehearsed: bool = False) -> str:
    """Return the rules as Prometheus reads them. `rehearsed`: for a Prometheus that looks each second, with windows of a
    thirtieth, and a sixtieth of the patience."""
    return "".join(_lines(rehearsed))


def patience_s(alert: Alert) -> int:
    """Return for how long an alert's rehearsed rule has to hold before it fires."""
    seconds = _seconds(alert.lasts)
    return max(1, round(seconds / 60)) if seconds else 0


def _seconds(duration: str) -> int:
    return int(duration[:-1]) * {"s": 1, "m": 60, "h": 3600}[duration[-1]]


def _quicker(expr: str) -> str:
    """Shorten an expression's windows; four scrapes are in the shortest."""
    return re.sub(r"\[(\d+[smh])\]", lambda found: f"[{max(4, _seconds(found[1]) // 30)}s]", expr)


def _lines(rehearsed: bool) -> Iterator[str]:
    yield "# Made by `make dashboards` from grafana/rules.py.\n"
    yield f"groups:\n  - name: holdfast.recorded\n    interval: {'1s' if rehearsed else '15s'}\n    rules:\n"
    paced = _quicker if rehearsed else str
    for one in RECORDED:
        yield f"      - record: {one.name}\n        expr: {json.dumps(paced(one.expr))}\n"
    yield "  - name: holdfast\n    rules:\n"
    for alert in ALERTS:
        lasts = f"{patience_s(alert)}s" if rehearsed else alert.lasts
        yield f"      - alert: {alert.name}\n        expr: {json.dumps(paced(alert.expr))}\n        for: {lasts}\n"
        yield f"        labels:\n          severity: {alert.severity}\n        annotations:\n"
        yield f"          summary: {json.dumps(alert.summary, ensure_ascii=False)}\n"
        yield f"          description: {json.dumps(alert.says, ensure_ascii=False)}\n"
        yield f"          dashboard_url: {alert.dashboard_url}\n"
        yield f"          runbook_url: {alert.runbook_url}\n"
