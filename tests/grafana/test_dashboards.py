"""Dashboards: they are what their source says, and every metric, label and table that they name exists."""

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
NOT_SHOWN = {  # why a metric is on no dashboard
    "dynamo_degradation_level": "holdfast_degradation_level says it of each model",
    "dynamo_worker_state": "dynamo_worker_status says the same, as a number that a timeline can draw",
    "dynamo_migration_total": "dynamo_migration_duration_seconds counts the same, from 0 on",
    "dynamo_frontend_model_migration_duration_seconds": "holdfast_resume_seconds is what clients saw",
    "dynamo_frontend_disconnected_clients": "dynamo_frontend_model_cancellation_total counts them by model",
    "dynamo_frontend_model_context_length": "what a model is, and not how it fares",
    "dynamo_frontend_model_kv_cache_block_size": "what a model is, and not how it fares",
    "dynamo_frontend_model_max_num_seqs": "what a model is, and not how it fares",
    "dynamo_frontend_model_migration_limit": "a setting",
    "dynamo_frontend_model_migration_max_seq_len_exceeded_total": "what was lost is on the Fleet's dashboard",
    "dynamo_frontend_model_total_kv_blocks": "what a model is, and not how it fares",
    "dynamo_frontend_request_duration_seconds": "how long an answer takes is its length's business: see the times of tokens",
    "dynamo_frontend_tokenizer_latency_ms": "a part of the time to the first token",
    "dynamo_frontend_worker_last_input_sequence_tokens": "one answer's, for Dynamo's planner",
    "dynamo_frontend_worker_last_inter_token_latency_seconds": "one answer's, for Dynamo's planner",
    "dynamo_frontend_worker_last_time_to_first_token_seconds": "one answer's, for Dynamo's planner",
    "holdfast_facts_acknowledged_total": "holdfast_spool_depth says what is not",
    "holdfast_facts_observed_total": "holdfast_spool_depth says what is not acknowledged",
    "holdfast_journal_position": "a number without a rate of its own; what is behind is shown",
    "holdfast_late_chunks": "for whoever looks for a fault of ours",
    "holdfast_planner_expected_work": "`holdfast plan` tells it with what it means",
    "holdfast_planner_forecast_error": "`holdfast plan` tells it with what it means",
    "holdfast_planner_held": "`holdfast plan` says by what",
    "holdfast_planner_hooks_total": "holdfast_planner_proposals_total, and scale_applied in the history",
    "holdfast_planner_position": "its age is shown",
    "holdfast_projector_batch_events": "for whoever tunes it",
    "holdfast_projector_position": "its lag is shown",
    "holdfast_spool_bytes": "holdfast_spool_depth says it in facts",
    "holdfast_worker_kv_cached_blocks": "holdfast_router_kv_blocks says what is heard of them",
    "holdfast_worker_kv_events_total": "holdfast_router_kv_events_total says what is heard of them",
    "holdfast_worker_upstream_kv_events_total": "holdfast_router_kv_events_total says what is heard of them",
    "holdfast_worker_engine_gpu_cache_usage_perc": "holdfast_worker_kv_used_ratio",
    "holdfast_worker_engine_kv_active_blocks": "holdfast_worker_kv_used_ratio",
    "holdfast_worker_engine_kv_total_blocks": "holdfast_worker_kv_used_ratio",
    "holdfast_worker_engine_queued_num_decode_requests": "for whoever tunes an engine",
    "holdfast_worker_engine_queued_num_prefill_requests": "for whoever tunes an engine",
    "holdfast_worker_engine_queued_sum_decode_kv_tokens": "for whoever tunes an engine",
    "holdfast_worker_engine_queued_sum_prefill_tokens": "for whoever tunes an engine",
    "holdfast_worker_engine_queued_var_decode_kv_tokens": "for whoever tunes an engine",
    "holdfast_worker_engine_queued_var_prefill_length": "for whoever tunes an engine",
    "holdfast_worker_engine_request_active_slots": "for whoever tunes an engine",
    "holdfast_worker_engine_request_total_slots": "for whoever tunes an engine",
    "holdfast_worker_engine_scheduled_sum_decode_kv_tokens": "for whoever tunes an engine",
    "holdfast_worker_engine_scheduled_sum_prefill_kv_tokens": "for whoever tunes an engine",
    "holdfast_worker_engine_scheduled_sum_prefill_tokens": "for whoever tunes an engine",
    "holdfast_worker_engine_scheduled_var_decode_kv_tokens": "for whoever tunes an engine",
    "holdfast_worker_engine_scheduled_var_prefill_length": "for whoever tunes an engine",
}


