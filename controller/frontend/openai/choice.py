"""One answer of a request: its request, its writer and its outcome."""

from collections.abc import Sequence
from typing import Any

import msgspec

from controller.frontend.errors import ApiError
from controller.frontend.request.state import GenerationRequest
from controller.router.endpoints import Endpoint
from events.wire import Logprob


class ResponseWriter:
    """Accepts the tokens of one answer and discards them. Subclasses write them for a client."""

    __slots__ = ()
    stopped = False  # a stop string has been reached
    reached = 0  # tokens that the client may already have received

    def write(self, tokens: Sequence[int], logprobs: Sequence[Logprob] | None) -> int:
        """Accept tokens and return how many of them were used: a stop string among them may end the answer.

        Raise InvalidOutput if a token is outside the vocabulary; then no token is written.
        """
        return len(tokens)

    def write_text(self, text: str, tokens: int) -> None:
        """Accept text that the engine returned without tokens. `tokens`: the number of tokens that the text counts as."""

    def finish(self, reason: str) -> None:
        """Write the remaining text and the end of the answer. `reason`: OpenAI's finish_reason."""

    def flush(self) -> None:
        """Send the output of one turn of the event loop."""

    def keep_alive(self) -> None:
        """Send a comment, so that no proxy or client closes the connection as idle."""

    def rewind(self, count: int) -> None:
        """Drop all tokens after the first `count`; the client has received none of them."""


class Choice(msgspec.Struct, eq=False):
    """One answer of a request."""

    request: GenerationRequest
    writer: ResponseWriter
    migration_limit: int = 3  # attempts beyond the first
    forbidden: str = ""  # why the request may not move once its client has a token
    accepted: list[int] = []  # tokens
    number: int = 0  # of the live request
    cached_tokens: int | None = None  # of the prompt, at the first worker that reports it
    endpoint: Endpoint | None = None  # the current worker, or the last one
    explained: dict[str, Any] | None = None  # why its first worker was chosen, if the client requested that
    finish: str | None = None
    error: ApiError | None = None

    def __repr__(self) -> str:
        """Return a representation without client content, because it may appear in logs."""
        return f"<Choice of {self.request.id}>"
