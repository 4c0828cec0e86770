"""Which part of an answer is a thought? What Dynamo's mocker calls `reasoning`: two tokens that mark where it begins and ends."""

from typing import Annotated

import msgspec
from msgspec import Meta

from events.errors import UsageError
from workers.engines.simulated.language import VOCABULARY

TokenId = Annotated[int, Meta(ge=0, lt=VOCABULARY)]


class BadReasoning(UsageError):
    """It is not said how the simulated engine shall think."""


class Reasoning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How an engine thinks."""

    start_thinking_token_id: TokenId
    end_thinking_token_id: TokenId
    thinking_ratio: Annotated[float, Meta(ge=0, le=1)]

    def tokens(self, answer: int) -> int:
        """Return how many tokens of an answer of so many are thought, both marks among them: their share, and the two at
        least, but none of an answer too short for them, or of a share below one token."""
        share = int(answer * self.thinking_ratio)
        return max(2, share) if share and answer > 1 else 0


def read(text: str) -> Reasoning:
    """Return what a JSON object says. Raise BadReasoning."""
    try:
        return msgspec.json.decode(text, type=Reasoning)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadReasoning(f"reasoning = {text}: {error}") from error
