"""KV-cache events of workers, and the queries by which frontends recover missed ones.

    kv.events.<worker>           a `KvBatch` at the end of a step, to every frontend
    kv.ask.<worker>.<instance>   a `KvRequest` of one frontend, and one reply

Core NATS, msgpack, not stored. A lost message leaves a gap in the ids, and the frontend that finds the gap requests the missing
events. A block is named by its sequence hash (`events.blocks`), so that an event contains no tokens.

Every DP rank numbers its own events from 0, one id per event, within one instance of its worker. A batch without events carries
only the next id, by which a reader detects the loss of the last event.
"""

from collections.abc import Callable
from enum import IntEnum

import msgspec


class Tier(IntEnum):
    """The storage tier of a block, the fastest first."""

    DEVICE = 0
    HOST = 1
    DISK = 2


class Stored(msgspec.Struct, tag="stored", array_like=True, frozen=True):
    """A rank stored these consecutive blocks, the first right after `parent` (None: at the start of a prompt)."""

    blocks: list[int]
    parent: int | None = None
    tier: int = 0  # a Tier


class Removed(msgspec.Struct, tag="removed", array_like=True, frozen=True):
    """A rank removed these blocks from this tier."""

    blocks: list[int]
    tier: int = 0  # a Tier


class Cleared(msgspec.Struct, tag="cleared", array_like=True, frozen=True):
    """A rank removed all of its blocks, on all tiers."""


KvEvent = Stored | Removed | Cleared


class KvBatch(msgspec.Struct, array_like=True, frozen=True):
    """Events of one rank of one worker instance, in order: their ids are `first`, `first` + 1, and so on."""

    worker: str
    instance: str
    rank: int
    first: int
    events: list[KvEvent]


class KvRequest(msgspec.Struct, array_like=True, frozen=True):
    """A frontend's query to a worker: the events from `first` to `last` inclusive (None: all that follow), or without `first` a
    dump of all blocks of a rank. A dump has several parts: `dump` and `part` request a further one."""

    rank: int = 0
    first: int | None = None
    last: int | None = None
    dump: int | None = None  # the `next` of the dump that the part belongs to; None: a new dump
    part: int = 0


class Events(msgspec.Struct, tag="events", array_like=True, frozen=True):
    """The events from the requested one to the last requested one, or as many as fit into a reply."""

    first: int
    events: list[KvEvent]


class Dump(msgspec.Struct, tag="dump", array_like=True, frozen=True):
    """One part of a rank's blocks after all events before `next`, as events that build them from an empty cache. A dump replaces
    all earlier state. It is also the reply to a `KvRequest` for events that are no longer stored."""

    next: int
    part: int
    parts: int
    events: list[KvEvent]


class TooNew(msgspec.Struct, tag="too_new", array_like=True, frozen=True):
    """The requested event does not exist yet: `next` is the first id that does not exist."""

    next: int


class InvalidRange(msgspec.Struct, tag="invalid_range", array_like=True, frozen=True):
    """The last requested event is before the first one."""

    first: int
    last: int


class KvRefused(msgspec.Struct, tag="refused", array_like=True, frozen=True):
    """The worker cannot answer, for the reason given. A later retry may succeed."""

    reason: str


Answer = Events | Dump | TooNew | InvalidRange | KvRefused

encode = msgspec.msgpack.Encoder().encode
batch = msgspec.msgpack.Decoder(KvBatch).decode
ask = msgspec.msgpack.Decoder(KvRequest).decode
answer: Callable[[bytes], Answer] = msgspec.msgpack.Decoder(Answer).decode
