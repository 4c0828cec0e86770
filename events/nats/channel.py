"""A byte stream between two processes over core NATS that is in order and whole, or broken: an asyncio transport.

    dialled ── answered ──▶ made ── close ──▶ over
       │                      │
       └── nobody listens, a gap, a reset, silence, no broker ──▶ over

Core NATS delivers a message at most once, in order, and says nothing of those that it drops. So each message says where in
its stream it stands and how far the other stream has been read: what does not fit breaks the channel, also where the
last message is the one that was lost. The second number bounds what is on its way, for a broker cuts off who reads
too slowly. Each message also names whom to answer: where nobody listens any more, the broker says so at once.
"""

import asyncio
import struct
from collections.abc import Callable
from typing import Any, Protocol

import structlog

from events.nats.windows import ReceiveWindow, SendWindow

OPEN, DATA, CLOSE, RESET = 1, 2, 3, 4
HEAD = struct.Struct("<BQQ")  # kind, the message's place in its stream, what was read of the other
TICK_S = 0.05  # between two messages of a channel in use: by the answer a dead peer is noticed
IDLE_S = 1.0
LIVELY_S = 0.3  # a channel is in use for so long after its last bytes
SILENT_S_MAX = 10.0

log = structlog.get_logger(__name__)


class NobodyListens(ConnectionError):
    """No responders: nobody listens on that subject."""


class MessageCarrier(Protocol):
    """Takes a channel's messages to the other side."""

    @property
    def taken(self) -> int:
        """How many bytes of the broker have been read so far."""
        ...

    def unread(self) -> int:
        """Return how many bytes of the broker have arrived and were not read."""
        ...

    @property
    def payload_max(self) -> int:
        """How many bytes of a stream one message may carry."""
        ...

    def post(self, route: bytes, head: bytes, payload: bytes) -> None:
        """Send a message, by the end of this turn of the loop. `route`: subject and reply, a blank after each."""
        ...

    def wake(self, channel: "Channel") -> None:
        """Let the channel have its turn before this one of the loop is over."""
        ...

    def forget(self, channel: "Channel") -> None:
        """It is over."""
        ...


