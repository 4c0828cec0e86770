"""Runs many workers in one process. Each starts, ends and restarts as if it had its own process.

    serving ──┬── killed by a rehearsal: `Many` records that it left, as a supervisor of processes would ──┐
       ▲      ├── it fails or is restarted: it has recorded that itself ───────────────────────────────────┤
       │      └── the process stops: it leaves gracefully, and is over                                     │
       └───────────────────── a new instance of the same name, after a back-off ◀──────────────────────────┘

The diagram shows the states of one worker. The workers share the process's connection to the broker, its journal and spool,
its admin port and its event loop. A failure of the process (SIGKILL, an error in a callback of the loop) ends all workers. If
a worker's first start fails, the process ends. Later starts are retried without limit.
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

START_BATCH = 8  # workers started before the event loop serves others again; their start takes 10 ms
LEAVE_S = 30.0  # time beyond the grace period, in which a thousand workers record their end


@dataclass(frozen=True, slots=True, kw_only=True)
class BackOff:
    """Waiting times before a failed worker is restarted, in seconds."""

    wait_s_min: float = 0.2  # doubles with each failed start
    wait_s_max: float = 10.0
    settled_s: float = 3.0  # an instance that ran longer resets the waiting time to its minimum


class Many:
    """Runs the workers of one process and restarts each one that ends. `make` builds an instance of a worker."""

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
        self.workers = [make(config) for config in configs]  # the current instance of each worker
        self._make = make
        self._stagger_s = stagger_s
        self._journal = journal
        self._stop = stop
        self._broken = False  # the event loop can no longer be trusted
        self._codes: list[int] = []  # exit codes of workers that are not restarted

    async def run(self) -> int:
        """Run all workers until a stop is requested, and return the process's exit code: the highest of its workers."""
        async with asyncio.TaskGroup() as group:
            bound = group.create_task(self._bound_stop())
            lives = []
            for number in range(len(self.workers)):
                lives.append(group.create_task(self._run_lives(number)))
                if self._stagger_s and await self._stopped_within(self._stagger_s):
                    break
                # let workers that already serve send their heartbeats while the others start
                if number % START_BATCH == 0:
                    await asyncio.sleep(0)
            await asyncio.wait(lives)
            bound.cancel()
        return max(self._codes, default=0)

    def stopping(self) -> bool:
        """Return whether the process is shutting down, so that workers that end are not restarted."""
        return self._stop.wanted.is_set() or self._broken

    def fail(self, error: Exception) -> None:
        """End all workers and the process after `error`, because the failed callback may belong to any worker."""
        for worker in self.workers:
            worker.fail(broken("a callback of the event loop", error))
        self._broken = True

    async def _run_lives(self, number: int) -> None:
        """Run one worker, instance after instance, until the process stops or its first start fails."""
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
        """Run one instance and return its exit code; None if it failed to start."""
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
        """End the process if its workers do not end in time after a stop request.

        A worker that shares its process does not do this on its own, because it would end the other workers too.
        """
        await self._stop.wanted.wait()
        grace_s = max(worker.config.grace_s for worker in self.workers)
        timer = exit_within(grace_s + CLEANUP_S + LEAVE_S, BROKE)
        try:
            await asyncio.Event().wait()
        finally:
            timer.cancel()
