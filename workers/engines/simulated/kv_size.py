"""The size of a token's KV cache in bytes, from a model's `config.json`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from events.errors import UsageError

USUAL = 131_072  # an 8B model with 32 layers, 8 KV heads of 128 numbers, 16 bits each
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


class BadConfig(UsageError):
    """A model's config.json does not determine the size of its KV cache."""


def kv_bytes_per_token(folder: Path) -> int:
    """Return the bytes of one token's KV: layers x 2 x KV heads x numbers per head x bytes per number.

    Without a model's folder, return the size of an 8B model. Raise BadConfig.
    """
    path = folder / "config.json"
    if not folder.name or not path.is_file():
        return USUAL
    try:
        config = json.loads(path.read_text())
        return _size(config.get("text_config") or config)
    except KeyError as error:
        raise BadConfig(f"{path}: it has no {error}: set kv_bytes_per_token") from error
    except (OSError, ValueError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise BadConfig(f"{path}: cannot be read: {error}: set kv_bytes_per_token") from error


def _size(config: Mapping[str, Any]) -> int:
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head = config.get("head_dim") or config["hidden_size"] // heads
    number = _BYTES.get(config.get("torch_dtype") or config.get("dtype") or "bfloat16", 2)
    size = int(config["num_hidden_layers"] * 2 * kv_heads * head * number)
    if size < 1:
        raise ValueError(f"a token of {size} bytes")
    return size
