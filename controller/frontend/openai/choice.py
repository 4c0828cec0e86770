"""One answer of a request: its request, its writer and its outcome."""

from collections.abc import Sequence
from typing import Any

import msgspec

from controller.frontend.errors import ApiError
from controller.frontend.request.state import GenerationRequest
from controller.router.endpoints import Endpoint
from events.wire import Logprob


class ResponseWriter:
    """Takes the tokens of one answer and discards them. Subclasses write them for a client."""

    __slots__ = ()
    stopped = False  # a stop string has been reached
    reached = 0  # tokens that the client may have seen already

    def write(self, tokens: Sequence[int], logprobs: Sequence[Logprob] | None) -> int:
        """Take tokens and return how many of them were used: a stop string may end the answer among them. Raise InvalidOutput if
        one is outside the vocabulary: none of them is written."""
        return len(tokens)

    def write_text(self, text: str, tokens: int) -> None:
        """Take a text that came without tokens; it counts as so many."""

    def finish(self, reason: str) -> None:
        """Write what is left, and why the answer ends: `reason` is OpenAI's finish_reason."""

    def flush(self) -> None:
        """Send what one turn of the loop has brought."""

    def keep_alive(self) -> None:
        """Send a comment, so that the client does not take the connection for idle."""

    def rewind(self, count: int) -> None:
        """Forget all tokens after the first `count`, none of which the client has seen."""


class Choice(msgspec.Struct, eq=False):
    """One answer of a request."""

    request: GenerationRequest
    writer: ResponseWriter
    migration_limit: int = 3  # attempts beyond the first
    forbidden: str = ""  # why it may not move once its client has a token
    accepted: list[int] = []  # tokens
    number: int = 0  # of the live request
    cached_tokens: int | None = None  # of the prompt, at the first worker that reports it
    endpoint: Endpoint | None = None  # the worker that it is with, or was with last
    explained: dict[str, Any] | None = None  # why its first worker was chosen, if that was asked
    finish: str | None = None
    error: ApiError | None = None

    def __repr__(self) -> str:
        """Name the request. No log holds what a client has said."""
        return f"<Choice of {self.request.id}>"
