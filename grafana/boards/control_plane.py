"""Control plane: does what decides keep up, and can it hear and write?"""

from grafana.boards.common import rate
from grafana.model import GREEN, RED, YELLOW, Dashboard, Panel, Query, Row

BOARD = Dashboard(
    uid="holdfast-control-plane",
    title="Control plane",
    says="Does what decides keep up, and can it hear and write?",
    rows=[
        Row(
            title="Who decides",
            panels=[
                Panel(
                    title="Leaders", says="Controllers that hold the lease: one",
                    asks=[Query(ask="sum(holdfast_leader)", instant=True, legend="leaders")],
                    kind="stat", width=4, height=5, steps=((None, RED), (1, GREEN), (2, RED)),
                ),
                Panel(
                    title="Takeovers", says="Times that a controller took the lease over, in the last hour",
                    asks=[Query(ask="round(sum(increase(holdfast_lease_takeovers_total[1h])))", instant=True, legend="times")],
                    kind="stat", width=4, height=5, steps=((None, GREEN), (3, YELLOW)),
                ),
                Panel(
                    title="Unheard", says="1 while more than half of the fleet is unheard and nobody is accused",
                    asks=[Query(ask="max(holdfast_observer_blind)", instant=True, legend="blind")],
                    kind="stat", width=4, height=5, steps=((None, GREEN), (1, RED)),
                ),
                Panel(
                    title="Decisions", says="Decisions a second",
                    asks=[rate("holdfast_decisions_total", legend="decisions")], width=6, height=5,
                ),
                Panel(
                    title="A look at the fleet takes", says="Time that the deciders take for one look",
                    asks=[Query(
                        ask="sum(rate(holdfast_settle_seconds_total[$__rate_interval]))"
                        " / sum(rate(holdfast_settles_total[$__rate_interval]))",
                        legend="each",
                    )],
                    unit="s", width=6, height=5,
                ),
            ],
        ),
        Row(
            title="The journal",
            panels=[
                Panel(
                    title="Events behind", says="Events on the journal that the state store does not show yet",
                    asks=[Query(ask="max(holdfast_projector_lag)", legend="state store")],
                ),
                Panel(
                    title="How long the state store was behind", says="As the planner sees it",
                    asks=[Query(ask="max(holdfast_planner_projection_age_seconds)", legend="behind")], unit="s",
                ),
                Panel(
                    title="Appends", says="Appends of decisions: tried, refused because another had decided, of unknown outcome",
                    asks=[
                        rate("holdfast_appends_total", legend="tried"),
                        rate("holdfast_appends_fenced_total", legend="fenced"),
                        rate("holdfast_appends_unknown_total", legend="unknown"),
                    ],
                ),
                Panel(
                    title="Can be written", says="Processes that can write to the journal, and those that cannot",
                    asks=[
                        Query(ask="sum(holdfast_journal_reachable)", legend="can"),
                        Query(ask="count(holdfast_journal_reachable) - sum(holdfast_journal_reachable)", legend="cannot"),
                    ],
                ),
                Panel(
                    title="What it takes", says="Bytes on the broker's disk, the most that it may take, and what is free there",
                    asks=[
                        Query(ask="max(holdfast_journal_bytes)", legend="taken"),
                        Query(ask="max(holdfast_journal_max_bytes)", legend="bound"),
                        Query(ask="min(holdfast_journal_free_bytes)", legend="free on the disk"),
                    ],
                    unit="bytes",
                ),
                Panel(
                    title="Full in", says="At the last day's growth. Nothing where its oldest events go before, or nobody knows",
                    asks=[Query(ask="min(holdfast_journal_full_in_seconds)", instant=True, legend="full in")],
                    kind="stat", unit="s", width=4, steps=((None, RED), (86_400, YELLOW), (604_800, GREEN)),
                ),
                Panel(
                    title="Certificate ends in", says="The broker's. Nothing where the broker shows none",
                    asks=[Query(
                        ask="min(holdfast_broker_certificate_ends_timestamp_seconds) - time()", instant=True, legend="ends in",
                    )],
                    kind="stat", unit="s", width=4, steps=((None, RED), (604_800, YELLOW), (1_209_600, GREEN)),
                ),
                Panel(
                    title="Facts unsaid", says="Facts that the journal has not taken yet, by process",
                    asks=[Query(ask="max by (role, process) (holdfast_spool_depth)", legend="{{role}} {{process}}")],
                ),
                Panel(
                    title="Facts said again, and dropped", says="By all processes, in a second",
                    asks=[
                        rate("holdfast_facts_retried_total", legend="said again"),
                        rate("holdfast_facts_dropped_total", legend="dropped"),
                    ],
                ),
                Panel(
                    title="Kinds of another release", says="In an upgrade: facts withheld, events skipped as unknown",
                    asks=[
                        rate("holdfast_facts_withheld_total", legend="withheld"),
                        rate("holdfast_journal_unknown_total", legend="unknown"),
                    ],
                ),
                Panel(
                    title="What is no event", says="Messages on the journal that are none of ours, stepped over",
                    asks=[rate("holdfast_journal_skipped_total", by="role", legend="{{role}}")],
                ),
            ],
        ),
        Row(
            title="Webhooks",
            panels=[
                Panel(
                    title="Deliveries", says="Tries by what came of them, in a second",
                    asks=[rate("holdfast_webhook_deliveries_total", by="webhook, outcome", legend="{{webhook}} {{outcome}}")],
                ),
                Panel(
                    title="Events that wait", says="For each webhook's receiver",
                    asks=[Query(ask="max by (webhook) (holdfast_webhook_pending)", legend="{{webhook}}")],
                ),
                Panel(
                    title="How late people hear of it", says="Age of the event that a webhook is at; 0: it has had all",
                    asks=[Query(ask="max by (webhook) (holdfast_webhook_lag_seconds)", legend="{{webhook}}")], unit="s",
                ),
                Panel(
                    title="Failures in a row", says="Tries since the last that did not fail; 410: it wants nothing more",
                    asks=[
                        Query(ask="max by (webhook) (holdfast_webhook_failures_in_a_row)", legend="{{webhook}}"),
                        Query(ask="410 * max by (webhook) (holdfast_webhook_stopped)", legend="{{webhook}} stopped"),
                    ],
                ),
                Panel(
                    title="Since the last delivery", says="Seconds since a webhook took an event; none: it has not yet",
                    asks=[Query(
                        ask="time() - max by (webhook) (holdfast_webhook_last_success_timestamp_seconds > 0)",
                        legend="{{webhook}}",
                    )],
                    unit="s",
                ),
            ],
        ),
        Row(
            title="Who is heard",
            panels=[
                Panel(
                    title="Workers", says="Registered, and those whose heartbeat is fresh",
                    asks=[
                        Query(ask="max(holdfast_workers_registered)", legend="registered"),
                        Query(ask="max(holdfast_workers_reporting)", legend="reporting"),
                        Query(ask="max(holdfast_workers_awaited)", legend="awaited"),
                        Query(ask="max(holdfast_workers_lingering)", legend="dead, and still there"),
                    ],
                ),
                Panel(
                    title="Canaries late", says="How long after its time the last probe began",
                    asks=[Query(ask="max(holdfast_canary_lateness_seconds)", legend="late")], unit="s",
                ),
                Panel(
                    title="Clocks", says="How far workers' clocks are ahead of the controller's; decides nothing",
                    asks=[Query(ask="max by (worker_id) (holdfast_clock_skew_seconds)", legend="{{worker_id}}")],
                    unit="s", least=None,
                ),
                Panel(
                    title="Refused at the broker", says="What somebody tried at the embedded broker and may not",
                    asks=[rate("holdfast_intrusions_refused_total", legend="refused")],
                ),
                Panel(
                    title="Names taken", says="Workers not started in an hour, because a live one has the name",
                    asks=[Query(ask="max(increase(holdfast_worker_names_taken_total[1h]))", legend="refused")],
                ),
                Panel(
                    title="Projector", says="Events a second, and restarts",
                    asks=[
                        rate("holdfast_projector_events_total", legend="events"),
                        rate("holdfast_projector_restarts_total", legend="restarts"),
                    ],
                ),
                Panel(
                    title="Planners", says="Proposals by reason, and those that another planner was quicker with",
                    asks=[
                        rate("holdfast_planner_proposals_total", by="why", legend="{{why}}"),
                        rate("holdfast_planner_fenced_total", legend="fenced"),
                    ],
                ),
            ],
        ),
    ],
)  # fmt: skip
