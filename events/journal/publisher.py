"""Publishes observations in order, once each, even if the broker or the process fails.

    observed ─▶ spool (a local file) ─▶ outbox ─▶ in flight ─▶ acknowledged
                                          ▲            │
                                          └── timeout, refusal, reconnection: all in flight sent again in order, with their ids

The arrows show the states of a fact. Several messages are in flight at once, because each acknowledgement costs the server an
fsync. A long queue is sent as atomic batches instead, because the facts of a batch share one fsync. Single messages and batches
are never in flight at the same time.

If a message is refused and a later message is stored, the retry of the refused message arrives after the later one. Every
reader that computes the fleet's state (`events.order`) drops a fact if its number is not above its source's last number. Such a
reader would therefore drop the retry. The publisher detects the wrong order by the sequences in the acknowledgements, and
publishes the fact again under a new number.

Those readers remember a source's last number for 14 days. After that time they cannot distinguish a repeated fact from a new
one. So the publisher sends a fact again for at most half of that time, which is a week. It drops, counts and logs older facts,
including those that a killed process left.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec
import structlog
from nats.errors import MaxPayloadError

from events import codec
from events.codec import BODY_BYTES_MAX
from events.journal import broker
from events.journal.acknowledged import AcknowledgedPosition
from events.journal.broker import Ack
from events.journal.counters import JournalCounters
from events.journal.spool import BYTES_MAX, OutboxMessage, Spool
from events.nats.connection import DISCONNECTED, BrokerConnection
from events.order import REMEMBERED
from events.subjects import OBSERVED

MARK_EVERY = 64  # acknowledgements per mark in the spool
RECENT = 2000  # acknowledgements remembered, to detect that a later fact was stored before an earlier one
OVERHEAD_BYTES = 400  # size of a fact's subject, headers and records, besides its body

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class OutboxEntry:
    """One fact that waits for the broker's acknowledgement."""

    message: OutboxMessage
    own: bool  # observed by this process; False: left by an earlier process
    sent_at: float = 0.0  # monotonic time of the last attempt; 0: never sent

    @property
    def size(self) -> int:
        return len(self.message.body) + OVERHEAD_BYTES


