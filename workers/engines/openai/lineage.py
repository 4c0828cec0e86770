"""Reads the lineage of a server's answers: the weights, and the settings that change how it computes.

    /v1/models        root, max_model_len      vLLM, SGLang; llama-server: n_ctx, size of the weights
    /get_model_info   weight_version           SGLang
    /get_server_info  quantization, KV dtype, attention backend
    /metrics          cache_dtype of vllm:cache_config_info

A missing page contributes nothing. Values that change with each call or each start (`created`, `process_start_time_seconds`)
are excluded: a restart alone does not change the lineage.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

PAGES: Mapping[str, tuple[str, ...]] = {
    "/get_model_info": ("weight_version",),
    "/get_server_info": ("quantization", "kv_cache_dtype", "attention_backend"),
}
METRICS = "/metrics"
METRICS_S = 2.0
VALUE_MAX = 80  # characters of one value
_CACHE_DTYPE = re.compile(r'^vllm:cache_config_info\{[^\n]*\bcache_dtype="([^"\\\n]*)"', re.MULTILINE)

Told = tuple[tuple[str, str], ...]
"""Names and values, in a fixed order."""


class LineagePages(Protocol):
    """The interface required of an upstream."""

    async def page(self, path: str) -> dict[str, Any] | None: ...
    async def metrics(self, deadline_s: float) -> str | None: ...


async def read(upstream: LineagePages, pages: Iterable[str] = (*PAGES, METRICS)) -> Mapping[str, Told | None]:
    """Return the values that each page reports; None for a page that cannot be read now."""
    found: dict[str, Told | None] = {}
    for path in pages:
        if path == METRICS:
            text = await upstream.metrics(METRICS_S)
            dtype = _CACHE_DTYPE.search(text) if text is not None else None
            found[path] = None if text is None else (("kv_cache_dtype", dtype[1]),) if dtype else ()
            continue
        said = await upstream.page(path)
        found[path] = None if said is None else _told(said, PAGES[path])
    return found


def _told(said: Mapping[str, Any], names: Iterable[str]) -> Told:
    return tuple(
        (name, str(said[name])[:VALUE_MAX]) for name in names if isinstance(said.get(name), str | int)
    )


def merged(known: Mapping[str, Told], now: Mapping[str, Told | None]) -> Mapping[str, Told]:
    """Merge a new read of the lineage pages into the known values. A page that could not be read keeps its previous values."""
    return {path: known.get(path, ()) if told is None else told for path, told in now.items()}


def lineage(root: str, context_tokens: int | None, size: int | None, told: Mapping[str, Told]) -> str:
    """Return the name of a lineage, which is part of the canary key; empty if nothing is reported.

    Only the last component of a folder's path is used: hosts keep the same weights in different folders.
    """
    pairs = [("root", root.rstrip("/").rpartition("/")[2]), ("max_model_len", str(context_tokens or ""))]
    pairs += [("size", str(size or "")), *(pair for path in sorted(told) for pair in told[path])]
    shown = (f"{name}={value[:VALUE_MAX]}" for name, value in pairs if value)
    return ",".join(re.sub(r"[|,\s]", "_", pair) for pair in shown)
