"""Many workers in one process: each lives, dies and comes back as if it had a process of its own.

    serving ──┬── killed by a rehearsal: says nothing; we say that it left, as a supervisor of processes does ──┐
       ▲      ├── it cannot go on, or is restarted: it has said so itself ───────────────────────────────────────┤
       │      └── the process stops: it leaves in good order, and is over                                        │
       └───────────────────── a new instance of the same name, after a back-off ◀────────────────────────────────┘

They share what is the process's: the connection to the broker, the journal and its spool, the admin port, the event loop.
What strikes the process (SIGKILL, an error in a callback of the loop) strikes all of them. One that does not even start
ends the process, like a single worker that does not start: its successors are tried again and again.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from events.codec import new_id
from events.errors import HoldfastError
from events.journal.port import Journal
from events.observations import WorkerLeft
from workers.config.worker import WorkerConfig
from workers.exits import BROKE, FELL, KILLED, exit_within
from workers.falls import broken
from workers.shutdown import CLEANUP_S, Stop
from workers.worker import InferenceWorker, say_why_not

TOGETHER = 8  # begin in one turn of the loop: 10 ms
LEAVE_S = 30.0  # for a thousand that say at once that they leave, beyond the grace of each


@dataclass(frozen=True, slots=True, kw_only=True)
class BackOff:
    """How long is waited before a successor starts, in seconds."""

    wait_s_min: float = 0.2  # doubles with each life that is short
    wait_s_max: float = 10.0
    settled_s: float = 3.0  # a life longer than this was no failure to start


class Many:
    """The workers of one process, each with its present life. `make` builds a worker."""

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
        self.workers = [
            make(config) for config in configs
        ]  # a successor takes its predecessor's position in here
        self._make = make
        self._stagger_s = stagger_s
        self._journal = journal
        self._stop = stop
        self._broken = False  # the event loop is not to be trusted any more
        self._codes: list[int] = []  # of lives after which there is no other

    async def run(self) -> int:
        """Let all of them live until the process is told to stop; return its exit code."""
        async with asyncio.TaskGroup() as group:
            bound = group.create_task(self._bound_stop())
            lives = []
            for number in range(len(self.workers)):
                lives.append(group.create_task(self._lives(number)))
                if self._stagger_s and await self._stopped_within(self._stagger_s):
                    break
                if number % TOGETHER == 0:  # those that serve must not fall silent while the others start
                    await asyncio.sleep(0)
            await asyncio.wait(lives)
            bound.cancel()
        return max(self._codes, default=0)

    def stopping(self) -> bool:
        """Return whether the process is on its way out: whoever ends now has no successor."""
        return self._stop.wanted.is_set() or self._broken

    def fail(self, error: Exception) -> None:
        """End all of them, and the process: a callback of the event loop failed, and nobody knows whose."""
        for worker in self.workers:
            worker.fail(broken("a callback of the event loop", error))
        self._broken = True

    async def _lives(self, number: int) -> None:
        """Live, again and again."""
        loop, waits, first = asyncio.get_running_loop(), self._back_off, True
        wait_s = waits.wait_s_min
        while True:
            began, code = loop.time(), await self._life(self.workers[number])
            if self.stopping() or (first and code is None):
                self._codes.append(FELL if code is None else code % KILLED)
                self._stop.wanted.set()
                return
            wait_s = waits.wait_s_min if loop.time() - began > waits.settled_s else wait_s
            if await self._stopped_within(wait_s):
                return
            wait_s, first = min(2 * wait_s, waits.wait_s_max), False
            self.workers[number] = self._make(
                replace(self.workers[number].config, instance=new_id(), name_check_s=0.0)
            )

    async def _life(self, worker: InferenceWorker) -> int | None:
        """Return how a life ended, as a process's exit code; None if it never began."""
        living = asyncio.ensure_future(worker.run(self._stop.wanted, self._stop.hurried))
        try:
            await asyncio.wait((living,))
            code = living.result()
        except HoldfastError as error:
            say_why_not(worker, error)
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
        """End the process if its workers' ends do not come to an end: none of them may do that alone."""
        await self._stop.wanted.wait()
        grace_s = max(worker.config.grace_s for worker in self.workers)
        timer = exit_within(grace_s + CLEANUP_S + LEAVE_S, BROKE)
        try:
            await asyncio.Event().wait()
        finally:
            timer.cancel()
