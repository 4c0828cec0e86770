"""The runs that the index of KV blocks is made of: consecutive blocks with the same holders, as bit masks."""

from collections.abc import Iterator, Sequence

from events.kv import Tier

Masks = tuple[int, int, int]  # who holds the blocks on each tier: a bit for each holder
NOBODY: Masks = (0, 0, 0)


class BlockRun:
    """Consecutive blocks with the same holders. A run that has been joined to another, or removed, has no blocks."""

    __slots__ = ("blocks", "children", "depth", "masks", "parent")

    def __init__(self, blocks: list[int], depth: int, parent: "BlockRun | None", masks: Masks) -> None:
        self.blocks = blocks
        self.depth = depth  # of its first block; 0 where prompts begin
        self.parent = parent
        self.masks = masks
        self.children: dict[int, BlockRun] = {}  # by their first block

    def place(self, block: int) -> int:
        """Return where in the run a block of it lies. Most often it is the last."""
        return len(self.blocks) - 1 if self.blocks[-1] == block else self.blocks.index(block)


def with_bit(masks: Masks, bit: int, tier: Tier) -> Masks:
    """Return the masks with a holder on a tier."""
    device, host, disk = masks
    if tier is Tier.DEVICE:
        return device | bit, host, disk
    return (device, host | bit, disk) if tier is Tier.HOST else (device, host, disk | bit)


def without_bit(masks: Masks, bit: int, tier: Tier) -> Masks:
    """Return the masks without a holder on a tier."""
    device, host, disk = masks
    if tier is Tier.DEVICE:
        return device & ~bit, host, disk
    return (device, host & ~bit, disk) if tier is Tier.HOST else (device, host, disk & ~bit)


def only(masks: Masks, kept: int) -> Masks:
    """Return the masks with no other holders than these."""
    return masks[0] & kept, masks[1] & kept, masks[2] & kept


def common(own: Sequence[int], first: int, others: Sequence[int], start: int) -> int:
    """Return how many blocks are the same from two places on. Where one is, so are all before it."""
    low, high = 0, min(len(own) - first, len(others) - start)
    if high and own[first + high - 1] == others[start + high - 1]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if own[first + middle - 1] == others[start + middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def stretch(run: BlockRun, blocks: Sequence[int], position: int) -> tuple[int, int]:
    """Return the first place in a run, and the number, of the blocks that come together from `position` on."""
    own, last = run.blocks, len(blocks) - position
    place, size = run.place(blocks[position]), 1
    while size < last and size <= place and blocks[position + size] == own[place - size]:
        size += 1
    if size > 1:
        return place - size + 1, size
    while size < last and place + size < len(own) and blocks[position + size] == own[place + size]:
        size += 1
    return place, size


def places(mask: int) -> Iterator[int]:
    """Yield the numbers of the bits that are set."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
