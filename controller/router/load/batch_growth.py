"""Allowed growth of a step's duration with batch size, to compare latencies under different load."""

PER_DOUBLING = 1.5  # decoding is memory-bound, so a step's time grows more slowly than its batch
EXPONENT = 0.585  # log2(PER_DOUBLING)


def growth(running: float, compared_with: float) -> float:
    """Return the factor by which a step of `running` sequences may take longer than one of `compared_with`; at least 1."""
    factor: float = max(1.0, max(1.0, running) / max(1.0, compared_with)) ** EXPONENT
    return factor
