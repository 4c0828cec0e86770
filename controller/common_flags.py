"""Functions that add common flags and subcommands to an argument parser."""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Flags = Mapping[str, Mapping[str, Any]]  # by the names of a flag: the other arguments of `add_argument`
AddCommand = Callable[[str, str], argparse.ArgumentParser]


def output_flag(parser: argparse.ArgumentParser, *others: str) -> None:
    """Add the flag -o, which selects text, JSON or one of `others` as the output format."""
    text = "output format (default: text)"
    parser.add_argument("-o", "--output", choices=("text", "json", *others), default="text", help=text)


def add_flags(parser: argparse.ArgumentParser, flags: Flags) -> None:
    """Add `flags` to a parser. Each key holds the names of one flag, separated by spaces."""
    for names, options in flags.items():
        parser.add_argument(*names.split(), **options)


def subcommands(parser: argparse.ArgumentParser, dest: str) -> AddCommand:
    """Return a function that takes a subcommand's name and help text, adds the subcommand, and returns its parser.

    The parsed arguments hold the name of the chosen subcommand as `dest`. Every subcommand accepts --data after its name.
    """
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest=dest, required=True)

    def add(name: str, text: str) -> argparse.ArgumentParser:
        command: argparse.ArgumentParser = commands.add_parser(
            name, help=text, description=text, allow_abbrev=False
        )
        command.add_argument("--data", type=Path, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        return command

    return add
