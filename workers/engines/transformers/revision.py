"""The revision of a model folder: a short hash of its content.

Two folders with the same weights and configuration have the same revision wherever they are; one flipped bit makes another.
xxh3 is as fast as the disk, and the weights are about to be read anyway.
"""

import mmap
from pathlib import Path

import xxhash

from workers.engines.engine import EngineDead

_PIECE = 64 * 1024 * 1024


def revision_of(folder: Path) -> str:
    """Return the revision of a model folder, 16 hex digits. Raise EngineDead if it is not one."""
    weights = sorted(folder.glob("*.safetensors"))
    config = folder / "config.json"
    if not config.is_file() or not weights:
        raise EngineDead(
            f"{folder} is not a model folder: it needs config.json and *.safetensors. "
            "`holdfast model tiny DIR` creates one."
        )
    digest = xxhash.xxh3_64()
    for path in [config, *weights]:
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        _feed(digest, path)
    return digest.hexdigest()


def _feed(digest: xxhash.xxh3_64, path: Path) -> None:
    with path.open("rb") as file:
        if path.stat().st_size == 0:
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content, memoryview(content) as view:
            for start in range(0, len(view), _PIECE):
                digest.update(view[start : start + _PIECE])
