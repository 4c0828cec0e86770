"""Each alert is fired once by its cause, in time, by a real Prometheus that scrapes a broken fleet.

Three scenes share their faults. `workers`: a fleet with failing workers. `planes`: a fleet that loses its broker, database
and controller while `holdfast up`, which would restart them, is stopped; when it continues it restarts them. `parts`: faults that
take days in a fleet. They use a real controller at a broker with a certificate, and the code that reports a full journal and
dropped facts.

The rules are the real ones with their windows shortened to a thirtieth and a sixtieth (`grafana.rules.text`), scraped each
second.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from fleet import client, running
from own_brokers import Start, authority, start
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_server import PrometheusServer, binary, prometheus
from rehearsal import lasts
from waits import turns, until

from benchmarks.local_fleet import LocalFleet
from controller.adapters.clock import SystemClock
from controller.adapters.embedded.free_port import free_port
from controller.adapters.embedded.server import die_with
from controller.deciders.capacity import Slo, worker_capacity
from controller.deciders.fleet import Fleet
from controller.metrics import FleetCollector, JournalMetrics
from controller.processes.controller_admin import serve, url_of
from controller.processes.observability.scrape_targets import http_sd, rule_files
from controller.runtime.storage_usage import JournalRoom
from events.journal.broker import ask
from events.journal.nats import NatsJournal
from events.journal.usage import usage
from events.observations import WorkerHeard
from events.process import presence
from events.process.presence import present
from events.subjects import STREAM
from grafana.rules import ALERTS, rehearsed_duration_s, text
from workers.engines.simulated.engine import SimulatedEngine
from workers.engines.simulated.sequence import EngineShape
from workers.engines.simulated.timing import PREFILL_TOKENS_PER_S, ConstantTiming
from workers.exits import FAILED

SCRAPE_S = 1
CALM_S = 3.0
IN_TIME_S = 30.0  # until a fleet has noticed a fault, however busy this machine is
LATER_S = 60.0  # a lingering process is dead for 15 s before it is reported
ENDS_S = 30.0
BOUND_BYTES, SPOOL, YOUNG = 20 << 20, 10_000, timedelta(seconds=1)

__all__ = ["authority", "start"]  # fixtures


@dataclass(frozen=True, slots=True)
class Row:
    """The step of the scene at which an alert fires."""

    scene: str
    step: str
    within_s: float = IN_TIME_S


TABLE: Mapping[str, Row] = {
    "HoldfastSilentCorruption": Row("workers", "w0 answers wrongly"),
    "HoldfastExposureUnknown": Row("workers", "w0 answers wrongly"),
    "HoldfastWorkersFailing": Row("workers", "w0 answers wrongly"),
    "HoldfastCapacityDegraded": Row("workers", "w0 answers wrongly"),
    "HoldfastPlaceEmpty": Row("workers", "w0 answers wrongly"),
    "HoldfastBreakerFlapping": Row("workers", "w1 fails again and again", LATER_S),
    "HoldfastPanic": Row("workers", "all fail"),
    "HoldfastErrorBudgetBurnFast": Row("workers", "all fail"),
    "HoldfastErrorBudgetBurnSlow": Row("workers", "all fail"),
    "HoldfastStreamsLost": Row("workers", "all are killed"),
    "HoldfastObserverBlind": Row("workers", "three of four are stopped"),
    "HoldfastWorkersMissing": Row("workers", "three of four are stopped"),
    "HoldfastTargetDown": Row("workers", "three of four are stopped"),
    "HoldfastNoRoutableWorker": Row("workers", "all are drained"),
    "HoldfastCapacityCritical": Row("workers", "all are drained"),
    "HoldfastSuspectServing": Row("workers", "all answer wrongly"),
    "HoldfastTokensUnlikely": Row("workers", "all draw nonsense", LATER_S),
    "HoldfastGoldenDisputed": Row("planes", "w1 answers otherwise from the first"),
    "HoldfastWorkerNameTaken": Row("planes", "a second w0 is started"),
    "HoldfastWebhooksFailing": Row("planes", "the webhook is not delivered"),
    "HoldfastRefusals": Row("planes", "too many ask"),
    "HoldfastFirstTokensLateFast": Row("planes", "too many ask"),
    "HoldfastFirstTokensLateSlow": Row("planes", "too many ask"),
    "HoldfastStateStoreStuck": Row("planes", "Postgres is killed"),
    "HoldfastStateStoreBehind": Row("planes", "Postgres is killed"),
    "HoldfastWorkersLingering": Row("planes", "w1 is dead and not ended", LATER_S),
    "HoldfastJournalUnreachable": Row("planes", "NATS is killed"),
    "HoldfastSpoolGrowing": Row("planes", "NATS is killed"),
    "HoldfastNoLeader": Row("planes", "the controller is killed"),
    "HoldfastJournalDiskLow": Row("parts", "a controller is there"),
    "HoldfastCertificateExpiring": Row("parts", "a controller is there"),
    "HoldfastJournalFull": Row("parts", "a journal fills"),
    "HoldfastJournalFullSoon": Row("parts", "a journal fills", LATER_S),
    "HoldfastFactsDropped": Row("parts", "a spool is full"),
}
PATIENCE_S = {alert.name: rehearsed_duration_s(alert) for alert in ALERTS}


def test_each_alert_is_in_the_table() -> None:
    assert TABLE.keys() == PATIENCE_S.keys()


class Scene:
    """A Prometheus that scrapes something broken, and the alerts that have fired, by step."""

    def __init__(self, name: str, server: PrometheusServer) -> None:
        self.name, self.server = name, server
        self._fired: dict[str, float] = {}  # seconds after its step began

    def firing(self) -> set[str]:
        """Return the alerts that fire now."""
        return {one["labels"]["alertname"] for one in self.server.alerts() if one["state"] == "firing"}

    def _pending(self, names: set[str]) -> dict[str, float]:
        """Return for how many seconds the firing ones of these alerts were pending before."""
        firing = [one for one in self.server.alerts() if one["state"] == "firing"]
        found = [one for one in firing if one["labels"]["alertname"] in names]
        return {one["labels"]["alertname"]: s for one in found if (s := self.server.fired(one)) is not None}

    async def calm(self) -> None:
        """Check that nothing fires before anything is broken."""
        await lasts(CALM_S)
        assert not await asyncio.to_thread(self.firing), "a healthy fleet fires no alert"

    async def step(self, name: str, breaks: Callable[[], Awaitable[object]]) -> None:
        """Break something; each of the step's alerts fires in time: after its own waiting time and two more scrapes."""
        wanted = {alert for alert, row in TABLE.items() if (row.scene, row.step) == (self.name, name)}
        assert wanted, f"no alert is fired by {name!r}"
        await self.ends(*wanted)  # alerts of an earlier step
        began = time.time()
        await breaks()

        async def all_fired() -> bool:
            missing = wanted - self._fired.keys()
            for alert, pending_s in (await asyncio.to_thread(self._pending, missing)).items():
                assert pending_s <= PATIENCE_S[alert] + 2 * SCRAPE_S, (alert, pending_s)
                self._fired[alert] = time.time() - began
                print(f"{self.name}: {name}: {alert} after {self._fired[alert]:.1f} s")
            late = {alert for alert in missing if time.time() - began > TABLE[alert].within_s}
            assert not late, f"{name}: {sorted(late)} did not fire; there are {self.server.alerts()}"
            return not wanted - self._fired.keys()

        await until(all_fired, 3600, every_s=SCRAPE_S / 4)  # each alert has its own deadline

    async def ends(self, *alerts: str) -> None:
        """Check that alerts end in time after the repair."""

        async def ended() -> bool:
            return not {*alerts} & await asyncio.to_thread(self.firing)

        await until(ended, ENDS_S, f"the end of {sorted(alerts)}", every_s=SCRAPE_S / 4)

    def whole(self) -> None:
        """Check that all of the scene's alerts have fired."""
        assert self._fired.keys() == {alert for alert, row in TABLE.items() if row.scene == self.name}


