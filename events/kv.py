"""KV events (blocks that workers stored or removed), and the requests for missed KV events.

    kv.events.<worker>           a `KvBatch` at the end of an engine step, to every frontend
    kv.ask.<worker>.<instance>   a `KvRequest` of one frontend, and one reply

The left column lists the subjects. Messages are msgpack on core NATS and are not stored. A lost message leaves a gap in the
event ids, and a frontend that finds a gap requests the missing events. The sequence hash names a block (`events.blocks`), so
that an event contains no tokens.

Every DP rank numbers its own events from 0, one id per event, within one instance of its worker. A KV-event batch without
events carries only the next id. From this id a reader detects that the last event was lost.
"""

from collections.abc import Callable
from enum import IntEnum

import msgspec


class Tier(IntEnum):
    """The storage tier of a block. DEVICE is the fastest and DISK the slowest."""

    DEVICE = 0
    HOST = 1
    DISK = 2


class Stored(msgspec.Struct, tag="stored", array_like=True, frozen=True):
    """A rank stored these consecutive blocks. The first one follows the block `parent`, or starts a prompt if `parent` is
    None."""

    blocks: list[int]
    parent: int | None = None
    tier: int = 0  # value of a Tier


class Removed(msgspec.Struct, tag="removed", array_like=True, frozen=True):
    """A rank removed these blocks from this tier."""

    blocks: list[int]
    tier: int = 0  # value of a Tier


class Cleared(msgspec.Struct, tag="cleared", array_like=True, frozen=True):
    """A rank removed all of its blocks, on all tiers."""


KvEvent = Stored | Removed | Cleared


class KvBatch(msgspec.Struct, array_like=True, frozen=True):
    """A batch of KV events of one rank of one worker instance. The events are in order, and their ids are `first`, `first` +
    1, and so on."""

    worker: str
    instance: str
    rank: int
    first: int
    events: list[KvEvent]


class KvRequest(msgspec.Struct, array_like=True, frozen=True):
    """A frontend's request to a worker for the KV events of one rank.

    With `first`, the reply has the events from `first` to `last` inclusive, or all events from `first` on if `last` is None.
    Without `first`, the reply is a dump of all blocks of the rank. A dump is sent in parts. To request a further part, `part`
    is its number, and `dump` is the field `next` of the parts so far.
    """

    rank: int = 0
    first: int | None = None
    last: int | None = None
    # identifies the dump of the requested part by that dump's `next`; None: a new dump
    dump: int | None = None
    part: int = 0


class Events(msgspec.Struct, tag="events", array_like=True, frozen=True):
    """The reply with the requested events, in order from the id `first`. If not all of them fit into one reply, the last ones
    are left out."""

    first: int
    events: list[KvEvent]


class Dump(msgspec.Struct, tag="dump", array_like=True, frozen=True):
    """One part of a dump: events that build the rank's blocks from an empty cache.

    All parts together give the rank's cache as it is after all events with ids below `next`. A dump replaces what the frontend
    knew of the cache. A dump is also the reply to a `KvRequest` for events that the worker no longer stores.
    """

    next: int
    part: int
    parts: int
    events: list[KvEvent]


class TooNew(msgspec.Struct, tag="too_new", array_like=True, frozen=True):
    """The reply to a request for an event that does not exist yet. `next` is the id that the next event will have."""

    next: int


class InvalidRange(msgspec.Struct, tag="invalid_range", array_like=True, frozen=True):
    """The reply to a request with a `last` that is less than `first`."""

    first: int
    last: int


class KvRefused(msgspec.Struct, tag="refused", array_like=True, frozen=True):
    """The worker cannot answer the request, for the stated reason. A later retry may succeed."""

    reason: str


Answer = Events | Dump | TooNew | InvalidRange | KvRefused

encode = msgspec.msgpack.Encoder().encode
batch = msgspec.msgpack.Decoder(KvBatch).decode
ask = msgspec.msgpack.Decoder(KvRequest).decode
answer: Callable[[bytes], Answer] = msgspec.msgpack.Decoder(Answer).decode
