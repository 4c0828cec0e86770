"""Computes statistics of a trace: the lengths of prompts and answers, and the shared part of prompts.

Definitions, for one prompt:

    context      the prompt's leading blocks, as far as another prompt also has them; at most the whole prompt
    unique       the rest of the prompt, after the context
    hit rate     the fraction of the prompt's blocks that earlier prompts have left in a prefix cache of unlimited size
"""

from array import array
from collections.abc import Iterable
from dataclasses import astuple, dataclass

import numpy as np
import numpy.typing as npt

from controller.trace.rows import BLOCK_TOKENS, BadTrace, TraceRow
from controller.trace.tree import Refuse, Tree, accept

Numbers = npt.NDArray[np.float64]
_PERCENTILES = [0, 25, 50, 75, 95, 100]


@dataclass(frozen=True, slots=True)
class Spread:
    """The mean, the standard deviation and percentiles of one measured value."""

    mean: float
    std: float
    min: float
    p25: float
    median: float
    p75: float
    p95: float
    max: float


@dataclass(frozen=True, slots=True)
class Analysis:
    """The statistics of a trace. Lengths are in tokens, and the hit rate is a fraction.

    The values that are computed from hash ids are None if no request has hash ids.
    """

    requests: int
    seconds: float  # from the first request to the last
    rate: float | None  # requests per second; None if all requests arrived at the same time
    block_tokens: int
    blocks: int  # number of distinct blocks
    shared_blocks: int  # number of distinct blocks that more than one prompt has
    input_length: Spread
    context_length: Spread | None
    unique_length: Spread | None
    output_length: Spread
    hit_rate: Spread | None


@dataclass(frozen=True, slots=True)
class TraceMeasures:
    """The measured values of a trace: arrays with one item per request.

    The arrays that are computed from hash ids have items only for the requests with hash ids.
    """

    block_tokens: int
    blocks: int
    shared_blocks: int
    arrivals_s: Numbers
    input_length: Numbers
    context_length: Numbers
    unique_length: Numbers
    output_length: Numbers
    hit_rate: Numbers

    def analysis(self) -> Analysis:
        """Return the statistics of these values."""
        seconds = float(self.arrivals_s[-1] - self.arrivals_s[0])
        known = len(self.hit_rate) > 0
        return Analysis(
            requests=len(self.arrivals_s),
            seconds=seconds,
            rate=len(self.arrivals_s) / seconds if seconds else None,
            block_tokens=self.block_tokens,
            blocks=self.blocks,
            shared_blocks=self.shared_blocks,
            input_length=_spread(self.input_length),
            context_length=_spread(self.context_length) if known else None,
            unique_length=_spread(self.unique_length) if known else None,
            output_length=_spread(self.output_length),
            hit_rate=_spread(self.hit_rate) if known else None,
        )


def measure(
    rows: Iterable[TraceRow], block_tokens: int = BLOCK_TOKENS, *, refuse: Refuse | None = None
) -> TraceMeasures:
    """Measure all requests of a trace. Needs about 170 bytes of memory for each distinct block.

    If a request's hash ids contradict those of earlier requests, call `refuse` with the reason and leave the request out.
    Raise BadTrace instead if `refuse` is None. Raise BadTrace for a trace without a valid request, too.
    """
    tree = Tree(block_tokens)
    times, inputs, outputs, blocks, hits = array("d"), array("q"), array("q"), array("q"), array("q")
    for row in rows:
        if (known := accept(tree, row, refuse)) is None:
            continue
        times.append(row.timestamp / 1e3)
        inputs.append(row.input_length)
        outputs.append(row.output_length)
        blocks.append(len(row.hash_ids))
        hits.append(known)
    if not times:
        raise BadTrace("there is no request to analyze")
    shared_blocks, shared = tree.shared()
    length, has = _numbers(inputs), _numbers(blocks)
    context = np.minimum(_numbers(shared) * block_tokens, length)
    some = has > 0
    return TraceMeasures(
        block_tokens=block_tokens,
        blocks=tree.blocks,
        shared_blocks=shared_blocks,
        arrivals_s=_numbers(times),
        input_length=length,
        context_length=context[some],
        unique_length=(length - context)[some],
        output_length=_numbers(outputs),
        hit_rate=_numbers(hits)[some] / has[some],
    )


def analyze(rows: Iterable[TraceRow], block_tokens: int = BLOCK_TOKENS) -> Analysis:
    """Return a trace's statistics. Raise BadTrace if the trace is empty, or if its hash ids contradict one another."""
    return measure(rows, block_tokens).analysis()


def _numbers(values: Iterable[int] | Iterable[float]) -> Numbers:
    return np.array(values, dtype=np.float64)


def _spread(values: Numbers) -> Spread:
    low, quarter, median, three, most, high = np.percentile(values, _PERCENTILES)
    return Spread(*map(float, (values.mean(), values.std(), low, quarter, median, three, most, high)))


COLUMNS = ("mean", "std dev", "min", "P25", "median", "P75", "P95", "max")
LABEL = 22
WIDTH = 11


def lines(name: str, found: Analysis) -> list[str]:
    """Return the statistics `found` of the trace `name` as lines of text: totals, then a table of distributions."""
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
    return "".join(f"{value:>{WIDTH},.{digits}f}" for value in astuple(spread))
