"""Flags and subcommands that many commands have."""

import argparse
from collections.abc import Callable
from pathlib import Path

AddCommand = Callable[[str, str], argparse.ArgumentParser]


def output_flag(parser: argparse.ArgumentParser) -> None:
    """Add -o, which selects text or JSON."""
    parser.add_argument(
        "-o", "--output", choices=("text", "json"), default="text", help="output format (default: text)"
    )


def subcommands(parser: argparse.ArgumentParser, dest: str) -> AddCommand:
    """Return a function that adds a subcommand by name and help text. Its name is stored as `dest`. All subcommands accept --data
    after their name, too."""
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest=dest, required=True)

    def add(name: str, text: str) -> argparse.ArgumentParser:
        command: argparse.ArgumentParser = commands.add_parser(
            name, help=text, description=text, allow_abbrev=False
        )
        command.add_argument("--data", type=Path, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        return command

    return add
