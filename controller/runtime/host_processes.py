"""Checks and signals workers' processes on this host; reports processes that outlive a dead instance.

A worker registers its pid, and a compromised worker can register a false pid. So before a signal is sent, two things are checked.
The process must run as the controller's user, and it must be this worker's process. If `holdfast up` has started the process, the
process's environment names the instance. Otherwise the command line is checked, which must start a worker of this name.

A pid does not identify a process, because the system reuses pids. So a process that began after the instance had joined is not
the worker's process. A process that has ended keeps its pid until its parent collects the exit status. Such a process, a zombie,
counts as not alive.
"""

import asyncio
import os
import platform
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import psutil
import structlog

from controller.deciders.worker import LONG_AGO, Worker
from controller.ports import Clock
from controller.runtime.beats import Beats, Life
from controller.runtime.command_answers import NotPossible
from controller.runtime.view import View
from events.broker_users import account_of, names
from events.intrusion.reports import ReportIntrusion, not_reported
from events.intrusion.source_rule import COUNT_MAX
from events.journal.port import Journal
from events.observations import WorkerLingered

CLOCKS_S = 10.0  # seconds by which the journal's clock may lag this host's clock


def began_at(pid: int) -> float | None:
    """Return when a process began, in seconds since 1970; None if it is not alive, 0.0 if its start cannot be read."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else float(process.create_time())
    except psutil.AccessDenied:
        return 0.0  # the process is alive, but another user's, so that its start cannot be read
    except psutil.Error:
        return None


INSTANCE = "HOLDFAST_WORKER_INSTANCE"  # in the environment of a process that `holdfast up` has started
ENTRIES = ("holdfast", "controller.cli", "workers.cli")
VARIABLES = "HOLDFAST_WORKER_"
DEFAULT_NAME = "w0"  # of `holdfast worker`, without --name


def why_foreign(worker: Worker, pid: int) -> str:
    """Return why a process cannot be this worker's, judged by the process's user, environment and command line.

    "" if it may be this worker's process, or has ended.
    """
    joined = worker.joined
    try:
        process = psutil.Process(pid)
        if process.uids().effective != os.geteuid():
            return "it runs as another user"
        environment, words = process.environ(), process.cmdline()
    except psutil.NoSuchProcess:
        return ""  # the process has ended, so no signal can reach it
    except psutil.Error as error:
        return f"it cannot be inspected: {type(error).__name__}"
    life = environment.get(INSTANCE, "")
    if life:
        own = joined.instance == life or joined.instance.startswith(f"{life}-")
        return "" if own else "it is another worker's"
    ours = any(word.rpartition("/")[2] in ENTRIES for word in words) and "worker" in words
    if not ours:
        return "its command line is no worker's"
    if _setting(words, environment, "UPSTREAMS", ("--upstreams",)):
        return ""  # its workers have the names of its file, which may have changed since
    own = joined.worker in _names(words, environment)
    return "" if own else "it is another worker's, by the name that it was started with"


def _names(words: Sequence[str], environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of the workers that a `holdfast worker` process runs, by its command line and environment."""
    first = _setting(words, environment, "NAME", ("--name",)) or DEFAULT_NAME
    count = _setting(words, environment, "COUNT", ("--count", "--num-workers"))
    return names(first, min(int(count[:9]), COUNT_MAX) if count.isdecimal() else 1)


def _setting(
    words: Sequence[str], environment: Mapping[str, str], variable: str, flags: tuple[str, ...]
) -> str:
    """Return a setting's value as `holdfast worker` would parse it; "" if it is not set.

    The last of the `flags` on the command line overrides the environment variable.
    """
    value = environment.get(VARIABLES + variable, "")
    for n, word in enumerate(words):
        flag, separator, text = word.partition("=")
        if flag in flags:
            value = text if separator else words[n + 1] if n + 1 < len(words) else value
    return value


@dataclass(frozen=True, slots=True)
class HostProcesses:
    """Inspects and signals the worker processes of this host."""

    host: str = platform.node()
    began_at: Callable[[int], float | None] = began_at
    signal: Callable[[int, int], None] = os.kill
    report: ReportIntrusion = not_reported

    def here(self, worker: Worker) -> bool:
        """Return whether a worker runs, or ran, on this host."""
        return worker.joined.topology.host in ("", self.host)

    def next_life(self, worker: Worker) -> str:
        """Return a clause for an error message: how a worker with a dead instance can run again."""
        if self.live(worker):
            pid = worker.joined.pid
            return f"its process {pid} still lives: `holdfast restart {worker.joined.worker}` ends it"
        return "its next instance joins when its supervisor has started one"

    def live(self, worker: Worker) -> bool:
        """Return whether the process of a worker's current instance is on this host and alive."""
        return self.here(worker) and not self._missing(worker)

    def send(self, worker: Worker, number: int) -> None:
        """Send signal `number` to a worker's process.

        Raise NotPossible if the process is on another host, has ended, or is not the worker's. A process that is not the worker's
        is also reported as an intrusion attempt.
        """
        joined = worker.joined
        if not self.here(worker):
            raise NotPossible(
                f"{joined.worker} runs on {joined.topology.host}; signals reach only processes on {self.host}"
            )
        if why := self._missing(worker):
            raise NotPossible(f"process {joined.pid} of {joined.worker}: {why}")
        if why := self._foreign(worker):
            tried = f"have process {joined.pid} signalled, which is not its own: {why}"
            account = account_of(joined.worker, joined.account)
            self.report(account, tried, worker=joined.worker, instance=joined.instance)
            raise NotPossible(f"process {joined.pid}, registered by {joined.worker}, is not its own: {why}")
        try:
            self.signal(joined.pid, number)
        except OSError as error:
            raise NotPossible(f"process {joined.pid} of {joined.worker}: {error.strerror}") from error

    def _foreign(self, worker: Worker) -> str:
        """Return why the process that a worker has registered is not the worker's; "" if it may be.

        Always "" if a test replaces `began_at`, because the test's processes have no command lines.
        """
        return why_foreign(worker, worker.joined.pid) if self.began_at is began_at else ""

    def _missing(self, worker: Worker) -> str:
        """Return why the worker's process no longer exists; "" if it exists.

        If the process with the registered pid began after the instance had joined, it is another process.
        """
        began = self.began_at(worker.joined.pid)
        if began is None:
            return "No such process"
        known = worker.joined_at > LONG_AGO  # a snapshot of an older release may lack the time of joining
        late = known and began > worker.joined_at.timestamp() + CLOCKS_S
        return "another process has this pid now" if late else ""