@contextlib.contextmanager
def scene(name: str, folder: Path, *admin_ports: int) -> Any:
    """Yield a scene that scrapes the processes listed by these controllers, or by what serves `/sd` like one."""
    (rules := folder / "rules.yaml").write_text(text(rehearsed=True))
    config = http_sd(f"http://127.0.0.1:{port}" for port in admin_ports) + rule_files([str(rules)])
    for slow, quick in (
        ("refresh_interval: 5s", "refresh_interval: 1s"),
        ("scrape_interval: 5s", f"scrape_interval: {SCRAPE_S}s"),
        ("scrape_timeout: 4s", f"scrape_timeout: {SCRAPE_S}s\n  evaluation_interval: {SCRAPE_S}s"),
    ):
        assert slow in config
        config = config.replace(slow, quick)
    with prometheus(folder / "prometheus", config) as server:
        yield Scene(name, server)


@contextlib.asynccontextmanager
async def asking(fleet: LocalFleet, people: int, tokens: int) -> AsyncIterator[None]:
    """Run users that send requests all the time."""

    async def ask(number: int, api: Any) -> None:
        while True:
            with contextlib.suppress(Exception):
                stream = await api.completions.create(
                    model="sim",
                    prompt=[300 + number] * 40,
                    max_tokens=tokens,
                    stream=True,
                    extra_body={"ignore_eos": True},
                )
                async for _ in stream:
                    pass
            await asyncio.sleep(0.05)  # a client's pause after a rejection

    async with client(fleet) as api:
        tasks = [asyncio.create_task(ask(n, api)) for n in range(people)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


ONE = SimulatedEngine(EngineShape(), ConstantTiming(0.02, PREFILL_TOKENS_PER_S)).identity.profile
WORKERS = ("w0", "w1", "w2", "w3")
FLAGS = ("--itl-ms", "20", "--chaos", "--canary-interval", "0.5", "--breaker-wait", "1", "--breaker-backoff", "1",
         "--slo-throughput", str(3.6 * worker_capacity(ONE, Slo()).effective_capacity_rps))  # fmt: skip
QUICK = {
    "HOLDFAST_CONTROLLER__POLICY__HEALTH__DEAD_AFTER": "4",
    "HOLDFAST_CONTROLLER__POLICY__DEGRADATION__DWELL": "1",
    "HOLDFAST_FRONTEND__FACTS__EXPOSURE_ENTRIES_MAX": "1",
    "HOLDFAST_FRONTEND__REROUTE_S": "0.5",
    "HOLDFAST_CONTROLLER__CANARY__TOP_K": "20",  # simulated engines find many tokens about as likely
    "HOLDFAST_CONTROLLER__CANARY__SAMPLED_EVERY": "2",
}


@pytest.mark.attack
async def test_alerts_about_workers_fire(tmp_path: Path) -> None:
    binary()
    port = free_port()
    environment = QUICK | {"HOLDFAST_CONTROLLER__ADMIN_PORT": str(port)}
    async with running(tmp_path / "fleet", "--workers", "4", *FLAGS, environment=environment) as fleet:
        await fleet.healthy(4)

        async def each(verb: str, *workers: str, argument: float | None = None) -> None:
            for worker in workers:
                with contextlib.suppress(Exception):
                    await fleet.act(verb, worker, argument)

        async def flapping() -> None:
            async with asyncio.TaskGroup() as group:
                turning = group.create_task(turn())
                await watched.step("w1 fails again and again", turns)
                turning.cancel()

        async def turn() -> None:
            while True:
                await each("error", "w1", argument=3)
                await asyncio.sleep(2)  # its breaker closes meanwhile

        with scene("workers", tmp_path, port) as watched:
            async with asking(fleet, 16, 60):  # each worker has several: more than a frontend remembers here
                await asyncio.to_thread(watched.server.wait_for, "holdfast_leader")
                await watched.calm()
                await asyncio.gather(
                    watched.step("w0 answers wrongly", lambda: each("corrupt", "w0", argument=2)), flapping()
                )
                await each("heal", *WORKERS)
                await each("resume", *WORKERS)
                await watched.step("all fail", lambda: each("error", *WORKERS))
                await each("heal", *WORKERS)
                await watched.ends("HoldfastPanic")
                await fleet.healthy(4)  # streams are answered: they are to be lost
                await watched.step(
                    "all are killed",  # at once: one after another, the first would recover before the last is killed
                    lambda: asyncio.gather(*(each("kill", worker) for worker in WORKERS)),
                )
                await fleet.healthy(4)
                await watched.ends("HoldfastStreamsLost", "HoldfastWorkersFailing")
                await watched.step("three of four are stopped", lambda: each("hang", *WORKERS[:3]))
                await each("unhang", *WORKERS[:3])
                await watched.ends("HoldfastObserverBlind", "HoldfastTargetDown")
                await watched.step("all are drained", lambda: each("drain", *WORKERS))
                await each("resume", *WORKERS)
                await watched.ends("HoldfastNoRoutableWorker")
                await watched.step("all draw nonsense", lambda: each("sampler", *WORKERS))
                await each("heal", *WORKERS)
                await fleet.healthy(4)
                await watched.step("all answer wrongly", lambda: each("corrupt", *WORKERS, argument=2))
                await each("heal", *WORKERS)
                await each("resume", *WORKERS)
                await watched.ends("HoldfastSuspectServing")
            watched.whole()


PLANES = (
    "--workers",
    "2",
    "--itl-ms",
    "20",
    "--chaos",
    "--canary-interval",
    "0.5",
    "--webhook",
    "http://unused:1",
)
MANY_EVENTS = 1_500
ROOM_FOR_TWO = {
    "HOLDFAST_CONTROLLER__POLICY__HEALTH__DEAD_AFTER": "2",
    "HOLDFAST_CONTROLLER__CANARY__CANARIES": "24",  # of which some are asked for the first time after w1 has gone wrong,
    "HOLDFAST_CONTROLLER__CANARY__TOKENS": "96",  # however long this fleet's start takes
    "HOLDFAST_FRONTEND__ADMISSION__INFLIGHT_MAX": "2",
    "HOLDFAST_FRONTEND__ADMISSION__QUEUE_MAX": "12",
    "HOLDFAST_FRONTEND__FACTS__WINDOW_S": "0.1",
    "HOLDFAST_FRONTEND__FACTS__REJECTED_WINDOW_S": "0.1",
    "HOLDFAST_NOTIFIER__WAIT_MIN_S": "0.2",
}


@pytest.mark.attack
async def test_alerts_about_servers_and_controllers_fire(tmp_path: Path) -> None:
    binary()
    port = free_port()
    environment = ROOM_FOR_TWO | {"HOLDFAST_CONTROLLER__ADMIN_PORT": str(port)}
    with scene("planes", tmp_path, port) as watched:
        async with running(tmp_path / "fleet", *PLANES, environment=environment) as fleet:
            await watched.step("w1 answers otherwise from the first", lambda: fleet.act("corrupt", "w1", 1))
            await watched.step("the webhook is not delivered", turns)
            pids = {process.name: process.pid for process in present(fleet.data)}

            async def second_worker() -> None:
                url, data = fleet.nats_url("worker-w0"), tmp_path / "other"
                command = [
                    sys.executable,
                    "-m",
                    "workers",
                    "--name",
                    "w0",
                    "--nats-url",
                    url,
                    "--data",
                    str(data),
                ]
                newcomer = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)
                assert await newcomer.wait() == FAILED

            await watched.step("a second w0 is started", second_worker)

            async def struck(name: str, number: signal.Signals = signal.SIGKILL) -> None:
                os.kill(pids[name], number)

            async def says_much() -> None:
                await struck("postgres")
                await say(fleet, MANY_EVENTS)

            fleet.process.send_signal(signal.SIGSTOP)
            async with asking(fleet, 24, 40):
                await asyncio.gather(
                    watched.step("w1 is dead and not ended", lambda: struck("w1", signal.SIGSTOP)),
                    watched.step("too many ask", turns),
                    watched.step("Postgres is killed", says_much),
                )
                await watched.step("the controller is killed", lambda: struck("controller"))
                await watched.step("NATS is killed", lambda: struck("nats"))
                fleet.process.send_signal(signal.SIGCONT)
                await watched.ends(
                    "HoldfastNoLeader", "HoldfastJournalUnreachable", "HoldfastSpoolGrowing", "HoldfastStateStoreStuck",
                    "HoldfastStateStoreBehind", "HoldfastWorkersLingering",
                )  # fmt: skip
            await watched.ends("HoldfastRefusals", "HoldfastTargetDown")
            watched.whole()


