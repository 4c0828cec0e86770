"""One NATS connection of a process, established in the background and re-established forever.

nats-py has a reconnect buffer, which keeps what was published while the broker was unreachable, and sends it long after the
publisher has given up. The connection disables this buffer (`pending_size=0`), so that a publish raises at once while
disconnected. Facts that must not be lost are kept in the journal's outbox and spool instead.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import structlog
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError, UnexpectedEOF

from events import subjects
from events.json_types import Json
from events.nats.overrides import FastClient, Raw, load_web_sockets
from events.nats.urls import account, addresses, check_url, inbox, masked, user

RECONNECT_WAIT_S = 0.1
CONNECT_TIMEOUT_S = 2
PING_INTERVAL_S = 2
PINGS_MAX = 2  # unanswered pings; a broker that is silent for 4-6 s is considered dead
# limit of each subscription; nats-py drops further messages, and readers detect the gap
PENDING_MSGS_MAX = 65536
FORBIDDEN = "permissions violation"
TOLD_MAX = 64  # distinct denials that are logged

T = TypeVar("T")

log = structlog.get_logger(__name__)

DISCONNECTED: tuple[type[Exception], ...] = (NatsError, OSError, TimeoutError)
"""Errors that nats-py may raise when the broker is unreachable or does not respond in time."""


async def when_connected(subscribe: Callable[[], Awaitable[T]], retry_s: float = 0.2) -> T:
    """Call `subscribe` and return its result. While the broker is unreachable, repeat the call every `retry_s` seconds."""
    while True:
        try:
            return await subscribe()
        except DISCONNECTED:
            await asyncio.sleep(retry_s)


class NotPermitted(NatsError):
    """The broker's permissions do not let this account publish a request, or subscribe to the reply."""


@dataclass(eq=False)
class Interest:
    """A subscription that may be requested before the broker is connected."""

    client: FastClient
    subject: str
    callback: Callable[[Msg], Awaitable[None]] | None = None
    raw: Raw | None = None
    queue: str = ""  # group of subscribers that share the messages; empty: each subscriber gets all messages
    _inner: Subscription | None = None
    _cancelled: bool = False

    async def start(self) -> None:
        """Subscribe at the broker, unless the subscription was cancelled before."""
        if self._cancelled:
            return
        self._inner = await self.client.subscribe(
            self.subject,
            queue=self.queue,
            cb=self.callback,
            pending_msgs_limit=PENDING_MSGS_MAX,
            pending_bytes_limit=0,
        )
        if self.raw is not None:
            self.client.deliver_raw(self._inner, self.raw)

    async def cancel(self) -> None:
        """Unsubscribe at the broker, and do not subscribe later."""
        self._cancelled = True
        if self._inner is not None:
            self.client.stop_delivery(self._inner)
            with contextlib.suppress(*DISCONNECTED):
                await self._inner.unsubscribe()


@dataclass(frozen=True, slots=True)
class BrokerReply:
    """The reply to a request, or the broker's notice that the request has no subscriber."""

    body: bytes
    headers: bytes | None

    @property
    def no_responders(self) -> bool:
        """Whether this is the broker's notice that the subject has no subscriber."""
        return not self.body and self.headers is not None and b" 503" in self.headers[:16]


