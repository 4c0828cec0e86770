"""A whole frontend in this process, with scripted workers, fed with facts by hand."""

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Protocol

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families
from scripted_worker import Act, ScriptedWorker
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transports import Road
from waits import until

from controller.adapters.clock import SystemClock
from controller.adapters.request_plane.client import RequestPlaneClient
from controller.adapters.request_plane.worker_links import Address
from controller.deciders.fleet import Fleet, evolve
from controller.frontend.director import Director, World
from controller.frontend.dispatch.live_request import LiveRequest
from controller.frontend.http.api import Api
from controller.frontend.http.listeners import Listeners
from controller.frontend.openai.completion import Completion
from controller.frontend.openai.text.tokenizer import BUILTIN, Tokens, load_tokens, ready_tokens
from controller.frontend.settings import FrontendSettings
from controller.router.endpoints import WorkerRank
from events.decisions import HealthChanged, HealthStatus
from events.fact import Decision, Fact, Observation, Recorded
from events.observations import CanaryFailed, Profile, WorkerJoined

TOKENS = load_tokens(BUILTIN)
PROFILE = Profile(kv_blocks=100, block_tokens=16, max_batch=8, prefill_tokens_per_s=1e5, tpot_ms=((1, 1.0),))
USUAL = [Road("tcp")]  # the last one is the default road of frontends to their workers


class ReadTokens(Protocol):
    """Returns a tokenizer by its name."""

    async def __call__(self, name: str) -> Tokens: ...


@pytest.fixture
def both_roads(road: Road) -> Iterator[None]:
    """Let a test's frontends reach their workers directly, and once more through a real broker."""
    USUAL.append(road)
    yield
    USUAL.pop()


def joined(worker: ScriptedWorker, **changes: Any) -> WorkerJoined:
    """Return the registration of a scripted worker."""
    fact = WorkerJoined(
        worker=worker.name,
        instance=worker.instance,
        url=worker.url,
        model=worker.model,
        revision="r1",
        tokenizer=BUILTIN,
        engine="simulated",
        engine_version="1",
        dtype="fp32",
        tp=1,
        device="cpu",
        profile=PROFILE,
        canary_key="k",
        pid=1,
    )
    return replace(fact, **changes)