async def say(fleet: LocalFleet, events: int) -> None:
    """Write this number of events."""
    journal = await NatsJournal.connect(fleet.nats_url("controller"), "controller:flood", None, make=False)
    for number in range(events):
        journal.observe(WorkerHeard(worker="w0", instance=f"none-{number}", observer=journal.source))
    assert await journal.flush(IN_TIME_S)
    await journal.close()


@pytest.mark.attack
async def test_alerts_that_take_days_in_a_fleet_fire(tmp_path: Path, start: Start, authority: str) -> None:
    binary()
    store = f'jetstream {{ store_dir: "{tmp_path / "store"}" }}'
    url = (await start(f"{authority}\n{store}")).url(scheme="tls")
    (data := tmp_path / "data").mkdir(0o700)
    (data / "nats").symlink_to("/proc")  # a disk without free space
    port = free_port()
    command = [sys.executable, "-m", "controller.cli", "controller", "--data", str(data), "--nats-url", url,
               "--admin-port", str(port)]  # fmt: skip

    async def controls() -> None:
        with (data / "log").open("wb") as log:
            said: dict[str, Any] = {"stdout": log, "stderr": log, "preexec_fn": die_with(os.getpid())}
            processes.append(subprocess.Popen(command, **said))  # noqa: ASYNC220 (a fork of 1 ms)

    processes: list[subprocess.Popen[bytes]] = []
    with scene("parts", tmp_path, port) as watched:
        try:
            await watched.step("a controller is there", controls)
            async with asyncio.TaskGroup() as group:
                full = group.create_task(fills(data, url))
                await watched.step("a journal fills", turns)
                full.cancel()
            await drops(data, watched)
            watched.whole()
        finally:
            for process in processes:
                process.kill()
                process.wait()


