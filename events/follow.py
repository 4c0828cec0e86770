"""Follow a fleet's events from a program of your own: typed, in order, at least once.

    async for event in follow(url, kinds=["canary_failed"], durable="my-app"):
        print(event.at, event.fact.worker, event.fact.reason)

With `durable`, the broker stores the read position under that name. An event counts as processed when the loop requests the next
event, so after a crash the loop continues with the event that was in progress. Use the event's `id` to detect an event that is
delivered again. Without `durable` the broker stores no read position, and the loop begins at `since`.

The loop skips messages that are not events, and events of kinds that this version does not know (docs/reference/events.md).
While the broker is unreachable the loop waits.
"""

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, TypeAlias

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, ConsumerInfo, DeliverPolicy
from nats.js.errors import NotFoundError

from events import codec, subjects
from events.errors import HoldfastError, UsageError
from events.fact import Decision, Fact, Skipped
from events.journal import messages
from events.journal.broker import delivered
from events.json_types import Json
from events.nats.urls import account, addresses, check_url, inbox, masked

Since: TypeAlias = int | datetime | Literal["now"] | None

CONNECT_S = 5.0
ASK_S = 5.0
CLOSE_S = 2.0
FETCH_S = 5.0  # timeout of one fetch
GATHER_S = 0.05  # longest wait of a fetch for further events while many arrive
AGAIN_S = 0.5  # pause before a retry after a connection error
ACK_WAIT_S = 5.0  # after a crash the event in progress is delivered again within this time
STILL_S = 2.0  # interval of the reports to the broker that an event is in progress
BATCH = 200  # most events of one fetch, without a durable name
GONE_S = 60.0  # the broker deletes an unused consumer without a durable name after this time
_NAME = re.compile(r"[A-Za-z0-9_\-]{1,64}")


class CannotFollow(HoldfastError):
    """The events cannot be followed: the broker is unreachable, refuses access, or has no stream FLEET."""


@dataclass(frozen=True, slots=True)
class FollowedEvent:
    """One event: the attributes of CloudEvents, its position on the stream, and its fact."""

    id: str  # CloudEvents: the same if an event is delivered again
    type: str  # CloudEvents: "holdfast." and the kind
    source: str  # CloudEvents: the process instance that published it
    subject: str  # the subject of the event's message
    time: datetime | None  # CloudEvents: by the source's clock
    seq: int  # the event's position on the stream
    at: datetime  # when it was appended to the stream, by the broker's clock
    correlation: str  # id of the event's incident; empty: no incident
    causation: str  # the event that led to this event: an id, or decision:N; empty: not known
    fact: Fact  # an instance of a class in `events.observations` or `events.decisions`
    pending: int = 0  # number of later events of the followed kinds, when the broker sent this event

    @property
    def data(self) -> Json:
        """The fact as plain JSON types. Its form is that of the event's body in docs/reference/schemas."""
        found: Json = codec.to_builtins(self.fact)
        return found


