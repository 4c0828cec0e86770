"""Fetches the current plan of a running planner, and prints the plan with the reasons for it."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any

from controller.terminal_text import escape_controls
from events.errors import HoldfastError
from events.process.presence import present

Plan = dict[str, Any]  # a planner's answer, or its part about one model, as plain JSON types

ANSWER_S = 10.0  # timeout in seconds for the planner's answer


def show(data: Path, output: str) -> int:
    """Print the plan as text or JSON, and return exit code 0. Raise HoldfastError if no planner answers."""
    plan = fetch_plan(data)
    if output == "json":
        print(json.dumps(plan, indent=2))
        return 0
    for line in lines(plan):
        print(escape_controls(line))
    return 0


def fetch_plan(data: Path) -> Plan:
    """Return the plan of the first planner on this host that answers. Raise HoldfastError if no planner answers."""
    planners = [one for one in present(data) if one.role == "planner" and one.url]
    if not planners:
        raise HoldfastError(
            f"no planner of the fleet in {data} runs on this host: start one with `holdfast planner`, or rehearse a recorded "
            "day with --trace"
        )
    why: Exception | None = None
    for one in planners:
        try:
            with urllib.request.urlopen(f"{one.url}/plan", timeout=ANSWER_S) as answer:
                found: Plan = json.load(answer)
                return found
        except (urllib.error.URLError, HTTPException, OSError, ValueError) as error:
            why = error
    raise HoldfastError(f"the planner at {planners[-1].url} does not answer: {why}")


def lines(plan: Plan) -> Iterator[str]:
    """Yield the lines of a plan: for each model its number of workers, followed by the reasons."""
    yield f"{plan['planner']} ({plan['mode']})" + (f", waiting: {plan['waits']}" if plan["waits"] else "")
    if "at" not in plan:
        return
    behind = plan["projection_age_s"]
    yield f"as of {plan['at'][:19]}Z, event {plan['position']}" + (
        f", {behind:.0f} s behind" if behind else ""
    )
    for model in plan["models"]:
        yield ""
        yield from _of(model)
    if not plan["models"]:
        yield "no worker of any model is known yet"


def _of(model: Plan) -> Iterator[str]:
    now, then = model["workers"], model["proposed"]
    lost = f", {model['lost']} of them lost" if model["lost"] else ""
    change = (
        f"{now} → {then} ({model['why']})"
        if then != now
        else f"{now}{'' if model['held'] else ', as needed'}"
    )
    yield f"{model['model']}: workers {change}{lost}"
    if model["set_by_operator"] is not None:
        release = f"`holdfast scale {model['model']} --release`"
        yield f"  an operator has set {model['set_by_operator']}: {release} returns control to the planner"
    if (foreseen := model["forecast"]) is not None:
        bound = f", bound by {model['bound'].replace('_', ' ')}" if model["bound"] else ""
        error = "" if foreseen["error"] is None else f", {foreseen['error']:.0%} off recently"
        most = max(foreseen["work_s_per_minute"], default=0.0) * (1 + foreseen["margin"])
        yield f"  needed: {model['needed']}{bound}; expected: {most:.1f} s of work per minute ({foreseen['method']}{error})"
    yield f"  known: {model['minutes_known']} minutes of traffic"
    if model["held"]:
        yield f"  held: {model['held']}"