async def fills(data: Path, url: str) -> None:
    """Write continuously into a stream with a bound at which it refuses more, and expose its metrics."""
    journal = await NatsJournal.connect(url, "controller:filling", None, make=False)
    async with measured(data, "filling") as registry:
        found = await ask(journal.connection, f"STREAM.INFO.{STREAM}")
        bounded = {**found["config"], "max_bytes": BOUND_BYTES, "discard": "new"}
        await ask(journal.connection, f"STREAM.UPDATE.{STREAM}", bounded)
        room = JournalRoom(
            lambda: usage(journal.connection, shortest=YOUNG), data / "elsewhere", SystemClock(), 0.5
        )
        own = lambda: {"journal_reachable": 1.0, **room.known}  # noqa: E731 (one line of a table)
        registry.register(FleetCollector(Fleet, None, own))
        async with asyncio.TaskGroup() as group:
            group.create_task(room.run())
            while True:
                for _ in range(10):
                    journal.observe(WorkerHeard(worker="w0", instance="none", observer=journal.source))
                await asyncio.sleep(0.1)  # the rate at which the journal fills


async def drops(data: Path, watched: Scene) -> None:
    """Publish more than fits into a spool, without a broker."""
    nowhere = f"nats://127.0.0.1:{free_port()}"
    journal = await NatsJournal.connect(
        nowhere, "frontend:dropping", data / "spool" / "full", wait_s=0.1, spool_bytes_max=SPOOL
    )
    async with measured(data, "dropping") as registry:
        registry.register(JournalMetrics(journal))
        await asyncio.to_thread(watched.server.wait_for, 'holdfast_facts_dropped_total{process="dropping"}')

        async def says() -> None:
            for _ in range(100):
                journal.observe(WorkerHeard(worker="w0", instance="none", observer=journal.source))

        await watched.step("a spool is full", says)
    await journal.close()


@contextlib.asynccontextmanager
async def measured(data: Path, name: str) -> AsyncIterator[CollectorRegistry]:
    """Yield a registry that is exposed like a controller's, and listed by the controller of this directory."""
    registry = CollectorRegistry()
    runner = await serve(lambda: generate_latest(registry), dict, "127.0.0.1", 0)
    shown = presence.announce(data, "controller", name, url_of(runner))
    try:
        yield registry
    finally:
        presence.withdraw(shown)
        await runner.cleanup()