async def follow(
    url: str,
    *,
    kinds: Iterable[type[Fact] | str] = (),
    since: Since = None,
    durable: str = "",
    may_change_kinds: bool = False,
) -> AsyncGenerator[FollowedEvent, None]:
    """Yield events, the oldest first, forever.

    Args:
        url: The broker's URL, as printed by `holdfast nats reader`.
        kinds: Classes or names, such as CanaryFailed or "canary_failed". Without kinds, all events are yielded.
        since: A stream sequence, an instant with a time zone, or "now". None starts at the oldest event on the stream.
        durable: A name under which the broker stores the read position. `since` then applies only to the first use of the name.
        may_change_kinds: Whether `kinds` may differ from those of the earlier use of the same `durable` name.

    Raises:
        UsageError: An argument is invalid.
        CannotFollow: The broker is unreachable, or its stream is missing or was recreated.
    """
    check_url(url)
    filters = _filters(kinds)
    if durable and not _NAME.fullmatch(durable):
        raise UsageError(f"durable={durable!r}: use letters, digits, _ and -, at most 64")
    if isinstance(since, datetime) and since.tzinfo is None:
        raise UsageError("since is an instant without a time zone: add one")
    if not (since is None or since == "now" or isinstance(since, int | datetime)):
        raise UsageError(f"since={since!r}: expected a sequence, an instant with a time zone, or 'now'")
    client = await _connected(url)
    try:
        reader = _Consumer(client, filters, since, durable, may_change_kinds)
        async with contextlib.aclosing(reader.events()) as events:
            async for event in events:
                yield event
    finally:
        with contextlib.suppress(NatsError, OSError, TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await client.close()


def _filters(kinds: Iterable[type[Fact] | str]) -> list[str]:
    found = []
    for kind in kinds:
        name = kind if isinstance(kind, str) else kind.kind()
        fact = codec.KINDS.get(name)
        if fact is None:
            raise UsageError(f"unknown kind {name!r}; the kinds are {', '.join(sorted(codec.KINDS))}")
        found.append(
            f"{subjects.DECIDED}.{name}" if issubclass(fact, Decision) else f"{subjects.OBSERVED}.*.*.{name}"
        )
    return sorted(set(found) or subjects.STREAM_SUBJECTS)


async def _connected(url: str) -> Client:
    try:
        async with asyncio.timeout(CONNECT_S):
            return await nats.connect(
                addresses(url),
                inbox_prefix=inbox(url).encode(),
                max_reconnect_attempts=-1,
                error_cb=_silent,
                **account(url),
            )
    except (NatsError, OSError, TimeoutError) as error:
        raise CannotFollow(f"{masked(url)} does not respond ({error!r}). {CannotFollow.__doc__}") from error


async def _silent(error: Exception) -> None:
    """Ignore an error that nats-py reports in the background. The affected call raises the error itself, or retries."""


class _Consumer:
    """Reads events through one JetStream consumer, and creates the consumer again if the broker has lost it."""

    def __init__(
        self, client: Client, filters: list[str], since: Since, durable: str, may_change_kinds: bool
    ) -> None:
        self._may_change_kinds = may_change_kinds
        self._client, self._stream = client, client.jetstream(timeout=ASK_S)
        self._filters, self._since, self._durable = filters, since, durable
        self._last = 0  # sequence of the last event yielded
        self._created: datetime | None = None  # creation time of the stream, as first seen
        self._made: datetime | None = None  # creation time of the consumer
        self._more_waits = False  # more events may be waiting at the broker
        self._place = 0  # consumer sequence of the last event received
        self._reconnects = 0

    async def events(self) -> AsyncGenerator[FollowedEvent, None]:
        subscription = await self._subscribed()
        while True:
            got: list[Msg] = []
            try:
                got = await self._more(subscription)
            except (NatsError, OSError, TimeoutError) as error:
                # the broker is unreachable, or there is no new event
                if self._client.is_closed:
                    raise CannotFollow(f"the broker closed the connection. {CannotFollow.__doc__}") from error
                if not isinstance(error, TimeoutError):
                    await asyncio.sleep(AGAIN_S)
                if await self._is_gone(subscription):
                    subscription = await self._again(subscription)
                continue
            for message in got:
                if self._has_lost(message):
                    subscription = await self._again(subscription)
                    break
                event = _event(message)
                self._last = message.metadata.sequence.stream
                if event is not None:
                    try:
                        async with _under_way(message) if self._durable else contextlib.nullcontext():
                            yield event
                    except GeneratorExit:
                        if self._durable:
                            with contextlib.suppress(NatsError, OSError):
                                # so that the broker delivers the event at once to the next reader
                                await message.nak()
                        raise
                if self._durable:
                    # after a lost acknowledgement the broker delivers the event again
                    with contextlib.suppress(NatsError, OSError):
                        await message.ack()

    def _has_lost(self, message: Msg) -> bool:
        """Return whether messages before this message are perhaps lost. If so, the caller must subscribe again.

        The consumer numbers its messages. Without a durable name, a gap in the numbers means that a message was lost when the
        connection broke. A consumer without a durable name has no acknowledgements, so the broker does not deliver the lost
        message again. With a durable name, a number that does not increase means that a new consumer counts from 1.
        """
        place = message.metadata.sequence.consumer
        lost = place <= self._place if self._durable else place != self._place + 1
        self._place = place
        return lost

    async def _again(self, before: JetStreamContext.PullSubscription) -> JetStreamContext.PullSubscription:
        """Subscribe again, to the events after the last one received, as soon as the broker and its stream are available.

        `before` is the subscription to end first. Raise CannotFollow if the broker now has another stream.
        """
        with contextlib.suppress(NatsError, OSError):
            await before.unsubscribe()
        while True:
            if self._client.is_closed:
                raise CannotFollow(f"the broker closed the connection. {CannotFollow.__doc__}")
            try:
                return await self._bound()
            except (NatsError, OSError, TimeoutError):
                await asyncio.sleep(AGAIN_S)

    async def _more(self, subscription: JetStreamContext.PullSubscription) -> list[Msg]:
        """Return the available messages, at least one. Raise TimeoutError if no message arrives in time."""
        if self._more_waits:  # after a first message, nats-py waits until the whole fetch is complete
            self._more_waits = False
            with contextlib.suppress(TimeoutError):
                got = await _fetched(subscription, BATCH, GATHER_S)
                self._more_waits = True
                return got
        got = await _fetched(subscription, 1, FETCH_S)
        self._more_waits = not self._durable
        return got

    async def _is_gone(self, subscription: JetStreamContext.PullSubscription) -> bool:
        """Return whether the subscription is unusable, so that the caller must subscribe again.

        A subscription is unusable if the broker deleted or replaced its consumer. Without a durable name, it is also unusable
        after the connection broke: the consumer has no acknowledgements, so events that were in flight are perhaps lost.
        """
        broke = self._client.stats["reconnects"]
        if not self._durable and broke != self._reconnects:
            self._reconnects = broke
            return True
        try:
            found = await subscription.consumer_info()
            return found.created != self._made
        except NotFoundError:
            return True
        except (NatsError, OSError, TimeoutError):
            await asyncio.sleep(AGAIN_S)
        return False

    async def _subscribed(self) -> JetStreamContext.PullSubscription:
        try:
            return await self._bound()
        except (NatsError, OSError, TimeoutError) as error:
            raise CannotFollow(f"{error!r}. {CannotFollow.__doc__}") from error

    async def _bound(self) -> JetStreamContext.PullSubscription:
        self._place = 0
        last = await self._last_of_the_same()
        found = await self._consumer(last)
        self._made = found.created
        return await self._stream.pull_subscribe_bind(consumer=found.name, stream=subjects.STREAM)

    async def _last_of_the_same(self) -> int:
        """Return the stream's last sequence, after checking that the stream is still the one that was followed so far.

        Raise CannotFollow for another stream, because its sequences number other events.
        """
        found = await self._stream.stream_info(subjects.STREAM)
        self._created = self._created or found.created
        if found.created != self._created:
            raise CannotFollow(
                f"the stream was recreated at {found.created}; the one that was followed is of {self._created}"
            )
        if found.state.last_seq < self._last:
            raise CannotFollow(
                f"the stream ends at {found.state.last_seq}, before {self._last}: it has lost later events"
            )
        return found.state.last_seq

    async def _consumer(self, last: int) -> ConsumerInfo:
        """Return the durable consumer if it exists, else create a consumer. `last` is the stream's last sequence.

        Raise UsageError if the durable consumer follows other kinds of events and `may_change_kinds` is not set.
        """
        if self._durable:
            with contextlib.suppress(NotFoundError):
                found: ConsumerInfo = await self._stream.consumer_info(subjects.STREAM, self._durable)
                if sorted(found.config.filter_subjects or []) != self._filters:
                    if self._may_change_kinds:
                        changed = found.config.evolve(filter_subjects=self._filters)
                        return await self._stream.add_consumer(subjects.STREAM, changed)
                    raise UsageError(
                        f"{self._durable!r} follows other kinds: use another name, or delete that consumer"
                    )
                return found
        if self._since == "now":  # resolved once, because a consumer created later must not begin later
            self._since = last + 1
        return await self._stream.add_consumer(subjects.STREAM, self._config())

    def _config(self) -> ConsumerConfig:
        config = ConsumerConfig(filter_subjects=self._filters)
        if self._durable:
            config.durable_name, config.ack_policy = self._durable, AckPolicy.EXPLICIT
            config.ack_wait = ACK_WAIT_S
            config.max_ack_pending = 1  # one event in flight, so that a crash does not change the order
        else:
            config.ack_policy, config.inactive_threshold = AckPolicy.NONE, GONE_S
            config.name = f"follow-{codec.new_id()}"
        since = self._last + 1 if self._last else self._since
        if isinstance(since, datetime):
            config.deliver_policy, config.opt_start_time = DeliverPolicy.BY_START_TIME, since.astimezone(UTC)
        elif isinstance(since, int):
            config.deliver_policy, config.opt_start_seq = DeliverPolicy.BY_START_SEQUENCE, max(1, since)
        return config


async def _fetched(subscription: JetStreamContext.PullSubscription, most: int, within_s: float) -> list[Msg]:
    """Fetch up to `most` messages within `within_s` seconds, in a task.

    The task is needed because nats-py's `wait_for` (of Python 3.11) can swallow a cancellation, and then the caller could not
    stop.
    """
    fetch = asyncio.ensure_future(subscription.fetch(most, timeout=within_s))
    fetch.add_done_callback(lambda done: done.cancelled() or done.exception())
    try:
        await asyncio.wait({fetch})
    finally:
        fetch.cancel()
    return fetch.result()


@contextlib.asynccontextmanager
async def _under_way(message: Msg) -> AsyncIterator[None]:
    """While the context is open, report to the broker every 2 s that this event is in progress, so that the broker does not
    deliver it again."""

    async def report() -> None:
        while True:
            await asyncio.sleep(STILL_S)
            with contextlib.suppress(NatsError, OSError):
                await message.in_progress()

    reporting = asyncio.create_task(report())
    try:
        yield
    finally:
        reporting.cancel()


def _event(message: Msg) -> FollowedEvent | None:
    """Decode a message. Return None if the message is not an event, or if this version does not know its kind."""
    # rounded down, so that a `since` of this time includes the event
    seq, at = delivered(message.reply.encode())
    lines = "".join(f"{name}: {value}\r\n" for name, value in (message.headers or {}).items())
    headers = f"NATS/1.0\r\n{lines}\r\n".encode()
    found = messages.read(seq, at, message.subject.encode(), headers, message.data)
    if isinstance(found.fact, Skipped):
        return None
    return FollowedEvent(
        found.id,
        f"{codec.TYPE_PREFIX}{found.fact.kind()}",
        found.source,
        message.subject,
        found.said_at,
        found.seq,
        found.at,
        found.correlation,
        found.causation,
        found.fact,
        message.metadata.num_pending,
    )
