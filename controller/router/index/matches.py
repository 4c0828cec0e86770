"""How much of a prompt does each holder have? What a look-up in the index of KV blocks found.

Among a thousand workers most have the same: the beginning that all prompts share. So it is kept as groups, and named one
by one only for those who ask for it by name.
"""

from collections.abc import Container, Iterator, Mapping, Sequence

import msgspec

from controller.router.endpoints import Key, WorkerRank


class Depths(Mapping[WorkerRank, int]):
    """How many blocks each holder has; who has none is missing. A mapping that is made when it is first looked into."""

    __slots__ = ("_made", "groups")

    def __init__(self, groups: Sequence[tuple[tuple[WorkerRank, ...], int]]) -> None:
        self.groups = (
            groups  # who has how much, the deepest last; where somebody is in several, the last one holds
        )
        self._made: dict[WorkerRank, int] | None = None

    def named(self) -> dict[WorkerRank, int]:
        """Return the same as a plain one."""
        made = self._made
        if made is None:
            groups = self.groups
            made = self._made = dict.fromkeys(*groups[0]) if groups else {}
            for group, depth in groups[1:]:
                made.update(dict.fromkeys(group, depth))
        return made

    def deepest(self, keys: Container[Key]) -> int:
        """Return the most that any DP rank of these workers has. Nobody is named for it."""
        for group, depth in reversed(self.groups):
            if any(holder[:2] in keys for holder in group):
                return depth
        return 0

    def __getitem__(self, holder: WorkerRank) -> int:
        return self.named()[holder]

    def __iter__(self) -> Iterator[WorkerRank]:
        return iter(self.named())

    def __len__(self) -> int:
        return len(self.named())

    def __bool__(self) -> bool:
        return bool(self.groups)

    def __repr__(self) -> str:
        return repr(self.named())


class Matches(msgspec.Struct):
    """How many blocks of a prompt each holder has, from the first on, by how far one is willing to fetch them from.

    `device` counts what lies on the device; `host` what lies there or in the host's memory, `disk` everything. Who has
    nothing is missing. Without slower tiers all three are the same mapping.
    """

    device: Mapping[WorkerRank, int] = msgspec.field(default_factory=dict)
    host: Mapping[WorkerRank, int] = msgspec.field(default_factory=dict)
    disk: Mapping[WorkerRank, int] = msgspec.field(default_factory=dict)
