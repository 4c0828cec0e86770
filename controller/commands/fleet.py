"""`holdfast fleet`: shows the event kinds that each process supports, or puts new kinds in force.

Both subcommands also cover the version of the deciders, the functions that decide about workers.
"""

import argparse
import json
from typing import Any

from controller.processes.operator_client import ask, operator_name
from controller.terminal_text import fitted

Report = dict[str, Any]  # a controller's answer to `versions`, or a part of it, as plain JSON types


async def run(args: argparse.Namespace) -> int:
    """Send the subcommand to the controller, and print the controller's answer.

    Raise NoFleet, Unreachable or NoAnswer if no controller answers, and OperatorRefused if the controller refuses."""
    if args.fleet == "allow":
        answer = await ask(args.data, "allow", {"by": operator_name()})
        print(json.dumps(answer) if args.output == "json" else answer.get("says", "allowed"))
    else:
        answer = await ask(args.data, "versions")
        print(json.dumps(answer, indent=1) if args.output == "json" else text(answer))
    return 0


def text(report: Report) -> str:
    """Format a controller's answer to `versions` as text.

    The text has a row per process, followed by the deciders version and the number of new event kinds that are in force. If a
    version or kinds are held back until every process supports them, the text lists what is held back."""
    rows = [("process", "release", "deciders", "does not support"), *map(_row, report["processes"])]
    force, held = report["in_force"], report["held_back"]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [fitted("  ".join([*map(str.ljust, row[:3], widths), row[3]])) for row in rows]
    lines.append(
        f"in force     deciders version {force['deciders_version']}, {len(force['kinds'])} new kinds"
    )
    what = [f"deciders version {held['deciders_version']}"] if held["deciders_version"] else []
    what += [", ".join(held["kinds"])] if held["kinds"] else []
    if not what:
        return "\n".join(lines)
    lines.append(f"held back    {'; '.join(what)}")
    if held["by"]:
        lines.append(f"by           {', '.join(held['by'])}")
        lines.append("             upgrade or stop these, or `holdfast fleet allow`")
    elif report["due_in_s"] is not None:
        lines.append(f"in force in  {report['due_in_s']:.0f} s, if every process still supports it then")
    else:
        lines.append("             the leader has not discovered all processes yet")
    return "\n".join(lines)


def _row(process: Report) -> tuple[str, str, str, str]:
    release = process["release"] or ("0.2.0 or older" if not process["announces"] else "-")
    lacks = process["lacks"]
    shown = ", ".join(lacks[:2]) + (f" and {len(lacks) - 2} more" if len(lacks) > 2 else "")
    version = str(process["deciders_version"] or "-")
    return f"{process['role']} {process['name']}", release, version, shown or "-"
