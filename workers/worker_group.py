"""Runs many workers in one process. Each worker starts, ends and restarts as if it were alone.

    serving ──┬── killed by a rehearsal: `Many` records that it left, as a supervisor of processes would ──┐
       ▲      ├── it fails or is restarted: it has recorded its own end ───────────────────────────────────┤
       │      └── the process stops: it leaves gracefully, and is over                                     │
       └───────────────────── a new instance of the same name, after a back-off ◀──────────────────────────┘

The diagram shows the states of one worker. The workers share the process's connection to the broker, its journal and spool, its
admin port and its event loop. A failure of the process (SIGKILL, an error in a callback of the loop) ends all workers. If a
worker's first start fails, the process ends. Later starts are retried without limit.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from events.codec import new_id
from events.errors import HoldfastError
from events.journal.port import JournalReports
from events.observations import WorkerLeft
from workers.config.settings import WorkerConfig
from workers.exits import BROKE, FAILED, KILLED, RENEWED
from workers.shutdown import CLEANUP_S, Stop, broken, or_exit
from workers.worker import InferenceWorker, report_start_failure

START_BATCH = 8  # workers started before the event loop serves others again; their start takes 10 ms
LEAVE_S = 30.0  # time beyond the grace period, in which a thousand workers record their end


@dataclass(frozen=True, slots=True, kw_only=True)
class BackOff:
    """Waiting times in seconds before a failed worker is restarted."""

    wait_s_min: float = 0.2  # doubles with each failed start
    wait_s_max: float = 10.0
    settled_s: float = 3.0  # an instance that ran longer resets the waiting time to its minimum


class Many:
    """Runs the workers of one process and restarts each one that ends. `make` builds the next instance of a worker."""

    def __init__(
        self,
        configs: Sequence[WorkerConfig],
        make: Callable[[WorkerConfig], InferenceWorker],
        journal: JournalReports,
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
        """Run all workers until the process stops. Return the highest of their exit codes as the process's exit code."""
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
        """Return whether the process is shutting down. Workers that end are then not restarted."""
        return self._stop.wanted.is_set() or self._broken

    def fail(self, error: Exception) -> None:
        """End all workers and the process after `error`, because the failed callback may belong to any worker."""
        for worker in self.workers:
            worker.fail(broken("a callback of the event loop", error))
        self._broken = True

    async def _run_lives(self, number: int) -> None:
        """Run one worker, instance after instance, until the process stops or the worker's first start fails."""
        loop, back_off, first = asyncio.get_running_loop(), self._back_off, True
        wait_s = back_off.wait_s_min
        while True:
            began, code = loop.time(), await self._run_life(self.workers[number])
            if self.stopping() or (first and code is None):
                orderly = code in (KILLED, RENEWED)  # the process would otherwise start the next instance
                self._codes.append(0 if orderly else FAILED if code is None else code)
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

        A worker that shares its process does not end the process by itself, because this would end the other workers too.
        """
        await self._stop.wanted.wait()
        grace_s = max(worker.config.grace_s for worker in self.workers)
        with or_exit(grace_s + CLEANUP_S + LEAVE_S, BROKE):
            await asyncio.Event().wait()
