"""An upstream's identity and lineage, and the extensions of OpenAI's API that the upstream supports.

The lineage is a text that names the server's weights, and the settings that change how the server computes. The values in the
lineage come from these HTTP endpoints of the server:

    /v1/models        root, max_model_len      vLLM, SGLang; llama-server: n_ctx, size of the weights
    /get_model_info   weight_version           SGLang
    /get_server_info  quantization, KV dtype, attention backend
    /metrics          cache_dtype of vllm:cache_config_info

A missing endpoint contributes nothing. Values that change with each call or each start (`created`, `process_start_time_seconds`)
are excluded, so that a restart alone does not change the lineage.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from events.intrusion.registration import NAME_MAX, NAMES_MAX
from events.wire import Generate
from workers.engines.openai.stream_decoder import IdsFrom, JsonObject

VALUE_MAX = 80  # characters of one value of a lineage

Told = tuple[tuple[str, str], ...]
"""Names and values that the server reports at one HTTP path, in a fixed order."""


@dataclass(frozen=True, slots=True)
class Abilities:
    """An upstream's identity, and the extensions of OpenAI's API that the upstream supports."""

    model: str
    version: str = "unknown"
    context_tokens: int | None = None  # None: not reported
    token_prompts: bool = False  # a prompt may consist of token ids
    extensions: bool = False  # fields outside OpenAI's API are accepted or ignored
    ids_from: IdsFrom = "nowhere"  # which part of an answer contains the token ids
    token_ms: float = 50.0  # time per token, measured on one stream
    ranks: int = 1  # number of DP ranks that a request can be sent to
    handles: bool = False  # can hand over a request's KV cache to another server: see `Upstream.handle`
    root: str = ""  # the weights' repository or folder, as /v1/models lists it; empty: not reported
    also_served: tuple[str, ...] = ()  # further names of the same weights in /v1/models, sorted
    pooling: str = (
        ""  # path of canaries, if the server computes vectors or scores only; empty: it generates tokens
    )
    adapters: tuple[str, ...] = ()  # names of the LoRA adapters of this model in /v1/models, sorted
    # the server is SGLang, which selects an adapter by the field `lora_path`, and ignores `model`
    lora_path: bool = False
    paths: tuple[str, ...] = ()  # HTTP paths to which clients' requests can be passed on
    size: int | None = None  # size of the weights in bytes, as /v1/models lists it; None: not reported
    # by page, the values of the lineage that pages other than /v1/models report
    told: Mapping[str, Told] = field(default_factory=dict)

    @property
    def lineage(self) -> str:
        """A text that names the server's weights, and the settings that change how the server computes.

        The lineage is part of the canary key, which selects the stored correct answers to canaries. The lineage is empty if the
        server reports neither weights nor settings. Only the last component of the weights' path (`root`) is included, because
        hosts keep the same weights in different folders.
        """
        told = [pair for path in sorted(self.told) for pair in self.told[path]]
        root = self.root.rstrip("/").rpartition("/")[2]
        reported = [
            ("root", root),
            ("max_model_len", str(self.context_tokens or "")),
            ("size", str(self.size or "")),
        ]
        shown = (f"{name}={value[:VALUE_MAX]}" for name, value in (*reported, *told) if value)
        return ",".join(re.sub(r"[|,\s]", "_", pair) for pair in shown)

    @property
    def identity(self) -> dict[str, object]:
        """The values that identify this instance of the worker. If one changes, the instance ends and a new one registers.

        The field `created` of /v1/models is excluded, because some servers compute it anew for each answer. Adapters are
        excluded, because servers load and unload them while they serve.
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
            "pooling": self.pooling,
            "also_served": self.also_served,
            "lineage": self.lineage,
        }

    @property
    def exact(self) -> bool:
        """Whether prompts and answers consist of token ids, so that an answer can be continued exactly.

        Token ids that are only in the logprobs are not enough: llama-server omits each token that ends within a character. For
        canaries, such ids suffice, because the same answer always lacks the same tokens.
        """
        return self.token_prompts and self.ids_from == "token_ids"

    def ids_for(self, request: Generate) -> IdsFrom:
        """Return which part of the answer to this request contains the token ids that the worker reads."""
        if request.canary and self.ids_from == "nowhere":
            return "text_bytes"
        return self.ids_from if self.exact or request.canary else "nowhere"


def merged(known: Mapping[str, Told], now: Mapping[str, Told | None]) -> Mapping[str, Told]:
    """Merge the lineage values that a server reports now with those of earlier reads, by HTTP path.

    The lineage names the server's weights and computation settings. `now` has None for a path that could not be read now. Such
    a path keeps its values from earlier reads, `known`. If it was never read, it gets no values.
    """
    return {path: known.get(path, ()) if told is None else told for path, told in now.items()}


def context_of(about: JsonObject) -> int | None:
    """Return the context length in tokens of an entry of /v1/models, or None if the entry lacks it."""
    meta = about.get("meta") or {}
    found = about.get("max_model_len") or meta.get("n_ctx") or meta.get("n_ctx_train")
    return int(found) if found else None


def also_served(every: list[JsonObject], about: JsonObject) -> tuple[str, ...]:
    """Return the other names of the model `about`, sorted. `every` is the server's list of models.

    The other names are those of the list's entries with the same root. Entries with a `parent` are adapters, and are excluded.
    """
    root, own = about.get("root"), about["id"]
    same = {str(one["id"]) for one in every if root and one.get("root") == root and not one.get("parent")}
    return _bounded_names(same - {own})


def adapters_of(every: list[JsonObject], about: JsonObject) -> tuple[str, ...]:
    """Return the LoRA adapters of the model `about`, sorted. `every` is the server's list of models.

    The adapters are the list's entries with a name of the model as `parent` (vLLM, SGLang).
    """
    names = {about["id"], *also_served(every, about)}
    return _bounded_names({str(one["id"]) for one in every if one.get("parent") in names} - names)


def _bounded_names(names: set[str]) -> tuple[str, ...]:
    return tuple(sorted(name for name in names if 0 < len(name) <= NAME_MAX))[:NAMES_MAX]


def told_values(said: Mapping[str, object], names: Iterable[str]) -> Told:
    """Return those of `names` that a server's answer `said` has as text or integer, with their shortened values."""
    return tuple(
        (name, str(said[name])[:VALUE_MAX]) for name in names if isinstance(said.get(name), str | int)
    )
