"""Formats a trace's statistics as text."""

from controller.trace.analysis import Analysis, Spread

COLUMNS = ("mean", "std dev", "min", "P25", "median", "P75", "P95", "max")
LABEL = 22
WIDTH = 11


def lines(name: str, found: Analysis) -> list[str]:
    """Return the statistics as lines of text: totals, then a table of distributions."""
    rate = "all at once" if found.rate is None else f"{found.rate:,.2f} a second"
    out = [f"{name}: {found.requests:,} requests in {found.seconds:,.0f} s, {rate}"]
    if found.hit_rate is None:
        out.append("No hash_ids: prefix sharing is unknown.")
    else:
        out.append(
            f"{found.blocks:,} distinct blocks of {found.block_tokens} tokens; "
            f"{found.shared_blocks:,} of them occur in more than one prompt"
        )
    out += ["", " " * LABEL + "".join(f"{column:>{WIDTH}}" for column in COLUMNS)]
    for label, spread, digits in (
        ("Input length", found.input_length, 0),
        ("Context length", found.context_length, 0),
        ("Unique prompt length", found.unique_length, 0),
        ("Output length", found.output_length, 0),
        ("Theoretical hit rate", found.hit_rate, 3),
    ):
        out.append(f"{label:<{LABEL}}" + _cells(spread, digits))
    return out


def _cells(spread: Spread | None, digits: int) -> str:
    if spread is None:
        return "".join(f"{'-':>{WIDTH}}" for _ in COLUMNS)
    values = (
        spread.mean,
        spread.std,
        spread.min,
        spread.p25,
        spread.median,
        spread.p75,
        spread.p95,
        spread.max,
    )
    return "".join(f"{value:>{WIDTH},.{digits}f}" for value in values)
