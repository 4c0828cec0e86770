"""Replicates in-flight requests between frontends: each frontend's slot tracker has all of them.

    ours     tracker ──▶ events ──▶ messages, numbered per frontend process
    theirs   the next message ──▶ tracker
             a message with a later number: messages were lost ──▶ tracker (what can be applied), and a `ResendRequest`
             the first message of a full state ──▶ drop that frontend's earlier requests ──▶ tracker
             silence ──▶ drop the frontend, once it is no longer a peer

A message is a `SlotBatch` of events. A frontend starts without the requests of the others. It requests their full states,
which arrive within a moment. The tracker itself removes requests that are never freed. This module does no I/O:
`controller.adapters.feeds.slot_sync` transports the messages and supplies the time.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from math import inf

from controller.router.endpoints import WorkerRank
from controller.router.load.active_sequences import ActiveSequences, Request, RequestId
from events import slot_messages as slot

# seconds after which a frontend counts as silent, so that three heartbeat messages may be lost
SILENT_S = 3.5
AGAIN_S = 1.0  # shortest time in seconds between two full states, and between two requests for one
WAITING_MAX = 65_536  # largest number of unsent events; beyond it the full state is sent instead


@dataclass(slots=True)
class _Other:
    """One process of another frontend, and the number that the next message of that process must have."""

    life: str
    next: int  # number of its next message
    heard: float
    complete: bool
    asked: float = -inf


@dataclass(eq=False, repr=False)
class Replicas:
    """Keeps a frontend's slot tracker (`ActiveSequences`) up to date with the requests of all other frontends."""

    frontend: str
    life: str  # id of this process
    slots: ActiveSequences
    on_event: Callable[[], None] = lambda: None  # called for each new event that must be sent
    gaps: int = 0  # times at which messages of another frontend were lost
    _others: dict[str, _Other] = field(default_factory=dict)
    _waiting: deque[slot.SlotEvent] = field(default_factory=deque)
    _number: int = 0
    _whole: bool = False  # whether the full state must be sent
    _full_sent: float = -inf

    def __post_init__(self) -> None:
        self.slots.listen(self)

    @property
    def waiting(self) -> int:
        """Number of events that have not been sent yet."""
        return len(self._waiting)

    @property
    def others(self) -> dict[str, bool]:
        """For each other frontend, whether all its in-flight requests are known."""
        return {name: other.complete for name, other in self._others.items()}

    # --- this frontend's requests ---------------------------------------------------------------------------

    def added(self, request: RequestId, entry: Request) -> None:
        """Record the start of one of this frontend's requests, to report it to the other frontends."""
        self._note(_added(request, entry, entry.since))

    def read(self, request: RequestId) -> None:
        """Record that the prompt of a request is prefilled, to report it to the other frontends."""
        self._note(slot.Read(_name(request)))

    def freed(self, request: RequestId) -> None:
        """Record the end of one of this frontend's requests, to report it to the other frontends."""
        self._note(slot.Freed(_name(request)))

    def _note(self, event: slot.SlotEvent) -> None:
        if len(self._waiting) >= WAITING_MAX:
            self.lost()
        self._waiting.append(event)
        self.on_event()

    def lost(self) -> None:
        """Schedule sending this frontend's full state to all others.

        This is needed if events were not sent or may not have arrived.
        """
        self._waiting.clear()
        self._number += 1  # so that every other frontend detects a lost message
        self._whole = True

    def due(self, now: float) -> bool:
        """Return whether events or the full state must be sent now. Heartbeats do not count."""
        return bool(self._waiting) or (self._whole and now - self._full_sent >= AGAIN_S)

    def batches(self, now: float) -> Iterator[slot.SlotBatch]:
        """Yield the messages to send now: at least one, which is a heartbeat if it has no events."""
        number = self._number
        while self._waiting:  # first, so that frontends without losses need not discard their copy
            yield self._batch(False)
        if self._whole and now - self._full_sent >= AGAIN_S:
            self._whole, self._full_sent = False, now
            self._waiting.extend(_added(name, entry, now) for name, entry in self.slots.requests())
            yield self._batch(True)
        while self._waiting:
            yield self._batch(False)
        if self._number == number:  # nothing was sent, so a heartbeat follows
            yield self._batch(False)

    def _batch(self, whole: bool) -> slot.SlotBatch:
        events: list[slot.SlotEvent] = []
        blocks, number = 0, self._number
        while self._waiting and len(events) < slot.EVENTS_MAX:
            event = self._waiting[0]
            blocks += len(event.blocks) // slot.HASH_BYTES if isinstance(event, slot.Added) else 0
            if blocks > slot.BLOCKS_MAX and events:
                break
            events.append(self._waiting.popleft())
        self._number += bool(events) or whole
        return slot.SlotBatch(self.frontend, self.life, number, events, whole)

    # --- other frontends' requests -----------------------------------------------------------------------------

    def take(self, message: slot.SlotBatch | slot.ResendRequest, now: float) -> slot.ResendRequest | None:
        """Apply a message of another frontend. If messages were lost, return a request for that frontend's full state."""
        if message.frontend == self.frontend:  # our own message
            return None
        if isinstance(message, slot.ResendRequest):
            self._whole = self._whole or message.of in ("", self.frontend)
            return None
        other = self._others.get(message.frontend)
        if other is None or other.life != message.life:
            self.slots.leave(message.frontend, now=now)
            fresh = message.whole or message.number == 0
            other = self._others[message.frontend] = _Other(message.life, message.number, now, fresh)
        elif message.number < other.next:  # a duplicate
            return None
        elif message.whole and not (other.complete and message.number == other.next):
            self.slots.leave(message.frontend, now=now)
            other.complete = True
        elif message.number > other.next:
            self.gaps += other.complete
            other.complete = False
        other.heard = now
        other.next = message.number + (bool(message.events) or message.whole)
        for event in message.events:
            self._apply(message.frontend, event, now)
        if other.complete or now - other.asked < AGAIN_S:
            return None
        other.asked = now
        return slot.ResendRequest(self.frontend, message.frontend)

    def _apply(self, frontend: str, event: slot.SlotEvent, now: float) -> None:
        name = (frontend, event.request)
        if isinstance(event, slot.Read):
            self.slots.prefill_done(name, now=now)
        elif isinstance(event, slot.Freed):
            self.slots.free(name, now=now)
        else:
            self.slots.add(
                name,
                WorkerRank(event.worker, event.instance, event.rank),
                slot.unpack(event.blocks),
                now=now - event.age_s,
                prefill_tokens=event.prefill_tokens,
                block_tokens=event.block_tokens,
                own_blocks=event.own_blocks,
                expected_s=event.expected_s,
                owner=frontend,
            )

    def request_all(self) -> slot.ResendRequest:
        """Return a request for the full state of every frontend.

        It is sent when this frontend subscribes or resubscribes.
        """
        for other in self._others.values():
            other.complete = False
        return slot.ResendRequest(self.frontend)

    def look(self, peers: Collection[str], now: float) -> Iterable[str]:
        """Drop the frontends that were silent for SILENT_S and are no longer peers. Return their names.

        Call this method only if this frontend was subscribed for the last SILENT_S seconds without a break.
        """
        gone = [
            name for name, other in self._others.items() if now - other.heard > SILENT_S and name not in peers
        ]
        for name in gone:
            del self._others[name]
            self.slots.leave(name, now=now)
        return gone


def _name(request: RequestId) -> int | str:
    assert isinstance(request, int | str), "other frontends know a request by a number or a string"
    return request


def _added(request: RequestId, entry: Request, now: float) -> slot.Added:
    """Return the event that reports one of this frontend's requests.

    A request with more blocks than fit into a message is reported as if none of its blocks were shared.
    """
    small = len(entry.blocks) <= slot.BLOCKS_MAX
    return slot.Added(
        _name(request),
        entry.holder.worker,
        entry.holder.instance,
        entry.holder.rank,
        slot.pack(entry.blocks) if small else b"",
        entry.own_blocks + (0 if small else len(entry.blocks)),
        entry.block_tokens,
        entry.prefill_tokens if entry.reading else 0,
        entry.expected_s,
        max(0.0, now - entry.since),
    )
