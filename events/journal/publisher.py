"""How observations reach the broker: in order, each once, whatever happens to the broker or to us.

    said ─▶ spool (a local file) ─▶ outbox ─▶ in flight ─▶ acknowledged
                                      ▲            │
                                      └── timeout, refusal, reconnection: all of it again, in order, with the same ids

Several messages are in flight at once (each acknowledgement costs the server an fsync); a long queue goes as atomic
batches instead, which share one fsync, and never both at a time.

A message that is refused while a later one is stored would arrive behind its successor, and every fold drops a
number that is not above its source's last. The sequences in the acknowledgements show this: such a fact is said
again under a new number.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec
import structlog
from nats.errors import MaxPayloadError

from events import codec
from events.connection import DISCONNECTED, Connection
from events.journal import broker
from events.journal.broker import Ack
from events.journal.counters import Counters
from events.journal.spool import BYTES_MAX, Letter, Spool
from events.journal.witness import Witness

WINDOW = 64  # messages in flight: 15 ms of a server that syncs each
BATCH_MIN = 32  # an atomic batch costs 2.5 ms, as much as a dozen single messages
BATCH_MAX = 500  # the server allows 1,000
ACK_DEADLINE_S = 2.5
PAUSE_MIN_S, PAUSE_MAX_S = 0.05, 2.0  # after a refusal
MARK_EVERY = 64  # acknowledgements per mark in the spool
KEEP_EVERY_S = 0.6
RECENT = 4 * BATCH_MAX  # acknowledged sequences kept to see who overtook whom
OVERHEAD_BYTES = 400  # of a fact's subject, headers and records, beside its body

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Entry:
    letter: Letter
    own: bool  # said by this process, not left by an earlier one
    done: bool = False
    sent_at: float = 0.0

    @property
    def size(self) -> int:
        return len(self.letter.body) + OVERHEAD_BYTES


class Publisher:
    """One process's outbox. `add` never waits; `run` sends."""

    def __init__(
        self,
        connection: Connection,
        counters: Counters,
        spool: Spool | None,
        renumber: Callable[[Letter], Letter],
        check: Callable[[], Awaitable[bool]],
        witness: Witness,
        *,
        bytes_max: int = BYTES_MAX,
    ) -> None:
        self.bytes_open = 0
        self._connection = connection
        self._counters = counters
        self._spool = spool
        self._renumber = renumber
        self._check = check  # may the broker be trusted, since the last reconnection?
        self._checked = False
        self._witness = witness
        self._bytes_max = bytes_max
        self._inbox = connection.client.new_inbox()
        self._open: dict[int, _Entry] = {}  # by token, in the order of saying; unacknowledged
        self._outbox: deque[int] = deque()  # tokens
        self._flight: dict[int, None] = {}  # tokens, in the order of sending
        self._batch: dict[int, list[int]] = {}  # tokens, by that of the commit
        self._recent: deque[tuple[str, int, int]] = deque(maxlen=RECENT)  # source, number, sequence
        self._top: dict[str, int] = {}  # highest acknowledged number of each source
        self._next_token = 0
        self._last = 0  # own number said last
        self._inherited = 0
        self._unmarked = 0
        self._singly = 0  # so many facts from here on must not go as a batch
        self._batches = True
        self._paused_until = 0.0
        self._pause_s = PAUSE_MIN_S
        self._full = False
        self._wake = asyncio.Event()
        self._moved = (
            asyncio.Event()
        )  # a flag for `flush`: something was acknowledged, or the connection changed

    async def start(self) -> None:
        """Begin to listen for acknowledgements and take over what earlier processes left."""
        await self._connection.subscribe_raw(f"{self._inbox}.*", self._heard)
        self._connection.listen(self._connection_changed)
        for letter in self._spool.take_over() if self._spool else ():
            self._inherited += 1
            self._enter(letter, own=False)
        self._counters.inherited = self._inherited
        self._counters.spool_damaged = self._spool.damaged if self._spool else 0
        self._forget_earlier()

    @property
    def depth(self) -> int:
        """How many facts have not been acknowledged."""
        return len(self._open)

    def add(self, letter: Letter) -> None:
        """Take one fact. Beyond the bound it is dropped, counted and said."""
        self._counters.observed += 1
        if self.bytes_open + len(letter.body) + OVERHEAD_BYTES > self._bytes_max:
            self._drop(letter, "the spool is full")
            return
        if self._full:
            self._full = False
            log.warning("outbox_takes_facts_again", dropped=self._counters.dropped)
        self._last = letter.number
        if self._spool is not None:
            self._spool.put(letter)  # if the disk refuses, memory still has it
        self._enter(letter, own=True)
        self._wake.set()

    def _drop(self, letter: Letter, why: str) -> None:
        self._counters.dropped += 1
        if not self._full:
            self._full = True
            log.error("facts_dropped", why=why, first=letter.subject, waiting=len(self._open))

    def _enter(self, letter: Letter, *, own: bool) -> None:
        token, self._next_token = self._next_token, self._next_token + 1
        entry = _Entry(letter, own)
        self._open[token] = entry
        self._outbox.append(token)
        self.bytes_open += entry.size

    async def run(self) -> None:
        """Send for ever: whenever something waits, and again what was not acknowledged in time."""
        loop = asyncio.get_running_loop()
        kept_at = loop.time()
        while True:
            with contextlib.suppress(TimeoutError):
                # not wait_for: that of Python 3.11 can swallow a cancellation
                async with asyncio.timeout(self._patience(loop.time())):
                    await self._wake.wait()
            self._wake.clear()
            now = loop.time()
            if self._overdue(now):
                log.warning("acknowledgement_overdue", in_flight=len(self._flight))
                self._rewind()
            if now - kept_at > KEEP_EVERY_S:
                kept_at = now
                await asyncio.to_thread(self._keep)
            if self._connection.connected and now >= self._paused_until and await self._trusted(now):
                await self._pump(now)

    def _keep(self) -> None:
        """Once a second: write down what would be needed after a power cut."""
        self._witness.save()
        if self._spool and self._open and not self._connection.connected:
            self._spool.sync()

    async def _trusted(self, now: float) -> bool:
        if not self._checked:
            self._checked = await self._check()
            if not self._checked:
                self._pause(now)
        return self._checked

    def _patience(self, now: float) -> float:
        if self._paused_until > now:
            return self._paused_until - now
        return KEEP_EVERY_S if self._open or self._witness.unsaved else 60.0

    def _overdue(self, now: float) -> bool:
        first = next(iter(self._flight), None)
        return first is not None and now - self._open[first].sent_at > ACK_DEADLINE_S

    async def _pump(self, now: float) -> None:
        try:
            while self._outbox and not self._batch:
                if self._open.get(self._outbox[0]) is None:  # acknowledged after all
                    self._outbox.popleft()
                elif self._batches and self._singly <= 0 and len(self._outbox) >= BATCH_MIN:
                    if self._flight:
                        return
                    await self._send_batch(now)
                elif len(self._flight) < WINDOW:
                    await self._send_one(self._outbox.popleft(), now)
                else:
                    return
        except DISCONNECTED as error:
            log.debug("publish_failed", error=repr(error))
            self._rewind()
            self._pause(now)

    async def _send_one(self, token: int, now: float) -> None:
        entry = self._open[token]
        entry.sent_at = now
        self._flight[token] = None
        self._singly -= 1
        await self._publish(token, entry.letter.headers, f"{self._inbox}.{token}")

    async def _send_batch(self, now: float) -> None:
        tokens = [token for token in self._outbox if token in self._open][:BATCH_MAX]
        while self._outbox and self._outbox[0] <= tokens[-1]:
            self._outbox.popleft()
        batch_id = codec.new_id()
        self._batch[tokens[-1]] = tokens
        self._flight.update(dict.fromkeys(tokens))
        self._counters.batches += 1
        for place, token in enumerate(tokens, 1):
            entry = self._open[token]
            entry.sent_at = now
            headers = {**entry.letter.headers, "Nats-Batch-Id": batch_id, "Nats-Batch-Sequence": str(place)}
            last = token == tokens[-1]
            if last:
                headers["Nats-Batch-Commit"] = "1"
            await self._publish(token, headers, f"{self._inbox}.{token}" if last else "")

    async def _publish(self, token: int, headers: dict[str, str], reply: str) -> None:
        letter = self._open[token].letter
        try:
            await self._connection.client.publish(letter.subject, letter.body, reply, headers)
        except MaxPayloadError:
            self._settle(token)
            self._drop(letter, "it is larger than the broker takes")

    # --- acknowledgements: called in the read loop ------------------------------------------------------------------

    def _heard(self, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        token = int(subject[subject.rindex(b".") + 1 :])
        try:
            ack = broker.decode_ack(data) if data else broker.NOBODY
        except msgspec.MsgspecError:
            ack = broker.NOBODY
        tokens = self._batch.pop(token, [token])
        if ack.error:
            self._refused(tokens, ack)
        else:
            self._pause_s = PAUSE_MIN_S
            for place, each in enumerate(reversed(tokens)):
                self._acknowledged(each, ack.seq - place)
        self._wake.set()
        self._moved.set()

    def _acknowledged(self, token: int, seq: int) -> None:
        entry = self._open.get(token)
        if entry is None:
            return  # an answer to an earlier attempt has been here
        self._settle(token)
        self._counters.acknowledged += 1
        self._witness.note(seq, entry.letter.headers["ce-id"])
        if self._overtaken(entry.letter, seq):
            self._counters.renumbered += 1
            log.warning("fact_overtaken", subject=entry.letter.subject, number=entry.letter.number)
            self.add(self._renumber(entry.letter))

    def _overtaken(self, letter: Letter, seq: int) -> bool:
        source, number = letter.headers["ce-source"], letter.number
        self._recent.append((source, number, seq))
        if number > self._top.get(source, 0):
            self._top[source] = number
            return False
        return any(s == source and n > number and q < seq for s, n, q in self._recent)

    def _settle(self, token: int) -> None:
        """Let go of a fact that needs no more sending."""
        entry = self._open.pop(token)
        self._flight.pop(token, None)
        self.bytes_open -= entry.size
        if not entry.own:
            self._inherited -= 1
            self._forget_earlier()
        self._unmarked += 1
        if self._spool is not None and (not self._open or self._unmarked >= MARK_EVERY):
            self._unmarked = 0
            waiting = next((e.letter.number for e in self._open.values() if e.own), self._last + 1)
            self._spool.mark(waiting - 1, empty=not self._open)

    def _forget_earlier(self) -> None:
        if self._inherited == 0 and self._spool is not None:
            self._spool.forget_earlier()

    def _refused(self, tokens: list[int], ack: Ack) -> None:
        if ack.code == broker.MESSAGE_TOO_LARGE and len(tokens) == 1:
            entry = self._open.get(tokens[0])
            if entry is not None:
                self._settle(tokens[0])
                self._drop(entry.letter, "it is larger than the stream takes")
            return
        if tokens[-1] not in self._flight:
            return  # an earlier refusal has turned the flight back
        if ack.code in broker.BATCH_DISABLED:
            self._batches = False
        if len(tokens) > 1:  # some of it may be stored already: one by one, each recognised by its id
            self._singly = len(tokens)
        duplicate = ack.code == broker.DUPLICATE_IN_BATCH
        if not duplicate:
            self._counters.refused += 1
            log.warning("journal_refuses", error=ack.error, waiting=len(self._open))
        self._rewind()
        if not duplicate:
            self._pause(asyncio.get_running_loop().time())

    def _rewind(self) -> None:
        """Everything in flight will be sent again, before what follows it."""
        again = sorted(token for token in self._flight if token in self._open)
        self._counters.retried += len(again)
        self._flight.clear()
        self._batch.clear()
        self._outbox.extendleft(reversed(again))

    def _pause(self, now: float) -> None:
        self._paused_until = now + self._pause_s
        self._pause_s = min(PAUSE_MAX_S, self._pause_s * 2)

    def _connection_changed(self, connected: bool) -> None:
        if connected:
            self._checked = False
            self._paused_until, self._pause_s = 0.0, PAUSE_MIN_S
            if self._flight:
                self._singly = len(self._flight)  # a batch of them would be refused for one that had landed
            self._rewind()
        self._wake.set()
        self._moved.set()

    # --- the end ----------------------------------------------------------------------------------------------------

    async def flush(self, deadline_s: float) -> bool:
        """Wait until what was said so far is acknowledged, or safely on the disk while the broker is away."""
        last = self._next_token - 1
        try:
            async with asyncio.timeout(deadline_s):
                while next(iter(self._open), last + 1) <= last:
                    if not self._connection.connected and self._spool is not None:
                        await asyncio.to_thread(self._spool.sync)
                        return self._spool.failures == 0
                    self._moved.clear()
                    await self._moved.wait()
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """Let go of the spool; what was not acknowledged stays in it."""
        self._witness.save()
        if self._spool is not None:
            self._spool.close(empty=not self._open)
