"""Loads a model from a local folder, and computes the folder's revision."""

import mmap
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError

from workers.engines.engine import EngineDead
from workers.engines.transformers.model import HfModule, Model
from workers.engines.transformers.settings import TransformersSettings

_PIECE = 64 * 1024 * 1024  # bytes of a file that are hashed at once
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # model types with layers that `Layer` can represent


def load_model(settings: TransformersSettings) -> Model:
    """Load the model of the settings' folder. Raise EngineDead with the reason if the model cannot be served."""
    import transformers
    from transformers.utils import logging

    folder, device = settings.folder, settings.device
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        if config.model_type not in FAMILIES:
            raise EngineDead(
                f"{folder} holds a {config.model_type} model; this engine serves {', '.join(FAMILIES)}. "
                "Serve others with --engine openai and an upstream that supports them."
            )
        _refuse_moving_rotations(folder, config)
        module = _loaded(folder, config, getattr(torch, settings.dtype))
        return Model(module.to(device).eval().requires_grad_(False), context_tokens=settings.context_tokens)
    except (OSError, ValueError, RuntimeError, AssertionError, SafetensorError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise EngineDead(f"cannot load the model in {folder} on {device}: {first_line}") from error


def _loaded(folder: Path, config: HfModule, dtype: torch.dtype) -> HfModule:
    import transformers

    load: HfModule = transformers.AutoModelForCausalLM.from_pretrained
    options = {"local_files_only": True, "use_safetensors": True, "output_loading_info": True}
    module, report = load(folder, config=config, dtype=dtype, **options)
    if absent := sorted(report["missing_keys"]):  # transformers would use random numbers in their place
        raise EngineDead(f"the weights in {folder} lack {absent[0]} and {len(absent) - 1} more.")
    return module


def _refuse_moving_rotations(folder: Path, config: HfModule) -> None:
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    # they change with the sequence's length, so no step could be repeated exactly
    if kind in ("dynamic", "longrope"):
        raise EngineDead(f"{folder} uses {kind} rotary embeddings, which this engine does not support.")


def revision_of(folder: Path) -> str:
    """Return the revision of a model folder, which is a hash of its content (16 hex digits).

    Two folders have the same revision if and only if their weights and configuration are the same. One flipped bit gives another
    revision. The hash costs little time: xxh3 is as fast as the disk, and loading the model must read the weights in any case.
    Raise EngineDead if the folder is not a model folder.
    """
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
