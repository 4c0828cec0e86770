"""A reliable byte stream between two processes over core NATS, as an asyncio transport.

A channel delivers all bytes in order, or it breaks.

    dialled ── answered ──▶ open ── close ──▶ closed
       │                     │
       └── no responders, a gap, a reset, silence, no broker ──▶ closed

The words on the arrows are events, the other words are states. Core NATS delivers a message at most once and in order, and does
not report dropped messages. So each message carries two numbers: how many bytes its sender sent before this message, and how many
bytes its sender has read. A mismatch breaks the channel, even if the lost message was the last one. Each end limits the number of
sent bytes that the peer has not read yet, because a broker disconnects a slow reader. Each message also has a reply subject, so
that the broker reports "no responders" at once if the peer no longer subscribes.
"""

import asyncio
import struct
from collections.abc import Callable
from typing import Any, Protocol

import structlog

WINDOW_BYTES = 256 * 1024  # most bytes in flight: sent, and not known to have been read
HELD_BYTES_MAX = 2 * WINDOW_BYTES  # most bytes buffered for a protocol that does not read
BUFFER_BYTES = 64 * 1024  # the protocol is paused above this number of unsent bytes


class SendWindow:
    """The bytes on their way to the peer: unsent, in flight and acknowledged."""

    __slots__ = ("acknowledged", "buffer", "high", "low", "paused", "sent")

    def __init__(self) -> None:
        self.buffer = bytearray()  # bytes that are not sent yet
        self.sent = 0
        self.acknowledged = 0  # bytes that the peer has read
        self.paused = False  # the protocol has been told to stop writing
        self.high, self.low = BUFFER_BYTES, BUFFER_BYTES // 4

    @property
    def written(self) -> int:
        """Number of bytes that the protocol has written, sent or not."""
        return self.sent + len(self.buffer)

    def take(self, most: int) -> bytes:
        """Remove and return the next bytes to send, at most `most`. Return b"" if the window is full or no bytes are unsent."""
        room = min(WINDOW_BYTES - (self.sent - self.acknowledged), most)
        if room <= 0 or not self.buffer:
            return b""
        payload = bytes(self.buffer[:room])
        del self.buffer[:room]
        return payload

    def limit(self, high: int | None, low: int | None) -> None:
        """Set the number of unsent bytes above which the protocol is paused (`high`) and at which it resumes (`low`).

        None sets the default: 64 KiB for `high`, a quarter of `high` for `low`.
        """
        self.high = BUFFER_BYTES if high is None else high
        self.low = self.high // 4 if low is None else low


class ReceiveWindow:
    """The bytes on their way from the peer: received, and read by the protocol."""

    __slots__ = ("held", "read", "reading", "received", "said_read")

    def __init__(self) -> None:
        self.held = bytearray()  # bytes that are received and that the protocol has not read yet
        self.received = 0
        self.read = 0
        self.said_read = 0  # the value of `read` that was last reported to the peer
        self.reading = True

    @property
    def due(self) -> bool:
        """Whether this end must now report to the peer how many bytes the protocol has read.

        Without the report, the peer's send window would fill up.
        """
        return self.read - self.said_read >= WINDOW_BYTES // 4

    def take(self, payload: bytes) -> bool:
        """Buffer received bytes until the protocol reads them. Return False if the peer has sent more bytes than the window
        allows."""
        self.received += len(payload)
        self.held += payload
        return len(self.held) <= HELD_BYTES_MAX

    def hand_on(self) -> bytes:
        """Return all buffered bytes for the protocol, and count them as read."""
        payload = bytes(self.held)
        self.held.clear()
        self.read += len(payload)
        return payload

    def drop(self, payload: bytes = b"") -> None:
        """Discard the buffered bytes and `payload`, and count them as read."""
        self.held.clear()
        self.received += len(payload)
        self.read = self.received


OPEN, DATA, CLOSE, RESET = 1, 2, 3, 4
HEAD = struct.Struct("<BQQ")  # kind, position of the message in its stream, bytes read of the opposite stream
TICK_S = 0.05  # interval of messages on a channel in use, so that missing replies reveal a dead peer
IDLE_S = 1.0
LIVELY_S = 0.3  # a channel is in use for this long after its last bytes
SILENT_S_MAX = 10.0

log = structlog.get_logger(__name__)


class NoResponders(ConnectionError):
    """No responders: no process subscribes to that subject."""


class MessageCarrier(Protocol):
    """Sends the messages of channels to their peers. The implementation is `events.nats.channels.Channels`."""

    @property
    def taken(self) -> int:
        """Total number of bytes that this process has read from the broker so far."""

    def unread(self) -> int:
        """Return the number of bytes that have arrived from the broker and are not read yet."""

    @property
    def payload_max(self) -> int:
        """Largest number of bytes of a channel's stream that fit into one message."""

    def post(self, route: bytes, head: bytes, payload: bytes) -> None:
        """Send a message by the end of this event-loop iteration.

        `route` is the message's subject and its reply subject, each followed by a space. The body is `head` followed by
        `payload`.
        """

    def wake(self, channel: "Channel") -> None:
        """Call `channel.turn` by the end of this event-loop iteration."""

    def forget(self, channel: "Channel") -> None:
        """Remove a channel that is closed."""