def queries(source: str) -> Iterator[tuple[str, str]]:
    """Yield what panels ask of one source, each with its panel's name."""
    for board in BOARDS:
        for panel in board.panels():
            for query in panel.asks:
                if query.source == source:
                    yield f"{board.uid}: {panel.title}", query.ask


PROMQL = list(queries("prometheus"))


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_a_dashboard_is_what_its_source_says(board: Dashboard) -> None:
    file = FOLDER / f"{board.uid}.json"
    assert file.read_text() == text(board), "`make dashboards` writes it anew"


def test_there_is_no_dashboard_without_a_source() -> None:
    assert {file.stem for file in FOLDER.glob("*.json")} == {board.uid for board in BOARDS}


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_every_panel_says_what_it_shows_and_has_a_place_of_its_own(board: Dashboard) -> None:
    shown = json.loads(text(board))
    taken: set[tuple[int, int]] = set()
    for panel in shown["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken and max(x for x, _ in cells) < GRID, panel["title"]
        taken |= cells
        if panel["type"] != "row":
            assert len(panel["description"]) > 5, panel["title"]
            assert panel["datasource"]["uid"] in ("${datasource}", "${history}"), "no data source is named"
    numbers = [panel["id"] for panel in shown["panels"]]
    assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize(("where", "ask"), PROMQL, ids=[where for where, _ in PROMQL])
def test_every_metric_and_label_exists(where: str, ask: str) -> None:
    found = selectors(ask)
    assert found or "vector(" in ask
    for selector in found:
        metric = base(selector.name)
        assert metric in KNOWN, f"{selector.name} is not in docs/metrics.md"
        labels = {matcher.name for matcher in selector.matchers.matchers}
        assert labels <= KNOWN[metric][1] | OF_TARGETS, (
            f"{metric} has no {labels - KNOWN[metric][1] - OF_TARGETS}"
        )
        if KNOWN[metric][0] == "counter":
            assert selector.name in counted(ask), f"{metric} only grows"


@pytest.mark.parametrize(("where", "ask"), PROMQL, ids=[where for where, _ in PROMQL])
def test_what_is_added_up_by_exists(where: str, ask: str) -> None:
    labels = set().union(*(KNOWN[base(selector.name)][1] for selector in selectors(ask)), OF_TARGETS)
    assert added_up_by(ask) <= labels, where


def added_up_by(ask: str) -> set[str]:
    aggregates = [node for node in nodes(parsed(ask)) if isinstance(node, promql.AggregateExpr)]
    return {label for one in aggregates if one.modifier is not None for label in one.modifier.labels}


def test_what_legends_name_is_left_of_what_is_added_up() -> None:
    for board in BOARDS:
        for query in (
            query for panel in board.panels() for query in panel.asks if query.source == "prometheus"
        ):
            assert {*re.findall(r"{{(\w+)}}", query.legend)} <= added_up_by(query.ask), query


def test_every_metric_is_on_a_dashboard_or_it_is_said_why_not() -> None:
    shown = {base(selector.name) for _, ask in PROMQL for selector in selectors(ask)}
    assert KNOWN.keys() - shown - NOT_SHOWN.keys() == set(), "on no dashboard"
    assert NOT_SHOWN.keys() & shown == set(), "they are shown"
    assert NOT_SHOWN.keys() - KNOWN.keys() == set(), "they do not exist"


def test_every_table_exists() -> None:
    """Columns are tried by `test_dashboard_queries.py`, on a real Postgres."""
    tables = {*COLUMNS, *VIEWS, "fleet_events"}
    for where, ask in queries("postgres"):
        named = re.findall(r"holdfast\.(\w+)", ask)
        assert named and set(named) <= tables, where
