"""Which KV blocks has an engine stored, and which has it removed? What workers say of them, and answer when asked.

    kv.events.<worker>           a `KvBatch` at the end of a step, to every frontend
    kv.ask.<worker>.<instance>   an `KvRequest` of one frontend, and one answer

Core NATS, msgpack, kept by nobody. What is lost on the way leaves a gap in the ids, and whoever finds it asks for what is
missing. A block is named by its sequence hash (`events.blocks`), so that an event needs no tokens in it.

Every DP rank counts its own events from 0, one id per event, over one life of its worker. A batch without events says
only which id comes next: that is how the loss of the last one is noticed.
"""

from collections.abc import Callable
from enum import IntEnum

import msgspec


class Tier(IntEnum):
    """Where a block lies, the fastest first."""

    DEVICE = 0
    HOST = 1
    DISK = 2


class Stored(msgspec.Struct, tag="stored", array_like=True, frozen=True):
    """A rank has these consecutive blocks now, the first right after `parent` (None: where prompts begin)."""

    blocks: list[int]
    parent: int | None = None
    tier: int = 0  # a Tier


class Removed(msgspec.Struct, tag="removed", array_like=True, frozen=True):
    """A rank has these blocks no more on this tier."""

    blocks: list[int]
    tier: int = 0  # a Tier


class Cleared(msgspec.Struct, tag="cleared", array_like=True, frozen=True):
    """A rank has no blocks any more, on any tier."""


KvEvent = Stored | Removed | Cleared


class KvBatch(msgspec.Struct, array_like=True, frozen=True):
    """Events of one rank of one life of a worker, in their order: their ids are `first`, `first` + 1, and so on."""

    worker: str
    instance: str
    rank: int
    first: int
    events: list[KvEvent]


class KvRequest(msgspec.Struct, array_like=True, frozen=True):
    """What a frontend asks a worker: the events from `first` to `last` (None: all that follow), both included, or without
    `first` all the blocks that a rank has. Such a dump comes in parts: `dump` and `part` ask for a further one."""

    rank: int = 0
    first: int | None = None
    last: int | None = None
    dump: int | None = None  # the `next` of the dump that it belongs to; None: a new one
    part: int = 0


class Events(msgspec.Struct, tag="events", array_like=True, frozen=True):
    """Events from the one asked for on: up to the last one wanted, or as many as fit into an answer."""

    first: int
    events: list[KvEvent]


class Dump(msgspec.Struct, tag="dump", array_like=True, frozen=True):
    """One part of what a rank has after all events before `next`, as events that lead to it from nothing: it replaces
    what was known. Also the answer to an `KvRequest` for events that are no longer kept."""

    next: int
    part: int
    parts: int
    events: list[KvEvent]


class TooNew(msgspec.Struct, tag="too_new", array_like=True, frozen=True):
    """There is no event yet of the id asked for: `next` is the first that does not exist."""

    next: int


class InvalidRange(msgspec.Struct, tag="invalid_range", array_like=True, frozen=True):
    """The last event asked for comes before the first."""

    first: int
    last: int


class KvRefused(msgspec.Struct, tag="refused", array_like=True, frozen=True):
    """The worker cannot answer, and why. Asking later may help."""

    reason: str


Answer = Events | Dump | TooNew | InvalidRange | KvRefused

encode = msgspec.msgpack.Encoder().encode
batch = msgspec.msgpack.Decoder(KvBatch).decode
ask = msgspec.msgpack.Decoder(KvRequest).decode
answer: Callable[[bytes], Answer] = msgspec.msgpack.Decoder(Answer).decode