class Channel(asyncio.Transport):
    """One end of a channel. It creates its asyncio protocol when the peer has answered."""

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
        self._ending = self._peer_closed = self._closing = self._over = False
        self._received_at = self._sent_at = self._used_at = self._loop.time()
        self.own = own.encode()
        self.route = f"{other} {own} ".encode()
        self.answered: asyncio.Future[asyncio.BaseProtocol] = self._loop.create_future()

    def begin(self) -> None:
        """Create the channel's asyncio protocol. Called when the peer has answered."""
        self._protocol = self._make()
        self.answered.set_result(self._protocol)
        self._protocol.connection_made(self)

    # --- receiving

    def receive(self, kind: int, place: int, read: int, payload: bytes) -> None:
        """Process a message on this channel's subject.

        `place` is the position of `payload` in the peer's data, and `read` is how many bytes of this end's data the peer has
        read. Ignore a message of an unknown kind, because such a message is not from the peer but, for example, from the
        broker.
        """
        if not OPEN <= kind <= RESET:
            return
        self._received_at = self._loop.time()
        if kind == RESET:
            self.end(ConnectionResetError(payload.decode(errors="replace") or "the peer reset the channel"))
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
            self._peer_closed = True
            self._close_after_peer()

    def _receive(self, payload: bytes) -> None:
        self._used_at = self._received_at
        if self._closing:
            self.incoming.drop(payload)
        elif self.incoming.take(payload):
            self.carrier.wake(self)
        else:
            self._break("the peer sent more than the window allows")

    def _deliver(self) -> None:
        """Pass all buffered bytes to the protocol in one call."""
        incoming = self.incoming
        if not (incoming.held and incoming.reading) or self._closing:
            return
        assert isinstance(self._protocol, asyncio.Protocol)
        self._call_protocol(self._protocol.data_received, incoming.hand_on())
        if incoming.due and not self._over:
            self._send(DATA)

    def _call_protocol(self, call: Callable[..., None], *about: bytes) -> None:
        """Call a method of the asyncio protocol. If the method raises an exception, close this channel and no other."""
        try:
            call(*about)
        except Exception as error:
            context = {"message": "a channel's protocol failed", "exception": error, "transport": self}
            self._loop.call_exception_handler(context)
            self.abort()

    # --- sending

    def write(self, data: Any) -> None:
        if self._closing or not data:
            return
        out = self.outgoing
        out.buffer += data
        if len(out.buffer) > out.high:
            self.pump()
            if len(out.buffer) > out.high and not out.paused and self._protocol is not None:
                out.paused = True
                self._call_protocol(self._protocol.pause_writing)
        self.carrier.wake(self)

    def turn(self) -> None:
        """Pass received bytes to the protocol and send unsent bytes. Called at most once per event-loop iteration."""
        self._deliver()
        self.pump()

    def pump(self) -> None:
        """Send as many unsent bytes as the window allows."""
        out = self.outgoing
        while out.buffer and not self._over and (payload := out.take(self.carrier.payload_max)):
            self._used_at = self._loop.time()
            self._send(DATA, payload)
        if out.paused and len(out.buffer) <= out.low and self._protocol is not None:
            out.paused = False
            self._call_protocol(self._protocol.resume_writing)
        if self._ending and not out.buffer and not self._over:
            self._send(CLOSE)
            self.end(None)

    def _send(self, kind: int, payload: bytes = b"") -> None:
        out, incoming = self.outgoing, self.incoming
        self._sent_at, incoming.said_read = self._loop.time(), incoming.read
        self.carrier.post(self.route, HEAD.pack(kind, out.sent, incoming.read), payload)
        out.sent += len(payload)

    def tick(self, now: float, excused_s: float) -> None:
        """Send a keepalive if one is due, and break the channel if the peer has been silent too long.

        `excused_s` is the time for which this process itself was blocked, which does not count as silence of the peer.
        """
        self._received_at = min(now, self._received_at + excused_s)
        if now - self._received_at > SILENT_S_MAX:
            self._break(f"nothing was received for {SILENT_S_MAX:g} s")
        elif self._protocol is not None:
            lively = now - self._used_at < LIVELY_S or self.incoming.read > self.incoming.said_read
            if now - self._sent_at > (TICK_S if lively else IDLE_S) - TICK_S / 2:
                self._send(DATA)

    # --- closing

    def close(self) -> None:
        self._closing = self._ending = True
        self.incoming.drop()
        self.carrier.wake(self)

    def abort(self) -> None:
        self.incoming.drop()
        if not self._over:
            self._send(RESET)
        self.end(None)

    def _break(self, why: str) -> None:
        log.warning("channel_broken", channel=self.own.decode(), why=why)
        self.carrier.post(self.route, HEAD.pack(RESET, self.outgoing.sent, self.incoming.read), why.encode())
        self.end(ConnectionResetError(why))

    def _close_after_peer(self) -> None:
        """Close this end of the channel if the protocol has read all bytes. Called after the peer has closed its end."""
        self._deliver()
        if self.incoming.held or self._over:
            return
        if self._protocol is not None and not self._closing:
            assert isinstance(self._protocol, asyncio.Protocol)
            self._protocol.eof_received()
        self.end(None)

    def end(self, error: Exception | None) -> None:
        """Close the channel. `error` is the reason, or None if one of the two ends has closed the channel normally."""
        self._deliver()  # bytes that arrived before the channel closed
        if self._over:
            return
        self._over = self._closing = True
        self.outgoing.buffer.clear()
        self.incoming.held.clear()
        self.carrier.forget(self)
        if self._protocol is not None:
            self._loop.call_soon(self._protocol.connection_lost, error)
        elif not self.answered.done():
            self.answered.set_exception(error or ConnectionAbortedError("the dial was cancelled"))
            self.answered.exception()  # marks the exception as retrieved, because the caller of `dial` may be gone

    # --- other methods of a transport

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
        if self._peer_closed:
            self._close_after_peer()
        elif not self._over:
            self.carrier.wake(self)
