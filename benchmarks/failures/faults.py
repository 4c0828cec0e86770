"""Measures the effect of a worker's failure on streams: the rows of the figures' table about faults.

    python -m benchmarks faults [kill hang blackhole error storm corrupt dark] [--trials N]

Each scenario starts its own fleet (`holdfast up`, simulated workers, 20 ms per token), breaks it, and compares every
stream with the undisturbed answer. Prints one JSON object per scenario. A resume is the time from the fault, at any
moment of a step, to the next token that the client receives and that was not in flight already. It is reported beyond the direct
TTFT, measured in the same run by requests to a worker without a frontend, also at any moment of a step.
"""

import argparse
import asyncio
import contextlib
import functools
import json
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.local_fleet import LocalFleet
from controller.adapters.embedded.accounts import DatabaseAccounts
from controller.adapters.embedded.nats import start_nats
from controller.adapters.embedded.postgres import start_postgres
from controller.demo.clients import Received, TokenDifference, Users, compare
from controller.trace.replay.endpoint import ReplayTarget
from events import wire
from events.decisions import HealthChanged, HealthStatus
from events.observations import RequestExposed, RequestMigrated, WorkerJoined, WorkerSilent

WORKERS, STREAMS, TOKENS = 3, 8, 100
STEP_S = 0.02
ON_ITS_WAY_S = STEP_S / 2  # an earlier token is the dead worker's: another worker needs a whole step
FLAGS = (
    "--workers",
    str(WORKERS),
    "--chaos",
    "--itl-ms",
    "20",
    "--breaker-wait",
    "1",
    "--breaker-backoff",
    "1",
)
PROMPTS = [[300 + (7 * i + 13 * k) % 1500 for k in range(40)] for i in range(STREAMS)]


class Bench:
    """One fleet, its users, and the undisturbed answers."""

    def __init__(self, fleet: LocalFleet, users: Users, session: ReplayTarget) -> None:
        self.fleet, self.users, self.session = fleet, users, session
        self.answers: list[list[str]] = []
        self.rounds = 0

    async def round(self, tokens: int = TOKENS) -> tuple[list[Received], asyncio.Task[Any]]:
        """Start the streams; return them once each has a few tokens, and the task that ends with them."""
        self.rounds += 1
        before = len(self.users.streams)
        names = [f"round-{self.rounds}-{n}" for n in range(STREAMS)]
        asked = [self.users.ask(self.session, n, tokens, name) for n, name in enumerate(names)]
        task: asyncio.Task[Any] = asyncio.ensure_future(asyncio.gather(*asked))
        while len(streams := self.users.streams[before:]) < STREAMS or any(
            len(s.pieces) < 10 for s in streams
        ):
            await asyncio.sleep(0.005)
            if task.done():
                break
        return streams, task

    def exact(self, streams: Sequence[Received]) -> int:
        """Return how many streams equal the undisturbed answer."""
        return sum(not s.error and s.pieces == self.answers[s.prompt][: s.wanted] for s in streams)

    async def moved(self, streams: Sequence[Received]) -> dict[str, RequestMigrated]:
        """Return the migrations of these streams, by request."""
        names = {s.request for s in streams}
        facts = [e.fact for e in await self.fleet.events()]
        return {f.request: f for f in facts if isinstance(f, RequestMigrated) and f.request in names}


def _out(worker: str, status: dict[str, Any]) -> bool:
    return all(w["weight"] == 0 for w in status["workers"] if w["id"] == worker)


@contextlib.asynccontextmanager
async def bench(*flags: str, environment: dict[str, str] | None = None) -> AsyncIterator[Bench]:
    """Start a fleet and its users."""
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
        fleet = LocalFleet.start(Path(folder) / "data", *FLAGS, *flags, environment=environment)
        try:
            await fleet.ready()
            await fleet.healthy(WORKERS)
            model = (await fleet.status())["workers"][0]["model"]
            users = Users(fleet.url, model, PROMPTS)
            async with users.session() as session:
                one = Bench(fleet, users, session)
                one.answers = await users.answers(session, TOKENS)
                yield one
        finally:
            fleet.stop()


async def direct_ttft(b: Bench, rounds: int = 5, asks: int = 40) -> dict[str, float]:
    """Return the TTFT (ms) of the same prompts, sent to a worker without a frontend, under the same load.

    `rounds` of `asks`: half of a TTFT is chance (the engine's position in its step), which only many requests even out.
    """
    joined = [e.fact for e in await b.fleet.events() if isinstance(e.fact, WorkerJoined)]
    host, port = joined[-1].url.removeprefix("tcp://").rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(wire.encode(wire.Hello(frontend="bench")))
    took, splitter = [], wire.Splitter()
    for n in range(rounds * asks):
        if n % asks == 0:
            _, task = await b.round()
        sampling = wire.Sampling(max_tokens=1, ignore_eos=True)
        prompt = PROMPTS[n % STREAMS]
        began = time.perf_counter()
        writer.write(wire.encode(wire.Generate(n, f"direct-{n}", prompt, len(prompt), sampling)))
        await _first_step(reader, splitter, n)
        took.append((time.perf_counter() - began) * 1000)
        await asyncio.sleep(random.random() * STEP_S)
        if n % asks == asks - 1:
            await task
    writer.close()
    return {
        quantile: float(value) for quantile in ("p50", "p99") if (value := spread(took)[quantile]) is not None
    }


