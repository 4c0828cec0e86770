"""Both sides of a channel, with a wire that can lose, repeat or swap messages, or with a broker."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from waits import until

from events import subjects
from events.nats.channel import DATA, HEAD, Channel
from events.nats.channels import Channels

Message = tuple[bytes, bytes]
SUBJECT = subjects.plane("w1", "i1")


class RecordingProtocol(asyncio.Protocol):
    """A protocol that records everything it receives."""

    def __init__(self) -> None:
        self.heard = bytearray()
        self.lost: list[Exception | None] = []
        self.paused = self.eof = False

    def data_received(self, data: bytes) -> None:
        self.heard += data

    def eof_received(self) -> bool:
        self.eof = True
        return False

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.append(exc)


@dataclass
class Wire:
    """One direction: the messages posted there that have not arrived."""

    payload_max: int
    posted: list[Message] = field(default_factory=list)
    awake: dict[Channel, None] = field(default_factory=dict)
    forgotten: list[Channel] = field(default_factory=list)
    taken: int = 0

    def unread(self) -> int:
        return 0

    def post(self, route: bytes, head: bytes, payload: bytes) -> None:
        self.posted.append((head, payload))

    def wake(self, channel: Channel) -> None:
        self.awake[channel] = None

    def forget(self, channel: Channel) -> None:
        self.forgotten.append(channel)


class Sides:
    """An open channel: `channels[0]` has dialled `channels[1]`."""

    def __init__(self, payload_max: int = 1000) -> None:
        self.wires = [Wire(payload_max), Wire(payload_max)]
        self.protocols = [RecordingProtocol(), RecordingProtocol()]
        makes: list[Callable[[], RecordingProtocol]] = [lambda: self.protocols[0], lambda: self.protocols[1]]
        self.channels = [Channel(self.wires[n], f"own{n}", f"own{1 - n}", makes[n]) for n in (0, 1)]
        self.channels[1].begin()
        self.wires[1].post(b"", HEAD.pack(DATA, 0, 0), b"")
        self.carry()

    def flush(self) -> None:
        """Let both sides send their buffered data."""
        for wire in self.wires:
            awake, wire.awake = wire.awake, {}
            for channel in awake:
                channel.turn()

    def deliver(self, side: int, message: Message) -> None:
        """Deliver a message that `side` has sent."""
        if self.channels[1 - side] not in self.wires[1 - side].forgotten:
            kind, place, read = HEAD.unpack(message[0])
            self.channels[1 - side].receive(kind, place, read, message[1])

    def carry(self) -> None:
        """Deliver everything, both ways, until nothing is left to send."""
        self.flush()
        while any(wire.posted for wire in self.wires):
            for side, wire in enumerate(self.wires):
                posted, wire.posted = wire.posted, []
                for message in posted:
                    self.deliver(side, message)
            self.flush()

    def tick(self, seconds: float, excused_s: float = 0.0) -> None:
        """Advance the time on both sides."""
        now = asyncio.get_running_loop().time() + seconds
        for channel, wire in zip(self.channels, self.wires, strict=True):
            if channel not in wire.forgotten:
                channel.tick(now, excused_s)


class RecordingPeer(RecordingProtocol):
    """One side of a channel, with the time at which it ended."""

    channel: Channel
    ended_at = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, Channel)
        self.channel = transport

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.ended_at = time.monotonic()


class World:
    """Two connections to one broker: the dialling and the listening side."""

    def __init__(self, near: Channels, far: Channels) -> None:
        self.near, self.far = near, far
        self.let_in: list[RecordingPeer] = []

    @classmethod
    async def of(cls, near: str, far: str = "") -> "World":
        """Connect both, the far one by another address if there is one."""
        world = cls(await Channels.open(near, "near"), await Channels.open(far or near, "far"))
        await world.far.listen(SUBJECT, world.enter)
        return world

    def enter(self) -> RecordingPeer:
        self.let_in.append(RecordingPeer())
        return self.let_in[-1]

    async def pair(self, within_s: float = 20.0) -> tuple[RecordingPeer, RecordingPeer]:
        """Return both sides of a new channel."""
        async with asyncio.timeout(within_s):
            dialled = await self.near.dial(SUBJECT, RecordingPeer)
        assert isinstance(dialled, RecordingPeer)
        return dialled, self.let_in[-1]

    async def reachable(self) -> None:
        """Wait until a channel can be opened: brokers must exchange their subscriptions first."""
        dialled, _ = await until(lambda: self.pair(5.0), 30, failing=(ConnectionError, TimeoutError))
        dialled.channel.abort()

    async def close(self) -> None:
        await self.near.close()
        await self.far.close()
