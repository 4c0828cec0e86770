"""Makes the world agree with the fold: workers that are to drain are told so, those that are resumed, and those whose
instance was declared dead and that live all the same: DEAD is for ever, also when it was forgotten, so such a process ends,
and its successor joins. One that hangs among others of its process, which are heard, is told so too: it ends alone, and
nobody could signal it.
So does one whose name another process took and left again; as long as that one lives, two would take it from each other.
One that is convicted of wrong answers, or whose device failed, is told that too: it sends its KV caches nowhere.
And each is told how much of its batch it may fill at its model's degradation level: there is one level for all of them.

It keeps no position and needs none: it compares what the fold wants with what the worker's beats say, and tells the
worker until they agree. Telling it twice changes nothing. A worker that does not answer is asked again, less and
less often; that it is gone is for others to say.
"""

import asyncio
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import structlog

from controller.deciders.fleet import Worker
from controller.deciders.health_state import ENGINE, SILENT
from controller.ports import Clock
from controller.runtime.beats import Beats
from controller.runtime.canary.loop import View
from controller.runtime.settings import ActuatorSettings
from events import subjects
from events.decisions import DegradationChanged, HealthStatus, WorkerDecision
from events.fact import Recorded
from events.intrusion.control_message import control
from events.nats.bus import Bus, BusUnavailable, NoAnswer
from events.observations import ResumeRequested

BEAT_FRESH_S = 3.0
DEADLINE_S_MIN = 0.1
CONFIRMED_S = 2.0  # how long a worker that has agreed has until its beats show it

ActuatorCommand = Literal["drain", "resume", "retire", "distrust", "trust", "batch"]
SUBJECTS: dict[ActuatorCommand, Callable[[str], str]] = {
    "drain": subjects.drain,
    "resume": subjects.resume,
    "retire": subjects.retire,
    "distrust": subjects.distrust,
    "trust": subjects.distrust,
    "batch": subjects.batch,
}

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Try:
    """What one instance is being told."""

    instance: str
    command: ActuatorCommand
    share: float  # of its batch that it may fill
    next_at: float = 0.0
    wait_s: float = 0.0
    told: bool = False  # it has confirmed; its beats will show it

    @property
    def wish(self) -> tuple[str, ActuatorCommand, float]:
        """What it is told, so far as that is another wish."""
        return self.instance, self.command, self.share if self.command == "batch" else 1.0


