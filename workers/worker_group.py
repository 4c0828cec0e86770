"""Runs many workers in one process; each starts, dies and restarts as if it had its own process.

    serving ──┬── killed by a rehearsal: `Many` records that it left, as a supervisor of processes would ──┐
       ▲      ├── it fails or is restarted: it has recorded that itself ───────────────────────────────────┤
       │      └── the process stops: it leaves gracefully, and is over                                     │
       └───────────────────── a new instance of the same name, after a back-off ◀──────────────────────────┘

They share the process's resources: the connection to the broker, the journal and its spool, the admin port, the event loop. A
failure of the process (SIGKILL, an error in a callback of the loop) hits all of them. If a worker's
first start fails, the process ends, as with a single worker. Later starts are retried without limit.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from events.codec import new_id
from events.errors import HoldfastError
from events.journal.port import Journal
from events.observations import WorkerLeft
from workers.config.settings import WorkerConfig
from workers.exits import BROKE, FAILED, KILLED, exit_within
from workers.shutdown import CLEANUP_S, Stop, broken
from workers.worker import InferenceWorker, report_start_failure

START_BATCH = 8  # workers started in one turn of the loop: 10 ms
LEAVE_S = 30.0  # for a thousand workers that record their end at once, beyond the grace period of each


@dataclass(frozen=True, slots=True, kw_only=True)
class BackOff:
    """Waiting times before a failed worker is restarted, in seconds."""

    wait_s_min: float = 0.2  # doubles with each failed start
    wait_s_max: float = 10.0
    settled_s: float = 3.0  # an instance that ran longer was not a failed start


class Many:
    """The workers of one process, each with its current instance. `make` builds a worker."""

    def __init__(
        self,
        configs: Sequence[WorkerConfig],
        make: Callable[[WorkerConfig], InferenceWorker],
        journal: Journal,
        stop: Stop,
        stagger_s: float = 0.0,
        back_off: BackOff | None = None,
    ) -> None:
        self._back_off = back_off or BackOff()
        self.workers = [make(config) for config in configs]  # each replaced by its next instance
        self._make = make
        self._stagger_s = stagger_s
        self._journal = journal
        self._stop = stop
        self._broken = False  # the event loop can no longer be trusted
        self._codes: list[int] = []  # exit codes of workers that are not restarted

    async def run(self) -> int:
        """Run all workers until the process is told to stop; return its exit code."""
        async with asyncio.TaskGroup() as group:
            bound = group.create_task(self._bound_stop())
            lives = []
            for number in range(len(self.workers)):
                lives.append(group.create_task(self._run_lives(number)))
                if self._stagger_s and await self._stopped_within(self._stagger_s):
                    break
                # workers that serve must not fall silent while the others start
                if number % START_BATCH == 0:
                    await asyncio.sleep(0)
            await asyncio.wait(lives)
            bound.cancel()
        return max(self._codes, default=0)

    def stopping(self) -> bool:
        """Return whether the process is shutting down: a worker that ends now is not restarted."""
        return self._stop.wanted.is_set() or self._broken

    def fail(self, error: Exception) -> None:
        """End all workers and the process: a callback of the event loop failed, and its worker is unknown."""
        for worker in self.workers:
            worker.fail(broken("a callback of the event loop", error))
        self._broken = True

    async def _run_lives(self, number: int) -> None:
        """Run one worker, one instance after the other."""
        loop, back_off, first = asyncio.get_running_loop(), self._back_off, True
        wait_s = back_off.wait_s_min
        while True:
            began, code = loop.time(), await self._run_life(self.workers[number])
            if self.stopping() or (first and code is None):
                self._codes.append(FAILED if code is None else code % KILLED)
                self._stop.wanted.set()
                return
            wait_s = back_off.wait_s_min if loop.time() - began > back_off.settled_s else wait_s
            if await self._stopped_within(wait_s):
                return
            wait_s, first = min(2 * wait_s, back_off.wait_s_max), False
            self.workers[number] = self._make(
                replace(self.workers[number].config, instance=new_id(), name_check_s=0.0)
            )

    async def _run_life(self, worker: InferenceWorker) -> int | None:
        """Run one instance and return its end as a process's exit code; None if it failed to start."""
        living = asyncio.ensure_future(worker.run(self._stop.wanted, self._stop.hurried))
        try:
            await asyncio.wait((living,))
            code = living.result()
        except HoldfastError as error:
            report_start_failure(worker, error)
            return None
        finally:
            living.cancel()
        if code == KILLED:
            about = {"worker": worker.config.name, "instance": worker.config.instance}
            self._journal.observe(WorkerLeft(**about, mode="immediate", exit=KILLED))
        return code

    async def _stopped_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._stop.wanted.wait()
        except TimeoutError:
            return False
        return True

    async def _bound_stop(self) -> None:
        """End the process if its workers do not end in time: none of them may do that alone."""
        await self._stop.wanted.wait()
        grace_s = max(worker.config.grace_s for worker in self.workers)
        timer = exit_within(grace_s + CLEANUP_S + LEAVE_S, BROKE)
        try:
            await asyncio.Event().wait()
        finally:
            timer.cancel()
