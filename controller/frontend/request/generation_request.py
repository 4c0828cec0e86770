"""What is asked of the workers for one answer."""

from typing import Any

import msgspec

from controller.frontend.request.routing_overrides import NO_OVERRIDES, RoutingOverrides
from controller.router.endpoints import Lineage
from events.blocks import BlockNames
from events.wire import Sampling


class GenerationRequest(
    msgspec.Struct, frozen=True, kw_only=True
):  # a frozen dataclass takes ten times as long to make
    """What is asked of the workers: the same on every attempt, but for what has been accepted already."""

    id: str
    model: str
    lineage: Lineage
    prompt: list[int]
    prompt_text: str  # empty if token ids were given
    sampling: Sampling
    guided: dict[str, Any] | None
    # The same tokens come from any healthy worker: greedy ones, or those of our own engines, whose random numbers
    # are named by the seed and the position. Other servers' random numbers begin anew with each request.
    deterministic: bool
    names: BlockNames  # of the prompt's blocks
    tier: str = "standard"
    priority: int = (
        0  # at the worker; 0 is the best, and everybody's where requests are not let in by deadlines
    )
    arrived: float | None = (
        None  # when, by the frontend's monotonic clock; None: when it was sent to a worker first
    )
    first_token_by: float | None = None  # by the same clock, where it was let in by a deadline
    cache_salt: str = ""
    overrides: RoutingOverrides = NO_OVERRIDES
    traceparent: str = (
        ""  # the client's trace: it goes to the workers, and onto the events about this request
    )

    @property
    def tokens_max(self) -> int:
        """The tokens of the prompt and of the longest answer: what a worker's context must hold."""
        return len(self.prompt) + self.sampling.max_tokens
