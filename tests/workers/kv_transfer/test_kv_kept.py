"""What either side keeps for the next transfer is limited: it is memory, and has file descriptors."""

import os
import threading
from pathlib import Path
from uuid import uuid4

import pytest
from kv_kit import KV, TOKENS
from waits import block_until

from workers.kv_transfer.receiver import ROOT as SHARED
from workers.kv_transfer.receiver import SPARES_MAX, Receiver, Region, Regions
from workers.kv_transfer.sender import MAPPINGS_MAX, Mappings

MB = 1 << 20


def mapped(regions: list[Region]) -> list[int]:
    """Return which of these regions are mapped by another holder besides their owner."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [n for n, one in enumerate(regions) if sum(line.endswith(one.path) for line in lines) > 1]


@pytest.mark.parametrize(
    ("sizes", "kept"),
    [
        ([MB] * (MAPPINGS_MAX + 2), [2, 3, 4, 5]),
        ([5 * MB, 4 * MB, 3 * MB, MB], [1, 2, 3]),
        ([MB, 9 * MB], [0]),
    ],
)
def test_a_source_keeps_the_most_recent_mappings_within_its_limit(
    tmp_path: Path, sizes: list[int], kept: list[int]
) -> None:
    owner, mappings = Regions("a", tmp_path), Mappings(8 * MB)
    regions = [owner.take(size) for size in sizes]
    for one in regions:
        assert mappings.get(one.path, one.size) is not None
    assert mapped(regions) == kept
    owner.close()


def test_a_target_keeps_the_most_recent_regions_within_its_limit(tmp_path: Path) -> None:
    owner = Regions("a", tmp_path, spare_bytes_max=1 << 30)
    regions = [owner.take(n * MB) for n in range(1, SPARES_MAX + 4)]
    for one in regions:
        owner.give_back(one, quiet=True)
    assert [Path(one.path).exists() for one in regions] == [False] * 3 + [True] * SPARES_MAX
    owner.close()


def test_memory_is_returned_to_the_kernel_while_it_is_still_referenced(tmp_path: Path) -> None:
    """Otherwise the last holder of a gigabyte, the event loop, would spend the time to free it."""
    root = SHARED if SHARED.is_dir() else tmp_path
    regions = Regions(f"test-{uuid4().hex}", root, spare_bytes_max=0)
    receiver = Receiver((KV,), regions)
    try:
        grant = receiver.reserve(KV, 256, TOKENS)
        memory = receiver.received(grant.ticket)  # empty so far, but it refers to the whole region
        with Path(grant.region).open("rb") as file:
            assert os.fstat(file.fileno()).st_blocks * 512 >= MB
            receiver.abort(grant.ticket)
            block_until(lambda: os.fstat(file.fileno()).st_blocks == 0, 10)
        assert len(memory.obj) >= MB  # type: ignore[arg-type]
    finally:
        receiver.close()


def test_a_region_created_during_close_leaves_no_directory(tmp_path: Path) -> None:
    for number in range(100):
        owner = Regions(f"late-{number}", tmp_path)
        taking = threading.Thread(target=lambda owner=owner: [owner.take(4096) for _ in range(8)])
        taking.start()
        owner.close()
        taking.join()
    assert list(tmp_path.iterdir()) == []
