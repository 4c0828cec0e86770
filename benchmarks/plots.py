"""Plots of benchmarks, as SVG or PNG. They need the `plots` extra; the numbers are printed without it."""

from argparse import ArgumentTypeError
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any


@contextmanager
def figure(path: Path, panels: int, title: str, lines: int = 1) -> Iterator[Sequence[Sequence[Any]]]:
    """Yield lines of `panels` axes side by side, and write them to a file. Exit with a message if matplotlib is not
    installed."""
    matplotlib = needed()
    matplotlib.use("Agg")
    drawn, axes = import_module("matplotlib.pyplot").subplots(
        lines, panels, figsize=(5 * panels, 4 * lines), squeeze=False, layout="constrained"
    )
    drawn.suptitle(title)
    yield axes
    drawn.savefig(path)
    import_module("matplotlib.pyplot").close(drawn)


def plot_file(text: str) -> Path:
    """Parse a flag's file name of a plot to write."""
    path = Path(text)
    if path.suffix not in (".svg", ".png") or not path.parent.is_dir():
        raise ArgumentTypeError(f"{text!r} does not end in .svg or .png, or its folder does not exist")
    return path


def needed() -> Any:
    """Return matplotlib. Exit with a message if it is not installed: call this before anything that takes long."""
    try:
        return import_module("matplotlib")
    except ImportError:
        raise SystemExit("--plot needs matplotlib: install it with `pip install '.[plots]'`") from None
