"""One NATS connection of one process: made in the background, remade for ever.

nats-py keeps a reconnect buffer that replays what was published while the broker was away, long after the
publisher has given up on it. We keep none (`pending_size=0`): while disconnected a publish raises at once;
what must not be lost is kept in the journal's outbox and spool instead.
"""

import asyncio
import contextlib
import fcntl
import importlib
import sys
import termios
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

import structlog
from nats.aio import transport
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.aio.transport import TcpTransport
from nats.errors import Error as NatsError
from nats.errors import MaxPayloadError, NoRespondersError, UnexpectedEOF

from events.errors import HoldfastError
from events.nats_parser import Raw, RawParser, hand_on

RECONNECT_WAIT_S = 0.1
CONNECT_TIMEOUT_S = 2
PING_INTERVAL_S = 2
PINGS_MAX = 2  # a broker that is silent for 4-6 s is taken for dead
PENDING_MSGS_MAX = 65536  # of one subscription; nats-py drops what is beyond, and readers notice the gap

log = structlog.get_logger(__name__)

DISCONNECTED: tuple[type[Exception], ...] = (NatsError, OSError, TimeoutError)
"""What nats-py may raise when the broker is not there or does not answer in time."""


SCHEMES = ("nats", "tls", "ws", "wss")


def masked(urls: str) -> str:
    """Return brokers' URLs that may be shown: without their passwords and tokens."""
    return ",".join(_without_account(url.strip()) for url in urls.split(","))


def _without_account(url: str) -> str:
    scheme, separator, rest = url.rpartition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"


def account(urls: str) -> dict[str, str]:
    """Return the account in brokers' URLs as nats-py's options, decoded: then it holds for those members of a cluster, too,
    that the brokers tell of. nats-py would decode nothing, and know it for none but the URL's own. Of several accounts: none."""
    found = {url.strip().rpartition("://")[2].rpartition("@")[0] for url in urls.split(",")} - {""}
    if len(found) != 1:
        return {}
    user, colon, password = found.pop().partition(":")
    return {"user": unquote(user), "password": unquote(password)} if colon else {"token": unquote(user)}


class BadBrokerUrl(HoldfastError):
    """A broker's URL reads nats://host:port, or several of them with commas between."""


def check_url(urls: str) -> None:
    """Raise BadBrokerUrl unless a broker can be meant: nats-py's task would end in silence on some of the others."""
    for url in urls.split(","):
        try:
            parts = urlsplit(url.strip())
            good = parts.scheme in SCHEMES and bool(parts.hostname) and parts.port != 0
        except ValueError:  # a port that is no number
            good = False
        if not good:
            raise BadBrokerUrl(f"{masked(url)!r} is no broker's URL. {BadBrokerUrl.__doc__}")


def _load_web_sockets(urls: str) -> None:
    """Give nats-py aiohttp, which our processes leave out while they import it (`events.imports`), where a URL needs it."""
    inner: Any = transport
    if inner.aiohttp is None and "ws" in {url.strip()[:2] for url in urls.split(",")}:
        inner.aiohttp = importlib.import_module("aiohttp")


