"""Loads a model's folder, or reports why it cannot be served."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from workers.engines.engine import EngineDead
from workers.engines.transformers.model import Model

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # families with the layers of `Layer`


def load_model(folder: Path, *, device: str, dtype: str, context_tokens: int) -> Model:
    """Load a folder's model. Raise EngineDead with the reason if it cannot be served."""
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        if config.model_type not in FAMILIES:
            raise EngineDead(
                f"{folder} holds a {config.model_type} model; this engine serves {', '.join(FAMILIES)}. "
                "Serve others with --engine openai and an upstream that supports them."
            )
        _refuse_moving_rotations(folder, config)
        module = _loaded(folder, config, getattr(torch, dtype))
        return Model(module.to(device).eval().requires_grad_(False), context_tokens=context_tokens)
    except (OSError, ValueError, RuntimeError, AssertionError, SafetensorError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise EngineDead(f"cannot load the model in {folder} on {device}: {first_line}") from error


def _loaded(folder: Path, config: Any, dtype: torch.dtype) -> Any:
    import transformers

    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    module, report = load(
        folder,
        config=config,
        local_files_only=True,
        dtype=dtype,
        use_safetensors=True,
        output_loading_info=True,
    )
    if absent := sorted(report["missing_keys"]):  # transformers would use random numbers in their place
        raise EngineDead(f"the weights in {folder} lack {absent[0]} and {len(absent) - 1} more.")
    return module


def _refuse_moving_rotations(folder: Path, config: Any) -> None:
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if kind in (
        "dynamic",
        "longrope",
    ):  # they change with the sequence's length: no step could be repeated exactly
        raise EngineDead(f"{folder} uses {kind} rotary embeddings, which this engine does not support.")
