"""Prometheus target groups of a fleet's processes, in the format of http_sd and file_sd.

Each process is one target, however many workers it runs; its labels are its role and its name. Only processes of this host are
known. A fleet on several hosts has targets on each of them.
"""

import json
from collections.abc import Iterable
from typing import TypedDict
from urllib.parse import urlsplit

from events.process.presence import Presence

MEASURED = (
    "controller",
    "projector",
    "planner",
    "notifier",
    "frontend",
    "worker",
)  # roles that serve metrics
PATH = "/sd"  # on a controller's admin port
JOB = "holdfast"


class TargetGroup(TypedDict):
    """Targets that share their labels."""

    targets: list[str]  # host:port
    labels: dict[str, str]


def target_groups(present: Iterable[Presence]) -> list[TargetGroup]:
    """Return the target groups of a fleet's processes, sorted by role and name."""
    found = []
    for one in sorted(present, key=lambda one: (one.role, one.name)):
        address = urlsplit(one.url)
        if one.role in MEASURED and address.scheme in ("http", "https") and address.netloc:
            labels = {"role": one.role, "process": one.name}
            if address.scheme == "https":  # Prometheus' own label
                labels["__scheme__"] = "https"
            found.append(TargetGroup(targets=[address.netloc], labels=labels))
    return found


def http_sd(urls: Iterable[str]) -> str:
    """Return a Prometheus configuration that discovers targets from the controllers' admin ports at `urls`. Targets that
    several of them list are scraped once."""
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
    """Return the part of a configuration that loads alert rules; empty without any."""
    quoted = ", ".join(json.dumps(path, ensure_ascii=False) for path in paths)
    return f"rule_files: [{quoted}]\n" if quoted else ""


def _config(discovery: str) -> str:
    return f"""global:
  scrape_interval: 5s
  scrape_timeout: 4s
scrape_configs:
  - job_name: {JOB}
{discovery}"""
