"""Flags of `holdfast replay` and `holdfast request`."""

import argparse
from pathlib import Path
from typing import Any

from controller.replay.moment_parser import FORMATS

REPORT_FILE = "report.html"
SWEEP_POINTS = 12
ABOUT = (
    "what would have happened under another policy: decides the recorded observations again and compares the result "
    "with what was decided. Settings are named as in docs/reference/settings.md, such as breaker.wait_min, health.failures_max, "
    "canary.interval"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands of `holdfast replay`."""
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    command = _command(commands, "timeline", "what happened, as sentences with times")
    command.add_argument("--incident", metavar="ID", help="one incident, from its first symptom to recovery")
    command.add_argument("--worker", metavar="W", help="only events about this worker")
    command.add_argument("--request", metavar="ID", help="only events about this request")
    command.add_argument("--since", metavar="WHEN", help=FORMATS)
    command.add_argument(
        "--all", action="store_true", help="include routine events: passed canaries, served requests"
    )
    command = _command(commands, "at", "the state of the fleet at a past moment")
    command.add_argument("when", metavar="TIME|SEQ", help=FORMATS)
    command = _command(commands, "why", "the causes of an event, back to the first observation")
    command.add_argument("event", metavar="EVENT", help="its sequence, its ce-id, or decision:N")
    _report(commands)
    _what_if(commands)
    command = _command(
        commands,
        "verify",
        "fold and decide the journal again and compare with the store (exit status 3: a difference)",
    )
    command.add_argument("--since", metavar="WHEN", help=f"start at the last snapshot before: {FORMATS}")
    _command(commands, "rebuild", "project the whole journal into a new projection, then replace the old one")
    for command in commands.choices.values():  # --data is accepted before and after the command
        command.add_argument("--data", type=Path, default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def _command(commands: Any, name: str, text: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=text, allow_abbrev=False
    )
    command.add_argument(
        "-o", "--output", choices=("text", "json"), default="text", help="output format (default: text)"
    )
    command.set_defaults(replay=name)
    return command


def _report(commands: Any) -> None:
    """Add `report` to an argparse subparsers object."""
    text = "a post-mortem as one self-contained HTML page, as Markdown, or as JSON"
    command = commands.add_parser("report", help=text, description=text, allow_abbrev=False)
    command.add_argument(
        "--incident",
        metavar="ID",
        help="the incident, by its id or by one of its events (default: the last one)",
    )
    command.add_argument(
        "--since", metavar="WHEN", help=f"instead of an incident, all events from here on: {FORMATS}"
    )
    command.add_argument(
        "--until", metavar="WHEN", help="end of the window, with --since (default: the end of the journal)"
    )
    command.add_argument(
        "--redact", action="store_true", help="replace the names of requests, workers, hosts and people"
    )
    command.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        default=REPORT_FILE,
        help=f"output file (.html, .md or .json); `md` or `json` alone prints to stdout (default: {REPORT_FILE})",
    )
    command.set_defaults(replay="report")


def _what_if(commands: Any) -> None:
    """Add `what-if` to an argparse subparsers object."""
    text = "what would have happened under another policy"
    command = commands.add_parser("what-if", help=text, description=ABOUT, allow_abbrev=False)
    command.add_argument(
        "--set",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="change one setting, such as canary.interval=10s (repeatable)",
    )
    command.add_argument(
        "--policy", metavar="FILE", help="change several settings by part, from a JSON or .toml file"
    )
    command.add_argument(
        "--incident", metavar="ID", help="decide one incident again, by its id or by one of its events"
    )
    command.add_argument(
        "--since",
        metavar="WHEN",
        help=f"start of the recording (default: the journal's first event): {FORMATS}",
    )
    command.add_argument("--until", metavar="WHEN", help="end of the recording (default: the journal's end)")
    command.add_argument(
        "--sweep", metavar="NAME=A..B", help="try many values of one setting, such as canary.interval=1s..60s"
    )
    command.add_argument(
        "--points",
        metavar="N",
        type=int,
        default=SWEEP_POINTS,
        help=f"number of values in a sweep (default: {SWEEP_POINTS})",
    )
    command.add_argument(
        "--recorded",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="value of canary.interval or liveness.silent_after at that time, if it cannot be inferred from the journal",
    )
    command.add_argument(
        "-o", "--output", metavar="FORM", default="text",
        help="text, json, or an output file (.json; .html for a sweep) (default: text)",
    )  # fmt: skip
    command.set_defaults(replay="what-if")


def add_request_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `holdfast request`."""
    parser.add_argument("request", metavar="ID", help="the X-Request-Id of its answer")
    parser.add_argument(
        "-o", "--output", choices=("text", "json"), default="text", help="output format (default: text)"
    )
    parser.set_defaults(replay="request")
