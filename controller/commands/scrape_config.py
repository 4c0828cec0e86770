"""`holdfast scrape-config`: a configuration of Prometheus for a fleet that runs."""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from controller.processes.observability.scrape_targets import file_sd, http_sd, target_groups
from events.errors import HoldfastError
from events.process.presence import Presence, present

Run = Callable[[argparse.Namespace], int]


def prepare(parser: argparse.ArgumentParser) -> Run:
    """Add the command's flags and return what runs it."""
    add = parser.add_argument
    add(
        "--file-sd",
        type=Path,
        metavar="FILE",
        help="write the targets into this file, and have Prometheus read it",
    )
    add(
        "-o", "--output", choices=("yaml", "json"), default="yaml",
        help="yaml: the configuration; json: the targets alone, as http_sd and file_sd take them (default: yaml)",
    )  # fmt: skip
    return _run


def _run(args: argparse.Namespace) -> int:
    found = present(args.data)
    groups = target_groups(found)
    if not groups:
        raise HoldfastError(f"no fleet runs in {args.data} on this host: --data names another directory")
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
        raise HoldfastError(f"--file-sd {path} cannot be written: {error.strerror}") from error


def _controllers(data: Path, found: Sequence[Presence]) -> list[str]:
    """Return where controllers answer. Raise HoldfastError where none does."""
    urls = [one.url for one in found if one.role == "controller"]
    if not urls:
        raise HoldfastError(
            f"no controller of {data} runs on this host, which could be asked for targets: give --file-sd FILE"
        )
    return urls
