"""Scripted workers that send streams to each other and accept them, exactly as scripted."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import msgspec
from scripted_worker import Act, ScriptedWorker, undisturbed
from waits import turns

from events.wire import Chunk, Committed, Declined, Generate, Reserve, Reserved, Sampling, Ship, Stay, Step


@dataclass
class Running:
    """A stream that decodes on this worker."""

    request: Generate
    tokens: list[int]
    goes: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.goes.set()


@dataclass
class MovingWorker(ScriptedWorker):
    """A scripted worker that can move streams.

    `answers`: how it replies to a reservation; `refusal`: its reason when it refuses. `ships`: its reaction when it is to send
    a stream; `stops` stops the stream and sends nothing. `told` changes the committed tokens. `unsaid`: number of tokens that
    it generates before it stops, without sending them.
    """

    answers: Literal["yes", "no", "nothing"] = "yes"
    refusal: str = "no room"
    ships: Literal["yes", "no", "nothing", "stops"] = "yes"
    ship_s: float = 0.02
    told: Callable[[list[int]], list[int]] = list
    cached_tokens: int = 0
    unsaid: int = 0
    reservations: list[Reserve] = field(default_factory=list)
    shipments: list[Ship] = field(default_factory=list)
    stays: list[int] = field(default_factory=list)
    GRANTS: ClassVar[dict[bytes, tuple["MovingWorker", int]]] = {}

    def __post_init__(self) -> None:
        super().__post_init__()
        self.reserved: dict[int, tuple[asyncio.StreamWriter, Reserve]] = {}
        self.running: dict[int, Running] = {}
        self._shipping: dict[int, asyncio.Task[None]] = {}

    def hear(self, frame: object, writer: asyncio.StreamWriter) -> None:
        if isinstance(frame, Reserve):
            self._reserve(frame, writer)
        elif isinstance(frame, Ship):
            self.shipments.append(frame)
            self._shipping[frame.stream] = asyncio.create_task(self._ship(frame, writer))
        elif isinstance(frame, Stay):
            self.stays.append(frame.stream)
            self._continue(frame.stream)
        else:
            stream = getattr(frame, "stream", 0)
            super().hear(frame, writer)
            if not isinstance(frame, Generate):
                self.reserved.pop(stream, None)
                self._continue(stream)

    def _continue(self, stream: int) -> None:
        task = self._shipping.pop(stream, None)
        if task is not None:
            task.cancel()
        if stream in self.running:
            self.running[stream].goes.set()

    def drop(self) -> None:
        """Break every connection, and drop everything that arrived over it."""
        super().drop()
        self.reserved.clear()
        for stream in list(self._shipping):
            self._continue(stream)

    def _reserve(self, frame: Reserve, writer: asyncio.StreamWriter) -> None:
        self.reservations.append(frame)
        if self.answers == "no":
            self._say(writer, Declined(frame.stream, self.refusal))
            return
        self.reserved[frame.stream] = (writer, frame)
        if self.answers == "yes":
            grant = f"{self.name}/{frame.stream}/{id(self)}".encode()
            self.GRANTS[grant] = (self, frame.stream)
            self._say(writer, Reserved(frame.stream, [grant], self.cached_tokens))

    async def _ship(self, frame: Ship, writer: asyncio.StreamWriter) -> None:
        if self.ships == "no":
            self._say(writer, Declined(frame.stream, "the target cannot be reached"))
        if self.ships in ("no", "nothing"):
            return
        await asyncio.sleep(self.ship_s)  # how long a transfer takes
        if frame.stream not in self.running:
            self._say(writer, Declined(frame.stream, "it is over"))
            return
        mine = self.running[frame.stream]
        mine.goes.clear()
        await turns()  # its output has been sent
        mine.tokens += undisturbed(mine.tokens, self.unsaid, self.follow)
        target, stream = self.GRANTS[frame.grants[0]]
        if self.ships == "yes" and not target.commit(stream, mine.tokens):
            mine.goes.set()
            self._say(writer, Declined(frame.stream, "the target has no such reservation"))

    def commit(self, stream: int, tokens: Sequence[int]) -> bool:
        """Start decoding a reserved stream; False if it is no longer reserved."""
        if stream not in self.reserved:
            return False
        writer, reserve = self.reserved.pop(stream)
        request = reserve.request
        more = list(tokens[len(request.tokens) :])
        self._say(
            writer, Committed(stream, self.told(more), bytes=1000, blocks=2, link="shm", stopped_ms=1.0)
        )
        whole = msgspec.structs.replace(
            request, tokens=list(tokens), sampling=_reduced(request.sampling, len(more))
        )
        act = self.acts.popleft() if self.acts else self.always
        self._tasks[(writer, stream)] = asyncio.create_task(self._play(writer, whole, act))
        return True

    async def _play(self, writer: asyncio.StreamWriter, request: Generate, act: Act) -> None:
        mine = self.running[request.stream] = Running(request, list(request.tokens))
        wanted = request.sampling.max_tokens
        count = wanted if act.after is None else min(act.after, wanted)
        try:
            for made in range(1, count + 1):
                await asyncio.sleep(self.step_s)  # how long the engine takes for a token
                await mine.goes.wait()
                mine.tokens.append(self.follow(mine.tokens))
                finish = act.finish if act.how == "finish" and made == count else None
                self._say(writer, Step(chunks=[self.chunk_of(request, mine.tokens[-1:], finish)]))
            if act.how == "finish" and not count:
                self._say(writer, Step(chunks=[Chunk(request.stream, [], finish=act.finish)]))
            if act.how != "finish":
                await self._fail(writer, request, act)
        finally:
            del self.running[request.stream]


def _reduced(sampling: Sampling, made: int) -> Sampling:
    return msgspec.structs.replace(sampling, max_tokens=sampling.max_tokens - made)
