"""A model's own defaults for sampling, from the `generation_config.json` in its folder, read as vLLM reads it."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

import structlog

FILE = "generation_config.json"
BYTES_MAX = 1024 * 1024
BOUNDS: Mapping[str, tuple[float, float]] = {  # as in a request's body
    "temperature": (0.0, 2.0),
    "top_p": (1e-9, 1.0),
    "top_k": (-1.0, 2.0**31),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-9, 10.0),
}

log = structlog.get_logger(__name__)


def read_defaults(folder: Path | None) -> dict[str, float]:
    """Return what a model's folder sets of a request's sampling; nothing without a file. Values out of bounds are left out."""
    if folder is None:
        return {}
    try:
        with (folder / FILE).open("rb") as file:
            said = json.loads(file.read(BYTES_MAX))
    except OSError:
        return {}
    except ValueError as error:
        log.warning("generation_config_unreadable", folder=str(folder), error=str(error))
        return {}
    found: dict[str, float] = {}
    for name, (least, most) in BOUNDS.items():
        value = said.get(name) if isinstance(said, dict) else None
        if value is None:
            continue
        if type(value) not in (int, float) or not math.isfinite(value) or not least <= value <= most:
            log.warning("generation_config_ignored", folder=str(folder), field=name, value=str(value)[:40])
            continue
        found[name] = max(0, int(value)) if name == "top_k" else float(value)
    return found
