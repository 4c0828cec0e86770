"""`holdfast reload`: has running processes read their files again, and says what cannot change."""

import argparse
import os
import signal
import time

from controller.commands.upstreams.upstream_processes import UpstreamProcess, report_of, upstream_processes
from events.process.presence import present
from workers.config.upstreams import BadUpstreams, read_upstreams
from workers.upstreams.watched_file import digest

LOOK_S = 0.1
SERVERS = ("nats", "postgres", "prometheus")


def run(args: argparse.Namespace) -> int:
    """Reload the files of upstreams, and print what changed. Return 1 if a file is invalid or is not read in time."""
    found = upstream_processes(args.data)
    good = [_reload(process, args.within) for process in found]
    reloaded = {process.presence.name for process in found}
    others = [one.name for one in present(args.data) if one.name not in reloaded and one.role not in SERVERS]
    if others:
        print(
            f"not reloaded: {', '.join(sorted(others))}; they read their settings when they start, and key files at once"
        )
    return 0 if all(good) else 1


def _reload(process: UpstreamProcess, within_s: float) -> bool:
    name, before = process.path, process.report["file"]["digest"]
    try:
        wanted = digest(read_upstreams(name))
    except BadUpstreams as error:
        print(f"{error}; nothing has changed")
        return False
    os.kill(process.presence.pid, signal.SIGHUP)
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        now = report_of(process.presence)
        file = None if now is None else now.report["file"]
        if now is not None and file is not None and file["error"]:
            print(f"{file['error']}; nothing has changed")
            return False
        if now is not None and file is not None and file["digest"] == wanted:
            print(f"{name}: {'unchanged' if before == wanted else 'applied'}")
            for change in now.report["changes"] if before != wanted else ():
                print(f"  {change}")
            return True
        time.sleep(LOOK_S)
    print(f"{name}: process {process.presence.pid} has not read it within {within_s:g} s")
    return False
