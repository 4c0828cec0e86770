"""Follow a fleet's events from a program of your own: typed, in order, at least once.

    async for event in follow(url, kinds=["canary_failed"], durable="my-app"):
        print(event.at, event.fact.worker, event.fact.reason)

With `durable` the broker remembers how far the program of that name has come: an event counts as taken when the loop asks for the
next one, and after a crash the loop goes on with the one that it was at. Make what you do with an event idempotent by its `id`.
Without, nothing is remembered: the loop begins where `since` says.

What is no event of this version's kinds (docs/events.md) is stepped over. While the broker is away the loop waits.
"""

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, TypeAlias

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
from events.nats.urls import account, addresses, check_url, inbox, masked

Since: TypeAlias = int | datetime | Literal["now"] | None

CONNECT_S = 5.0
ASK_S = 5.0
CLOSE_S = 2.0
FETCH_S = 5.0  # that one question for more may wait
GATHER_S = 0.05  # that many may wait for one another, where many come
AGAIN_S = 0.5  # after an error of the connection
ACK_WAIT_S = 5.0  # after a crash the event that it was at comes again within that
STILL_S = 2.0  # how often the broker is told that an event is still being worked on
BATCH = 200  # events on the way at once, where nothing is remembered
GONE_S = 60.0  # after which the broker forgets a reader that remembers nothing
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_NAME = re.compile(r"[A-Za-z0-9_\-]{1,64}")


class CannotFollow(HoldfastError):
    """The events cannot be followed: the broker cannot be reached, refuses it, or has no stream FLEET."""


@dataclass(frozen=True, slots=True)
class FollowedEvent:
    """One event: CloudEvents' attributes, its place on the stream, and what it says."""

    id: str  # CloudEvents: the same for every repetition
    type: str  # CloudEvents: holdfast. and the kind
    source: str  # CloudEvents: the process instance that said it
    subject: str  # on which it lies
    time: datetime | None  # CloudEvents: by the clock of who said it
    seq: int  # its place on the stream
    at: datetime  # when the stream took it, by the broker's clock
    correlation: str  # the incident that it belongs to; empty: to none
    causation: str  # the event that led to it: an id, or decision:N; empty: none is known
    fact: Fact  # one of `events.observations` or `events.decisions`
    pending: int = 0  # events of the kinds that are followed, behind this one, when the broker sent it

    @property
    def data(self) -> dict[str, Any]:
        """What it says as plain JSON types: the body as docs/schemas has it."""
        found: dict[str, Any] = codec.to_builtins(self.fact)
        return found


async def follow(
    url: str,
    *,
    kinds: Iterable[type[Fact] | str] = (),
    since: Since = None,
    durable: str = "",
    may_change_kinds: bool = False,
) -> AsyncGenerator[FollowedEvent, None]:
    """Yield events, the oldest first, for ever.

    `url`: as `holdfast nats reader` prints it. `kinds`: classes or names, such as CanaryFailed or "canary_failed"; none: all.
    `since`: a sequence, an instant with a time zone, or "now"; None: from the oldest that is kept. For a durable name it counts
    the first time only. A durable name goes with its kinds; with `may_change_kinds` it follows other ones from its place on.
    Raise UsageError for what makes no sense, CannotFollow.
    """
    check_url(url)
    filters = _filters(kinds)
    if durable and not _NAME.fullmatch(durable):
        raise UsageError(f"durable={durable!r}: letters, digits, _ and -, 64 at most")
    if isinstance(since, datetime) and since.tzinfo is None:
        raise UsageError("since is an instant without a time zone")
    if not (since is None or since == "now" or isinstance(since, int | datetime)):
        raise UsageError(f"since={since!r}: a sequence, an instant with a time zone, or 'now'")
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
            raise UsageError(f"there is no kind {name!r}; the kinds are {', '.join(sorted(codec.KINDS))}")
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
        raise CannotFollow(f"{masked(url)} does not answer ({error!r}). {CannotFollow.__doc__}") from error


async def _silent(error: Exception) -> None:
    """What fails is raised, or tried again."""