async def _first_step(reader: asyncio.StreamReader, splitter: wire.Splitter, stream: int) -> None:
    while data := await asyncio.wait_for(reader.read(65536), 5):
        for body in splitter.feed(data):
            frame = wire.to_frontend.decode(body)
            if isinstance(frame, wire.Step) and any(c.stream == stream for c in frame.chunks):
                return


def spread(values: Sequence[float]) -> dict[str, float | int | None]:
    """Return the median and the 99th percentile, in ms."""
    if not values:
        return {"n": 0, "p50": None, "p90": None, "p99": None, "max": None}
    ordered = sorted(values)

    def at(q: float) -> float:
        return round(ordered[min(len(ordered) - 1, int(q * len(ordered)))], 1)

    return {"n": len(ordered), "p50": at(0.5), "p90": at(0.9), "p99": at(0.99), "max": at(1)}


async def _resume(verb: str, after: str | None, trials: int) -> dict[str, Any]:
    """Break the worker of the first stream `trials` times."""
    async with bench("--canary-interval", "0.5") as b:
        direct = await direct_ttft(b)
        resumes, exact, total = [], 0, 0
        for _ in range(trials):
            await b.fleet.healthy(WORKERS)
            status = {w["id"]: w for w in (await b.fleet.status())["workers"]}
            streams, task = await b.round()
            victim = random.choice(sorted(status))
            await asyncio.sleep(random.random() * STEP_S)  # the workers began their steps together
            if verb == "kill":
                os.kill(status[victim]["pid"], signal.SIGKILL)
            elif verb == "hang":
                os.kill(status[victim]["pid"], signal.SIGSTOP)
            else:
                await b.fleet.act(verb, victim)
            fault = time.monotonic()
            await task
            moved = await b.moved(streams)
            resumes += [resumed_ms(s, fault) for s in streams if s.request in moved and not s.error]
            exact, total = exact + b.exact(streams), total + len(streams)
            if after:
                await b.fleet.act(after, victim)
        over = {
            k: round(v - direct["p50"], 1) for k, v in spread(resumes).items() if k != "n" and v is not None
        }
        return {
            "streams": total,
            "exact": exact,
            "resume_ms": spread(resumes),
            "direct_ttft_ms": direct,
            "over_direct_ms": over,
        }


def resumed_ms(stream: Received, fault: float) -> float:
    """Return the time from the fault to the first token that another worker has computed, in ms."""
    return 1000 * (ON_ITS_WAY_S + stream.gap_after(fault + ON_ITS_WAY_S))


async def kill(trials: int) -> dict[str, Any]:
    """SIGKILL."""
    return await _resume("kill", None, trials)


async def hang(trials: int) -> dict[str, Any]:
    """SIGSTOP."""
    return await _resume("hang", "unhang", trials)


async def blackhole(trials: int) -> dict[str, Any]:
    """The network drops all traffic without closing connections."""
    return await _resume("blackhole", "heal", trials)


async def error(trials: int) -> dict[str, Any]:
    """The engine raises."""
    return await _resume("error", "heal", trials)


async def storm(trials: int) -> dict[str, Any]:
    """SIGKILL to one worker every 2 seconds for 2 minutes, with 8 streams in flight all the time."""
    seconds = 4.0 * trials
    async with bench("--canary-interval", "0.5") as b:
        end, kills = time.monotonic() + seconds, 0

        async def user(n: int) -> None:
            k = 0
            while time.monotonic() < end:
                k += 1
                await b.users.ask(b.session, n, TOKENS, f"storm-{n}-{k}")

        async def killer() -> None:
            nonlocal kills
            while time.monotonic() < end - 2:
                await asyncio.sleep(2)
                pids = [p["pid"] for p in (await b.fleet.status())["processes"] if p["role"] == "worker"]
                if pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(random.choice(pids), signal.SIGKILL)
                        kills += 1

        async with asyncio.TaskGroup() as group:
            group.create_task(killer())
            for n in range(STREAMS):
                group.create_task(user(n))
        streams = list(b.users.streams)
        moved = await b.moved(streams)
        lost = [f"{s.request}: {s.error}" for s in streams if s.error]
        return {
            "seconds": seconds, "kills": kills, "streams": len(streams), "hit": len(moved), "lost": len(lost),
            "exact": b.exact(streams), "why_lost": lost[:5], "gap_ms": spread([m.gap_ms for m in moved.values()]),
        }  # fmt: skip


