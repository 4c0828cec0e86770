"""Decodes an engine's batches of KV events. Bytes in, plain values out; no IO.

vLLM's format, also used by SGLang: msgpack of `[time, [event, ...], DP rank]`. An event is a map (`{"type": "BlockStored",
"block_hashes": ...}`, vLLM 0.32), or an array with its type's name first and its fields in the same order (SGLang, earlier
vLLM). Newer engines append fields, and earlier ones have fewer. The decoder accepts all of them and skips unknown fields.

The whole batch is rejected (`MalformedKvBatch`) if any required part cannot be read. If only a part were used, blocks could
stay listed after they were removed.
"""

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from events.errors import HoldfastError
from events.kv import Tier

Key = int | bytes
"""An engine's own name of a block: 64 bits, signed or unsigned, or the whole digest."""

TIERS = {
    "GPU": Tier.DEVICE,
    "DEVICE": Tier.DEVICE,
    "CPU": Tier.HOST,
    "CPU_PINNED": Tier.HOST,
    "CPU_TIER1": Tier.HOST,
    "CPU_TIER2": Tier.DISK,
    "DISK": Tier.DISK,
    "NVME": Tier.DISK,
    "STORAGE": Tier.DISK,
}
"""The tier of each medium. A missing one (EXTERNAL, NETWORK, REMOTE, SHARED) does not belong to one worker."""

Fields = dict[str, Any]
"""The fields of an event, decoded and not yet checked."""

_STORED = (
    "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys",
    "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality",
)  # fmt: skip
_REMOVED = ("block_hashes", "medium", "group_idx", "locality")
_WHOLE_PREFIX = (None, "full_attention", "mla_attention", "sink_full_attention", "unknown")
_UNREADABLE = (msgspec.DecodeError, ArithmeticError, LookupError, RecursionError, TypeError, ValueError)
_TOKEN = next(code for code in "IL" if array(code).itemsize == 4)


class MalformedKvBatch(HoldfastError):
    """An upstream's batch of KV events cannot be read."""


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """The engine has stored these consecutive blocks, the first one right after `parent`.

    Without tokens, the event only reports on which tier known blocks are.
    """

    keys: list[Key]
    parent: Key | None
    tokens: Sequence[int]
    block_tokens: int
    tier: Tier = Tier.DEVICE
    lora: str | None = ""  # None: an adapter with an unknown name
    extras: Sequence[object] = ()  # per block, the parts of its hash besides tokens: names, salts, images
    group: int | None = None


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """The engine has one copy less of each of these blocks."""

    keys: list[Key]
    tier: Tier = Tier.DEVICE
    group: int | None = None


@dataclass(frozen=True, slots=True)
class AllCleared:
    """The engine has emptied its prefix cache."""


UpstreamEvent = BlocksStored | BlocksRemoved | AllCleared


@dataclass(frozen=True, slots=True)
class UpstreamBatch:
    """The events of one engine step, and its time by the engine's clock."""

    at: float
    events: list[UpstreamEvent]
    unknown: int = 0  # skipped events of unknown kinds


def read_batch(payload: bytes) -> UpstreamBatch:
    """Decode a batch. Raise MalformedKvBatch."""
    try:
        said = msgspec.msgpack.decode(payload)
        at, events = (said["ts"], said["events"]) if isinstance(said, dict) else said[:2]
        read = [_event(event) for event in events]
        unknown = sum(_kind(event) not in _READERS for event in events)
        if not math.isfinite(at):
            raise ValueError(f"its time is {at}")
        return UpstreamBatch(float(at), [event for event in read if event is not None], unknown)
    except _UNREADABLE as error:
        raise MalformedKvBatch(f"{type(error).__name__}: {error}") from None


def _kind(said: Any) -> str:
    kind = said["type"] if isinstance(said, dict) else said[0]
    if not isinstance(kind, str):
        raise ValueError(f"an event is called {kind!r}")
    return kind


def _event(said: Any) -> UpstreamEvent | None:
    """Decode one event; None if it does not concern this engine's prefix cache, or is of an unknown kind."""
    reader = _READERS.get(_kind(said))
    if reader is None:
        return None
    names, read = reader
    fields = said if isinstance(said, dict) else dict(zip(names, said[1:], strict=False))
    medium = fields.get("medium")
    tier = Tier.DEVICE if medium is None else TIERS.get(str(medium).upper())
    if tier is None or fields.get("locality") == "REMOTE":
        return None
    return read(fields, tier)


def _stored(fields: Fields, tier: Tier) -> BlocksStored | None:
    if fields.get("kv_cache_spec_kind") not in _WHOLE_PREFIX:
        return None  # blocks of an attention window at the end of the prompt: they do not form a prefix
    parent, lora = fields["parent_block_hash"], fields.get("lora_name") or ""
    size, tokens = int(fields["block_size"]), array(_TOKEN, fields["token_ids"])
    if size < 1 and tokens:
        raise ValueError(f"a block has {size} tokens")
    return BlocksStored(
        keys=_keys(fields["block_hashes"]),
        parent=None if parent is None else _key(parent),
        tokens=tokens,
        block_tokens=size,
        tier=tier,
        lora=None if fields.get("lora_id") is not None and not lora else str(lora),
        extras=list(fields.get("extra_keys") or ()),
        group=fields.get("group_idx"),
    )


def _removed(fields: Fields, tier: Tier) -> BlocksRemoved:
    return BlocksRemoved(_keys(fields["block_hashes"]), tier, fields.get("group_idx"))


_Read = Callable[[Fields, Tier], UpstreamEvent | None]
_READERS: dict[str, tuple[tuple[str, ...], _Read]] = {
    "BlockStored": (_STORED, _stored),
    "BlockRemoved": (_REMOVED, _removed),
    "AllBlocksCleared": ((), lambda fields, tier: AllCleared()),
}


def _keys(said: object) -> list[Key]:
    if not isinstance(said, list):
        raise ValueError("block_hashes is no list")
    return [_key(one) for one in said]


def _key(said: object) -> Key:
    if isinstance(said, bytes) or type(said) is int:
        return said
    raise ValueError(f"a block is called {said!r}")