@dataclass
class Kit:
    """The handles and observations of a test."""

    director: Director
    api: Api
    plane: RequestPlaneClient
    url: str
    admin: str
    http: aiohttp.ClientSession
    facts: list[Observation]
    traces: list[str]  # one per fact
    completed: list[list[int]]  # the tokens of completed answers
    world: World
    ticks: "Ticks"  # waits for the periodic work
    fleet: Fleet = field(default_factory=Fleet)
    seq: int = 0
    workers: list[ScriptedWorker] = field(default_factory=list)  # stopped at the end
    road: Road = field(default_factory=lambda: USUAL[-1])

    def tell(self, *facts: Fact) -> None:
        """Let the fold absorb facts, as if read from the journal."""
        batch = []
        for fact in facts:
            self.seq += 1
            if isinstance(fact, Decision):
                fact = replace(fact, number=self.fleet.number + 1)
            batch.append(Recorded(self.seq, datetime.now(UTC), fact, f"e{self.seq}"))
            self.fleet = evolve(self.fleet, batch[-1])
        alive = [w for w in self.fleet.workers.values() if w.alive]
        self.plane.set_workers({w.joined.worker: Address(w.joined.instance, w.joined.url) for w in alive})
        self.director.absorb(self.fleet, batch)

    def health(
        self, worker: ScriptedWorker, after: HealthStatus, weight: float, reason: str = "test"
    ) -> None:
        """Let the controller decide on a worker's health."""
        before = self.fleet.workers[worker.name].health.status
        self.tell(
            HealthChanged(
                worker=worker.name,
                instance=worker.instance,
                before=before,
                after=after,
                reason=reason,
                weight=weight,
                decided_at=datetime.now(UTC),
            )
        )

    async def add(self, worker: ScriptedWorker, **changes: Any) -> None:
        """Start a worker, and let it join, become healthy and be connected."""
        if not worker.started:
            await self.road.lay(worker).start()
        self.workers.append(worker)
        self.tell(joined(worker, **changes))
        self.health(worker, HealthStatus.HEALTHY, 1.0)
        await until(lambda: self.plane.connected.get(worker.name) == worker.instance)

    def running(self, worker: str, instance: str = "i1") -> Collection[LiveRequest]:
        """Return the requests that run on a worker, oldest first."""
        return self.director.running.at(self.director.table.endpoints[worker, instance])

    def counted(self, metric: str, *labels: str) -> dict[tuple[str, ...], float]:
        """Return the values of a metric by these labels, without zeros."""
        families = text_string_to_metric_families(self.director.render_metrics().decode())
        samples = [sample for family in families for sample in family.samples if sample.name == metric]
        return {tuple(s.labels[label] for label in labels): s.value for s in samples if s.value}

    def said(self, kind: type[Fact]) -> list[Any]:
        """Return the facts of one kind that the frontend has observed."""
        return [fact for fact in self.facts if isinstance(fact, kind)]

    async def post(
        self, path: str, headers: dict[str, str] | None = None, **body: Any
    ) -> tuple[int, Any, Any]:
        """Return status, JSON body and headers of a response that is not streamed."""
        async with self.http.post(self.url + path, json=body, headers=headers) as response:
            return response.status, await response.json(), response.headers

    async def complete(self, prompt: list[int] | str, count: int, **more: Any) -> tuple[str, dict[str, Any]]:
        """Return the text and the whole body of a completion that must succeed."""
        status, body, _ = await self.post(
            "/v1/completions", model="m", prompt=prompt, max_tokens=count, **more
        )
        assert status == 200, body
        return body["choices"][0]["text"], body

    async def stream(
        self, path: str = "/v1/completions", headers: dict[str, str] | None = None, **body: Any
    ) -> list[dict[str, Any]]:
        """Return every event of a streamed answer; the last is {"done": True} if the stream ended so."""
        events: list[dict[str, Any]] = []
        asked = self.http.post(self.url + path, json=body | {"stream": True}, headers=headers)
        async with asked as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if line.startswith(b"data: "):
                    data = line[6:].strip()
                    events.append({"done": True} if data == b"[DONE]" else json.loads(data))
        return events


def text_of(events: list[dict[str, Any]], index: int = 0) -> str:
    """Return the text of a stream's events."""
    choices = [choice for item in events for choice in item.get("choices", ()) if choice["index"] == index]
    return "".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in choices)


def failing(name: str, how: str, after: int | None = 5, **more: Any) -> ScriptedWorker:
    """Return a worker that fails its first request in this way, and serves the others."""
    return ScriptedWorker(name, acts=deque([Act(after=after, how=how, **more)]))


BUSY_BLOCKS = 1000


async def first_goes_to(kit: Kit, first: ScriptedWorker, other: ScriptedWorker, **changes: Any) -> None:
    """Add the workers so that the first request goes to `first`."""
    await kit.add(first, **changes)
    await kit.add(other, **changes)
    keep_busy(kit, other.name, other.instance)


def keep_busy(kit: Kit, worker: str, instance: str, requests: int = 1) -> None:
    """Make a worker look so busy that idle ones are chosen, whatever they were sent recently."""
    kit.director.table.endpoints[(worker, instance)].begin(requests=requests)
    holder = WorkerRank(worker, instance)
    kit.director.routing.slots.add("another", holder, now=kit.director.now(), own_blocks=BUSY_BLOCKS)


def check_slot_counts(director: Director) -> None:
    """Check that the slot tracker counts exactly the requests that run on workers: no ended one is left."""
    counted = {name for name, _ in director.routing.slots.requests() if isinstance(name, int)}
    there = {
        live.dispatch.slot
        for endpoint in director.table.endpoints.values()
        for live in director.running.at(endpoint)
        if live.dispatch is not None
    }
    assert counted == there, "the slot tracker does not count exactly the requests on workers"


