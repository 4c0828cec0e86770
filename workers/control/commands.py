"""What the controller asks of a worker: to drain, to come back, to fill less of its batch, to play a fault.

Requests may be repeated and may be late: a drain that runs is not begun again, and one that was meant for an earlier life
of this worker is refused. So is one to stop or to break that is only heard after its time, by a worker that had been hung:
who asked for it was told that it failed.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from typing import Any, Protocol

import structlog

from events import subjects
from events.errors import HoldfastError
from events.journal.port import Journal
from events.nats.bus import Handler
from events.observations import DrainFinished
from workers.config.worker import WorkerConfig
from workers.control.body import number, share
from workers.control.chaos import RehearsedFaults
from workers.engines.engine import Engine
from workers.server import WorkerServer
from workers.shutdown import DRAINING, drain

CONVICTED = "convicted"  # a doubt of `Trust`
DRAIN_S = 60.0  # where the request names no deadline

log = structlog.get_logger(__name__)


class WrongInstance(HoldfastError):
    """This worker has another life now; the request was meant for an earlier one."""


class HeardTooLate(HoldfastError):
    """This worker has heard of it too late: who asked for it was told that it failed."""


class CommandedWorker(Protocol):
    """What a worker does when it is asked, besides what its server and its engine do."""

    async def say_beat(self) -> None:
        """Tell the fleet how it fares, now."""

    def retire(self) -> None:
        """End: the fleet holds it for dead."""

    def told_to_stop(self) -> None:
        """Shut down in good order."""


class WorkerCommands:
    """Does what is asked, through the server and the engine."""

    def __init__(
        self,
        config: WorkerConfig,
        engine: Engine,
        server: WorkerServer,
        journal: Journal,
        worker: CommandedWorker,
        faults: RehearsedFaults,
    ) -> None:
        self._config = config
        self._engine = engine
        self._server = server
        self._journal = journal
        self._worker = worker
        self._faults = faults
        self.batch_share = 1.0  # of its batch that it may fill
        self._drain: asyncio.Task[None] | None = None
        self._log = log.bind(worker=config.name, instance=config.instance)

    @property
    def by_subject(self) -> dict[str, Handler]:
        """What is done at a request on each subject."""
        name = self._config.name
        return {
            subjects.drain(name): self.on_drain,
            subjects.resume(name): self.on_resume,
            subjects.chaos(name): self.on_chaos,
            subjects.retire(name): self.on_retire,
            subjects.stop(name): self.on_stop,
            subjects.distrust(name): self.on_distrust,
            subjects.batch(name): self.on_batch,
        }

    def heeds(self, subject: str) -> bool:
        """Whether a request on this subject is answered: one that is hung hears of nothing but faults, and of its death,
        which ends it as SIGKILL ends a process that is stopped."""
        name = self._config.name
        return not self._faults.hung or subject in (subjects.chaos(name), subjects.retire(name))

    async def check_time(self, until: str) -> None:
        """Raise HeardTooLate after `until`, an ISO instant by the clock that stamps the journal; JournalUnavailable if that
        cannot be asked."""
        if (await self._journal.end()).at > datetime.fromisoformat(until):
            raise HeardTooLate

    def stop(self) -> None:
        """Leave a drain to whoever ends the worker now."""
        if self._drain is not None:
            self._drain.cancel()
        self._faults.stop()

    def on_drain(self, subject: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Begin to drain, or say how far it has got. Repeating the request changes nothing."""
        self._check_instance(body)
        if not self._server.draining:
            deadline_s = number(body, "deadline_s", DRAIN_S)
            self._server.refuse(DRAINING)
            self._drain = asyncio.ensure_future(self._drain_until(deadline_s))
        return {"draining": True, "in_flight": self._server.in_flight}

    async def _drain_until(self, deadline_s: float) -> None:
        self._log.info("drain_began", deadline_s=deadline_s, in_flight=self._server.in_flight)
        await self._worker.say_beat()
        drained = await drain(self._server, DRAINING, deadline_s)
        self._journal.observe(
            DrainFinished(worker=self._config.name, instance=self._config.instance, **asdict(drained))
        )
        self._log.info("drain_finished", **asdict(drained))

    def on_resume(self, subject: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Take requests again, unless the process is on its way out."""
        self._check_instance(body)
        if self._server.refusal is DRAINING:
            if self._drain is not None:
                self._drain.cancel()
            self._server.refuse(None)
            self._log.info("resumed")
        return {"draining": self._server.draining, "in_flight": self._server.in_flight}

    def on_retire(self, subject: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """End this process: the fleet holds this instance for dead, and only a new one lives."""
        self._check_instance(body)
        self._worker.retire()
        return {"retired": True}

    def on_stop(self, subject: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Shut down in good order, as at SIGTERM: an operator restarts this worker."""
        self._check_instance(body)
        self._worker.told_to_stop()
        return {"stopping": True, "in_flight": self._server.in_flight}

    def on_distrust(self, subject: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send no KV cache to anybody, and use none of what was computed before: the fleet has convicted this worker of
        wrong answers. Without a reason: it may again, for what it computes from now on."""
        self._check_instance(body)
        trust, output = self._server.moves.trust, self._server.output
        reason = str(body.get("reason") or "")
        if bool(reason) is not (CONVICTED in trust.doubts):
            self._engine.trust(not reason)
        if reason:
            output.distrust(CONVICTED, f"the source is convicted: {reason}")
        else:
            trust.regain(CONVICTED)
        return {"convicted": CONVICTED in trust.doubts}

    def on_batch(self, subject: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Run no more than a share of the batch at once, as the model's degradation level has it; 1: all of it. What runs is not
        stopped. Raise BadRequest of a share that is none."""
        self._check_instance(body)
        wanted = share(body, "share")
        if wanted != self.batch_share:
            self._engine.limit_batch(wanted)
            self._log.info("batch_limited", share=wanted)
        self.batch_share = wanted
        return {"batch": wanted}

    def _check_instance(self, body: Mapping[str, Any]) -> None:
        wanted = body.get("instance")
        if wanted not in (None, self._config.instance):
            raise WrongInstance(
                f"{wanted} is gone; worker {self._config.name} is {self._config.instance} now"
            )

    def on_chaos(self, subject: str, body: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Play a fault, as `RehearsedFaults.play` says."""
        return self._faults.play(body)
