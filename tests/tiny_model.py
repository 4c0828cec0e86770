"""The tiny real model, built once for all xdist workers: its vocabulary takes 4 s of a processor."""

import shutil
from pathlib import Path

from once import made_once


def whole(own: Path) -> Path:
    """Return a folder with the tiny model. `own`: this xdist worker's folder, in that of all of this run."""
    from workers.engines.tiny import build_tiny

    return made_once(own, "tiny", build_tiny)


def half(own: Path) -> Path:
    """Return a folder with half of it: two layers of the same shapes, for tests that need many tokens of a real model."""
    from workers.engines.tiny import CONFIG, write_model

    def build(folder: Path) -> None:
        folder.mkdir()
        shutil.copy(whole(own) / "tokenizer.json", folder)
        write_model(folder, CONFIG | {"num_hidden_layers": 2})

    return made_once(own, "half-tiny", build)
