"""SLO dashboard: availability, latency objectives and error budget burn rates."""

from grafana.boards.common import OURS
from grafana.model import GREEN, MODEL, ORANGE, RED, YELLOW, Dashboard, Panel, Query, Row, Variable

M = 'model=~"$model"'
OBJECTIVE = Variable(name="objective", values=("0.999", "0.9995", "0.995", "0.99"), many=False)
TTFT = Variable(
    name="ttft", asks="label_values(dynamo_frontend_time_to_first_token_seconds_bucket, le)", many=False
)
ITL = Variable(
    name="itl", asks="label_values(dynamo_frontend_inter_token_latency_seconds_bucket, le)", many=False
)
WINDOWS = ("5m", "30m", "1h", "6h")


def errors(window: str) -> str:
    """Return the share of requests that failed by the fleet's fault."""
    return (
        f"((sum(rate(dynamo_frontend_requests_total{{{M},{OURS}}}[{window}])) or vector(0))"
        f" / sum(rate(dynamo_frontend_requests_total{{{M}}}[{window}])))"
    )


def in_time(metric: str, bound: str, window: str) -> str:
    """Return the share of a histogram's observations within a bound."""
    return f'(sum(rate({metric}_bucket{{{M},le="${bound}"}}[{window}])) / sum(rate({metric}_count{{{M}}}[{window}])))'


def burn(share: str, legend: str) -> Query:
    """Query the burn rate: error budget consumption relative to the sustainable rate."""
    return Query(f"{share} / (1 - $objective)", legend)


FIRST, NEXT = "dynamo_frontend_time_to_first_token_seconds", "dynamo_frontend_inter_token_latency_seconds"

BOARD = Dashboard("holdfast-slo", "SLO", "Availability, latency objectives and error budget burn rates",
    variables=[MODEL, OBJECTIVE, TTFT, ITL], rows=[
    Row("Availability", [
        Panel("Available", "Share of requests of the last 6 hours that did not fail by the fleet's fault",
            [Query(f"1 - {errors('6h')}", "available", instant=True)],
            kind="stat", unit="percentunit", width=6, steps=((None, RED), (0.99, ORANGE), (0.999, GREEN))),
        Panel("Error budget left", "Of the last 6 hours; 1: all of it, below 0: objective missed",
            [Query(f"1 - {errors('6h')} / (1 - $objective)", "left", instant=True)],
            kind="stat", unit="percentunit", width=6, least=None, steps=((None, RED), (0, YELLOW), (0.5, GREEN))),
        Panel("Burn rate", "1: the budget lasts exactly its period; 14: it is used up in two of thirty days",
            [burn(errors(window), window) for window in WINDOWS], width=12),
    ]),
    Row("First tokens", [
        Panel("First tokens in time", "Share of first tokens within $ttft seconds",
            [Query(in_time(FIRST, "ttft", window), window) for window in WINDOWS[:2]], unit="percentunit", width=12, most=1.0),
        Panel("Burn rate of first tokens", "Burn rate of the budget for late first tokens",
            [burn(f"(1 - {in_time(FIRST, 'ttft', window)})", window) for window in WINDOWS], width=12),
    ]),
    Row("Tokens", [
        Panel("Tokens in time", "Share of tokens within $itl seconds of the previous one",
            [Query(in_time(NEXT, "itl", window), window) for window in WINDOWS[:2]], unit="percentunit", width=12, most=1.0),
        Panel("Burn rate of tokens", "Burn rate of the budget for late tokens",
            [burn(f"(1 - {in_time(NEXT, 'itl', window)})", window) for window in WINDOWS], width=12),
    ]),
])  # fmt: skip
