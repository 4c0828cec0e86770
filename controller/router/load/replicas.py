"""What have the other frontends in flight? Their requests go into our slot tracker, and ours into theirs.

    ours     tracker ──▶ events ──▶ batches                                      numbered, over one life of a frontend
    theirs   batch, the next one ──▶ tracker
             batch, beyond the next ──▶ tracker, as far as it goes, and a `Want`    something has escaped us
             the first of a whole telling ──▶ forget what we had of it ──▶ tracker
             silence ──▶ forget it, once it is no neighbour any more

A frontend that begins knows of nobody's requests and wants all of them; it knows all within a moment. What nobody frees
any more, the tracker's own guard does. Pure: the shell (`adapters.slot_sync`) carries messages and tells the time.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from controller.router.endpoints import WorkerRank
from controller.router.load.active_sequences import ActiveSequences, Request, RequestId
from events.slots import (
    BLOCKS_MAX,
    EVENTS_MAX,
    HASH_BYTES,
    Added,
    Freed,
    Read,
    SlotBatch,
    SlotEvent,
    Want,
    pack,
    unpack,
)

SILENT_S = 3.5  # three of the batches that say only that somebody is there may be lost
AGAIN_S = 1.0  # everything is asked for, and told, no more often
WAITING_MAX = 65_536  # events that are not said yet; beyond, everything is told again instead


@dataclass(slots=True)
class _Other:
    """One life of another frontend, as far as we know it."""

    life: str
    next: int  # number of its next batch
    heard: float
    complete: bool
    asked: float = float("-inf")


class Replicas:
    """Keeps one frontend's slot tracker in step with the others'."""

    def __init__(
        self,
        frontend: str,
        life: str,
        slots: ActiveSequences,
        on_event: Callable[[], None] = lambda: None,
    ) -> None:
        """Listen to our slot tracker from now on. `on_event`: there is one event more to be said."""
        self._frontend = frontend
        self._life = life
        self._slots = slots
        self._others: dict[str, _Other] = {}
        self._waiting: deque[SlotEvent] = deque()
        self._number = 0
        self._whole = False  # everything is to be told again
        self._told = float("-inf")
        self._on_event = on_event
        self.gaps = 0  # times that something of another frontend's was lost on the way
        slots.listen(self)

    @property
    def waiting(self) -> int:
        """How many events are not said yet."""
        return len(self._waiting)

    @property
    def others(self) -> dict[str, bool]:
        """The other frontends that were heard, and whether everything is known that they have in flight."""
        return {name: other.complete for name, other in self._others.items()}

    # --- what we have in flight ---------------------------------------------------------------------------

    def added(self, request: RequestId, entry: Request) -> None:
        """One of our requests begins."""
        self._note(_told(request, entry, entry.since))

    def read(self, request: RequestId) -> None:
        """Its prompt has been read."""
        self._note(Read(_name(request)))

    def freed(self, request: RequestId) -> None:
        """It is over."""
        self._note(Freed(_name(request)))

    def _note(self, event: SlotEvent) -> None:
        if len(self._waiting) >= WAITING_MAX:
            self.lost()
        self._waiting.append(event)
        self._on_event()

    def lost(self) -> None:
        """What was to be said cannot be, or was perhaps not heard: everything is told again later, to everybody."""
        self._waiting.clear()
        self._number += 1  # nobody is in step any more
        self._whole = True

    def due(self, now: float) -> bool:
        """Say whether there is anything to be said but that we are there."""
        return bool(self._waiting) or (self._whole and now - self._told >= AGAIN_S)

    def batches(self, now: float) -> Iterator[SlotBatch]:
        """Yield what is to be said now; at least one batch, which may have no events."""
        number = self._number
        while self._waiting:  # first of all: whoever is in step need not forget what we have in flight
            yield self._batch(False)
        if self._whole and now - self._told >= AGAIN_S:
            self._whole, self._told = False, now
            self._waiting.extend(_told(name, entry, now) for name, entry in self._slots.requests())
            yield self._batch(True)
        while self._waiting:
            yield self._batch(False)
        if self._number == number:  # nothing has been said
            yield self._batch(False)

    def _batch(self, whole: bool) -> SlotBatch:
        events: list[SlotEvent] = []
        blocks, number = 0, self._number
        while self._waiting and len(events) < EVENTS_MAX:
            event = self._waiting[0]
            blocks += len(event.blocks) // HASH_BYTES if isinstance(event, Added) else 0
            if blocks > BLOCKS_MAX and events:
                break
            events.append(self._waiting.popleft())
        self._number += bool(events) or whole
        return SlotBatch(self._frontend, self._life, number, events, whole)

    # --- what the others have -----------------------------------------------------------------------------

    def take(self, message: SlotBatch | Want, now: float) -> Want | None:
        """Take in a frontend's message. Return what we want of it, if something has escaped us."""
        if message.frontend == self._frontend:  # our own echo
            return None
        if isinstance(message, Want):
            self._whole = self._whole or message.of in ("", self._frontend)
            return None
        other = self._others.get(message.frontend)
        if other is None or other.life != message.life:
            self._slots.leave(message.frontend, now=now)
            fresh = message.whole or message.number == 0
            other = self._others[message.frontend] = _Other(message.life, message.number, now, fresh)
        elif message.number < other.next:  # said twice
            return None
        elif message.whole and not (other.complete and message.number == other.next):
            self._slots.leave(message.frontend, now=now)
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
        return Want(self._frontend, message.frontend)

    def _apply(self, frontend: str, event: SlotEvent, now: float) -> None:
        name = (frontend, event.request)
        if isinstance(event, Read):
            self._slots.prefill_done(name, now=now)
        elif isinstance(event, Freed):
            self._slots.free(name, now=now)
        else:
            self._slots.add(
                name,
                WorkerRank(event.worker, event.instance, event.rank),
                unpack(event.blocks),
                now=now - event.age_s,
                prefill_tokens=event.prefill_tokens,
                block_tokens=event.block_tokens,
                own_blocks=event.own_blocks,
                expected_s=event.expected_s,
                owner=frontend,
            )

    def want_all(self) -> Want:
        """Return what a frontend says that begins to listen, or does so again."""
        for other in self._others.values():
            other.complete = False
        return Want(self._frontend)

    def look(self, peers: Collection[str], now: float) -> Iterable[str]:
        """Forget the frontends that were silent for long and are no neighbours any more, and return them. Only to be asked
        of one who has listened all that time."""
        gone = [
            name for name, other in self._others.items() if now - other.heard > SILENT_S and name not in peers
        ]
        for name in gone:
            del self._others[name]
            self._slots.leave(name, now=now)
        return gone


def _name(request: RequestId) -> int | str:
    assert isinstance(request, int | str), "what other frontends are told of has a number or a name"
    return request


def _told(request: RequestId, entry: Request, now: float) -> Added:
    """Return how another frontend is told of one of our requests. One with more blocks than a message may have is told of
    as if nobody could share them."""
    small = len(entry.blocks) <= BLOCKS_MAX
    return Added(
        _name(request),
        entry.holder.worker,
        entry.holder.instance,
        entry.holder.rank,
        pack(entry.blocks) if small else b"",
        entry.own_blocks + (0 if small else len(entry.blocks)),
        entry.block_tokens,
        entry.prefill_tokens if entry.reading else 0,
        entry.expected_s,
        max(0.0, now - entry.since),
    )
