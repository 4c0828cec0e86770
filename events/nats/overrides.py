"""Lists every part of nats-py that is overridden or used beyond its public API, and why.

    RawParser              reading a message costs 1.5 us of CPU. nats-py takes 15 us, because it tests every character of the
    and _process_msg       headers and uses an object, a queue and a task. A replay of a million events allows 10 us per message.
    post, write            0.5 us per message, and one system call per event-loop iteration; `publish` takes 1.6 us and
                           is a coroutine, which a transport's `write` cannot await
    publish_now            a single event takes 140 us until it is acknowledged, but 190 us through `publish` and the
                           publisher's own task
    forget_unwritten       after a reconnection, nats-py first writes the data that the broken connection had not written
    unsent, unread         the public API does not report how many bytes are in the socket
    certificate_ends       the public API does not report the broker's certificate
    clustered,             the public API reports neither whether the broker is in a cluster nor its complete version
    server_version
    _connect_to_server     nats-py leaks a connection that broke while it was being established; and it may connect forever
    _process_connect_init  nats-py does not tell asyncio of TLS
    _attempt_reconnect     nats-py waits a quarter of an hour for a host that is gone

The times are measured with CPython 3.11 on one core, with nats-server on the same host. The public API is used where it is
within 5 % of the faster way: for the facts that the publisher's task sends together, the payload limit, and the number of
pending bytes. `tests/events/nats/test_overrides.py` fails when nats-py changes any part that this list names. Then read that
change and correct this file.
"""

import asyncio
import fcntl
import importlib
import ssl
import sys
import termios
from collections.abc import Callable, Mapping
from typing import Any

import structlog
from nats.aio import transport
from nats.aio.client import Client
from nats.aio.subscription import Subscription
from nats.aio.transport import TcpTransport
from nats.errors import MaxPayloadError
from nats.protocol.parser import AWAITING_CONTROL_LINE, CRLF_SIZE, Parser

log = structlog.get_logger(__name__)

Raw = Callable[[bytes, bytes, bytes, bytes | None], None]
"""A function that the read loop calls with a message's subject, reply subject, body and undecoded headers. It must be quick."""


def load_web_sockets(urls: str) -> None:
    """Load aiohttp into nats-py if a URL has a WebSocket scheme. Holdfast's processes exclude aiohttp when they import nats-py
    (`events.process.imports`)."""
    inner: Any = transport
    if inner.aiohttp is None and "ws" in {url.strip()[:2] for url in urls.split(",")}:
        inner.aiohttp = importlib.import_module("aiohttp")


class RawParser(Parser):
    """Parses the broker's data, with a fast path for complete messages of raw subscriptions (their handlers get undecoded
    messages).

    `raw` has the handlers of raw subscriptions by subscription id. nats-py matches each message against up to seven regular
    expressions and moves the rest of the buffer twice. This parser traverses the buffer once. It leaves all data except
    complete raw messages to nats-py.
    """

    def __init__(self, nc: Any, raw: dict[int, Raw]) -> None:
        super().__init__(nc)
        self._raw = raw
        self.taken = 0  # number of bytes that were parsed

    async def parse(self, data: bytes = b"") -> None:
        """Parse data from the broker and call the handlers of all complete messages. Raise nats-py's ProtocolError for invalid
        data."""
        own, self.taken = self.buf, self.taken + len(data)
        while data and self.buf is own:  # a new buffer means that the connection was restarted meanwhile
            if self.state != AWAITING_CONTROL_LINE:
                size = self.needed + CRLF_SIZE - len(own)
            else:
                if own:
                    data = bytes(own) + data
                    own.clear()
                data = data[self._take_whole(data) :]
                line = data.find(b"\r\n")
                size = line + CRLF_SIZE if line >= 0 else len(data)
            await super().parse(data[:size])
            data = data[size:]

    def _take_whole(self, data: bytes) -> int:
        """Call the handlers of the complete raw messages at the front of `data`. Return the offset after the last of these
        messages."""
        at = 0
        while (headed := data.startswith(b"HMSG ", at)) or data.startswith(b"MSG ", at):
            line = data.find(b"\r\n", at)
            fields = data[at:line].split() if line >= 0 else []
            try:
                _, subject, sid, *reply, size = fields
                take = self._raw[int(sid)]
                begin = line + CRLF_SIZE
                body, end = begin + int(reply.pop()) if headed else begin, begin + int(size)
            except (ValueError, KeyError, IndexError):  # incomplete, malformed, or not raw
                return at
            if end + CRLF_SIZE > len(data) or len(reply) > 1:
                return at
            at = end + CRLF_SIZE
            headers = data[begin:body] if headed else None
            _call_handler(take, subject, reply[0] if reply else b"", data[body:end], headers)
        return at


