"""Which prefixes are in use, by whom, and how many requests of each begin with them?

A tree of pieces: consecutive blocks that the same requests use. Its users are small numbers, one for each place that has a
KV cache of its own. A use adds one along a path and a drop takes it away, in steps of pieces, not of blocks; what nobody
uses is not there. Only whole prefixes are used, so nobody has a block without those before it.
"""

from collections.abc import Sequence

from controller.router.index.runs import common


class SharedBlocks:
    """Consecutive blocks that the same requests begin with."""

    __slots__ = ("blocks", "children", "users")

    def __init__(self, blocks: Sequence[int], users: dict[int, int]) -> None:
        self.blocks = blocks
        self.users = users  # how many requests of each
        self.children: dict[int, SharedBlocks] = {}  # by their first block

    def split(self, place: int) -> None:
        """Keep the blocks before `place`; the others become the only child."""
        tail = SharedBlocks(self.blocks[place:], self.users.copy())
        tail.children = self.children
        self.blocks = self.blocks[:place]
        self.children = {tail.blocks[0]: tail}

    def join(self) -> None:
        """Take the only child in, if the same requests use it."""
        if len(self.children) != 1 or not self.blocks:
            return
        child = next(iter(self.children.values()))
        if child.users == self.users:
            self.blocks = [*self.blocks, *child.blocks]
            self.children = child.children


class Prefixes:
    """All prefixes in use. `use` and `drop` return by how many the user's different blocks have become more."""

    def __init__(self) -> None:
        self._root = SharedBlocks((), {})

    def use(self, user: int, blocks: Sequence[int]) -> int:
        """One more request of a user begins with these blocks."""
        piece, depth, gained = self._root, 0, 0
        while depth < len(blocks):
            child = piece.children.get(blocks[depth])
            if child is None:
                piece.children[blocks[depth]] = SharedBlocks(blocks[depth:], {user: 1})
                return gained + len(blocks) - depth
            size = common(child.blocks, 0, blocks, depth)
            if size < len(child.blocks):
                child.split(size)
            count = child.users.get(user, 0)
            child.users[user] = count + 1
            if count == 0:
                gained += size
            piece, depth = child, depth + size
        return gained

    def drop(self, user: int, blocks: Sequence[int]) -> int:
        """A request that began with these blocks, by `use`, is over."""
        last, depth, lost, length = self._root, 0, 0, len(blocks)
        while depth < length:
            piece = last.children[blocks[depth]]
            size, users = len(piece.blocks), piece.users
            count = users[user]
            if count > 1:
                users[user] = count - 1
            elif len(users) == 1:  # nobody else uses it, nor anything below it
                del last.children[blocks[depth]]
                lost += length - depth
                break
            else:
                del users[user]
                lost += size
            last, depth = piece, depth + size
        if depth:
            last.join()
        return -lost

    def find(self, blocks: Sequence[int]) -> tuple[dict[int, int], dict[int, int]]:
        """Return how many of these blocks, from the first on, each user has in use, and how many of its requests have all
        of those. Who has none is missing."""
        depths: dict[int, int] = {}
        requests: dict[int, int] = {}
        for depth, users in self.pieces(blocks):
            depths.update(dict.fromkeys(users, depth))
            requests.update(users)
        return depths, requests

    def pieces(self, blocks: Sequence[int]) -> list[tuple[int, dict[int, int]]]:
        """Return the pieces that these blocks begin with, from the first on: the depth up to which each reaches, or they do in
        it, and how many requests of each user begin with it. A user of a piece uses all pieces before it."""
        children, depth = self._root.children, 0
        found: list[tuple[int, dict[int, int]]] = []  # `list[...]()` takes as long as ten of these steps
        while depth < len(blocks) and (child := children.get(blocks[depth])) is not None:
            size = common(child.blocks, 0, blocks, depth)
            depth += size
            found.append((depth, child.users))
            if size < len(child.blocks):
                break
            children = child.children
        return found
