"""Control plane dashboard: leadership, deciders, journal and broker."""

from grafana.boards.common import rate
from grafana.model import GREEN, RED, YELLOW, Dashboard, Panel, Query, Row

BOARD = Dashboard("holdfast-control-plane", "Control plane",
    "Leadership, decisions, the journal, the state store and connections", rows=[
    Row("Leadership and decisions", [
        Panel("Leaders", "Controllers that hold the lease; must be one",
            [Query("sum(holdfast_leader)", "leaders", instant=True)],
            kind="stat", width=4, height=5, steps=((None, RED), (1, GREEN), (2, RED))),
        Panel("Takeovers", "Lease takeovers in the last hour",
            [Query("round(sum(increase(holdfast_lease_takeovers_total[1h])))", "times", instant=True)],
            kind="stat", width=4, height=5, steps=((None, GREEN), (3, YELLOW))),
        Panel("Observer blind", "1 while over half of the fleet is silent, so no worker is declared silent",
            [Query("max(holdfast_observer_blind)", "blind", instant=True)],
            kind="stat", width=4, height=5, steps=((None, GREEN), (1, RED))),
        Panel("Decisions", "Decisions per second", [rate("holdfast_decisions_total", legend="decisions")], width=6, height=5),
        Panel("Decider run time", "Time of one run of the deciders", [
            Query("sum(rate(holdfast_settle_seconds_total[$__rate_interval]))"
                " / sum(rate(holdfast_settles_total[$__rate_interval]))", "per run"),
        ], unit="s", width=6, height=5),
    ]),
    Row("Journal", [
        Panel("State store lag", "Events on the journal that the state store does not contain yet",
            [Query("max(holdfast_projector_lag)", "state store")]),
        Panel("State store age", "Age of the state store's data, as the planner sees it",
            [Query("max(holdfast_planner_projection_age_seconds)", "behind")], unit="s"),
        Panel("Appends", "Appends of decisions: attempts, lost to another controller, unknown outcome", [
            rate("holdfast_appends_total", legend="attempts"),
            rate("holdfast_appends_fenced_total", legend="fenced"),
            rate("holdfast_appends_unknown_total", legend="unknown"),
        ]),
        Panel("Reachable from", "Processes that can write to the journal, and those that cannot", [
            Query("sum(holdfast_journal_reachable)", "can"),
            Query("count(holdfast_journal_reachable) - sum(holdfast_journal_reachable)", "cannot"),
        ]),
        Panel("Size", "Size on the broker's disk, its limit, and the free space there", [
            Query("max(holdfast_journal_bytes)", "size"),
            Query("max(holdfast_journal_max_bytes)", "limit"),
            Query("min(holdfast_journal_free_bytes)", "free disk space"),
        ], unit="bytes"),
        Panel("Full in", "At the last day's growth; empty if unknown, or if old events are dropped before",
            [Query("min(holdfast_journal_full_in_seconds)", "full in", instant=True)],
            kind="stat", unit="s", width=4, steps=((None, RED), (86_400, YELLOW), (604_800, GREEN))),
        Panel("Certificate expires in", "The broker's certificate; empty if the broker presents none",
            [Query("min(holdfast_broker_certificate_ends_timestamp_seconds) - time()", "expires in", instant=True)],
            kind="stat", unit="s", width=4, steps=((None, RED), (604_800, YELLOW), (1_209_600, GREEN))),
        Panel("Spooled facts", "Facts that the journal has not acknowledged yet, by process",
            [Query("max by (role, process) (holdfast_spool_depth)", "{{role}} {{process}}")]),
        Panel("Facts retried and dropped", "Per second, by all processes", [
            rate("holdfast_facts_retried_total", legend="retried"),
            rate("holdfast_facts_dropped_total", legend="dropped"),
        ]),
        Panel("Kinds of another release", "During an upgrade: withheld facts, skipped events of unknown kinds", [
            rate("holdfast_facts_withheld_total", legend="withheld"),
            rate("holdfast_journal_unknown_total", legend="unknown"),
        ]),
        Panel("Skipped messages", "Messages on the journal that are not events",
            [rate("holdfast_journal_skipped_total", by="role", legend="{{role}}")]),
    ]),
    Row("Webhooks", [
        Panel("Deliveries", "Delivery attempts per second, by outcome",
            [rate("holdfast_webhook_deliveries_total", by="webhook, outcome", legend="{{webhook}} {{outcome}}")]),
        Panel("Pending events", "Events that wait for each webhook's receiver",
            [Query("max by (webhook) (holdfast_webhook_pending)", "{{webhook}}")]),
        Panel("Delivery lag", "Age of the next event to deliver; 0 if all are delivered",
            [Query("max by (webhook) (holdfast_webhook_lag_seconds)", "{{webhook}}")], unit="s"),
        Panel("Failures in a row", "Failed attempts since the last success; 410: the receiver unsubscribed", [
            Query("max by (webhook) (holdfast_webhook_failures_in_a_row)", "{{webhook}}"),
            Query("410 * max by (webhook) (holdfast_webhook_stopped)", "{{webhook}} stopped"),
        ]),
        Panel("Since the last delivery", "Time since a webhook accepted an event; empty before the first one",
            [Query("time() - max by (webhook) (holdfast_webhook_last_success_timestamp_seconds > 0)", "{{webhook}}")],
            unit="s"),
    ]),
    Row("Observation", [
        Panel("Workers", "Registered workers, and those with a fresh heartbeat", [
            Query("max(holdfast_workers_registered)", "registered"),
            Query("max(holdfast_workers_reporting)", "reporting"),
            Query("max(holdfast_workers_awaited)", "awaited"),
            Query("max(holdfast_workers_lingering)", "dead but running"),
        ]),
        Panel("Canary delay", "Delay of the last probe after its scheduled time",
            [Query("max(holdfast_canary_lateness_seconds)", "late")], unit="s"),
        Panel("Clock skew", "How far workers' clocks are ahead of the controller's; informational only",
            [Query("max by (worker_id) (holdfast_clock_skew_seconds)", "{{worker_id}}")], unit="s", least=None),
        Panel("Refused at the broker", "Attempts that the embedded broker refused for lack of permission",
            [rate("holdfast_intrusions_refused_total", legend="refused")]),
        Panel("Names taken", "Worker starts refused in the last hour, because a live worker has the name",
            [Query("max(increase(holdfast_worker_names_taken_total[1h]))", "refused")]),
        Panel("Projector", "Events per second, and restarts", [
            rate("holdfast_projector_events_total", legend="events"),
            rate("holdfast_projector_restarts_total", legend="restarts"),
        ]),
        Panel("Planners", "Proposals by reason, and those that lost to another planner", [
            rate("holdfast_planner_proposals_total", by="why", legend="{{why}}"),
            rate("holdfast_planner_fenced_total", legend="fenced"),
        ]),
    ]),
])  # fmt: skip
