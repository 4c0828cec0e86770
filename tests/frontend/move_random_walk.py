"""One frontend with three workers, without sockets and clocks: a seed orders all events.

The frontend's part is real: director, generations, planned migrations and connections. The workers are models that track
reservations and running streams, and commit a stream to each other in one step, or fail to.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from random import Random
from typing import Any, cast

import msgspec
from frontend_kit import PROFILE, joined
from scripted_worker import ScriptedWorker, next_token
from waits import turns

from controller.adapters.request_plane.connection import WorkerConnection
from controller.adapters.request_plane.hang import HangPolicy
from controller.deciders.fleet import Fleet, evolve
from controller.frontend.director import Director, World
from controller.frontend.dispatch.live_request import LiveRequest
from controller.frontend.openai.choice import Choice
from controller.frontend.request.state import GenerationRequest
from controller.frontend.settings import FrontendSettings
from controller.ports import OthersWork, Sink, TransferSink, WorkerUnreachable
from controller.router.trust import TrustedSource
from events import wire
from events.blocks import BlockNames
from events.decisions import DrainEnded, DrainStarted, HealthChanged, HealthStatus
from events.fact import Decision, Fact, Observation, Recorded
from events.observations import CanaryFailed, KvLayout, MoveRequested
from events.wire import (
    Cancel,
    Chunk,
    Committed,
    Declined,
    Generate,
    Load,
    Reserve,
    Reserved,
    Ship,
    Stay,
    Step,
    Why,
)

KV = KvLayout(layers=1, kv_heads=1, head_size=8, element_bytes=2)
NAMES = ("w1", "w2", "w3")


@dataclass
class Stream:
    """A stream that runs on a worker."""

    tokens: list[int]
    left: int
    stopped: bool = False
    grant: bytes = b""  # set if it is to be sent with this grant


CACHED_EVERY = 8  # one reservation of this many finds all its tokens in the prefix cache


class Model:
    """The model of a worker, reduced to moves."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.streams: dict[int, Stream] = {}
        self.reserved: dict[int, Generate] = {}
        self.inbox: deque[bytes] = deque()
        self.outbox: deque[wire.ToFrontend] = deque()
        self.cancels: Counter[int] = Counter()

    def hear(self) -> None:
        frame = wire.to_worker.decode(self.inbox.popleft())
        match frame:
            case Generate():
                self.streams[frame.stream] = Stream(list(frame.tokens), frame.sampling.max_tokens)
            case Reserve():
                self.reserved[frame.stream] = frame.request
                grant = msgspec.msgpack.encode((self.name, frame.stream))
                cached = 16 * len(frame.request.tokens) if frame.stream % CACHED_EVERY == 0 else 0
                self.outbox.append(Reserved(frame.stream, [grant], cached))
            case Ship() if frame.stream in self.streams:
                self.streams[frame.stream].grant = frame.grants[0]
            case Ship():
                self.outbox.append(Declined(frame.stream, "it is over"))
            case Stay() if frame.stream in self.streams:
                self.resume(frame.stream)
            case Cancel():
                self.cancels[frame.stream] += 1
                self.streams.pop(frame.stream, None)
                self.reserved.pop(frame.stream, None)

    def resume(self, stream: int) -> None:
        self.streams[stream].grant, self.streams[stream].stopped = b"", False

    def decode(self, most: int) -> None:
        chunks = []
        for number, stream in list(self.streams.items()):
            if stream.stopped:
                continue
            said = [self._next(stream) for _ in range(min(most, stream.left))]
            stream.left -= len(said)
            chunks.append(Chunk(number, said, finish=None if stream.left else "length"))
            if not stream.left:
                del self.streams[number]
        if any(chunk.tokens for chunk in chunks):
            self.outbox.append(Step(chunks))

    @staticmethod
    def _next(stream: Stream) -> int:
        stream.tokens.append(next_token(stream.tokens))
        return stream.tokens[-1]

    def clear(self) -> None:
        """Drop the connection and everything that depends on it."""
        for kept in (self.streams, self.reserved, self.inbox, self.outbox):
            kept.clear()