class CompletedAnswers(dict[Completion, None]):
    """The requests in progress, and the tokens of the answers that were completed."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens: list[list[int]] = []

    def __delitem__(self, completion: Completion) -> None:
        super().__delitem__(completion)
        for answer in completion.answers:
            if answer.finish not in (None, "cancelled"):
                self.tokens.append(answer.accepted)


class Ticks:
    """The periodic work of a frontend, every 50 ms."""

    def __init__(self, director: Director) -> None:
        self._director = director
        self._count = 0

    async def run(self) -> None:
        """Run it until cancelled."""
        while True:
            await asyncio.sleep(0.05)  # the period itself
            self._director.tick()
            self._count += 1

    async def __call__(self, count: int = 2) -> None:
        """Wait until it has run this often: enough for anything that is due within (count - 1) * 50 ms."""
        after = self._count + count
        await until(lambda: self._count >= after)


async def _call_off(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel tasks and ignore their results."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def frontend(
    *workers: ScriptedWorker,
    name: str = "f1",
    road: Road | None = None,
    tokens: ReadTokens = ready_tokens,
    live: bool = True,
    between: Callable[[RequestPlaneClient], Any] = lambda plane: plane,
    **settings: Any,
) -> AsyncIterator[Kit]:
    """Run a frontend with these workers, reached by this road or by the usual one.

    Not `live`: it still reads the journal. `between` wraps the request plane.
    """
    road = road or USUAL[-1]
    facts: list[Observation] = []
    traces: list[str] = []

    def observe(fact: Observation, *, traceparent: str = "") -> None:
        facts.append(fact)
        traces.append(traceparent)

    chosen = FrontendSettings(port=0, **{"reroute_s": 10.0, "model_folders": "/", **settings})
    plane = road.plane(name)
    first_of_equals = lambda: 0.0  # noqa: E731
    world = World(name, between(plane), observe, SystemClock(), first_of_equals)
    director = Director(world, chosen)
    if live:
        director.go_live()
    plane.listen(director.changed)
    api = Api(director)
    api.openai.tokens = tokens
    completed = api.openai.completions = CompletedAnswers()
    listeners = Listeners(api, chosen)
    await listeners.open()
    await listeners.accept()
    ticks = Ticks(director)
    running = [asyncio.create_task(plane.run()), asyncio.create_task(ticks.run())]
    before = asyncio.all_tasks()
    try:
        async with aiohttp.ClientSession() as http:
            kit = Kit(
                director, api, plane, listeners.url, listeners.admin_url, http, facts, traces, completed.tokens,
                world, ticks, road=road,
            )  # fmt: skip
            for worker in workers:
                await kit.add(worker)
            yield kit
    except BaseException:
        await _call_off(asyncio.all_tasks() - before)  # tasks left by a failed test
        raise
    finally:
        for task in running:
            task.cancel()
        results = await asyncio.gather(*running, return_exceptions=True)
        await listeners.close()
        for worker in kit.workers:
            await worker.stop()
    check_slot_counts(director)
    for result in results:
        if isinstance(result, Exception):
            raise result


def canary(kind: type[Any], worker: ScriptedWorker, **more: Any) -> Any:
    sent = more.pop("sent_at", None) or datetime.now(UTC)
    return kind(
        worker=worker.name,
        instance=worker.instance,
        canary_key="k",
        canary=more.pop("canary", "c1"),
        check_type="scheduled",
        sent_under=99,
        sent_at=sent,
        latency_ms=1.0,
        **more,
    )


def convict(kit: Kit, worker: ScriptedWorker, which: str = "c1") -> None:
    """Let a canary fail, confirmed against an agreed golden, and let the controller decide."""
    kit.tell(
        canary(
            CanaryFailed,
            worker,
            canary=which,
            reason="token_mismatch",
            confirmed=True,
            golden="agreed",
            attempts=2,
        )
    )
    kit.health(worker, HealthStatus.UNHEALTHY, 0.0, "token_mismatch")


def sentencepiece_like() -> Tokenizer:
    """A tokenizer like Llama 2's: byte fallback tokens and a metaspace."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁": 256, "▁hi": 257, "a": 258, "<unk>": 259}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer
