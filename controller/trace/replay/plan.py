"""Plans a replay: a trace's requests at its own times, with lengths that fit the engine."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from controller.trace.replay.request_bodies import PromptRecipe
from controller.trace.rows import TraceRow, bounded
from events.errors import UsageError

FACTOR_MAX = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayShape:
    """How a trace is changed for its replay. Raise UsageError if invalid."""

    speedup_ratio: float = 1.0  # divides the times
    scale_input: float = 1.0  # multiplies prompts and blocks, so that the shared part stays the same
    scale_output: float = 1.0
    max_isl: int | None = None  # longer prompts are cut at their end
    max_osl: int | None = None  # longer outputs are cut

    def __post_init__(self) -> None:
        for name in ("speedup_ratio", "scale_input", "scale_output"):
            if not 1 / FACTOR_MAX <= (value := getattr(self, name)) <= FACTOR_MAX:
                flag = name.replace("_", "-")
                raise UsageError(
                    f"--{flag} must be a number from {1 / FACTOR_MAX:g} to {FACTOR_MAX:g}, not {value:g}"
                )
        for name in ("max_isl", "max_osl"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UsageError(f"--{name.replace('_', '-')} {value}: expected a number of at least 1")


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One planned request."""

    at_s: float  # seconds from the first request
    prompt: PromptRecipe
    tokens: int  # tokens of its answer


def plan(rows: Iterable[TraceRow], block_tokens: int, shape: ReplayShape) -> Iterator[PlannedRequest]:
    """Yield the requests to send. Empty prompts and answers become one token, the minimum that endpoints accept.

    Raise UsageError if a length becomes too large.
    """
    block = max(1, round(block_tokens * shape.scale_input))
    began: float | None = None
    for number, row in enumerate(rows):
        began = row.timestamp if began is None else began
        tokens = max(1, round(row.output_length * shape.scale_output))
        yield PlannedRequest(
            (row.timestamp - began) / 1e3 / shape.speedup_ratio,
            _prompt(row, block_tokens, block, shape, f"request {number}"),
            bounded(tokens) if shape.max_osl is None else min(tokens, shape.max_osl),
        )


def _prompt(row: TraceRow, block_tokens: int, block: int, shape: ReplayShape, name: str) -> PromptRecipe:
    """Return a prompt with as many whole blocks as before."""
    if row.hash_ids:
        whole = len(row.hash_ids) - 1
        rest = row.input_length - whole * block_tokens
        length = whole * block + max(1, round(rest * block / block_tokens))
    else:
        length = max(1, round(row.input_length * shape.scale_input))
    if shape.max_isl is not None:
        length = min(length, shape.max_isl)
    return PromptRecipe(bounded(length), row.hash_ids[: -(-length // block)], block, name)
