"""Flags of `holdfast replay` and `holdfast request`."""

import argparse

from controller.common_flags import Flags, add_flags, output_flag, subcommands
from controller.replay.moment_parser import FORMATS

REPORT_FILE = "report.html"
SWEEP_POINTS = 12
ABOUT = (
    "what would have happened under another policy: decides the recorded observations again and compares the result "
    "with what was decided. Settings are named as in docs/reference/settings.md, such as breaker.wait_min, health.failures_max, "
    "canary.interval"
)
TIMELINE: Flags = {
    "--incident": {"metavar": "ID", "help": "one incident, from its first symptom to recovery"},
    "--worker": {"metavar": "W", "help": "only events about this worker"},
    "--request": {"metavar": "ID", "help": "only events about this request"},
    "--since": {"metavar": "WHEN", "help": FORMATS},
    "--all": {"action": "store_true", "help": "include routine events: passed canaries, served requests"},
}
REPORT: Flags = {
    "--incident": {"metavar": "ID", "help": "the incident, by its id or by one of its events (default: the last one)"},
    "--since": {"metavar": "WHEN", "help": f"instead of an incident, all events from here on: {FORMATS}"},
    "--until": {"metavar": "WHEN", "help": "end of the window, with --since (default: the end of the journal)"},
    "--redact": {"action": "store_true", "help": "replace the names of requests, workers, hosts and people"},
    "-o --output": {"metavar": "FILE", "default": REPORT_FILE,
                    "help": f"output file (.html, .md or .json); `md` or `json` alone prints to stdout (default: {REPORT_FILE})"},
}  # fmt: skip
WHAT_IF: Flags = {
    "--set": {"metavar": "NAME=VALUE", "action": "append", "default": [],
              "help": "change one setting, such as canary.interval=10s (repeatable)"},
    "--policy": {"metavar": "FILE", "help": "change several settings by part, from a JSON or .toml file"},
    "--incident": {"metavar": "ID", "help": "decide one incident again, by its id or by one of its events"},
    "--since": {"metavar": "WHEN", "help": f"start of the recording (default: the journal's first event): {FORMATS}"},
    "--until": {"metavar": "WHEN", "help": "end of the recording (default: the journal's end)"},
    "--sweep": {"metavar": "NAME=A..B", "help": "try many values of one setting, such as canary.interval=1s..60s"},
    "--points": {"metavar": "N", "type": int, "default": SWEEP_POINTS,
                 "help": f"number of values in a sweep (default: {SWEEP_POINTS})"},
    "--recorded": {"metavar": "NAME=VALUE", "action": "append", "default": [],
                   "help": "value of canary.interval or liveness.silent_after at that time, if it cannot be inferred from the "
                           "journal"},
    "-o --output": {"metavar": "FORM", "default": "text",
                    "help": "text, json, or an output file (.json; .html for a sweep) (default: text)"},
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands of `holdfast replay`."""
    command = subcommands(parser, "replay")
    timeline = command("timeline", "what happened, as sentences with times")
    output_flag(timeline)
    add_flags(timeline, TIMELINE)
    at = command("at", "the state of the fleet at a past moment")
    output_flag(at)
    at.add_argument("when", metavar="TIME|SEQ", help=FORMATS)
    why = command("why", "the causes of an event, back to the first observation")
    output_flag(why)
    why.add_argument("event", metavar="EVENT", help="its sequence, its ce-id, or decision:N")
    report = command("report", "a post-mortem as one self-contained HTML page, as Markdown, or as JSON")
    add_flags(report, REPORT)
    what_if = command("what-if", "what would have happened under another policy")
    what_if.description = ABOUT
    add_flags(what_if, WHAT_IF)
    text = "fold and decide the journal again and compare with the store (exit status 3: a difference)"
    verify = command("verify", text)
    output_flag(verify)
    text = f"start at the last snapshot before: {FORMATS}"
    verify.add_argument("--since", metavar="WHEN", help=text)
    text = "project the whole journal into a new projection, then replace the old one"
    output_flag(command("rebuild", text))


def add_request_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `holdfast request`."""
    parser.add_argument("request", metavar="ID", help="the X-Request-Id of its answer")
    output_flag(parser)
    parser.set_defaults(replay="request")
