"""Control plane dashboard: leadership, deciders, journal and broker."""

from grafana.boards.common import rate
from grafana.model import GREEN, RED, YELLOW, Dashboard, Panel, Query, Row

BOARD = Dashboard(
    uid="holdfast-control-plane",
    title="Control plane",
    says="Leadership, decisions, the journal, the state store and connections",
    rows=[
        Row(
            title="Leadership and decisions",
            panels=[
                Panel(
                    title="Leaders", says="Controllers that hold the lease; must be one",
                    asks=[Query(ask="sum(holdfast_leader)", instant=True, legend="leaders")],
                    kind="stat", width=4, height=5, steps=((None, RED), (1, GREEN), (2, RED)),
                ),
                Panel(
                    title="Takeovers", says="Lease takeovers in the last hour",
                    asks=[Query(ask="round(sum(increase(holdfast_lease_takeovers_total[1h])))", instant=True, legend="times")],
                    kind="stat", width=4, height=5, steps=((None, GREEN), (3, YELLOW)),
                ),
                Panel(
                    title="Observer blind", says="1 while over half of the fleet is silent, so no worker is declared silent",
                    asks=[Query(ask="max(holdfast_observer_blind)", instant=True, legend="blind")],
                    kind="stat", width=4, height=5, steps=((None, GREEN), (1, RED)),
                ),
                Panel(
                    title="Decisions", says="Decisions per second",
                    asks=[rate("holdfast_decisions_total", legend="decisions")], width=6, height=5,
                ),
                Panel(
                    title="Decider run time", says="Time of one run of the deciders",
                    asks=[Query(
                        ask="sum(rate(holdfast_settle_seconds_total[$__rate_interval]))"
                        " / sum(rate(holdfast_settles_total[$__rate_interval]))",
                        legend="per run",
                    )],
                    unit="s", width=6, height=5,
                ),
            ],
        ),
        Row(
            title="Journal",
            panels=[
                Panel(
                    title="State store lag", says="Events on the journal that the state store does not contain yet",
                    asks=[Query(ask="max(holdfast_projector_lag)", legend="state store")],
                ),
                Panel(
                    title="State store age", says="Age of the state store's data, as the planner sees it",
                    asks=[Query(ask="max(holdfast_planner_projection_age_seconds)", legend="behind")], unit="s",
                ),
                Panel(
                    title="Appends", says="Appends of decisions: attempts, lost to another controller, unknown outcome",
                    asks=[
                        rate("holdfast_appends_total", legend="attempts"),
                        rate("holdfast_appends_fenced_total", legend="fenced"),
                        rate("holdfast_appends_unknown_total", legend="unknown"),
                    ],
                ),
                Panel(
                    title="Reachable from", says="Processes that can write to the journal, and those that cannot",
                    asks=[
                        Query(ask="sum(holdfast_journal_reachable)", legend="can"),
                        Query(ask="count(holdfast_journal_reachable) - sum(holdfast_journal_reachable)", legend="cannot"),
                    ],
                ),
                Panel(
                    title="Size", says="Size on the broker's disk, its limit, and the free space there",
                    asks=[
                        Query(ask="max(holdfast_journal_bytes)", legend="size"),
                        Query(ask="max(holdfast_journal_max_bytes)", legend="limit"),
                        Query(ask="min(holdfast_journal_free_bytes)", legend="free disk space"),
                    ],
                    unit="bytes",
                ),
                Panel(
                    title="Full in", says="At the last day's growth; empty if unknown, or if old events are dropped before",
                    asks=[Query(ask="min(holdfast_journal_full_in_seconds)", instant=True, legend="full in")],
                    kind="stat", unit="s", width=4, steps=((None, RED), (86_400, YELLOW), (604_800, GREEN)),
                ),
                Panel(
                    title="Certificate expires in", says="The broker's certificate; empty if the broker presents none",
                    asks=[Query(
                        ask="min(holdfast_broker_certificate_ends_timestamp_seconds) - time()", instant=True, legend="expires in",
                    )],
                    kind="stat", unit="s", width=4, steps=((None, RED), (604_800, YELLOW), (1_209_600, GREEN)),
                ),
                Panel(
                    title="Spooled facts", says="Facts that the journal has not acknowledged yet, by process",
                    asks=[Query(ask="max by (role, process) (holdfast_spool_depth)", legend="{{role}} {{process}}")],
                ),
                Panel(
                    title="Facts retried and dropped", says="Per second, by all processes",
                    asks=[
                        rate("holdfast_facts_retried_total", legend="retried"),
                        rate("holdfast_facts_dropped_total", legend="dropped"),
                    ],
                ),
                Panel(
                    title="Kinds of another release", says="During an upgrade: withheld facts, skipped events of unknown kinds",
                    asks=[
                        rate("holdfast_facts_withheld_total", legend="withheld"),
                        rate("holdfast_journal_unknown_total", legend="unknown"),
                    ],
                ),
                Panel(
                    title="Skipped messages", says="Messages on the journal that are not events",
                    asks=[rate("holdfast_journal_skipped_total", by="role", legend="{{role}}")],
                ),
            ],
        ),
        Row(
            title="Webhooks",
            panels=[
                Panel(
                    title="Deliveries", says="Delivery attempts per second, by outcome",
                    asks=[rate("holdfast_webhook_deliveries_total", by="webhook, outcome", legend="{{webhook}} {{outcome}}")],
                ),
                Panel(
                    title="Pending events", says="Events that wait for each webhook's receiver",
                    asks=[Query(ask="max by (webhook) (holdfast_webhook_pending)", legend="{{webhook}}")],
                ),
                Panel(
                    title="Delivery lag", says="Age of the next event to deliver; 0 if all are delivered",
                    asks=[Query(ask="max by (webhook) (holdfast_webhook_lag_seconds)", legend="{{webhook}}")], unit="s",
                ),
                Panel(
                    title="Failures in a row", says="Failed attempts since the last success; 410: the receiver unsubscribed",
                    asks=[
                        Query(ask="max by (webhook) (holdfast_webhook_failures_in_a_row)", legend="{{webhook}}"),
                        Query(ask="410 * max by (webhook) (holdfast_webhook_stopped)", legend="{{webhook}} stopped"),
                    ],
                ),
                Panel(
                    title="Since the last delivery", says="Time since a webhook accepted an event; empty before the first one",
                    asks=[Query(
                        ask="time() - max by (webhook) (holdfast_webhook_last_success_timestamp_seconds > 0)",
                        legend="{{webhook}}",
                    )],
                    unit="s",
                ),
            ],
        ),
        Row(
            title="Observation",
            panels=[
                Panel(
                    title="Workers", says="Registered workers, and those with a fresh heartbeat",
                    asks=[
                        Query(ask="max(holdfast_workers_registered)", legend="registered"),
                        Query(ask="max(holdfast_workers_reporting)", legend="reporting"),
                        Query(ask="max(holdfast_workers_awaited)", legend="awaited"),
                        Query(ask="max(holdfast_workers_lingering)", legend="dead but running"),
                    ],
                ),
                Panel(
                    title="Canary delay", says="Delay of the last probe after its scheduled time",
                    asks=[Query(ask="max(holdfast_canary_lateness_seconds)", legend="late")], unit="s",
                ),
                Panel(
                    title="Clock skew", says="How far workers' clocks are ahead of the controller's; informational only",
                    asks=[Query(ask="max by (worker_id) (holdfast_clock_skew_seconds)", legend="{{worker_id}}")],
                    unit="s", least=None,
                ),
                Panel(
                    title="Refused at the broker", says="Attempts that the embedded broker refused for lack of permission",
                    asks=[rate("holdfast_intrusions_refused_total", legend="refused")],
                ),
                Panel(
                    title="Names taken", says="Worker starts refused in the last hour, because a live worker has the name",
                    asks=[Query(ask="max(increase(holdfast_worker_names_taken_total[1h]))", legend="refused")],
                ),
                Panel(
                    title="Projector", says="Events per second, and restarts",
                    asks=[
                        rate("holdfast_projector_events_total", legend="events"),
                        rate("holdfast_projector_restarts_total", legend="restarts"),
                    ],
                ),
                Panel(
                    title="Planners", says="Proposals by reason, and those that lost to another planner",
                    asks=[
                        rate("holdfast_planner_proposals_total", by="why", legend="{{why}}"),
                        rate("holdfast_planner_fenced_total", legend="fenced"),
                    ],
                ),
            ],
        ),
    ],
)  # fmt: skip