async def corrupt(trials: int) -> dict[str, Any]:
    """One token in eight is wrong; a canary every second."""
    fenced, altered, unnamed, routed, differences = [], 0, 0, 0, []
    async with bench("--canary-interval", "1") as b:
        for _ in range(max(1, trials // 6)):
            await b.fleet.healthy(WORKERS)
            streams, task = await b.round()
            victim = sorted(w["id"] for w in (await b.fleet.status())["workers"])[0]
            began = datetime.now(UTC)
            await b.fleet.act("corrupt", victim, 8)
            await b.fleet.until(functools.partial(_out, victim))
            after, later = await b.round()
            await task
            await later
            routed += STREAMS - b.exact(after)
            events = await b.fleet.events()
            told = (
                e
                for e in events
                if isinstance(e.fact, HealthChanged) and e.fact.worker == victim and e.at > began
            )
            verdict = next(
                e
                for e in told
                if isinstance(e.fact, HealthChanged) and e.fact.after is HealthStatus.UNHEALTHY
            )
            fenced.append((verdict.at - began).total_seconds())
            named = {e.fact.request for e in events if isinstance(e.fact, RequestExposed)}
            wrong = {s.request for s in streams if b.exact([s]) == 0}
            altered, unnamed = altered + len(wrong), unnamed + len(wrong - named)
            differences += [compare(s.pieces, b.answers[s.prompt][: s.wanted]) for s in streams]
            await b.fleet.act("heal", victim)
    lost = sum((d.lost for d in differences if d != TokenDifference()), 0)
    return {
        "fenced_s": {"median": round(statistics.median(fenced), 2), "max": round(max(fenced), 2)}, "altered_streams": altered,
        "altered_and_unnamed": unnamed, "streams_altered_afterwards": routed, "tokens_missing_in_altered": lost,
    }  # fmt: skip


async def dark(trials: int) -> dict[str, Any]:
    """NATS, Postgres and the controller dead for 30 s, a worker killed meanwhile."""
    with tempfile.TemporaryDirectory(prefix="holdfast-dark-") as folder:
        Path(folder).chmod(0o755)
        nats, postgres = await start_nats(Path(folder) / "n"), await start_postgres(Path(folder) / "p")
        urls = DatabaseAccounts.kept(Path(folder) / "p" / "accounts.json").urls(postgres.url)
        environment = {"HOLDFAST_NATS_URL": nats.url, "HOLDFAST_DATABASE_URL": urls.owner}
        async with bench("--canary-interval", "1", environment=environment) as b:
            status = await b.fleet.status()
            began, gone = time.monotonic(), datetime.now(UTC)
            await nats.kill()
            await postgres.kill()
            os.kill(next(p["pid"] for p in status["processes"] if p["role"] == "controller"), signal.SIGKILL)
            rounds: list[Any] = []
            while time.monotonic() < began + 30:
                streams, task = await b.round()
                if len(rounds) == 3:
                    os.kill(status["workers"][0]["pid"], signal.SIGKILL)
                await task
                rounds += [streams]
            nats = await start_nats(Path(folder) / "n", port=nats.port)
            postgres = await start_postgres(Path(folder) / "p", port=postgres.port)
            await b.fleet.until_reachable()
            await b.fleet.healthy(WORKERS)
            everything = [s for streams in rounds for s in streams]
            moved = await b.moved(everything)
            silent = [e for e in await b.fleet.events() if isinstance(e.fact, WorkerSilent) and e.at > gone]
            result = {
                "dark_s": 30, "streams": len(everything), "exact": b.exact(everything), "migrations_told_afterwards": len(moved),
                "declared_silent": len(silent),
            }  # fmt: skip
        await nats.stop()
        await postgres.stop()
        return result


SCENARIOS: dict[str, Callable[[int], Coroutine[Any, Any, dict[str, Any]]]] = {
    f.__name__: f for f in (kill, hang, blackhole, error, storm, corrupt, dark)
}


def main() -> None:
    """Run the named scenarios, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("scenarios", nargs="*", choices=[*SCENARIOS, []], metavar="SCENARIO", default=[])
    parser.add_argument("--trials", type=int, default=30)
    args = parser.parse_args()
    for name in args.scenarios or SCENARIOS:
        result = asyncio.run(SCENARIOS[name](args.trials))
        print(json.dumps({"scenario": name, "says": SCENARIOS[name].__doc__, **result}), flush=True)


if __name__ == "__main__":
    main()