class Outbox:
    """Holds the observed facts that are not acknowledged yet, in order, in memory and in the spool. The total size of the
    facts is bounded.

    Every fact has a token, a number that increases in the order of observation. Facts that earlier processes left have the
    lowest tokens.
    """

    def __init__(self, spool: Spool | None, counters: JournalCounters) -> None:
        self.bytes = 0
        # wakes `flush`: a fact was acknowledged or dropped, or the connection changed
        self.moved = asyncio.Event()
        self._spool = spool
        self._counters = counters
        self._bytes_max = spool.bytes_max if spool is not None else BYTES_MAX
        self._open: dict[int, OutboxEntry] = {}
        self._next = 0
        self._last_number = 0  # number of the last fact of this process
        self._inherited = 0
        self._unmarked = 0
        self._full = False
        self._recent: deque[tuple[str, int, int]] = deque(maxlen=RECENT)  # source, number, sequence
        self._top: dict[str, int] = {}  # highest acknowledged number of each source

    def __len__(self) -> int:
        return len(self._open)

    def get(self, token: int) -> OutboxEntry | None:
        """Return the fact with this token, or None if the fact has been acknowledged or dropped."""
        return self._open.get(token)

    def inherit(self) -> list[int]:
        """Add the facts that earlier processes left in the spool, and return their tokens."""
        if self._spool is None:
            return []
        tokens = [self._enter(message, own=False) for message in self._spool.take_over()]
        self._inherited = len(tokens)
        self._forget_earlier()
        return tokens

    def add(self, message: OutboxMessage) -> int | None:
        """Add one fact and return its token. If the fact or the outbox would be too large, drop, count and log the fact and
        return None."""
        self._counters.observed += 1
        if len(message.body) > BODY_BYTES_MAX:  # every reader would skip so large an event
            self._counters.dropped += 1
            log.error("fact_dropped", why="it is larger than an event may be", subject=message.subject)
            return None
        if self.bytes + len(message.body) + OVERHEAD_BYTES > self._bytes_max:
            self._counters.dropped += 1
            if not self._full:
                self._full = True
                log.error("facts_dropped", why="the spool is full", waiting=len(self._open))
            return None
        if self._full:
            self._full = False
            log.warning("facts_kept_again", dropped=self._counters.dropped)
        self._last_number = message.number
        if self._spool is not None:
            self._spool.put(message)  # if the write fails, the fact is still in memory
        return self._enter(message, own=True)

    def _enter(self, message: OutboxMessage, *, own: bool) -> int:
        token, self._next = self._next, self._next + 1
        entry = OutboxEntry(message, own)
        self._open[token] = entry
        self.bytes += entry.size
        return token

    def give_up(self, token: int, why: str) -> None:
        """Remove a fact that will never be sent again, and count and log it as dropped."""
        entry = self.settle(token)
        self._counters.dropped += 1
        log.error("fact_dropped", why=why, subject=entry.message.subject, number=entry.message.number)

    def settle(self, token: int) -> OutboxEntry:
        """Remove a fact that is acknowledged or dropped, and return its entry."""
        entry = self._open.pop(token)
        self.bytes -= entry.size
        if not entry.own:
            self._inherited -= 1
            self._forget_earlier()
        self._unmarked += 1
        if self._spool is not None and (not self._open or self._unmarked >= MARK_EVERY):
            self._unmarked = 0
            waiting = next((e.message.number for e in self._open.values() if e.own), self._last_number + 1)
            self._spool.mark(waiting - 1, empty=not self._open)
        return entry

    def _forget_earlier(self) -> None:
        if self._inherited == 0 and self._spool is not None:
            self._spool.forget_earlier()

    def overtaken(self, message: OutboxMessage, seq: int) -> bool:
        """Return whether a later fact of the same source was stored before this fact. If so, all readers would drop this fact
        as a duplicate.

        `seq` is the sequence at which this fact was stored.
        """
        source, number = message.headers["ce-source"], message.number
        self._recent.append((source, number, seq))
        if number > self._top.get(source, 0):
            self._top[source] = number
            return False
        return any(s == source and n > number and q < seq for s, n, q in self._recent)

    async def flush(self, deadline_s: float, broker_away: "asyncio.Event") -> bool:
        """Wait until all facts observed so far are acknowledged, or are synced to disk while the broker is unreachable.

        Return False if time ran out or the sync failed.
        """
        last = self._next - 1
        try:
            async with asyncio.timeout(deadline_s):
                while next(iter(self._open), last + 1) <= last:
                    if broker_away.is_set() and self._spool is not None:
                        await asyncio.to_thread(self._spool.sync)
                        return self._spool.failures == 0
                    self.moved.clear()
                    await self.moved.wait()
        except TimeoutError:
            return False
        return True

    def sync(self) -> None:
        """Sync to disk the facts that are not acknowledged yet."""
        if self._spool is not None and self._open:
            self._spool.sync()

    def close(self) -> None:
        """Close the spool. Facts without acknowledgement stay in the spool."""
        if self._spool is not None:
            self._spool.close(empty=not self._open)


# single messages in flight; a server that syncs each one needs 4 ms for 16, or 50 ms with a busy disk
WINDOW = 16
AT_ONCE = 4  # facts in flight up to which a new fact is sent at once; later facts of a burst become a batch
BATCH_MIN = 16  # smallest atomic batch; a batch takes 2.5 ms, as long as a dozen single messages
BATCH_MAX = 500  # facts in one atomic batch; the server allows 1,000
ACK_DEADLINE_S = 2.5
PAUSE_MIN_S, PAUSE_MAX_S = 0.05, 2.0  # pause after a refusal; it doubles with each refusal
KEEP_EVERY_S = 0.6
GIVEN_UP = (broker.MESSAGE_TOO_LARGE, broker.INTAKE_REFUSES)
REPEATED_FOR = REMEMBERED / 2  # age up to which a fact is sent again; see the module's docstring