class FastClient(Client):
    """nats-py's client with a short way for subscriptions that take many messages.

    The usual way costs a header parse that tests every character, an object, a queue and a task switch for each
    message: 30 us, where reading back a million events allows 10. It overrides private methods: the version is
    pinned, and no test of the journal passes if they are gone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.raw: dict[int, Raw] = {}
        self._ps = RawParser(self, self.raw)
        self.over = False

    async def _connect_to_server(self, s: Any) -> None:
        """Let go of a connection that broke while it was being made: nats-py would forget it, open.

        And connect no more once we are closed: the `wait_for` of Python 3.11, which nats-py uses here, can swallow the
        cancellation that ends its reconnecting, which then would go on for ever and hold up the end of the process.
        """
        if self.over:
            raise asyncio.CancelledError
        if self._transport is not None and self._transport:
            self._transport.close()  # type: ignore[no-untyped-call]
        await super()._connect_to_server(s)

    async def _process_connect_init(self) -> None:
        """Tell asyncio that the stream is under TLS now, which nats-py forgets: it would complain at each connection's end."""
        await super()._process_connect_init()
        inner: Any = self._transport
        if isinstance(inner, TcpTransport) and inner._io_writer is not None:
            transport: Any = inner._io_writer.transport
            transport.get_protocol()._over_ssl = transport.get_extra_info("sslcontext") is not None

    async def _attempt_reconnect(self) -> None:
        """Break the old connection off first, if something is unsent. nats-py waits until it has gone out, which to a host
        that is gone it does not for a quarter of an hour: nobody would hear of the loss, or look for another broker.
        (With nothing unsent that would only be a second close, after which uvloop may not come to its end.)"""
        inner: Any = self._transport
        if isinstance(inner, TcpTransport) and inner._io_writer is not None:
            transport: Any = inner._io_writer.transport
            if not transport.is_closing() and transport.get_write_buffer_size():
                transport.abort()
        await super()._attempt_reconnect()

    def say(self, subject: str, body: bytes, reply: str, headers: Mapping[str, str]) -> bool:
        """Write a message to the broker now, without a turn of the loop; False if there is none to write it to.

        Subject and headers are our own words: nothing of them is checked. Raise MaxPayloadError.
        """
        if not self.is_connected or self._transport is None:
            return False
        if len(body) > self._max_payload:
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
            self._pending = []
            self._pending_data_size = 0

    def forget_unwritten(self) -> None:
        """The connection is gone: what was not written stays unsaid. nats-py would write it first thing on the next
        one, where it would overtake what was lost on this one."""
        self._pending.clear()
        self._pending_data_size = 0

    @property
    def taken(self) -> int:
        """How many bytes were read and handed on, over all connections so far."""
        assert isinstance(self._ps, RawParser)
        return self._ps.taken

    def unsent(self) -> int:
        """Return how many bytes the broker has not taken yet."""
        inner: Any = self._transport
        written = 0
        if isinstance(inner, TcpTransport) and inner._io_writer is not None:
            written = inner._io_writer.transport.get_write_buffer_size()
        return written + self._pending_data_size

    def unread(self) -> int:
        """Return how many bytes have arrived from the broker and were not yet taken up by the read loop."""
        inner: Any = self._transport
        if not isinstance(inner, TcpTransport) or inner._io_writer is None:  # of a WebSocket nobody can tell
            return 0
        sock = inner._io_writer.get_extra_info("socket")
        if sock is None or sock.fileno() < 0:
            return 0
        waiting = fcntl.ioctl(sock.fileno(), termios.FIONREAD, b"\0\0\0\0")
        return int.from_bytes(waiting, sys.byteorder) + len(getattr(inner._io_reader, "_buffer", b""))

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: Any) -> None:
        take = self.raw.get(sid)
        if take is None:
            await super()._process_msg(sid, subject, reply, data, headers)
            return
        hand_on(take, subject, reply, data, headers)


class Interest:
    """A subscription that may be wished for before there is a connection."""

    def __init__(
        self,
        subject: str,
        callback: Callable[[Msg], Awaitable[None]] | None = None,
        raw: Raw | None = None,
    ) -> None:
        self.subject = subject
        self._callback = callback
        self._raw = raw
        self._client: FastClient | None = None
        self._inner: Subscription | None = None
        self._cancelled = False

    async def start(self, client: FastClient) -> None:
        """Tell the broker."""
        if self._cancelled:
            return
        self._client = client
        self._inner = await client.subscribe(
            self.subject, cb=self._callback, pending_msgs_limit=PENDING_MSGS_MAX, pending_bytes_limit=0
        )
        if self._raw is not None:
            client.raw[self._inner._id] = self._raw

    async def cancel(self) -> None:
        """Stop hearing."""
        self._cancelled = True
        if self._inner is not None and self._client is not None:
            self._client.raw.pop(self._inner._id, None)
            with contextlib.suppress(*DISCONNECTED):
                await self._inner.unsubscribe()


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back."""

    body: bytes
    headers: bytes | None

    @property
    def nobody(self) -> bool:
        """Whether it is the broker's word that nobody listens."""
        return not self.body and self.headers is not None and b" 503" in self.headers[:16]


