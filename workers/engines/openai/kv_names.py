"""Decodes an upstream engine's KV events, and translates its block names into sequence hashes.

An engine's own block names have no meaning outside the engine. Each event of a stored block contains the block's tokens and its
parent block. From these, this module computes the block's sequence hash, which is the name that all of Holdfast uses
(`events.blocks`). The names are recorded, because later events contain only the engine's own names. A block can be:

    known      recorded by this module: the engine has the block, or had the block when events were lost
    held       at least one storage tier has a copy. Copies are counted: if a prompt arrives twice at once, vLLM computes, keeps
               and reports both copies
    hidden     known, but recorded without a sequence hash. No router can find it. Blocks of a canary, an image or an unknown
               adapter are hidden

When a worker is convicted of wrong answers, its engine can keep running, with wrong blocks in its cache. Therefore each
conviction begins a new epoch, and the epoch's number is part of the salts of all later prompts (`salt_of`). Only blocks stored
in the newest epoch can be reused. When the first block of an epoch is stored, all blocks of earlier epochs become hidden.

After lost events (`lose`), all blocks are still known, but none counts as held. An engine stores a block on its device only if
the device has all blocks of the sequence before that block. When the engine reports a new block on the device after a known
parent, the parent and all blocks before it therefore become held. In this way, the blocks in use are recovered without a replay.

This module does no I/O and uses no clock. Only `Names.salted` may be called from a second thread.
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
EPOCH_DIGITS_MAX = 18  # an epoch is a time in microseconds since 1970, which has 16 digits
KNOWN_MAX = 2_000_000  # known blocks of one rank; with 16 tokens each, 32 million tokens
CANARY_SALT = "holdfast-canary-"  # prefix of the salts by which canaries share no blocks of the prefix cache
# prefix of a salt; the epoch's number, a dash, and the request's own salt follow
EPOCH_SALT = "holdfast-epoch-"
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
"""The tier of each storage medium. A medium not listed (EXTERNAL, NETWORK, REMOTE, SHARED) does not belong to a single worker."""

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
    """Reports that the engine has stored these consecutive blocks. The first block follows `parent`.

    An event without tokens reports no new blocks. It means that the storage tier `tier` now has blocks that were reported
    earlier.
    """

    keys: list[Key]
    parent: Key | None  # None: the first block begins the prompt
    tokens: Sequence[int]  # of all blocks
    block_tokens: int
    tier: Tier = Tier.DEVICE
    # name of the LoRA adapter; empty: no adapter; None: an adapter with an unknown name
    lora: str | None = ""
    # per block, what its hash covers besides the tokens: adapter names, salts, images
    extras: Sequence[object] = ()
    group: int | None = None  # number of the KV cache group; None: the engine has only one


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Reports that the engine has removed one copy of each of these blocks from one tier."""

    keys: list[Key]
    tier: Tier = Tier.DEVICE
    group: int | None = None


@dataclass(frozen=True, slots=True)
class AllCleared:
    """Reports that the engine has emptied its prefix cache."""


UpstreamEvent = BlocksStored | BlocksRemoved | AllCleared


@dataclass(frozen=True, slots=True)
class UpstreamBatch:
    """One KV-event batch of an engine, which contains the events of one step."""

    at: float  # time of the step, by the engine's clock
    events: list[UpstreamEvent]
    unknown: int = 0  # number of skipped events of unknown kinds


def read_batch(payload: bytes) -> UpstreamBatch:
    """Decode a KV-event batch in vLLM's format, which SGLang uses, too.

    A batch is the msgpack of `[time, [event, ...], DP rank]`. In vLLM 0.32, an event is a map, such as `{"type": "BlockStored",
    "block_hashes": ...}`. In SGLang and earlier versions of vLLM, an event is an array: the name of the type, then the values of
    the same fields. Newer engines append fields, and older ones have fewer. All these forms are accepted, and unknown fields are
    skipped.

    Raise MalformedKvBatch if any required part cannot be read. The whole batch is then rejected, because a partly processed batch
    could leave removed blocks listed.
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
    """Decode one event. Return None if its kind is unknown, or if the event does not concern this engine's own prefix cache."""
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
        return None  # a sliding attention window keeps blocks of the prompt's end only, which form no prefix
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
    """Return the salt to send to the engine: the number of the cache epoch, combined with the request's own salt, `salt`.

    In epoch 0, return `salt` unchanged, unless it looks like a salt that contains an epoch.
    """
    return f"{EPOCH_SALT}{epoch}-{salt}" if epoch or salt.startswith(EPOCH_SALT) else salt