LOOK_S = 5.0
LINGERS_AFTER_S = 15.0  # `holdfast up` ends a process in a third of this time
BEAT_FRESH_S = 3.0
TOGETHER = 64  # number of workers checked concurrently

log = structlog.get_logger(__name__)


@dataclass(eq=False)
class Lingering:
    """Records one WorkerLingered for each dead instance with a process that still runs, while this controller leads.

    The states of a dead instance:

        DEAD ── its process is seen for LINGERS_AFTER_S ──▶ lingers ── the process ends, or a successor joins ──▶ dropped

    `holdfast up` ends the process of a dead instance within GRACE_S of the decision that the instance is dead. The actuator
    also commands the process to end. A suspended process (SIGSTOP) obeys this command once it runs again. Other supervisors
    wait for a process to end by itself, which a suspended or hung process never does. Then no successor starts, so an operator
    must be notified.

    Missing heartbeats do not prove that a process has ended, because a hung process sends none either. If a worker is on this
    controller's host, the process itself is the evidence. For a worker on another host, an open port is the evidence: the
    operating system keeps a port open as long as its process exists, hung or not.
    """

    view: View
    beats: Beats
    journal: Journal
    processes: HostProcesses
    port_open: Callable[[str], Awaitable[bool]]  # whether a process listens at a worker's URL
    clock: Clock
    leading: Callable[[], bool]

    def __post_init__(self) -> None:
        # by dead instance: the monotonic time when its process was first seen
        self._since: dict[Life, float] = {}
        self._reported: set[Life] = set()

    @property
    def count(self) -> int:
        """Number of lingering instances."""
        return len(self._reported)

    async def run(self) -> None:
        """Check all dead instances every LOOK_S, until cancelled."""
        while True:
            await self.look()
            await self.clock.sleep(LOOK_S)

    async def look(self) -> None:
        """Check all dead instances once."""
        fleet = self.view.fleet  # `departed` has the dead workers that were removed from the fleet since
        workers = {**fleet.departed, **fleet.workers} if self.leading() else {}
        dead = [worker for worker in workers.values() if not worker.alive and not worker.health.exit.left]
        seen = {_life(worker): (worker, evidence) for worker, evidence in await self._evidence(dead)}
        now = self.clock.monotonic()
        self._since = {life: self._since.get(life, now) for life in seen}
        self._reported &= seen.keys()
        for life, (worker, evidence) in seen.items():
            if now - self._since[life] >= LINGERS_AFTER_S and life not in self._reported:
                self._reported.add(life)
                self._report(worker, evidence, now - self._since[life])

    async def _evidence(self, dead: list[Worker]) -> Iterable[tuple[Worker, str]]:
        """Return the dead workers that still have a process, each with the kind of evidence: "beat", "process" or "port"."""
        places = asyncio.Semaphore(TOGETHER)

        async def of(worker: Worker) -> tuple[Worker, str]:
            async with places:
                return worker, await self._evidence_of(worker)

        return [(worker, shown) for worker, shown in await asyncio.gather(*map(of, dead)) if shown]

    async def _evidence_of(self, worker: Worker) -> str:
        if self.beats.fresh(*_life(worker), BEAT_FRESH_S) is not None:
            return "beat"
        if self.processes.here(worker):
            return "process" if self.processes.live(worker) else ""
        url = worker.joined.url
        workers = self.view.fleet.workers
        if any(other.joined.url == url and name != worker.joined.worker for name, other in workers.items()):
            return ""  # another worker uses the port now, so an open port proves nothing
        return "port" if await self.port_open(url) else ""

    def _report(self, worker: Worker, evidence: str, seconds: float) -> None:
        joined = worker.joined
        log.warning("worker_lingers", worker=joined.worker, pid=joined.pid, evidence=evidence)
        self.journal.observe(
            WorkerLingered(
                worker=joined.worker,
                instance=joined.instance,
                pid=joined.pid,
                host=joined.topology.host,
                evidence=evidence,
                dead_s=round(seconds, 3),
                observer=self.journal.source,
            )
        )


def _life(worker: Worker) -> Life:
    return worker.joined.worker, worker.joined.instance
