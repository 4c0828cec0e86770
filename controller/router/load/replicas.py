"""Replicates in-flight requests between frontends, so that each slot tracker contains all of them.

    ours     tracker ──▶ events ──▶ batches                                      numbered per frontend process
    theirs   batch, the next one ──▶ tracker
             batch, beyond the next ──▶ tracker, as far as possible, and a `ResendRequest`   batches were lost
             the first of a full state ──▶ drop that frontend's earlier requests ──▶ tracker
             silence ──▶ drop the frontend, once it is no longer a peer

A frontend starts without the requests of the others. It requests their full states, which arrive within a moment. Requests
that are never freed are removed by the tracker's own guard. No I/O: `adapters.slot_sync` transports messages and supplies the
time.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from math import inf

from controller.router.endpoints import WorkerRank
from controller.router.load.active_sequences import ActiveSequences, Request, RequestId
from events import slot_messages as slot

SILENT_S = 3.5  # tolerates the loss of three heartbeat batches
AGAIN_S = 1.0  # minimum interval between full states, and between requests for one
WAITING_MAX = 65_536  # unsent events; beyond this the full state is sent instead


@dataclass(slots=True)
class _Other:
    """One process of another frontend."""

    life: str
    next: int  # number of its next batch
    heard: float
    complete: bool
    asked: float = -inf


@dataclass(eq=False, repr=False)
class Replicas:
    """Keeps one frontend's slot tracker in step with the others'."""

    frontend: str
    life: str  # of this process
    slots: ActiveSequences
    on_event: Callable[[], None] = lambda: None  # called for each new event to send
    gaps: int = 0  # number of times that batches of another frontend were lost
    _others: dict[str, _Other] = field(default_factory=dict)
    _waiting: deque[slot.SlotEvent] = field(default_factory=deque)
    _number: int = 0
    _whole: bool = False  # the full state is to be sent
    _full_sent: float = -inf

    def __post_init__(self) -> None:
        self.slots.listen(self)

    @property
    def waiting(self) -> int:
        """Number of unsent events."""
        return len(self._waiting)

    @property
    def others(self) -> dict[str, bool]:
        """The other frontends, and whether all their in-flight requests are known."""
        return {name: other.complete for name, other in self._others.items()}

    # --- this frontend's requests ---------------------------------------------------------------------------

    def added(self, request: RequestId, entry: Request) -> None:
        """Record the start of one of this frontend's requests."""
        self._note(_added(request, entry, entry.since))

    def read(self, request: RequestId) -> None:
        """Record that the prompt of a request has been read."""
        self._note(slot.Read(_name(request)))

    def freed(self, request: RequestId) -> None:
        """Record the end of a request."""
        self._note(slot.Freed(_name(request)))

    def _note(self, event: slot.SlotEvent) -> None:
        if len(self._waiting) >= WAITING_MAX:
            self.lost()
        self._waiting.append(event)
        self.on_event()

    def lost(self) -> None:
        """Handle events that could not be sent or may not have arrived: the full state is sent to all frontends later."""
        self._waiting.clear()
        self._number += 1  # no other frontend is in step any more
        self._whole = True

    def due(self, now: float) -> bool:
        """Return whether there is more to send than a heartbeat."""
        return bool(self._waiting) or (self._whole and now - self._full_sent >= AGAIN_S)

    def batches(self, now: float) -> Iterator[slot.SlotBatch]:
        """Yield the batches to send now: at least one, which may have no events (a heartbeat)."""
        number = self._number
        while self._waiting:  # first, so that frontends in step need not discard their copy
            yield self._batch(False)
        if self._whole and now - self._full_sent >= AGAIN_S:
            self._whole, self._full_sent = False, now
            self._waiting.extend(_added(name, entry, now) for name, entry in self.slots.requests())
            yield self._batch(True)
        while self._waiting:
            yield self._batch(False)
        if self._number == number:  # nothing was sent: a heartbeat
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
        """Apply a message of another frontend. Return a request for its full state if batches were lost."""
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
        """Return the request for the full state of every frontend. It is sent when this frontend subscribes or resubscribes."""
        for other in self._others.values():
            other.complete = False
        return slot.ResendRequest(self.frontend)

    def look(self, peers: Collection[str], now: float) -> Iterable[str]:
        """Drop and return the frontends that were silent for long and are no longer peers.

        Call it only if this frontend has listened all that time.
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

    A request with more blocks than a message may have is reported as if it shared none.
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
