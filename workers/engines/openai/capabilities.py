"""What an upstream serves, and which extensions of OpenAI's API it supports.

The lineage of a server's answers names the weights, and the settings that change how it computes:

    /v1/models        root, max_model_len      vLLM, SGLang; llama-server: n_ctx, size of the weights
    /get_model_info   weight_version           SGLang
    /get_server_info  quantization, KV dtype, attention backend
    /metrics          cache_dtype of vllm:cache_config_info

A missing page contributes nothing. Values that change with each call or each start (`created`, `process_start_time_seconds`)
are excluded: a restart alone does not change the lineage.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from events.wire import Generate
from workers.engines.openai.stream_decoder import IdsFrom

VALUE_MAX = 80  # characters of one value of a lineage

Told = tuple[tuple[str, str], ...]
"""Names and values that one page reports, in a fixed order."""


@dataclass(frozen=True, slots=True)
class Abilities:
    """An upstream's identity, and which of the extensions used by Holdfast it supports."""

    model: str
    version: str = "unknown"
    context_tokens: int | None = None
    token_prompts: bool = False
    extensions: bool = False  # fields outside OpenAI's API are accepted or ignored
    ids_from: IdsFrom = "nowhere"
    token_ms: float = 50.0  # measured on one stream
    ranks: int = 1  # DP ranks that a request can be sent to
    handles: bool = False  # can hand over a request's KV cache to another server: see `Upstream.handle`
    root: str = ""  # the weights' repository or folder, as /v1/models lists it; empty: not reported
    also_served: tuple[str, ...] = ()  # further names under which it lists the same weights, sorted
    size: int | None = None  # of the weights, in bytes, as /v1/models lists it
    # by page: the upstream's other reports on its weights and on how it computes
    told: Mapping[str, Told] = field(default_factory=dict)

    @property
    def lineage(self) -> str:
        """The upstream's reports on its weights and on how it computes; empty: none."""
        return lineage(self.root, self.context_tokens, self.size, self.told)

    @property
    def identity(self) -> dict[str, object]:
        """The part that must not change while the worker's instance runs.

        Excludes `created` of /v1/models, because some servers compute it anew for each answer.
        """
        return {
            "model": self.model,
            "root": self.root,
            "version": self.version,
            "max_model_len": self.context_tokens,
            "token_prompts": self.token_prompts,
            "extensions": self.extensions,
            "ids_from": self.ids_from,
            "handles": self.handles,
            "also_served": self.also_served,
            "lineage": self.lineage,
        }

    @property
    def exact(self) -> bool:
        """Whether a continuation can be requested token by token.

        Ids in logprobs are not enough: llama-server omits a token that leaves a character incomplete. It always omits the same
        tokens, so such ids suffice for canaries.
        """
        return self.token_prompts and self.ids_from == "token_ids"

    def ids_for(self, request: Generate) -> IdsFrom:
        """Return which part of the answer to this request contains its token ids."""
        if request.canary and self.ids_from == "nowhere":
            return "text_bytes"
        return self.ids_from if self.exact or request.canary else "nowhere"


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
