"""A fleet in one process for tests of the canary loop.

It has a memory journal, a virtual clock, the real deciders, and fake workers.
"""

import asyncio
import contextlib
import hashlib
import math
import random
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

from memory_journal import MemoryJournal, MemoryStream
from virtual_clock import VirtualClock

from controller.deciders.breaker import BreakerPolicy
from controller.deciders.fleet import Fleet, FleetPolicy, evolve, settle
from controller.ports import OthersWork, Prober, WorkerUnreachable
from controller.runtime.canary.goldens import Vocabulary
from controller.runtime.canary.loop import CanaryLoop
from controller.runtime.canary.tools import ProberDependencies
from controller.runtime.settings import CanarySettings
from events import codec
from events.fact import Fact, Recorded
from events.observations import Profile, WorkerJoined, WorkerLeft, canary_key
from events.order import Order
from events.wire import Chunk, Generate, Logprob

STEP_S = 0.05
DECIDE_S = 0.25  # the deciders run after each event, and after this time without one
TOP = 5
TIE = 0.01  # of logprobs


def joined(
    worker: str, instance: str = "", *, engine_version: str = "1", model: str = "m", **more: Any
) -> WorkerJoined:
    """Return a registration."""
    identity: dict[str, Any] = {
        "model": model,
        "revision": "r1",
        "tokenizer": "builtin:sim",
        "engine": "simulated",
        "engine_version": engine_version,
        "dtype": "fp32",
        "tp": 1,
        "device": "cpu",
    }
    profile = Profile(
        kv_blocks=1000, block_tokens=16, max_batch=8, prefill_tokens_per_s=1e4, tpot_ms=((1, 10.0),)
    )
    return WorkerJoined(
        worker=worker,
        instance=instance or f"{worker}-1",
        canary_key=canary_key(**identity),
        **{"url": "tcp://127.0.0.1:1", "pid": 1, "profile": profile, **identity, **more},
    )


def spell(tokens: Sequence[int], weights: int = 0) -> tuple[int, Logprob]:
    """Return the fake model's next token and logprobs: a function of all previous tokens, and of its weights."""
    salt = weights.to_bytes(4, "little") if weights else b""
    digest = hashlib.blake2b(array("q", tokens).tobytes() + salt, digest_size=16).digest()
    token = 300 + int.from_bytes(digest[:2], "little") % 1000
    gap = 7.0 + digest[2] / 64
    top = [(token, -0.005)] + [(token + n, -0.005 - gap - n * 0.25) for n in range(1, TOP)]
    return token, Logprob(-0.005, top)


def tied(token: int) -> Logprob:
    """Return logprobs in which this token leads the next id by `TIE`."""
    return Logprob(
        -0.7, [(token, -0.7), (token + 1, -0.7 - TIE), *((token + n, -3.0 - n) for n in range(2, TOP))]
    )


