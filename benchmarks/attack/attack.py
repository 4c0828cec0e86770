"""`make attack`: runs every known attack and fault against Holdfast, and checks the bounds.

    python -m benchmarks attack [PART …] [--seed 1] [-o json] [--keep DIR]

Runs one part after another (`parts.py`), each with its own time limit, in 18 minutes at most: whole fleets under attack, a random
walk of faults, abuse, odd requests, long simulations. All of it runs on 127.0.0.1. Reports each part and its result on
stderr, then prints a table, or with `-o json` one JSON object per part. A failed part is shown with the command that repeats
it alone. Ctrl-C ends the current part, and the results so far are shown. Nothing is left behind: a part writes into one
folder, and any process that still uses it afterwards is ended, and counted against the part. Returns 1 if a part failed, 130
after Ctrl-C.
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
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.attack.parts import PARTS, Part, Seen
from controller.adapters.embedded.server import die_with
from controller.terminal_text import USUAL, columns, fitted

ROOT = Path(__file__).parents[2]
STOPS_WITHIN_S = 20.0  # for a part that is asked to end
GONE_WITHIN_S = 10.0  # for the processes that it had started
LINES_SHOWN = 15  # last lines of a failed part's output
POLL_S = 0.1
HOLDS, INTERRUPTED = "holds", "interrupted"
EXIT_FAILED, EXIT_INTERRUPTED = 1, 130


@dataclass(frozen=True, slots=True)
class Ended:
    """The result of one part."""

    part: str
    verdict: str  # "holds", or why not
    seconds: float
    tried: str
    times: str
    found: str
    bound: str
    again: Sequence[str] = ()

    @property
    def holds(self) -> bool:
        """Whether all bounds held."""
        return self.verdict == HOLDS


@contextlib.contextmanager
def interruptible() -> Iterator[threading.Event]:
    """Yield a flag that Ctrl-C and SIGTERM set. (An exception could occur anywhere, also where Python drops it.)"""
    flag = threading.Event()
    before = {
        number: signal.signal(number, lambda *_: flag.set()) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield flag
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run(name: str, part: Part, folder: Path, seed: int, interrupted: threading.Event) -> Ended:
    """Run one part until it ends, its deadline passes, or it is interrupted."""
    own = folder / name
    own.mkdir()
    began = time.monotonic()
    verdict = _ended(
        part.command(folder, seed, os.cpu_count() or 1), part.within_s, folder, name, interrupted
    )
    seconds = time.monotonic() - began
    seen = _seen(part, folder, name)
    left = end_all(own)
    if verdict == HOLDS and left:
        verdict = f"left {', '.join(left)} behind"
    if verdict == HOLDS and not seen.times:
        verdict = "printed no readable result"
    again = () if verdict == HOLDS else seen.again or (part.again(seed),)
    return Ended(name, verdict, round(seconds, 1), part.tries, seen.times, seen.found, part.bound, again)


def _ended(
    command: Sequence[str], within_s: float, folder: Path, name: str, interrupted: threading.Event
) -> str:
    """Return HOLDS, or why not."""
    own = folder / name
    with (folder / f"{name}.out").open("wb") as out, (folder / f"{name}.err").open("wb") as err:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"TMPDIR": str(own)},
            stdout=out,
            stderr=err,
            start_new_session=True,  # the terminal's Ctrl-C is for this process alone
            preexec_fn=die_with(os.getpid()),
        )
        deadline = time.monotonic() + within_s
        try:
            while (status := process.poll()) is None and time.monotonic() < deadline:
                if interrupted.wait(POLL_S):
                    return INTERRUPTED
        finally:
            _stop(process, own)
    if status is None:
        return f"had not ended after {within_s:g} s"
    return HOLDS if status == 0 else f"failed (exit {status})"


def _stop(process: "subprocess.Popen[bytes]", own: Path) -> None:
    """Interrupt the process if it still runs; then end all processes that remain."""
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
    """End every process that writes to this folder, and return their names. Processes that are about to end are left alone."""
    deadline = time.monotonic() + GONE_WITHIN_S
    while (found := _processes_using(own)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(found, timeout=GONE_WITHIN_S)
    return [process.info["name"] for process in found]


def _processes_using(own: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["name"]):
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile, or belongs to another user
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
    ):  # it ended before it could report; bad XML is a SyntaxError
        return Seen("", "")


def show(ended: Sequence[Ended]) -> str:
    """Return the table, fitted to the width of the terminal."""
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
        lines += [fitted(f"{one.part}, repeat it alone: {again}") for again in one.again]
    return "\n".join(lines)


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _report_end(ended: Ended, folder: Path) -> None:
    _report(f"      {ended.verdict}, {ended.seconds:.0f} s: {ended.times or 'nothing'}; {ended.found}")
    if not ended.holds and ended.verdict != INTERRUPTED:
        for kind in ("out", "err"):
            said = (folder / f"{ended.part}.{kind}").read_text(errors="replace").splitlines()
            for line in said[-LINES_SHOWN:]:
                _report(f"      | {line[:500]}")


def attack(names: Sequence[str], parts: Mapping[str, Part], seed: int, keep: Path | None) -> list[Ended]:
    """Run these parts, and return their results up to an interruption."""
    ended: list[Ended] = []
    folder = Path(tempfile.mkdtemp(prefix="holdfast-attack-"))
    try:
        with interruptible() as interrupted:
            for number, name in enumerate(names, 1):
                part = parts[name]
                _report(f"[{number}/{len(names)}] {name}: {part.tries}; {part.within_s} s at most")
                ended.append(run(name, part, folder, seed, interrupted))
                _report_end(ended[-1], folder)
                if interrupted.is_set():
                    break
    finally:
        if keep is not None:
            shutil.copytree(folder, keep, dirs_exist_ok=True, ignore=shutil.ignore_patterns("tests"))
        shutil.rmtree(folder, ignore_errors=True)
    return ended


def main(arguments: Sequence[str] | None = None, parts: Mapping[str, Part] = PARTS) -> int:
    """Run the named parts, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(parts)} (default: all)")
    parser.add_argument(
        "--seed",
        type=int,
        default=1,
        help="seed of the walk, the odd requests and the simulations (default: 1)",
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the parts' output in this folder")
    parser.add_argument(
        "-o", dest="output", choices=("text", "json"), default="text", help="output format (default: text)"
    )
    args = parser.parse_args(arguments)
    if unknown := [name for name in args.parts if name not in parts]:
        parser.error(f"unknown part {unknown[0]!r}; choose from {', '.join(parts)}")
    if args.seed < 1:
        parser.error(f"--seed {args.seed}: must be 1 or more")
    names = args.parts or list(parts)
    ended = attack(names, parts, args.seed, args.keep)
    if args.output == "json":
        for one in ended:
            print(json.dumps({"benchmark": "attack", **asdict(one)}))
    else:
        print(show(ended))
    if len(ended) < len(names) or ended[-1].verdict == INTERRUPTED:
        return EXIT_INTERRUPTED
    return 0 if all(one.holds for one in ended) else EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
