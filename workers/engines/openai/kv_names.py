"""Decodes an engine's KV events, and translates its own block names into Holdfast's sequence hashes.

An engine's block hashes have no meaning outside the engine. The event of each stored block contains the block's tokens and
parent. From these, this module computes the name that all of Holdfast uses (`events.blocks`). It records the names, and
translates later events with them. The states of a block:

    known      its name is recorded: the engine has the block, or had it when events were lost
    held       number of copies per tier: vLLM computes a prompt twice if it arrives twice at once, keeps and reports both
    hidden     it has no name that a router could look up: a block of a canary, an image or an unknown adapter

An engine that continues after its worker was convicted keeps its computed blocks. So each conviction begins an epoch, which is
part of the salts of all later prompts (`salt_of`). Only blocks stored in the last epoch can be reused; the first block of an
epoch hides all earlier blocks.

After lost events (`lose`) no block is held, but all are still known. If the engine then stores a block on its device right
after a known one, the engine must have all blocks before it, and they become held again. So blocks in use are recovered
without a replay.

Pure: no IO, no clock. Used by one thread.
"""

import math
import secrets
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from events import blocks
from events.errors import HoldfastError
from events.kv import Cleared, KvEvent, Removed, Stored, Tier
from events.wire import Generate

SALTED_MAX = 10_000  # recorded salted prompts, for engines that do not report salts
EPOCH_DIGITS_MAX = 18  # microseconds since 1970 have 16
KNOWN_MAX = 2_000_000  # blocks; 16 tokens each are 32 million tokens
CANARY_SALT = "holdfast-canary-"  # prefix of salts that keep canaries out of the prefix cache
EPOCH_SALT = "holdfast-epoch-"  # followed by a number, a dash, and the request's own salt
REASONS = ("orphan", "odd_size", "unnamed", "full")

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
    """Decode a batch. Raise MalformedKvBatch.

    vLLM's format, also used by SGLang: msgpack of `[time, [event, ...], DP rank]`. An event is a map (`{"type": "BlockStored",
    "block_hashes": ...}`, vLLM 0.32), or an array with its type's name first and its fields in the same order (SGLang, earlier
    vLLM). Newer engines append fields, and earlier ones have fewer. All of them are accepted, and unknown fields skipped.

    The whole batch is rejected if any required part cannot be read. If only a part were used, blocks could stay listed after
    they were removed.
    """
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


def salt_of(epoch: int, salt: str) -> str:
    """Return the salt to send to the engine. In epoch 0 it is the request's own salt, unless that looks like an epoch's."""
    return f"{EPOCH_SALT}{epoch}-{salt}" if epoch or salt.startswith(EPOCH_SALT) else salt


def read_salt(salt: str) -> tuple[int, str]:
    """Split a salt into the epoch in which the block was stored and the request's own salt."""
    epoch, dash, own = salt.removeprefix(EPOCH_SALT).partition("-")
    known = salt.startswith(EPOCH_SALT) and dash and len(epoch) <= EPOCH_DIGITS_MAX
    return (int(epoch), own) if known and epoch.isdecimal() and epoch.isascii() else (0, salt)


class CacheEpochs:
    """Salts that prevent the reuse of possibly wrong blocks in an upstream's prefix cache, which the worker cannot empty.

    Each conviction of this worker, in any of its instances, begins an epoch with its own salt. So a request only reuses blocks
    computed after the last conviction. While the worker is distrusted and no later epoch has begun, requests neither reuse
    blocks nor leave reusable ones.
    """

    def __init__(self) -> None:
        self._trusted = True
        self._epoch = 0  # the last epoch seen
        self._spoilt = -1  # the last epoch that may contain wrong blocks

    def trust(self, trusted: bool) -> None:
        """Stop the reuse of all blocks computed so far. Until trusted again, requests leave no reusable blocks, like canaries."""
        self._trusted = trusted
        if not trusted:
            self._spoilt = self._epoch

    def salted(self, request: Generate) -> Generate:
        """Add the salt of its epoch to a request. Canaries already have a salt."""
        if request.canary:
            return request
        self._epoch = max(self._epoch, request.cache_epoch)
        apart = not self._trusted or self._epoch <= self._spoilt
        salt = CANARY_SALT + secrets.token_hex(16) if apart else salt_of(self._epoch, request.cache_salt)
        return msgspec.structs.replace(request, cache_salt=salt)


