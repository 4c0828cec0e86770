"""The transformers engine, which serves Llama-family models from a local folder with torch.

If torch is not installed, importing a module of this package raises TorchMissing with instructions.
"""

from workers.engines.torch_missing import require_torch

require_torch()
