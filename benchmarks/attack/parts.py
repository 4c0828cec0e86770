"""The parts of `make attack`: their commands, time limits and results.

A part is a command that reports by its exit code whether its bounds hold; the texts about it are for its readers.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.attack.compromised import BROKER_MB_MAX, FLOOR_MS, TIMES_MAX
from benchmarks.serving.abuse import MEMORY_TIMES_MAX, TTFT_TIMES_MAX

IN_ALL_S_MAX = 1080
WALK_S, FUZZ_REQUESTS = 300, 1000
SEEDS, SEED_MINUTES, SEED_WORKERS = 200, 60, 5
TESTS_XML = "tests.xml"


@dataclass(frozen=True, slots=True)
class Seen:
    """The result of one part in a few words, and the commands that repeat what failed."""

    times: str
    found: str
    again: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Part:
    """One part. `command` gets the output folder, the seed and the number of cores; `again` gets the seed; `seen` gets the
    printed output and that folder. After `within_s` seconds the part has failed."""

    tries: str
    bound: str
    within_s: int
    command: Callable[[Path, int, int], Sequence[str]]
    again: Callable[[int], str]
    seen: Callable[[str, Path], Seen]


def _tests(folder: Path, seed: int, cores: int) -> Sequence[str]:
    testers = ("-n", str(max(6, cores)), "--dist", "loadgroup", "-p", "no:cacheprovider")
    written = ("--basetemp", str(folder / "tests"), "--junitxml", str(folder / TESTS_XML))
    return (sys.executable, "-m", "pytest", *testers, *written, "tests/attacks")


def _tests_seen(printed: str, folder: Path) -> Seen:
    cases = list(ElementTree.parse(folder / TESTS_XML).iter("testcase"))
    failed = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    names = [f"{c.get('classname', '').replace('.', '/')}.py::{c.get('name')}" for c in failed]
    skipped = sum(c.find("skipped") is not None for c in cases)
    again = [f".venv/bin/python -m pytest {name}" for name in names]
    return Seen(f"{len(cases)} tests", f"{len(failed)} failed, {skipped} skipped", again)


def _benchmark(module: str, *flags: str) -> Sequence[str]:
    return (sys.executable, "-m", f"benchmarks.{module}", *flags)


def last_object(printed: str) -> dict[str, Any]:
    """Return the JSON object of the last line. Raise ValueError if there is none."""
    lines = printed.strip().splitlines()
    found = json.loads(lines[-1]) if lines else None
    if not isinstance(found, dict):
        raise ValueError("it printed no JSON object")
    return found


def _walk_seen(printed: str, folder: Path) -> Seen:
    found = last_object(printed)
    back_s = found["all well again after, s"]
    needless = found["503 not needed"] + found["other errors not needed"]
    needed = found["503"] + sum(found["other errors"].values()) - needless
    back = "workers not all recovered" if back_s is None else f"all recovered after {back_s:g} s"
    seen = f"{len(found['altered'])} altered, {needless} needless errors ({needed} needed), {back}"
    return Seen(f"{sum(found['faults'].values())} faults, {found['streams']} streams", seen)


def _abuse_seen(printed: str, folder: Path) -> Seen:
    found = last_object(printed)
    strangers = sum(sum(ends.values()) for ends in found["strangers"].values())
    ttft = f"TTFT p99 {found['ttft_p99_times']:g} times"
    seen = f"{ttft}, memory {found['memory_times']:g} times, {found['failed']} failed"
    return Seen(f"{strangers} abuses of {len(found['strangers'])} kinds", seen)


def _compromised_seen(printed: str, folder: Path) -> Seen:
    found = last_object(printed)
    floods: dict[str, Any] = found["floods"]
    worst = max(floods, key=lambda kind: floods[kind]["ttft_ms"]["p99"])
    failed = found["failed"] + sum(one["failed"] for one in floods.values())
    seen = f"others' TTFT p99 {found['alone_ms']['p99']:g} ms alone, {floods[worst]['ttft_ms']['p99']:g} ms at most ({worst})"
    seen += f", broker {max(one['broker_mb'] for one in floods.values())} MB, {failed} failed"
    return Seen(f"{len(floods)} floods", f"{seen}, {sum(one['ejected'] for one in floods.values())} ejected")


def _fuzz_seen(printed: str, folder: Path) -> Seen:
    found = last_object(printed)
    wrong, others, restarted = found["wrong"], found["honest_wrong"], found["restarted"]
    seen = f"{len(wrong)} wrong, {len(others)} of {found['honest']} honest ones wrong, {len(restarted)} restarted"
    if not found["well_afterwards"]:
        seen += ", not healthy afterwards"
    again = "python -m benchmarks fuzz --seed {} --only {}"
    numbers = [one.partition(" ")[0] for one in wrong]
    return Seen(
        f"{found['requests']} requests, {found['fields']} fields of the API",
        seen,
        [again.format(found["seed"], number) for number in numbers],
    )


def _simulation_seen(printed: str, folder: Path) -> Seen:
    runs = [json.loads(line) for line in printed.splitlines()]
    if not runs:
        raise ValueError("no seed was run")
    broken = [run for run in runs if run["violation"]]
    faults = sum(sum(run["faults"].values()) for run in runs)
    invariants = len({name for run in runs for name in run["checks"]})
    hours = round(sum(run["minutes"] for run in runs) / 60)
    return Seen(
        f"{len(runs)} seeds, {hours} virtual hours, {faults} faults",
        f"{len(broken)} of {len(runs)} seeds broke one of {invariants} invariants",
        [run["command"] for run in broken],
    )


def _simulation(folder: Path, seed: int, cores: int) -> Sequence[str]:
    many = ("--runs", str(SEEDS), "--processes", str(cores), "-o", "json")
    return (sys.executable, "-m", "controller.cli", *_seeds(seed), *many)


def _seeds(seed: int) -> Sequence[str]:
    size = ("--workers", str(SEED_WORKERS), "--minutes", str(SEED_MINUTES))
    return ("simulate", "--seed", str(SEEDS * (seed - 1)), *size)


PARTS: Mapping[str, Part] = {
    "tests": Part(
        "whole fleets: hung and dead workers, poison, foreign bytes, lost stores, strangers",
        "0 failed",
        240,
        _tests,
        lambda seed: "make test-attacks",
        _tests_seen,
    ),
    "walk": Part(
        "random faults on 4 workers with 24 users",
        "0 altered, 0 needless errors, all recovered within 20 s",
        360,
        lambda folder, seed, cores: _benchmark(
            "failures.walk", "--seconds", str(WALK_S), "--seed", str(seed), "--keep", str(folder / "walk")
        ),
        lambda seed: f"python -m benchmarks walk --seconds {WALK_S} --seed {seed} --keep DIR",
        _walk_seen,
    ),
    "abuse": Part(
        "requests by strangers that cost far more than they should",
        f"≤ {TTFT_TIMES_MAX:g} times, ≤ {MEMORY_TIMES_MAX:g} times, 0 failed",
        140,
        lambda folder, seed, cores: _benchmark("serving.abuse"),
        lambda seed: "python -m benchmarks abuse",
        _abuse_seen,
    ),
    "compromised": Part(
        "floods by a compromised worker",
        f"≤ {TIMES_MAX:g} times or {FLOOR_MS:g} ms, ≤ {BROKER_MB_MAX:g} MB, 0 failed, senders ejected",
        120,
        lambda folder, seed, cores: _benchmark("attack.compromised"),
        lambda seed: "python -m benchmarks compromised",
        _compromised_seen,
    ),
    "fuzz": Part(
        "malformed and odd requests to a whole fleet",
        "0 wrong, 0 restarted, healthy afterwards",
        80,
        lambda folder, seed, cores: _benchmark(
            "attack.fuzz", "--requests", str(FUZZ_REQUESTS), "--seed", str(seed)
        ),
        lambda seed: f"python -m benchmarks fuzz --requests {FUZZ_REQUESTS} --seed {seed}",
        _fuzz_seen,
    ),
    "simulation": Part(
        "the deciders in virtual time, through crashes, partitions and outages",
        "0 broken",
        140,
        _simulation,
        lambda seed: f"holdfast {' '.join(_seeds(seed))} --runs {SEEDS} --processes 2",
        _simulation_seen,
    ),
}
