"""Level-triggered actuator: sends workers commands until their heartbeats match the fleet state.

The actuator:

- commands workers to drain and to resume;
- ends an instance that was declared dead but still runs, so that the worker's next instance can join. The health status DEAD is
  final, even after the worker was removed from the fleet. The instance is ended by a command, because a signal would end all
  workers in its process;
- ends a former instance that still runs, if the worker's current instance has left or is dead. Otherwise this former instance
  and the worker's next instance would displace each other again and again;
- notifies a worker that was convicted of wrong answers or of a failed device. The worker then sends no KV caches to others;
- limits how much of its engine's batch size each worker may fill (a share from 0 to 1). The share follows from the degradation
  level of the worker's model.

The actuator keeps no position on the journal. It compares the fleet state (folded from the journal) with the heartbeats, and
repeats a command until the two agree. Commands are idempotent. If a worker does not answer, the actuator repeats the command
with backoff. Other components decide whether the worker is dead.
"""

import asyncio
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Literal

import structlog

from controller.deciders.fleet import Worker
from controller.deciders.health_state import ENGINE, SILENT
from controller.ports import Clock
from controller.runtime.beats import Beats
from controller.runtime.bounded_read import pause
from controller.runtime.settings import ActuatorSettings
from controller.runtime.view import View
from events import subjects
from events.decisions import DegradationChanged, HealthStatus, WorkerDecision
from events.fact import Recorded
from events.intrusion.control_message import control
from events.nats.bus import Bus, BusUnavailable, NoAnswer
from events.observations import ResumeRequested
from events.subjects import Verb

BEAT_FRESH_S = 3.0
DEADLINE_S_MIN = 0.1
CONFIRMED_S = 2.0  # time that a worker's beats have to show a change, after the worker confirmed the command

ActuatorCommand = Literal["drain", "resume", "retire", "distrust", "trust", "batch"]

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Attempt:
    """The command in progress for one instance."""

    instance: str
    command: ActuatorCommand
    share: float  # share of its batch size that the instance may fill, 0 to 1
    next_at: float = 0.0
    wait_s: float = 0.0
    confirmed: bool = False  # whether the worker has confirmed the command

    @property
    def command_key(self) -> tuple[str, ActuatorCommand, float]:
        """The command's identity. If it changes, the backoff starts again."""
        return self.instance, self.command, self.share if self.command == "batch" else 1.0