@dataclass
class FakeWorker:
    """The behaviour of one fake worker. Tests change it while they run."""

    latency_s: float = 0.1
    weights: int = 0  # workers of equal weights answer alike
    corrupt: Callable[[Generate], bool] = lambda request: False
    drift: float = 0.0
    noise: Callable[[], float] = lambda: 0.0
    error: str | None = None
    unreachable: bool = False
    hangs: bool = False
    unmarked_hangs: bool = False  # no answer to unmarked questions: they wait among users' requests
    unmarked_error: str = ""  # the error that answers unmarked questions
    says_nothing: bool = False
    logprobs: bool = True
    scramble: int = 0  # answers differ each time
    ties: Collection[int] = ()  # positions of an answer where the two best tokens are `TIE` apart
    flips: float = 0.0  # share of the near ties that flip
    draw: random.Random = field(default_factory=lambda: random.Random(1))
    sampler: Literal["right", "nonsense", "nan"] = "right"  # its behaviour at a temperature above 0
    seeded: bool = True  # the same seed gives the same draws
    tells: Callable[[int], bool] = lambda token: True  # tokens that it reports; llama-server omits some
    goes_on: bool = False  # its engine answers other requests
    busy_until: float = 0.0  # until then it serves other requests, and begins no answer
    asked: int = 0
    open: int = 0
    overlapped: int = 0  # times it had more than one question at once, except for the ranking
    requests: list[Generate] = field(default_factory=list)

    def drawn(self, request: Generate, place: int, best: int, logprob: Logprob) -> int:
        """Return the token that this worker's sampler draws."""
        how = request.sampling
        if not how.temperature:
            return best
        if self.sampler == "nonsense":
            return 300 + self.draw.randrange(1000)
        seed = f"{how.seed}/{place}" if how.seed is not None and self.seeded else None
        draw = random.Random(seed) if seed else self.draw
        weights = [math.exp(value / how.temperature) for _, value in logprob.top]
        rest = max(0.0, 1 - sum(math.exp(value) for _, value in logprob.top))
        (token,) = draw.choices([*(t for t, _ in logprob.top), 299], [*weights, rest])
        return token

    def chunks(self, request: Generate) -> list[Chunk]:
        tokens = list(request.tokens)
        wrong = self.corrupt(request)
        if self.scramble:
            self.scramble += 1
        found: list[Chunk] = []
        for n in range(request.sampling.max_tokens):
            token, logprob = spell(tokens, self.weights)
            if n in self.ties:
                logprob = tied(token)
                token += self.draw.random() < self.flips
            token = self.drawn(request, n, token, logprob)
            if (wrong and n == 5) or (self.scramble and n == 3):
                token = 7 + self.scramble
            shift = self.drift + self.noise()
            if self.sampler == "nan" and request.sampling.temperature:
                shift = math.nan
            top = [(t, value + shift * (1 if i == 0 else 0.5)) for i, (t, value) in enumerate(logprob.top)]
            tokens.append(token)
            last = n == request.sampling.max_tokens - 1
            finish: Literal["length"] | None = "length" if last else None
            if not self.tells(token):
                found.extend([Chunk(0, [], finish=finish)] if last else [])
                continue
            said = [Logprob(logprob.chosen + shift, top)] if self.logprobs else None
            found.append(Chunk(0, [token], finish=finish, logprobs=said))
        return found


