"""The dashboards match their source, and every metric, label and table that they use exists."""

import json
import re
from collections.abc import Iterator

import promql_parser as promql
import pytest
from asked_metrics import KNOWN, OF_TARGETS, base, counted, nodes, parsed, selectors

from controller.read_model.rows import COLUMNS
from grafana.model import COLUMNS as GRID
from grafana.model import Dashboard
from grafana.write import BOARDS, FOLDER, text

VIEWS = {"fleet_now", "model_capacity"}
NOT_SHOWN = {  # metrics that are on no dashboard, with the reason
    "dynamo_degradation_level": "holdfast_degradation_level has it per model",
    "dynamo_worker_state": "dynamo_worker_status is the same as a number that a timeline can show",
    "dynamo_migration_total": "dynamo_migration_duration_seconds counts the same, from 0 on",
    "dynamo_frontend_model_migration_duration_seconds": "holdfast_resume_seconds is what clients saw",
    "dynamo_frontend_disconnected_clients": "dynamo_frontend_model_cancellation_total counts them by model",
    "dynamo_frontend_model_context_length": "a property of the model, not a measurement",
    "dynamo_frontend_model_kv_cache_block_size": "a property of the model, not a measurement",
    "dynamo_frontend_model_max_num_seqs": "a property of the model, not a measurement",
    "dynamo_frontend_model_migration_limit": "a setting",
    "dynamo_frontend_model_migration_max_seq_len_exceeded_total": "lost streams are on the Fleet dashboard",
    "dynamo_frontend_model_total_kv_blocks": "a property of the model, not a measurement",
    "dynamo_frontend_request_duration_seconds": "depends on the length of answers; token times are shown instead",
    "dynamo_frontend_tokenizer_latency_ms": "a part of the time to the first token",
    "dynamo_frontend_worker_last_input_sequence_tokens": "of one answer, for Dynamo's planner",
    "dynamo_frontend_worker_last_inter_token_latency_seconds": "of one answer, for Dynamo's planner",
    "dynamo_frontend_worker_last_time_to_first_token_seconds": "of one answer, for Dynamo's planner",
    "holdfast_facts_acknowledged_total": "holdfast_spool_depth shows what is not acknowledged",
    "holdfast_facts_observed_total": "holdfast_spool_depth shows what is not acknowledged",
    "holdfast_journal_position": "a position without a meaningful rate; the lag is shown",
    "holdfast_late_chunks": "for debugging Holdfast",
    "holdfast_planner_expected_work": "`holdfast plan` shows it with an explanation",
    "holdfast_planner_forecast_error": "`holdfast plan` shows it with an explanation",
    "holdfast_planner_held": "`holdfast plan` shows the reason",
    "holdfast_planner_hooks_total": "holdfast_planner_proposals_total, and scale_applied in the history",
    "holdfast_planner_position": "its age is shown",
    "holdfast_projector_batch_events": "for tuning the projector",
    "holdfast_projector_position": "its lag is shown",
    "holdfast_spool_bytes": "holdfast_spool_depth has it in facts",
    "holdfast_stored_response_bytes": "bounded by a setting; holdfast_stored_responses_dropped_total counts what exceeds it",
    "holdfast_stored_responses": "bounded by a setting",
    "holdfast_stored_responses_dropped_total": "old responses are dropped in normal operation",
    "holdfast_worker_kv_cached_blocks": "holdfast_router_kv_blocks shows what routers receive",
    "holdfast_worker_kv_events_total": "holdfast_router_kv_events_total shows what routers receive",
    "holdfast_worker_upstream_kv_events_total": "holdfast_router_kv_events_total shows what routers receive",
    "holdfast_worker_engine_gpu_cache_usage_perc": "holdfast_worker_kv_used_ratio",
    "holdfast_worker_engine_kv_active_blocks": "holdfast_worker_kv_used_ratio",
    "holdfast_worker_engine_kv_total_blocks": "holdfast_worker_kv_used_ratio",
    "holdfast_worker_engine_queued_num_decode_requests": "for tuning an engine",
    "holdfast_worker_engine_queued_num_prefill_requests": "for tuning an engine",
    "holdfast_worker_engine_queued_sum_decode_kv_tokens": "for tuning an engine",
    "holdfast_worker_engine_queued_sum_prefill_tokens": "for tuning an engine",
    "holdfast_worker_engine_queued_var_decode_kv_tokens": "for tuning an engine",
    "holdfast_worker_engine_queued_var_prefill_length": "for tuning an engine",
    "holdfast_worker_engine_request_active_slots": "for tuning an engine",
    "holdfast_worker_engine_request_total_slots": "for tuning an engine",
    "holdfast_worker_engine_scheduled_sum_decode_kv_tokens": "for tuning an engine",
    "holdfast_worker_engine_scheduled_sum_prefill_kv_tokens": "for tuning an engine",
    "holdfast_worker_engine_scheduled_sum_prefill_tokens": "for tuning an engine",
    "holdfast_worker_engine_scheduled_var_decode_kv_tokens": "for tuning an engine",
    "holdfast_worker_engine_scheduled_var_prefill_length": "for tuning an engine",
}


