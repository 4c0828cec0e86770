"""Figures of a run at one load."""

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchmarks.overload.clients import Attempt
from benchmarks.router.virtual.figures import percentile

WARM_S = 5.0  # at the beginning, while the fleet fills: not counted
LATE = 1.1  # times the deadline, for the 99th percentile

Row = dict[str, Any]


def figures(attempts: Sequence[Attempt], seconds: float) -> Row:
    """Return the figures of the requests that arrived in full seconds after the warm-up.

    `goodput`: answers within their deadline, per second. `admitted_p99`: the 99th percentile of the time to the first token of
    answered requests, divided by the deadline. `refused_at_once`: the share of rejections that took computing time only.
    """
    seen = [one for one in attempts if WARM_S <= one.coming.at_s < seconds]
    span = seconds - WARM_S
    answered = [one for one in seen if one.status == 200]
    refused = [one for one in seen if one.status != 200]
    ratios = sorted(
        one.first_s / one.coming.deadline_s if one.first_s is not None else float("inf") for one in answered
    )
    took = sorted(one.took_s for one in refused if one.at_once)
    first = [one for one in seen if one.number == 0]
    good = {one.coming.key for one in seen if one.good}
    premium = [one for one in first if one.coming.tier == "premium"]
    return {
        "offered": len(first) / span,
        "attempts": len(seen) / span,
        "goodput": len(good) / span,
        "answered": len(answered) / span,
        "failed": sum(one.failed for one in answered),
        "admitted_p50": percentile(ratios, 0.5),
        "admitted_p99": percentile(ratios, 0.99),
        "refused_at_once": sum(one.at_once for one in refused) / max(1, len(refused)),
        "refusal_ms_p50": percentile(took, 0.5) * 1e3,
        "refusal_ms_p99": percentile(took, 0.99) * 1e3,
        "premium_good": sum(one.coming.key in good for one in premium) / max(1, len(premium)),
        "reasons": dict(Counter(f"{one.status} {one.refused}" for one in refused)),
    }


def recovery(attempts: Sequence[Attempt], fell_s: float) -> Row:
    """Return the number of rejections after the load fell, and the time of the last one after that."""
    late = [one.at_s for one in attempts if one.at_s >= fell_s and one.status != 200]
    return {"refusals": len(late), "last_refusal_s": max(late, default=fell_s) - fell_s}


def say(row: Row) -> Row:
    """Print a row, and return it."""
    shown = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in row.items()}
    print(json.dumps(shown), flush=True)
    return row
