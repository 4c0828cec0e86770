"""What an upstream serves, and which extensions of OpenAI's API it supports."""

from dataclasses import dataclass
from typing import NamedTuple

from events.wire import Generate
from workers.engines.openai.lineage import Told, lineage
from workers.engines.openai.stream_decoder import IdsFrom


class Identity(NamedTuple):
    """The identity of an upstream. If a field changes, the worker ends its instance and registers a new one.

    Excludes `created` of /v1/models, because some servers compute it anew for each answer.
    """

    model: str
    root: str = ""  # the weights' repository or folder; empty: not reported
    version: str = "unknown"
    max_model_len: int | None = None
    token_prompts: bool = False
    extensions: bool = False
    ids_from: IdsFrom = "nowhere"
    handles: bool = False
    also_served: tuple[str, ...] = ()  # further names of the same weights
    lineage: str = ""  # the upstream's reports on its weights and on how it computes

    def difference(self, now: "Identity") -> str:
        """Return the fields that differ in `now`, as `field: old -> new`; empty if all are equal."""
        pairs = zip(self._fields, self, now, strict=True)
        return ", ".join(f"{name}: {old} -> {new}" for name, old, new in pairs if old != new)


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
    handles: bool = False  # can hand over a request's KV cache to another server: see `handover`
    root: str = ""  # the weights' repository or folder, as /v1/models lists it
    also_served: tuple[str, ...] = ()  # further names under which it lists the same weights, sorted
    size: int | None = None  # of the weights, in bytes, as /v1/models lists it
    told: tuple[
        tuple[str, Told], ...
    ] = ()  # by page: the upstream's other reports on its weights and on how it computes

    @property
    def lineage(self) -> str:
        """The upstream's reports on its weights and on how it computes; empty: none."""
        return lineage(self.root, self.context_tokens, self.size, dict(self.told))

    @property
    def identity(self) -> Identity:
        """The part that must not change while the worker's instance runs."""
        return Identity(
            self.model, self.root, self.version, self.context_tokens,
            self.token_prompts, self.extensions, self.ids_from, self.handles, self.also_served, self.lineage,
        )  # fmt: skip

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
