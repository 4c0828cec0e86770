"""Real inference on torch: Llama-family models from a local folder, on CPU or CUDA. Importing this imports torch."""

from workers.engines.transformers.engine import TransformersEngine
from workers.engines.transformers.settings import TransformersSettings

__all__ = ["TransformersEngine", "TransformersSettings"]
