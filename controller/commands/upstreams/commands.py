"""`holdfast upstream`: adds, removes, pauses, resumes and lists the upstreams of a running fleet.

The commands edit the watched file of upstreams, and wait until the process that watches it shows the effect. The file thus
stays the only description of the upstreams: it survives restarts, and an edit needs neither a controller nor the broker.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from controller.commands.upstreams.file_edit import Edit, add, edit_file, remove, set_pause
from controller.commands.upstreams.upstream_processes import (
    UpstreamProcess,
    report_of,
    the_process,
    upstream_processes,
)
from controller.terminal_text import fitted
from events.errors import HoldfastError
from events.json_types import Json
from workers.upstreams.watched_file import digest

LOOK_S = 0.2
COLUMNS = ("name", "state", "since", "requests", "model", "weight", "zone", "url")
Effect = Callable[[Json | None], bool]


class NoEffect(HoldfastError):
    """The file is edited, but the effect is not visible in time."""


def run(args: argparse.Namespace) -> int:
    """Run one subcommand, and return its exit code."""
    if args.upstream == "list":
        return _list(args)
    name = args.name
    edits: dict[str, tuple[Edit, Effect, str]] = {
        "remove": (partial(_remove, name), lambda now: now is None, "has left"),
        "pause": (partial(_pause, name, True), _is("paused"), "is paused"),
        "resume": (partial(_pause, name, False), _is("serving"), "serves again"),
    }
    if args.upstream == "add":
        fields = _fields(args)
        edit: tuple[Edit, Effect, str] = (lambda text: add(text, fields), _is("serving"), "serves")
    else:
        edit = edits[args.upstream]
    return _carry_out(args, *edit)


def _remove(name: str, text: str) -> str:
    return remove(text, name)


def _pause(name: str, pause: bool, text: str) -> str:
    return set_pause(text, name, pause)


def _is(state: str) -> Effect:
    return lambda now: now is not None and now["state"] == state


def _fields(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of the new entry that the flags set."""
    fields: dict[str, Any] = {"name": args.name, "url": args.url}
    for field in ("model", "key_file", "revision", "weight", "zone", "proxy", "discover"):
        if (value := getattr(args, field)) is not None:
            fields[field] = _absolute(value) if field in ("model", "key_file") else value
    tls = {
        field: getattr(args, field)
        for field in ("ca_file", "cert_file", "server_name")
        if getattr(args, field)
    }
    if args.cert_key_file:
        tls["key_file"] = args.cert_key_file
    if args.no_verify:
        tls["verify"] = False
    return fields | ({"tls": tls} if tls else {})


def _absolute(path: str) -> str:
    """Return the absolute path of a file, because relative paths in the file of upstreams begin at the file's folder."""
    return str(Path(path).expanduser().resolve())


def _carry_out(args: argparse.Namespace, edit: Edit, effect: Effect, done: str) -> int:
    process = the_process(args.data, args.file)
    wanted = digest(edit_file(process.path, edit))
    until, now = time.monotonic() + args.within, None
    while time.monotonic() < until:
        found = report_of(process.presence)
        if found is not None and found.report["file"]["digest"] == wanted:
            now = next((one for one in found.report["upstreams"] if one["name"] == args.name), None)
            if any(one["name"] == args.name for one in found.report["discovery"]):
                print(f"{args.name} is applied; `holdfast upstream list` shows the servers of its name")
                return 0
            if effect(now):
                print(f"{args.name} {done}")
                return 0
        time.sleep(LOOK_S)
    why = "the process that watches it has not read it yet"
    if now is not None:
        why = f"{args.name} is {now['state']}" + (f": {now['last_error']}" if now["last_error"] else "")
    raise NoEffect(
        f"{process.path} is edited, but within {args.within:g} s {args.name} did not get there: {why}"
    )


def _list(args: argparse.Namespace) -> int:
    found = upstream_processes(args.data) if args.file is None else [the_process(args.data, args.file)]
    if not found:
        the_process(args.data, args.file)  # raises the error
    if args.output == "json":
        print(json.dumps([one.report for one in found], indent=1))
        return 0
    for process in found:
        _print(process)
    return 0


def _print(process: UpstreamProcess) -> None:
    if error := process.report["file"]["error"]:
        print(f"the file is not applied: {error}", file=sys.stderr)
    for one in process.report["discovery"]:
        if one["error"]:
            kept = len(one["addresses"])
            print(fitted(f"{one['name']}: {one['error']}; the last {kept} addresses stay"), file=sys.stderr)
    upstreams = process.report["upstreams"]
    rows = [COLUMNS, *(_row(one) for one in upstreams)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    for row, one in zip(rows, (None, *upstreams), strict=True):
        print(fitted("  ".join(map(str.ljust, row, widths)).rstrip()))
        if one is not None and one["last_error"] and one["state"] != "serving":
            print(fitted(f"  {one['last_error']}"))


def _row(one: Json) -> tuple[str, ...]:
    age = timedelta(seconds=max(0, round(time.time() - one["since"])))  # noqa: TID251 (shown to operators)
    return (
        one["name"],
        one["state"],
        str(age),
        str(one["requests"]),
        one["model"] or "-",
        f"{one['weight']:g}",
        one["zone"] or "-",
        one["url"],
    )
