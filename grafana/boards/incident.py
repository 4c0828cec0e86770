"""Incident dashboard: one incident from its first symptom to its end."""

from grafana.boards.common import STATES, history
from grafana.model import Dashboard, Panel, Row, Variable

ID = "${incident:singlequote}"
SPAN = f"""(SELECT opened_at, coalesce(closed_at, now()) AS until, split_part(subject, ':', 2) AS subject
    FROM holdfast.incidents WHERE incident = {ID})"""
CHOSEN = Variable(
    name="incident", source="postgres", many=False,
    asks="SELECT incident FROM holdfast.incidents ORDER BY opened_at DESC LIMIT 200",
)  # fmt: skip
FIRST = f"""(SELECT coalesce(min(at), min(span.opened_at)) FROM {SPAN} AS span LEFT JOIN holdfast.fleet_events
    ON worker = span.subject AND at BETWEEN span.opened_at - interval '30 seconds' AND span.opened_at
    AND kind IN ('canary_failed', 'request_failed', 'worker_silent', 'worker_slow', 'device_faulted', 'engine_faulted',
    'worker_left'))"""
MARKS = f"""SELECT at AS time, kind AS text, coalesce(worker, '') AS tags FROM holdfast.fleet_events
    WHERE incident = {ID} AND $__timeFilter(at) ORDER BY at"""


BOARD = Dashboard("holdfast-incident", "Incident", "One incident, from its first symptom to its end",
    variables=[CHOSEN], events=" ".join(MARKS.split()), rows=[
    Row("Incident", [
        Panel("The incident", "Subject, first symptom and outcome", [
            history(f"""SELECT incident, subject, symptom, opened_at, closed_at, outcome FROM holdfast.incidents
                WHERE incident = {ID}"""),
        ], kind="table", width=24, height=4),
        Panel("Time to", "Time from the first symptom to: out of service, replaced by a spare, closed", [
            history(f"""SELECT extract(epoch FROM min(at) FILTER (WHERE kind = 'health_changed'
                AND (body->>'weight')::float = 0) - {FIRST}) AS out_of_service,
                extract(epoch FROM min(at) FILTER (WHERE kind = 'spare_activated') - {FIRST}) AS spare,
                extract(epoch FROM max(at) FILTER (WHERE kind = 'incident_closed') - {FIRST}) AS closed
                FROM holdfast.fleet_events WHERE incident = {ID}"""),
        ], kind="stat", unit="s", width=8),
        Panel("Health", "Decided states of the worker, from 0 (healthy) to 4 (dead)", [
            history(f"""SELECT at AS time, worker AS metric, CASE body->>'after' WHEN 'HEALTHY' THEN 0
                WHEN 'SUSPICIOUS' THEN 1 WHEN 'UNHEALTHY' THEN 2 WHEN 'DRAINING' THEN 3 ELSE 4 END AS value
                FROM holdfast.fleet_events WHERE kind = 'health_changed' AND incident = {ID}
                ORDER BY at""", series=True),
        ], kind="state-timeline", mappings=STATES, width=16),
        Panel("Decisions", "Decisions under this incident, with reasons", [
            history(f"""SELECT at, kind, worker, body->>'before' AS before, body->>'after' AS after,
                body->>'reason' AS reason FROM holdfast.fleet_events WHERE incident = {ID} ORDER BY seq LIMIT 500"""),
        ], kind="table", width=24, height=10),
    ]),
    Row("User impact", [
        Panel("Migrated streams", "By cause and method, with the gap that clients saw", [
            history(f"""SELECT cause, method, count(*) AS streams,
                percentile_cont(0.5) WITHIN GROUP (ORDER BY gap_ms) AS p50_ms, max(gap_ms) AS most_ms
                FROM holdfast.migrations, {SPAN} AS span WHERE source = span.subject
                AND at BETWEEN span.opened_at - interval '5 seconds' AND span.until GROUP BY cause, method"""),
        ], kind="table", width=12),
        Panel("Exposed requests", "Tokens of this worker that reached clients, and the action taken", [
            history(f"""SELECT at, request, model, first, last, finished, action FROM holdfast.exposures,
                {SPAN} AS span WHERE worker = span.subject
                AND at BETWEEN span.opened_at - interval '5 seconds' AND span.until + interval '1 minute'
                ORDER BY at LIMIT 200"""),
        ], kind="table", width=12),
    ]),
])  # fmt: skip