def queries(source: str) -> Iterator[tuple[str, str]]:
    """Yield the panels' queries of one source, each with its panel's name."""
    for board in BOARDS:
        for panel in board.panels():
            for query in panel.asks:
                if query.source == source:
                    yield f"{board.uid}: {panel.title}", query.ask


PROMQL = list(queries("prometheus"))


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_a_dashboard_file_matches_its_source(board: Dashboard) -> None:
    file = FOLDER / f"{board.uid}.json"
    assert file.read_text() == text(board), "`make dashboards` regenerates it"


def test_every_dashboard_file_has_a_source() -> None:
    assert {file.stem for file in FOLDER.glob("*.json")} == {board.uid for board in BOARDS}


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_every_panel_has_a_description_and_its_own_place(board: Dashboard) -> None:
    shown = json.loads(text(board))
    taken: set[tuple[int, int]] = set()
    for panel in shown["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken and max(x for x, _ in cells) < GRID, panel["title"]
        taken |= cells
        if panel["type"] != "row":
            assert len(panel["description"]) > 5, panel["title"]
            assert panel["datasource"]["uid"] in ("${datasource}", "${history}"), "data sources are variables"
    numbers = [panel["id"] for panel in shown["panels"]]
    assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize(("where", "ask"), PROMQL, ids=[where for where, _ in PROMQL])
def test_every_metric_and_label_exists(where: str, ask: str) -> None:
    found = selectors(ask)
    assert found or "vector(" in ask
    for selector in found:
        metric = base(selector.name)
        assert metric in KNOWN, f"{selector.name} is not in docs/reference/metrics.md"
        labels = {matcher.name for matcher in selector.matchers.matchers}
        assert labels <= KNOWN[metric][1] | OF_TARGETS, (
            f"{metric} has no {labels - KNOWN[metric][1] - OF_TARGETS}"
        )
        if KNOWN[metric][0] == "counter":
            assert selector.name in counted(ask), f"{metric} is a counter: use its rate"


@pytest.mark.parametrize(("where", "ask"), PROMQL, ids=[where for where, _ in PROMQL])
def test_every_grouping_label_exists(where: str, ask: str) -> None:
    labels = set().union(*(KNOWN[base(selector.name)][1] for selector in selectors(ask)), OF_TARGETS)
    assert grouping_labels(ask) <= labels, where


def grouping_labels(ask: str) -> set[str]:
    aggregates = [node for node in nodes(parsed(ask)) if isinstance(node, promql.AggregateExpr)]
    return {label for one in aggregates if one.modifier is not None for label in one.modifier.labels}


def test_legends_use_only_grouping_labels() -> None:
    for board in BOARDS:
        for query in (
            query for panel in board.panels() for query in panel.asks if query.source == "prometheus"
        ):
            assert {*re.findall(r"{{(\w+)}}", query.legend)} <= grouping_labels(query.ask), query


def test_every_metric_is_on_a_dashboard_or_has_a_reason_why_not() -> None:
    shown = {base(selector.name) for _, ask in PROMQL for selector in selectors(ask)}
    assert KNOWN.keys() - shown - NOT_SHOWN.keys() == set(), "missing on the dashboards"
    assert NOT_SHOWN.keys() & shown == set(), "shown after all"
    assert NOT_SHOWN.keys() - KNOWN.keys() == set(), "unknown metrics"


def test_every_table_exists() -> None:
    """`test_dashboard_queries.py` checks the columns on a real Postgres."""
    tables = {*COLUMNS, *VIEWS, "fleet_events"}
    for where, ask in queries("postgres"):
        named = re.findall(r"holdfast\.(\w+)", ask)
        assert named and set(named) <= tables, where