class _Consumer:
    """One consumer at the broker."""

    def __init__(
        self, client: Client, filters: list[str], since: Since, durable: str, may_change_kinds: bool
    ) -> None:
        self._may_change_kinds = may_change_kinds
        self._client, self._stream = client, client.jetstream(timeout=ASK_S)
        self._filters, self._since, self._durable = filters, since, durable
        self._last = 0  # sequence that was yielded last
        self._created: datetime | None = None  # the stream, as it was found first
        self._made: datetime | None = None  # the consumer
        self._more_waits = False  # at the broker, perhaps
        self._place = 0  # of the last event among those that this consumer was sent
        self._reconnects = 0

    async def events(self) -> AsyncGenerator[FollowedEvent, None]:
        subscription = await self._subscribed()
        while True:
            got: list[Msg] = []
            try:
                got = await self._more(subscription)
            except (NatsError, OSError, TimeoutError) as error:  # the broker is away, or nothing is new
                if self._client.is_closed:
                    raise CannotFollow(
                        f"the broker has ended the connection. {CannotFollow.__doc__}"
                    ) from error
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
                                await message.nak()  # whoever comes next has it at once
                        raise
                if self._durable:
                    with contextlib.suppress(NatsError, OSError):  # else it comes again
                        await message.ack()

    def _has_lost(self, message: Msg) -> bool:
        """Say whether something before a message was on its way when the connection broke: where nothing is acknowledged, the
        broker takes it for delivered. Of a durable name: whether it comes of another consumer, which counts anew."""
        place = message.metadata.sequence.consumer
        lost = place <= self._place if self._durable else place != self._place + 1
        self._place = place
        return lost

    async def _again(self, before: JetStreamContext.PullSubscription) -> JetStreamContext.PullSubscription:
        """Subscribe anew behind the last event, when the broker and its stream are there. Raise CannotFollow if that is another
        one."""
        with contextlib.suppress(NatsError, OSError):
            await before.unsubscribe()
        while True:
            if self._client.is_closed:
                raise CannotFollow(f"the broker has ended the connection. {CannotFollow.__doc__}")
            try:
                return await self._bound()
            except (NatsError, OSError, TimeoutError):
                await asyncio.sleep(AGAIN_S)

    async def _more(self, subscription: JetStreamContext.PullSubscription) -> list[Msg]:
        """Return what is there, at least one message. Raise TimeoutError if none comes in time."""
        if self._more_waits:  # nats-py waits for the whole of a batch, once one has come
            self._more_waits = False
            with contextlib.suppress(TimeoutError):
                got = await _fetched(subscription, BATCH, GATHER_S)
                self._more_waits = True
                return got
        got = await _fetched(subscription, 1, FETCH_S)
        self._more_waits = not self._durable
        return got

    async def _is_gone(self, subscription: JetStreamContext.PullSubscription) -> bool:
        """Say whether to subscribe anew: the broker has forgotten this reader, or was away while events were on the way."""
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
        """Return the stream's last sequence. Raise CannotFollow if it is not the stream that was followed so far: its numbers
        mean other events."""
        found = await self._stream.stream_info(subjects.STREAM)
        self._created = self._created or found.created
        if found.created != self._created:
            raise CannotFollow(
                f"the stream is another one: it was made {found.created}, the one that was followed {self._created}"
            )
        if found.state.last_seq < self._last:
            raise CannotFollow(
                f"the stream ends at {found.state.last_seq}, before {self._last}: it has lost what came behind"
            )
        return found.state.last_seq

    async def _consumer(self, last: int) -> ConsumerInfo:
        """Make the consumer, or find the one of that name. `last`: of the stream."""
        if self._durable:
            with contextlib.suppress(NotFoundError):
                found: ConsumerInfo = await self._stream.consumer_info(subjects.STREAM, self._durable)
                if sorted(found.config.filter_subjects or []) != self._filters:
                    if self._may_change_kinds:
                        changed = found.config.evolve(filter_subjects=self._filters)
                        return await self._stream.add_consumer(subjects.STREAM, changed)
                    raise UsageError(
                        f"{self._durable!r} follows other kinds: give another name, or delete that consumer"
                    )
                return found
        if self._since == "now":  # told once: a second consumer is not to begin later
            self._since = last + 1
        return await self._stream.add_consumer(subjects.STREAM, self._config())

    def _config(self) -> ConsumerConfig:
        config = ConsumerConfig(filter_subjects=self._filters)
        if self._durable:
            config.durable_name, config.ack_policy = self._durable, AckPolicy.EXPLICIT
            config.ack_wait = ACK_WAIT_S
            config.max_ack_pending = 1  # one at a time: so a crash changes no order
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
    """Return what there is. In a task of its own: nats-py's `wait_for` (of Python 3.11) can swallow a cancellation, and whoever
    wants to leave would stay."""
    asking = asyncio.ensure_future(subscription.fetch(most, timeout=within_s))
    asking.add_done_callback(lambda done: done.cancelled() or done.exception())
    try:
        await asyncio.wait({asking})
    finally:
        asking.cancel()
    return asking.result()


@contextlib.asynccontextmanager
async def _under_way(message: Msg) -> AsyncIterator[None]:
    """Tell the broker again and again that somebody is at this event, so that it does not come a second time."""

    async def tell() -> None:
        while True:
            await asyncio.sleep(STILL_S)
            with contextlib.suppress(NatsError, OSError):
                await message.in_progress()

    telling = asyncio.create_task(tell())
    try:
        yield
    finally:
        telling.cancel()


def _event(message: Msg) -> FollowedEvent | None:
    """Return what a message says; None: it is no event, or one of a kind that this version does not know."""
    seq, taken_ns = delivered(message.reply.encode())
    at = _EPOCH + timedelta(microseconds=taken_ns // 1000)  # never later than it was: `since` takes it in
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