@dataclass(eq=False)
class Actuator:
    """Sends workers the commands that the fleet state requires, while this controller leads."""

    view: View
    beats: Beats
    bus: Bus
    clock: Clock
    settings: ActuatorSettings
    leading: Callable[[], bool]

    def __post_init__(self) -> None:
        self._attempts: dict[str, _Attempt] = {}
        self._changed = asyncio.Event()  # set when the fold has changed
        self.view.listen(self._on_batch)

    def _on_batch(self, view: object, batch: Sequence[Recorded]) -> None:
        moving = (WorkerDecision, ResumeRequested, DegradationChanged)
        if any(isinstance(recorded.fact, moving) for recorded in batch):
            self._changed.set()

    async def run(self) -> None:
        """Compare the fleet state with the heartbeats and send commands, until cancelled."""
        while True:
            self._changed.clear()
            if self.leading():
                await asyncio.gather(*(self._send(name, command) for name, command in self._due().items()))
            # compare again after `retry_s`: beats can start to differ although the fold does not change
            await pause(self._changed, self.clock, self.settings.retry_s)

    def _due(self) -> dict[str, ActuatorCommand]:
        """Return the commands to send now, by worker name.

        A command that was sent before is left out until the wait before its next attempt has passed.
        """
        found: dict[str, ActuatorCommand] = {}
        workers = {**self.view.fleet.departed, **self.view.fleet.workers}
        for name in self._attempts.keys() - workers.keys():
            del self._attempts[name]
        lost = any(not worker.alive and not worker.health.exit.left for worker in workers.values())
        heard = self._processes() if lost else set()
        for name, worker in workers.items():
            instance, command = worker.joined.instance, self._command(worker, heard)
            if command is None and not worker.alive:
                instance, command = self._displaced(worker)
            known = self._attempts.get(name)
            if command is None:
                self._attempts.pop(name, None)
                continue
            attempt = _Attempt(instance, command, self._share(worker))
            if known is None or known.command_key != attempt.command_key:
                known = self._attempts[name] = attempt
            if self.clock.monotonic() >= known.next_at:
                found[name] = command
        return found

    def _command(self, worker: Worker, heard: Container[tuple[str, int]]) -> ActuatorCommand | None:
        """Return the command that the worker needs.

        None if the worker's last heartbeat agrees with the fleet state, or if no process would receive a command. `heard`
        contains the processes (host and pid) that are known to be alive, because one of their workers sent a recent heartbeat.
        """
        beat = self.beats.fresh(worker.joined.worker, worker.joined.instance, BEAT_FRESH_S)
        drains, left = _should_drain(worker), worker.health.exit
        if not worker.alive:
            lives = beat is not None or _process(worker) in heard
            return "retire" if lives and not left.left else None
        if beat is None:
            return "drain" if drains else None
        if beat.convicted is not bool(_doubtful_convictions(worker)):
            return "trust" if beat.convicted else "distrust"
        if drains:
            return None if beat.draining else "drain"
        if beat.draining and not left.leaving:
            return "resume"
        return None if beat.batch in (None, self._share(worker)) else "batch"

    def _share(self, worker: Worker) -> float:
        """Return how much of its engine's batch size a worker may fill, as a share from 0 to 1."""
        models = self.view.fleet.models
        model = models.get(worker.joined.model)
        return 1.0 if model is None else model.knobs.batch_size

    def _processes(self) -> set[tuple[str, int]]:
        """Return the processes (host and pid) with a recent heartbeat from at least one of their workers."""
        workers, fresh = self.view.fleet.workers, self.beats.fresh
        heard = (w for n, w in workers.items() if fresh(n, w.joined.instance, BEAT_FRESH_S) is not None)
        return {_process(worker) for worker in heard if worker.joined.topology.host}

    def _displaced(self, worker: Worker) -> tuple[str, ActuatorCommand | None]:
        """Return the latest former instance that still sends heartbeats, and the command that ends it.

        ("", None) if no former instance sends heartbeats. Called for a worker if its current instance has left or is dead.
        """
        name, past = worker.joined.worker, worker.past
        lives = [one for one in past if self.beats.fresh(name, one, BEAT_FRESH_S) is not None]
        return (lives[-1], "retire") if lives else ("", None)

    async def _send(self, name: str, command: ActuatorCommand) -> None:
        fleet, attempt = self.view.fleet, self._attempts[name]
        worker = fleet.remembered(name)
        assert worker is not None, "_due() returned it a moment ago"
        body: dict[str, object] = {}
        verb: Verb = "distrust" if command == "trust" else command
        if command in ("distrust", "trust"):
            body["reason"] = ", ".join(_doubtful_convictions(worker))
        if command == "batch":
            body["share"] = attempt.share
        if command == "drain" and worker.drain.deadline is not None:
            left = (worker.drain.deadline - self.clock.now()).total_seconds()
            body["deadline_s"] = max(left, DEADLINE_S_MIN)
        body = control(verb, name, attempt.instance, "actuator", body)
        try:
            answer = await self.bus.request(subjects.command(verb, name), body, self.settings.answer_s)
            refusal = str(answer.get("error") or "")
        except (BusUnavailable, NoAnswer) as error:
            refusal = str(error)
        s = self.settings
        least = s.retry_s if refusal else max(s.retry_s, CONFIRMED_S)
        attempt.wait_s = min(max(attempt.wait_s * 2, least), s.retry_max_s)
        attempt.next_at = self.clock.monotonic() + attempt.wait_s
        if refusal:
            log.warning("worker_not_told", worker=name, wish=command, why=refusal)
        elif not attempt.confirmed:
            attempt.confirmed = True
            log.info("worker_told", worker=name, wish=command)


def _should_drain(worker: Worker) -> bool:
    health = worker.health
    return worker.drain.active or (health.status is HealthStatus.DRAINING and not health.exit.resumed)


def _process(worker: Worker) -> tuple[str, int]:
    return worker.joined.topology.host, worker.joined.pid


def _doubtful_convictions(worker: Worker) -> tuple[str, ...]:
    """Return the convictions that put the worker's computed values in doubt.

    These are all convictions except SILENT (the worker sent nothing) and ENGINE (its engine failed).
    """
    return tuple(one for one in worker.health.charges.convictions if one not in (SILENT, ENGINE))
