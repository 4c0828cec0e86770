"""The reasoning part of a simulated answer, as in Dynamo's mocker: delimited by two tokens."""

from typing import Annotated

import msgspec
from msgspec import Meta

from events.errors import UsageError
from workers.engines.simulated.language import VOCABULARY

TokenId = Annotated[int, Meta(ge=0, lt=VOCABULARY)]


class BadReasoning(UsageError):
    """The setting does not describe how the simulated engine reasons."""


class Reasoning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The two delimiter tokens, and the share of an answer that is reasoning."""

    start_thinking_token_id: TokenId
    end_thinking_token_id: TokenId
    thinking_ratio: Annotated[float, Meta(ge=0, le=1)]

    def tokens(self, answer: int) -> int:
        """Return how many of the answer's tokens are reasoning, both delimiters included.

        The number follows from the configured share, and includes at least the two delimiters. It is 0 if the answer is too short
        for them, or if the share is below one token.
        """
        share = int(answer * self.thinking_ratio)
        return max(2, share) if share and answer > 1 else 0


def read(text: str) -> Reasoning:
    """Parse a JSON object. Raise BadReasoning."""
    try:
        return msgspec.json.decode(text, type=Reasoning)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadReasoning(f"reasoning = {text}: {error}") from error
