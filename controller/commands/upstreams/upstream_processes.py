"""Finds the processes of this host that run the upstreams of a file, and reads their reports."""

import json
import urllib.error
from dataclasses import dataclass
from pathlib import Path

from controller.processes.operator_client import opened
from events.errors import HoldfastError
from events.json_types import Json
from events.process.presence import Presence, present

ASK_S = 2.0
REPORT_BYTES_MAX = 16 * 1024 * 1024


class NoUpstreams(HoldfastError):
    """No process of this data directory runs the upstreams of a file. Start one with `holdfast up --upstreams FILE`."""


@dataclass(frozen=True, slots=True)
class UpstreamProcess:
    """One process with a file of upstreams, and its report."""

    presence: Presence
    report: Json

    @property
    def path(self) -> Path:
        """The file of upstreams."""
        return Path(self.report["file"]["path"])


def report_of(presence: Presence) -> UpstreamProcess | None:
    """Return a worker process with its report; None if it has no file of upstreams, or does not answer."""
    if presence.role != "worker" or not presence.url:
        return None
    try:
        with opened(f"{presence.url}/upstreams", ASK_S) as answer:
            return UpstreamProcess(presence, json.loads(answer.read(REPORT_BYTES_MAX)))
    except (urllib.error.URLError, OSError, ValueError):
        return None


def upstream_processes(data: Path) -> list[UpstreamProcess]:
    """Return the processes of a data directory that have a file of upstreams."""
    return [found for presence in present(data) if (found := report_of(presence)) is not None]


def the_process(data: Path, file: Path | None) -> UpstreamProcess:
    """Return the process of the file `file`, or the only one if `file` is None.

    Raise NoUpstreams if there is none, and HoldfastError if there are several.
    """
    found = upstream_processes(data)
    if file is not None:
        found = [one for one in found if one.path.resolve() == file.resolve()]
    if not found:
        raise NoUpstreams(f"{data}: {NoUpstreams.__doc__}")
    if len(found) > 1:
        files = ", ".join(str(one.path) for one in found)
        raise HoldfastError(f"several processes have a file of upstreams; select one with --file: {files}")
    return found[0]
