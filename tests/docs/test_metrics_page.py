"""docs/reference/metrics.md documents every metric of every role."""

import re

from metrics_page import PAGE, renewed, roles


def test_the_tables_match_the_registries() -> None:
    page = PAGE.read_text()
    assert renewed(page) == page, "run `python tests/docs/metrics_page.py`"


def test_every_metric_has_a_description_and_a_known_prefix() -> None:
    for entries in roles().values():
        for entry in entries:
            assert len(entry.text) > 8, entry
            assert entry.name.startswith(("dynamo_", "holdfast_")), entry


def test_no_metric_is_exposed_twice_with_different_labels() -> None:
    seen: dict[str, tuple[tuple[str, ...], str]] = {}
    for role, entries in roles().items():
        for entry in entries:
            known = seen.setdefault(entry.name, (entry.labels, entry.type))
            assert known == (entry.labels, entry.type), f"{entry.name} of {role}"


def test_metrics_named_in_the_text_exist() -> None:
    names = {entry.name for entries in roles().values() for entry in entries}
    prose = PAGE.read_text().partition("## All metrics")[0]
    for name in re.findall(r"\b(?:dynamo|holdfast)_[a-z_]+[a-z]\b", prose):
        assert name in names or name in ("holdfast_", "dynamo_"), name


def test_the_seeds_names_and_labels_are_exact() -> None:
    found = {e.name: (e.type, e.labels) for e in roles()["Controller"]}
    for name, expected in {
        "dynamo_health_check_duration_seconds": ("histogram", ("worker_id", "check_type")),
        "dynamo_worker_status": ("gauge", ("worker_id", "tp_group")),
        "dynamo_migration_total": ("counter", ("source_group", "target_group", "method")),
        "dynamo_migration_duration_seconds": ("histogram", ("method",)),
        "dynamo_degradation_level": ("gauge", ()),
        "dynamo_circuit_breaker_state": ("gauge", ("worker_id",)),
        "dynamo_worker_state": ("gauge", ("worker_id", "state")),
        "dynamo_canary_failures_total": ("counter", ("worker_id", "reason")),
    }.items():
        assert found[name] == expected, name


def test_dynamos_frontend_names_and_labels_are_kept() -> None:
    found = {e.name.removeprefix("dynamo_frontend_"): e.labels for e in roles()["Frontend"]}
    ends = ("model", "endpoint", "request_type")
    for name in ("active_requests", "inflight_requests", "queued_requests", "output_tokens_total",
                 "request_duration_seconds", "input_sequence_tokens", "output_sequence_tokens", "cached_tokens",
                 "time_to_first_token_seconds", "inter_token_latency_seconds", "model_total_kv_blocks",
                 "model_max_num_seqs", "model_context_length", "model_kv_cache_block_size", "model_migration_limit",
                 "model_migration_max_seq_len_exceeded_total"):  # fmt: skip
        assert found[name] == ("model",), name
    for name in ("active_decode_blocks", "active_prefill_tokens", "waiting_requests"):
        assert found[f"worker_{name}"] == ("worker_id", "dp_rank", "worker_type"), name
    for name in ("last_time_to_first_token_seconds",
                 "last_inter_token_latency_seconds", "last_input_sequence_tokens"):  # fmt: skip
        assert found[f"worker_{name}"] == ("worker_id",), name
    assert found["requests_total"] == (*ends, "status", "error_type")
    assert found["model_cancellation_total"] == ends
    assert found["model_rejection_total"] == ("model", "endpoint")
    assert found["model_migration_total"] == ("model", "migration_type")
    assert found["model_migration_duration_seconds"] == ("model", "migration_type", "outcome")
    assert found["tokenizer_latency_ms"] == ("operation",)
    assert found["disconnected_clients"] == ()
