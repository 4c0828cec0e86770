"""Plans a replay: when each request of a trace is sent, and with which prompt and answer lengths."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from controller.trace.replay.request_bodies import PromptRecipe
from controller.trace.rows import TraceRow, bounded
from events.errors import UsageError

FACTOR_MAX = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayShape:
    """The settings that change the times and lengths of a trace for its replay. Raise UsageError if a value is invalid."""

    speedup_ratio: float = 1.0  # divisor of the times
    scale_input: float = 1.0  # factor on prompts and blocks, so that their shared share stays the same
    scale_output: float = 1.0  # factor on the length of answers
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
    """One request of a replay: its time, its prompt, and the length of its answer."""

    at_s: float  # seconds from the first request
    prompt: PromptRecipe
    tokens: int  # tokens to request for the answer


def plan(rows: Iterable[TraceRow], block_tokens: int, shape: ReplayShape) -> Iterator[PlannedRequest]:
    """Yield the requests to send, in order of time. `block_tokens` is the block size of the trace.

    An empty prompt or answer gets one token, the minimum that endpoints accept. Raise UsageError if a length becomes too large.
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
    """Return the recipe of a row's prompt. If the row has hash ids, the recipe keeps the prompt's number of blocks.

    A block has `block_tokens` tokens in the trace, and `block` tokens in the recipe. A prompt longer than `max_isl` tokens is
    cut at its end.
    """
    if row.hash_ids:
        whole = len(row.hash_ids) - 1
        rest = row.input_length - whole * block_tokens
        length = whole * block + max(1, round(rest * block / block_tokens))
    else:
        length = max(1, round(row.input_length * shape.scale_input))
    if shape.max_isl is not None:
        length = min(length, shape.max_isl)
    return PromptRecipe(bounded(length), row.hash_ids[: -(-length // block)], block, name)
