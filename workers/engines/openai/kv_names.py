"""Translates an engine's own block names into Holdfast's sequence hashes.

An engine's hash of a block means nothing outside of it. Each stored block comes with its tokens and its parent. From these it
gets the same name as everywhere in Holdfast (`events.blocks`). The names are remembered, and the engine's events are
translated.

    known      its name is remembered, because the engine has it, or had it when a loss occurred
    held       number of copies per tier: vLLM computes a prompt twice if it arrives twice at once, keeps and reports both
    hidden     it has no name that a router could ask for: a block of a canary, an image or an unknown adapter

An engine that continues after its worker was convicted keeps what it has computed. So each conviction begins an epoch, which is
part of the salts of all later prompts (`salt_of`). Only what was stored in the last epoch can be requested; its first block
hides all earlier ones.

After a loss (`lose`) nothing is held, but everything is still known. If the engine then stores a block on its device right
after a known one, it must have all blocks before it, and they are held again. So blocks in use are recovered without a replay.

Pure: no IO, no clock. Used by one thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from events import blocks
from events.kv import Cleared, KvEvent, Removed, Stored, Tier
from workers.engines.openai.kv_wire import AllCleared, BlocksRemoved, BlocksStored, Key, UpstreamEvent

SALTED_MAX = 10_000  # remembered salted prompts, for engines that do not report salts
EPOCH_DIGITS_MAX = 18  # microseconds since 1970 have 16
KNOWN_MAX = 2_000_000  # blocks; 16 tokens each are 32 million tokens
CANARY_SALT = "holdfast-canary-"  # prefix of salts that keep canaries out of the prefix cache
EPOCH_SALT = "holdfast-epoch-"  # followed by a number, a dash, and the request's own salt
REASONS = ("orphan", "odd_size", "unnamed", "full")


def salt_of(epoch: int, salt: str) -> str:
    """Return the salt that a request has at the engine. In epoch 0 it is its own, unless it looks like an epoch's."""
    return f"{EPOCH_SALT}{epoch}-{salt}" if epoch or salt.startswith(EPOCH_SALT) else salt


def read_salt(salt: str) -> tuple[int, str]:
    """Return the epoch in which a block was stored, and its request's own salt."""
    epoch, dash, own = salt.removeprefix(EPOCH_SALT).partition("-")
    known = salt.startswith(EPOCH_SALT) and dash and len(epoch) <= EPOCH_DIGITS_MAX
    return (int(epoch), own) if known and epoch.isdecimal() and epoch.isascii() else (0, salt)


@dataclass(slots=True)
class Block:
    """One block that the engine has reported."""

    name: int | None  # its sequence hash; None: hidden
    parent: Key | None
    seed: int  # of its local hash, and of those of all blocks behind it
    copies: list[int] = field(default_factory=lambda: [0, 0, 0])  # by tier

    @property
    def held(self) -> bool:
        """Whether any tier holds the block."""
        return any(self.copies)