class Wire(asyncio.Transport):
    """The frontend's end of a connection without a socket."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self._split, self._model = wire.Splitter(), model

    def write(self, data: Any) -> None:
        self._model.inbox += [body for body in self._split.feed(data) if wire.to_worker.decode(body)]

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None:
        pass


class Connections:
    """A `RequestPlane` over such connections."""

    def __init__(self, models: dict[str, Model], changed: Callable[[], None]) -> None:
        self.models, self.changed, self._number = models, changed, 0
        self.connections: dict[str, WorkerConnection] = {}
        self.attempts: list[tuple[str, int]] = []
        for name in models:
            self.connect(name)

    def connect(self, name: str) -> None:
        self.connections[name] = line = WorkerConnection("f1", HangPolicy(), lambda: self.changed())
        line.connection_made(Wire(self.models[name]))
        self.models[name].inbox.clear()  # its hello
        self.say(name, wire.Welcome(name, "i1", "m"))
        self.say(name, wire.Beat("decode", 0.0, load=Load(kv_total=10_000)))

    def say(self, name: str, frame: wire.ToFrontend) -> None:
        self.connections[name].data_received(wire.encode(frame))

    def lose(self, name: str) -> None:
        line = self.connections.pop(name)
        self.models[name].clear()
        line.connection_lost(None)

    def _line(self, name: str) -> WorkerConnection:
        if name not in self.connections:
            raise WorkerUnreachable(f"{name} is not connected")
        return self.connections[name]

    def _attempt(self, name: str) -> int:
        self._number += 1
        self.attempts.append((name, self._number))
        return self._number

    def reachable(self, worker: str, instance: str) -> bool:
        return worker in self.connections

    recently_heard = reachable

    def load(self, worker: str) -> Load | None:
        return self.connections[worker].load.total if worker in self.connections else None

    def external_load(self, worker: str) -> Load | None:
        return None

    def others_work(self, worker: str, own_tokens: int, *, begun: bool) -> OthersWork:
        return ""

    def load_by_rank(self, worker: str) -> Sequence[Load]:
        return ()

    def external_load_by_rank(self, worker: str) -> Sequence[Load]:
        return ()

    def draining(self, worker: str, instance: str) -> bool:
        return False

    def open(self, worker: str, instance: str, request: Generate, sink: Sink) -> int:
        line, stream = self._line(worker), self._attempt(worker)
        line.open(stream, request, sink)
        return stream

    def reserve(self, worker: str, instance: str, request: Generate, room: int, carrier: TransferSink) -> int:
        line, stream = self._line(worker), self._attempt(worker)
        line.reserve(stream, request, room, carrier)
        return stream

    def ship(self, source: TrustedSource, stream: int, offer: Reserved, carrier: TransferSink) -> None:
        self._line(source.worker).ship(stream, offer.grants, carrier)

    def cancel(self, worker: str, stream: int, why: Why = "gone") -> None:
        if worker in self.connections:
            self.connections[worker].cancel(stream, why)

    def stay(self, worker: str, stream: int) -> None:
        if worker in self.connections:
            self.connections[worker].stay(stream)

    def adopt(self, worker: str, stream: int, sink: Sink) -> None:
        if worker in self.connections:
            self.connections[worker].adopt(stream, sink)


class Clock:
    """A clock that stands still."""

    def __init__(self) -> None:
        self.at = 1000.0

    def now(self) -> datetime:
        return datetime.fromtimestamp(1.7e9 + self.at, UTC)

    def monotonic(self) -> float:
        return self.at

    async def sleep(self, seconds: float) -> None:
        raise AssertionError


@dataclass
class NotedWriter:
    """A writer that records its output, and finds a stop string after a number of tokens."""

    stop: int
    said: list[int] = field(default_factory=list)
    stopped: bool = False

    @property
    def reached(self) -> int:
        return len(self.said)

    def write(self, tokens: Any, logprobs: Any) -> int:
        used = list(tokens[: self.stop - len(self.said)])
        self.said += used
        self.stopped = len(self.said) >= self.stop
        return len(used)

    def finish(self, reason: str) -> None:
        pass

    def flush(self) -> None:
        pass

    def rewind(self, count: int) -> None:
        del self.said[count:]


class Walk:
    """The world of one seed."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.models = {name: Model(name) for name in NAMES}
        self.clock, self.facts = Clock(), list[Observation]()
        self.connections = Connections(self.models, lambda: None)
        settings = FrontendSettings(migration_limit=100, reroute_s=1000.0)
        draws = Random(seed).random
        world = World("f1", cast(Any, self.connections), self._observe, cast(Any, self.clock), draws)
        self.director = Director(world, settings)
        self.connections.changed = self.director.changed
        self.director.go_live()
        self.fleet, self._seq = Fleet(), 0
        slow = replace(PROFILE, prefill_tokens_per_s=1.0)
        for name in NAMES:
            self.tell(joined(ScriptedWorker(name), kv=KV, profile=slow))
            self._health(name, HealthStatus.HEALTHY, 1.0)
        self.requests: list[tuple[LiveRequest, NotedWriter, list[int]]] = []
        self.orphans = 0
        self.paces = self.random.choices((1.0, 0.3), k=len(NAMES))  # some connections are slow

    def _observe(self, fact: Observation, *, traceparent: str = "") -> None:
        self.facts.append(fact)

    def tell(self, fact: Fact) -> None:
        self._seq += 1
        if isinstance(fact, Decision):
            fact = replace(fact, number=self.fleet.number + 1)
        recorded = Recorded(self._seq, self.clock.now(), fact, f"e{self._seq}")
        self.fleet = evolve(self.fleet, recorded)
        self.director.absorb(self.fleet, [recorded])

    def _health(self, name: str, after: HealthStatus, weight: float) -> None:
        before = self.fleet.workers[name].health.status
        self.tell(
            HealthChanged(
                worker=name, instance="i1", before=before, after=after, reason="walk", weight=weight,
                decided_at=self.clock.now(),
            )
        )  # fmt: skip

    def ask(self, number: int) -> None:
        """Start an answer. One in four ends at a stop string."""
        tokens = self.random.randint(20, 400)
        prompt = [300 + number, 301, 302]
        lineage = ("r1", "builtin:sim")
        request = GenerationRequest(
            id=f"r{number}", model="m", lineage=lineage, prompt=prompt, prompt_text="",
            names=BlockNames(prompt),
            sampling=wire.Sampling(max_tokens=tokens), guided=None, deterministic=True,
        )  # fmt: skip
        writer = NotedWriter(
            stop=self.random.randint(1, tokens) if self.random.random() < 0.25 else tokens + 1
        )
        (live,) = self.director.driver.launch([Choice(request, cast(Any, writer), migration_limit=100)])
        self.requests.append((live, writer, prompt))

    # --- possible events --------------------------------------------------------------------------------------

    async def step(self) -> None:
        """Perform one random event."""
        random = self.random
        (name,) = random.choices(NAMES, self.paces)
        happens = random.choices(
            (
                self.deliver,
                self.hear,
                self.decode,
                self.arrive,
                self.tick,
                self.want,
                self.break_,
                self.reconnect,
                self.stall,
                self.orphan,
                self.leave,
                self.convict,
            ),
            (40, 40, 10, 40, 1, 8, 0.4, 4, 0.2, 10, 0.2, 0.03),
        )
        happens[0](name)
        await turns()  # callbacks scheduled for the end of the turn
        assert not any(one.wanted.live.over for one in self.director.planned_moves.transfers.values())

    def deliver(self, name: str) -> None:
        """Deliver one or several frames to the frontend."""
        model = self.models[name]
        if name in self.connections.connections and model.outbox:
            count = self.random.randint(1, len(model.outbox))
            self.connections.connections[name].data_received(
                b"".join(wire.encode(model.outbox.popleft()) for _ in range(count))
            )

    def hear(self, name: str) -> None:
        """Deliver one frame to the worker."""
        if self.models[name].inbox:
            self.models[name].hear()

    def decode(self, name: str) -> None:
        self.models[name].decode(self.random.randint(1, 3))

    def arrive(self, name: str) -> None:
        """Stop a stream that is to be sent; or let a stopped one arrive, be refused, or continue by itself."""
        model, random = self.models[name], self.random
        for number, stream in list(model.streams.items()):
            if not stream.grant or number not in model.streams:
                continue
            if not stream.stopped:
                model.decode(random.randint(0, 2))  # it stops at the end of a step, unless it has finished
                stream.stopped = True
                continue
            if stream.grant == b"sent":
                if random.random() < 0.1:  # it was not cancelled in time
                    model.resume(number)
                    model.outbox.append(Declined(number, "no decision arrived"))
                continue
            where, there = msgspec.msgpack.decode(stream.grant)
            if self.commit(self.models[where], there, stream) and random.random() < 0.9:
                stream.grant = b"sent"
            else:  # refused; or it arrived, but the confirmation was lost
                model.resume(number)
                model.outbox.append(Declined(number, "it did not arrive"))

    def commit(self, target: Model, number: int, stream: Stream) -> bool:
        request = target.reserved.get(number)
        if request is None or self.random.random() < 0.15:
            return False
        del target.reserved[number]
        told = stream.tokens[len(request.tokens) :]
        target.streams[number] = Stream(list(stream.tokens), request.sampling.max_tokens - len(told))
        target.outbox.append(Committed(number, told, bytes=1, blocks=1, link="shm"))
        return True

    def tick(self, name: str) -> None:
        self.clock.at += 0.1 * self.random.randint(1, 3)
        self.director.tick()

    def want(self, name: str) -> None:
        """Request that this worker's streams move elsewhere."""
        if self.random.random() < 0.9:
            self.tell(MoveRequested(worker=name, instance="i1"))
            return
        drains = self.fleet.workers[name].drain.active
        self.drain(name, over=drains)

    def drain(self, name: str, *, over: bool = False) -> None:
        about: dict[str, Any] = {
            "worker": name,
            "instance": "i1",
            "decided_at": self.clock.now(),
            "number": 0,
        }
        if over:
            self.tell(DrainEnded(**about, outcome="resumed"))
        else:
            self.tell(DrainStarted(**about, deadline=self.clock.now(), reason="walk"))

    def break_(self, name: str) -> None:
        """Break the connection to this worker."""
        if name in self.connections.connections:
            self.connections.lose(name)

    def reconnect(self, name: str) -> None:
        """Reconnect to this worker."""
        if name not in self.connections.connections:
            self.connections.connect(name)
            self.director.changed()

    def stall(self, name: str) -> None:
        """Stall this worker: its streams are moved."""
        if name in self.connections.connections:
            self.connections.connections[name].lose("stalled", "walk")

    def orphan(self, name: str) -> None:
        """Lose a source after its target has committed, before its last tokens have arrived."""
        for live, _, _ in self.requests:
            transfer, move = live.state.transfer, live.kv_move
            if transfer is not None and move is not None and transfer.state == "committed":
                self.orphans += 1
                self.connections.lose(move.wanted.source.worker)
                return

    def leave(self, name: str) -> None:
        """Disconnect a client."""
        self.director.driver.cancel([self.random.choice(self.requests)[0].answer])

    def convict(self, name: str) -> None:
        """Convict a healthy worker; the first one stays healthy."""
        self.tell(
            CanaryFailed(
                worker=self.random.choice(NAMES[1:]), instance="i1", canary_key="k", canary="c",
                check_type="scheduled", sent_under=99, sent_at=self.clock.now(), latency_ms=1.0,
                reason="token_mismatch", confirmed=True, golden="agreed",
            )
        )  # fmt: skip

    async def settle(self) -> None:
        """Let all streams end without further faults."""
        for name in NAMES:
            self.reconnect(name)
            if self.fleet.workers[name].drain.active:
                self.drain(name, over=True)
        for _ in range(400):
            for name in NAMES:
                for _ in range(len(self.models[name].inbox)):
                    self.hear(name)
                self.arrive(name)
                self.decode(name)
                while self.models[name].outbox:
                    self.deliver(name)
                await turns()
            self.clock.at += 0.2
            self.director.tick()
            self.director.changed()