@dataclass(slots=True)
class Block:
    """One block that the engine has reported."""

    name: int | None  # its sequence hash; None: hidden
    parent: Key | None
    seed: int  # of this block's local hash, and of those of all blocks after it
    copies: list[int] = field(default_factory=lambda: [0, 0, 0])  # by tier

    @property
    def held(self) -> bool:
        """Whether any tier holds the block."""
        return any(self.copies)


class Names:
    """The blocks of one rank of an engine. The block size in tokens is that of the first stored blocks."""

    def __init__(self, known_max: int = KNOWN_MAX, salted_max: int = SALTED_MAX) -> None:
        """Keep at most `known_max` known blocks and `salted_max` salted prompts."""
        self.block_tokens: int | None = None
        self.passed_over = dict.fromkeys(REASONS, 0)  # skipped blocks, by reason
        self._known: dict[Key, Block] = {}
        self._known_max = known_max
        self._salted_max = salted_max
        self._group: int | None = None  # the KV cache group with the prefix's blocks, if there are several
        self._lost = False  # some blocks may be known but not held
        self._reports_salts = False  # false for earlier versions of vLLM
        self._epoch = 0  # epoch of the blocks that can be reused
        # the first local hashes that recent salted prompts would have without a salt
        self._salted: dict[int, None] = {}

    def __len__(self) -> int:
        """Return the number of known blocks."""
        return len(self._known)

    def take(self, events: Sequence[UpstreamEvent]) -> list[KvEvent]:
        """Process the events of one batch, and return them with Holdfast's names."""
        out: list[KvEvent] = []
        for event in events:
            match event:
                case BlocksStored():
                    self._store(event, out)
                case BlocksRemoved():
                    self._remove(event, out)
                case AllCleared():
                    out.extend(self.forget())
        return out

    def salted(self, tokens: Sequence[int]) -> None:
        """Record a salted prompt that is being sent to the engine. May be called from another thread.

        If an engine does not report salts, the blocks of this prompt look like those of a prompt without a salt. Until the engine
        has reported a salt, blocks that begin in the same way are hidden.
        """
        size = self.block_tokens
        if self._reports_salts or size is None or len(tokens) < size:
            return
        (first,) = blocks.local_hashes(tokens[:size], size)
        self._salted[first] = None
        if len(self._salted) > self._salted_max:
            del self._salted[next(iter(self._salted))]

    def lose(self) -> list[KvEvent]:
        """Mark all blocks as not held, because events were lost. They stay known."""
        for block in self._known.values():
            block.copies = [0, 0, 0]
        self._lost = True
        return [Cleared()]

    def forget(self) -> list[KvEvent]:
        """Drop all known blocks: the cache is empty, or belongs to a restarted engine."""
        self._known.clear()
        return [Cleared()]

    # --- stored blocks

    def _store(self, event: BlocksStored, out: list[KvEvent]) -> None:
        if self._group is None:
            self._group = event.group
        if event.group not in (None, self._group):
            return
        if not event.tokens:
            self._locate(event, out)
            return
        self.block_tokens = self.block_tokens or event.block_tokens
        parent = None if event.parent is None else self._known.get(event.parent)
        if reason := self._obstacle(event, parent, out):
            self.passed_over[reason] += len(event.keys)
            return
        made = self._add(event, parent, out)
        named = [block.name for block in made if block.name is not None]
        if named:  # hidden blocks are always the last ones
            out.append(Stored(named, None if parent is None else parent.name, event.tier))

    def _obstacle(self, event: BlocksStored, parent: Block | None, out: list[KvEvent]) -> str:
        """Return the reason why these blocks are skipped; empty if they are not."""
        size, count = event.block_tokens, len(event.keys)
        if size != self.block_tokens or len(event.tokens) != count * size:
            return "odd_size"  # a partial block, or a prefix with holes
        if event.parent is not None and (parent is None or not self._has_all(event.parent, event.tier, out)):
            return "orphan"
        full = len(self._known) + count > self._known_max and not self._forget_unheld()
        return "full" if full else ""

    def _add(self, event: BlocksStored, parent: Block | None, out: list[KvEvent]) -> list[Block]:
        """Record that these blocks are held, and return them."""
        seed, local, visible = self._hash(event, parent, out)
        name, before = None if parent is None else parent.name, event.parent
        made: list[Block] = []
        for place, (key, own) in enumerate(zip(event.keys, local, strict=True)):
            block = self._known.get(key)
            if block is None:
                if place >= visible or (before is not None and name is None):
                    name = None
                else:
                    name = own if name is None else blocks.follow(name, own)
                block = self._known[key] = Block(name, before, seed)
            block.copies[event.tier] += 1
            made.append(block)
            name, before = block.name, key
        return made

    def _hash(
        self, event: BlocksStored, parent: Block | None, out: list[KvEvent]
    ) -> tuple[int, list[int], int]:
        """Return the blocks' local hashes and their seed, and how many of the first blocks a router could look up."""
        others = _others(next(iter(event.extras), None), event.lora)
        if parent is not None:
            hashes = blocks.local_hashes(event.tokens, event.block_tokens, parent.seed)
            return parent.seed, hashes, 0 if others or parent.name is None else _without_extras(event)
        salt = str(others.pop(0)) if others and isinstance(others[0], str) else ""
        epoch, own_salt = read_salt(salt)
        if epoch > self._epoch:
            self._begin(epoch, out)
        seed = blocks.seed(lora=event.lora or "", namespace=own_salt)
        hashes = blocks.local_hashes(event.tokens, event.block_tokens, seed)
        self._reports_salts = self._reports_salts or salt != ""
        unreported = not self._reports_salts and hashes[0] in self._salted
        # `others` are an image, or something unknown
        apart = others or event.lora is None or own_salt.startswith(CANARY_SALT)
        return seed, hashes, 0 if apart or unreported or epoch < self._epoch else _without_extras(event)

    def _begin(self, epoch: int, out: list[KvEvent]) -> None:
        """Hide everything stored in earlier epochs."""
        self._epoch = epoch
        for block in self._known.values():
            block.name = None
        out.append(Cleared())

    def _locate(self, event: BlocksStored, out: list[KvEvent]) -> None:
        """Record the tier of known blocks."""
        for key in event.keys:
            block = self._known.get(key)
            before = None if block is None or block.parent is None else self._known.get(block.parent)
            if block is None or (block.parent is not None and (before is None or not before.held)):
                self.passed_over["unnamed"] += 1
                continue
            block.copies[event.tier] += 1
            if block.name is not None:
                out.append(Stored([block.name], None if before is None else before.name, event.tier))

    def _has_all(self, key: Key, tier: Tier, out: list[KvEvent]) -> bool:
        """Return whether a block and all blocks before it are held. A block stored right after it on the device proves this."""
        lost: list[Block] = []
        at: Key | None = key
        while at is not None:
            block = self._known.get(at)
            if block is None:
                return False
            if block.held:
                break
            lost.append(block)
            at = block.parent
        if lost and tier != Tier.DEVICE:
            return False
        for block in lost:
            block.copies[Tier.DEVICE] = 1
        before = None if at is None else self._known[at].name
        if named := [block.name for block in reversed(lost) if block.name is not None]:
            out.append(Stored(named, before, Tier.DEVICE))
        return True

    # --- removed blocks

    def _remove(self, event: BlocksRemoved, out: list[KvEvent]) -> None:
        if self._group is not None and event.group not in (None, self._group):
            return
        gone = []
        for key in event.keys:
            block = self._known.get(key)
            if block is None:
                continue
            had = block.copies[event.tier]
            block.copies[event.tier] = max(0, had - 1)
            if had == 1 and block.name is not None:
                gone.append(block.name)
            if not block.held:
                del self._known[key]
        last = out[-1] if out else None
        # vLLM reports each block separately
        if gone and isinstance(last, Removed) and last.tier == event.tier:
            last.blocks.extend(gone)
        elif gone:
            out.append(Removed(gone, event.tier))

    # --- bounds

    def _forget_unheld(self) -> bool:
        """Drop the blocks that are known but not held. Return whether any were dropped."""
        before, lost, self._lost = len(self._known), self._lost, False
        if lost:
            self._known = {key: block for key, block in self._known.items() if block.held}
        return len(self._known) < before


def _without_extras(event: BlocksStored) -> int:
    """Return how many of the blocks come before the first with further parts in its hash. The first block is not examined."""
    for place, extra in enumerate(event.extras[1 : len(event.keys)], 1):
        if _others(extra, event.lora):
            return place
    return len(event.keys)


def _others(extra: object, lora: str | None) -> list[object]:
    """Return the parts of a block's hash besides its tokens and the adapter's name."""
    return [one for one in extra or () if one != lora] if isinstance(extra, list | tuple) else []
