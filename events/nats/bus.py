"""The message bus: sends messages that are not stored, such as heartbeats and link reports.

Messages are JSON on core NATS. A message without a subscriber is lost, so messages that must be kept go to the journal.
"""

import inspect
from collections.abc import Awaitable, Callable
from typing import Protocol

import msgspec
import structlog
from nats.aio.msg import Msg
from nats.errors import NoRespondersError

from events.errors import HoldfastError
from events.json_types import Json, JsonView
from events.nats.connection import DISCONNECTED, BrokerConnection, NotPermitted

Body = JsonView
Answer = Body | None
Handler = Callable[[str, Body], Answer | Awaitable[Answer]]
"""A function that is called with a message's subject and body. Its result is sent as the reply if the sender requested one."""
Notice = Callable[[str, Body], None]
Admits = Callable[[str, int], bool]
"""A function that is called with a message's subject and size. It returns False if the message is to be dropped."""

log = structlog.get_logger(__name__)
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Json).decode


class BusUnavailable(HoldfastError):
    """The broker (NATS) cannot be reached. Start it, or check HOLDFAST_NATS_URL."""


class NoAnswer(HoldfastError):
    """No reply arrived in time."""


class NoSubscriber(NoAnswer):
    """No process subscribes to the subject of the request."""


class NotAllowed(NoAnswer):
    """The broker's permissions deny this account the request. Use the account of its role: `holdfast nats permissions`."""


class Subscription(Protocol):
    """The subscription of one handler to a subject, which can be cancelled."""

    async def cancel(self) -> None:
        """Unsubscribe the handler from the subject."""


class Bus(Protocol):
    """The interface of the message bus.

    `since` is the monotonic time in seconds at which the present connection began, or None without a connection. `unread` is
    the number of bytes that have arrived and are not read yet. A process with many unread bytes has not processed recent
    messages.
    """

    @property
    def since(self) -> float | None: ...
    @property
    def unread(self) -> int: ...
    async def publish(self, subject: str, body: Body) -> bool:
        """Publish `body`. Never raises. Return False if the broker is unreachable and the message was not published."""

    async def subscribe(self, subject: str, handler: Handler) -> Subscription:
        """Call `handler` for each message on `subject`. The subscription survives reconnections."""

    async def subscribe_notices(self, subject: str, handler: Notice, admits: Admits) -> Subscription:
        """Call `handler` for each message on `subject` that `admits` accepts by the message's subject and size.

        A message that `admits` rejects is not decoded. No message gets a reply, whether it is accepted or rejected.
        """

    async def request(self, subject: str, body: Body, deadline_s: float = 2.0) -> Body:
        """Send a request and return the first reply. Raise BusUnavailable, NoSubscriber, NotAllowed, or NoAnswer after
        `deadline_s`."""

    async def close(self) -> None: ...


class NatsBus:
    """The message bus on core NATS, over one connection."""

    def __init__(self, connection: BrokerConnection) -> None:
        self.connection = connection
        self.refused = 0  # number of messages that were not published because the broker was unreachable
        self.faults = 0  # number of handler calls that raised, and of bodies that were not JSON objects

    @classmethod
    async def connect(cls, url: str, name: str, *, wait_s: float = 2.0, echo: bool = True) -> "NatsBus":
        """Return a bus over a connection to the broker.

        If the broker is not connected within `wait_s` seconds, the returned bus continues to connect in the background. If
        `echo` is not set, the bus does not receive its own messages.
        """
        return cls(await BrokerConnection.open(url, name, wait_s=wait_s, echo=echo))

    @property
    def since(self) -> float | None:
        return self.connection.since if self.connection.connected else None

    @property
    def unread(self) -> int:
        client = self.connection.client
        return client.unread()

    async def publish(self, subject: str, body: Body) -> bool:
        if not self.connection.connected:
            self.refused += 1
            return False
        client = self.connection.client
        try:
            await client.publish(subject, _encode(body))
        except DISCONNECTED:
            self.refused += 1
            return False
        return True

    async def subscribe(self, subject: str, handler: Handler) -> Subscription:
        async def heard(message: Msg) -> None:
            answer = await self._handle(handler, message)
            if message.reply and answer is not None:
                await self.publish(message.reply, answer)

        return await self.connection.subscribe(subject, heard)

    async def subscribe_notices(self, subject: str, handler: Notice, admits: Admits) -> Subscription:
        def heard(subject: bytes, reply: bytes, body: bytes, headers: bytes | None) -> None:
            name = subject.decode("utf-8", "replace")
            if not admits(name, len(body)):
                return
            try:
                handler(name, _decode(body))
            except msgspec.MsgspecError as error:
                self.faults += 1
                log.warning("bus_handler_refused", subject=name, error=str(error))
            except Exception:  # a handler's bug must not end the read loop
                self.faults += 1
                log.exception("bus_handler_failed", subject=name)

        return await self.connection.subscribe_raw(subject, heard)

    async def _handle(self, handler: Handler, message: Msg) -> Answer:
        try:
            answer = handler(message.subject, _decode(message.data))
            return await answer if inspect.isawaitable(answer) else answer
        except (HoldfastError, msgspec.MsgspecError) as error:
            self.faults += 1
            log.warning("bus_handler_refused", subject=message.subject, error=str(error))
            return {"error": str(error)}
        except Exception:  # a handler's bug must not end the subscription
            self.faults += 1
            log.exception("bus_handler_failed", subject=message.subject)
            return {"error": "internal error, see the log"}

    async def request(self, subject: str, body: Body, deadline_s: float = 2.0) -> Body:
        if not self.connection.connected:
            raise BusUnavailable
        try:
            answer = await self.connection.request(subject, _encode(body), deadline_s)
            return _decode(answer.body)
        except NoRespondersError as error:
            raise NoSubscriber(f"no process subscribes to {subject}") from error
        except NotPermitted as error:
            raise NotAllowed(f"{error}. {NotAllowed.__doc__}") from error
        except TimeoutError as error:
            raise NoAnswer(f"no reply on {subject} within {deadline_s:g} s") from error
        except msgspec.MsgspecError as error:
            raise NoAnswer(f"the reply on {subject} is not a JSON object: {error}") from error
        except DISCONNECTED as error:
            raise BusUnavailable from error

    async def close(self) -> None:
        await self.connection.close()