class Publisher:
    """Sends the facts in the outbox to the broker. `add` never waits."""

    def __init__(
        self,
        connection: BrokerConnection,
        counters: JournalCounters,
        outbox: Outbox,
        acknowledged_position: AcknowledgedPosition,
        *,
        renumber: Callable[[OutboxMessage], OutboxMessage],
        check: Callable[[], Awaitable[bool]],
        route: Callable[[str], str] = str,
    ) -> None:
        """Prepare to send. `renumber` returns a fact under a new number, and `check` returns whether facts may be sent to the
        broker.

        `route` maps the subject of a fact on the stream to the subject to publish on: the same subject, or that of a
        controller's fact intake.
        """
        self.outbox = outbox
        self._route = route
        self._connection = connection
        self._counters = counters
        self._acknowledged_position = acknowledged_position
        self._renumber = renumber
        self._check = check  # returns whether facts may be sent to the broker; called after each connection
        self._checked = False
        self._inbox = connection.new_inbox()
        self._waiting: deque[int] = deque()  # tokens of the facts to send
        self._flight: dict[int, None] = {}  # tokens of the facts in flight, in the order of sending
        self._batch: dict[int, list[int]] = {}  # tokens of an atomic batch, by the token of its last fact
        self._singly = 0  # number of facts at the front of the queue that must be sent one by one
        self._batches = True
        self._paused_until = 0.0
        self._pause_s = PAUSE_MIN_S
        self._wake = asyncio.Event()
        self._away = asyncio.Event()  # set while the broker is unreachable

    async def start(self) -> None:
        """Subscribe to the acknowledgements, and queue the facts that earlier processes left."""
        await self._connection.subscribe_raw(f"{self._inbox}.*", self._heard)
        self._connection.listen(self._connection_changed)
        if not self._connection.connected:
            self._away.set()
        self._waiting.extend(self.outbox.inherit())

    def add(self, message: OutboxMessage) -> None:
        """Put one fact into the outbox, and send or queue it."""
        token = self.outbox.add(message)
        if token is None:
            return
        idle = not self._waiting and not self._batch and len(self._flight) < AT_ONCE
        if not (idle and self._checked and self._send_now(token, message)):
            self._waiting.append(token)
            self._wake.set()

    def _send_now(self, token: int, message: OutboxMessage) -> bool:
        """Send a fact immediately. Return False if the fact must be queued, because sending is paused or the connection
        cannot accept it."""
        now = asyncio.get_running_loop().time()
        entry = self.outbox.get(token)
        if entry is None or now < self._paused_until:
            return False
        try:
            client = self._connection.client
            subject = self._route(message.subject)
            if not client.publish_now(subject, message.body, f"{self._inbox}.{token}", message.headers):
                return False
        except MaxPayloadError:
            return False  # `run` drops the fact
        entry.sent_at = now
        self._flight[token] = None
        self._singly -= 1
        return True

    async def flush(self, deadline_s: float) -> bool:
        """Wait until all facts observed so far are acknowledged, or are synced to disk while the broker is unreachable.

        Return False if time ran out or the sync failed.
        """
        return await self.outbox.flush(deadline_s, self._away)

    async def keep(self) -> None:
        """Save the acknowledged position after each change. While the broker is unreachable, also sync the waiting facts to
        disk.

        Runs until cancelled. After a power failure, the restarted process needs the saved position and the synced facts.
        """
        while True:
            await asyncio.sleep(KEEP_EVERY_S)
            if self._acknowledged_position.unsaved:
                await asyncio.to_thread(self._acknowledged_position.save)
            if self._away.is_set():
                await asyncio.to_thread(self.outbox.sync)

    async def run(self) -> None:
        """Send the facts that wait, and send a fact again if it is not acknowledged in time. Runs until cancelled."""
        loop = asyncio.get_running_loop()
        self._wake.set()  # check at once whether the broker can be trusted
        while True:
            with contextlib.suppress(TimeoutError):
                # not wait_for, which in Python 3.11 can swallow a cancellation
                async with asyncio.timeout(self._wait_s(loop.time())):
                    await self._wake.wait()
            self._wake.clear()
            now = loop.time()
            if self._overdue(now):
                log.warning("acknowledgement_overdue", in_flight=len(self._flight))
                # the check also finds out whether facts must go to the intake's subject
                self._checked = False
                self._rewind()
            if self._connection.connected and now >= self._paused_until and await self._trusted(now):
                await self._pump(now)

    async def _trusted(self, now: float) -> bool:
        if not self._checked:
            self._checked = await self._check()
            if not self._checked:
                self._pause(now)
        return self._checked

    def _wait_s(self, now: float) -> float:
        if self._paused_until > now:
            return self._paused_until - now
        return ACK_DEADLINE_S / 4 if len(self.outbox) else 60.0

    def _overdue(self, now: float) -> bool:
        first = next(iter(self._flight), None)
        entry = self.outbox.get(first) if first is not None else None
        return entry is not None and now - entry.sent_at > ACK_DEADLINE_S

    # --- sending ----------------------------------------------------------------------------------------------------

    async def _pump(self, now: float) -> None:
        try:
            while self._waiting and not self._batch:
                entry = self._due(self._waiting[0])
                if entry is None:
                    self._waiting.popleft()
                elif self._goes_as_batch():
                    if self._flight:
                        return
                    await self._send_batch(now)
                elif len(self._flight) < WINDOW:
                    self._singly -= 1
                    await self._send_one(self._waiting.popleft(), entry, now)
                else:
                    return
        except DISCONNECTED as error:
            log.debug("publish_failed", error=repr(error))
            self._rewind()
            self._pause(now)

    def _goes_as_batch(self) -> bool:
        """Return whether to send the queue as an atomic batch.

        Facts for a controller's fact intake are always sent one by one, because the intake accepts no batches.
        """
        many = self._batches and self._singly <= 0 and len(self._waiting) >= BATCH_MIN
        return many and self._route(OBSERVED) == OBSERVED

    def _due(self, token: int) -> OutboxEntry | None:
        """Return the outbox entry of the fact with this token. Return None if the fact has been acknowledged meanwhile, or is too
        old to be sent again."""
        entry = self.outbox.get(token)
        # a fact that was never sent cannot be a duplicate, so its age does not matter
        if entry is None or (entry.own and not entry.sent_at):
            return entry
        if datetime.now(UTC) - datetime.fromisoformat(entry.message.headers["ce-time"]) <= REPEATED_FOR:
            return entry
        self.outbox.give_up(token, f"it was observed more than {REPEATED_FOR.days} days ago")
        self.outbox.moved.set()
        return None

    async def _send_one(self, token: int, entry: OutboxEntry, now: float) -> None:
        entry.sent_at = now
        self._flight[token] = None
        await self._publish(token, entry.message, entry.message.headers, f"{self._inbox}.{token}")

    async def _send_batch(self, now: float) -> None:
        batch: list[tuple[int, OutboxEntry]] = []
        while self._waiting and len(batch) < BATCH_MAX:
            token = self._waiting.popleft()
            entry = self._due(token)
            if entry is not None:
                entry.sent_at = now
                batch.append((token, entry))
        if not batch:
            return
        commit = batch[-1][0]
        tokens = [token for token, _ in batch]
        self._batch[commit] = tokens
        self._flight.update(dict.fromkeys(tokens))
        id = codec.new_id()
        for place, (token, entry) in enumerate(batch, 1):
            headers = {**entry.message.headers, "Nats-Batch-Id": id, "Nats-Batch-Sequence": str(place)}
            if token == commit:
                headers["Nats-Batch-Commit"] = "1"
            await self._publish(
                token, entry.message, headers, f"{self._inbox}.{token}" if token == commit else ""
            )

    async def _publish(self, token: int, message: OutboxMessage, headers: dict[str, str], reply: str) -> None:
        client = self._connection.client
        try:
            await client.publish(self._route(message.subject), message.body, reply, headers)
        except MaxPayloadError:
            if self.outbox.get(token) is not None:
                self._flight.pop(token, None)
                self.outbox.give_up(token, "it is larger than the broker accepts")

    # --- acknowledgements: called in the read loop ------------------------------------------------------------------

    def _heard(self, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        token = int(subject[subject.rindex(b".") + 1 :])
        try:
            ack = broker.decode_ack(data) if data else broker.NO_RESPONDERS
        except msgspec.MsgspecError:
            ack = broker.NO_RESPONDERS
        tokens = self._batch.pop(token, [token])
        if ack.error:
            self._refused(tokens, ack)
        else:
            self._pause_s = PAUSE_MIN_S
            for place, each in enumerate(reversed(tokens)):
                self._acknowledged(each, ack.seq - place)
        self._wake.set()
        self.outbox.moved.set()

    def _acknowledged(self, token: int, seq: int) -> None:
        self._flight.pop(token, None)
        if self.outbox.get(token) is None:
            return  # an earlier attempt was already acknowledged
        message = self.outbox.settle(token).message
        self._counters.acknowledged += 1
        self._acknowledged_position.note(seq, message.headers["ce-id"])
        if self.outbox.overtaken(message, seq):
            log.warning("fact_overtaken", subject=message.subject, number=message.number)
            self.add(self._renumber(message))

    def _refused(self, tokens: list[int], ack: Ack) -> None:
        if tokens[-1] not in self._flight:
            return  # an earlier refusal already returned the messages in flight to the queue
        if ack.code in GIVEN_UP and len(tokens) == 1:
            self._flight.pop(tokens[0])
            if self.outbox.get(tokens[0]) is not None:
                self.outbox.give_up(tokens[0], ack.error_text or "it is larger than the stream accepts")
            return
        if ack.code in broker.BATCH_DISABLED:
            self._batches = False
        # some may be stored already; sent one by one, the broker recognises them by their ids
        if len(tokens) > 1:
            self._singly = len(tokens)
        self._rewind()
        if ack.code == broker.NO_RESPONDERS.code:
            self._checked = False  # the stream may be gone
        if ack.code != broker.DUPLICATE_IN_BATCH:
            log.warning("journal_refuses", error=ack.error, waiting=len(self.outbox))
            self._pause(asyncio.get_running_loop().time())

    def _rewind(self) -> None:
        """Move all facts in flight back to the front of the queue."""
        again = sorted(token for token in self._flight if self.outbox.get(token) is not None)
        self._counters.retried += len(again)
        self._flight.clear()
        self._batch.clear()
        self._waiting.extendleft(reversed(again))

    def _pause(self, now: float) -> None:
        self._paused_until = now + self._pause_s
        self._pause_s = min(PAUSE_MAX_S, self._pause_s * 2)

    def _connection_changed(self, connected: bool) -> None:
        if connected:
            self._away.clear()
            self._checked = False
            self._paused_until, self._pause_s = 0.0, PAUSE_MIN_S
            # if one of these facts is stored already, the broker would refuse a batch with it
            self._singly = len(self._flight)
            self._rewind()
        else:
            self._away.set()
        self._wake.set()
        self.outbox.moved.set()

    def close(self) -> None:
        """Save the acknowledged position and close the spool."""
        self._acknowledged_position.save()
        self.outbox.close()