class Channel(asyncio.Transport):
    """One side of a channel. Its protocol is made when the other side is known to be there."""

    def __init__(
        self, carrier: MessageCarrier, own: str, other: str, make: Callable[[], asyncio.Protocol]
    ) -> None:
        super().__init__()
        self.carrier = carrier
        self._make = make
        self._loop = asyncio.get_running_loop()
        self._protocol: asyncio.BaseProtocol | None = None
        self.outgoing = SendWindow()
        self.incoming = ReceiveWindow()
        self._ending = self._ended_there = self._closing = self._over = False
        self._heard_at = self._said_at = self._used_at = self._loop.time()
        self.own = own.encode()
        self.route = f"{other} {own} ".encode()
        self.answered: asyncio.Future[asyncio.BaseProtocol] = self._loop.create_future()

    def begin(self) -> None:
        """The other side is there."""
        self._protocol = self._make()
        self.answered.set_result(self._protocol)
        self._protocol.connection_made(self)

    # --- what comes in

    def hear(self, kind: int, place: int, read: int, payload: bytes) -> None:
        """Take a message of the other side. One of another kind is not from there: the broker's word to someone else, for one."""
        if not OPEN <= kind <= RESET:
            return
        self._heard_at = self._loop.time()
        if kind == RESET:
            self.end(ConnectionResetError(payload.decode(errors="replace") or "the other side broke it"))
            return
        out, received = self.outgoing, self.incoming.received
        if place != received or kind == OPEN:
            self._break(f"{place - received} bytes are missing at {received}")
            return
        if not out.acknowledged <= read <= out.sent:
            self._break(f"{read} bytes read of {out.sent} sent")
            return
        if self._protocol is None:
            self.begin()
        if read > out.acknowledged:
            out.acknowledged = read
            self.carrier.wake(self)
        if payload:
            self._receive(payload)
        if kind == CLOSE and not self._over:
            self._ended_there = True
            self._end_as_there()

    def _receive(self, payload: bytes) -> None:
        self._used_at = self._heard_at
        if self._closing:
            self.incoming.drop(payload)
        elif self.incoming.take(payload):
            self.carrier.wake(self)
        else:
            self._break("more was sent than the window allows")

    def _hand_on(self) -> None:
        """Let the protocol take all that has come in this turn, in one piece."""
        incoming = self.incoming
        if not (incoming.held and incoming.reading) or self._closing:
            return
        assert isinstance(self._protocol, asyncio.Protocol)
        self._tell(self._protocol.data_received, incoming.hand_on())
        if incoming.due and not self._over:
            self._say(DATA)

    def _tell(self, call: Callable[..., None], *about: bytes) -> None:
        """Call the protocol. A mistake of its own ends this channel, and no other."""
        try:
            call(*about)
        except Exception as error:
            context = {"message": "a channel's protocol failed", "exception": error, "transport": self}
            self._loop.call_exception_handler(context)
            self.abort()

    # --- what goes out

    def write(self, data: Any) -> None:
        if self._closing or not data:
            return
        out = self.outgoing
        out.buffer += data
        if len(out.buffer) > out.high:
            self.pump()
            if len(out.buffer) > out.high and not out.paused and self._protocol is not None:
                out.paused = True
                self._tell(self._protocol.pause_writing)
        self.carrier.wake(self)

    def turn(self) -> None:
        """Hand on what has come, and send what waits: once in a turn of the loop."""
        self._hand_on()
        self.pump()

    def pump(self) -> None:
        """Send as much of what waits as the window allows."""
        out = self.outgoing
        while out.buffer and not self._over and (payload := out.take(self.carrier.payload_max)):
            self._used_at = self._loop.time()
            self._say(DATA, payload)
        if out.paused and len(out.buffer) <= out.low and self._protocol is not None:
            out.paused = False
            self._tell(self._protocol.resume_writing)
        if self._ending and not out.buffer and not self._over:
            self._say(CLOSE)
            self.end(None)

    def _say(self, kind: int, payload: bytes = b"") -> None:
        out, incoming = self.outgoing, self.incoming
        self._said_at, incoming.said_read = self._loop.time(), incoming.read
        self.carrier.post(self.route, HEAD.pack(kind, out.sent, incoming.read), payload)
        out.sent += len(payload)

    def tick(self, now: float, excused_s: float) -> None:
        """Say that this side lives, and see whether the other one does. `excused_s`: how long we stood still ourselves."""
        self._heard_at = min(now, self._heard_at + excused_s)
        if now - self._heard_at > SILENT_S_MAX:
            self._break(f"nothing was heard for {SILENT_S_MAX:g} s")
        elif self._protocol is not None:
            lively = now - self._used_at < LIVELY_S or self.incoming.read > self.incoming.said_read
            if now - self._said_at > (TICK_S if lively else IDLE_S) - TICK_S / 2:
                self._say(DATA)

    # --- its end

    def close(self) -> None:
        self._closing = self._ending = True
        self.incoming.drop()
        self.carrier.wake(self)

    def abort(self) -> None:
        self.incoming.drop()
        if not self._over:
            self._say(RESET)
        self.end(None)

    def _break(self, why: str) -> None:
        log.warning("channel_broken", channel=self.own.decode(), why=why)
        self.carrier.post(self.route, HEAD.pack(RESET, self.outgoing.sent, self.incoming.read), why.encode())
        self.end(ConnectionResetError(why))

    def _end_as_there(self) -> None:
        """The other side has closed: end here when all of it has been read."""
        self._hand_on()
        if self.incoming.held or self._over:
            return
        if self._protocol is not None and not self._closing:
            assert isinstance(self._protocol, asyncio.Protocol)
            self._protocol.eof_received()
        self.end(None)

    def end(self, error: Exception | None) -> None:
        """It is over: because of an error, or because one side has closed it."""
        self._hand_on()  # it came before the end
        if self._over:
            return
        self._over = self._closing = True
        self.outgoing.buffer.clear()
        self.incoming.held.clear()
        self.carrier.forget(self)
        if self._protocol is not None:
            self._loop.call_soon(self._protocol.connection_lost, error)
        elif not self.answered.done():
            self.answered.set_exception(error or ConnectionAbortedError("it was given up"))
            self.answered.exception()  # seen: who dialled may have gone meanwhile

    # --- what else a transport can do

    def is_closing(self) -> bool:
        return self._closing

    def get_write_buffer_size(self) -> int:
        return len(self.outgoing.buffer)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self.outgoing.limit(high, low)

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self.outgoing.low, self.outgoing.high

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        assert self._protocol is not None
        return self._protocol

    def is_reading(self) -> bool:
        return self.incoming.reading and not self._closing

    def pause_reading(self) -> None:
        self.incoming.reading = False

    def resume_reading(self) -> None:
        self.incoming.reading = True
        if self._ended_there:
            self._end_as_there()
        elif not self._over:
            self.carrier.wake(self)
