"""Queries and mappings that several dashboards share."""

from grafana.model import GREEN, GREY, ORANGE, RED, YELLOW, Json, Query

STATES = {
    "0": ("healthy", GREEN),
    "1": ("suspicious", YELLOW),
    "2": ("unhealthy", RED),
    "3": ("draining", "blue"),
    "4": ("dead", GREY),
}
BREAKER = {"0": ("closed", GREEN), "1": ("open", RED), "2": ("half open", YELLOW)}
LEVELS = {
    "0": ("0", GREEN),
    "1": ("1", YELLOW),
    "2": ("2", YELLOW),
    "3": ("3", ORANGE),
    "4": ("4", RED),
}
# Errors that are not the fleet's fault: client errors and deliberate rejections.
NOT_OURS = "overload|validation|not_found|cancelled|capacity_shed|not_accepting|deadline_unattainable|request_poisonous"
# Has both methods from 0 on. dynamo_migration_total also has source and target, and a series first appears with its first move.
SAVED = "dynamo_migration_duration_seconds_count"
OURS = f'status="error",error_type!~"{NOT_OURS}"'


def rate(metric: str, labels: str = "", by: str = "", legend: str = "") -> Query:
    """Query the rate per second of a counter, summed by some labels."""
    grouped = f" by ({by})" if by else ""
    return Query(f"sum{grouped} (rate({metric}{{{labels}}}[$__rate_interval]))", legend)


def quantiles(
    metric: str, labels: str = "", of: tuple[float, ...] = (0.5, 0.99), by: str = ""
) -> list[Query]:
    """Query quantiles of a histogram."""
    grouped = f"le, {by}" if by else "le"
    named = f" {{{{{by}}}}}" if by else ""
    return [
        Query(
            ask=f"histogram_quantile({q:g}, sum by ({grouped}) (rate({metric}_bucket{{{labels}}}[$__rate_interval])))",
            legend=f"p{100 * q:g}{named}",
        )
        for q in of
    ]


def history(sql: str, *, series: bool = False) -> Query:
    """Query the state store, for a table or for time series."""
    return Query(" ".join(sql.split()), source="postgres", series=series)


def link(board: str, variable: str) -> Json:
    """Return an override that links a table's values to another dashboard."""
    url = f"/d/{board}?var-{variable}=${{__value.raw}}&${{__url_time_range}}"
    links = [{"title": "Open", "url": url}]
    return {"matcher": {"id": "byName", "options": variable}, "properties": [{"id": "links", "value": links}]}
