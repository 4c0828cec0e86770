"""What of nats-py is overridden or touched behind its public API, all of it, and why.

    RawParser              a message costs 1.5 us of CPU to read; nats-py's own way, with its header parse that tests every
    and _process_msg       character, its object, queue and task, 15 us. Reading a million events back allows 10.
    post, write            0.5 us a message, and all of a turn of the loop in one call of the system; `publish` takes 1.6 us and
                           is a coroutine, which a transport's `write` cannot await
    say                    an event that is said alone costs 140 us until it is acknowledged, through `publish` and the
                           publisher's own task 190; it is acknowledged 50 us sooner
    forget_unwritten       nats-py writes what the last connection left unwritten first thing on the next one
    unsent, unread         no public way tells what lies in the socket
    certificate_ends       nor what the broker has shown of itself
    clustered,             no public way tells whether the broker is in a cluster, nor the whole of its version
    server_version
    _connect_to_server     nats-py forgets a connection that broke while it was being made, open; and it may connect for ever
    _process_connect_init  nats-py forgets to tell asyncio of TLS
    _attempt_reconnect     nats-py waits a quarter of an hour for a host that is gone

Measured with CPython 3.11 on one core, nats-server beside it. What the public API does within 5 % is left to it: sending
what the publisher's task has at once, the limit of a payload, how much is pending. `tests/events/nats/test_overrides.py`
fails when nats-py changes any of what is named here: read its change, then correct this file.
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
"""Takes subject, reply, body and undecoded headers of a message, in the read loop itself: it must be quick."""


def load_web_sockets(urls: str) -> None:
    """Give nats-py aiohttp, which our processes leave out while they import (`events.process.imports`), where a URL needs it."""
    inner: Any = transport
    if inner.aiohttp is None and "ws" in {url.strip()[:2] for url in urls.split(",")}:
        inner.aiohttp = importlib.import_module("aiohttp")


class RawParser(Parser):
    """Reads what the broker sends, with a short way for whole messages of the subscriptions in `raw`, by their id.

    nats-py's own way looks for each message with up to seven expressions and moves the rest of the buffer twice; here the
    buffer is walked once, and what is not a whole message of a raw subscription is left to nats-py.
    """

    def __init__(self, nc: Any, raw: dict[int, Raw]) -> None:
        super().__init__(nc)
        self._raw = raw
        self.taken = 0  # bytes that were handed on

    async def parse(self, data: bytes = b"") -> None:
        """Hand on all that has arrived whole. Raise nats-py's ProtocolError."""
        own, self.taken = self.buf, self.taken + len(data)
        while data and self.buf is own:  # another one: the connection was begun anew meanwhile
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
        """Hand on the whole raw messages at the front of `data`; return where they end."""
        at = 0
        while (headed := data.startswith(b"HMSG ", at)) or data.startswith(b"MSG ", at):
            line = data.find(b"\r\n", at)
            fields = data[at:line].split() if line >= 0 else []
            try:
                _, subject, sid, *reply, size = fields
                take = self._raw[int(sid)]
                begin = line + CRLF_SIZE
                body, end = begin + int(reply.pop()) if headed else begin, begin + int(size)
            except (ValueError, KeyError, IndexError):  # not whole, not well formed, or not ours
                return at
            if end + CRLF_SIZE > len(data) or len(reply) > 1:
                return at
            at = end + CRLF_SIZE
            headers = data[begin:body] if headed else None
            _hand_on(take, subject, reply[0] if reply else b"", data[body:end], headers)
        return at


def _hand_on(take: Raw, subject: bytes, reply: bytes, body: bytes, headers: bytes | None) -> None:
    """Give a message to who wants it. What he raises is said, for it would end nats-py's read loop for ever."""
    try:
        take(subject, reply, body, headers)
    except Exception:
        log.exception("nats_message_refused", subject=subject)


