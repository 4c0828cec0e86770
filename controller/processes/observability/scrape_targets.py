"""Returns Prometheus target groups of a fleet's processes, in the format of http_sd and file_sd.

Each process is one target, even if it runs many workers. The labels of a target are the process's role and name. Only processes
of this host are known, so a fleet on several hosts has targets on each host.
"""

import json
from collections.abc import Iterable
from typing import TypedDict
from urllib.parse import urlsplit

from events.process.presence import Presence

# roles that serve metrics
MEASURED = ("controller", "projector", "planner", "notifier", "frontend", "worker")
PATH = "/sd"  # path of the targets on a controller's admin port
JOB = "holdfast"


class TargetGroup(TypedDict):
    """A group of scrape targets with the same labels, as Prometheus expects it."""

    targets: list[str]  # host:port
    labels: dict[str, str]


def target_groups(present: Iterable[Presence]) -> list[TargetGroup]:
    """Return one target group for each process that serves metrics, sorted by role and name."""
    found = []
    for one in sorted(present, key=lambda one: (one.role, one.name)):
        address = urlsplit(one.url)
        if one.role in MEASURED and address.scheme in ("http", "https") and address.netloc:
            labels = {"role": one.role, "process": one.name}
            if address.scheme == "https":  # sets the scheme that Prometheus uses
                labels["__scheme__"] = "https"
            found.append(TargetGroup(targets=[address.netloc], labels=labels))
    return found


def http_sd(urls: Iterable[str]) -> str:
    """Return a Prometheus configuration that reads the targets from the controllers' admin ports at `urls`.

    A target that several controllers list is scraped once.
    """
    discovery = "".join(
        f"      - url: {json.dumps(url + PATH)}\n        refresh_interval: 5s\n" for url in urls
    )
    return _config(f"    http_sd_configs:\n{discovery}")


def file_sd(path: str) -> str:
    """Return a Prometheus configuration that reads the targets from a file."""
    return _config(
        f"    file_sd_configs:\n      - files: [{json.dumps(path, ensure_ascii=False)}]\n        refresh_interval: 5s\n"
    )


def rule_files(paths: Iterable[str]) -> str:
    """Return the part of a Prometheus configuration that loads alert rules, or an empty string if `paths` is empty."""
    quoted = ", ".join(json.dumps(path, ensure_ascii=False) for path in paths)
    return f"rule_files: [{quoted}]\n" if quoted else ""


def _config(discovery: str) -> str:
    return f"""global:
  scrape_interval: 5s
  scrape_timeout: 4s
scrape_configs:
  - job_name: {JOB}
{discovery}"""
