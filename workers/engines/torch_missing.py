"""Checks that torch and the other optional packages for real models are installed."""

import importlib.util
from collections.abc import Callable

from events.errors import HoldfastError

NEEDED = ("torch", "transformers", "safetensors")


class TorchMissing(HoldfastError):
    """Real models need torch, which is not installed. Install it with `make test-engines` or pip install -e '.[transformers]'."""


def require_torch(find: Callable[[str], object] = importlib.util.find_spec) -> None:
    """Raise TorchMissing unless all packages that real models need are installed. The check imports none of them."""
    if missing := [name for name in NEEDED if find(name) is None]:
        raise TorchMissing(
            f"real models need {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed. "
            "In Holdfast's folder, run `make test-engines` or pip install -e '.[transformers]'."
        )
