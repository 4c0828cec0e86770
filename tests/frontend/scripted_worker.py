"""A worker in this process that speaks the request plane and fails exactly as scripted.

Its next token is a pure function of the whole sequence so far, so any lost, doubled or altered token changes all that follow.
`undisturbed` returns the expected answer.
"""

import asyncio
import itertools
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import xxhash
from waits import turns

from controller.adapters.embedded.free_port import free_port
from events import subjects, wire
from events.nats.channels import ChannelListener, Channels
from events.wire import Beat, Cancel, Chunk, Generate, Hello, Load, Logprob, Step, Welcome

FIRST, LAST = 259, 2047
_numbers = itertools.count()


def next_token(tokens: Sequence[int]) -> int:
    """Return the token after `tokens`."""
    return FIRST + xxhash.xxh32_intdigest(array("q", tokens).tobytes()) % (LAST - FIRST + 1)


def undisturbed(
    prompt: Sequence[int], count: int, follow: Callable[[Sequence[int]], int] = next_token
) -> list[int]:
    """Return the `count` tokens of an undisturbed answer."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(follow(tokens))
    return tokens[len(prompt) :]


def spelling(answer: Sequence[int]) -> Callable[[Sequence[int]], int]:
    """Return a model that answers each prompt with these tokens."""

    def follow(tokens: Sequence[int]) -> int:
        for made in range(min(len(answer) - 1, len(tokens)), 0, -1):
            if list(tokens[-made:]) == list(answer[:made]):
                return answer[made]
        return answer[0]

    return follow


@dataclass
class Act:
    """How to serve one request: `after` tokens, then `how`. The default serves it completely.

    Values of `how`:

    - finish: end normally.
    - disconnect: break the connection.
    - error: send a chunk with `error`.
    - stall: the stream stops; the loop runs and reports a growing step.
    - quiet: the stream stops; the loop and the engine run.
    - silence: send nothing more on any stream.
    - finish_late: send the last token without a finish reason, then break the connection.
    - close: report that its server answers 429, with a Retry-After of `closes_s`.
    """

    after: int | None = None
    how: str = "finish"
    error: str = "engine_error: it broke"
    finish: str = "length"
    per_step: int = 1
    closes_s: float = 0.0
    hold: asyncio.Event | None = None  # wait for this before the failure


@dataclass
class ScriptedWorker:
    """A worker with its own port."""

    name: str = "w1"
    instance: str = "i1"
    model: str = "m"
    step_s: float = 0.0
    follow: Callable[[Sequence[int]], int] = next_token
    stop_at: int | None = None  # the token that ends an answer
    acts: deque[Act] = field(default_factory=deque)
    always: Act = field(default_factory=Act)
    requests: list[Generate] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    why: list[str] = field(default_factory=list)  # reasons of cancelled streams
    silent: bool = False
    draining: bool = False
    step_age_ms: float = 0.0
    phase: str = "idle"
    prefill_tokens: int = 0
    others: int = 0  # requests of other frontends
    waiting: int = 0  # requests in its queue
    closed_s: float = 0.0  # seconds for which it reports that it accepts no new requests
    kv_used: int = 0  # of 100 blocks
    kv_used_by_rank: tuple[int, ...] = ()  # of 100 each; empty: it has one rank
    port: int = 0
    channels: Channels | None = None  # through the broker, instead of a port
    alike: bool = False  # it reports that canaries need no mark
    hellos: list[str] = field(default_factory=list)  # frontends that have connected

    def __post_init__(self) -> None:
        self.subject = subjects.plane(self.name, f"{self.instance}-{next(_numbers)}")
        self.started = False
        self._server: asyncio.Server | ChannelListener | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: dict[tuple[asyncio.StreamWriter, int], asyncio.Task[None]] = {}

    @property
    def url(self) -> str:
        if self.channels is not None:
            return f"{subjects.PLANE_SCHEME}:{self.subject}"
        return f"tcp://127.0.0.1:{self.port}"

    @property
    def active(self) -> int:
        """Number of open streams."""
        return len(self._tasks)

    async def start(self) -> "ScriptedWorker":
        if self.channels is not None:
            self._server = await self.channels.listen(self.subject, self._protocol)
        else:
            self.port = self.port or free_port()  # a port on which it can restart
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.started = True
        return self

    def _protocol(self) -> asyncio.Protocol:
        return asyncio.StreamReaderProtocol(asyncio.StreamReader(), self._serve)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        self.drop()
        await turns(3)

    def drop(self) -> None:
        """Break every connection."""
        for task in list(self._tasks.values()):
            task.cancel()
        for writer in list(self._writers):
            writer.transport.abort()

    # --- one connection -----------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        beats = asyncio.create_task(self._beats(writer))
        split = wire.Splitter()
        try:
            while data := await reader.read(65536):
                for body in split.feed(data):
                    self.hear(wire.to_worker.decode(body), writer)
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            beats.cancel()
            self._writers.discard(writer)
            for key in [k for k in self._tasks if k[0] is writer]:
                self._tasks.pop(key).cancel()
            writer.close()

    def hear(self, frame: object, writer: asyncio.StreamWriter) -> None:
        if isinstance(frame, Hello):
            self.hellos.append(frame.frontend)
            self._say(writer, Welcome(self.name, self.instance, self.model, alike=self.alike))
        elif isinstance(frame, Cancel):
            self.cancelled.append(frame.stream)
            self.why.append(frame.why)
            task = self._tasks.pop((writer, frame.stream), None)
            if task is not None:
                task.cancel()
        elif isinstance(frame, Generate):
            self.requests.append(frame)
            act = self.acts.popleft() if self.acts else self.always
            key = (writer, frame.stream)
            self._tasks[key] = asyncio.create_task(self._play(writer, frame, act))
            self._tasks[key].add_done_callback(lambda _: self._tasks.pop(key, None))

    def _say(self, writer: asyncio.StreamWriter, frame: wire.ToFrontend) -> None:
        if not self.silent and not writer.is_closing():
            writer.write(wire.encode(frame))

    async def _beats(self, writer: asyncio.StreamWriter) -> None:
        while True:
            await asyncio.sleep(0.05)  # the interval of a worker's beats
            self._say(writer, self._beat())

    def _beat(self) -> Beat:
        running = self.active + self.others
        load = Load(running, self.waiting, kv_used=self.kv_used, kv_total=100, closed_s=self.closed_s)
        return Beat(
            phase=self.phase,
            step_age_ms=self.step_age_ms,
            prefill_tokens=self.prefill_tokens,
            load=load,
            draining=self.draining,
            ranks=[Load(kv_used=used, kv_total=100) for used in self.kv_used_by_rank],
        )

    # --- one request --------------------------------------------------------------------------------------

    async def _play(self, writer: asyncio.StreamWriter, request: Generate, act: Act) -> None:
        wanted = request.sampling.max_tokens
        count = wanted if act.after is None else min(act.after, wanted)
        ends = act.how == "finish"
        tokens, made = list(request.tokens), 0
        while made < count:
            if self.step_s:
                await asyncio.sleep(self.step_s)  # how long the engine takes for a token
            new = []
            for _ in range(min(act.per_step, count - made)):
                tokens.append(self.follow(tokens))
                new.append(tokens[-1])
                if new[-1] == self.stop_at:
                    act = Act(finish="stop")
                    ends, count = True, made + len(new)
                    break
            made += len(new)
            finish = act.finish if ends and made == count else None
            self._say(writer, Step(chunks=[self.chunk_of(request, new, finish)]))
        with suppress(ConnectionError):
            await writer.drain()
        if ends and count == 0:
            self._say(writer, Step(chunks=[Chunk(stream=request.stream, tokens=[], finish=act.finish)]))
        if not ends:
            await self._fail(writer, request, act)

    def chunk_of(self, request: Generate, new: list[int], finish: str | None) -> Chunk:
        k = request.sampling.logprobs
        top = [Logprob(chosen=-0.5, top=[(t, -0.5 - i) for i in range(k)]) for t in new] if k else None
        return Chunk(stream=request.stream, tokens=new, finish=finish, logprobs=top)

    async def _fail(self, writer: asyncio.StreamWriter, request: Generate, act: Act) -> None:
        if act.hold is not None:
            await act.hold.wait()
        if act.how == "disconnect":
            writer.transport.abort() if not request.tokens else writer.close()
        elif act.how == "close":
            self.closed_s = act.closes_s
            self._say(writer, self._beat())
            error = "overloaded: the upstream answers 429: slow down"
            self._say(writer, Step(chunks=[Chunk(stream=request.stream, tokens=[], error=error)]))
        elif act.how == "error":
            self._say(writer, Step(chunks=[Chunk(stream=request.stream, tokens=[], error=act.error)]))
        elif act.how == "silence":
            self.silent = True
            await asyncio.Event().wait()
        elif act.how == "quiet":
            await asyncio.Event().wait()
        elif act.how == "stall":
            self.phase, self.step_age_ms = "decode", 600_000.0
            await asyncio.Event().wait()
