"""The settings of the transformers engine."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from events.errors import UsageError
from events.observations import Profile


class BadEngineSetting(UsageError):
    """A setting of the transformers engine has an invalid value."""


class TransformersSettings(BaseModel):
    """The settings of one transformers engine: the model's folder, the device and the limits."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, arbitrary_types_allowed=True, protected_namespaces=()
    )

    def __init__(self, **given: object) -> None:
        """Validate the settings. Raise BadEngineSetting, which names the first invalid setting and its value."""
        try:
            super().__init__(**given)
        except ValidationError as error:
            first = error.errors()[0]
            name, message = first["loc"][0], first["msg"]
            raise BadEngineSetting(
                f"{name} = {first['input']!r}: {message[0].lower()}{message[1:]}"
            ) from None

    folder: Path
    """The model: config.json, *.safetensors, tokenizer.json."""
    model: str = ""
    """The name under which it is served; empty: the folder's name."""
    device: str = "cpu"
    """cpu, cuda or cuda:N."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    threads: int = Field(default=1, ge=1, le=256)
    """CPU threads of one step; at most the number of idle cores.

    More is far worse than one thread, because a step waits for its slowest thread at every product: four threads on a busy
    four-core machine gave 260 tokens/s where one gave 450.
    """
    context_tokens: int = Field(default=4096, ge=16)
    """The longest sequence; never more than the model's own limit."""
    kv_tokens: int = Field(default=65_536, ge=64)
    """The KV cache's size in tokens, for all sequences together."""
    block_tokens: int = Field(default=32, ge=8, multiple_of=8)
    batch_max: int = Field(default=32, ge=1)
    """Sequences that run at once; the rest wait."""
    waiting_max: int = Field(default=256, ge=0)
    """Maximum number of waiting sequences; the next one is refused as overloaded."""
    prefill_tokens_max: int = Field(default=256, ge=8)
    """Prompt tokens per step: a long prompt is processed in chunks, and other requests decode between them."""
    load_s: float = Field(default=1800.0, gt=0)
    """Seconds that loading may take: enough for the largest models of one machine, from a slow disk."""
    prefix_caching: bool = True
    """Keep the blocks of prompts and answers for requests with the same prefix."""
    profile: Profile | None = None
    """The engine's profile; None: measured at start, in about a second."""
