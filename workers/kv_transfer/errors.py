"""What goes wrong with a transfer, as its source sees it."""

from events.errors import HoldfastError


class TransferFailed(HoldfastError):
    """The KV cache could not be transferred. The stream continues by re-prefill, or where it is."""


class RegionTaken(HoldfastError):
    """Another live process serves this instance's KV regions. Every instance needs its own name."""
