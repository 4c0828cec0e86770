"""`make attack`: does Holdfast stand all that we know to do to it?

    python -m benchmarks attack [PART …] [--seed 1] [-o json] [--keep DIR]

One part after another (`parts.py`), each in its own time, in 15 minutes at most: whole fleets under attack, a random walk of
faults, abuse, odd requests, long simulations. All of it on 127.0.0.1. Says what runs and how it ended (on stderr), then a
table, or with `-o json` one JSON object a part; what failed is named, with the command that does it again alone. Ctrl-C ends
the part that runs, and the table has those before it. Nothing is left behind: what a part writes lies in one folder, and
whatever process still has that afterwards is ended, and counted against the part. Returns 1 if a part failed, 130 after Ctrl-C.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.attack.parts import PARTS, Part, Seen
from controller.columns import USUAL, columns, fitted
from controller.processes.children import die_with

ROOT = Path(__file__).parents[2]
STOPS_WITHIN_S = 20.0  # a part that is told to end
GONE_WITHIN_S = 10.0  # what it had started
LINES_SHOWN = 15  # of what a part that failed said last
EXIT_FAILED, EXIT_INTERRUPTED = 1, 130


@dataclass(frozen=True, slots=True)
class Ended:
    """How one part ended."""

    part: str
    verdict: str  # holds, or why not
    seconds: float
    tried: str
    times: str
    found: str
    bound: str
    again: Sequence[str] = ()

    @property
    def holds(self) -> bool:
        """Whether all was as it should be."""
        return self.verdict == "holds"


def run(name: str, part: Part, folder: Path, seed: int) -> Ended:
    """Run one part to its end, or to its deadline. Raise KeyboardInterrupt once it is stopped."""
    own = folder / name
    own.mkdir()
    began = time.monotonic()
    ended = _ended(part.command(folder, seed, os.cpu_count() or 1), part.within_s, folder, name)
    seconds = time.monotonic() - began
    seen, verdict = _seen(part, folder, name), ended
    left = end_all(own)
    if verdict == "holds" and left:
        verdict = f"left {', '.join(left)} behind"
    if verdict == "holds" and not seen.times:
        verdict = "said nothing that can be read"
    again = () if verdict == "holds" else seen.again or (part.again(seed),)
    return Ended(name, verdict, round(seconds, 1), part.tries, seen.times, seen.found, part.bound, again)


def _ended(command: Sequence[str], within_s: float, folder: Path, name: str) -> str:
    """Return `holds`, or why not."""
    own = folder / name
    with (folder / f"{name}.out").open("wb") as out, (folder / f"{name}.err").open("wb") as err:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"TMPDIR": str(own)},
            stdout=out,
            stderr=err,
            start_new_session=True,  # the terminal's Ctrl-C is for us
            preexec_fn=die_with(os.getpid()),
        )
        try:
            status = process.wait(within_s)
            return "holds" if status == 0 else f"failed (exit {status})"
        except subprocess.TimeoutExpired:
            return f"had not ended after {within_s:g} s"
        finally:
            _stop(process, own)


def _stop(process: "subprocess.Popen[bytes]", own: Path) -> None:
    """Press Ctrl-C, where it still runs; then end all that has not ended."""
    if process.poll() is not None:
        return
    try:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOPS_WITHIN_S)
    finally:
        process.kill()
        process.wait()
        end_all(own)


def end_all(own: Path) -> Sequence[str]:
    """End every process that has this folder for what it writes, and return their names. Those that are about to end may."""
    deadline = time.monotonic() + GONE_WITHIN_S
    while (found := _having(own)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(found, timeout=GONE_WITHIN_S)
    return [process.info["name"] for process in found]


def _having(own: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["name"]):
        with contextlib.suppress(psutil.Error):  # ended meanwhile, or another user's
            if process.environ().get("TMPDIR") == str(own) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _seen(part: Part, folder: Path, name: str) -> Seen:
    try:
        return part.seen((folder / f"{name}.out").read_text(errors="replace"), folder)
    except (
        OSError,
        ValueError,
        KeyError,
        SyntaxError,
    ):  # it ended before it could say; bad XML is a SyntaxError
        return Seen("", "")


def show(ended: Sequence[Ended]) -> str:
    """Return the table, within the columns that there are."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for column, width in (
        ("what was tried", 20),
        ("times", 14),
        ("found", 18),
        ("bound", 12),
        ("verdict", 8),
    ):
        table.add_column(column, overflow="fold", min_width=min(width, 8), ratio=width)
    for one in ended:
        table.add_row(f"{one.part}: {one.tried}", one.times, one.found, one.bound, one.verdict)
    console = Console(highlight=False, width=max(USUAL, columns()))
    with console.capture() as written:
        console.print(table)
    lines = [line.rstrip() for line in written.get().splitlines()]
    for one in ended:
        lines += [fitted(f"{one.part}, that alone: {again}") for again in one.again]
    return "\n".join(lines)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _tell_end(ended: Ended, folder: Path) -> None:
    _tell(f"      {ended.verdict}, {ended.seconds:.0f} s: {ended.times or 'nothing'}; {ended.found}")
    if not ended.holds:
        for kind in ("out", "err"):
            said = (folder / f"{ended.part}.{kind}").read_text(errors="replace").splitlines()
            for line in said[-LINES_SHOWN:]:
                _tell(f"      | {line[:500]}")


def attack(
    names: Sequence[str], parts: Mapping[str, Part], seed: int, keep: Path | None
) -> tuple[list[Ended], bool]:
    """Run these parts; return how each ended, and whether all were run."""
    ended: list[Ended] = []
    folder = Path(tempfile.mkdtemp(prefix="holdfast-attack-"))
    try:
        for number, name in enumerate(names, 1):
            part = parts[name]
            _tell(f"[{number}/{len(names)}] {name}: {part.tries}; {part.within_s} s at most")
            ended.append(run(name, part, folder, seed))
            _tell_end(ended[-1], folder)
    except KeyboardInterrupt:
        _tell("      interrupted")
    finally:
        if keep is not None:
            shutil.copytree(folder, keep, dirs_exist_ok=True, ignore=shutil.ignore_patterns("tests"))
        shutil.rmtree(folder, ignore_errors=True)
    return ended, len(ended) == len(names)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def main(arguments: Sequence[str] | None = None, parts: Mapping[str, Part] = PARTS) -> int:
    """Run the parts that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(parts)} (default: all)")
    parser.add_argument(
        "--seed", type=int, default=1, help="of the walk, the odd requests and the simulations"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep there what the parts have said")
    parser.add_argument("-o", dest="output", choices=("text", "json"), default="text", help="how to report")
    args = parser.parse_args(arguments)
    if unknown := [name for name in args.parts if name not in parts]:
        parser.error(f"there is no part {unknown[0]!r}; there are {', '.join(parts)}")
    if args.seed < 1:
        parser.error(f"--seed {args.seed}: give a number from 1 on")
    signal.signal(signal.SIGTERM, _interrupt)
    ended, complete = attack(args.parts or list(parts), parts, args.seed, args.keep)
    if args.output == "json":
        for one in ended:
            print(json.dumps({"benchmark": "attack", **asdict(one)}))
    elif ended:
        print(show(ended))
    if not complete:
        return EXIT_INTERRUPTED
    return 0 if all(one.holds for one in ended) else EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