class FastClient(Client):
    """nats-py's client with short ways for many messages, and with the mends of its connections that are named above."""

    def __init__(self) -> None:
        super().__init__()
        self._raw: dict[int, Raw] = {}
        self._raw_parser = self._ps = RawParser(self, self._raw)
        self._ended = False

    # --- what comes in ------------------------------------------------------------------------------------

    def hear_raw(self, subscription: Subscription, take: Raw) -> None:
        """Hand a subscription's messages on undecoded, in the read loop."""
        self._raw[subscription._id] = take  # by what the parser calls it: nats-py has no other name for it

    def hear_no_more(self, subscription: Subscription) -> None:
        """Undo `hear_raw`."""
        self._raw.pop(subscription._id, None)  # as above

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: Any) -> None:
        """Hand on also those raw messages that arrived in several pieces."""
        take = self._raw.get(sid)
        if take is None:
            await super()._process_msg(sid, subject, reply, data, headers)
            return
        _hand_on(take, subject, reply, data, headers)

    @property
    def taken(self) -> int:
        """How many bytes were read and handed on, over all connections so far."""
        return self._raw_parser.taken

    def unread(self) -> int:
        """Return how many bytes have arrived from the broker and were not yet taken up by the read loop."""
        inner: Any = self._transport
        stream = self._stream()
        sock = stream.get_extra_info("socket") if stream is not None else None
        if sock is None or sock.fileno() < 0:
            return 0
        waiting = fcntl.ioctl(sock.fileno(), termios.FIONREAD, b"\0\0\0\0")
        # what asyncio has read for nats-py and nats-py has not asked for yet: neither of the two says how much
        return int.from_bytes(waiting, sys.byteorder) + len(getattr(inner._io_reader, "_buffer", b""))

    # --- what goes out ------------------------------------------------------------------------------------

    def say(self, subject: str, body: bytes, reply: str, headers: Mapping[str, str]) -> bool:
        """Write a message to the broker now, without a turn of the loop; False if there is none to write it to.

        Subject and headers are our own words: nothing of them is checked. Raise MaxPayloadError.
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
        """Let the next `write` send a message without headers; False if there is no broker. `route` is its subject and
        the reply's, a blank after each; the message is `head` and `body` together. Nothing is checked."""
        if not self.is_connected:
            return False
        message = b"".join((b"PUB ", route, b"%d\r\n" % (len(head) + len(body)), head, body, b"\r\n"))
        self._pending.append(message)
        self._pending_data_size += len(message)
        return True

    def write(self) -> None:
        """Write what was published in this turn of the loop at once. nats-py's own writer has its turn one or two later."""
        if self.is_connected and self._transport is not None and self._pending_data_size > 0:
            try:
                self._transport.writelines(self._pending)
            except (OSError, RuntimeError):
                return  # its own writer meets the same, and ends the connection
            self.forget_unwritten()

    def forget_unwritten(self) -> None:
        """The connection is gone: what was not written stays unsaid. nats-py would write it first thing on the next
        one, where it would overtake what was lost on this one."""
        self._pending = []
        self._pending_data_size = 0

    def unsent(self) -> int:
        """Return how many bytes the broker has not taken yet."""
        stream = self._stream()
        written = stream.get_write_buffer_size() if stream is not None else 0
        return written + self.pending_data_size

    # --- the broker, and the connection to it -------------------------------------------------------------

    @property
    def clustered(self) -> bool:
        """Whether the broker belongs to a cluster, however many of its nodes are up."""
        return bool(self._server_info.get("cluster"))

    @property
    def server_version(self) -> str:
        """The broker's version, as it says it."""
        return str(self._server_info.get("version", "unknown"))

    def _stream(self) -> asyncio.WriteTransport | None:
        """Return asyncio's transport of the connection; None without one, and of a WebSocket: nobody can tell."""
        inner: Any = self._transport
        # nats-py's own transport shows asyncio's to nobody
        if not isinstance(inner, TcpTransport) or inner._io_writer is None:
            return None
        found: asyncio.WriteTransport = inner._io_writer.transport  # as above
        return found

    @property
    def certificate_ends(self) -> float | None:
        """When the certificate ends that the broker has shown at this connection, in seconds since 1970; None without TLS, and
        of a WebSocket."""
        stream = self._stream()
        tls = stream.get_extra_info("ssl_object") if stream is not None else None
        shown = tls.getpeercert() if tls is not None else None  # empty where it was not looked at
        return ssl.cert_time_to_seconds(shown["notAfter"]) if shown else None

    def connect_no_more(self) -> None:
        """Let no attempt to connect begin from now on: we are closed."""
        self._ended = True

    async def _connect_to_server(self, s: Any) -> None:
        """Let go of a connection that broke while it was being made: nats-py would forget it, open.

        And connect no more once we are closed: the `wait_for` of Python 3.11, which nats-py uses here, can swallow the
        cancellation that ends its reconnecting, which then would go on for ever and hold up the end of the process.
        """
        if self._ended:
            raise asyncio.CancelledError
        if self._transport is not None and self._transport:
            self._transport.close()  # type: ignore[no-untyped-call]
        await super()._connect_to_server(s)

    async def _process_connect_init(self) -> None:
        """Tell asyncio that the stream is under TLS now, which nats-py forgets: it would complain at each connection's end."""
        await super()._process_connect_init()
        stream = self._stream()
        if stream is not None:
            reader: Any = stream.get_protocol()
            # asyncio sets it only where it makes the connection itself; nats-py has wrapped one that was there
            reader._over_ssl = stream.get_extra_info("sslcontext") is not None

    async def _attempt_reconnect(self) -> None:
        """Break the old connection off first, if something is unsent. nats-py waits until it has gone out, which to a host
        that is gone it does not for a quarter of an hour: nobody would hear of the loss, or look for another broker.
        (With nothing unsent that would only be a second close, after which uvloop may not come to its end.)"""
        stream = self._stream()
        if stream is not None and not stream.is_closing() and stream.get_write_buffer_size():
            stream.abort()
        await super()._attempt_reconnect()
