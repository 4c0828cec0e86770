"""Real inference on torch: Llama-family models from a local folder, on CPU or CUDA.

If torch is not installed, importing anything from here raises TorchMissing with instructions.
"""

from workers.engines.torch_missing import require_torch

require_torch()
