"""Real inference on torch: Llama-family models from a local folder, on CPU or CUDA.

Importing anything from here raises TorchMissing, with what to do, where torch is not installed.
"""

from workers.engines.torch_missing import require_torch

require_torch()
