"""A uvloop that reports what a test has left open, instead of waiting for it.

When a loop closes, it warns of everything that is open, and closes it. Where warnings are errors it stops at the warning, and
waits for the rest to be closed: forever, and in C, where no timeout of a test reaches it.
"""

import warnings

import uvloop


class ClosingLoop(uvloop.Loop):
    """One loop."""

    def close(self) -> None:
        """Close everything that is open. Raise ResourceWarning if there was anything."""
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            super().close()
        for one in said:
            if issubclass(one.category, ResourceWarning):
                raise ResourceWarning(str(one.message))