class FakePlane:
    """A Prober over fake workers."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.workers: dict[str, FakeWorker] = {}

    def others_work(self, worker: str, own_tokens: int, *, begun: bool) -> OthersWork:
        if not begun and self.clock.monotonic() < self.workers[worker].busy_until:
            return "before"
        return "beside" if self.workers[worker].goes_on else ""

    async def ask(self, worker: str, request: Generate) -> AsyncGenerator[Chunk]:
        fake = self.workers[worker]
        fake.asked += 1
        fake.requests.append(request)
        fake.open += 1
        fake.overlapped = max(fake.overlapped, fake.open)
        try:
            if fake.unreachable:
                raise WorkerUnreachable(f"{worker} is not there")
            if fake.hangs or (fake.unmarked_hangs and not request.canary):
                await asyncio.Event().wait()
            while (busy_s := fake.busy_until - self.clock.monotonic()) > 0:
                await self.clock.sleep(busy_s)
            await self.clock.sleep(fake.latency_s)
            if fake.error is not None or (fake.unmarked_error and not request.canary):
                yield Chunk(0, [], error=fake.error or fake.unmarked_error)
            elif not fake.says_nothing:
                for chunk in fake.chunks(request):
                    yield chunk
        finally:
            fake.open -= 1


@dataclass
class CountingMeter:
    """Stores what the loop measured."""

    questions: list[tuple[str, str, float]] = field(default_factory=list)
    gpu_seconds: float = 0.0
    lateness: list[float] = field(default_factory=list)

    def count_probe(self, worker: str, check_type: str, seconds: float) -> None:
        self.questions.append((worker, check_type, seconds))

    def spent(self, worker: str, gpu_seconds: float) -> None:
        self.gpu_seconds += gpu_seconds

    def late(self, seconds: float) -> None:
        self.lateness.append(seconds)


class World:
    """The journal, its fold, and the controller's deciders, on one virtual clock. It is its own FleetView."""

    def __init__(
        self,
        settings: CanarySettings | None = None,
        policy: FleetPolicy | None = None,
        *,
        clock: Any = None,
        prober: Prober | None = None,
    ) -> None:
        self.clock = clock or VirtualClock()
        self.stream = MemoryStream(clock=self.clock.now)
        self.journal = MemoryJournal(self.stream, "controller:test")
        self.plane = FakePlane(self.clock)
        self.meter = CountingMeter()
        self.policy = policy or FleetPolicy(breaker=BreakerPolicy(wait_min=timedelta(seconds=20)))
        self.leads = True
        self.tokenizer_missing = False
        self._order: Order[Fleet] = Order(evolve, Fleet())
        self._decided_s = 0.0  # time of the last `turn`
        self._listeners: list[Callable[[Any, Sequence[Recorded]], None]] = []
        tools = ProberDependencies(
            journal=self.journal,
            prober=prober or self.plane,
            clock=self.clock,
            meter=self.meter,
            vocabulary=self._vocabulary,
            leading=lambda: self.leads,
            draw=random.Random(1),
            secret=random.Random(2),
        )
        self.loop = CanaryLoop(self, tools, settings or CanarySettings(interval_s=10.0))

    async def _vocabulary(self, tokenizer: str) -> Vocabulary:
        if self.tokenizer_missing:
            raise WorkerUnreachable("no tokenizer")
        return Vocabulary(lambda text: [1, *text.encode()], 2048)

    @property
    def fleet(self) -> Fleet:
        return self._order.shown

    @property
    def number(self) -> int:
        return self._order.position.number

    def listen(self, callback: Callable[[Any, Sequence[Recorded]], None]) -> None:
        self._listeners.append(callback)

    def join(self, name: str, fake: FakeWorker | None = None, **more: Any) -> FakeWorker:
        fake = self.plane.workers[name] = fake or FakeWorker()
        self.journal.observe(joined(name, **more))
        self.turn()
        return fake

    def leave(self, name: str) -> None:
        """End a worker's process gracefully."""
        instance = self.fleet.workers[name].joined.instance
        self.journal.observe(WorkerLeft(worker=name, instance=instance, mode="graceful"))
        self.turn()

    def turn(self) -> None:
        """Fold new facts and decide until nothing more is due."""
        self._decided_s = self.clock.monotonic()
        while True:
            batch = self.stream.events[self._order.last_seq :]
            for event in batch:
                self._order.absorb(event)
            if batch:
                for listener in self._listeners:
                    listener(self, batch)
            decisions = settle(self.policy, self.fleet, self.clock.now())
            if not decisions and not batch:
                return
            if decisions:
                through = self._order.last_seq
                for decision in decisions:
                    headers = codec.encode_headers(
                        decision, id=f"d{decision.number}", source="c1", source_number=0, said_at=self.clock.now(),
                        through=through,
                    )  # fmt: skip
                    self.stream.add(decision, headers)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["World"]:
        task = asyncio.create_task(self.loop.run())
        try:
            await self.pass_time(0.0)
            yield self
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def pass_time(self, seconds: float) -> None:
        end = self.clock.monotonic() + seconds
        self.turn()
        while True:
            await self.clock.advance(min(STEP_S, max(0.0, end - self.clock.monotonic())))
            over = self.clock.monotonic() >= end - 1e-9
            if (
                over
                or self._order.last_seq < len(self.stream.events)
                or self.clock.monotonic() >= self._decided_s + DECIDE_S
            ):
                self.turn()
            if over:
                return

    async def until(self, condition: Callable[[], bool], seconds: float) -> float:
        """Let time pass until `condition` holds; return how long it took. Fail after `seconds`."""
        began = self.clock.monotonic()
        while not condition():
            assert self.clock.monotonic() - began < seconds, f"not within {seconds} s"
            await self.pass_time(STEP_S)
        return self.clock.monotonic() - began

    def facts(self, kind: type[Fact], worker: str | None = None) -> list[Any]:
        found = [e.fact for e in self.stream.events if isinstance(e.fact, kind)]
        return [f for f in found if worker is None or getattr(f, "worker", None) == worker]

    def status(self, worker: str) -> str:
        return self.fleet.workers[worker].health.status.value
