"""Rows of figures, which a benchmark prints as one JSON object each, and its command line."""

import json
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from typing import Any

Row = dict[str, Any]


def show(row: Row) -> Row:
    """Print a row with four significant digits, and return it."""
    print(json.dumps({key: _short(value) for key, value in row.items()}), flush=True)
    return row


def _short(value: object) -> object:
    if isinstance(value, dict):
        return {key: _short(one) for key, one in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def command_line(name: str, about: str | None) -> ArgumentParser:
    """Return the parser of `python -m benchmarks NAME`; `about` is the module's docstring."""
    prog = f"python -m benchmarks {name}"
    return ArgumentParser(prog=prog, description=about, formatter_class=RawDescriptionHelpFormatter)
