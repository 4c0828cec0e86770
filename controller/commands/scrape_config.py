"""`holdfast scrape-config`: prints a Prometheus configuration for a running fleet."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from controller.processes.observability.scrape_targets import file_sd, http_sd, target_groups
from events.errors import HoldfastError
from events.process.presence import Presence, present


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `holdfast scrape-config`."""
    add = parser.add_argument
    add(
        "--file-sd",
        type=Path,
        metavar="FILE",
        help="write the targets into this file, for Prometheus to read",
    )
    add(
        "-o", "--output", choices=("yaml", "json"), default="yaml",
        help="yaml: the configuration; json: only the targets, in the format of http_sd and file_sd (default: yaml)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Print a Prometheus configuration, or with `-o json` only the scrape targets.

    With --file-sd, also write the targets to the file that this flag names. Raise HoldfastError if no fleet runs on this host,
    or if the file cannot be written."""
    found = present(args.data)
    groups = target_groups(found)
    if not groups:
        raise HoldfastError(
            f"no fleet is running in {args.data} on this host: --data selects another directory"
        )
    text = json.dumps(groups, indent=2)
    if args.file_sd is not None:
        _write(args.file_sd, text + "\n")
    if args.output == "json":
        print(text)
    elif args.file_sd is not None:
        print(file_sd(str(args.file_sd.resolve())), end="")
    else:
        print(http_sd(_controllers(args.data, found)), end="")
    return 0


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise HoldfastError(f"cannot write --file-sd {path}: {error.strerror}") from error


def _controllers(data: Path, found: Sequence[Presence]) -> list[str]:
    """Return the URLs of the controllers among these processes. Raise HoldfastError if there is no controller."""
    urls = [one.url for one in found if one.role == "controller"]
    if not urls:
        raise HoldfastError(
            f"no controller of {data} is running on this host to serve the targets: use --file-sd FILE"
        )
    return urls