def _call_handler(take: Raw, subject: bytes, reply: bytes, body: bytes, headers: bytes | None) -> None:
    """Call a message's handler. Log an exception of the handler, because the exception would end nats-py's read loop."""
    try:
        take(subject, reply, body, headers)
    except Exception:
        log.exception("nats_message_refused", subject=subject)


class FastClient(Client):
    """nats-py's client with fast paths for many messages, and with the corrections that the module's docstring lists."""

    def __init__(self) -> None:
        super().__init__()
        self._raw: dict[int, Raw] = {}
        self._raw_parser = self._ps = RawParser(self, self._raw)
        self._ended = False

    # --- receiving ----------------------------------------------------------------------------------------

    def deliver_raw(self, subscription: Subscription, take: Raw) -> None:
        """Call `take` with each message of a subscription, undecoded, in the read loop."""
        self._raw[subscription._id] = take  # the parser's id: nats-py has no public name for it

    def stop_delivery(self, subscription: Subscription) -> None:
        """Remove the handler that `deliver_raw` added to a subscription."""
        self._raw.pop(subscription._id, None)  # as above

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: Any) -> None:
        """Pass a message that nats-py has parsed to its handler.

        nats-py parses a message itself if the message arrived in several pieces, or if its subscription has no raw handler.
        """
        take = self._raw.get(sid)
        if take is None:
            await super()._process_msg(sid, subject, reply, data, headers)
            return
        _call_handler(take, subject, reply, data, headers)

    @property
    def taken(self) -> int:
        """Number of bytes that the parser has read, over all connections so far."""
        return self._raw_parser.taken

    def unread(self) -> int:
        """Return the number of bytes that have arrived from the broker and that the read loop has not processed yet."""
        inner: Any = self._transport
        stream = self._stream()
        sock = stream.get_extra_info("socket") if stream is not None else None
        if sock is None or sock.fileno() < 0:
            return 0
        waiting = fcntl.ioctl(sock.fileno(), termios.FIONREAD, b"\0\0\0\0")
        # adds the bytes that asyncio has buffered and nats-py has not read; no public API reports their number
        return int.from_bytes(waiting, sys.byteorder) + len(getattr(inner._io_reader, "_buffer", b""))

    # --- sending ------------------------------------------------------------------------------------------

    def publish_now(self, subject: str, body: bytes, reply: str, headers: Mapping[str, str]) -> bool:
        """Write a message to the broker immediately, without waiting for the event loop. Return False if the broker is not
        connected.

        The caller must pass a valid `subject` and valid `headers`, because they are not checked. Raise MaxPayloadError if the
        body is too large for the broker.
        """
        if not self.is_connected or self._transport is None:
            return False
        if len(body) > self.max_payload:
            raise MaxPayloadError
        lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        head = f"NATS/1.0\r\n{lines}\r\n".encode()
        size = len(head) + len(body)
        command = f"HPUB {subject} {reply} {len(head)} {size}\r\n".encode()
        self.stats["out_msgs"] += 1
        self.stats["out_bytes"] += len(body)
        self._pending.append(b"".join((command, head, body, b"\r\n")))
        self._pending_data_size += len(command) + size + 2
        self.write()
        return True

    def post(self, route: bytes, head: bytes, body: bytes) -> bool:
        """Queue a message without headers for the next `write`. Return False if the broker is not connected.

        `route` is the subject and the reply subject, each followed by a space. The message is `head` followed by `body`. The
        arguments are not checked.
        """
        if not self.is_connected:
            return False
        message = b"".join((b"PUB ", route, b"%d\r\n" % (len(head) + len(body)), head, body, b"\r\n"))
        self._pending.append(message)
        self._pending_data_size += len(message)
        return True

    def write(self) -> None:
        """Write the messages of this event-loop iteration to the broker immediately. nats-py's own writer would write them one
        or two iterations later."""
        if self.is_connected and self._transport is not None and self._pending_data_size > 0:
            try:
                self._transport.writelines(self._pending)
            except (OSError, RuntimeError):
                return  # nats-py's own writer gets the same error and ends the connection
            self.forget_unwritten()

    def forget_unwritten(self) -> None:
        """Drop the data that is not written yet.

        Called when the connection is lost. nats-py would write this data first on the next connection, before data that was
        published earlier and is sent again.
        """
        self._pending = []
        self._pending_data_size = 0

    def unsent(self) -> int:
        """Return the number of bytes that are not yet passed to the operating system."""
        stream = self._stream()
        written = stream.get_write_buffer_size() if stream is not None else 0
        return written + self.pending_data_size

    # --- the broker, and the connection to it -------------------------------------------------------------

    @property
    def clustered(self) -> bool:
        """Whether the broker belongs to a cluster, even if other nodes of the cluster are down."""
        return bool(self._server_info.get("cluster"))

    @property
    def server_version(self) -> str:
        """The version that the broker reports, or "unknown"."""
        return str(self._server_info.get("version", "unknown"))

    def _stream(self) -> asyncio.WriteTransport | None:
        """Return asyncio's transport of the connection. Return None without a connection, and for a WebSocket, which does not
        expose its transport."""
        inner: Any = self._transport
        # nats-py's own transport does not expose asyncio's
        if not isinstance(inner, TcpTransport) or inner._io_writer is None:
            return None
        found: asyncio.WriteTransport = inner._io_writer.transport  # as above
        return found

    @property
    def certificate_ends(self) -> float | None:
        """When the certificate that the broker presented on this connection expires, in seconds since 1970.

        None without TLS, for a certificate that was not verified, and for a WebSocket.
        """
        stream = self._stream()
        tls = stream.get_extra_info("ssl_object") if stream is not None else None
        shown = tls.getpeercert() if tls is not None else None  # empty if the certificate was not verified
        return ssl.cert_time_to_seconds(shown["notAfter"]) if shown else None

    def connect_no_more(self) -> None:
        """Start no further attempt to connect. Called when the client is closed."""
        self._ended = True

    async def _connect_to_server(self, s: Any) -> None:
        """Before connecting, close a connection that broke while it was being established, because nats-py would leave that
        connection open.

        Raise CancelledError if the client is closed. Without this error, nats-py could reconnect forever and delay the end of
        the process: its `wait_for` (of Python 3.11) can swallow the cancellation that ends its reconnecting.
        """
        if self._ended:
            raise asyncio.CancelledError
        if self._transport is not None and self._transport:
            self._transport.close()  # type: ignore[no-untyped-call]
        await super()._connect_to_server(s)

    async def _process_connect_init(self) -> None:
        """Complete the connection as nats-py does, and then inform asyncio that the stream now uses TLS.

        nats-py does not inform asyncio, which would therefore log a warning when the connection ends.
        """
        await super()._process_connect_init()
        stream = self._stream()
        if stream is not None:
            reader: Any = stream.get_protocol()
            # asyncio sets this flag only on connections that it creates; nats-py has wrapped an existing one
            reader._over_ssl = stream.get_extra_info("sslcontext") is not None

    async def _attempt_reconnect(self) -> None:
        """Before reconnecting, abort the old connection if it has unsent data.

        nats-py waits until that data is sent, which takes a quarter of an hour if the host is gone. During that time the loss
        is not reported, and no other broker is tried. A connection without unsent data is not aborted, because the abort would
        be a second close, after which uvloop may never finish.
        """
        stream = self._stream()
        if stream is not None and not stream.is_closing() and stream.get_write_buffer_size():
            stream.abort()
        await super()._attempt_reconnect()