class Names:
    """The blocks of one rank of an engine. The first stored blocks determine how many tokens a block has."""

    def __init__(self, known_max: int = KNOWN_MAX, salted_max: int = SALTED_MAX) -> None:
        """Know at most `known_max` blocks, and remember at most `salted_max` salted prompts."""
        self.block_tokens: int | None = None
        self.passed_over = dict.fromkeys(REASONS, 0)  # skipped blocks, by reason
        self._known: dict[Key, Block] = {}
        self._known_max = known_max
        self._salted_max = salted_max
        self._group: int | None = None  # the group with the blocks of the prefix, if there are several
        self._lost = False  # some blocks may be known but not held
        self._reports_salts = False  # earlier versions of vLLM do not
        self._epoch = 0  # of the blocks that can be requested
        self._salted: dict[
            int, None
        ] = {}  # local hashes with which recent salted prompts would begin if they were plain

    def __len__(self) -> int:
        """Return how many blocks are known."""
        return len(self._known)

    def take(self, events: Sequence[UpstreamEvent]) -> list[KvEvent]:
        """Return the events of one batch with Holdfast's names."""
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
        """Record that a salted prompt is on its way. May be called from another thread.

        If an engine does not report salts, the blocks of this prompt look like those of a plain prompt. Until a salt has been
        seen, blocks that begin in the same way are hidden.
        """
        size = self.block_tokens
        if self._reports_salts or size is None or len(tokens) < size:
            return
        (first,) = blocks.local_hashes(tokens[:size], size)
        self._salted[first] = None
        if len(self._salted) > self._salted_max:
            del self._salted[next(iter(self._salted))]

    def lose(self) -> list[KvEvent]:
        """Drop all blocks, because events were lost."""
        for block in self._known.values():
            block.copies = [0, 0, 0]
        self._lost = True
        return [Cleared()]

    def forget(self) -> list[KvEvent]:
        """Know nothing any more: the cache is empty, or belongs to a restarted engine."""
        self._known.clear()
        return [Cleared()]

    # --- what is stored

    def _store(self, event: BlocksStored, out: list[KvEvent]) -> None:
        if event.group is not None:
            self._group = event.group if self._group is None else self._group
            if event.group != self._group:
                return
        if not event.tokens:
            self._locate(event, out)
            return
        self.block_tokens = self.block_tokens or event.block_tokens
        if (
            event.block_tokens != self.block_tokens
            or len(event.tokens) != len(event.keys) * event.block_tokens
        ):
            self._pass_over("odd_size", len(event.keys))  # a part of a block, or a prefix with holes
            return
        parent = None if event.parent is None else self._known.get(event.parent)
        if event.parent is not None and (parent is None or not self._has_all(event.parent, event.tier, out)):
            self._pass_over("orphan", len(event.keys))
            return
        if len(self._known) + len(event.keys) > self._known_max and not self._forget_unheld():
            self._pass_over("full", len(event.keys))
            return
        made = self._add(event, parent, out)
        named = [block.name for block in made if block.name is not None]
        if named:  # hidden blocks are always the last ones
            out.append(Stored(named, None if parent is None else parent.name, event.tier))

    def _add(self, event: BlocksStored, parent: Block | None, out: list[KvEvent]) -> list[Block]:
        """Record that these blocks are held, and return them."""
        salt = _salt(event) if parent is None else ""
        epoch, own_salt = read_salt(salt)
        if epoch > self._epoch:
            self._begin(epoch, out)
        seed, visible = _salted(event, parent, own_salt)
        local = blocks.local_hashes(event.tokens, event.block_tokens, seed)
        self._reports_salts = self._reports_salts or salt != ""
        unreported = not self._reports_salts and local[0] in self._salted
        if parent is None and (epoch < self._epoch or unreported):
            visible = 0
        name, before = None if parent is None else parent.name, event.parent
        made: list[Block] = []
        for place, (key, own) in enumerate(zip(event.keys, local, strict=True)):
            block = self._known.get(key)
            if block is None:
                if place >= visible or (before is not None and name is None):
                    name = None
                else:
                    name = own if before is None or name is None else blocks.follow(name, own)
                block = self._known[key] = Block(name, before, seed)
            block.copies[event.tier] += 1
            made.append(block)
            name, before = block.name, key
        return made

    def _begin(self, epoch: int, out: list[KvEvent]) -> None:
        """Hide everything stored in earlier epochs."""
        self._epoch = epoch
        for block in self._known.values():
            block.name = None
        out.append(Cleared())

    def _locate(self, event: BlocksStored, out: list[KvEvent]) -> None:
        """Record on which tier known blocks are."""
        for key in event.keys:
            block = self._known.get(key)
            before = None if block is None or block.parent is None else self._known.get(block.parent)
            if block is None or (block.parent is not None and (before is None or not before.held)):
                self._pass_over("unnamed", 1)
                continue
            block.copies[event.tier] += 1
            if block.name is not None:
                out.append(Stored([block.name], None if before is None else before.name, event.tier))

    def _has_all(self, key: Key, tier: Tier, out: list[KvEvent]) -> bool:
        """Return whether a block and all blocks before it are held. A block stored after it on the device proves it."""
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

    # --- what is removed

    def _remove(self, event: BlocksRemoved, out: list[KvEvent]) -> None:
        if event.group is not None and self._group is not None and event.group != self._group:
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
        """Drop blocks that are known but not held. Return whether there were any."""
        before, lost, self._lost = len(self._known), self._lost, False
        if lost:
            self._known = {key: block for key, block in self._known.items() if block.held}
        return len(self._known) < before

    def _pass_over(self, reason: str, count: int) -> None:
        self.passed_over[reason] += count


def _salt(event: BlocksStored) -> str:
    """Return the salt of a prompt, as reported with its first block."""
    salts = _others(event.extras[0], event.lora) if event.extras else []
    return salts[0] if salts and isinstance(salts[0], str) else ""


def _salted(event: BlocksStored, parent: Block | None, own_salt: str) -> tuple[int, int]:
    """Return the seed of the blocks' local hashes, and how many of the first blocks a router could ask for."""
    salts = _others(event.extras[0], event.lora) if event.extras else []
    if parent is not None:
        seed, visible = parent.seed, len(event.keys) if parent.name is not None else 0
    else:
        salts = salts[1:] if salts and isinstance(salts[0], str) else salts
        seed = blocks.seed(lora=event.lora or "", namespace=own_salt)
        visible = 0 if own_salt.startswith(CANARY_SALT) or event.lora is None else len(event.keys)
    if salts:  # an image, or something unknown
        return seed, 0
    for place, extra in enumerate(event.extras[1 : len(event.keys)], 1):
        if _others(extra, event.lora):
            return seed, min(visible, place)
    return seed, visible


def _others(extra: Any, lora: str | None) -> list[Any]:
    """Return the parts of a block's hash other than tokens and the adapter's name."""
    return [one for one in extra or () if one != lora] if isinstance(extra, list | tuple) else []