def read_salt(salt: str) -> tuple[int, str]:
    """Split a salt that was sent to the engine into the epoch and the request's own salt. The inverse of `salt_of`.

    The epoch is 0 if the salt contains none.
    """
    epoch, dash, own = salt.removeprefix(EPOCH_SALT).partition("-")
    known = salt.startswith(EPOCH_SALT) and dash and len(epoch) <= EPOCH_DIGITS_MAX
    return (int(epoch), own) if known and epoch.isdecimal() and epoch.isascii() else (0, salt)


class CacheEpochs:
    """Salts requests so that they do not reuse possibly wrong blocks of an upstream's prefix cache.

    The worker cannot empty an upstream's prefix cache. Instead, every conviction of this worker for wrong answers begins a new
    epoch, and every epoch has a different salt. Convictions before a restart of the worker count, too. Because blocks are
    reused only under the same salt, a request reuses only blocks that were computed after the last conviction.

    From the moment at which the worker becomes distrusted, each request gets a unique salt, and so shares no blocks with other
    requests. Requests get the epoch's salt again when the worker is trusted and a later epoch has begun.
    """

    def __init__(self) -> None:
        self._trusted = True
        self._epoch = 0  # the newest epoch of any request so far
        self._spoilt = -1  # the newest epoch that may contain wrong blocks; -1: no epoch

    def trust(self, trusted: bool) -> None:
        """Set whether requests may reuse blocks.

        If not `trusted`, the blocks computed so far are never reused, not even after the worker is trusted again.
        """
        self._trusted = trusted
        if not trusted:
            self._spoilt = self._epoch

    def salted(self, request: Generate) -> Generate:
        """Return the request with the salt of the newest epoch, or with a unique salt if it must not reuse blocks.

        Canaries are returned unchanged, because `upstream.completion` adds a unique salt to them.
        """
        if request.canary:
            return request
        self._epoch = max(self._epoch, request.cache_epoch)
        apart = not self._trusted or self._epoch <= self._spoilt
        salt = CANARY_SALT + secrets.token_hex(16) if apart else salt_of(self._epoch, request.cache_salt)
        return msgspec.structs.replace(request, cache_salt=salt)


@dataclass(slots=True)
class Block:
    """One block that the engine has reported."""

    name: int | None  # the sequence hash; None: the block is hidden
    parent: Key | None  # the engine's name of the block before this one; None: the block begins the prompt
    seed: int  # seed of the local hashes of this block and of all blocks after it
    copies: list[int] = field(default_factory=lambda: [0, 0, 0])  # number of copies by tier

    @property
    def held(self) -> bool:
        """Whether at least one tier has a copy of the block."""
        return any(self.copies)