class Connection:
    """A client that reconnects by itself. `since` is when the present connection was made (None: none)."""

    def __init__(self, url: str, name: str, *, echo: bool = True) -> None:
        self.url = url
        self.name = name
        self.echo = echo
        self.client = FastClient()
        self.since: float | None = None  # monotonic seconds
        self.reconnects = 0
        self.up = asyncio.Event()  # a flag: connected
        self.last_error: Exception | None = None
        self._listeners: list[Callable[[bool], None]] = []
        self._waiting: list[Interest] = []
        self._inbox = self.client.new_inbox()
        self._asked = 0
        self._answers: dict[int, asyncio.Future[Answer]] = {}
        self._ever = False
        self._closing = False
        self._task: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls, url: str, name: str, *, wait_s: float = CONNECT_TIMEOUT_S, echo: bool = True
    ) -> "Connection":
        """Start connecting; return once connected, or after `wait_s` and go on trying in the background. Without `echo`, what
        is said on it is not heard on it. Raise BadBrokerUrl.
        """
        check_url(url)
        _load_web_sockets(url)
        connection = cls(url, name, echo=echo)
        await connection.subscribe_raw(f"{connection._inbox}.*", connection._answered)
        connection._task = asyncio.create_task(connection._connect(), name=f"nats-connect-{name}")
        try:
            async with asyncio.timeout(wait_s):
                await connection.up.wait()
        except TimeoutError:
            log.warning(
                "nats_away", connection=name, url=masked(url), why=connection.why
            )  # it is tried for ever
        return connection

    @property
    def connected(self) -> bool:
        """Whether the broker can be talked to right now."""
        return self.since is not None and bool(self.client.is_connected)

    @property
    def why(self) -> str:
        """Why there is no connection."""
        return str(self.last_error or "") or "it does not answer"

    def listen(self, callback: Callable[[bool], None]) -> None:
        """Call `callback(connected)` at each change."""
        self._listeners.append(callback)

    def unlisten(self, callback: Callable[[bool], None]) -> None:
        """Call it no more."""
        if callback in self._listeners:
            self._listeners.remove(callback)

    async def subscribe(self, subject: str, callback: Callable[[Msg], Awaitable[None]]) -> Interest:
        """Hear `subject` from now or the first connection on; nats-py renews it at each reconnection."""
        interest = Interest(subject, callback)
        if self._ever:
            await interest.start(self.client)
        else:
            self._waiting.append(interest)
        return interest

    async def subscribe_raw(self, subject: str, raw: Raw) -> Interest:
        """Like `subscribe`, on the short way: for many messages, undecoded."""
        interest = Interest(subject, raw=raw)
        if self._ever:
            await interest.start(self.client)
        else:
            self._waiting.append(interest)
        return interest

    @contextlib.contextmanager
    def expect(self) -> Iterator[tuple[str, "asyncio.Future[Answer]"]]:
        """Yield an address for one answer, and its future. It fails at once when the connection breaks."""
        self._asked += 1
        token = self._asked
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._answers[token] = future
        try:
            yield f"{self._inbox}.{token}", future
        finally:
            del self._answers[token]

    async def request(
        self, subject: str, body: bytes, deadline_s: float, headers: dict[str, str] | None = None
    ) -> Answer:
        """Ask and return the first answer. Raise one of DISCONNECTED, NoRespondersError among them.

        Not nats-py's own request: its `wait_for` (of Python 3.11) can swallow a cancellation, and it waits out its
        deadline when the connection breaks.
        """
        with self.expect() as (address, future):
            async with asyncio.timeout(deadline_s):
                await self.client.publish(subject, body, address, headers)
                answer = await future
        if answer.nobody:
            raise NoRespondersError
        return answer

    def _answered(self, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        future = self._answers.get(int(subject[subject.rindex(b".") + 1 :]))
        if future is not None and not future.done():
            future.set_result(Answer(data, headers))

    async def close(self, deadline_s: float = 1.0) -> None:
        """Let go of the broker."""
        self._closing = self.client.over = True
        self._changed(False)
        self._listeners.clear()
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=deadline_s)
        with contextlib.suppress(TimeoutError, NatsError, OSError):
            async with asyncio.timeout(deadline_s):
                await self.client.close()

    async def _connect(self) -> None:
        options: dict[str, Any] = {
            "name": self.name,
            "pending_size": 0,
            "no_echo": not self.echo,
            "allow_reconnect": True,
            "max_reconnect_attempts": -1,
            "reconnect_time_wait": RECONNECT_WAIT_S,
            "connect_timeout": CONNECT_TIMEOUT_S,
            "ping_interval": PING_INTERVAL_S,
            "max_outstanding_pings": PINGS_MAX,
            "error_cb": self._on_error,
            "disconnected_cb": self._on_disconnected,
            "reconnected_cb": self._on_reconnected,
            **account(self.url),
        }
        while True:
            try:
                await self.client.connect([part.strip() for part in self.url.split(",")], **options)
                break
            except DISCONNECTED as error:
                self.last_error = error
                await asyncio.sleep(RECONNECT_WAIT_S)
        self._ever = True
        for interest in self._waiting:
            await interest.start(self.client)
        self._waiting.clear()
        self._changed(True)

    async def _on_error(self, error: Exception) -> None:
        if repr(error) != repr(self.last_error):  # one that is away says the same ten times a second
            log.debug("nats_error", error=repr(error), connection=self.name)
        refused = "authorization" in str(self.last_error).lower()
        if not (
            refused and isinstance(error, ConnectionError)
        ):  # by which the broker ends who may not come in
            self.last_error = error

    async def _on_disconnected(self) -> None:
        if not self._closing:
            log.warning("nats_disconnected", connection=self.name, url=masked(self.url))
            self.client.forget_unwritten()
            self._changed(False)

    async def _on_reconnected(self) -> None:
        self.reconnects += 1
        log.info("nats_reconnected", connection=self.name, url=masked(self.url))
        self._changed(True)

    def _changed(self, connected: bool) -> None:
        self.since = time.monotonic() if connected else None
        if connected:
            self.up.set()
        else:
            self.up.clear()
            for future in self._answers.values():
                if not future.done():
                    future.set_exception(UnexpectedEOF())
        for listener in list(self._listeners):
            listener(connected)
