"""Runs many seeds on several cores."""

import multiprocessing
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from controller.simulator.simulation import Result, simulate


@dataclass(frozen=True, slots=True)
class SweepRun:
    """The parameters of one run in a sweep."""

    seed: int
    workers: int
    minutes: float
    rates: str | None = None
    live_requests: bool = False


def play(run: SweepRun) -> Result:
    """Run one seed. An exception carries a note that names the run."""
    try:
        return simulate(run.seed, run.workers, run.minutes, rates=run.rates, live_requests=run.live_requests)
    except Exception as error:
        error.add_note(f"while playing {run}")
        raise


def sweep(runs: Iterable[SweepRun], processes: int) -> Iterator[Result]:
    """Yield the results of all runs, in the order of the runs."""
    if processes == 1:
        yield from map(play, runs)
        return
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(play, runs, chunksize=4)