class Names:
    """Records the blocks of one rank of an engine, and translates the engine's block names into sequence hashes."""

    def __init__(self, known_max: int = KNOWN_MAX, salted_max: int = SALTED_MAX) -> None:
        """Record at most `known_max` blocks, and at most `salted_max` prompts that were sent with a cache salt."""
        self.block_tokens: int | None = None  # block size in tokens, from the first stored block; None before
        self.passed_over = dict.fromkeys(REASONS, 0)  # number of skipped blocks by reason
        self._known: dict[Key, Block] = {}
        self._known_max = known_max
        self._salted_max = salted_max
        # the KV cache group with the blocks of prefixes; None: the engine has only one
        self._group: int | None = None
        self._lost = False  # some blocks may be known but not held
        self._reports_salts = False  # the engine has reported a salt; earlier versions of vLLM report none
        self._epoch = 0  # the newest epoch; only its blocks can be reused
        # for each recent salted prompt, the local hash that its first block would have without the salt
        self._salted: dict[int, None] = {}

    def __len__(self) -> int:
        """Return the number of known blocks."""
        return len(self._known)

    def take(self, events: Sequence[UpstreamEvent]) -> list[KvEvent]:
        """Process the events of one KV-event batch, and return them as Holdfast's events, with sequence hashes as block names."""
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

    def salted(self, tokens: Sequence[int], adapter: str = "") -> None:
        """Record a prompt that the worker is sending to the engine with a cache salt. May be called from another thread.

        `adapter` is the request's LoRA adapter, if it has one.

        If an engine does not report salts, the blocks of a salted prompt look like those of a prompt without a salt. Until the
        engine has reported a salt, routers see no block of any prompt that begins with the first block of a recorded prompt.
        """
        size = self.block_tokens
        if self._reports_salts or size is None or len(tokens) < size:
            return
        (first,) = blocks.local_hashes(tokens[:size], size, blocks.seed(lora=adapter))
        self._salted[first] = None
        if len(self._salted) > self._salted_max:
            del self._salted[next(iter(self._salted))]

    def lose(self) -> list[KvEvent]:
        """Record that events were lost, so that no tier is known to hold any block. Return the events to announce.

        The blocks themselves stay known.
        """
        for block in self._known.values():
            block.copies = [0, 0, 0]
        self._lost = True
        return [Cleared()]

    def forget(self) -> list[KvEvent]:
        """Drop all known blocks, because the engine has emptied its cache or restarted. Return the events to announce."""
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
        """Return the reason, one of `REASONS`, to skip the event's blocks; empty if they can be recorded.

        `parent` is the block before the event's first block. The event can prove that the engine still has blocks that counted
        as lost. A `Stored` event for the visible ones of these blocks is then appended to `out`.
        """
        size, count = event.block_tokens, len(event.keys)
        if size != self.block_tokens or len(event.tokens) != count * size:
            return "odd_size"  # a partial block, or a prefix with holes
        if event.parent is not None and (parent is None or not self._has_all(event.parent, event.tier, out)):
            return "orphan"
        full = len(self._known) + count > self._known_max and not self._forget_unheld()
        return "full" if full else ""

    def _add(self, event: BlocksStored, parent: Block | None, out: list[KvEvent]) -> list[Block]:
        """Record that the event's storage tier holds the event's blocks, and return these blocks.

        `parent` is the block before the event's first block. If the blocks begin a new cache epoch, a `Cleared` event is appended
        to `out`.
        """
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
        """Return the seed of the blocks' local hashes, the local hash of each block, and the number of visible blocks.

        A local hash covers the tokens of one block, and the seed. The visible blocks, which routers can find, are the first
        ones of the event. The remaining blocks are hidden. If the blocks begin a new cache epoch, a `Cleared` event is appended
        to `out`.
        """
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
        # what remains in `others` is an image, or something unknown
        apart = others or event.lora is None or own_salt.startswith(CANARY_SALT)
        return seed, hashes, 0 if apart or unreported or epoch < self._epoch else _without_extras(event)

    def _begin(self, epoch: int, out: list[KvEvent]) -> None:
        """Begin an epoch: hide all blocks of earlier epochs from routers, and append a `Cleared` event to `out`."""
        self._epoch = epoch
        for block in self._known.values():
            block.name = None
        out.append(Cleared())

    def _locate(self, event: BlocksStored, out: list[KvEvent]) -> None:
        """Record that the event's tier has copies of blocks that were reported earlier.

        A block is skipped if the block is not known, or if no tier holds its parent. For each other block that is visible, a
        `Stored` event is appended to `out`.
        """
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
        """Return whether the block `key` and all blocks before it are held.

        `tier` is where the engine has just stored the block after `key`. An engine stores a block on the device only if the
        device has all earlier blocks of the sequence. If `tier` is the device, `key` and the blocks before `key` therefore become
        held, provided that all of them are known. A `Stored` event for the visible ones of the newly held blocks is appended to
        `out`.
        """
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
        # join the events of consecutive blocks, because vLLM reports each block separately
        if gone and isinstance(last, Removed) and last.tier == event.tier:
            last.blocks.extend(gone)
        elif gone:
            out.append(Removed(gone, event.tier))

    # --- bounds

    def _forget_unheld(self) -> bool:
        """Drop the blocks of which no tier is known to have a copy. Return True if at least one was dropped."""
        before, lost, self._lost = len(self._known), self._lost, False
        if lost:
            self._known = {key: block for key, block in self._known.items() if block.held}
        return len(self._known) < before


def _without_extras(event: BlocksStored) -> int:
    """Return how many of the event's blocks precede the first block with extra hash inputs, such as an image.

    An input is extra if it is neither the block's tokens nor the adapter. The event's first block is counted in any case,
    because the caller has already checked its inputs.
    """
    for place, extra in enumerate(event.extras[1 : len(event.keys)], 1):
        if _others(extra, event.lora):
            return place
    return len(event.keys)


def _others(extra: object, lora: str | None) -> list[object]:
    """Return what a block's hash covers besides the block's tokens and the adapter's name: salts, images."""
    return [one for one in extra or () if one != lora] if isinstance(extra, list | tuple) else []