class BrokerConnection:
    """A NATS client that reconnects automatically.

    `since` is the monotonic time in seconds at which the current connection was established, or None while disconnected.
    """

    def __init__(self, url: str, name: str, *, echo: bool = True) -> None:
        self.url = url
        self.name = name
        self.echo = echo
        self.client = FastClient()
        self.since: float | None = None  # monotonic seconds
        self.up = asyncio.Event()  # set while the broker is connected
        self.last_error: Exception | None = None
        self.refused = 0  # number of publications and subscriptions that the broker denied
        self._logged_denials: set[str] = set()
        self._listeners: list[Callable[[bool], None]] = []
        self._waiting: list[Interest] = []
        # this process's account name in the broker's permissions; empty: the URL does not state it
        self.user = user(url)
        own = self.client.new_inbox().rpartition(".")[2]  # unique on this broker
        self._inbox = f"{inbox(url)}.{own}"
        self._asks_workers = False
        self._asked = 0
        # the reply that each request waits for, and the request's subject in lower case
        self._answers: dict[int, tuple[asyncio.Future[BrokerReply], str]] = {}
        self._ever = False
        self._closing = False
        self._task: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls, url: str, name: str, *, wait_s: float | None = None, echo: bool = True
    ) -> "BrokerConnection":
        """Return a connection to the broker.

        If the broker is not connected within `wait_s` (2 s by default), the returned connection continues to connect in the
        background. If `echo` is not set, the connection does not receive its own messages. Raise BadBrokerUrl if the URL is not
        valid.
        """
        check_url(url)
        load_web_sockets(url)
        connection = cls(url, name, echo=echo)
        await connection.subscribe_raw(f"{connection._inbox}.*", connection._answered)
        connection._task = asyncio.create_task(connection._connect(), name=f"nats-connect-{name}")
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S if wait_s is None else wait_s):
                await connection.up.wait()
        except TimeoutError:
            # connecting continues in the background
            log.warning("nats_away", connection=name, url=masked(url), why=connection.why)
        return connection

    @property
    def asker(self) -> str:
        """The two subject tokens that identify this connection as a requester: its account name and its inbox token."""
        return f"{self.user or subjects.ANONYMOUS}.{self._inbox.rpartition('.')[2]}"

    @property
    def connected(self) -> bool:
        """Whether the broker is connected."""
        return self.since is not None and bool(self.client.is_connected)

    @property
    def certificate_ends(self) -> float | None:
        """When the broker's certificate expires, in seconds since 1970. None if the broker presents no certificate or is not
        connected."""
        return self.client.certificate_ends if self.connected else None

    @property
    def why(self) -> str:
        """The reason why the broker is not connected, as text for logs and errors."""
        return str(self.last_error or "") or "it does not respond"

    def listen(self, callback: Callable[[bool], None]) -> None:
        """Call `callback` with True whenever the broker gets connected, and with False whenever it gets disconnected."""
        self._listeners.append(callback)

    def unlisten(self, callback: Callable[[bool], None]) -> None:
        """Stop calling a callback that was passed to `listen`."""
        if callback in self._listeners:
            self._listeners.remove(callback)

    async def subscribe(self, subject: str, callback: Callable[[Msg], Awaitable[None]]) -> Interest:
        """Subscribe to `subject`, at once or after the first connection. nats-py renews the subscription at each
        reconnection."""
        return await self._start(Interest(self.client, subject, callback))

    async def subscribe_raw(self, subject: str, raw: Raw, *, queue: str = "") -> Interest:
        """Subscribe as `subscribe` does, but call `raw` with each message undecoded. This is faster for many messages.

        If `queue` is set, each message goes to only one of the subscribers with the same `queue`.
        """
        return await self._start(Interest(self.client, subject, raw=raw, queue=queue))

    async def _start(self, interest: Interest) -> Interest:
        if self._ever:
            await interest.start()
        else:
            self._waiting.append(interest)
        return interest

    def new_inbox(self) -> str:
        """Return a new reply subject for this connection. If the broker has an account for this process, no other account may
        subscribe to the subject."""
        self._asked += 1
        return f"{self._inbox}-{self._asked}"

    async def subscribe_answers(self, heard: Raw) -> None:
        """Call `heard` with each reply of a worker to this connection, undecoded."""
        await self.subscribe_raw(subjects.answers(self.asker), heard)

    @contextlib.contextmanager
    def expect(self, request: str = "") -> Iterator[tuple[str, "asyncio.Future[BrokerReply]"]]:
        """Yield a reply subject for one reply, and the future of that reply. The future fails at once if the connection
        breaks.

        `request` is the subject of the request. The future also fails if the broker denies a publication on that subject. If
        the request addresses a worker, the reply subject contains the worker's name, because the broker lets no other process
        publish on such a subject.
        """
        self._asked += 1
        token, worker = self._asked, subjects.addressed_worker(request)
        future: asyncio.Future[BrokerReply] = asyncio.get_running_loop().create_future()
        self._answers[token] = future, request.lower()
        try:
            yield subjects.answer(worker, self.asker, token) if worker else f"{self._inbox}.{token}", future
        finally:
            del self._answers[token]

    async def request(
        self, subject: str, body: bytes, deadline_s: float, headers: dict[str, str] | None = None
    ) -> BrokerReply:
        """Send a request and return the first reply.

        Raise NatsError, OSError or TimeoutError if there is no reply. NoRespondersError and NotPermitted are subclasses of
        NatsError.

        nats-py's own `request` is not used: its `wait_for` (of Python 3.11) can swallow a cancellation. After the
        connection breaks, nats-py's `request` also waits until its timeout.
        """
        if no_replies := self._why_no_replies():
            raise NotPermitted(no_replies)
        with self.expect(subject) as (address, future):
            async with asyncio.timeout(deadline_s):
                if subjects.addressed_worker(subject) and not self._asks_workers:
                    # set before the await, because two requests may be sent at the same time
                    self._asks_workers = True
                    await self.subscribe_answers(self._answered)
                await self.client.publish(subject, body, address, headers)
                answer = await future
        if answer.no_responders:
            raise NoRespondersError
        return answer

    def _why_no_replies(self) -> str:
        """Return why this connection cannot receive replies. Return an empty string if it can."""
        if not any(self._inbox.lower() in why.lower() for why in self._logged_denials):
            return ""
        return f"the broker does not let {self._account()} subscribe to {self._inbox}.*, where replies arrive"

    def _account(self) -> str:
        return f"the account {self.user!r}" if self.user else "the account of this connection"

    def _answered(self, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        future, _ = self._answers.get(int(subject[subject.rindex(b".") + 1 :]), (None, ""))
        if future is not None and not future.done():
            future.set_result(BrokerReply(data, headers))

    async def close(self, deadline_s: float = 1.0) -> None:
        """Close the connection within about two times `deadline_s` seconds."""
        self._closing = True
        self.client.connect_no_more()
        self._changed(False)
        self._listeners.clear()
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=deadline_s)
        # In a task, because nats-py ends its own reconnecting by a cancellation that reaches every waiter for the same transport.
        closing = asyncio.create_task(self.client.close(), name=f"nats-close-{self.name}")
        await asyncio.wait({closing}, timeout=deadline_s)
        if not closing.done():
            closing.cancel()
        elif not closing.cancelled():
            with contextlib.suppress(*DISCONNECTED):
                closing.result()

    async def _connect(self) -> None:
        options: Json = {
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
                await self.client.connect(addresses(self.url), **options)
                break
            except DISCONNECTED as error:
                self.last_error = error
                await asyncio.sleep(RECONNECT_WAIT_S)
        self._ever = True
        for interest in self._waiting:
            await interest.start()
        self._waiting.clear()
        self._changed(True)

    async def _on_error(self, error: Exception) -> None:
        if FORBIDDEN in str(error).lower():
            self._forbidden(str(error))
        # log an error once, because an unreachable broker causes the same error ten times a second
        if repr(error) != repr(self.last_error):
            log.debug("nats_error", error=repr(error), connection=self.name)
        refused = "authorization" in str(self.last_error).lower()
        # keep the refusal as the last error, because the broker then closes the connection with a ConnectionError
        if not (refused and isinstance(error, ConnectionError)):
            self.last_error = error

    def _forbidden(self, why: str) -> None:
        """Count a denied publication or subscription, and log each distinct denial once. Fail the waiting requests that the
        denial affects."""
        self.refused += 1
        if why not in self._logged_denials and len(self._logged_denials) < TOLD_MAX:
            self._logged_denials.add(why)
            log.error("broker_refuses", connection=self.name, user=self.user, why=why)
        no_replies = self._why_no_replies()
        for future, subject in self._answers.values():
            refused = subject and (no_replies or f'publish to "{subject}"' in why.lower())
            if refused and not future.done():
                denial = no_replies or f"the broker does not let {self._account()} publish to {subject}"
                future.set_exception(NotPermitted(denial))

    async def _on_disconnected(self) -> None:
        if not self._closing:
            log.warning("nats_disconnected", connection=self.name, url=masked(self.url))
            self.client.forget_unwritten()
            self._changed(False)

    async def _on_reconnected(self) -> None:
        log.info("nats_reconnected", connection=self.name, url=masked(self.url))
        self._changed(True)

    def _changed(self, connected: bool) -> None:
        self.since = time.monotonic() if connected else None
        if not connected:  # forget denied replies, because the next connection may have other permissions
            self._logged_denials = {
                why for why in self._logged_denials if self._inbox.lower() not in why.lower()
            }
        if connected:
            self.up.set()
        else:
            self.up.clear()
            for future, _ in self._answers.values():
                if not future.done():
                    future.set_exception(UnexpectedEOF())
        for listener in list(self._listeners):
            listener(connected)