class Actuator:
    """Tells workers what the fleet wants of them, while its controller leads."""

    def __init__(
        self,
        view: View,
        beats: Beats,
        bus: Bus,
        clock: Clock,
        settings: ActuatorSettings,
        leading: Callable[[], bool],
    ) -> None:
        self._view = view
        self._beats = beats
        self._bus = bus
        self._clock = clock
        self._settings = settings
        self._leading = leading
        self._tries: dict[str, _Try] = {}
        self._changed = asyncio.Event()  # a flag: the fold has moved
        view.listen(self._heard)

    def _heard(self, view: Any, batch: Sequence[Recorded]) -> None:
        if any(
            isinstance(recorded.fact, WorkerDecision | ResumeRequested | DegradationChanged)
            for recorded in batch
        ):
            self._changed.set()

    async def run(self) -> None:
        """Compare and tell until cancelled."""
        while True:
            self._changed.clear()
            if self._leading():
                await asyncio.gather(*(self._tell(name, command) for name, command in self._due().items()))
            await self._wait()

    async def _wait(self) -> None:
        """Wait until the fold moves, but look at the beats again before long."""
        timer = asyncio.ensure_future(self._clock.sleep(self._settings.retry_s))
        moved = asyncio.ensure_future(self._changed.wait())
        try:
            await asyncio.wait((timer, moved), return_when=asyncio.FIRST_COMPLETED)
        finally:
            timer.cancel()
            moved.cancel()
            await asyncio.gather(timer, moved, return_exceptions=True)

    def _due(self) -> dict[str, ActuatorCommand]:
        """Return what is wanted of whom, where the world does not agree yet and it is time to say so again."""
        found: dict[str, ActuatorCommand] = {}
        workers = {**self._view.fleet.departed, **self._view.fleet.workers}
        for name in self._tries.keys() - workers.keys():
            del self._tries[name]
        lost = any(not worker.alive and not worker.health.exit.left for worker in workers.values())
        heard = self._processes() if lost else set()
        for name, worker in workers.items():
            instance, command = worker.joined.instance, self._command(worker, heard)
            if command is None and not worker.alive:
                instance, command = self._displaced(worker)
            known = self._tries.get(name)
            if command is None:
                self._tries.pop(name, None)
                continue
            trying = _Try(instance, command, self._share(worker))
            if known is None or known.wish != trying.wish:
                known = self._tries[name] = trying
            if self._clock.monotonic() >= known.next_at:
                found[name] = command
        return found

    def _command(self, worker: Worker, heard: Container[tuple[str, int]]) -> ActuatorCommand | None:
        """Return what the worker must be told; None if its last beat agrees, or if there is nobody to tell. `heard`: processes
        that live, by one of their workers."""
        health = worker.health
        beat = self._beats.fresh(worker.joined.worker, worker.joined.instance, BEAT_FRESH_S)
        if not worker.alive:
            lives = beat is not None or _process(worker) in heard
            return "retire" if lives and not health.exit.left else None
        if beat is not None and beat.convicted is not bool(_doubts(worker)):
            return "trust" if beat.convicted else "distrust"
        draining = worker.drain.active or (health.status is HealthStatus.DRAINING and not health.exit.resumed)
        if draining:
            return None if beat is not None and beat.draining else "drain"
        if beat is not None and beat.draining and not health.exit.leaving:
            return "resume"
        limited = beat is not None and beat.batch is not None and beat.batch != self._share(worker)
        return "batch" if limited else None

    def _share(self, worker: Worker) -> float:
        """Return how much of its batch a worker may fill."""
        models = self._view.fleet.models
        model = models.get(worker.joined.model)
        return 1.0 if model is None else model.knobs.batch_size

    def _processes(self) -> set[tuple[str, int]]:
        """Return the processes that are heard of, though perhaps not from all of their workers."""
        workers, fresh = self._view.fleet.workers, self._beats.fresh
        heard = (w for n, w in workers.items() if fresh(n, w.joined.instance, BEAT_FRESH_S) is not None)
        return {_process(worker) for worker in heard if worker.joined.topology.host}

    def _displaced(self, worker: Worker) -> tuple[str, ActuatorCommand | None]:
        """Return a former instance of a dead worker that lives all the same, and that it is to end."""
        name, past = worker.joined.worker, worker.past
        lives = [one for one in past if self._beats.fresh(name, one, BEAT_FRESH_S) is not None]
        return (lives[-1], "retire") if lives else ("", None)

    async def _tell(self, name: str, command: ActuatorCommand) -> None:
        fleet, trying = self._view.fleet, self._tries[name]
        worker = fleet.remembered(name)
        assert worker is not None, "it was due a moment ago"
        body: dict[str, Any] = {}
        subject = SUBJECTS[command](name)
        if command in ("distrust", "trust"):
            body["reason"] = ", ".join(_doubts(worker))
        if command == "batch":
            body["share"] = trying.share
        if command == "drain" and worker.drain.deadline is not None:
            left = (worker.drain.deadline - self._clock.now()).total_seconds()
            body["deadline_s"] = max(left, DEADLINE_S_MIN)
        body = control(subject.split(".")[1], name, trying.instance, "actuator", body)
        try:
            answer = await self._bus.request(subject, body, self._settings.answer_s)
            refusal = str(answer.get("error") or "")
        except (BusUnavailable, NoAnswer) as error:
            refusal = str(error)
        s = self._settings
        least = s.retry_s if refusal else max(s.retry_s, CONFIRMED_S)
        trying.wait_s = min(max(trying.wait_s * 2, least), s.retry_max_s)
        trying.next_at = self._clock.monotonic() + trying.wait_s
        if refusal:
            log.warning("worker_not_told", worker=name, wish=command, why=refusal)
        elif not trying.told:
            trying.told = True
            log.info("worker_told", worker=name, wish=command)


def _process(worker: Worker) -> tuple[str, int]:
    return worker.joined.topology.host, worker.joined.pid


def _doubts(worker: Worker) -> tuple[str, ...]:
    """Return what says that this worker may have computed wrongly: not that it was silent, nor that its engine ended."""
    return tuple(one for one in worker.health.convictions if one not in (SILENT, ENGINE))
